// Products of a few rows with keys and values that are read where they lie, without packing. Shared by
// decoding and by the gradients of a few rows.
#pragma once

#include "problem.h"

// Below this number of rows of a key head, packing the keys takes longer than it saves.
constexpr int64_t FEW_ROWS = 4;

inline bool has_few_rows(const Problem& p) { return p.rows * (p.heads / p.key_heads) < FEW_ROWS; }

// Waking other threads takes as long as reading this amount of memory.
inline bool is_small(const Problem& p) {
  return p.batch * p.key_heads * p.keys * (p.width + p.value_width) < (1 << 16);
}

// Part of a row as float32 vectors: one for float32; two for bfloat16, the even and the odd
// elements, which a shift and a mask extract.
template <class T>
struct Piece;

template <>
struct Piece<float> {
  static constexpr int PARTS = 1;
  static void read(const float* from, vec (&to)[1]) { to[0] = load(from); }
  static void write(float* to, const vec (&from)[1]) { store(to, from[0]); }
};

template <>
struct Piece<bf16> {
  static constexpr int PARTS = 2;
  static void read(const bf16* from, vec (&to)[2]) {
    bits words;
    memcpy(&words, from, sizeof words);
    to[0] = (vec)(words << 16);
    to[1] = (vec)(words & 0xffff0000u);
  }
  static void write(bf16* to, const vec (&from)[2]) {
    bits words = (rounded(from[0]) >> 16) | (rounded(from[1]) & 0xffff0000u);
    memcpy(to, &words, sizeof words);
  }
};

// Rows of T and, in float32, rows of pieces: padded to whole pieces, whose elements are in the order of
// their parts.
template <class T>
struct Rows {
  static constexpr int PARTS = Piece<T>::PARTS, WIDE = PARTS * LANES;
  static constexpr int64_t AHEAD = 16;

  static void fetch(const T* row, int64_t width) {
    for (int64_t e = 0; e < width; e += 64 / int64_t(sizeof(T))) __builtin_prefetch(row + e);
  }

  // Reads or writes part of a row; the last part may be shorter than a piece.
  template <bool WHOLE>
  static void read(const T* from, int64_t left, vec (&to)[PARTS]) {
    if (WHOLE || left >= WIDE) return Piece<T>::read(from, to);
    T held[WIDE];
    for (int e = 0; e < WIDE; e++) held[e] = e < left ? from[e] : T(0);
    Piece<T>::read(held, to);
  }
  static void write(T* to, int64_t left, const vec (&from)[PARTS]) {
    if (left >= WIDE) return Piece<T>::write(to, from);
    T held[WIDE];
    Piece<T>::write(held, from);
    memcpy(to, held, left * sizeof(T));
  }

  // Where element e of a row is in a row of pieces.
  static int64_t place(int64_t e) { return e / WIDE * WIDE + e % PARTS * LANES + e % WIDE / PARTS; }

  static void to_pieces(float* to, const T* from, int64_t width) {
    for (int64_t e = 0; e < up_to(width, WIDE); e++) to[place(e)] = e < width ? wide(from[e]) : 0;
  }

  // Products of a row of pieces with LANES rows; missing ones are replaced by the last.
  static vec products(const float* pieces, const T* rows, int64_t stride, int64_t count,
                      int64_t width) {
    return width % WIDE ? products<false>(pieces, rows, stride, count, width)
                        : products<true>(pieces, rows, stride, count, width);
  }
  template <bool WHOLE>
  static vec products(const float* pieces, const T* rows, int64_t stride, int64_t count,
                      int64_t width) {
    constexpr int SOME = 4;
    vec all[LANES];
    for (int j = 0; j < LANES; j += SOME) {
      const T* some[SOME];
      vec total[SOME] = {};
      for (int s = 0; s < SOME; s++) {
        some[s] = rows + std::min<int64_t>(j + s, count - 1) * stride;
        fetch(some[s] + AHEAD * stride, width);
      }
      for (int64_t e = 0; e < width; e += WIDE) {
        vec left[PARTS];
        memcpy(left, pieces + e, sizeof left);
        for (int s = 0; s < SOME; s++) {
          vec piece[PARTS];
          read<WHOLE>(some[s] + e, width - e, piece);
          for (int part = 0; part < PARTS; part++) total[s] += left[part] * piece[part];
        }
      }
      for (int s = 0; s < SOME; s++) all[j + s] = total[s];
    }
    return sums(all);
  }

  // A row of pieces += sum of the chosen rows times their factors.
  static void add(float* pieces, const T* rows, int64_t stride, int64_t width, const float* factors,
                  const int* chosen, int count) {
    constexpr int N = 4 / PARTS;
    int64_t e = 0;
    for (; e + N * WIDE <= width; e += N * WIDE)
      add<N>(pieces + e, rows + e, stride, N * WIDE, factors, chosen, count);
    for (; e < width; e += WIDE)
      add<1>(pieces + e, rows + e, stride, width - e, factors, chosen, count);
  }
  template <int N>
  static void add(float* pieces, const T* rows, int64_t stride, int64_t left, const float* factors,
                  const int* chosen, int count) {
    vec total[N][PARTS];
    memcpy(total, pieces, sizeof total);
    for (int j = 0; j < count; j++) {
      const T* row = rows + chosen[j] * stride;
      for (int n = 0; n < N; n++) {
        vec piece[PARTS];
        read<(N > 1)>(row + n * WIDE, left - n * WIDE, piece);
        for (int s = 0; s < PARTS; s++) total[n][s] += factors[j] * piece[s];
      }
    }
    memcpy(pieces, total, sizeof total);
  }
};
