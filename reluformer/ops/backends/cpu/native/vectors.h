// Vectors of float32 as wide as the machine's, bfloat16 as bits, and the shuffles that both need.
// Only the compiler's vector types are used, so that the code runs on AVX2, AVX-512 and NEON.
#pragma once

#include <cstdint>
#include <cstring>
#include <utility>

using bf16 = uint16_t;

#if defined(__AVX512F__)
constexpr int LANES = 16;
#elif defined(__AVX__)
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif

typedef float vec __attribute__((vector_size(LANES * 4)));
typedef int32_t ints __attribute__((vector_size(LANES * 4)));
typedef uint32_t bits __attribute__((vector_size(LANES * 4)));

inline vec load(const void* from) {
  vec x;
  memcpy(&x, from, sizeof x);
  return x;
}

// LANES elements as float32.
inline vec load_wide(const float* from) { return load(from); }
inline vec load_wide(const bf16* from) {
  typedef bf16 halves __attribute__((vector_size(LANES * 2)));
  halves x;
  memcpy(&x, from, sizeof x);
  return (vec)(__builtin_convertvector(x, bits) << 16);
}

inline void store(void* to, vec x) { memcpy(to, &x, sizeof x); }

inline vec all(float x) { return vec{} + x; }

// 0, 1, 2, ... counted from a start.
template <size_t... I>
inline ints count_from(int32_t start, std::index_sequence<I...>) {
  return ints{int32_t(I)...} + start;
}
inline ints count_from(int32_t start) {
  return count_from(start, std::make_index_sequence<LANES>());
}

// Two rows and a bit of the lane's number: `low` takes the lanes without the bit (those of b moved
// up), `high` those with it (those of a moved down). Together they swap a pair of a transpose, and
// their sum adds neighbours.
template <int BIT, size_t... I>
inline vec low(vec a, vec b, std::index_sequence<I...>) {
  return __builtin_shufflevector(a, b, ((I & BIT) ? int(LANES + (I ^ BIT)) : int(I))...);
}
template <int BIT, size_t... I>
inline vec high(vec a, vec b, std::index_sequence<I...>) {
  return __builtin_shufflevector(a, b, ((I & BIT) ? int(LANES + I) : int(I | BIT))...);
}
using Lanes = std::make_index_sequence<LANES>;

template <int BIT = 1>
inline void transpose(vec (&rows)[LANES]) {
  if constexpr (BIT < LANES) {
    for (int i = 0; i < LANES; i++) {
      if (i & BIT) continue;
      vec a = rows[i], b = rows[i | BIT];
      rows[i] = low<BIT>(a, b, Lanes());
      rows[i | BIT] = high<BIT>(a, b, Lanes());
    }
    transpose<BIT * 2>(rows);
  }
}

// The sum of each row, in the row's lane.
template <int BIT = 1>
inline vec sums(vec (&rows)[LANES]) {
  if constexpr (BIT < LANES) {
    for (int i = 0; i < LANES / BIT; i += 2) {
      vec a = rows[i], b = rows[i + 1];
      rows[i / 2] = low<BIT>(a, b, Lanes()) + high<BIT>(a, b, Lanes());
    }
    return sums<BIT * 2>(rows);
  } else {
    return rows[0];
  }
}

inline float sum(vec x) {
  float total = 0;
  for (int i = 0; i < LANES; i++) total += x[i];
  return total;
}

inline float wide(float x) { return x; }
inline float wide(bf16 x) {
  uint32_t word = uint32_t(x) << 16;
  float value;
  memcpy(&value, &word, 4);
  return value;
}

// Sum of products of two rows.
template <class A, class B>
inline float dot(const A* a, const B* b, int64_t width) {
  vec total{};
  int64_t e = 0;
  for (; e + LANES <= width; e += LANES) total += load_wide(a + e) * load_wide(b + e);
  float result = sum(total);
  for (; e < width; e++) result += wide(a[e]) * wide(b[e]);
  return result;
}

template <class T>
inline T narrow(float x);
template <>
inline float narrow<float>(float x) { return x; }
template <>
inline bf16 narrow<bf16>(float x) {
  uint32_t word;
  memcpy(&word, &x, 4);
  // Rounds to nearest, ties to even; the carry must not turn a NaN into a number.
  return x != x ? 0x7fc0 : bf16((word + 0x7fff + (word >> 16 & 1)) >> 16);
}

inline void store_narrow(float* to, vec x) { store(to, x); }
// Words whose upper half is the number in bfloat16.
inline bits rounded(vec x) {
  bits word = (bits)x;
  return x != x ? bits{} + 0x7fc00000u : word + 0x7fff + (word >> 16 & 1);
}
inline void store_narrow(bf16* to, vec x) {
  typedef bf16 halves __attribute__((vector_size(LANES * 2)));
  halves half = __builtin_convertvector(rounded(x) >> 16, halves);
  memcpy(to, &half, sizeof half);
}

// to [width] = from * factor; returns whether an element is NaN or infinite.
template <class T>
inline bool store_row(T* to, const float* from, float factor, int64_t width) {
  ints bad{};
  int64_t e = 0;
  for (; e + LANES <= width; e += LANES) {
    vec x = load(from + e) * factor;
    bad |= ((bits)x & 0x7f800000u) == 0x7f800000u;
    store_narrow(to + e, x);
  }
  for (; e < width; e++) {
    vec x = vec{} + from[e] * factor;
    bad |= ((bits)x & 0x7f800000u) == 0x7f800000u;
    to[e] = narrow<T>(x[0]);
  }
  bool any = false;
  for (int i = 0; i < LANES; i++) any |= bad[i] != 0;
  return any;
}

// x^P by products of squares.
template <int P>
inline vec raised(vec x) {
  if constexpr (P == 0) return all(1.0f);
  else if constexpr (P == 1) return x;
  else if constexpr (P % 2) return raised<P - 1>(x) * x;
  else {
    vec root = raised<P / 2>(x);
    return root * root;
  }
}

// Calls f with the power as a compile-time constant.
template <class F>
inline auto with_power(int64_t power, F f) {
  switch (power) {
    case 2: return f(std::integral_constant<int, 2>());
    case 4: return f(std::integral_constant<int, 4>());
    case 8: return f(std::integral_constant<int, 8>());
    default: return f(std::integral_constant<int, 1>());
  }
}
