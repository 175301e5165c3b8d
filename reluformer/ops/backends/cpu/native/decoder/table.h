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
inline void for_blocks(const Team& team, int64_t panels, int64_t rows, F f) {
  int64_t groups = divide_up(rows, GROUP);
  team.for_units(panels * groups, [&](int64_t unit) {
    int64_t panel = unit / groups, first = unit % groups * GROUP;
    int64_t last = std::min(first + GROUP, rows);
    for (int64_t r = first; r < last; r += ROWS) f(panel, r, std::min<int64_t>(ROWS, last - r));
  });
}

// A linear layer: out = x W^T + bias.
class Table {
 public:
  Table(const TableDescription& d, const float* bias, Arena& arena)
      : kind(Kind(d.kind)), outputs(d.height), inputs(d.width),
        panels(divide_up(outputs, COLUMNS)), quads(divide_up(inputs, 4)),
        bias(copied(bias, outputs, COLUMNS)), scales(copied(d.scales, outputs, COLUMNS)) {
    if (kind == FLOAT32) pack<float>(d.rows, arena);
    if (kind == BFLOAT16) pack<bf16>(d.rows, arena);
    if (kind != INT8) return;
    const int8_t* rows = (const int8_t*)d.rows;
    data = arena.take<int8_t>(panels * quads * COLUMNS * 4);
    pack_dense_bytes((int8_t*)data, rows, inputs, outputs);
    offsets.resize(panels * COLUMNS);
    for (int64_t o = 0; o < outputs; o++)
      for (int64_t i = 0; i < inputs; i++) offsets[o] += OFFSET * rows[o * inputs + i];
  }

  // out [rows, stride] = x W^T + bias, or that is added to out. The stride is a multiple of COLUMNS.
  void multiply(const Team& team, const Rows& x, int64_t rows, float* out, int64_t stride,
                bool add = false) const {
    for_blocks(team, panels, rows, [&](int64_t panel, int64_t first, int64_t count) {
      with_rows(count, [&](auto R) {
        vec total[R][VECS];
        block<R>(x, first, panel, total);
        for (int r = 0; r < R; r++)
          for (int v = 0; v < VECS; v++) {
            float* to = out + (first + r) * stride + panel * COLUMNS + v * LANES;
            vec y = total[r][v] + load(bias.data() + panel * COLUMNS + v * LANES);
            store(to, add ? load(to) + y : y);
          }
      });
    });
  }

  // Row n of W, of an embedding for example, times a factor.
  void read_row(int64_t n, float factor, float* out) const {
    int64_t panel = n / COLUMNS, column = n % COLUMNS;
    for (int64_t i = 0; i < inputs; i++) {
      int64_t row = (panel * inputs + i) * COLUMNS;
      if (kind == FLOAT32) out[i] = factor * ((float*)data)[row + column];
      if (kind == BFLOAT16) out[i] = factor * wide(((bf16*)data)[row + place_of<bf16>(column)]);
      if (kind == INT8) {
        int64_t at = ((panel * quads + i / 4) * COLUMNS + column) * 4 + i % 4;
        out[i] = factor * (scales[n] * ((int8_t*)data)[at]);
      }
    }
  }

  const Kind kind;
  const int64_t outputs, inputs;

 private:
  template <class T>
  void pack(const void* rows, Arena& arena) {
    data = arena.take<T>(panels * inputs * COLUMNS);
    pack_panels((T*)data, (const T*)rows, inputs, 1, outputs, inputs);
  }

  template <int R>
  void block(const Rows& x, int64_t first, int64_t panel, vec (&total)[R][VECS]) const {
    const float* values = x.row(first);
    if (kind == FLOAT32)
      multiply_panel<R, false>(values, x.stride, (float*)data + panel * inputs * COLUMNS,
                               nullptr, inputs, total);
    if (kind == BFLOAT16)
      multiply_panel<R, false>(values, x.stride, (bf16*)data + panel * inputs * COLUMNS,
                               nullptr, inputs, total);
    if (kind != INT8) return;
    ints sums[R][VECS];
    multiply_dense_bytes<R>(x.bytes + first * x.stride, x.stride,
                            (int8_t*)data + panel * quads * COLUMNS * 4, quads, sums);
    for (int r = 0; r < R; r++)
      for (int v = 0; v < VECS; v++) {
        int64_t column = panel * COLUMNS + v * LANES;
        ints offset;
        memcpy(&offset, offsets.data() + column, sizeof offset);
        vec exact = __builtin_convertvector(sums[r][v] - offset, vec);
        total[r][v] = exact * (x.scales[first + r] * load(scales.data() + column));
      }
  }

  int64_t panels, quads;
  std::vector<float> bias, scales;
  std::vector<int32_t> offsets;
  void* data = nullptr;
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
    int64_t first = block * ROWS * stride, count;
    int32_t* list = chosen + block * stride;
    if (kind == INT8) {
      for (int64_t r = 0; r < rows; r++) {
        float* row = x + r * x_stride;
        for (int64_t s = 0; s < slots; s++) row[s] *= slot_scales[s];
        scales[block * ROWS + r] = quantise(row, slots, quantised + first + r * stride, 0);
      }
      count = leave_out_zero_bytes(quantised + first, stride, rows, slots, bytes + first, list);
    } else {
      count = leave_out_zeros(x, x_stride, rows, slots, kept + first, stride, list);
    }
    counts[block] = int32_t(count);
    // Memory delivers scattered rows at about a quarter of the speed of consecutive ones.
    if (LEAVES_OUT_ZEROS && (!is_only || count * 4 < slots)) return count;
    counts[block] = ALL;
    for (int64_t r = 0; r < rows; r++) {
      if (kind == INT8) memcpy(bytes + first + r * stride, quantised + first + r * stride, stride);
      else memcpy(kept + first + r * stride, x + r * x_stride, slots * sizeof(float));
    }
    return slots;
  }
  static constexpr int32_t ALL = -1;
};

// Values of a memory: out = weights V + bias, which reads only slots with a weight.
class Values {
 public:
  Values(const TableDescription& d, const float* bias, Arena& arena)
      : slots(d.height), outputs(d.width), kind(Kind(d.kind)), scales(copied(d.scales, slots, 1)),
        panels(divide_up(outputs, COLUMNS)), bias(copied(bias, outputs, COLUMNS)) {
    if (kind == FLOAT32) pack<float>(d.rows, arena);
    if (kind == BFLOAT16) pack<bf16>(d.rows, arena);
    if (kind != INT8) return;
    // The last panel is read up to a multiple of four slots, with weights of 0.
    data = arena.take<int8_t>((panels * slots + 3) * COLUMNS);
    pack_value_bytes((int8_t*)data, (const int8_t*)d.rows, slots, outputs);
  }

  void multiply(const Team& team, const SlotWeights& x, int64_t rows, float* out, int64_t stride,
                bool add) const {
    for_blocks(team, panels, rows, [&](int64_t panel, int64_t first, int64_t count) {
      with_rows(count, [&](auto R) {
        vec total[R][VECS];
        read<R>(x, first / ROWS, panel, total);
        for (int r = 0; r < R; r++)
          for (int v = 0; v < VECS; v++) {
            float* to = out + (first + r) * stride + panel * COLUMNS + v * LANES;
            vec y = total[r][v] + load(bias.data() + panel * COLUMNS + v * LANES);
            store(to, add ? load(to) + y : y);
          }
      });
    });
  }

  const int64_t slots, outputs;
  const Kind kind;
  const std::vector<float> scales;

 private:
  template <class T>
  void pack(const void* rows, Arena& arena) {
    data = arena.take<T>(panels * slots * COLUMNS);
    pack_panels((T*)data, (const T*)rows, slots, outputs, outputs, 1);
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
    const T* rows = (T*)data + panel * slots * COLUMNS;
    const float* weights = x.kept + block * ROWS * x.stride;
    const int32_t* list = x.chosen + block * x.stride;
    int64_t count = x.counts[block];
    if (count == SlotWeights::ALL)
      multiply_panel<R, false>(weights, x.stride, rows, list, slots, total);
    else multiply_panel<R, true>(weights, x.stride, rows, list, count, total);
  }

  template <int R>
  void read_bytes(const SlotWeights& x, int64_t block, int64_t panel, vec (&total)[R][VECS]) const {
    const int8_t* rows = (int8_t*)data + panel * slots * COLUMNS;
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

  int64_t panels;
  std::vector<float> bias;
  void* data = nullptr;
};
