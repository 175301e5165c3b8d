// Threads that run the same code on different units of work, and the memory they share.
#pragma once

#include <omp.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>

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

// Memory aligned to cache lines, zeroed unless `clear` is false. It only grows, and growing discards
// its contents.
template <class T>
class Buffer {
 public:
  Buffer() = default;
  explicit Buffer(int64_t count) { reserve(count); }
  Buffer(Buffer&& other) noexcept : start(other.start), size(other.size) {
    other.start = nullptr;
    other.size = 0;
  }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer() { free(start); }

  void reserve(int64_t count, bool clear = true) {
    if (count <= size) return;
    free(start);
    size = 0;
    int64_t bytes = (count * int64_t(sizeof(T)) + 63) / 64 * 64;
    start = (T*)aligned_alloc(64, bytes);
    if (!start) throw std::bad_alloc();
    if (clear) memset(start, 0, bytes);
    size = count;
  }
  T* get() const { return start; }
  operator T*() const { return start; }

 private:
  T* start = nullptr;
  int64_t size = 0;
};
