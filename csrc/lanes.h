// A wave of 32 lanes, and what its code may say: the one vocabulary of all kernels.
//
// On a GPU a lane is a thread: F is a float, and the functions below are a few compiler
// builtins, so no vendor header is needed. On a CPU the wave is one thread: F holds the
// values of all 32 lanes in vector registers, 4, 8 or 16 to a register. Either way an
// operation on F is the same IEEE operation in every lane, and `sum` adds lanes in the same
// tree, so a kernel written in these terms gives the same bits everywhere.
//
// Plain `float` and `int` are uniform: all lanes hold the same value.
#pragma once

#include <stdint.h>

#if defined(__CUDA_ARCH__) || defined(__NVPTX__) || defined(__AMDGCN__)
#define HIPJAX_GPU 1
#include "gpu/wave.h"
#else
#define HIPJAX_GPU 0
#include "cpu/wave.h"
#endif

// For a lambda: a call would bring what it captures to memory.
#define HIPJAX_INLINE __attribute__((always_inline))

namespace hipjax::HIPJAX_TARGET {

// Parameters of either storage, see Vector.
FN F load(const Vector& v, long at, int count) {
  if (v.bf16) return load(static_cast<const uint16_t*>(v.data) + at, count);
  return load(static_cast<const float*>(v.data) + at, count);
}

// Sum over `width` values in the order of order.md: lane t adds up those at t, t + 32, …, then
// the tree over lanes. `values(base, count)` gives the 32 from `base` on, of which `count` are
// real; whatever the other lanes hold is left out.
template <class Fn>
FN float sum_over(int width, Fn values) {
  F total = splat(0.0f);
  for (int base = 0; base < width; base += kLanes) {
    const int count = width - base < kLanes ? width - base : kLanes;
    const F some = values(base, count);
    total = total + (count == kLanes ? some : select(lane() < splat_int(count), some, splat(0.0f)));
  }
  return sum(total);
}

}  // namespace hipjax::HIPJAX_TARGET
