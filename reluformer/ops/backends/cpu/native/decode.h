// The output of a few rows, as in decoding: keys and values are read without packing, and a value is
// read only if its key has a weight.
#pragma once

#include "problem.h"

// Part of a row as float32 vectors: one for float32; two for bfloat16, the even and the odd
// elements, which a shift and a mask extract.
template <class T>
struct Piece;

template <>
struct Piece<float> {
  static constexpr int PARTS = 1;
  static void read(const float* from, vec (&to)[1]) { to[0] = load(from); }
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
};

template <class T>
struct Decode {
  static constexpr int PARTS = Piece<T>::PARTS, WIDE = PARTS * LANES;
  static constexpr int64_t BLOCK = 128, AHEAD = 16;

  const Problem& p;
  int64_t groups = p.heads / p.key_heads, rows = groups * p.rows;
  int64_t width = up_to(p.width, WIDE), value_width = up_to(p.value_width, WIDE);
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

  static void fetch(const T* row, int64_t width) {
    for (int64_t e = 0; e < width; e += 64 / int64_t(sizeof(T))) __builtin_prefetch(row + e);
  }

  // Reads part of a row; the last part may be shorter than a vector.
  template <bool WHOLE>
  static void read(const T* from, int64_t left, vec (&to)[PARTS]) {
    if (WHOLE || left >= WIDE) return Piece<T>::read(from, to);
    T held[WIDE];
    for (int e = 0; e < WIDE; e++) held[e] = e < left ? from[e] : T(0);
    Piece<T>::read(held, to);
  }

  // q.k of one row with LANES keys; missing keys are replaced by the last one.
  template <bool WHOLE>
  vec scores(const float* q, const T* k, int64_t stride, int64_t count) const {
    constexpr int SOME = 4;
    vec all[LANES];
    for (int j = 0; j < LANES; j += SOME) {
      const T* keys[SOME];
      vec total[SOME] = {};
      for (int s = 0; s < SOME; s++) {
        keys[s] = k + std::min<int64_t>(j + s, count - 1) * stride;
        fetch(keys[s] + AHEAD * stride, p.width);
      }
      for (int64_t e = 0; e < p.width; e += WIDE) {
        vec rows[PARTS];
        memcpy(rows, q + e, sizeof rows);
        for (int s = 0; s < SOME; s++) {
          vec piece[PARTS];
          read<WHOLE>(keys[s] + e, p.width - e, piece);
          for (int part = 0; part < PARTS; part++) total[s] += rows[part] * piece[part];
        }
      }
      for (int s = 0; s < SOME; s++) all[j + s] = total[s];
    }
    return sums(all);
  }

  // out [N pieces] += sum of weights times values.
  template <int N>
  void add_values(float* out, const T* v, int64_t left, const float* weights, const int* chosen,
                  int count) const {
    vec total[N][PARTS];
    memcpy(total, out, sizeof total);
    for (int j = 0; j < count; j++) {
      const T* row = v + chosen[j] * p.v_strides[2];
      for (int n = 0; n < N; n++) {
        vec piece[PARTS];
        read<(N > 1)>(row + n * WIDE, left - n * WIDE, piece);
        for (int s = 0; s < PARTS; s++) total[n][s] += weights[j] * piece[s];
      }
    }
    memcpy(out, total, sizeof total);
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
      for (int64_t e = 0; e < width; e++) {
        int64_t to = e / WIDE * WIDE + e % PARTS * LANES + e % WIDE / PARTS;
        q[i * width + to] = e < p.width ? wide(from[e]) : 0;
      }
    }
    for (int64_t start = first; start < last; start += BLOCK)
      for (int64_t i = 0; i < rows; i++) {
        Range seen = keys_of(p, b, i % p.rows);
        int64_t from = std::max(start, seen.from);
        int64_t to = std::min({start + BLOCK, last, seen.to});
        if (from < to)
          row_block(q + i * width, out + i * value_width, totals[i], b, kv, from, to - from,
                           score_offset_of(p, kv * groups + i / p.rows));
      }
    if (splits == 1)
      for (int64_t i = 0; i < rows; i++) finish(r, table, i);
  }

  // One row and at most BLOCK keys.
  void row_block(const float* q, float* out, float& total, int64_t b, int64_t kv, int64_t from,
                 int64_t count, float offset) const {
    const T* k = at<T>(p.k, p.k_strides, b, kv, from);
    const T* v = at<T>(p.v, p.v_strides, b, kv, from);
    float weights[BLOCK];
    int chosen[BLOCK], some = 0;
    vec sum{};
    for (int64_t j = 0; j < count; j += LANES) {
      const T* keys = k + j * p.k_strides[2];
      vec x = width == p.width ? scores<true>(q, keys, p.k_strides[2], count - j)
                               : scores<false>(q, keys, p.k_strides[2], count - j);
      x = x * float(p.unit) + offset;
      x = std::is_same_v<T, float> ? (x < 0 ? vec{} : x) : (x > 0 ? x : vec{});
      x = with_power(p.power, [&](auto power) { return raised<power>(x); });
      x = count_from(int32_t(j)) < int32_t(count) ? x : vec{};
      sum += x;
      int known = some;
      for (int lane = 0; lane < LANES; lane++) {
        weights[some] = x[lane];
        chosen[some] = int(j) + lane;
        some += x[lane] != 0;
      }
      // Prefetches the values while further scores are computed.
      for (; known < some; known++) fetch(v + chosen[known] * p.v_strides[2], p.value_width);
    }
    total += ::sum(sum);
    int64_t e = 0;
    constexpr int N = 4 / PARTS;
    for (; e + N * WIDE <= p.value_width; e += N * WIDE)
      add_values<N>(out + e, v + e, N * WIDE, weights, chosen, some);
    for (; e < p.value_width; e += WIDE)
      add_values<1>(out + e, v + e, p.value_width - e, weights, chosen, some);
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
      int64_t from = e / WIDE * WIDE + e % PARTS * LANES + e % WIDE / PARTS;
      float x = out[from] * factor;
      to[e] = narrow<T>(x);
      if (exact) exact[e] = x;
    }
  }

  void run(char* scratch) const {
    Memory memory(scratch);
    Buffers r = buffers(memory);
    int64_t units = tables * splits;
    // Waking other threads takes as long as reading this amount of memory.
    bool small = tables * p.keys * (p.width + p.value_width) < (1 << 16);
    int threads = small ? 1 : int(std::min(p.threads, units));
#pragma omp parallel for num_threads(threads) schedule(dynamic, 1)
    for (int64_t number = 0; number < units; number++) unit(r, number);
    if (splits > 1)
      for (int64_t i = 0; i < tables * rows; i++) finish(r, i / rows, i % rows);
  }
};
