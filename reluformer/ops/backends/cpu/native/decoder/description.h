// What Python passes to the library, in the layout of `reluformer/translation/native/layout.py`.
#pragma once

#include <cstdint>

enum Kind : int64_t { FLOAT32 = 0, BFLOAT16 = 1, INT8 = 2 };

// Rows of weights, dense: [outputs, inputs], or [inputs, outputs] for the values of a memory. int8
// rows have one scale each.
struct TableDescription {
  const void* rows;
  const float* scales;
  int64_t height, width, kind;
};

// Layer norm, or RMS norm if bias is null. A null gain means that there is no norm.
struct NormDescription {
  const float *gain, *bias;
  double epsilon;
};

// Tables are numbers of packed tables, see `Tables`.
// Softmax if power is 0. Otherwise the weights are max(s + offset, 0)^power * factor * n^-exponent,
// divided by their sum plus row_normalise if that is above 0. s is the score times `scale`.
struct AttentionDescription {
  int64_t query, key_value, out;
  NormDescription query_norm, key_norm, head_norm;  // RMS norms of heads
  const float *offset, *factor;                     // [heads]
  double scale, exponent, row_normalise;
  int64_t power;
};

// Softmax if power is 0, otherwise max(s, 0)^power; scores are divided by the temperature.
struct MemoryDescription {
  int64_t keys, values;
  NormDescription norm;
  double temperature;
  int64_t power;
};

// Norms are those of the residual branches. An encoder has no cross-attention.
struct LayerDescription {
  AttentionDescription self, cross;
  MemoryDescription memory;
  NormDescription self_norm, cross_norm, memory_norm;
};

struct ModelDescription {
  int64_t source_embedding, target_embedding, output;
  const LayerDescription *encoder, *decoder;
  NormDescription encoder_norm, decoder_norm;
  const float *sinusoid_rates, *rotary_rates;  // [width / 2 rounded up], [head width / 2], or null
  int64_t vocabulary, width, heads, key_heads, head_width, slots;
  int64_t encoder_layers, decoder_layers, is_pre_norm, bos, eos;
};

struct TaskDescription {
  const int32_t* tokens;   // of all sources, one after the other, with end tokens
  const int64_t* lengths;  // [sentences], with end tokens
  const int64_t *shortest, *longest;  // [sentences], without end tokens
  const int32_t* banned;
  int64_t sentences, beams, banned_count, best, threads;
  double length_penalty;
};

struct HypothesisDescription {
  const int32_t* tokens;
  int64_t length;
  double log_probability, score;
  int64_t is_complete;
};

// Rows of tables that were read, and rows that would have been read without skipping.
struct Counts {
  int64_t slots_read, slots, values_read, values;
};
