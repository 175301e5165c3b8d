// Packed tables of weights of every kind, and rows of activations prepared for them.
#pragma once

#include "bytes.h"
#include "description.h"
#include "memory.h"
#include "team.h"

// Rows of a product that one thread computes with the same panel.
constexpr int64_t GROUP = 8 * ROWS;

// Activations [rows, stride] in float32, and for int8 tables quantised.
struct Rows {
  Kind kind;
  int64_t width, stride;
  Buffer<float> values, scales;
  Buffer<uint8_t> bytes;

  Rows(Kind kind, int64_t width) : kind(kind), width(width), stride(padded(width, COLUMNS)) {}

  // One row more than needed, because vectors may be read beyond the end of a head.
  void reserve(int64_t rows) {
    values.reserve((rows + 1) * stride);
    scales.reserve(rows);
    if (kind == INT8) bytes.reserve(rows * stride);
  }
  float* row(int64_t r) const { return values + r * stride; }

  // Quantises row r once its values are final.
  void finish(int64_t r) {
    if (kind == INT8) scales[r] = quantise(row(r), width, bytes + r * stride, OFFSET);
  }
};

inline std::vector<float> copied(const float* from, int64_t count, int64_t unit) {
  std::vector<float> to(padded(count, unit));
  if (from) std::copy(from, from + count, to.begin());
  return to;
}

// Calls f(panel, first row, rows) for blocks of at most ROWS rows; threads share panels and groups.
template <class F>
inline void for_blocks(const Team& team, int64_t panels, int64_t rows, const F& f) {
  int64_t groups = divide_up(rows, GROUP);
  team.for_units(panels * groups, [&](int64_t unit) {
    int64_t panel = unit / groups, first = unit % groups * GROUP;
    int64_t last = std::min(first + GROUP, rows);
    for (int64_t r = first; r < last; r += ROWS) f(panel, r, std::min<int64_t>(ROWS, last - r));
  });
}

// Numbers of the outputs of a panel, which are read together when its product is finished.
struct PanelEnd {
  float bias[COLUMNS], scales[COLUMNS];
  int32_t sums[COLUMNS];  // of weights in int8
};

// Panels of weights, one after the other, and their ends. Ends between the panels would move them off
// the starts of pages, which took 4% more time in float32.
struct Panels {
  int64_t count, bytes;  // number of panels, bytes of the weights of one
  char* data;
  std::vector<PanelEnd> ends;

  Panels(int64_t outputs, int64_t bytes, Arena& arena)
      : count(divide_up(outputs, COLUMNS)), bytes(bytes), data(arena.take<char>(count * bytes)),
        ends(count) {}

  template <class T>
  T* weights(int64_t panel) const {
    return (T*)(data + panel * bytes);
  }

  // Calls f(panel, first output, outputs) for all panels, whose ends have the biases and scales.
  template <class F>
  void fill(int64_t outputs, const float* bias, const float* scales, const F& f) {
    for (int64_t p = 0; p < count; p++) {
      int64_t first = p * COLUMNS, columns = std::min(COLUMNS, outputs - first);
      if (bias) std::copy(bias + first, bias + first + columns, ends[p].bias);
      if (scales) std::copy(scales + first, scales + first + columns, ends[p].scales);
      f(p, first, columns);
    }
  }
};

// Bytes of a weight.
inline int64_t size_of(Kind kind) { return kind == FLOAT32 ? 4 : kind == BFLOAT16 ? 2 : 1; }

// Writes a block of results [R, COLUMNS] plus the bias to out [rows, stride], or adds it to out.
template <int R>
inline void write_block(const vec (&total)[R][VECS], const float* bias, float* out, int64_t stride,
                        bool add) {
  for (int r = 0; r < R; r++)
    for (int v = 0; v < VECS; v++) {
      float* to = out + r * stride + v * LANES;
      vec y = total[r][v] + load(bias + v * LANES);
      store(to, add ? load(to) + y : y);
    }
}

// A linear layer: out = x W^T + bias.
class Table {
 public:
  Table(const TableDescription& d, const float* bias, Arena& arena)
      : kind(Kind(d.kind)), outputs(d.height), inputs(d.width), quads(divide_up(inputs, 4)),
        panels(outputs, (kind == INT8 ? 4 * quads : inputs) * COLUMNS * size_of(kind), arena) {
    panels.fill(outputs, bias, d.scales, [&](int64_t p, int64_t first, int64_t columns) {
      if (kind == FLOAT32) pack<float>(p, (float*)d.rows + first * inputs, columns);
      if (kind == BFLOAT16) pack<bf16>(p, (bf16*)d.rows + first * inputs, columns);
      if (kind == INT8)
        pack_dense_bytes(panels.weights<int8_t>(p), panels.ends[p].sums,
                         (int8_t*)d.rows + first * inputs, inputs, columns);
    });
  }

  // out [rows, stride] = x W^T + bias, or that is added to out. The stride is a multiple of COLUMNS.
  void multiply(const Team& team, const Rows& x, int64_t rows, float* out, int64_t stride,
                bool add = false) const {
    for_blocks(team, panels.count, rows, [&](int64_t panel, int64_t first, int64_t count) {
      with_rows(count, [&](auto R) {
        vec total[R][VECS];
        block<R>(x, first, panel, total);
        write_block<R>(total, panels.ends[panel].bias, out + first * stride + panel * COLUMNS, stride,
                       add);
      });
    });
  }

  // Row n of W, of an embedding for example, times a factor.
  void read_row(int64_t n, float factor, float* out) const {
    int64_t panel = n / COLUMNS, column = n % COLUMNS;
    for (int64_t i = 0; i < inputs; i++) {
      int64_t row = i * COLUMNS;
      if (kind == FLOAT32) out[i] = factor * panels.weights<float>(panel)[row + column];
      if (kind == BFLOAT16)
        out[i] = factor * wide(panels.weights<bf16>(panel)[row + place_of<bf16>(column)]);
      if (kind == INT8) {
        int8_t weight = panels.weights<int8_t>(panel)[(i / 4 * COLUMNS + column) * 4 + i % 4];
        out[i] = factor * (panels.ends[panel].scales[column] * weight);
      }
    }
  }

  const Kind kind;
  const int64_t outputs, inputs;

 private:
  template <class T>
  void pack(int64_t panel, const T* rows, int64_t columns) {
    pack_panel(panels.weights<T>(panel), rows, inputs, 1, columns, inputs);
  }

  template <int R>
  void block(const Rows& x, int64_t first, int64_t panel, vec (&total)[R][VECS]) const {
    const float* values = x.row(first);
    if (kind == FLOAT32)
      multiply_panel<R, false>(values, x.stride, panels.weights<float>(panel), nullptr, inputs,
                               total);
    if (kind == BFLOAT16)
      multiply_panel<R, false>(values, x.stride, panels.weights<bf16>(panel), nullptr, inputs, total);
    if (kind != INT8) return;
    ints sums[R][VECS];
    multiply_dense_bytes<R>(x.bytes + first * x.stride, x.stride, panels.weights<int8_t>(panel),
                            quads, sums);
    const PanelEnd& end = panels.ends[panel];
    for (int r = 0; r < R; r++)
      for (int v = 0; v < VECS; v++) {
        ints offset = OFFSET * (ints)load(end.sums + v * LANES);
        vec exact = __builtin_convertvector(sums[r][v] - offset, vec);
        total[r][v] = exact * (x.scales[first + r] * load(end.scales + v * LANES));
      }
  }

  int64_t quads;
  Panels panels;
};

// Weights of slots, at least 0, with the slots left out that no row of a block of ROWS rows reads.
// Blocks keep all slots where reading the table from start to end is faster.
struct SlotWeights {
  Kind kind;
  int64_t slots, stride;
  Buffer<float> kept, scales;
  Buffer<uint8_t> quantised, bytes;
  Buffer<int32_t> chosen, counts;

  SlotWeights(Kind kind, int64_t slots) : kind(kind), slots(slots), stride(padded(slots, 64)) {}

  void reserve(int64_t rows) {
    int64_t blocks = divide_up(rows, ROWS);
    chosen.reserve(blocks * stride);
    counts.reserve(blocks);
    scales.reserve(blocks * ROWS);
    if (kind != INT8) return kept.reserve(blocks * ROWS * stride);
    quantised.reserve(blocks * ROWS * stride);
    bytes.reserve(blocks * ROWS * stride);
  }

  // Prepares one block from weights [rows, x_stride], which it may change. `is_only` says that no
  // other block reads the table. Returns the number of slots that will be read.
  int64_t prepare(int64_t block, float* x, int64_t x_stride, int64_t rows, const float* slot_scales,
                  bool is_only) {
    int64_t first = block * ROWS * stride, count = 0;
    int32_t* list = chosen + block * stride;
    if (kind == INT8)
      for (int64_t r = 0; r < rows; r++) {
        float* row = x + r * x_stride;
        scale(row, slot_scales);
        scales[block * ROWS + r] = quantise(row, slots, quantised + first + r * stride, 0);
      }
    // Memory delivers scattered rows at about a quarter of the speed of consecutive ones.
    if (!LEAVES_OUT_ZEROS || (is_only && count_slots(x, x_stride, rows) * 4 >= slots)) {
      counts[block] = ALL;
      for (int64_t r = 0; r < rows; r++) {
        if (kind == INT8) memcpy(bytes + first + r * stride, quantised + first + r * stride, stride);
        else memcpy(kept + first + r * stride, x + r * x_stride, slots * sizeof(float));
      }
      return slots;
    }
    if (kind == INT8)
      count = leave_out_zero_bytes(quantised + first, stride, rows, slots, bytes + first, list);
    else count = leave_out_zeros(x, x_stride, rows, slots, kept + first, stride, list);
    return counts[block] = int32_t(count);
  }
  static constexpr int32_t ALL = -1;

 private:
  // Weights and scales are padded with zeros to whole vectors. The number of slots is copied, because
  // a store to a row could change the member, and the compiler would not use vectors.
  void scale(float* row, const float* slot_scales) const {
    for (int64_t s = 0, end = slots; s < end; s += LANES)
      store(row + s, load(row + s) * load(slot_scales + s));
  }

  // Number of slots with a weight in one of the rows.
  int64_t count_slots(const float* x, int64_t x_stride, int64_t rows) const {
    ints counts{};
    for (int64_t s = 0; s < slots; s += LANES) {
      ints any{};
      for (int64_t r = 0; r < rows; r++) any |= load(x + r * x_stride + s) != 0;
      counts -= any;
    }
    int64_t total = 0;
    for (int i = 0; i < LANES; i++) total += counts[i];
    return total;
  }
};

// Values of a memory: out = weights V + bias, which reads only slots with a weight.
class Values {
 public:
  Values(const TableDescription& d, const float* bias, Arena& arena)
      : slots(d.height), outputs(d.width), kind(Kind(d.kind)), scales(copied(d.scales, slots, COLUMNS)),
        // Values in int8 are read four slots at a time.
        panels(outputs, (kind == INT8 ? padded(slots, 4) : slots) * COLUMNS * size_of(kind), arena) {
    panels.fill(outputs, bias, nullptr, [&](int64_t p, int64_t first, int64_t columns) {
      if (kind == FLOAT32) pack<float>(p, (float*)d.rows + first, columns);
      if (kind == BFLOAT16) pack<bf16>(p, (bf16*)d.rows + first, columns);
      if (kind == INT8)
        pack_value_bytes(panels.weights<int8_t>(p), (int8_t*)d.rows + first, slots, outputs, columns);
    });
  }

  void multiply(const Team& team, const SlotWeights& x, int64_t rows, float* out, int64_t stride,
                bool add) const {
    for_blocks(team, panels.count, rows, [&](int64_t panel, int64_t first, int64_t count) {
      with_rows(count, [&](auto R) {
        vec total[R][VECS];
        read<R>(x, first / ROWS, panel, total);
        write_block<R>(total, panels.ends[panel].bias, out + first * stride + panel * COLUMNS, stride,
                       add);
      });
    });
  }

  const int64_t slots, outputs;
  const Kind kind;
  const std::vector<float> scales;

 private:
  template <class T>
  void pack(int64_t panel, const T* rows, int64_t columns) {
    pack_panel(panels.weights<T>(panel), rows, slots, outputs, columns, 1);
  }

  template <int R>
  void read(const SlotWeights& x, int64_t block, int64_t panel, vec (&total)[R][VECS]) const {
    if (kind == FLOAT32) read_floats<R, float>(x, block, panel, total);
    if (kind == BFLOAT16) read_floats<R, bf16>(x, block, panel, total);
    if (kind == INT8) read_bytes<R>(x, block, panel, total);
  }

  template <int R, class T>
  void read_floats(const SlotWeights& x, int64_t block, int64_t panel,
                   vec (&total)[R][VECS]) const {
    const T* rows = panels.weights<T>(panel);
    const float* weights = x.kept + block * ROWS * x.stride;
    const int32_t* list = x.chosen + block * x.stride;
    int64_t count = x.counts[block];
    if (count == SlotWeights::ALL)
      multiply_panel<R, false>(weights, x.stride, rows, list, slots, total);
    else multiply_panel<R, true>(weights, x.stride, rows, list, count, total);
  }

  template <int R>
  void read_bytes(const SlotWeights& x, int64_t block, int64_t panel, vec (&total)[R][VECS]) const {
    const int8_t* rows = panels.weights<int8_t>(panel);
    const uint8_t* weights = x.bytes + block * ROWS * x.stride;
    const int32_t* list = x.chosen + block * x.stride;
    int64_t count = x.counts[block];
    ints sums[R][VECS];
    if (count == SlotWeights::ALL)
      multiply_value_bytes<R, false>(weights, x.stride, rows, list, divide_up(slots, 4), sums);
    else multiply_value_bytes<R, true>(weights, x.stride, rows, list, count / 4, sums);
    for (int r = 0; r < R; r++)
      for (int v = 0; v < VECS; v++)
        total[r][v] = __builtin_convertvector(sums[r][v], vec) * x.scales[block * ROWS + r];
  }

  Panels panels;
};
