// Products of a few rows with packed tables of float32 or bfloat16.
//
// A table [inputs, outputs] is packed in panels of COLUMNS outputs, [inputs, COLUMNS]: a panel is
// read once, from start to end, for each block of at most ROWS rows. Every sum is computed in the
// same order for every number of rows, so that results do not depend on the batch.
#pragma once

#include "../vectors.h"

#include <algorithm>
#include <type_traits>

// A block of outputs in registers: ROWS rows of VECS vectors.
constexpr int VECS = 4;
constexpr int64_t COLUMNS = VECS * LANES;
#if defined(__AVX__) && !defined(__AVX512F__)
constexpr int ROWS = 2;
#else
constexpr int ROWS = 6;
#endif

// Chosen rows of a panel that are prefetched ahead of their use.
constexpr int64_t AHEAD = 16;

inline int64_t divide_up(int64_t size, int64_t unit) { return (size + unit - 1) / unit; }
inline int64_t padded(int64_t size, int64_t unit) { return divide_up(size, unit) * unit; }

// Calls f with the number of rows, 1 to ROWS, as a compile-time constant.
template <int R = ROWS, class F>
inline void with_rows(int64_t rows, const F& f) {
  if constexpr (R > 1) {
    if (rows < R) return with_rows<R - 1>(rows, f);
  }
  f(std::integral_constant<int, R>());
}

// Vector v of a row of a panel. Two vectors of bfloat16 alternate: a shift and a mask extract them.
inline vec read_vector(const float* row, int v) { return load(row + v * LANES); }
inline vec read_vector(const bf16* row, int v) {
  bits words;
  memcpy(&words, row + v / 2 * 2 * LANES, sizeof words);
  return v % 2 ? (vec)(words & 0xffff0000u) : (vec)(words << 16);
}

// Place of a column in a row of a panel.
template <class T>
inline int64_t place_of(int64_t column) {
  if (std::is_same_v<T, float>) return column;
  int64_t v = column / LANES;
  return v / 2 * 2 * LANES + column % LANES * 2 + v % 2;
}

template <class V, int R>
inline void copy_block(const V (&from)[R][VECS], V (&to)[R][VECS]) {
#pragma GCC unroll 8
  for (int r = 0; r < R; r++)
#pragma GCC unroll 8
    for (int v = 0; v < VECS; v++) to[r][v] = from[r][v];
}

// Kernels are functions of their own, so that the compiler keeps their sums in registers.
#define KERNEL [[gnu::noinline]] void

// total [R, COLUMNS] = x [R, count] times `count` rows of a panel: the first ones, or the `chosen`.
template <int R, bool CHOSEN, class T>
KERNEL multiply_panel(const float* x, int64_t stride, const T* panel, const int32_t* chosen,
                           int64_t count, vec (&total)[R][VECS]) {
  vec held[R][VECS] = {};
  for (int64_t k = 0; k < count; k++) {
    const T* row = panel + (CHOSEN ? chosen[k] : k) * COLUMNS;
    if (CHOSEN) {
      const char* next = (const char*)(panel + chosen[std::min(k + AHEAD, count - 1)] * COLUMNS);
      for (size_t line = 0; line < COLUMNS * sizeof(T); line += 64) __builtin_prefetch(next + line);
    }
    vec w[VECS];
#pragma GCC unroll 8
    for (int v = 0; v < VECS; v++) w[v] = read_vector(row, v);
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 8
      for (int v = 0; v < VECS; v++) held[r][v] += x[r * stride + k] * w[v];
  }
  copy_block(held, total);
}

// Packs the first `columns` outputs of a table, whose element for an input and an output is at
// from[input * a + output * b], in one panel.
template <class T>
inline void pack_panel(T* to, const T* from, int64_t inputs, int64_t a, int64_t columns, int64_t b) {
  memset(to, 0, inputs * COLUMNS * sizeof(T));
  for (int64_t k = 0; k < inputs; k++)
    for (int64_t c = 0; c < columns; c++) to[k * COLUMNS + place_of<T>(c)] = from[k * a + c * b];
}

// Packs a table in panels one after the other.
template <class T>
inline void pack_panels(T* to, const T* from, int64_t inputs, int64_t a, int64_t outputs, int64_t b) {
  for (int64_t o = 0; o < outputs; o += COLUMNS)
    pack_panel(to + o * inputs, from + o * b, inputs, a, std::min(COLUMNS, outputs - o), b);
}

// A benchmark builds the library with READ_ZEROS, to measure the gain of leaving out zeros.
#ifdef READ_ZEROS
constexpr bool LEAVES_OUT_ZEROS = false;
#else
constexpr bool LEAVES_OUT_ZEROS = true;
#endif

// Rows of a block with the inputs that are 0 in all of them left out: x' [R, count] and the list of
// the inputs that remain. Returns their number.
inline int64_t leave_out_zeros(const float* x, int64_t stride, int64_t rows, int64_t inputs,
                               float* kept, int64_t kept_stride, int32_t* chosen) {
  int64_t count = 0;
  for (int64_t k = 0; k < inputs; k++) {
    bool any = !LEAVES_OUT_ZEROS;
    for (int64_t r = 0; r < rows; r++) {
      float value = x[r * stride + k];
      kept[r * kept_stride + count] = value;
      any |= value != 0;
    }
    chosen[count] = int32_t(k);
    count += any;
  }
  return count;
}
