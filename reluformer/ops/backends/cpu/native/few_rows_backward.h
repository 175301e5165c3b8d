// Gradients of a few rows. Keys and values are read, and their gradients written, once: each is a sum of
// a few rows times a number.
//
// A unit of work is a share of the keys of one key head. It owns the gradients of those keys; the
// gradients of q are summed over the shares, always in the same order.
#pragma once

#include "few_rows.h"

template <class T>
struct FewRowsBackward {
  using R = Rows<T>;

  const Problem& p;
  int64_t groups = p.heads / p.key_heads, rows = groups * p.rows;
  int64_t width = up_to(p.width, R::WIDE), value_width = up_to(p.value_width, R::WIDE);
  int64_t tables = p.batch * p.key_heads, splits, share;
  // Whether the output is rounded, so that sums of output * grad are summed over the weights.
  bool sums = p.row_dots && std::is_same_v<T, bf16> && !p.exact_out;

  explicit FewRowsBackward(const Problem& problem) : p(problem) {
    splits = clipped(up_to(2 * p.threads, tables) / tables, 1, p.keys / 512 + 1);
    share = up_to((p.keys + splits - 1) / splits, LANES);
  }

  // A row of a unit: its numbers, its rows of pieces, and what its scores add to the gradients.
  struct Row {
    int64_t h, number;
    RowTerms terms;
    RowSums summed;
    double d_offset;
    float *q, *grad, *dq;
  };

  // [tables, splits, rows]
  Row* rows_of_units(Memory& memory) const { return memory.take<Row>(tables * splits * rows); }
  float* pieces_of_units(Memory& memory) const {
    return memory.take<float>(tables * splits * rows * (2 * width + value_width));
  }
  int64_t size() const {
    Memory counted(nullptr);
    rows_of_units(counted);
    pieces_of_units(counted);
    return counted.size;
  }

  void prepare(Row& row, int64_t i, float* pieces, int64_t b, int64_t kv) const {
    row.h = kv * groups + i / p.rows, row.number = i % p.rows;
    row.terms = row_terms<T>(p, b, row.h, row.number);
    row.summed = {}, row.d_offset = 0;
    row.q = pieces, row.dq = row.q + width, row.grad = row.dq + width;
    R::to_pieces(row.q, at<T>(p.q, p.q_strides, b, row.h, row.number), p.width);
    R::to_pieces(row.grad, at<T>(p.grad, p.grad_strides, b, row.h, row.number), p.value_width);
    memset(row.dq, 0, width * sizeof(float));
  }

  void unit(Row* all, float* pieces, int64_t number) const {
    int64_t table = number / splits, b = table / p.key_heads, kv = table % p.key_heads;
    int64_t first = number % splits * share, last = std::min(first + share, p.keys);
    for (int64_t i = 0; i < rows; i++)
      prepare(all[i], i, pieces + i * (2 * width + value_width), b, kv);
    for (int64_t key = first; key < last; key += LANES)
      block(all, b, kv, key, std::min<int64_t>(LANES, last - key));
  }

  // At most LANES keys.
  void block(Row* all, int64_t b, int64_t kv, int64_t key, int64_t count) const {
    const T* k = at<T>(p.k, p.k_strides, b, kv, key);
    const T* v = at<T>(p.v, p.v_strides, b, kv, key);
    float weights[FEW_ROWS][LANES], slopes[FEW_ROWS][LANES];
    bool seen[LANES] = {};
    for (int64_t i = 0; i < rows; i++) {
      Row& row = all[i];
      Range range = keys_of(p, b, row.number);
      ints lane = count_from(0);
      auto visible = (lane >= int32_t(clipped(range.from - key, 0, LANES))) &
                     (lane < int32_t(clipped(range.to - key, 0, count)));
      if (range.from >= key + count || range.to <= key) {
        memset(weights[i], 0, sizeof weights[i]), memset(slopes[i], 0, sizeof slopes[i]);
        continue;
      }
      vec x = R::products(row.q, k, p.k_strides[2], count, p.width);
      vec dot = R::products(row.grad, v, p.v_strides[2], count, p.value_width);
      x = x * float(p.unit) + score_offset_of(p, row.h);
      x = visible ? Products<T>::rectified(x) : vec{};
      if (p.mask) x = mask_from(p, b, row.h, row.number, key, KEYS_AXIS).keep(x, 0, count);
      with_power(p.power, [&](auto power) {
        Weighed<power> weighed(x, dot, ::all(row.terms.factor), ::all(row.terms.constant));
        row.d_offset += sum(weighed.ds);
        if (sums) {
          row.summed.dot += sum(x == 0 ? vec{} : weighed.weight * dot);
          row.summed.slope += sum(x == 0 ? vec{} : weighed.steep);
        }
        store(weights[i], weighed.weight);
        store(slopes[i], weighed.ds * float(p.unit));
      });
      int chosen[LANES], some = 0;
      float factors[LANES];
      for (int lane = 0; lane < LANES; lane++) {
        seen[lane] |= x[lane] != 0;
        chosen[some] = lane, factors[some] = slopes[i][lane];
        some += slopes[i][lane] != 0;
      }
      R::add(row.dq, k, p.k_strides[2], p.width, factors, chosen, some);
    }
    for (int64_t j = 0; j < count; j++) {
      T* dk = at<T>(p.dk, p.dk_strides, b, kv, key + j);
      T* dv = at<T>(p.dv, p.dv_strides, b, kv, key + j);
      if (!seen[j]) {
        memset(dk, 0, p.width * sizeof(T)), memset(dv, 0, p.value_width * sizeof(T));
        continue;
      }
      combine(dk, p.width, [&](int64_t i) { return std::pair(all[i].q, slopes[i][j]); });
      combine(dv, p.value_width, [&](int64_t i) { return std::pair(all[i].grad, weights[i][j]); });
    }
  }

  // to [count] = sum over the rows of their pieces times their factors.
  template <class Term>
  void combine(T* to, int64_t count, Term term) const {
    for (int64_t e = 0; e < count; e += R::WIDE) {
      vec total[R::PARTS] = {};
      for (int64_t i = 0; i < rows; i++) {
        auto [pieces, factor] = term(i);
        for (int part = 0; part < R::PARTS; part++)
          total[part] += load(pieces + e + part * LANES) * factor;
      }
      R::write(to + e, count - e, total);
    }
  }

  // Adds the shares of a table, and stores the gradients of its queries and score offsets.
  void finish(Row* all, int64_t b, int64_t kv) const {
    for (int64_t h = kv * groups; h < (kv + 1) * groups; h++) p.d_offset[b * p.heads + h] = 0;
    for (int64_t i = 0; i < rows; i++) {
      Row& row = all[i];
      for (int64_t s = 1; s < splits; s++) {
        const Row& more = all[s * rows + i];
        row.d_offset += more.d_offset;
        row.summed.dot += more.summed.dot, row.summed.slope += more.summed.slope;
        for (int64_t e = 0; e < width; e++) row.dq[e] += more.dq[e];
      }
      if (p.row_dots)
        row.d_offset += store_dot(p, b, row.h, row.number, row.terms, sums ? &row.summed : nullptr);
      p.d_offset[b * p.heads + row.h] += row.d_offset;
      T* dq = at<T>(p.dq, p.dq_strides, b, row.h, row.number);
      for (int64_t e = 0; e < p.width; e++) dq[e] = narrow<T>(row.dq[R::place(e)]);
    }
  }

  void run(char* scratch) const {
    Memory memory(scratch);
    Row* all = rows_of_units(memory);
    float* pieces = pieces_of_units(memory);
    int64_t units = tables * splits;
    int threads = is_small(p) ? 1 : int(std::min(p.threads, units));
#pragma omp parallel for num_threads(threads) schedule(dynamic, 1)
    for (int64_t number = 0; number < units; number++)
      unit(all + number * rows, pieces + number * rows * (2 * width + value_width), number);
    for (int64_t table = 0; table < tables; table++)
      finish(all + table * splits * rows, table / p.key_heads, table % p.key_heads);
  }
};
