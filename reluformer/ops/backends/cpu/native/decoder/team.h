// Threads that run the same code on different units of work.
#pragma once

#include <omp.h>

#include <atomic>
#include <cstdint>
#include <thread>

// A meeting point of threads. A decoding step passes a hundred of them in less than a millisecond, so
// threads spin; OpenMP's barrier puts them to sleep, which made two threads slower than one.
class Barrier {
 public:
  // Returns when `size` threads have called it.
  void wait(int size) {
    int turn = turns.load(std::memory_order_relaxed);
    if (arrived.fetch_add(1, std::memory_order_acq_rel) + 1 == size) {
      arrived.store(0, std::memory_order_relaxed);
      turns.store(turn + 1, std::memory_order_release);
      return;
    }
    for (int spins = 0; turns.load(std::memory_order_acquire) == turn; spins++) {
      relax();
      // A thread that waits for long may keep the other one from its processor.
      if (spins > SPINS) std::this_thread::yield();
    }
  }

 private:
  static constexpr int SPINS = 2000;

  // Leaves the core to its other hardware thread for a moment.
  static void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
  }

  std::atomic<int> arrived{0}, turns{0};
};

// One thread of a parallel region. All threads call the same functions in the same order, and each
// computes its share. No sum is divided among threads, so that results do not depend on their number.
struct Team {
  int index = 0, size = 1;
  Barrier* barrier = nullptr;

  // The calling thread of a parallel region, whose threads share the barrier.
  static Team current(Barrier& barrier) {
    return {omp_get_thread_num(), omp_get_num_threads(), &barrier};
  }

  bool is_first() const { return index == 0; }

  // Waits until all threads have finished their units.
  void sync() const {
    if (size > 1) barrier->wait(size);
  }

  // Calls f(unit) for this thread's contiguous share of the units.
  template <class F>
  void for_units(int64_t count, const F& f) const {
    int64_t last = count * (index + 1) / size;
    for (int64_t unit = count * index / size; unit < last; unit++) f(unit);
  }
};
