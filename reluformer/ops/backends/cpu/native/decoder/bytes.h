// Products of a few rows with packed tables of int8. All sums are exact integers.
//
// Rows of activations are scaled to [-127, 127] and rounded. A dense table is packed in panels
// [inputs / 4, COLUMNS, 4] of COLUMNS outputs for instructions that add four products at once.
#pragma once

#include "floats.h"

#include <cmath>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__ARM_FEATURE_DOTPROD)
#include <arm_neon.h>
#endif

typedef int8_t bytes __attribute__((vector_size(LANES * 4)));

// VNNI multiplies unsigned by signed bytes: OFFSET makes activations unsigned, and its share of the
// sums is subtracted in the end.
#if defined(__AVX512VNNI__) || (defined(__AVXVNNI__) && !defined(__AVX512F__))
constexpr int OFFSET = 128;
#else
constexpr int OFFSET = 0;
#endif

// total + products of four neighbouring bytes in each lane. Both factors are in [-127, 127], or x
// has OFFSET added.
inline ints add_products(ints total, ints x, ints w) {
#if defined(__AVX512VNNI__)
  return (ints)_mm512_dpbusd_epi32((__m512i)total, (__m512i)x, (__m512i)w);
#elif defined(__AVX512BW__)
  // The sign of x moves to w, because one factor must be unsigned. Two products fit int16.
  __m512i a = (__m512i)x, b = (__m512i)w;
  b = _mm512_mask_sub_epi8(b, _mm512_movepi8_mask(a), _mm512_setzero_si512(), b);
  __m512i pairs = _mm512_maddubs_epi16(_mm512_abs_epi8(a), b);
  return total + (ints)_mm512_madd_epi16(pairs, _mm512_set1_epi16(1));
#elif defined(__AVXVNNI__) && defined(__AVX2__) && !defined(__AVX512F__)
  return (ints)_mm256_dpbusd_avx_epi32((__m256i)total, (__m256i)x, (__m256i)w);
#elif defined(__AVX2__) && !defined(__AVX512F__)
  __m256i a = (__m256i)x, b = _mm256_sign_epi8((__m256i)w, (__m256i)x);
  __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(a), b);
  return total + (ints)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
#elif defined(__ARM_FEATURE_DOTPROD)
  return (ints)vdotq_s32((int32x4_t)total, (int8x16_t)x, (int8x16_t)w);
#else
  bytes a = (bytes)x, b = (bytes)w;
  for (int i = 0; i < LANES * 4; i++) total[i / 4] += int(a[i]) * int(b[i]);
  return total;
#endif
}

// Scales a row to [-127, 127] and rounds it, plus `offset`; returns the scale that undoes it. The row
// is padded with zeros to a multiple of LANES.
inline float quantise(const float* x, int64_t count, uint8_t* to, int offset) {
  typedef uint8_t narrow_bytes __attribute__((vector_size(LANES)));
  vec largest{};
  for (int64_t i = 0; i < count; i += LANES) {
    vec size = (vec)((bits)load(x + i) & 0x7fffffffu);
    largest = size > largest ? size : largest;
  }
  float most = 0;
  for (int i = 0; i < LANES; i++) most = std::max(most, largest[i]);
  float scale = most > 0 ? 127 / most : 0;
  for (int64_t i = 0; i < count; i += LANES) {
    // Adding 1.5 * 2^23 rounds to the nearest integer, ties to even.
    vec rounded = (load(x + i) * scale + 12582912.0f) - 12582912.0f;
    narrow_bytes packed = __builtin_convertvector(__builtin_convertvector(rounded, ints) + offset,
                                                  narrow_bytes);
    memcpy(to + i, &packed, sizeof packed);
  }
  return most / 127;
}

// Packs rows [columns, inputs] in a dense panel, and the sums of its rows.
inline void pack_dense_bytes(int8_t* to, int32_t* sums, const int8_t* from, int64_t inputs,
                             int64_t columns) {
  memset(to, 0, divide_up(inputs, 4) * COLUMNS * 4);
  for (int64_t c = 0; c < columns; c++) {
    int32_t sum = 0;
    for (int64_t i = 0; i < inputs; i++) {
      int8_t weight = from[c * inputs + i];
      to[(i / 4 * COLUMNS + c) * 4 + i % 4] = weight;
      sum += weight;
    }
    sums[c] = sum;
  }
}

// held [R, COLUMNS] += x [R, 4] times four interleaved rows of a panel.
template <int R>
inline void add_block(const uint8_t* x, int64_t stride, const ints (&w)[VECS],
                      ints (&held)[R][VECS]) {
#pragma GCC unroll 8
  for (int r = 0; r < R; r++) {
    int32_t four;
    memcpy(&four, x + r * stride, 4);
#pragma GCC unroll 8
    for (int v = 0; v < VECS; v++) held[r][v] = add_products(held[r][v], four + ints{}, w[v]);
  }
}

// total [R, COLUMNS] = x [R, 4 quads] times a dense panel.
template <int R>
KERNEL multiply_dense_bytes(const uint8_t* x, int64_t stride, const int8_t* panel,
                                 int64_t quads, ints (&total)[R][VECS]) {
  ints held[R][VECS] = {};
  for (int64_t q = 0; q < quads; q++) {
    ints w[VECS];
#pragma GCC unroll 8
    for (int v = 0; v < VECS; v++)
      w[v] = (ints)load(panel + (q * COLUMNS + v * LANES) * 4);
    add_block(x + q * 4, stride, w, held);
  }
  copy_block(held, total);
}

// Panels whose rows can be left out are packed as [inputs, COLUMNS]. Four rows of a panel are
// interleaved when they are read: in each group of 16 bytes, byte 4 v + i of every row goes to lane i
// of vector v. The packed columns are ordered so that the lanes are in order.
inline int64_t byte_place_of(int64_t column) {
  int64_t v = column / LANES, lane = column % LANES;
  return lane / 4 * 16 + v * 4 + lane % 4;
}

inline void pack_value_bytes(int8_t* to, const int8_t* from, int64_t inputs, int64_t outputs,
                             int64_t columns) {
  memset(to, 0, padded(inputs, 4) * COLUMNS);
  for (int64_t i = 0; i < inputs; i++)
    for (int64_t c = 0; c < columns; c++)
      to[i * COLUMNS + byte_place_of(c)] = from[i * outputs + c];
}

// Interleaves the lower (HIGH = 0) or upper (8) halves of all groups of 16 bytes, UNIT bytes at a time.
template <int UNIT, int HIGH, size_t... I>
inline bytes interleave(bytes a, bytes b, std::index_sequence<I...>) {
  constexpr int SIZE = LANES * 4;
  return __builtin_shufflevector(
      a, b, int(I / 16 * 16 + HIGH + I % 16 / (2 * UNIT) * UNIT + I % UNIT +
                (I / UNIT % 2 ? SIZE : 0))...);
}
using ByteLanes = std::make_index_sequence<LANES * 4>;

// total [R, COLUMNS] = x [R, 4 quads] times rows of a panel, the first ones or the `chosen`; x >= 0.
template <int R, bool CHOSEN>
KERNEL multiply_value_bytes(const uint8_t* x, int64_t stride, const int8_t* panel,
                                  const int32_t* chosen, int64_t quads, ints (&total)[R][VECS]) {
  ints held[R][VECS] = {};
  for (int64_t q = 0; q < quads; q++) {
    bytes row[4];
    for (int i = 0; i < 4; i++) {
      int64_t k = q * 4 + i;
      memcpy(&row[i], panel + (CHOSEN ? chosen[k] : k) * COLUMNS, sizeof row[i]);
      if (CHOSEN) __builtin_prefetch(panel + chosen[std::min(k + AHEAD, quads * 4 - 1)] * COLUMNS);
    }
    bytes ab[2] = {interleave<1, 0>(row[0], row[1], ByteLanes()),
                   interleave<1, 8>(row[0], row[1], ByteLanes())};
    bytes cd[2] = {interleave<1, 0>(row[2], row[3], ByteLanes()),
                   interleave<1, 8>(row[2], row[3], ByteLanes())};
    ints w[VECS];
    for (int half = 0; half < 2; half++) {
      w[2 * half] = (ints)interleave<2, 0>(ab[half], cd[half], ByteLanes());
      w[2 * half + 1] = (ints)interleave<2, 8>(ab[half], cd[half], ByteLanes());
    }
    add_block(x + q * 4, stride, w, held);
  }
  copy_block(held, total);
}

// As `leave_out_zeros` for quantised rows; pads the list to a multiple of four and returns its
// length. `kept` has rows of `stride` bytes.
inline int64_t leave_out_zero_bytes(const uint8_t* x, int64_t stride, int64_t rows, int64_t inputs,
                                    uint8_t* kept, int32_t* chosen) {
  int64_t count = 0;
  for (int64_t k = 0; k < inputs; k++) {
    int any = 0;
    for (int64_t r = 0; r < rows; r++) any |= kept[r * stride + count] = x[r * stride + k];
    chosen[count] = int32_t(k);
    count += any != 0;
  }
  for (; count % 4; count++) {
    for (int64_t r = 0; r < rows; r++) kept[r * stride + count] = 0;
    chosen[count] = 0;
  }
  return count;
}
