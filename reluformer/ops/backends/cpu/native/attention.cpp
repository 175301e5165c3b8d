// Rectified attention on the CPU, compiled: what Python calls.
//
// The library knows nothing of torch. It gets addresses and strides, and scratch of the size it
// asks for, aligned to 64 bytes, so that all memory is torch's; it throws nothing, keeps no state.

#include <omp.h>

#include "backward.h"
#include "decode.h"
#include "forward.h"

namespace {

// Packing keys for fewer rows than this takes longer than it saves.
constexpr int64_t FEW_ROWS = 4;

bool few(const Problem& p) { return p.rows * (p.heads / p.key_heads) < FEW_ROWS; }

template <class T>
int64_t forward_size(const Problem& p) {
  if (few(p)) return Decode<T>(p).size();
  return Forward<T>(p).size() * p.threads;
}

template <class T>
void run_forward(const Problem& p, char* scratch) {
  if (few(p)) return Decode<T>(p).run(scratch);
  Forward<T>(p).run(scratch);
}

}  // namespace

extern "C" {

// In bytes, so that Python can see that it packs the same.
int64_t problem_size() { return sizeof(Problem); }

int64_t few_rows() { return FEW_ROWS; }

// Whether products of bfloat16 tables run here; few rows always do.
int64_t multiplies_bf16() {
#ifdef HAVE_AMX
  return Products<bf16>::allowed();
#else
  return 0;
#endif
}

int64_t forward_scratch(const Problem* p) {
  if (!p->is_bf16) return forward_size<float>(*p);
#ifdef HAVE_AMX
  return forward_size<bf16>(*p);
#else
  return Decode<bf16>(*p).size();
#endif
}

void forward(const Problem* p, char* scratch) {
  if (!p->is_bf16) return run_forward<float>(*p, scratch);
#ifdef HAVE_AMX
  run_forward<bf16>(*p, scratch);
#else
  Decode<bf16>(*p).run(scratch);
#endif
}

int64_t backward_scratch(const Problem* p) {
#ifdef HAVE_AMX
  if (p->is_bf16) return Backward<bf16>(*p).size();
#endif
  return Backward<float>(*p).size();
}

void backward(const Problem* p, char* scratch) {
#ifdef HAVE_AMX
  if (p->is_bf16) return Backward<bf16>(*p).run(scratch);
#endif
  Backward<float>(*p).run(scratch);
}
}
