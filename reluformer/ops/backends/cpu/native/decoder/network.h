// The layers of a model with packed weights, and the parts of a forward pass that encoder and decoder
// share.
#pragma once

#include "attend.h"

#include <memory>

struct Sizes {
  int64_t vocabulary, width, heads, key_heads, head_width, slots;
  bool is_pre_norm;
  int64_t stride() const { return padded(width, COLUMNS); }
  int64_t key_width() const { return key_heads * head_width; }
};

// Packed tables of a model, numbered from 0. Python packs them one by one, so that it holds no more
// than one unpacked table.
class Tables {
 public:
  int64_t pack(const TableDescription& d, const float* bias) {
    linear.emplace_back(new Table(d, bias, arena));
    return int64_t(linear.size()) - 1;
  }
  int64_t pack_values(const TableDescription& d, const float* bias) {
    values_.emplace_back(new Values(d, bias, arena));
    return int64_t(values_.size()) - 1;
  }
  const Table& table(int64_t number) const { return *linear[number]; }
  const Values& values(int64_t number) const { return *values_[number]; }

 private:
  Arena arena;
  std::vector<std::unique_ptr<Table>> linear;
  std::vector<std::unique_ptr<Values>> values_;
};

struct AttentionLayer {
  const Table &query, &key_value, &out;
  Norm query_norm, key_norm, head_norm;
  Rule rule;

  AttentionLayer(const AttentionDescription& d, const Sizes& sizes, const Tables& tables)
      : query(tables.table(d.query)), key_value(tables.table(d.key_value)), out(tables.table(d.out)),
        query_norm(d.query_norm, sizes.head_width),
        key_norm(d.key_norm, sizes.head_width), head_norm(d.head_norm, sizes.head_width),
        rule(d, sizes.heads) {}
};

struct MemoryLayer {
  const Table& keys;
  const Values& values;
  Norm norm;
  float temperature;
  int64_t power;

  MemoryLayer(const MemoryDescription& d, const Sizes& sizes, const Tables& tables)
      : keys(tables.table(d.keys)), values(tables.values(d.values)),
        norm(d.norm, sizes.width), temperature(float(d.temperature)), power(d.power) {}

  // Scores [slots] become weights.
  void weigh(float* x) const {
    int64_t slots = keys.outputs;
    if (temperature != 1)
      for (int64_t i = 0; i < slots; i++) x[i] /= temperature;
    if (power == 0) {
      float total = sum_of_exponentials<true>(x, slots, largest_of(x, slots));
      for (int64_t i = 0; i < slots; i++) x[i] /= total;
      return;
    }
    for (int64_t i = 0; i < slots; i += LANES) {
      vec y = larger(load(x + i), vec{});
      store(x + i, with_power(power, [&](auto p) { return raised<p>(y); }));
    }
  }
};

struct Layer {
  AttentionLayer self;
  std::unique_ptr<AttentionLayer> cross;
  MemoryLayer memory;
  Norm self_norm, cross_norm, memory_norm;

  Layer(const LayerDescription& d, const Sizes& sizes, bool has_cross, const Tables& tables)
      : self(d.self, sizes, tables),
        cross(has_cross ? new AttentionLayer(d.cross, sizes, tables) : nullptr),
        memory(d.memory, sizes, tables), self_norm(d.self_norm, sizes.width),
        cross_norm(d.cross_norm, sizes.width), memory_norm(d.memory_norm, sizes.width) {}
};

struct Model {
  Sizes sizes;
  std::unique_ptr<Tables> tables;
  const Table &source_embedding, &target_embedding, &output;
  std::vector<std::unique_ptr<Layer>> encoder, decoder;
  Norm encoder_norm, decoder_norm;
  Positions sinusoids, rotations;
  int64_t bos, eos;

  Model(const ModelDescription& d, std::unique_ptr<Tables> packed)
      : sizes{d.vocabulary, d.width, d.heads, d.key_heads, d.head_width, d.slots,
              bool(d.is_pre_norm)},
        tables(std::move(packed)), source_embedding(tables->table(d.source_embedding)),
        target_embedding(tables->table(d.target_embedding)), output(tables->table(d.output)),
        encoder_norm(d.encoder_norm, d.width), decoder_norm(d.decoder_norm, d.width),
        sinusoids(d.sinusoid_rates, (d.width + 1) / 2), rotations(d.rotary_rates, d.head_width / 2),
        bos(d.bos), eos(d.eos) {
    for (int64_t i = 0; i < d.encoder_layers; i++)
      encoder.emplace_back(new Layer(d.encoder[i], sizes, false, *tables));
    for (int64_t i = 0; i < d.decoder_layers; i++)
      decoder.emplace_back(new Layer(d.decoder[i], sizes, true, *tables));
  }

  Kind kind() const { return output.kind; }
};

// Memory of a forward pass of up to `rows` tokens.
struct Workspace {
  const Sizes sizes;
  Rows residual, input, query, key_value, heads, scores;
  SlotWeights slots;
  std::vector<Scratch> scratch;

  Workspace(const Model& model, int threads)
      : sizes(model.sizes), residual(FLOAT32, sizes.width), input(model.kind(), sizes.width),
        query(FLOAT32, sizes.width), key_value(FLOAT32, 2 * sizes.key_width()),
        heads(model.kind(), sizes.width), scores(FLOAT32, sizes.slots),
        slots(model.kind(), sizes.slots), scratch(threads) {}

  void reserve(int64_t rows, int64_t keys) {
    for (Rows* each : {&residual, &input, &query, &key_value, &heads, &scores}) each->reserve(rows);
    slots.reserve(rows);
    for (Scratch& each : scratch) each.reserve(keys);
  }

  // x of a row is embedding * sqrt(width) plus sinusoids.
  void embed(const Table& table, const Positions& sinusoids, int64_t row, int64_t token,
             int64_t position) {
    float* x = residual.row(row);
    table.read_row(token, std::sqrt(float(sizes.width)), x);
    if (sinusoids.exist()) sinusoids.add(position, x, sizes.width);
  }

  // Input of a branch: post-norm stacks first norm the sum of the branch before (`after`).
  void enter(const Team& team, int64_t rows, const Norm* after, const Norm& before) {
    team.for_units(rows, [&](int64_t r) {
      float* x = residual.row(r);
      if (!sizes.is_pre_norm && after) after->apply(x, x);
      if (sizes.is_pre_norm) before.apply(x, input.row(r));
      else memcpy(input.row(r), x, sizes.width * sizeof(float));
      input.finish(r);
    });
    team.sync();
  }

  // Adds the output layer of an attention, from the outputs of its heads, to x.
  void add_heads(const Team& team, int64_t rows, const AttentionLayer& layer) {
    if (layer.head_norm.exists() || heads.kind == INT8) {
      team.for_units(rows, [&](int64_t r) {
        for (int64_t h = 0; h < sizes.heads && layer.head_norm.exists(); h++) {
          float* head = heads.row(r) + h * sizes.head_width;
          layer.head_norm.apply(head, head);
        }
        heads.finish(r);
      });
      team.sync();
    }
    layer.out.multiply(team, heads, rows, residual.values, residual.stride, true);
    team.sync();
  }

  // Adds the output of a memory to x.
  void add_memory(const Team& team, int64_t rows, const MemoryLayer& layer, Counts& counts) {
    layer.keys.multiply(team, input, rows, scores.values, scores.stride);
    team.sync();
    team.for_units(divide_up(rows, ROWS), [&](int64_t block) {
      int64_t first = block * ROWS, count = std::min<int64_t>(ROWS, rows - first);
      for (int64_t r = 0; r < count; r++) layer.weigh(scores.row(first + r));
      int64_t read = slots.prepare(block, scores.row(first), scores.stride, count,
                                   layer.values.scales.data(), rows <= ROWS);
      __atomic_fetch_add(&counts.slots_read, read, __ATOMIC_RELAXED);
      __atomic_fetch_add(&counts.slots, sizes.slots, __ATOMIC_RELAXED);
    });
    team.sync();
    bool has_norm = layer.norm.exists();
    Rows& to = has_norm ? input : residual;
    layer.values.multiply(team, slots, rows, to.values, to.stride, !has_norm);
    team.sync();
    if (!has_norm) return;
    team.for_units(rows, [&](int64_t r) {
      float *x = residual.row(r), *y = input.row(r);
      layer.norm.apply(y, y);
      for (int64_t i = 0; i < sizes.width; i++) x[i] += y[i];
    });
    team.sync();
  }

  // Norm and rotation of one head of a query or a key.
  static void prepare_head(float* head, const Norm& norm, const Positions* rotations,
                           int64_t position) {
    if (norm.exists()) norm.apply(head, head);
    if (rotations && rotations->exist()) rotations->rotate(position, head);
  }
};
