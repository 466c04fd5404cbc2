// Root-mean-square norms: one wave per group of values.
#pragma once

#include "arguments.h"

namespace hipjax {

// out = x / sqrt(mean(x^2) + eps) * (1 + weight), the mean over each group of `width` values.
// Group g of x is scaled by part g % parts of the weight.
struct RmsNorm {
  static constexpr int kWaves = 1;
  static constexpr int kVariants = 1;
  const float* x;
  Vector weight;
  float* out;
  int groups;
  int width;
  int parts;
  float eps;

  constexpr int variant() const { return 0; }
  constexpr int blocks() const { return groups; }
  constexpr int shared_bytes() const { return 0; }
  constexpr long block_cost() const { return 8L * width; }
};

}  // namespace hipjax

#ifdef HIPJAX_TARGET
#include "lanes.h"
#include "math.h"

namespace hipjax::HIPJAX_TARGET {

FN float rms_scale(const float* x, int width, float eps) {
  const float squares = sum_over(width, [&](int base, int count) {
    const F v = load(x + base, count);
    return v * v;
  });
  return reciprocal_root(squares / static_cast<float>(width) + eps);
}

template <int>
FN void run(const RmsNorm& a, int block, Block<1>) {
  const float* x = a.x + static_cast<long>(block) * a.width;
  float* out = a.out + static_cast<long>(block) * a.width;
  const long part = static_cast<long>(block % a.parts) * a.width;
  const float scale = rms_scale(x, a.width, a.eps);
  for (int base = 0; base < a.width; base += kLanes) {
    const int count = a.width - base < kLanes ? a.width - base : kLanes;
    const F grown = load(x + base, count) * splat(scale);
    store(out + base, grown * (load(a.weight, part + base, count) + splat(1.0f)), count);
  }
}

}  // namespace hipjax::HIPJAX_TARGET
#endif
