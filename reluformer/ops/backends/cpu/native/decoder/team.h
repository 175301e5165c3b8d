// Threads that run the same code on different units of work.
#pragma once

#include <omp.h>

#include <cstdint>

// One thread of a parallel region. All threads call the same functions in the same order, and each
// computes its share. No sum is divided among threads, so that results do not depend on their number.
struct Team {
  int index = 0, size = 1;

  static Team current() { return {omp_get_thread_num(), omp_get_num_threads()}; }

  bool is_first() const { return index == 0; }

  // Waits until all threads have finished their units.
  void sync() const {
    if (size > 1) {
#pragma omp barrier
    }
  }

  // Calls f(unit) for this thread's contiguous share of the units.
  template <class F>
  void for_units(int64_t count, F f) const {
    int64_t last = count * (index + 1) / size;
    for (int64_t unit = count * index / size; unit < last; unit++) f(unit);
  }
};
