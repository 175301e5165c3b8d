// Rectified attention on the CPU: the functions that Python calls.
//
// The library does not depend on torch. It receives addresses, strides and scratch memory, aligned
// to 64 bytes, of the size that `*_scratch` returns. It throws no exceptions and keeps no state.

#include <omp.h>

#include "backward.h"
#include "decode.h"
#include "forward.h"

namespace {

// Below this number of rows, packing the keys takes longer than it saves.
constexpr int64_t FEW_ROWS = 4;

bool is_decoding(const Problem& p) { return p.rows * (p.heads / p.key_heads) < FEW_ROWS; }

template <class T>
int64_t forward_size(const Problem& p) {
  if (is_decoding(p)) return Decode<T>(p).size();
  return Forward<T>(p).size() * p.threads;
}

template <class T>
int64_t run_forward(const Problem& p, char* scratch) {
  if (!is_decoding(p)) return Forward<T>(p).run(scratch);
  // Decoding reads visible keys only.
  Decode<T>(p).run(scratch);
  return 0;
}

}  // namespace

extern "C" {

// Size of `Problem` in bytes, which Python compares with its own layout.
int64_t problem_size() { return sizeof(Problem); }

int64_t few_rows() { return FEW_ROWS; }

// How this processor multiplies bfloat16 tables, see `Bf16Products`; decoding needs no products.
int64_t bf16_products() { return Products<bf16>::kind(); }

int64_t forward_scratch(const Problem* p) {
  return p->is_bf16 ? forward_size<bf16>(*p) : forward_size<float>(*p);
}

// `forward` and `backward` return 1 if an output, or a gradient of q, is not finite although it
// may have seen finite numbers only.
int64_t forward(const Problem* p, char* scratch) {
  return p->is_bf16 ? run_forward<bf16>(*p, scratch) : run_forward<float>(*p, scratch);
}

int64_t backward_scratch(const Problem* p) {
  return p->is_bf16 ? Backward<bf16>(*p).size() : Backward<float>(*p).size();
}

int64_t backward(const Problem* p, char* scratch) {
  return p->is_bf16 ? Backward<bf16>(*p).run(scratch) : Backward<float>(*p).run(scratch);
}
}
