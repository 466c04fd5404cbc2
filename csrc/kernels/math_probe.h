// The functions of math.h one by one, elementwise. It exists for tests: they measure here what
// the other kernels compute with, on whichever target the tests run.
#pragma once

#include "arguments.h"

namespace hipjax {

enum class MathFunction : int {
  kExp,
  kSigmoid,
  kSilu,
  kSoftplus,
  kLog1p,
  kReciprocalRoot,
  kSin,
  kCos,
  kCount,
};

// out = function(x). Variant 0 takes a value per lane, variant 1 one uniform value at a time.
struct MathProbe {
  static constexpr int kWaves = 1;
  static constexpr int kVariants = 2;
  static constexpr int kBlock = 32 * kLanes;  // values per block
  const float* x;
  float* out;
  long count;
  MathFunction function;
  int uniform;

  constexpr int variant() const { return uniform; }
  constexpr int blocks() const { return static_cast<int>((count + kBlock - 1) / kBlock); }
  constexpr int shared_bytes() const { return 0; }
  constexpr long block_cost() const { return 16L * kBlock; }
};

}  // namespace hipjax

#ifdef HIPJAX_TARGET
#include "lanes.h"
#include "math.h"

namespace hipjax::HIPJAX_TARGET {

template <class T>
FN T math_function(MathFunction function, T x) {
  T sin = x, cos = x;
  switch (function) {
    case MathFunction::kExp:
      return exp(x);
    case MathFunction::kSigmoid:
      return sigmoid(x);
    case MathFunction::kSilu:
      return silu(x);
    case MathFunction::kSoftplus:
      return softplus(x);
    case MathFunction::kLog1p:
      return log1p(x);
    case MathFunction::kReciprocalRoot:
      return reciprocal_root(x);
    case MathFunction::kSin:
      sin_cos(x, sin, cos);
      return sin;
    default:
      sin_cos(x, sin, cos);
      return cos;
  }
}

template <int kUniform>
FN void run(const MathProbe& a, int block, Block<1>) {
  const long begin = static_cast<long>(block) * MathProbe::kBlock;
  const long end = begin + MathProbe::kBlock < a.count ? begin + MathProbe::kBlock : a.count;
  for (long at = begin; at < end; at += kUniform ? 1 : kLanes) {
    if constexpr (kUniform) {
      put(a.out + at, math_function<float>(a.function, a.x[at]));
    } else {
      const int count = end - at < kLanes ? static_cast<int>(end - at) : kLanes;
      store(a.out + at, math_function<F>(a.function, load(a.x + at, count)), count);
    }
  }
}

}  // namespace hipjax::HIPJAX_TARGET
#endif
