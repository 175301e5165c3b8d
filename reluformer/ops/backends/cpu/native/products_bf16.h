// Matrix products of bfloat16 tiles, in the best way that the processor has: on AMX tiles, by dot
// products of pairs (AVX-512 BF16), or on vectors of float32 into which the tables are widened once.
#pragma once

#include "products.h"

#if defined(__AMX_BF16__) && defined(__AVX512BF16__) && defined(__linux__)
#define HAVE_AMX 1
#include <sys/syscall.h>
#include <unistd.h>
#endif

// How bfloat16 tables are multiplied, as `bf16_products` reports it.
enum Bf16Products { NONE, WIDENED, PAIRS, AMX };

#if defined(__AVX512BF16__)
// Tables of bfloat16 whose packed form [K / 2, N, 2] alternates two rows, as dot products and AMX
// tiles need it.
struct PairTables {
  using Word = bf16;

  static void pack_transpose(bf16* to, Packed shape, const bf16* from, int64_t stride,
                             int64_t count, int64_t width) {
    // Two neighbouring elements form a word: for an even width this transposes words.
    if (width % 2 == 0 && stride % 2 == 0 && shape.height % (2 * LANES) == 0) {
      flip((float*)to, {shape.ld, shape.height / 2, shape.span}, (const float*)from, stride / 2,
           count, width / 2);
      return;
    }
    for (int64_t e = 0; e < shape.height; e++)
      for (int64_t i = 0; i < shape.span; i++)
        to[(e / 2 * shape.ld + i) * 2 + e % 2] = i < count && e < width ? from[i * stride + e] : 0;
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

#if defined(HAVE_AMX)
template <>
struct Products<bf16> : PairTables {
  static constexpr int64_t UNIT = 32, HEIGHT = 32, EDGE = 32;
  static constexpr bool IN_REGISTERS = false;
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

  static Bf16Products kind() {
    constexpr int REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;
    return syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0 ? AMX : NONE;
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

  [[gnu::noinline]] static void product(int64_t M, int64_t N, int64_t K, const bf16* a, int64_t lda,
                                        const bf16* b, float* c, int64_t ldc, bool add,
                                        int64_t ldb) {
    for (int64_t i = 0; i < M; i += UNIT)
      for (int64_t j = 0; j < N; j += UNIT)
        square(K, a + i * lda, lda, b + 2 * j, ldb, c + i * ldc + j, ldc, add);
  }

  // Tiles are rows of A: pairs of its elements are transposed into `room` [M, K].
  static void add_flipped(int64_t M, int64_t N, int64_t K, const bf16* a, int64_t lda,
                          const bf16* b, float* c, int64_t ldc, int64_t ldb, bf16* room) {
    flip((float*)room, {K / 2, M, K / 2}, (const float*)a, lda, K / 2, M);
    product(M, N, K, room, K, b, c, ldc, true, ldb);
  }
};
#elif defined(__AVX512BF16__)
template <>
struct Products<bf16> : PairTables {
  static constexpr int64_t UNIT = LANES, HEIGHT = TALL, EDGE = 2;
  static constexpr bool IN_REGISTERS = true;
  static constexpr int64_t KEYS = 64, ROWS = 48, BACK_KEYS = 48, BACK_ROWS = 64;

  struct Session {
    Session() {}
  };

  static Bf16Products kind() { return PAIRS; }

  static void product(int64_t M, int64_t N, int64_t K, const bf16* a, int64_t lda, const bf16* b,
                      float* c, int64_t ldc, bool add, int64_t ldb) {
    vector_product(M, N, K, a, lda, b, c, ldc, add, ldb);
  }

  static void add_flipped(int64_t M, int64_t N, int64_t K, const bf16* a, int64_t lda,
                          const bf16* b, float* c, int64_t ldc, int64_t ldb, bf16*) {
    vector_product<true>(M, N, K, a, lda, b, c, ldc, true, ldb);
  }
};
#else
// Tables are widened when they are packed, so that products and weights are those of float32.
template <>
struct Products<bf16> : Products<float> {
  static Bf16Products kind() { return WIDENED; }

  static vec rectified(vec x) { return x > 0 ? x : vec{}; }
};
#endif
