// The output in tiles: the scores of a block of rows and a panel of keys are turned into weights
// and multiplied with the values at once. Nothing is rescaled, so the panels' products are added.
#pragma once

#include "problem.h"

#include <atomic>

template <class T>
struct Forward {
  using P = Products<T>;
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

  // Turns the scores of `count` rows from `row` and KEYS keys from `key` into weights.
  template <int POWER>
  void weigh(const Buffers& r, int64_t b, int64_t row, int64_t count, int64_t key, float offset,
             float* sums) const {
    for (int64_t i = 0; i < count; i++) {
      Range seen = keys_of(p, b, row + i);
      bool whole = seen.from <= key && seen.to >= key + P::KEYS;
      ints from = ints{} + int32_t(clipped(seen.from - key, 0, P::KEYS));
      ints to = ints{} + int32_t(clipped(seen.to - key, 0, P::KEYS));
      vec sum = load(sums + i * LANES);
      for (int64_t j = 0; j < P::KEYS; j += LANES) {
        vec x = P::rectified(load(r.scores + i * P::KEYS + j) + offset);
        if (!whole) {
          ints column = count_from(int32_t(j));
          x = (column >= from) & (column < to) ? x : vec{};
        }
        x = raised<POWER>(x);
        sum += x;
        P::put(r.weights + i * P::KEYS + j, x);
      }
      store(sums + i * LANES, sum);
    }
  }

  void rows_block(const Buffers& r, int64_t item) const {
    int64_t h = item / blocks % p.heads, b = item / blocks / p.heads;
    int64_t kv = h / (p.heads / p.key_heads), first = item % blocks * tall;
    int64_t count = std::min(tall, p.rows - first);
    copy(r.rows, width, at<T>(p.q, p.q_strides, b, h, first), p.q_strides[2], count,
         up_to(count, P::UNIT), p.width);
    memset(r.out, 0, value_width * tall * sizeof(float));
    memset(r.sums, 0, tall * LANES * sizeof(float));
    int64_t start = keys_of(p, b, first).from, end = keys_of(p, b, first + count - 1).to;
    for (int64_t key = start; key < end; key += P::KEYS) {
      int64_t held = std::min(P::KEYS, end - key);
      P::pack_transpose(r.keys, P::KEYS, at<T>(p.k, p.k_strides, b, kv, key), p.k_strides[2],
                        held, p.width, width);
      P::pack(r.values, value_width, at<T>(p.v, p.v_strides, b, kv, key), p.v_strides[2], held,
              P::KEYS, p.value_width);
      for (int64_t i = 0; i < count; i += P::ROWS) {
        int64_t some = std::min(P::ROWS, count - i), tile = up_to(some, P::UNIT);
        if (keys_of(p, b, first + i + some - 1).to <= key ||
            keys_of(p, b, first + i).from >= key + held)
          continue;
        P::product(tile, P::KEYS, width, r.rows + i * width, width, r.keys, r.scores, P::KEYS,
                   false, P::KEYS);
        with_power(p.power, [&](auto power) {
          weigh<power>(r, b, first + i, some, key, score_offset_of(p, h), r.sums + i * LANES);
        });
        P::product(tile, value_width, P::KEYS, r.weights, P::KEYS, r.values,
                   r.out + i * value_width, value_width, true, value_width);
      }
    }
    for (int64_t i = 0; i < count; i++) {
      float factor = store_sum(p, b, h, first + i, sum(load(r.sums + i * LANES)));
      T* to = at<T>(p.out, p.out_strides, b, h, first + i);
      int bad = 0;
      for (int64_t e = 0; e < p.value_width; e++) {
        float x = r.out[i * value_width + e] * factor;
        bad |= is_nonfinite(x);
        to[e] = narrow<T>(x);
      }
      if (bad) spoilt = 1;
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
