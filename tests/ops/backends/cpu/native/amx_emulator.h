// AMX tiles in software: the kernels for AMX run on processors with AVX-512 BF16 alone.
#pragma once

#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>
#include <cstring>

namespace amx {
// 8 tiles of 16 rows of 64 bytes, as `Session` configures them.
alignas(64) inline thread_local uint8_t tiles[8][16][64];
// Tiles are configured while a session lives; their use outside of one ends the process.
inline thread_local bool configured = false;

inline void check() {
  if (!configured) __builtin_trap();
}
inline void configure() { configured = true; }
inline void release() { configured = false; }
inline void zero(int t) { check(), memset(tiles[t], 0, sizeof tiles[t]); }
inline void load(int t, const void* from, int64_t stride) {
  check();
  for (int r = 0; r < 16; r++) memcpy(tiles[t][r], (const uint8_t*)from + r * stride, 64);
}
inline void store(int t, void* to, int64_t stride) {
  check();
  for (int r = 0; r < 16; r++) memcpy((uint8_t*)to + r * stride, tiles[t][r], 64);
}
inline float widen(const uint8_t* half) {
  uint32_t bits = 0;
  memcpy((uint8_t*)&bits + 2, half, 2);
  float value;
  memcpy(&value, &bits, 4);
  return value;
}
// c [16, 16] += a [16, 32] b [16, 16, 2], where b alternates two rows.
inline void multiply(int c, int a, int b) {
  check();
  for (int m = 0; m < 16; m++)
    for (int n = 0; n < 16; n++) {
      float sum;
      memcpy(&sum, &tiles[c][m][4 * n], 4);
      for (int k = 0; k < 16; k++)
        for (int i = 0; i < 2; i++)
          sum += widen(&tiles[a][m][4 * k + 2 * i]) * widen(&tiles[b][k][4 * n + 2 * i]);
      memcpy(&tiles[c][m][4 * n], &sum, 4);
    }
}
}  // namespace amx

#undef _tile_loadconfig
#undef _tile_release
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbf16ps
#define _tile_loadconfig(shape) amx::configure()
#define _tile_release() amx::release()
#define _tile_zero amx::zero
#define _tile_loadd amx::load
#define _tile_stored amx::store
#define _tile_dpbf16ps amx::multiply
#define syscall(...) 0
