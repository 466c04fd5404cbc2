// The gated delta rule over a few rows, one after the other, with the norm and gate behind it.
#pragma once

#include "kernels/delta_state.h"
#include "kernels/norm.h"

namespace hipjax {

struct DeltaRows : DeltaSizes {
  DeltaState state;       // before the rows; left as it is
  const float* query;     // [B, R, key heads, keys]
  const float* key;       // [B, R, key heads, keys]
  const float* value;     // [B, R, heads, values]
  const float* decay;     // [B, R, heads], logarithms
  const float* strength;  // [B, R, heads]
  const float* gate;      // [B, R, heads, values]
  const int* length;      // [B] position of row 0; Q8 only
  Vector weight;          // [values]
  float eps;
  int gated_by_silu;  // else by sigmoid
  float* out;         // [B, R, heads, values]
  float* correction;  // [B, R, heads, values]

  constexpr int blocks() const { return batch * heads; }
};

}  // namespace hipjax

#ifdef HIPJAX_TARGET
namespace hipjax::HIPJAX_TARGET {

template <int kKeys, bool kQ8>
FN void advance(const DeltaRows& a, const DeltaPlace& p, float* memory) {
  DeltaTile<kKeys> tile(memory);
  F scale = load_tile<kQ8>(a, a.state, p, tile);
  for (int row = 0; row < a.rows; ++row) {
    const float* key = again<kKeys>(a.key + key_place(a, p, row));
    const float* query = again<kKeys>(a.query + key_place(a, p, row));
    const long at = row_place(a, p, row), head = head_place(a, p, row);
    const float decay = exp(a.decay[head]);
    F read = splat(0.0f);
    tile.each(a.keys, [&](int i, F& s) {
      s = faded<kQ8>(s, scale, decay);
      read = fma(s, splat(uniform(key, i)), read);
    });
    read = settled(read);
    const F correction = (load(a.value + at, p.count) - read) * splat(a.strength[head]);
    store(a.correction + at, correction, p.count);
    F out = splat(0.0f), peak = splat(0.0f);
    key = again<kKeys>(key);
    tile.each(a.keys, [&](int i, F& s) {
      s = fma(splat(uniform(key, i)), correction, s);
      out = fma(s, splat(uniform(query, i)), out);
      if constexpr (kQ8) peak = peak_of(peak, s);
    });
    store(a.out + at, settled(out), p.count);
    if constexpr (kQ8) {
      if (row + 1 == a.rows) break;
      peak = settled(peak);
      scale = quantise(a, p, a.length[p.sequence] + row, peak, tile);
    }
  }
}

// x / rms(x) * weight * activation(gate) over one head of one row, in place.
FN void finish_head(const DeltaRows& a, float* x, const float* gate) {
  const float scale = rms_scale(x, a.values, a.eps);
  for (int base = 0; base < a.values; base += kLanes) {
    const int count = a.values - base < kLanes ? a.values - base : kLanes;
    const F z = load(gate + base, count);
    const F open = a.gated_by_silu ? silu(z) : sigmoid(z);
    const F normed = load(x + base, count) * splat(scale) * load(a.weight, base, count);
    store(x + base, normed * open, count);
  }
}

template <int kVariant>
FN void run(const DeltaRows& a, int block, Block<DeltaSizes::kWaves> group) {
  constexpr int kKeys = DeltaSizes::keys_of(kVariant / 2);
  constexpr bool kQ8 = kVariant % 2;
  if constexpr (HIPJAX_GPU || kKeys == 0) {
    group.each([&](int wave) __attribute__((always_inline)) {
      const auto one = [&](int tile, float* memory) __attribute__((always_inline)) {
        advance<kKeys, kQ8>(a, place_of(a, block, tile), memory);
      };
      each_tile<kKeys>(a, wave, group.shared, one);
    });
    group.each([&](int wave) __attribute__((always_inline)) {
      for (int row = wave; row < a.rows; row += DeltaSizes::kWaves) {
        const long at = row_place(a, place_of(a, block, 0), row);
        finish_head(a, a.out + at, a.gate + at);
      }
    });
  }
}

}  // namespace hipjax::HIPJAX_TARGET
#endif
