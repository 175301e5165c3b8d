// The output in tiles: the scores of a block of rows and a panel of keys are turned into weights
// and multiplied with the values at once. Nothing is rescaled, so the panels' products are added.
#pragma once

#include "problem.h"

#include <atomic>

template <class T, class P = Products<T>>
struct Forward {
  using W = typename P::Word;

  const Problem& p;
  int64_t width = up_to(p.width, P::UNIT), value_width = up_to(p.value_width, P::UNIT);
  int64_t tall, blocks;
  // Whether an output is NaN or infinite, which a hidden value may have caused.
  mutable std::atomic<int64_t> spoilt{0};

  explicit Forward(const Problem& problem) : p(problem) {
    // Panels are packed once for each block of rows: blocks are tall, but all threads need work.
    int64_t share = p.batch * p.heads * p.rows / (4 * p.threads);
    tall = up_to(std::min(clipped(share, 2 * P::ROWS, 1024), p.rows), P::ROWS);
    blocks = (p.rows + tall - 1) / tall;
  }

  struct Buffers {
    W *keys, *values, *rows, *weights;
    // sums [tall, LANES]: the lanes of a row are added at the end.
    float *scores, *out, *sums;
  };

  Buffers buffers(Memory& memory) const {
    Buffers r;
    r.keys = memory.take<W>(width * P::KEYS);
    r.values = memory.take<W>(value_width * P::KEYS);
    r.rows = memory.take<W>(width * tall);
    r.scores = memory.take<float>(P::ROWS * P::KEYS);
    r.weights = std::is_same_v<W, float> ? (W*)r.scores : memory.take<W>(P::ROWS * P::KEYS);
    r.out = memory.take<float>(value_width * tall);
    r.sums = memory.take<float>(tall * LANES);
    return r;
  }

  int64_t size() const {
    Memory counted(nullptr);
    buffers(counted);
    return counted.size;
  }

  // A tile of scores: `height` rows from `row` of head h, a multiple of HEIGHT, and `span` keys from
  // `key`, a multiple of UNIT.
  struct Tile {
    int64_t b, h, row, height, key, span;
    const W* rows;
    float *out, *sums;
  };

  // Turns the scores of `count` rows and N vectors of keys from `start` into weights.
  template <int POWER, int N, class Scores>
  void weigh(const Buffers& r, const Tile& t, int64_t i, int64_t count, int64_t start,
             Scores scores) const {
    float offset = score_offset_of(p, t.h), unit = float(p.unit);
    // Later rows see no earlier keys: the first and the last row decide for those between.
    int64_t first = t.key + start, last = first + N * LANES;
    bool whole = keys_of(p, t.b, t.row + i + count - 1).from <= first &&
                 keys_of(p, t.b, t.row + i).to >= last;
    for (int64_t m = 0; m < count; m++) {
      vec sum = load(t.sums + (i + m) * LANES);
      ints from, to;
      if (!whole) {
        Range seen = keys_of(p, t.b, t.row + i + m);
        from = ints{} + int32_t(clipped(seen.from - first, 0, N * LANES));
        to = ints{} + int32_t(clipped(seen.to - first, 0, N * LANES));
      }
      MaskLine mask{};
      // Rows of padding follow the last one.
      if (p.mask) mask = mask_from(p, t.b, t.h, std::min(t.row + i + m, p.rows - 1), first, KEYS_AXIS);
      for (int n = 0; n < N; n++) {
        vec x = P::rectified(scores(m, n) * unit + offset);
        if (!whole) {
          ints column = count_from(n * LANES);
          x = (column >= from) & (column < to) ? x : vec{};
        }
        if (p.mask) x = mask.keep(x, n * LANES, p.keys - first - n * LANES);
        x = raised<POWER>(x);
        sum += x;
        P::put(r.weights + (i + m) * P::KEYS + start + n * LANES, x);
      }
      store(t.sums + (i + m) * LANES, sum);
    }
  }

  // The weights of N vectors of keys from `start`, by way of registers.
  template <int POWER, int N>
  void strip_weights(const Buffers& r, const Tile& t, int64_t start) const {
    constexpr int64_t STEP = sizeof(float) / sizeof(W);
    for (int64_t i = 0; i < t.height; i += TALL) {
      vec held[TALL][N] = {};
      accumulate(held, width, t.rows + i * width, width, r.keys + start * STEP, P::KEYS);
      weigh<POWER, N>(r, t, i, TALL, start, [&](int m, int n) { return held[m][n]; });
    }
  }

  template <int POWER>
  [[gnu::noinline]] void weights(const Buffers& r, const Tile& t) const {
    if constexpr (P::IN_REGISTERS) {
      int64_t j = 0;
      for (; j + BROAD * LANES <= t.span; j += BROAD * LANES) strip_weights<POWER, BROAD>(r, t, j);
      for (; j + 2 * LANES <= t.span; j += 2 * LANES) strip_weights<POWER, 2>(r, t, j);
      for (; j < t.span; j += LANES) strip_weights<POWER, 1>(r, t, j);
    } else {
      P::product(t.height, t.span, width, t.rows, width, r.keys, r.scores, P::KEYS, false, P::KEYS);
      constexpr int64_t N = P::UNIT / LANES;
      for (int64_t j = 0; j < t.span; j += P::UNIT)
        weigh<POWER, N>(r, t, 0, t.height, j, [&](int m, int n) {
          return load(r.scores + m * P::KEYS + j + n * LANES);
        });
    }
  }

  void rows_block(const Buffers& r, int64_t item) const {
    int64_t h = item / blocks % p.heads, b = item / blocks / p.heads;
    int64_t kv = h / (p.heads / p.key_heads), first = item % blocks * tall;
    int64_t count = std::min(tall, p.rows - first);
    copy(r.rows, width, at<T>(p.q, p.q_strides, b, h, first), p.q_strides[2], count,
         up_to(count, P::HEIGHT), p.width);
    memset(r.out, 0, value_width * tall * sizeof(float));
    memset(r.sums, 0, tall * LANES * sizeof(float));
    int64_t start = keys_of(p, b, first).from, end = keys_of(p, b, first + count - 1).to;
    for (int64_t key = start; key < end; key += P::KEYS) {
      int64_t held = std::min(P::KEYS, end - key), span = up_to(held, P::UNIT);
      P::pack_transpose(r.keys, {P::KEYS, width, span}, at<T>(p.k, p.k_strides, b, kv, key),
                        p.k_strides[2], held, p.width);
      P::pack(r.values, value_width, at<T>(p.v, p.v_strides, b, kv, key), p.v_strides[2], held,
              span, p.value_width);
      for (int64_t i = 0; i < count; i += P::ROWS) {
        int64_t some = std::min(P::ROWS, count - i);
        if (keys_of(p, b, first + i + some - 1).to <= key ||
            keys_of(p, b, first + i).from >= key + held)
          continue;
        Tile tile{b, h, first + i, up_to(some, P::HEIGHT), key, span, r.rows + i * width,
                  r.out + i * value_width, r.sums + i * LANES};
        with_power(p.power, [&](auto power) { weights<power>(r, tile); });
        P::product(tile.height, value_width, span, r.weights, P::KEYS, r.values, tile.out,
                   value_width, true, value_width);
      }
    }
    for (int64_t i = 0; i < count; i++) {
      float factor = store_sum(p, b, h, first + i, sum(load(r.sums + i * LANES)));
      T* to = at<T>(p.out, p.out_strides, b, h, first + i);
      if (p.exact_out)
        store_row(exact_row(p, b, h, first + i), r.out + i * value_width, factor, p.value_width);
      if (store_row(to, r.out + i * value_width, factor, p.value_width)) spoilt = 1;
    }
  }

  int64_t run(char* scratch) const {
    int64_t items = p.batch * p.heads * blocks, each = size();
    std::atomic<int64_t> next{0};
#pragma omp parallel num_threads(int(std::min(p.threads, items)))
    {
      typename P::Session session;
      Memory memory(scratch + omp_get_thread_num() * each);
      Buffers mine = buffers(memory);
      for (int64_t item; (item = next++) < items;) rows_block(mine, item);
    }
    return spoilt;
  }
};
