// The output of a few rows, as in decoding: keys and values are read without packing, and a value is
// read only if its key has a weight.
#pragma once

#include "few_rows.h"

template <class T>
struct Decode {
  using R = Rows<T>;
  static constexpr int64_t BLOCK = 128;

  const Problem& p;
  int64_t groups = p.heads / p.key_heads, rows = groups * p.rows;
  int64_t width = up_to(p.width, R::WIDE), value_width = up_to(p.value_width, R::WIDE);
  int64_t tables = p.batch * p.key_heads, splits, share;

  explicit Decode(const Problem& problem) : p(problem) {
    splits = clipped(up_to(2 * p.threads, tables) / tables, 1, p.keys / 1024 + 1);
    share = up_to((p.keys + splits - 1) / splits, BLOCK);
  }

  int64_t accumulators() const { return tables * splits * rows; }

  // Sums of weighted values and of weights for each row and split, then the rows of q in float32.
  struct Buffers {
    float *out, *sums, *q;
  };
  Buffers buffers(Memory& memory) const {
    Buffers r;
    r.out = memory.take<float>(accumulators() * value_width);
    r.sums = memory.take<float>(accumulators());
    r.q = memory.take<float>(tables * splits * rows * width);
    return r;
  }
  int64_t size() const {
    Memory counted(nullptr);
    buffers(counted);
    return counted.size;
  }

  void unit(const Buffers& r, int64_t number) const {
    int64_t table = number / splits, b = table / p.key_heads, kv = table % p.key_heads;
    int64_t first = number % splits * share, last = std::min(first + share, keys_held(p, b));
    float* out = r.out + number * rows * value_width;
    float *totals = r.sums + number * rows, *q = r.q + number * rows * width;
    memset(out, 0, rows * value_width * sizeof(float));
    memset(totals, 0, rows * sizeof(float));
    for (int64_t i = 0; i < rows; i++) {
      const T* from = at<T>(p.q, p.q_strides, b, kv * groups + i / p.rows, i % p.rows);
      R::to_pieces(q + i * width, from, p.width);
    }
    for (int64_t start = first; start < last; start += BLOCK)
      for (int64_t i = 0; i < rows; i++) {
        Range seen = keys_of(p, b, i % p.rows);
        int64_t from = std::max(start, seen.from);
        int64_t to = std::min({start + BLOCK, last, seen.to});
        if (from < to)
          row_block(q + i * width, out + i * value_width, totals[i], b, kv, i, from, to - from);
      }
    if (splits == 1)
      for (int64_t i = 0; i < rows; i++) finish(r, table, i);
  }

  // Row i of a key head and at most BLOCK keys.
  void row_block(const float* q, float* out, float& total, int64_t b, int64_t kv, int64_t i,
                 int64_t from, int64_t count) const {
    int64_t h = kv * groups + i / p.rows;
    float offset = score_offset_of(p, h);
    MaskLine mask{};
    if (p.mask) mask = mask_from(p, b, h, i % p.rows, from, KEYS_AXIS);
    const T* k = at<T>(p.k, p.k_strides, b, kv, from);
    const T* v = at<T>(p.v, p.v_strides, b, kv, from);
    float weights[BLOCK];
    int chosen[BLOCK], some = 0;
    vec sum{};
    for (int64_t j = 0; j < count; j += LANES) {
      vec x = R::products(q, k + j * p.k_strides[2], p.k_strides[2], count - j, p.width);
      x = x * float(p.unit) + offset;
      x = Products<T>::rectified(x);
      x = with_power(p.power, [&](auto power) { return raised<power>(x); });
      x = count_from(int32_t(j)) < int32_t(count) ? x : vec{};
      if (p.mask) x = mask.keep(x, j, count - j);
      sum += x;
      int known = some;
      for (int lane = 0; lane < LANES; lane++) {
        weights[some] = x[lane];
        chosen[some] = int(j) + lane;
        some += x[lane] != 0;
      }
      // Prefetches the values while further scores are computed.
      for (; known < some; known++) R::fetch(v + chosen[known] * p.v_strides[2], p.value_width);
    }
    total += ::sum(sum);
    R::add(out, v, p.v_strides[2], p.value_width, weights, chosen, some);
  }

  void finish(const Buffers& r, int64_t table, int64_t i) const {
    int64_t b = table / p.key_heads, h = table % p.key_heads * groups + i / p.rows;
    float* out = r.out + (table * splits * rows + i) * value_width;
    float total = r.sums[table * splits * rows + i];
    for (int64_t s = 1; s < splits; s++) {
      const float* more = out + s * rows * value_width;
      for (int64_t e = 0; e < value_width; e++) out[e] += more[e];
      total += r.sums[(table * splits + s) * rows + i];
    }
    float factor = store_sum(p, b, h, i % p.rows, total);
    T* to = at<T>(p.out, p.out_strides, b, h, i % p.rows);
    float* exact = p.exact_out ? exact_row(p, b, h, i % p.rows) : nullptr;
    for (int64_t e = 0; e < p.value_width; e++) {
      float x = out[R::place(e)] * factor;
      to[e] = narrow<T>(x);
      if (exact) exact[e] = x;
    }
  }

  void run(char* scratch) const {
    Memory memory(scratch);
    Buffers r = buffers(memory);
    int64_t units = tables * splits;
    int threads = is_small(p) ? 1 : int(std::min(p.threads, units));
#pragma omp parallel for num_threads(threads) schedule(dynamic, 1)
    for (int64_t number = 0; number < units; number++) unit(r, number);
    if (splits > 1)
      for (int64_t i = 0; i < tables * rows; i++) finish(r, i / rows, i % rows);
  }
};
