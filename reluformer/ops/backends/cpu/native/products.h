// Matrix products of tiles that stay in the cache: float32 on vectors, bfloat16 on AMX.
//
// A product is C (+)= A B with row-major A [M, K] and C in float32. B is packed: row-major [K, N]
// for float32; for AMX two rows of B alternate, [K / 2, N, 2], which is the layout of its tiles. Packed
// sizes are multiples of `UNIT`, padded with zeros.
#pragma once

#include "vectors.h"

#include <algorithm>

#if defined(__AMX_BF16__) && defined(__AVX512BF16__) && defined(__linux__)
#define HAVE_AMX 1
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

inline int64_t up_to(int64_t size, int64_t unit) { return (size + unit - 1) / unit * unit; }

// Copies the rows of a strided table, with zeros up to `height` rows of `ld`.
template <class T>
inline void copy(T* to, int64_t ld, const T* from, int64_t stride, int64_t count, int64_t height,
                 int64_t width) {
  for (int64_t i = 0; i < height; i++) {
    int64_t held = i < count ? width : 0;
    memcpy(to + i * ld, from + i * stride, held * sizeof(T));
    memset(to + i * ld + held, 0, (ld - held) * sizeof(T));
  }
}

// to [height, ld] = transpose of from [count, width], in words of four bytes.
[[gnu::noinline]] inline void flip(float* to, int64_t ld, const float* from, int64_t stride,
                                   int64_t count, int64_t width, int64_t height) {
  for (int64_t i = 0; i < ld; i += LANES)
    for (int64_t e = 0; e < height; e += LANES) {
      if (i + LANES <= count && e + LANES <= width) {
        vec rows[LANES];
        for (int r = 0; r < LANES; r++) rows[r] = load(from + (i + r) * stride + e);
        transpose(rows);
        for (int r = 0; r < LANES; r++) store(to + (e + r) * ld + i, rows[r]);
        continue;
      }
      for (int64_t r = i; r < std::min(i + LANES, ld); r++)
        for (int64_t c = e; c < std::min(e + LANES, height); c++)
          to[c * ld + r] = r < count && c < width ? from[r * stride + c] : 0;
    }
}

// Rows and vectors of C that fit into registers beside a row of B.
#if defined(__AVX__) && !defined(__AVX512F__)
constexpr int TALL = 6, BROAD = 2;
#else
constexpr int TALL = 6, BROAD = 4;
#endif

template <int M, int N>
inline void block(int64_t K, const float* a, int64_t lda, const float* b, int64_t ldb, float* c,
                  int64_t ldc, bool add) {
  vec held[M][N];
  for (int i = 0; i < M; i++)
    for (int j = 0; j < N; j++) held[i][j] = add ? load(c + i * ldc + j * LANES) : vec{};
  for (int64_t k = 0; k < K; k++) {
    vec row[N];
    for (int j = 0; j < N; j++) row[j] = load(b + k * ldb + j * LANES);
    for (int i = 0; i < M; i++)
      for (int j = 0; j < N; j++) held[i][j] += a[i * lda + k] * row[j];
  }
  for (int i = 0; i < M; i++)
    for (int j = 0; j < N; j++) store(c + i * ldc + j * LANES, held[i][j]);
}

// The rows that remain after blocks of full height.
template <int M, int N>
inline void rest(int64_t left, int64_t K, const float* a, int64_t lda, const float* b, int64_t ldb,
                 float* c, int64_t ldc, bool add) {
  if constexpr (M > 0) {
    if (left == M) return block<M, N>(K, a, lda, b, ldb, c, ldc, add);
    rest<M - 1, N>(left, K, a, lda, b, ldb, c, ldc, add);
  }
}

template <int N>
inline void strip(int64_t M, int64_t K, const float* a, int64_t lda, const float* b, int64_t ldb,
                  float* c, int64_t ldc, bool add) {
  int64_t i = 0;
  for (; i + TALL <= M; i += TALL)
    block<TALL, N>(K, a + i * lda, lda, b, ldb, c + i * ldc, ldc, add);
  rest<TALL - 1, N>(M - i, K, a + i * lda, lda, b, ldb, c + i * ldc, ldc, add);
}

template <class T>
struct Products;

template <>
struct Products<float> {
  static constexpr int64_t UNIT = LANES;
  // Keys and rows of a tile, forward and backward.
  static constexpr int64_t KEYS = 64, ROWS = 48, BACK_KEYS = 48, BACK_ROWS = 64;

  // Float32 needs no setup; the empty constructor avoids a warning about an unused variable.
  struct Session {
    Session() {}
  };

  [[gnu::noinline]] static void product(int64_t M, int64_t N, int64_t K, const float* a, int64_t lda, const float* b,
                      float* c, int64_t ldc, bool add, int64_t ldb) {
    int64_t j = 0;
    for (; j + BROAD * LANES <= N; j += BROAD * LANES)
      strip<BROAD>(M, K, a, lda, b + j, ldb, c + j, ldc, add);
    for (; j < N; j += LANES) strip<1>(M, K, a, lda, b + j, ldb, c + j, ldc, add);
  }

  // B for products with the transpose of these rows: [width, ld].
  static void pack_transpose(float* to, int64_t ld, const float* from, int64_t stride,
                             int64_t count, int64_t width) {
    flip(to, ld, from, stride, count, width, up_to(width, UNIT));
  }

  // B for products with these rows: [height, ld].
  static void pack(float* to, int64_t ld, const float* from, int64_t stride, int64_t count,
                   int64_t height, int64_t width) {
    copy(to, ld, from, stride, count, height, width);
  }

  // A: the transpose of packed rows, [width, ld].
  static const float* unpack_transpose(float*, const float* packed, int64_t, int64_t) {
    return packed;
  }

  static vec rectified(vec x) { return x < 0 ? vec{} : x; }
  static void put(float* to, vec x) { store(to, x); }
  // Lanes of two neighbouring rows of a packed B.
  static void put_pair(float* to, int64_t ld, vec x, vec y) {
    store(to, x);
    store(to + ld, y);
  }
};

#ifdef HAVE_AMX
template <>
struct Products<bf16> {
  static constexpr int64_t UNIT = 32;
  static constexpr int64_t KEYS = 128, ROWS = 64, BACK_KEYS = 64, BACK_ROWS = 128;

  // Configures the AMX tiles of a thread and releases them afterwards.
  struct Session {
    Session() {
      struct alignas(64) {
        uint8_t palette = 1, start = 0, reserved[14] = {};
        uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
        uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
      } shape;
      _tile_loadconfig(&shape);
    }
    ~Session() { _tile_release(); }
  };

  static bool allowed() {
    constexpr int REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;
    return syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
  }

  static void square(int64_t K, const bf16* a, int64_t lda, const bf16* b, int64_t ldb, float* c,
                     int64_t ldc, bool add) {
    float* below = c + 16 * ldc;
    if (add) {
      _tile_loadd(0, c, ldc * 4);
      _tile_loadd(1, c + 16, ldc * 4);
      _tile_loadd(2, below, ldc * 4);
      _tile_loadd(3, below + 16, ldc * 4);
    } else {
      _tile_zero(0);
      _tile_zero(1);
      _tile_zero(2);
      _tile_zero(3);
    }
    for (int64_t k = 0; k < K; k += 32) {
      _tile_loadd(4, a + k, lda * 2);
      _tile_loadd(6, b + k * ldb, ldb * 4);
      _tile_loadd(7, b + k * ldb + 32, ldb * 4);
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(1, 4, 7);
      _tile_loadd(5, a + 16 * lda + k, lda * 2);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, c, ldc * 4);
    _tile_stored(1, c + 16, ldc * 4);
    _tile_stored(2, below, ldc * 4);
    _tile_stored(3, below + 16, ldc * 4);
  }

  [[gnu::noinline]] static void product(int64_t M, int64_t N, int64_t K, const bf16* a, int64_t lda, const bf16* b,
                      float* c, int64_t ldc, bool add, int64_t ldb) {
    for (int64_t i = 0; i < M; i += UNIT)
      for (int64_t j = 0; j < N; j += UNIT)
        square(K, a + i * lda, lda, b + 2 * j, ldb, c + i * ldc + j, ldc, add);
  }

  static void pack_transpose(bf16* to, int64_t ld, const bf16* from, int64_t stride,
                             int64_t count, int64_t width) {
    // Two neighbouring elements form a word: for an even width this transposes words.
    if (width % 2 == 0 && stride % 2 == 0) {
      flip((float*)to, ld, (const float*)from, stride / 2, count, width / 2,
           up_to(width, UNIT) / 2);
      return;
    }
    for (int64_t e = 0; e < up_to(width, UNIT); e++)
      for (int64_t i = 0; i < ld; i++)
        to[(e / 2 * ld + i) * 2 + e % 2] = i < count && e < width ? from[i * stride + e] : 0;
  }

  static void pack(bf16* to, int64_t ld, const bf16* from, int64_t stride, int64_t count,
                   int64_t height, int64_t width) {
    for (int64_t i = 0; i < height; i += 2) {
      const bf16 *even = from + i * stride, *odd = even + stride;
      bf16* pair = to + i * ld;
      int64_t both = i + 1 < count ? width : 0, one = i < count ? width : 0;
      for (int64_t e = 0; e < both; e++) pair[2 * e] = even[e], pair[2 * e + 1] = odd[e];
      for (int64_t e = both; e < ld; e++) pair[2 * e] = e < one ? even[e] : 0, pair[2 * e + 1] = 0;
    }
  }

  static const bf16* unpack_transpose(bf16* to, const bf16* packed, int64_t ld, int64_t width) {
    for (int64_t e = 0; e < width; e += 2)
      for (int64_t i = 0; i < ld; i++) {
        to[e * ld + i] = packed[e * ld + 2 * i];
        to[(e + 1) * ld + i] = packed[e * ld + 2 * i + 1];
      }
    return to;
  }

  static vec rectified(vec x) { return x > 0 ? x : vec{}; }
  static void put(bf16* to, vec x) {
    auto half = _mm512_cvtneps_pbh((__m512)x);
    memcpy(to, &half, sizeof half);
  }
  static void put_pair(bf16* to, int64_t, vec x, vec y) {
    auto even = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh((__m512)x));
    auto odd = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh((__m512)y));
    store(to, (vec)_mm512_or_si512(even, _mm512_slli_epi32(odd, 16)));
  }
};
#endif
