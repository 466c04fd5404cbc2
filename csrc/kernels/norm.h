// Root-mean-square norms: one block per group of values.
#pragma once

#include "arguments.h"

namespace hipjax {

// out = x / sqrt(mean(x^2) + eps) * (1 + weight), the mean over each group of `width` values.
// Group g of x is scaled by part g % parts of the weight. One wave adds the squares in their order;
// all waves fetch them for it.
struct RmsNorm {
  static constexpr int kWaves = 8;
  static constexpr int kVariants = 1;
  static constexpr int kChunk = 64;  // squares that are fetched at once, times a wave's lanes
  const float* x;
  Vector weight;
  float* out;
  int groups;
  int width;
  int parts;
  float eps;

  constexpr int variant() const { return 0; }
  constexpr int blocks() const { return groups; }
  constexpr int shared_bytes() const { return 4 * (kChunk * kLanes + 1); }
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
FN void run(const RmsNorm& a, int block, Block<RmsNorm::kWaves> group) {
  constexpr int kWaves = RmsNorm::kWaves, kChunk = RmsNorm::kChunk, kAtOnce = 8;
  const float* x = a.x + static_cast<long>(block) * a.width;
  float* out = a.out + static_cast<long>(block) * a.width;
  const long part = static_cast<long>(block % a.parts) * a.width;
  float* squares = reinterpret_cast<float*>(group.shared);
  float* scale = squares + kChunk * kLanes;
  F total = splat(0.0f);  // of the first wave
  for (int from = 0; from < a.width; from += kChunk * kLanes) {
    const int left = (a.width - from + kLanes - 1) / kLanes;
    const int groups = left < kChunk ? left : kChunk;
    group.each([&](int wave) HIPJAX_INLINE {
      for (int g = wave; g < groups; g += kWaves) {
        const int base = from + g * kLanes;
        const F v = load(x + base, a.width - base);
        store(squares + g * kLanes, v * v, kLanes);
      }
    });
    group.each([&](int wave) HIPJAX_INLINE {
      if (wave != 0) return;
      for (int g = 0; g < groups; g += kAtOnce) {
        F some[kAtOnce];
        HIPJAX_UNROLL
        for (int i = 0; i < kAtOnce; ++i) some[i] = load(squares + (g + i) * kLanes, kLanes);
        HIPJAX_UNROLL
        for (int i = 0; i < kAtOnce; ++i) {
          if (g + i < groups) total = total + some[i];
        }
      }
    });
  }
  group.each([&](int wave) HIPJAX_INLINE {
    if (wave == 0) put(scale, reciprocal_root(sum(total) / static_cast<float>(a.width) + a.eps));
  });
  group.each([&](int wave) HIPJAX_INLINE {
    for (int base = wave * kLanes; base < a.width; base += kWaves * kLanes) {
      const int count = a.width - base;
      const F grown = load(x + base, count) * splat(*scale);
      store(out + base, grown * (load(a.weight, part + base, count) + splat(1.0f)), count);
    }
  });
}

}  // namespace hipjax::HIPJAX_TARGET
#endif
