// Memory on aligned addresses: the buffers of a search, and the arena of a model's weights.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>
#include <vector>

#if defined(__linux__)
#include <sys/mman.h>
#endif

constexpr int64_t LINE = 64, HUGE_PAGE = 2 << 20;

// Memory aligned to cache lines, or in huge pages from their size on: with pages of 4 KB, reading
// weights takes 1.6 times as long.
inline void* allocate(int64_t bytes) {
  int64_t unit = bytes >= HUGE_PAGE ? HUGE_PAGE : LINE;
  bytes = (bytes + unit - 1) / unit * unit;
  void* start = aligned_alloc(unit, bytes);
  if (!start) throw std::bad_alloc();
#if defined(__linux__)
  if (unit == HUGE_PAGE) madvise(start, bytes, MADV_HUGEPAGE);
#endif
  return start;
}

// Memory that only grows, zeroed unless `clear` is false. Growing discards its contents.
template <class T>
class Buffer {
 public:
  Buffer() = default;
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
    start = nullptr;
    size = 0;
    int64_t bytes = count * int64_t(sizeof(T));
    start = (T*)allocate(bytes);
    if (clear) memset(start, 0, bytes);
    size = count;
  }
  T* get() const { return start; }
  operator T*() const { return start; }

 private:
  T* start = nullptr;
  int64_t size = 0;
};

// Pieces of memory that are freed together. They share huge pages, which most tables do not fill.
class Arena {
 public:
  Arena() = default;
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;
  ~Arena() {
    for (char* chunk : chunks) free(chunk);
  }

  template <class T>
  T* take(int64_t count) {
    int64_t bytes = (count * int64_t(sizeof(T)) + LINE - 1) / LINE * LINE;
    if (bytes > left) {
      left = bytes > CHUNK ? (bytes + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE : CHUNK;
      next = (char*)allocate(left);
      chunks.push_back(next);
    }
    char* piece = next;
    next += bytes;
    left -= bytes;
    return (T*)piece;
  }

 private:
  static constexpr int64_t CHUNK = 4 * HUGE_PAGE;
  std::vector<char*> chunks;
  char* next = nullptr;
  int64_t left = 0;
};
