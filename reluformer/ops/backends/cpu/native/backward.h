// Gradients of q, k and v in one pass over the scores, in transposed tiles with a row for each key.
// The weights and their gradients then have the layout that the products with the gradient of the
// output, with q and with k need.
//
// A unit of work is a share of the keys of one key head. It owns the gradients of those keys; the
// gradients of q are summed over the shares, always in the same order.
#pragma once

#include "problem.h"

#include <atomic>

template <class T, class P = Products<T>>
struct Backward {
  using W = typename P::Word;
  static constexpr int64_t KEYS = P::BACK_KEYS, ROWS = P::BACK_ROWS;
  static constexpr bool IN_PLACE = std::is_same_v<W, float>;

  const Problem& p;
  int64_t width = up_to(p.width, P::UNIT), value_width = up_to(p.value_width, P::UNIT);
  int64_t groups = p.heads / p.key_heads, tables = p.batch * p.key_heads;
  // Rows of a tile, and all rows with padding.
  int64_t tall = std::min(ROWS, up_to(p.rows, P::UNIT)), rows = up_to(p.rows, tall);
  int64_t splits, share;
  // Whether the output is rounded, so that sums of output * grad are summed over the weights.
  static constexpr bool ROUNDS = std::is_same_v<P, Products<bf16>>;
  bool sums = ROUNDS && p.row_dots;
  // Whether a gradient of q is NaN or infinite, which a hidden key may have caused.
  mutable std::atomic<int64_t> spoilt{0};

  explicit Backward(const Problem& problem) : p(problem) {
    splits = clipped(up_to(2 * p.threads, tables) / tables, 1, p.keys / 512 + 1);
    share = up_to((p.keys + splits - 1) / splits, KEYS);
  }

  // What a share of the keys adds to the gradients of a head: those of q and of the score offset,
  // and for each row the sums of weight * grad.v and of power * x^(power - 1).
  struct Part {
    float* dq;
    double* d_offset;
    float *dots, *slopes;
  };

  Part part(Memory& memory) const {
    int64_t summed = sums ? rows : 0;
    return {memory.take<float>(rows * width), memory.take<double>(1), memory.take<float>(summed),
            memory.take<float>(summed)};
  }

  struct Buffers {
    // All rows of a head, packed in blocks of `tall`, and their terms; then a panel of KEYS keys.
    W *q_flipped, *q, *grad_flipped, *grad;
    float *factor, *constant;
    W *keys, *values, *keys_packed;
    // A tile [KEYS, tall]: weights, and gradients of the scores as left and as right factor.
    float *scores, *slopes;
    W *weights, *left, *right, *room;
    float *dk, *dv;
    Part part;
  };

  Buffers buffers(Memory& memory) const {
    Buffers r;
    r.q_flipped = memory.take<W>(rows * width);
    r.q = memory.take<W>(rows * width);
    r.grad_flipped = memory.take<W>(rows * value_width);
    r.grad = memory.take<W>(rows * value_width);
    r.factor = memory.take<float>(rows);
    r.constant = memory.take<float>(rows);
    r.keys = memory.take<W>(KEYS * width);
    r.values = memory.take<W>(KEYS * value_width);
    r.keys_packed = IN_PLACE ? r.keys : memory.take<W>(KEYS * width);
    r.scores = memory.take<float>(KEYS * tall);
    r.slopes = memory.take<float>(KEYS * tall);
    r.weights = IN_PLACE ? (W*)r.scores : memory.take<W>(KEYS * tall);
    r.left = IN_PLACE ? (W*)r.slopes : memory.take<W>(KEYS * tall);
    r.right = IN_PLACE ? (W*)r.slopes : memory.take<W>(KEYS * tall);
    r.room = IN_PLACE ? nullptr : memory.take<W>(KEYS * tall);
    r.dk = memory.take<float>(share * width);
    r.dv = memory.take<float>(share * value_width);
    r.part = part(memory);
    return r;
  }

  int64_t buffers_size() const {
    Memory counted(nullptr);
    buffers(counted);
    return counted.size;
  }
  int64_t part_size() const {
    Memory counted(nullptr);
    part(counted);
    return counted.size;
  }

  int64_t heads() const { return p.batch * p.heads; }
  // Size of the parts of all splits, [splits, B, H]; a single part of a head is a thread's own.
  int64_t parts_size() const { return splits == 1 ? 0 : splits * heads() * part_size(); }
  int64_t size() const { return parts_size() + p.threads * buffers_size(); }

  void pack_rows(const Buffers& r, int64_t b, int64_t h) const {
    for (int64_t i = 0; i < p.rows; i += tall) {
      int64_t count = std::min(tall, p.rows - i), span = up_to(count, P::UNIT);
      const T* q = at<T>(p.q, p.q_strides, b, h, i);
      P::pack_transpose(r.q_flipped + i * width, {tall, width, span}, q, p.q_strides[2], count,
                        p.width);
      P::pack(r.q + i * width, width, q, p.q_strides[2], count, span, p.width);
      const T* grad = at<T>(p.grad, p.grad_strides, b, h, i);
      P::pack_transpose(r.grad_flipped + i * value_width, {tall, value_width, span}, grad,
                        p.grad_strides[2], count, p.value_width);
      P::pack(r.grad + i * value_width, value_width, grad, p.grad_strides[2], count, span,
              p.value_width);
    }
    for (int64_t i = 0; i < rows; i++) {
      RowTerms terms = i < p.rows ? row_terms<T>(p, b, h, i) : RowTerms{};
      r.factor[i] = terms.factor, r.constant[i] = terms.constant;
    }
  }

  void pack_keys(const Buffers& r, int64_t b, int64_t kv, int64_t key, int64_t count) const {
    static_assert(KEYS % P::UNIT == 0 && ROWS % P::UNIT == 0);
    int64_t span = up_to(count, P::UNIT);
    const T* k = at<T>(p.k, p.k_strides, b, kv, key);
    copy(r.keys, width, k, p.k_strides[2], count, span, p.width);
    if constexpr (!IN_PLACE)
      P::pack(r.keys_packed, width, k, p.k_strides[2], count, span, p.width);
    copy(r.values, value_width, at<T>(p.v, p.v_strides, b, kv, key), p.v_strides[2], count, span,
         p.value_width);
  }

  // Turns scores into weights, and gradients of weights into those of scores; returns their sum.
  // With SUMS, adds to the sums of each row.
  template <int POWER, bool SUMS>
  float weigh(const Buffers& r, int64_t b, int64_t h, int64_t key, int64_t key_span, int64_t row,
              int64_t span, const Part& part) const {
    float unit = float(p.unit), offset = score_offset_of(p, h);
    vec total{};
    for (int64_t j = 0; j < key_span; j += 2) {
      Range seen[2] = {rows_of(p, b, key + j), rows_of(p, b, key + j + 1)};
      MaskLine mask[2] = {};
      // A key of padding follows the last one.
      for (int o = 0; o < 2 && p.mask; o++)
        mask[o] = mask_from(p, b, h, row, std::min(key + j + o, p.keys - 1), ROWS_AXIS);
      for (int64_t i = 0; i < span; i += LANES) {
        vec ds[2], dots{}, slopes{};
        vec factor = load(r.factor + row + i), constant = load(r.constant + row + i);
        for (int o = 0; o < 2; o++) {
          int64_t here = (j + o) * tall + i, from = seen[o].from - row - i, to = seen[o].to - row - i;
          vec x = P::rectified(load(r.scores + here) * unit + offset);
          if (from > 0 || to < LANES) {
            ints number = count_from(0);
            x = (number >= int32_t(clipped(from, 0, LANES))) & (number < int32_t(clipped(to, 0, LANES)))
                    ? x
                    : vec{};
          }
          if (p.mask) x = mask[o].keep(x, i, p.rows - row - i);
          vec dot = load(r.slopes + here);
          Weighed<POWER> weighed(x, dot, factor, constant);
          total += weighed.ds;
          ds[o] = weighed.ds * unit;
          P::put(r.weights + here, weighed.weight);
          if constexpr (SUMS) {
            dots += x == 0 ? vec{} : weighed.weight * dot;
            slopes += x == 0 ? vec{} : weighed.steep;
          }
          if constexpr (!IN_PLACE) P::put(r.left + here, ds[o]);
        }
        P::put_pair(r.right + j * tall + i * (IN_PLACE ? 1 : 2), tall, ds[0], ds[1]);
        if constexpr (SUMS) {
          store(part.dots + row + i, load(part.dots + row + i) + dots);
          store(part.slopes + row + i, load(part.slopes + row + i) + slopes);
        }
      }
    }
    return sum(total);
  }

  // `parts` are those of all splits, null if there is only one.
  void unit(const Buffers& r, int64_t number, char* parts) const {
    int64_t split = number % splits, table = number / splits;
    int64_t b = table / p.key_heads, kv = table % p.key_heads;
    int64_t first = split * share, last = std::min(first + share, p.keys);
    int64_t held = std::min(last, keys_held(p, b));
    int64_t held_span = up_to(std::max<int64_t>(last - first, 0), P::EDGE);
    memset(r.dk, 0, held_span * width * sizeof(float));
    memset(r.dv, 0, held_span * value_width * sizeof(float));
    for (int64_t h = kv * groups; h < (kv + 1) * groups; h++) {
      int64_t head = b * p.heads + h;
      Part part = parts ? part_of(parts, split, head) : r.part;
      memset(part.dq, 0, rows * width * sizeof(float));
      *part.d_offset = 0;
      if (sums) {
        memset(part.dots, 0, rows * sizeof(float));
        memset(part.slopes, 0, rows * sizeof(float));
      }
      pack_rows(r, b, h);
      for (int64_t key = first; key < held; key += KEYS)
        panel(r, part, b, kv, h, key, std::min(KEYS, held - key), r.dk + (key - first) * width,
              r.dv + (key - first) * value_width);
      if (!parts) finish(part, b, h);
    }
    for (int64_t key = first; key < last; key++) {
      T* dk = at<T>(p.dk, p.dk_strides, b, kv, key);
      T* dv = at<T>(p.dv, p.dv_strides, b, kv, key);
      store_row(dk, r.dk + (key - first) * width, 1, p.width);
      store_row(dv, r.dv + (key - first) * value_width, 1, p.value_width);
    }
  }

  // One panel of keys with all rows of a head that see any of them.
  void panel(const Buffers& r, const Part& part, int64_t b, int64_t kv, int64_t h, int64_t key,
             int64_t count, float* dk, float* dv) const {
    pack_keys(r, b, kv, key, count);
    int64_t from = rows_of(p, b, key).from, to = rows_of(p, b, key + count - 1).to;
    int64_t key_span = up_to(count, P::EDGE);
    for (int64_t row = from / tall * tall; row < to; row += tall) {
      int64_t seen = std::min(tall, p.rows - row);
      int64_t span = up_to(seen, P::UNIT), depth = up_to(seen, P::EDGE);
      P::product(key_span, span, width, r.keys, width, r.q_flipped + row * width, r.scores, tall,
                 false, tall);
      P::product(key_span, span, value_width, r.values, value_width,
                 r.grad_flipped + row * value_width, r.slopes, tall, false, tall);
      *part.d_offset += with_power(p.power, [&](auto power) {
        if constexpr (ROUNDS)
          if (sums) return weigh<power, true>(r, b, h, key, key_span, row, span, part);
        return weigh<power, false>(r, b, h, key, key_span, row, span, part);
      });
      P::product(key_span, value_width, depth, r.weights, tall, r.grad + row * value_width, dv,
                 value_width, true, value_width);
      P::product(key_span, width, depth, r.left, tall, r.q + row * width, dk, width, true, width);
      P::add_flipped(depth, width, key_span, r.right, tall, r.keys_packed, part.dq + row * width,
                     width, width, r.room);
    }
  }

  // Stores the gradients of one head's queries and score offset, and the sums of its rows.
  void finish(const Part& part, int64_t b, int64_t h) const {
    int64_t head = b * p.heads + h;
    double d_offset = *part.d_offset;
    for (int64_t i = 0; i < p.rows; i++) {
      T* to = at<T>(p.dq, p.dq_strides, b, h, i);
      if (store_row(to, part.dq + i * width, 1, p.width)) spoilt = 1;
      if (!p.row_dots) continue;
      RowSums summed = sums ? RowSums{part.dots[i], part.slopes[i]} : RowSums{};
      d_offset += store_dot(p, b, h, i, row_terms<T>(p, b, h, i), sums ? &summed : nullptr);
    }
    p.d_offset[head] = d_offset;
  }

  Part part_of(char* parts, int64_t split, int64_t head) const {
    Memory memory(parts + (split * heads() + head) * part_size());
    return part(memory);
  }

  // Adds the parts of a head, always in the same order.
  void finish_splits(char* parts, int64_t head) const {
    Part part = part_of(parts, 0, head);
    for (int64_t s = 1; s < splits; s++) {
      Part more = part_of(parts, s, head);
      *part.d_offset += *more.d_offset;
      for (int64_t e = 0; e < rows * width; e++) part.dq[e] += more.dq[e];
      for (int64_t i = 0; sums && i < rows; i++)
        part.dots[i] += more.dots[i], part.slopes[i] += more.slopes[i];
    }
    finish(part, head / p.heads, head % p.heads);
  }

  int64_t run(char* scratch) const {
    int64_t units = tables * splits, each = buffers_size();
    char* parts = splits == 1 ? nullptr : scratch;
    std::atomic<int64_t> next{0};
#pragma omp parallel num_threads(int(std::min(p.threads, units)))
    {
      typename P::Session session;
      Memory mine(scratch + parts_size() + omp_get_thread_num() * each);
      Buffers r = buffers(mine);
      for (int64_t number; (number = next++) < units;) unit(r, number, parts);
      if (parts) {
#pragma omp barrier
#pragma omp for
        for (int64_t head = 0; head < heads(); head++) finish_splits(parts, head);
      }
    }
    return spoilt;
  }
};
