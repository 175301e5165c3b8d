// Matrix products of tiles that stay in the cache, of float32 on vectors; `products_bf16.h` adds those
// of bfloat16.
//
// A product is C (+)= A B with row-major A [M, K] and C in float32. B is packed: row-major [K, N] for
// float32; pairs of bfloat16 rows alternate, [K / 2, N, 2]. Packed sizes are multiples of `UNIT`,
// padded with zeros.
#pragma once

#include "vectors.h"

#include <algorithm>

#if defined(__AVX512BF16__)
#include <immintrin.h>
#endif

inline int64_t up_to(int64_t size, int64_t unit) { return (size + unit - 1) / unit * unit; }

// Copies the rows of a strided table, with zeros up to `height` rows of `ld`; `To` may be wider.
template <class To, class From>
inline void copy(To* to, int64_t ld, const From* from, int64_t stride, int64_t count, int64_t height,
                 int64_t width) {
  for (int64_t i = 0; i < height; i++) {
    int64_t held = i < count ? width : 0;
    if constexpr (std::is_same_v<To, From>) {
      memcpy(to + i * ld, from + i * stride, held * sizeof(To));
    } else {
      for (int64_t e = 0; e < held; e++) to[i * ld + e] = wide(from[i * stride + e]);
    }
    memset(to + i * ld + held, 0, (ld - held) * sizeof(To));
  }
}

// Table of `height` rows that pack_transpose writes: `span` columns of them, `ld` elements apart.
struct Packed {
  int64_t ld, height, span;
};

// to [height, span] = transpose of from [count, width], widened to words of four bytes, with zeros
// beyond it. Height and span are multiples of LANES.
template <class From>
[[gnu::noinline]] inline void flip(float* to, Packed shape, const From* from, int64_t stride,
                                   int64_t count, int64_t width) {
  for (int64_t i = 0; i < shape.span; i += LANES)
    for (int64_t e = 0; e < shape.height; e += LANES) {
      vec rows[LANES];
      int64_t left = width - e;
      for (int r = 0; r < LANES; r++) {
        const From* row = from + (i + r) * stride + e;
        rows[r] = vec{};
        if (i + r >= count) continue;
        if (left >= LANES) rows[r] = load_wide(row);
        else
          for (int64_t c = 0; c < left; c++) rows[r][c] = wide(row[c]);
      }
      transpose(rows);
      for (int r = 0; r < LANES; r++) store(to + (e + r) * shape.ld + i, rows[r]);
    }
}

// Rows and vectors of C that fit into registers beside a row of B.
#if defined(__AVX__) && !defined(__AVX512F__)
constexpr int TALL = 6, BROAD = 2;
#else
constexpr int TALL = 6, BROAD = 4;
#endif

// c + a b: of one step along K with a float32, of two with a pair of bfloat16.
inline vec multiply_add(vec c, const float* a, vec b) { return c + *a * b; }
#if defined(__AVX512BF16__)
inline vec multiply_add(vec c, const bf16* a, vec b) {
  int32_t pair;
  memcpy(&pair, a, sizeof pair);
  return (vec)_mm512_dpbf16_ps((__m512)c, (__m512bh)_mm512_set1_epi32(pair), (__m512bh)b);
}
#endif

// held += A B: M rows and N vectors of a product, in registers. A may be FLIPPED, i.e. [K, M], and for
// bfloat16 [K / 2, M, 2].
template <bool FLIPPED = false, int M, int N, class T>
inline void accumulate(vec (&held)[M][N], int64_t K, const T* a, int64_t lda, const T* b,
                       int64_t ldb) {
  constexpr int STEP = sizeof(float) / sizeof(T);
  for (int64_t k = 0; k < K; k += STEP) {
    vec row[N];
    for (int j = 0; j < N; j++) row[j] = load(b + k * ldb + j * LANES * STEP);
    for (int i = 0; i < M; i++) {
      const T* left = FLIPPED ? a + k * lda + i * STEP : a + i * lda + k;
      for (int j = 0; j < N; j++) held[i][j] = multiply_add(held[i][j], left, row[j]);
    }
  }
}

template <bool FLIPPED, int M, int N, class T>
inline void block(int64_t K, const T* a, int64_t lda, const T* b, int64_t ldb, float* c,
                  int64_t ldc, bool add) {
  vec held[M][N];
  for (int i = 0; i < M; i++)
    for (int j = 0; j < N; j++) held[i][j] = add ? load(c + i * ldc + j * LANES) : vec{};
  accumulate<FLIPPED>(held, K, a, lda, b, ldb);
  for (int i = 0; i < M; i++)
    for (int j = 0; j < N; j++) store(c + i * ldc + j * LANES, held[i][j]);
}

// A block of at most M rows.
template <bool FLIPPED, int M, int N, class... Rest>
inline void block_of(int64_t height, Rest... rest) {
  if constexpr (M > 0) {
    if (height == M) return block<FLIPPED, M, N>(rest...);
    block_of<FLIPPED, M - 1, N>(height, rest...);
  }
}

// N vectors of all rows, in blocks of nearly the same height: low ones would wait for their sums.
template <bool FLIPPED, int N, class T>
inline void strip(int64_t M, int64_t K, const T* a, int64_t lda, const T* b, int64_t ldb, float* c,
                  int64_t ldc, bool add) {
  constexpr int STEP = sizeof(float) / sizeof(T);
  // Of the blocks, `low` have one row less than the others.
  int64_t blocks = (M + TALL - 1) / TALL, most = (M + blocks - 1) / blocks, low = blocks * most - M;
  for (int64_t i = 0; i < M;) {
    int64_t height = blocks-- <= low ? most - 1 : most;
    block_of<FLIPPED, TALL, N>(height, K, a + i * (FLIPPED ? STEP : lda), lda, b, ldb, c + i * ldc,
                               ldc, add);
    i += height;
  }
}

// C [M, N] (+)= A [M, K] B on vectors; M is positive, N a multiple of LANES, and K even for bfloat16.
template <bool FLIPPED = false, class T>
[[gnu::noinline]] void vector_product(int64_t M, int64_t N, int64_t K, const T* a, int64_t lda,
                                      const T* b, float* c, int64_t ldc, bool add, int64_t ldb) {
  constexpr int STEP = sizeof(float) / sizeof(T);
  int64_t j = 0;
  auto strips = [&](auto count) {
    for (; j + count * LANES <= N; j += count * LANES)
      strip<FLIPPED, count>(M, K, a, lda, b + j * STEP, ldb, c + j, ldc, add);
  };
  strips(std::integral_constant<int, BROAD>());
  if constexpr (BROAD > 2) strips(std::integral_constant<int, 2>());
  strips(std::integral_constant<int, 1>());
}

template <class T>
struct Products;

template <>
struct Products<float> {
  // Elements of the packed tables.
  using Word = float;
  static constexpr int64_t UNIT = LANES;
  // M and K of a product, which may be smaller than the packed sizes, are multiples of this.
  static constexpr int64_t EDGE = 2;
  // Rows of a product, in whose registers its results can be used.
  static constexpr int64_t HEIGHT = TALL;
  static constexpr bool IN_REGISTERS = true;
  // Keys and rows of a tile, forward and backward.
  static constexpr int64_t KEYS = 64, ROWS = 48, BACK_KEYS = 48, BACK_ROWS = 64;

  // Float32 needs no setup; the empty constructor avoids a warning about an unused variable.
  struct Session {
    Session() {}
  };

  static void product(int64_t M, int64_t N, int64_t K, const float* a, int64_t lda, const float* b,
                      float* c, int64_t ldc, bool add, int64_t ldb) {
    vector_product(M, N, K, a, lda, b, c, ldc, add, ldb);
  }

  // C += A B with a FLIPPED A, as `put_pair` writes it.
  static void add_flipped(int64_t M, int64_t N, int64_t K, const float* a, int64_t lda,
                          const float* b, float* c, int64_t ldc, int64_t ldb, float*) {
    vector_product<true>(M, N, K, a, lda, b, c, ldc, true, ldb);
  }

  // B for products with the transpose of these rows.
  template <class From>
  static void pack_transpose(float* to, Packed shape, const From* from, int64_t stride,
                             int64_t count, int64_t width) {
    flip(to, shape, from, stride, count, width);
  }

  // B for products with these rows: [height, ld].
  template <class From>
  static void pack(float* to, int64_t ld, const From* from, int64_t stride, int64_t count,
                   int64_t height, int64_t width) {
    copy(to, ld, from, stride, count, height, width);
  }

  static vec rectified(vec x) { return x < 0 ? vec{} : x; }
  static void put(float* to, vec x) { store(to, x); }
  // Lanes of two neighbouring rows of a packed B.
  static void put_pair(float* to, int64_t ld, vec x, vec y) {
    store(to, x);
    store(to + ld, y);
  }
};
