// Translation on the CPU without torch: the functions that Python calls.
//
// Weights are copied when they are packed. Any number of searches may use a model at the same time;
// a search belongs to one caller at a time.

#include "search.h"

namespace {

template <class F>
auto guarded(F f) -> decltype(f()) {
  try {
    return f();
  } catch (const std::bad_alloc&) {
    return {};
  }
}

}  // namespace

extern "C" {

// Sizes of the structures, which Python compares with its own.
int64_t model_description_size() { return sizeof(ModelDescription); }
int64_t task_description_size() { return sizeof(TaskDescription); }

// Instructions that multiply int8.
const char* int8_instructions() {
#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)
  return "VNNI";
#elif defined(__AVX512BW__)
  return "AVX-512";
#elif defined(__AVX2__)
  return "AVX2";
#elif defined(__ARM_FEATURE_DOTPROD)
  return "NEON";
#else
  return "plain";
#endif
}

// Objects are null if memory is exhausted.
Tables* tables_new() {
  return guarded([] { return new Tables; });
}
void tables_free(Tables* tables) { delete tables; }

// Packing returns the number of the table, or a status.
int64_t tables_pack(Tables* tables, const TableDescription* d, const float* bias, int64_t is_values) {
  try {
    return is_values ? tables->pack_values(*d, bias) : tables->pack(*d, bias);
  } catch (const std::bad_alloc&) {
    return Search::OUT_OF_MEMORY;
  }
}

// The model owns the tables, also if it cannot be created.
Model* model_new(const ModelDescription* d, Tables* tables) {
  std::unique_ptr<Tables> packed(tables);
  return guarded([&] { return new Model(*d, std::move(packed)); });
}
void model_free(Model* model) { delete model; }

// Encodes the sources.
Search* search_new(const Model* model, const TaskDescription* task) {
  return guarded([&] { return new Search(*model, *task); });
}
void search_free(Search* search) { delete search; }
int64_t search_run(Search* search, int64_t steps) { return search->run(steps); }
int64_t search_ended(const Search* search, int64_t sentence) {
  return int64_t(search->hypotheses(sentence).size());
}
void search_hypothesis(const Search* search, int64_t sentence, int64_t number,
                       HypothesisDescription* to) {
  const Hypothesis& h = search->hypotheses(sentence)[number];
  *to = {h.tokens.data(), int64_t(h.tokens.size()), h.log_probability, h.score, h.is_complete};
}
void search_counts(const Search* search, Counts* to) { *to = search->counts(); }

// For searches that decide in Python: logits [rows, vocabulary] of the next tokens, and their log-sums.
Decoder* decoder_new(const Model* model, const TaskDescription* task) {
  return guarded([&] { return new Decoder(*model, *task); });
}
void decoder_free(Decoder* decoder) { delete decoder; }
int64_t decoder_step(Decoder* decoder, const Row* rows, int64_t count, float* logits, float* totals) {
  try {
    decoder->prepare({rows, rows + count});
  } catch (const std::bad_alloc&) {
    return Search::OUT_OF_MEMORY;
  }
  Barrier barrier;
#pragma omp parallel num_threads(decoder->threads)
  decoder->run(Team::current(barrier));
  int64_t vocabulary = decoder->sizes.vocabulary;
  for (int64_t r = 0; r < count; r++) {
    memcpy(logits + r * vocabulary, decoder->output().row(r), vocabulary * sizeof(float));
    totals[r] = decoder->log_sum(r);
  }
  return count;
}

// Shortest of `repeats` times in seconds to read memory like that of the weights: the least time of a
// step that reads this many bytes.
double seconds_to_read(int64_t bytes, int64_t threads, int64_t repeats) {
  Arena arena;
  char* start = arena.take<char>(bytes);
  memset(start, 1, bytes);
  double best = INFINITE;
  for (int64_t i = 0; i < repeats; i++) {
    double before = omp_get_wtime();
    int64_t blocks = bytes / (4 * int64_t(sizeof(ints))), kept = 0;
#pragma omp parallel for num_threads(threads) reduction(+ : kept)
    for (int64_t part = 0; part < threads; part++) {
      // Four sums, because one would wait for the result of the addition before.
      ints sums[4] = {};
      for (int64_t b = blocks * part / threads; b < blocks * (part + 1) / threads; b++)
        for (int v = 0; v < 4; v++) sums[v] += (ints)load(start + (b * 4 + v) * sizeof(ints));
      kept += (sums[0] + sums[1] + sums[2] + sums[3])[0];
    }
    // The sum is used, so that the compiler does not remove the loop.
    best = std::min(best, omp_get_wtime() - before + (kept == 1 ? 1e-12 : 0));
  }
  return best;
}

}  // extern "C"
