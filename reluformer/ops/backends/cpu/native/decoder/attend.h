// Attention of a few rows: to the packed keys and values of a source, or to a KV cache by index.
#pragma once

#include "functions.h"

// Memory of one thread.
struct Scratch {
  std::vector<float> scores, kept;
  std::vector<int32_t> chosen;

  void reserve(int64_t keys) {
    size_t size = size_t(padded(keys, COLUMNS)) * ROWS;
    if (scores.size() >= size) return;
    scores.resize(size);
    kept.resize(size);
    chosen.resize(size);
  }
};

// Keys and values of one head of a sentence, packed as tables: scores are q times the keys, outputs
// are weights times the values.
class Context {
 public:
  // k and v: first row of the head; rows have the given stride.
  void pack(const float* k, const float* v, int64_t stride, int64_t count, int64_t width) {
    keys = count;
    head_width = width;
    packed_keys.reserve(padded(count, COLUMNS) * width, false);
    packed_values.reserve(padded(width, COLUMNS) * count, false);
    pack_panels(packed_keys.get(), k, width, 1, count, stride);
    pack_panels(packed_values.get(), v, count, stride, width, 1);
  }

  // Attention of `rows` <= ROWS queries; returns the number of values that were read.
  int64_t attend(const float* q, int64_t stride, int64_t rows, const Rule& rule, int64_t head,
                 float* out, int64_t out_stride, Scratch& scratch) const {
    int64_t read = 0;
    with_rows(rows, [&](auto R) {
      int64_t room = padded(keys, COLUMNS);
      float *scores = scratch.scores.data(), factors[R];
      vec total[R][VECS];
      for (int64_t j = 0; j < keys; j += COLUMNS) {
        multiply_panel<R, false>(q, stride, packed_keys + j * head_width, nullptr, head_width, total);
        for (int r = 0; r < R; r++) memcpy(scores + r * room + j, total[r], sizeof total[r]);
      }
      for (int r = 0; r < R; r++) factors[r] = rule.weigh(scores + r * room, keys, head);
      const float* weights = scores;
      const int32_t* chosen = nullptr;
      read = keys;
      // Softmax has no zeros to leave out.
      if (LEAVES_OUT_ZEROS && rule.power > 0) {
        weights = scratch.kept.data();
        chosen = scratch.chosen.data();
        read = leave_out_zeros(scores, room, R, keys, scratch.kept.data(), room,
                               scratch.chosen.data());
      }
      for (int64_t e = 0; e < head_width; e += COLUMNS) {
        const float* panel = packed_values + e * keys;
        if (chosen) multiply_panel<R, true>(weights, room, panel, chosen, read, total);
        else multiply_panel<R, false>(weights, room, panel, nullptr, keys, total);
        int64_t columns = std::min(COLUMNS, head_width - e);
        for (int r = 0; r < R; r++) {
          for (int v = 0; v < VECS; v++) total[r][v] *= factors[r];
          memcpy(out + r * out_stride + e, total[r], columns * sizeof(float));
        }
      }
    });
    return read;
  }

  int64_t keys = 0;

 private:
  int64_t head_width = 0;
  Buffer<float> packed_keys, packed_values;
};

// KV cache of all decoder layers. Step t stores one key and one value per row, layer and head; a
// hypothesis is the list of the rows that it used in each step. Continuing a hypothesis copies its
// list, and keys and values stay where they are.
class Cache {
 public:
  // Memory grows by blocks of at most 32 steps; `longest` steps are the most that there will be.
  Cache(int64_t layers, int64_t heads, int64_t head_width, int64_t rows, int64_t longest)
      : heads(heads), head_width(head_width), width(padded(head_width, LANES)), rows(rows),
        block_steps(std::min<int64_t>(longest, 32)), table(block_steps * rows * width),
        size(layers * 2 * heads * table) {}

  // Makes room for step `length`.
  void extend(int64_t length) {
    if (length < int64_t(blocks.size()) * block_steps) return;
    blocks.emplace_back();
    blocks.back().reserve(size, false);
  }

  // Address of layer 0, head 0 and key of a step and row.
  float* at(int64_t step, int64_t row) const {
    return blocks[step / block_steps].get() + (step % block_steps * rows + row) * width;
  }
  int64_t key_offset(int64_t layer, int64_t head) const { return (layer * 2 * heads + head) * table; }
  int64_t value_offset(int64_t layer, int64_t head) const {
    return ((layer * 2 + 1) * heads + head) * table;
  }
  void put(float* to, const float* from) const {
    memcpy(to, from, head_width * sizeof(float));
    memset(to + head_width, 0, (width - head_width) * sizeof(float));
  }

  const int64_t heads, head_width, width;

 private:
  int64_t rows, block_steps, table, size;
  std::vector<Buffer<float>> blocks;
};

// Attention of one query, padded to `width`, to keys and values at steps[t] plus an offset; returns
// the number of values that were read.
inline int64_t attend_steps(const float* q, float* const* steps, int64_t count, int64_t keys,
                            int64_t values, int64_t width, const Rule& rule, int64_t head,
                            float* out, Scratch& scratch) {
  float* scores = scratch.scores.data();
  for (int64_t j = 0; j < count; j += LANES) {
    vec products[LANES];
    for (int i = 0; i < LANES; i++) {
      const float* k = steps[std::min(j + i, count - 1)] + keys;
      vec total{};
      for (int64_t e = 0; e < width; e += LANES) total += load(q + e) * load(k + e);
      products[i] = total;
    }
    store(scores + j, sums(products));
  }
  float factor = rule.weigh(scores, count, head);
  float* weights = scratch.kept.data();
  int32_t* chosen = scratch.chosen.data();
  int64_t read = leave_out_zeros(scores, 0, 1, count, weights, 0, chosen);
  // VECS sums at a time, because an addition would wait for the one before.
  for (int64_t e = 0; e < width; e += COLUMNS) {
    vec total[VECS] = {};
    int64_t vectors = std::min<int64_t>(VECS, (width - e) / LANES);
    for (int64_t i = 0; i < read; i++) {
      const float* value = steps[chosen[i]] + values + e;
      if (vectors == VECS)
        for (int v = 0; v < VECS; v++) total[v] += weights[i] * load(value + v * LANES);
      else
        for (int v = 0; v < vectors; v++) total[v] += weights[i] * load(value + v * LANES);
    }
    for (int v = 0; v < vectors; v++) store(out + e + v * LANES, total[v] * factor);
  }
  return read;
}
