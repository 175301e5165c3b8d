// The decoder, run step by step on rows that are hypotheses.
#pragma once

#include "encoder.h"

// A hypothesis in one step: the token that it reads, and the row of the previous step that it
// continues.
struct Row {
  int64_t sentence;
  int32_t token, parent;
};

class Decoder {
 public:
  Decoder(const Model& model, const TaskDescription& task)
      : model(model), sizes(model.sizes), capacity(task.sentences * task.beams),
        threads(int(task.threads)), contexts(model.decoder.size()), work(model, threads),
        cache(int64_t(model.decoder.size()), sizes.key_heads, sizes.head_width, capacity,
              *std::max_element(task.longest, task.longest + task.sentences) + 1),
        logits(FLOAT32, sizes.vocabulary), sinusoids(model.sinusoids), rotations(model.rotations),
        used(capacity), next_used(capacity), steps(capacity), sums(capacity * chunks()),
        peaks(capacity * chunks()) {
    for (Contexts& layer : contexts) layer.resize(task.sentences * sizes.key_heads);
    Encoder encoder(model, task);
    Barrier barrier;
#pragma omp parallel num_threads(threads)
    encoder.encode(Team::current(barrier), contexts);
    for (Context& context : contexts[0]) longest_source = std::max(longest_source, context.keys);
    counts = encoder.counts;
    // Rows only become fewer.
    work.reserve(capacity, longest_source);
    logits.reserve(capacity);
  }

  // Prepares the next step; one thread calls it. Rows of a sentence follow each other.
  void prepare(const std::vector<Row>& next) {
    rows = next;
    cache.extend(length);
    sinusoids.extend(length + 1);
    rotations.extend(length + 1);
    work.reserve(capacity, std::max(longest_source, length + 1));
    for (size_t r = 0; r < rows.size(); r++) {
      next_used[r] = length ? used[rows[r].parent] : std::vector<int32_t>();
      next_used[r].push_back(int32_t(r));
    }
    std::swap(used, next_used);
    for (size_t r = 0; r < rows.size(); r++) {
      steps[r].resize(length + 1);
      for (int64_t t = 0; t <= length; t++) steps[r][t] = cache.at(t, used[r][t]);
    }
    groups.clear();
    for (int64_t r = 0; r < count();) {
      int64_t first = r;
      while (r < count() && r - first < ROWS && rows[r].sentence == rows[first].sentence) r++;
      groups.push_back({first, r - first});
    }
  }

  // Computes `logits` of the next token of every row, with `peaks` and `sums` of parts of them.
  void run(const Team& team) {
    team.for_units(count(), [&](int64_t r) {
      work.embed(model.target_embedding, sinusoids, r, rows[r].token, length);
    });
    team.sync();
    const Norm* after = nullptr;
    for (size_t i = 0; i < model.decoder.size(); i++) {
      const Layer& layer = *model.decoder[i];
      work.enter(team, count(), after, layer.self_norm);
      attend_to_target(team, int64_t(i), layer.self);
      work.enter(team, count(), &layer.self_norm, layer.cross_norm);
      attend_to_source(team, *layer.cross, contexts[i]);
      work.enter(team, count(), &layer.cross_norm, layer.memory_norm);
      work.add_memory(team, count(), layer.memory, counts);
      after = &layer.memory_norm;
    }
    work.enter(team, count(), after, model.decoder_norm);
    model.output.multiply(team, work.input, count(), logits.values, logits.stride);
    team.sync();
    team.for_units(count() * chunks(), [&](int64_t unit) {
      int64_t r = unit / chunks(), first = unit % chunks() * CHUNK;
      int64_t size = std::min(CHUNK, sizes.vocabulary - first);
      float* part = logits.row(r) + first;
      peaks[unit] = largest_of(part, size);
      sums[unit] = sum_of_exponentials<false>(part, size, peaks[unit]);
    });
    team.sync();
    if (team.is_first()) length++;
    team.sync();
  }

  // Logarithm of the sum of exponentials of all logits of a row.
  float log_sum(int64_t r) const {
    const float *peak = peaks.data() + r * chunks(), *sum = sums.data() + r * chunks();
    float most = *std::max_element(peak, peak + chunks());
    double total = 0;
    for (int64_t i = 0; i < chunks(); i++) total += double(sum[i]) * std::exp(double(peak[i] - most));
    return float(most + std::log(total));
  }

  int64_t count() const { return int64_t(rows.size()); }

  const Model& model;
  const Sizes sizes;
  const int64_t capacity;
  const int threads;
  int64_t length = 0;
  Counts counts{};
  Rows& output() { return logits; }

 private:
  // Logits of one unit of work.
  static constexpr int64_t CHUNK = 4096;
  int64_t chunks() const { return divide_up(sizes.vocabulary, CHUNK); }

  void attend_to_target(const Team& team, int64_t number, const AttentionLayer& layer) {
    Rows &query = work.query, &pairs = work.key_value;
    layer.query.multiply(team, work.input, count(), query.values, query.stride);
    layer.key_value.multiply(team, work.input, count(), pairs.values, pairs.stride);
    team.sync();
    int64_t groups = sizes.heads / sizes.key_heads, width = sizes.head_width;
    team.for_units(count() * sizes.key_heads, [&](int64_t unit) {
      int64_t r = unit / sizes.key_heads, h = unit % sizes.key_heads;
      int64_t keys = cache.key_offset(number, h), values = cache.value_offset(number, h);
      float* key = pairs.row(r) + h * width;
      Workspace::prepare_head(key, layer.key_norm, &rotations, length);
      cache.put(steps[r][length] + keys, key);
      cache.put(steps[r][length] + values, key + sizes.key_width());
      for (int64_t head = h * groups; head < (h + 1) * groups; head++) {
        float q[cache.width], out[cache.width];
        cache.put(q, query.row(r) + head * width);
        Workspace::prepare_head(q, layer.query_norm, &rotations, length);
        int64_t read = attend_steps(q, steps[r].data(), length + 1, keys, values, cache.width,
                                    layer.rule, head, out, work.scratch[team.index]);
        memcpy(work.heads.row(r) + head * width, out, width * sizeof(float));
        count_values(read, length + 1);
      }
    });
    team.sync();
    work.add_heads(team, count(), layer);
  }

  // The rows of a sentence are queries of the same keys and values.
  void attend_to_source(const Team& team, const AttentionLayer& layer, const Contexts& from) {
    Rows &query = work.query, &heads = work.heads;
    layer.query.multiply(team, work.input, count(), query.values, query.stride);
    team.sync();
    int64_t ratio = sizes.heads / sizes.key_heads, width = sizes.head_width;
    team.for_units(int64_t(groups.size()) * sizes.heads, [&](int64_t unit) {
      const Group& group = groups[unit / sizes.heads];
      int64_t h = unit % sizes.heads, sentence = rows[group.first].sentence;
      const Context& context = from[sentence * sizes.key_heads + h / ratio];
      float* q = query.row(group.first) + h * width;
      for (int64_t r = 0; r < group.count; r++)
        Workspace::prepare_head(q + r * query.stride, layer.query_norm, nullptr, 0);
      int64_t read = context.attend(q, query.stride, group.count, layer.rule, h,
                                    heads.row(group.first) + h * width, heads.stride,
                                    work.scratch[team.index]);
      count_values(read, context.keys);
    });
    team.sync();
    work.add_heads(team, count(), layer);
  }

  void count_values(int64_t read, int64_t all) {
    __atomic_fetch_add(&counts.values_read, read, __ATOMIC_RELAXED);
    __atomic_fetch_add(&counts.values, all, __ATOMIC_RELAXED);
  }

  struct Group {
    int64_t first, count;
  };

  std::vector<Contexts> contexts;
  Workspace work;
  Cache cache;
  Rows logits;
  Positions sinusoids, rotations;
  std::vector<Row> rows;
  std::vector<Group> groups;
  // Rows that each hypothesis used in earlier steps, and the addresses of their keys.
  std::vector<std::vector<int32_t>> used, next_used;
  std::vector<std::vector<float*>> steps;
  std::vector<float> sums, peaks;
  int64_t longest_source = 0;
};
