// The arguments of one call, in the layout that `calls.py` packs, and the visibility of its keys.
#pragma once

#include "products_bf16.h"

// q [B, H, Tq, D], k [B, Hkv, Tk, D], v [B, Hkv, Tk, Dv]; strides are those of the first three
// axes, in elements, and the last axis is dense. With x = max(unit q.k + score_offset, 0), the output of
// a row is factor * sum of x^power v. If `row_normalise` is above 0, it is divided by the row's sum of
// weights plus that number.
struct Problem {
  const void *q, *k, *v;
  void* out;
  float* row_sums;         // [B, H, Tq] or null
  const float* score_offset;  // [H] or null
  const int64_t* lengths;  // [B] or null
  const uint8_t* mask;     // strided [B, H, Tq, Tk] or null: whether a row may see a key
  const float* factor;     // strided [B, H, Tq]: multiplies rows of the output or of `grad`
  int64_t factor_strides[3], q_strides[3], k_strides[3], v_strides[3], out_strides[3], mask_strides[4];
  int64_t batch, heads, rows, width, key_heads, keys, value_width;
  int64_t power, causal, window, threads, is_bf16;
  double row_normalise, unit;
  // [B, H, Tq, Dv] or null: the output in float32. With it bfloat16 tables are widened, and only
  // results are rounded.
  float* exact_out;
  // Backward pass only, which reads `out` and `row_sums`.
  const void* grad;        // gradient of the output
  const float* grad_sums;  // [B, H, Tq] or null: gradient of row_sums
  double* d_offset;        // [B, H]: gradient of score_offset, the sum over all scores
  void *dq, *dk, *dv;
  int64_t grad_strides[3], dq_strides[3], dk_strides[3], dv_strides[3];
  float* row_dots;  // [B, H, Tq] or null: for each row the sum of output * grad
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

// The keys that a row sees, unless the mask hides them; from >= to if it sees none.
inline Range keys_of(const Problem& p, int64_t b, int64_t row) {
  int64_t at = row + p.keys - p.rows, end = keys_held(p, b);
  return {std::max<int64_t>(0, at - p.window + 1),
          std::min(end, at + (p.causal ? 1 : p.window))};
}

// The rows that see a key, unless the mask hides it.
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

// Entries of the mask along an axis, one for each lane.
struct MaskLine {
  const uint8_t* first;
  int64_t stride;

  // x with 0 in the lanes of hidden keys; reads at most `count` entries, from `start` on.
  vec keep(vec x, int64_t start, int64_t count) const {
    const uint8_t* from = first + start * stride;
    if (stride == 0) return *from ? x : vec{};
    int32_t held[LANES] = {};
    // With constant bounds and stride the compiler widens all bytes at once.
    if (stride == 1 && count >= LANES)
      for (int i = 0; i < LANES; i++) held[i] = from[i];
    else
      for (int64_t i = 0; i < std::min<int64_t>(count, LANES); i++) held[i] = from[i * stride];
    ints lanes;
    memcpy(&lanes, held, sizeof lanes);
    return lanes != 0 ? x : vec{};
  }
};

enum MaskAxis { ROWS_AXIS = 2, KEYS_AXIS = 3 };

inline MaskLine mask_from(const Problem& p, int64_t b, int64_t h, int64_t row, int64_t key,
                          MaskAxis axis) {
  const int64_t* strides = p.mask_strides;
  return {p.mask + b * strides[0] + h * strides[1] + row * strides[2] + key * strides[3],
          strides[axis]};
}

inline float score_offset_of(const Problem& p, int64_t h) {
  return p.score_offset ? p.score_offset[h] : 0.0f;
}

inline float factor_of(const Problem& p, int64_t b, int64_t h, int64_t row) {
  return *at<float>((const void*)p.factor, p.factor_strides, b, h, row);
}

inline float* exact_row(const Problem& p, int64_t b, int64_t h, int64_t row) {
  return p.exact_out + ((b * p.heads + h) * p.rows + row) * p.value_width;
}

// Stores the row's sum of weights and returns the factor of its sum of weighted values.
inline float store_sum(const Problem& p, int64_t b, int64_t h, int64_t row, float sum) {
  float factor = factor_of(p, b, h, row);
  sum *= factor;
  if (p.row_sums) p.row_sums[(b * p.heads + h) * p.rows + row] = sum;
  return p.row_normalise > 0 ? factor / (sum + float(p.row_normalise)) : factor;
}

// What the gradients of a row have in common: with grad.v, the gradient of a weight x^power is
// factor * grad.v + constant; `dot` is the sum of output * grad.
struct RowTerms {
  float factor, constant, dot;
};

template <class T>
inline RowTerms row_terms(const Problem& p, int64_t b, int64_t h, int64_t row) {
  int64_t number = (b * p.heads + h) * p.rows + row;
  float factor = factor_of(p, b, h, row);
  RowTerms terms{factor, p.grad_sums ? p.grad_sums[number] * factor : 0, 0};
  if (p.row_normalise <= 0 && !p.row_dots) return terms;
  const T* grad = at<T>(p.grad, p.grad_strides, b, h, row);
  terms.dot = p.exact_out ? dot(exact_row(p, b, h, row), grad, p.value_width)
                          : dot(at<T>(p.out, p.out_strides, b, h, row), grad, p.value_width);
  if (p.row_normalise > 0) {
    terms.factor /= p.row_sums[number] + float(p.row_normalise);
    // The gradient of the row's sum, by which the row is divided.
    terms.constant -= terms.dot * terms.factor;
  }
  return terms;
}

// Sums over the keys of a row: of weight * grad.v and of power * x^(power - 1).
struct RowSums {
  float dot, slope;
};

// Stores the sum of output * grad of a row: where the output is rounded, `summed` has it. Returns what
// the rounding added to the gradients of all scores of the row.
inline double store_dot(const Problem& p, int64_t b, int64_t h, int64_t row, const RowTerms& terms,
                        const RowSums* summed) {
  p.row_dots[(b * p.heads + h) * p.rows + row] = summed ? summed->dot : terms.dot;
  if (!summed || p.row_normalise <= 0) return 0;
  return (terms.dot - summed->dot) * terms.factor * summed->slope;
}

// The weights of scores x, after rectification, and the gradients of those scores.
template <int POWER>
struct Weighed {
  vec weight, steep, ds;

  Weighed(vec x, vec dot, vec factor, vec constant)
      : weight(raised<POWER>(x) * factor), steep(raised<POWER - 1>(x) * float(POWER)),
        ds(x == 0 ? vec{} : (dot * factor + constant) * steep) {}
};

// Divides memory into aligned pieces; with a null start it only counts their size.
class Memory {
 public:
  explicit Memory(char* start) : next(start) {}
  template <class T>
  T* take(int64_t count) {
    int64_t bytes = up_to(count * int64_t(sizeof(T)), 64);
    size += bytes;
    if (!next) return nullptr;
    char* piece = next;
    next += bytes;
    return (T*)piece;
  }
  int64_t size = 0;

 private:
  char* next;
};
