// Functions of a row: norms, exponentials, the weights of an attention or a memory, positions.
#pragma once

#include "table.h"

#include <cmath>
#include <limits>

constexpr float INFINITE = std::numeric_limits<float>::infinity();

// Lanes of the vector at `start` that are below `count`, as a mask.
inline ints lanes_below(int64_t start, int64_t count) {
  return count_from(int32_t(start)) < int32_t(count);
}

inline vec larger(vec a, vec b) { return a > b ? a : b; }

inline float largest(vec x) {
  float most = x[0];
  for (int i = 1; i < LANES; i++) most = std::max(most, x[i]);
  return most;
}

// e^x for x <= 0 with an error of about one unit in the last place: e^x = 2^n e^r, |r| <= ln(2) / 2.
inline vec exp_of(vec x) {
  ints is_tiny = x < -87.0f;
  x = is_tiny ? all(-87.0f) : x;
  vec n = (x * 1.44269504f + 12582912.0f) - 12582912.0f;
  vec r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  vec y = r * (1.0f / 5040) + 1.0f / 720;
  y = y * r + 1.0f / 120;
  y = y * r + 1.0f / 24;
  y = y * r + 1.0f / 6;
  y = y * r + 0.5f;
  y = y * r + 1.0f;
  y = y * r + 1.0f;
  ints power = (__builtin_convertvector(n, ints) + 127) << 23;
  return is_tiny ? vec{} : y * (vec)power;
}

inline float largest_of(const float* x, int64_t count) {
  vec most = all(-INFINITE);
  for (int64_t i = 0; i < count; i += LANES)
    most = larger(most, lanes_below(i, count) ? load(x + i) : all(-INFINITE));
  return largest(most);
}

// The sum of e^(x - most); with `keep` the terms replace x. Memory is padded to whole vectors.
template <bool KEEP>
inline float sum_of_exponentials(float* x, int64_t count, float most) {
  vec total{};
  for (int64_t i = 0; i < count; i += LANES) {
    vec y = lanes_below(i, count) ? exp_of(load(x + i) - most) : vec{};
    total += y;
    if (KEEP) store(x + i, y);
  }
  return sum(total);
}

// Layer norm, or RMS norm, which subtracts no mean and adds no bias.
struct Norm {
  std::vector<float> gain, bias;
  bool is_centred;
  float epsilon;

  Norm(const NormDescription& d, int64_t width) : is_centred(d.bias), epsilon(float(d.epsilon)) {
    if (!d.gain) return;
    gain.assign(d.gain, d.gain + width);
    bias = copied(d.bias, width, 1);
  }
  bool exists() const { return !gain.empty(); }

  // x and out may be the same.
  void apply(const float* x, float* out) const {
    int64_t width = int64_t(gain.size()), i = 0;
    vec total{}, squares{};
    if (is_centred)
      for (int64_t k = 0; k < width; k += LANES)
        total += lanes_below(k, width) ? load(x + k) : vec{};
    float mean = sum(total) / width;
    for (int64_t k = 0; k < width; k += LANES) {
      vec centred = lanes_below(k, width) ? load(x + k) - mean : vec{};
      squares += centred * centred;
    }
    float factor = 1 / std::sqrt(sum(squares) / width + epsilon);
    for (; i + LANES <= width; i += LANES) {
      vec y = (load(x + i) - mean) * factor * load(gain.data() + i) + load(bias.data() + i);
      store(out + i, y);
    }
    // Memory after a head belongs to the next one.
    for (; i < width; i++) out[i] = (x[i] - mean) * factor * gain[i] + bias[i];
  }
};

// Function from scores to weights, see `AttentionDescription`.
struct Rule {
  int64_t power;
  float scale, row_normalise;
  double exponent;
  std::vector<float> offset, factor;

  Rule(const AttentionDescription& d, int64_t heads)
      : power(d.power), scale(float(d.scale)), row_normalise(float(d.row_normalise)),
        exponent(d.exponent), offset(copied(d.offset, heads, 1)),
        factor(copied(d.factor, heads, 1)) {}

  // Turns the products q.k of a row into weights, up to a factor that is returned. Memory is padded
  // to whole vectors, and weights past `count` are 0.
  float weigh(float* x, int64_t count, int64_t head) const {
    if (power == 0) {
      for (int64_t i = 0; i < count; i += LANES) store(x + i, load(x + i) * scale);
      return 1 / sum_of_exponentials<true>(x, count, largest_of(x, count));
    }
    vec total{};
    for (int64_t i = 0; i < count; i += LANES) {
      vec y = load(x + i) * scale + offset[head];
      y = larger(y, vec{});
      y = with_power(power, [&](auto p) { return raised<p>(y); });
      y = lanes_below(i, count) ? y : vec{};
      total += y;
      store(x + i, y);
    }
    float common = factor[head] * float(std::pow(double(count), -exponent));
    return row_normalise > 0 ? common / (common * sum(total) + row_normalise) : common;
  }
};

// Sines and cosines of positions, for sinusoids or rotations.
class Positions {
 public:
  Positions(const float* rates, int64_t count) : rates(copied(rates, rates ? count : 0, 1)) {}
  bool exist() const { return !rates.empty(); }

  // Computes the positions below `length`.
  void extend(int64_t length) {
    int64_t half = int64_t(rates.size()), known = int64_t(table.size() / std::max<int64_t>(2 * half, 1));
    if (!exist() || length <= known) return;
    table.resize(length * 2 * half);
    for (int64_t t = known; t < length; t++)
      for (int64_t i = 0; i < half; i++) {
        float angle = float(t) * rates[i];
        table[t * 2 * half + i] = std::sin(angle);
        table[(t * 2 + 1) * half + i] = std::cos(angle);
      }
  }

  // x [width] += sinusoids.
  void add(int64_t position, float* x, int64_t width) const {
    const float* sines = table.data() + position * 2 * rates.size();
    for (int64_t i = 0; i < width; i++) x[i] += sines[i];
  }

  // Rotates pairs of features of a head.
  void rotate(int64_t position, float* head) const {
    int64_t half = int64_t(rates.size());
    const float *sines = table.data() + position * 2 * half, *cosines = sines + half;
    for (int64_t i = 0; i < half; i++) {
      float first = head[i], second = head[half + i];
      head[i] = first * cosines[i] - second * sines[i];
      head[half + i] = second * cosines[i] + first * sines[i];
    }
  }

 private:
  std::vector<float> rates, table;
};
