// One call, as `calls.py` packs it, and which keys its rows see.
#pragma once

#include "products.h"

// q [B, H, Tq, D], k [B, Hkv, Tk, D], v [B, Hkv, Tk, Dv]; strides are of the first three axes, in
// elements, and the last axis is dense. With x = max(q.k + opening, 0) the output of a row is
// factor * sum of x^power v, divided, where `normalise` is above 0, by the row's sum plus that.
struct Problem {
  const void *q, *k, *v;
  void* out;
  float* row_sums;         // [B, H, Tq] or null
  const float* opening;    // [H] or null
  const int64_t* lengths;  // [B] or null
  const float* factor;     // strided over [B, H, Tq]; backward, what rows of `grad` are times
  int64_t factor_strides[3], q_strides[3], k_strides[3], v_strides[3], out_strides[3];
  int64_t batch, heads, rows, width, key_heads, keys, value_width;
  int64_t power, causal, window, threads, is_bf16;
  double normalise;
  // What only a backward pass has.
  const void* grad;       // of the output
  const float* constant;  // [B, H, Tq] or null: added to the gradient of each weight of a row
  double* shift;          // [B, H]: the sum of the gradients of all scores
  void *dq, *dk, *dv;
  int64_t grad_strides[3], dq_strides[3], dk_strides[3], dv_strides[3];
};

struct Range {
  int64_t from, to;
};

inline int64_t clipped(int64_t x, int64_t least, int64_t most) {
  return std::max(least, std::min(x, most));
}

inline int64_t keys_held(const Problem& p, int64_t b) {
  return p.lengths ? clipped(p.lengths[b], 0, p.keys) : p.keys;
}

// The keys that a row sees; of a row that sees none, a range that ends where it starts or before.
inline Range keys_of(const Problem& p, int64_t b, int64_t row) {
  int64_t at = row + p.keys - p.rows, end = keys_held(p, b);
  return {std::max<int64_t>(0, at - p.window + 1),
          std::min(end, at + (p.causal ? 1 : p.window))};
}

// The rows that see a key.
inline Range rows_of(const Problem& p, int64_t b, int64_t key) {
  int64_t at = key - p.keys + p.rows;
  if (key >= keys_held(p, b)) return {0, 0};
  return {std::max<int64_t>(0, at - (p.causal ? 0 : p.window - 1)),
          std::min(p.rows, at + p.window)};
}

template <class T>
inline const T* at(const void* base, const int64_t (&strides)[3], int64_t b, int64_t h,
                   int64_t t) {
  return (const T*)base + b * strides[0] + h * strides[1] + t * strides[2];
}
template <class T>
inline T* at(void* base, const int64_t (&strides)[3], int64_t b, int64_t h, int64_t t) {
  return (T*)base + b * strides[0] + h * strides[1] + t * strides[2];
}

inline float opening_of(const Problem& p, int64_t h) { return p.opening ? p.opening[h] : 0.0f; }

inline float factor_of(const Problem& p, int64_t b, int64_t h, int64_t row) {
  return *at<float>((const void*)p.factor, p.factor_strides, b, h, row);
}

// What a row's sum of weighted values is multiplied by; its sum of weights is written down.
inline float finished(const Problem& p, int64_t b, int64_t h, int64_t row, float sum) {
  float factor = factor_of(p, b, h, row);
  sum *= factor;
  if (p.row_sums) p.row_sums[(b * p.heads + h) * p.rows + row] = sum;
  return p.normalise > 0 ? factor / (sum + float(p.normalise)) : factor;
}

// Cuts memory into pieces that vectors may be stored to; without memory it only counts.
class Memory {
 public:
  explicit Memory(char* start) : next(start) {}
  template <class T>
  T* take(int64_t count) {
    int64_t bytes = up_to(count * int64_t(sizeof(T)), 64);
    size += bytes;
    if (!next) return nullptr;
    char* mine = next;
    next += bytes;
    return (T*)mine;
  }
  int64_t size = 0;

 private:
  char* next;
};
