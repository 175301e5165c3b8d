// The encoder: hidden states of sources, and the keys and values that the decoder reads.
#pragma once

#include "network.h"

// Contexts of one attention layer, [sentences, key heads].
using Contexts = std::vector<Context>;

class Encoder {
 public:
  // Sentences are encoded in groups of about this number of tokens, which stay in the cache.
  static constexpr int64_t TOKENS = 512;

  Encoder(const Model& model, const TaskDescription& task)
      : model(model), task(task), sizes(model.sizes), sinusoids(model.sinusoids),
        rotations(model.rotations), work(model, int(task.threads)), starts(task.sentences + 1) {
    for (int64_t s = 0; s < task.sentences; s++) starts[s + 1] = starts[s] + task.lengths[s];
    int64_t longest = *std::max_element(task.lengths, task.lengths + task.sentences);
    sinusoids.extend(longest);
    rotations.extend(longest);
    int64_t rows = 0;
    for (int64_t s = 0; s < task.sentences; s = end_of_group(s))
      rows = std::max(rows, starts[end_of_group(s)] - starts[s]);
    work.reserve(rows, longest);
    own.resize(task.sentences * sizes.key_heads);
  }

  // Fills the contexts [layers] of the decoder's cross-attentions.
  void encode(const Team& team, std::vector<Contexts>& contexts) {
    for (int64_t first = 0; first < task.sentences; first = end_of_group(first))
      encode_group(team, first, end_of_group(first), contexts);
  }

  Counts counts{};

 private:
  int64_t end_of_group(int64_t first) const {
    int64_t last = first + 1;
    while (last < task.sentences && starts[last + 1] - starts[first] <= TOKENS) last++;
    return last;
  }

  void encode_group(const Team& team, int64_t first, int64_t last,
                    std::vector<Contexts>& contexts) {
    int64_t start = starts[first], rows = starts[last] - start;
    team.for_units(rows, [&](int64_t r) {
      work.embed(model.source_embedding, sinusoids, r, task.tokens[start + r],
                 start + r - starts[sentence_of(start + r)]);
    });
    team.sync();
    const Norm* after = nullptr;
    for (auto& layer : model.encoder) {
      work.enter(team, rows, after, layer->self_norm);
      attend(team, first, last, layer->self);
      work.enter(team, rows, &layer->self_norm, layer->memory_norm);
      work.add_memory(team, rows, layer->memory, counts);
      after = &layer->memory_norm;
    }
    work.enter(team, rows, after, model.encoder_norm);
    for (size_t i = 0; i < model.decoder.size(); i++)
      project(team, first, last, *model.decoder[i]->cross, nullptr, contexts[i]);
  }

  int64_t sentence_of(int64_t token) const {
    return std::upper_bound(starts.begin(), starts.end(), token) - starts.begin() - 1;
  }

  // Packs keys and values of the group's sentences.
  void project(const Team& team, int64_t first, int64_t last, const AttentionLayer& layer,
               const Positions* positions, Contexts& to) {
    int64_t start = starts[first], stride = work.key_value.stride;
    layer.key_value.multiply(team, work.input, starts[last] - start, work.key_value.values, stride);
    team.sync();
    team.for_units((last - first) * sizes.key_heads, [&](int64_t unit) {
      int64_t s = first + unit / sizes.key_heads, h = unit % sizes.key_heads;
      float* keys = work.key_value.row(starts[s] - start) + h * sizes.head_width;
      for (int64_t t = 0; t < task.lengths[s]; t++)
        Workspace::prepare_head(keys + t * stride, layer.key_norm, positions, t);
      to[s * sizes.key_heads + h].pack(keys, keys + sizes.key_width(), stride, task.lengths[s],
                                       sizes.head_width);
    });
    team.sync();
  }

  // Adds the self-attention of the group's sentences to x.
  void attend(const Team& team, int64_t first, int64_t last, const AttentionLayer& layer) {
    int64_t start = starts[first], rows = starts[last] - start;
    Rows &query = work.query, &heads = work.heads;
    layer.query.multiply(team, work.input, rows, query.values, query.stride);
    project(team, first, last, layer, &rotations, own);
    int64_t groups = sizes.heads / sizes.key_heads, blocks = divide_up(rows, ROWS);
    team.for_units((last - first) * sizes.heads, [&](int64_t unit) {
      int64_t s = first + unit / sizes.heads, h = unit % sizes.heads;
      const Context& context = own[s * sizes.key_heads + h / groups];
      Scratch& scratch = work.scratch[team.index];
      for (int64_t t = 0; t < task.lengths[s]; t += ROWS) {
        int64_t count = std::min<int64_t>(ROWS, task.lengths[s] - t), row = starts[s] - start + t;
        float* q = query.row(row) + h * sizes.head_width;
        for (int64_t r = 0; r < count; r++)
          Workspace::prepare_head(q + r * query.stride, layer.query_norm, &rotations, t + r);
        int64_t read = context.attend(q, query.stride, count, layer.rule, h,
                                      heads.row(row) + h * sizes.head_width, heads.stride, scratch);
        __atomic_fetch_add(&counts.values_read, read, __ATOMIC_RELAXED);
        __atomic_fetch_add(&counts.values, context.keys, __ATOMIC_RELAXED);
      }
    });
    team.sync();
    work.add_heads(team, rows, layer);
  }

  const Model& model;
  const TaskDescription& task;
  const Sizes sizes;
  Positions sinusoids, rotations;
  Workspace work;
  std::vector<int64_t> starts;
  Contexts own;
};
