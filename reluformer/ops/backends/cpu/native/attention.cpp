// Rectified attention on the CPU: the functions that Python calls.
//
// The library does not depend on torch. It receives addresses, strides and scratch memory, aligned
// to 64 bytes, of the size that `*_scratch` returns. It throws no exceptions and keeps no state.

#include <omp.h>

#include "backward.h"
#include "decode.h"
#include "few_rows_backward.h"
#include "forward.h"

namespace {

// Calls f with the kind of the tables and with their products.
template <class F>
int64_t with_kind(const Problem& p, F f) {
  if (!p.is_bf16) return f(float(), Products<float>());
  return p.exact_out ? f(bf16(), Products<float>()) : f(bf16(), Products<bf16>());
}

}  // namespace

extern "C" {

// Size of `Problem` in bytes, which Python compares with its own layout.
int64_t problem_size() { return sizeof(Problem); }

int64_t few_rows() { return FEW_ROWS; }

// How this processor multiplies bfloat16 tables, see `Bf16Products`; decoding needs no products.
int64_t bf16_products() { return Products<bf16>::kind(); }

int64_t forward_scratch(const Problem* p) {
  return with_kind(*p, [&](auto kind, auto products) -> int64_t {
    using T = decltype(kind);
    if (has_few_rows(*p)) return Decode<T>(*p).size();
    return Forward<T, decltype(products)>(*p).size() * p->threads;
  });
}

// `forward` and `backward` return 1 if an output, or a gradient of q, is not finite although it
// may have seen finite numbers only.
int64_t forward(const Problem* p, char* scratch) {
  return with_kind(*p, [&](auto kind, auto products) -> int64_t {
    using T = decltype(kind);
    if (!has_few_rows(*p)) return Forward<T, decltype(products)>(*p).run(scratch);
    // Decoding reads visible keys only.
    Decode<T>(*p).run(scratch);
    return 0;
  });
}

int64_t backward_scratch(const Problem* p) {
  return with_kind(*p, [&](auto kind, auto products) {
    if (has_few_rows(*p)) return FewRowsBackward<decltype(kind)>(*p).size();
    return Backward<decltype(kind), decltype(products)>(*p).size();
  });
}

int64_t backward(const Problem* p, char* scratch) {
  return with_kind(*p, [&](auto kind, auto products) -> int64_t {
    if (!has_few_rows(*p)) return Backward<decltype(kind), decltype(products)>(*p).run(scratch);
    // The gradient of a row reads visible keys only.
    FewRowsBackward<decltype(kind)>(*p).run(scratch);
    return 0;
  });
}
}
