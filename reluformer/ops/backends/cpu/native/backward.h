// Gradients of q, k and v in one pass over the scores, in transposed tiles with a row for each key.
// The weights and their gradients then have the layout that the products with the gradient of the
// output, with q and with k need.
//
// A unit of work is a share of the keys of one key head. It owns the gradients of those keys; the
// gradients of q are summed over the shares, always in the same order.
#pragma once

#include "problem.h"

#include <atomic>

template <class T>
struct Backward {
  using P = Products<T>;
  using W = typename P::Word;
  static constexpr int64_t KEYS = P::BACK_KEYS, ROWS = P::BACK_ROWS;

  const Problem& p;
  int64_t width = up_to(p.width, P::UNIT), value_width = up_to(p.value_width, P::UNIT);
  int64_t groups = p.heads / p.key_heads, tables = p.batch * p.key_heads;
  int64_t rows = up_to(p.rows, ROWS), splits, share;
  // Rows of a block of the gradient of q.
  int64_t dq_rows = std::min(ROWS, up_to(p.rows, P::UNIT));
  // Whether a gradient of q is NaN or infinite, which a hidden key may have caused.
  mutable std::atomic<int64_t> spoilt{0};

  explicit Backward(const Problem& problem) : p(problem) {
    splits = clipped(up_to(2 * p.threads, tables) / tables, 1, p.keys / 512 + 1);
    share = up_to((p.keys + splits - 1) / splits, KEYS);
  }

  struct Buffers {
    // All rows of a head, packed in blocks of ROWS; then a panel of KEYS keys.
    W *q_flipped, *q, *grad_flipped, *grad;
    W *keys, *values, *keys_packed, *keys_flipped;
    // A tile [KEYS, ROWS]: weights, and gradients of the scores as left and as right factor.
    float *scores, *slopes;
    W *weights, *left, *right;
    float *dk, *dv;
  };

  Buffers buffers(Memory& memory) const {
    constexpr bool IN_PLACE = std::is_same_v<W, float>;
    Buffers r;
    r.q_flipped = memory.take<W>(rows * width);
    r.q = memory.take<W>(rows * width);
    r.grad_flipped = memory.take<W>(rows * value_width);
    r.grad = memory.take<W>(rows * value_width);
    r.keys = memory.take<W>(KEYS * width);
    r.values = memory.take<W>(KEYS * value_width);
    r.keys_packed = memory.take<W>(KEYS * width);
    r.keys_flipped = memory.take<W>(KEYS * width);
    r.scores = memory.take<float>(KEYS * ROWS);
    r.slopes = memory.take<float>(KEYS * ROWS);
    r.weights = IN_PLACE ? (W*)r.scores : memory.take<W>(KEYS * ROWS);
    r.left = IN_PLACE ? (W*)r.slopes : memory.take<W>(KEYS * ROWS);
    r.right = IN_PLACE ? (W*)r.slopes : memory.take<W>(KEYS * ROWS);
    r.dk = memory.take<float>(share * width);
    r.dv = memory.take<float>(share * value_width);
    return r;
  }

  int64_t buffers_size() const {
    Memory counted(nullptr);
    buffers(counted);
    return counted.size;
  }

  // Gradients of q, [splits, B, H] tables of blocks [width, dq_rows], and of the score offset.
  int64_t dq_size() const { return up_to(p.rows, dq_rows) * width; }
  int64_t heads() const { return p.batch * p.heads; }
  float* dq_buffer(Memory& memory) const { return memory.take<float>(splits * heads() * dq_size()); }
  double* offset_buffer(Memory& memory) const {
    return memory.take<double>(splits * heads());
  }
  // Sums of rows, [splits, B, H] pairs of `rows` numbers; null if they are not wanted.
  float* sums_buffer(Memory& memory) const {
    return p.row_dots ? memory.take<float>(splits * heads() * 2 * rows) : nullptr;
  }

  int64_t size() const {
    Memory counted(nullptr);
    dq_buffer(counted);
    offset_buffer(counted);
    sums_buffer(counted);
    return counted.size + p.threads * buffers_size();
  }

  void pack_rows(const Buffers& r, int64_t b, int64_t h) const {
    for (int64_t i = 0; i < p.rows; i += ROWS) {
      int64_t count = std::min(ROWS, p.rows - i), span = up_to(count, P::UNIT);
      const T* q = at<T>(p.q, p.q_strides, b, h, i);
      P::pack_transpose(r.q_flipped + i * width, {ROWS, width, span}, q, p.q_strides[2], count,
                        p.width);
      P::pack(r.q + i * width, width, q, p.q_strides[2], count, span, p.width);
      const T* grad = at<T>(p.grad, p.grad_strides, b, h, i);
      P::pack_transpose(r.grad_flipped + i * value_width, {ROWS, value_width, span}, grad,
                        p.grad_strides[2], count, p.value_width);
      P::pack(r.grad + i * value_width, value_width, grad, p.grad_strides[2], count, span,
              p.value_width);
    }
  }

  void pack_keys(const Buffers& r, int64_t b, int64_t kv, int64_t key, int64_t count) const {
    static_assert(KEYS % P::UNIT == 0 && ROWS % P::UNIT == 0);
    int64_t span = up_to(count, P::UNIT);
    const T* k = at<T>(p.k, p.k_strides, b, kv, key);
    copy(r.keys, width, k, p.k_strides[2], count, span, p.width);
    P::pack_transpose(r.keys_packed, {KEYS, width, span}, k, p.k_strides[2], count, p.width);
    copy(r.values, value_width, at<T>(p.v, p.v_strides, b, kv, key), p.v_strides[2], count, span,
         p.value_width);
  }

  // Numbers of the rows of a tile: with grad.v, the gradient of a weight x^power is
  // factor * grad.v + constant. A factor on rounded gradients would round them again.
  struct RowTerms {
    float factor[ROWS] = {}, constant[ROWS] = {};
    int64_t count, span, depth;

    RowTerms(const Problem& p, int64_t b, int64_t h, int64_t row)
        : count(std::min(ROWS, p.rows - row)), span(up_to(count, P::UNIT)),
          depth(up_to(count, P::EDGE)) {
      for (int64_t i = 0; i < count; i++) factor[i] = factor_of(p, b, h, row + i);
      if (p.constant)
        memcpy(constant, p.constant + (b * p.heads + h) * p.rows + row, count * sizeof(float));
    }
  };

  // Turns scores into weights, and gradients of weights into those of scores; returns their sum.
  // With SUMS, adds to `sums` of each row: weight * grad.v, and `rows` further power * x^(power - 1).
  template <int POWER, bool SUMS>
  float weigh(const Buffers& r, int64_t b, int64_t key, int64_t key_span, int64_t row,
              float offset, const RowTerms& terms, float* sums) const {
    float unit = float(p.unit);
    vec total{};
    for (int64_t j = 0; j < key_span; j += 2) {
      Range seen[2] = {rows_of(p, b, key + j), rows_of(p, b, key + j + 1)};
      for (int64_t i = 0; i < terms.span; i += LANES) {
        vec ds[2], dots{}, slopes{};
        for (int o = 0; o < 2; o++) {
          int64_t here = (j + o) * ROWS + i, from = seen[o].from - row - i, to = seen[o].to - row - i;
          vec x = P::rectified(load(r.scores + here) * unit + offset);
          if (from > 0 || to < LANES) {
            ints number = count_from(0);
            x = (number >= int32_t(clipped(from, 0, LANES))) & (number < int32_t(clipped(to, 0, LANES)))
                    ? x
                    : vec{};
          }
          vec factor = load(terms.factor + i), weight = raised<POWER>(x) * factor;
          vec dot = load(r.slopes + here), steep = raised<POWER - 1>(x) * float(POWER);
          ds[o] = x == 0 ? vec{} : (dot * factor + load(terms.constant + i)) * steep;
          total += ds[o];
          ds[o] *= unit;
          P::put(r.weights + here, weight);
          if constexpr (SUMS) {
            dots += x == 0 ? vec{} : weight * dot;
            slopes += x == 0 ? vec{} : steep;
          }
          if constexpr (!std::is_same_v<W, float>) P::put(r.left + here, ds[o]);
        }
        P::put_pair(r.right + j * ROWS + i * (std::is_same_v<W, float> ? 1 : 2), ROWS, ds[0],
                    ds[1]);
        if constexpr (SUMS) {
          store(sums + i, load(sums + i) + dots);
          store(sums + rows + i, load(sums + rows + i) + slopes);
        }
      }
    }
    return sum(total);
  }

  void unit(const Buffers& r, int64_t number, float* dq_all, double* d_offset,
            float* sums_all) const {
    int64_t split = number % splits, table = number / splits;
    int64_t b = table / p.key_heads, kv = table % p.key_heads;
    int64_t first = split * share, last = std::min(first + share, p.keys);
    int64_t held = std::min(last, keys_held(p, b));
    int64_t held_span = up_to(std::max<int64_t>(last - first, 0), P::EDGE);
    memset(r.dk, 0, held_span * width * sizeof(float));
    memset(r.dv, 0, held_span * value_width * sizeof(float));
    for (int64_t h = kv * groups; h < (kv + 1) * groups; h++) {
      int64_t head = (split * p.batch + b) * p.heads + h;
      float* dq = dq_all + head * dq_size();
      memset(dq, 0, dq_size() * sizeof(float));
      d_offset[head] = 0;
      float* sums = sums_all ? sums_all + head * 2 * rows : nullptr;
      if (sums) memset(sums, 0, 2 * rows * sizeof(float));
      pack_rows(r, b, h);
      for (int64_t key = first; key < held; key += KEYS)
        d_offset[head] += panel(r, b, kv, h, key, std::min(KEYS, held - key), dq,
                                    r.dk + (key - first) * width,
                                    r.dv + (key - first) * value_width, sums);
    }
    for (int64_t key = first; key < last; key++) {
      T* dk = at<T>(p.dk, p.dk_strides, b, kv, key);
      T* dv = at<T>(p.dv, p.dv_strides, b, kv, key);
      store_row(dk, r.dk + (key - first) * width, 1, p.width);
      store_row(dv, r.dv + (key - first) * value_width, 1, p.value_width);
    }
  }

  // One panel of keys with all rows of a head that see any of them.
  double panel(const Buffers& r, int64_t b, int64_t kv, int64_t h, int64_t key, int64_t count,
               float* dq, float* dk, float* dv, float* sums) const {
    pack_keys(r, b, kv, key, count);
    const W* flipped = P::unpack_transpose(r.keys_flipped, r.keys_packed, KEYS, width);
    double d_offset = 0;
    int64_t from = rows_of(p, b, key).from, to = rows_of(p, b, key + count - 1).to;
    int64_t key_span = up_to(count, P::EDGE);
    for (int64_t row = from / ROWS * ROWS; row < to; row += ROWS) {
      RowTerms terms(p, b, h, row);
      P::product(key_span, terms.span, width, r.keys, width, r.q_flipped + row * width, r.scores,
                 ROWS, false, ROWS);
      P::product(key_span, terms.span, value_width, r.values, value_width,
                 r.grad_flipped + row * value_width, r.slopes, ROWS, false, ROWS);
      d_offset += with_power(p.power, [&](auto power) {
        float offset = score_offset_of(p, h);
        return sums ? weigh<power, true>(r, b, key, key_span, row, offset, terms, sums + row)
                    : weigh<power, false>(r, b, key, key_span, row, offset, terms, nullptr);
      });
      P::product(key_span, value_width, terms.depth, r.weights, ROWS, r.grad + row * value_width, dv,
                 value_width, true, value_width);
      P::product(key_span, width, terms.depth, r.left, ROWS, r.q + row * width, dk, width, true,
                 width);
      P::product(width, terms.span, key_span, flipped, KEYS, r.right, dq + row * width, dq_rows,
                 true, ROWS);
    }
    return d_offset;
  }

  // Sums over the splits and stores the gradients of one head's queries and score offset, and the
  // sums of its rows.
  void finish(float* dq, const double* d_offset, const float* sums, int64_t head) const {
    int64_t b = head / p.heads, h = head % p.heads;
    p.d_offset[head] = 0;
    for (int64_t s = 0; s < splits; s++) p.d_offset[head] += d_offset[s * heads() + head];
    for (int64_t i = 0; sums && i < p.rows; i++) {
      float dot = 0, slope = 0;
      for (int64_t s = 0; s < splits; s++) {
        const float* from = sums + (s * heads() + head) * 2 * rows + i;
        dot += from[0], slope += from[rows];
      }
      p.row_dots[head * p.rows + i] = dot, p.slope_sums[head * p.rows + i] = slope;
    }
    for (int64_t row = 0; row < p.rows; row += ROWS) {
      float* block = dq + head * dq_size() + row * width;
      for (int64_t s = 1; s < splits; s++) {
        const float* more = block + s * heads() * dq_size();
        for (int64_t e = 0; e < dq_rows * width; e++) block[e] += more[e];
      }
      for (int64_t i = 0; i < std::min(ROWS, p.rows - row); i++) {
        T* to = at<T>(p.dq, p.dq_strides, b, h, row + i);
        int bad = 0;
        for (int64_t e = 0; e < p.width; e++) {
          bad |= is_nonfinite(block[e * dq_rows + i]);
          to[e] = narrow<T>(block[e * dq_rows + i]);
        }
        if (bad) spoilt = 1;
      }
    }
  }

  int64_t run(char* scratch) const {
    Memory memory(scratch);
    float* dq = dq_buffer(memory);
    double* d_offset = offset_buffer(memory);
    float* sums = sums_buffer(memory);
    int64_t units = tables * splits, each = buffers_size(), used = memory.size;
    int threads = int(std::min(p.threads, units));
    std::atomic<int64_t> next{0};
#pragma omp parallel num_threads(threads)
    {
      typename P::Session session;
      Memory mine(scratch + used + omp_get_thread_num() * each);
      Buffers r = buffers(mine);
      for (int64_t number; (number = next++) < units;) unit(r, number, dq, d_offset, sums);
#pragma omp barrier
#pragma omp for
      for (int64_t head = 0; head < heads(); head++) finish(dq, d_offset, sums, head);
    }
    return spoilt;
  }
};
