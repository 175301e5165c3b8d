// Greedy and beam search, with the rules of `reluformer/translation/search/beam.py`.
#pragma once

#include "step.h"

struct Hypothesis {
  std::vector<int32_t> tokens;
  double log_probability, score;
  bool is_complete;
};

class Search {
 public:
  enum Status : int64_t { NOT_FINITE = -1, OUT_OF_MEMORY = -2 };

  Search(const Model& model, const TaskDescription& task)
      : beams(task.beams), best(task.best), eos(int32_t(model.eos)), penalty(task.length_penalty),
        banned(task.banned, task.banned + task.banned_count), ended(task.sentences),
        decoder(model, task), candidates(decoder.capacity * beams), found(decoder.capacity),
        totals(decoder.capacity) {
    std::vector<Row> rows;
    for (int64_t s = 0; s < task.sentences; s++) {
      limits.push_back({task.shortest[s], task.longest[s]});
      // At first all beams of a sentence are equal: only one is open.
      open.push_back({s, 0, {}});
      rows.push_back({s, int32_t(model.bos), 0});
    }
    decoder.prepare(rows);
  }

  // Runs at most this many steps; returns the number of open hypotheses, or a status.
  int64_t run(int64_t steps) {
    Barrier barrier;
#pragma omp parallel num_threads(decoder.threads)
    {
      Team team = Team::current(barrier);
      for (int64_t i = 0; i < steps && !open.empty() && !status; i++) step(team);
    }
    return status ? status : int64_t(open.size());
  }

  const std::vector<Hypothesis>& hypotheses(int64_t sentence) const { return ended[sentence]; }
  const Counts& counts() const { return decoder.counts; }

 private:
  struct Open {
    int64_t sentence;
    float sum;
    std::vector<int32_t> tokens;
  };
  struct Limits {
    int64_t shortest, longest;
  };
  struct Candidate {
    float value;
    int32_t token;
    int64_t row;
  };

  void step(const Team& team) {
    decoder.run(team);
    team.for_units(decoder.count(), [&](int64_t r) { choose(r); });
    team.sync();
    if (team.is_first()) {
      try {
        decide();
      } catch (const std::bad_alloc&) {
        status = OUT_OF_MEMORY;
      }
    }
    team.sync();
  }

  // The most likely continuations of a row; `value` is their logit.
  void choose(int64_t r) {
    totals[r] = decoder.log_sum(r);
    float* logits = decoder.output().row(r);
    const Limits& limit = limits[open[r].sentence];
    // The length already counts the token that is being chosen.
    int64_t length = decoder.length - 1;
    Candidate* best_of_row = candidates.data() + r * beams;
    if (length >= limit.longest) {
      best_of_row[0] = {logits[eos], eos, r};
      found[r] = 1;
      return;
    }
    for (int32_t token : banned) logits[token] = -INFINITE;
    if (length < limit.shortest) logits[eos] = -INFINITE;
    found[r] = top(logits, decoder.sizes.vocabulary, r, best_of_row);
  }

  // The largest finite logits in descending order, lower tokens first among equals.
  int64_t top(const float* logits, int64_t count, int64_t row, Candidate* to) const {
    int64_t size = 0;
    float least = -INFINITE;
    for (int64_t i = 0; i < count; i += COLUMNS) {
      vec most = all(-INFINITE);
      for (int v = 0; v < VECS; v++) most = larger(most, load(logits + i + v * LANES));
      if (!any_above(most, least)) continue;
      for (int64_t token = i; token < std::min(i + COLUMNS, count); token++) {
        if (!(logits[token] > least)) continue;
        int64_t place = size < beams ? size++ : beams - 1;
        for (; place > 0 && to[place - 1].value < logits[token]; place--) to[place] = to[place - 1];
        to[place] = {logits[token], int32_t(token), row};
        if (size == beams) least = to[beams - 1].value;
      }
    }
    return size;
  }

  static bool any_above(vec x, float bound) {
    ints above = x > bound;
    int32_t any = 0;
    for (int i = 0; i < LANES; i++) any |= above[i];
    return any;
  }

  // Extends, ends and drops hypotheses, and prepares the next step.
  void decide() {
    std::vector<Open> next;
    std::vector<Row> rows;
    for (int64_t r = 0; r < int64_t(open.size()); r++)
      if (!std::isfinite(totals[r])) {
        status = NOT_FINITE;
        return;
      }
    for (int64_t r = 0; r < int64_t(open.size());) {
      int64_t first = r, sentence = open[r].sentence;
      while (r < int64_t(open.size()) && open[r].sentence == sentence) r++;
      extend(sentence, first, r, next, rows);
    }
    std::swap(open, next);
    if (!open.empty()) decoder.prepare(rows);
  }

  void extend(int64_t sentence, int64_t first, int64_t last, std::vector<Open>& next,
              std::vector<Row>& rows) {
    std::vector<Candidate> all;
    for (int64_t r = first; r < last; r++)
      for (int64_t i = 0; i < found[r]; i++) {
        Candidate c = candidates[r * beams + i];
        c.value = open[r].sum + (c.value - totals[r]);
        all.push_back(c);
      }
    // Ended hypotheses keep their places in the beam.
    int64_t places = std::min<int64_t>(beams - int64_t(ended[sentence].size()), int64_t(all.size()));
    std::stable_sort(all.begin(), all.end(),
                     [](const Candidate& a, const Candidate& b) { return a.value > b.value; });
    size_t kept = next.size();
    float most = -INFINITE;
    for (int64_t i = 0; i < places; i++) {
      std::vector<int32_t> tokens = open[all[i].row].tokens;
      if (all[i].token == eos) {
        end(sentence, all[i].value, std::move(tokens));
        continue;
      }
      most = std::max(most, all[i].value);
      tokens.push_back(all[i].token);
      next.push_back({sentence, all[i].value, std::move(tokens)});
      rows.push_back({sentence, all[i].token, int32_t(all[i].row)});
    }
    if (bound(sentence, most) > floor(sentence)) return;
    next.resize(kept);
    rows.resize(kept);
  }

  void end(int64_t sentence, float sum, std::vector<int32_t>&& tokens) {
    double score = double(sum) / std::pow(double(decoder.length), penalty);
    bool is_complete = decoder.length <= limits[sentence].longest;
    ended[sentence].push_back({std::move(tokens), double(sum), score, is_complete});
  }

  // Highest score that an open hypothesis can still reach. Log-probabilities only decrease: with a
  // positive penalty the latest end is best, with a negative one the next step.
  float bound(int64_t sentence, float sum) const {
    int64_t last = penalty > 0 ? limits[sentence].longest + 1 : decoder.length + 1;
    return sum / std::pow(float(last), float(penalty));
  }

  // Score of the `best`-th ended hypothesis.
  float floor(int64_t sentence) const {
    std::vector<double> scores;
    for (const Hypothesis& hypothesis : ended[sentence]) scores.push_back(hypothesis.score);
    if (int64_t(scores.size()) < best) return -INFINITE;
    std::nth_element(scores.begin(), scores.begin() + best - 1, scores.end(), std::greater<double>());
    return float(scores[best - 1]);
  }

  const int64_t beams, best;
  const int32_t eos;
  const double penalty;
  std::vector<int32_t> banned;
  std::vector<Limits> limits;
  std::vector<Open> open;
  std::vector<std::vector<Hypothesis>> ended;
  Decoder decoder;
  // [rows, beams], and their number for each row.
  std::vector<Candidate> candidates;
  std::vector<int64_t> found;
  std::vector<float> totals;
  int64_t status = 0;
};
