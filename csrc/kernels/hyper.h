// Hyper-connections: the gated mean over the residual streams, and a branch added to them.
#pragma once

#include "arguments.h"
#include "kernels/row_product.h"

namespace hipjax {

// out[row, h] = mean over streams s of sigmoid(up[s * hidden + h] . low[row]) * normed[row, s, h].
// Eight waves share the products of 16 values of h; then each takes whole rows of them.
struct HyperMixUp {
  static constexpr int kWaves = 8;
  static constexpr int kVariants = 2 * kMaxRows;
  static constexpr int kHidden = 16;
  static constexpr int kGroup = RowProduct::kGroup;
  const float* low;
  const void* up;
  const float* normed;
  float* out;
  int rows;
  int streams;
  int hidden;
  int depth;
  int bf16;

  constexpr int variant() const { return bf16 * kMaxRows + rows - 1; }
  constexpr int blocks() const { return (hidden + kHidden - 1) / kHidden; }
  constexpr int groups() const { return (depth + kGroup - 1) / kGroup; }
  constexpr int shared_bytes() const { return 4 * rows * (groups() * kGroup + streams * kHidden); }
  constexpr long block_cost() const {
    return static_cast<long>(kHidden) * streams * depth * (bf16 ? 2 : 4);
  }
};

// out[row, s, h] = streams[row, s, h] + strength[row, s] * branch[row, h], rounded once.
struct HyperCombine {
  static constexpr int kWaves = 8;
  static constexpr int kVariants = 1;
  static constexpr int kPiece = 4 * kWaves * kLanes;  // values of one block
  const float* streams;
  const float* branch;
  const float* strength;
  float* out;
  int rows;
  int count;  // streams of a row
  int hidden;

  constexpr int variant() const { return 0; }
  constexpr int pieces() const { return (hidden + kPiece - 1) / kPiece; }
  constexpr int blocks() const { return rows * count * pieces(); }
  constexpr int shared_bytes() const { return 0; }
  constexpr long block_cost() const { return 12L * (hidden < kPiece ? hidden : kPiece); }
};

}  // namespace hipjax

#ifdef HIPJAX_TARGET
#include "lanes.h"
#include "math.h"

namespace hipjax::HIPJAX_TARGET {

template <int kVariant>
FN void run(const HyperMixUp& a, int block, Block<HyperMixUp::kWaves> group) {
  constexpr int kRows = kVariant % kMaxRows + 1;
  using Bits = std::conditional_t<kVariant / kMaxRows != 0, uint16_t, float>;
  using Rows = StagedRows<outputs_at_once(kRows), kRows>;
  constexpr int kWaves = HyperMixUp::kWaves, kHidden = HyperMixUp::kHidden;
  const int first = block * kHidden;
  const int count = a.hidden - first < kHidden ? a.hidden - first : kHidden;
  const Rows staged{reinterpret_cast<float*>(group.shared), a.depth};
  const Bits* up = static_cast<const Bits*>(a.up);
  float* dots = staged.at + a.groups() * HyperMixUp::kGroup * kRows;  // [streams, rows, kHidden]

  group.each([&](int wave) {
    for (int i = wave; staged.wide() && i < kRows * a.groups(); i += kWaves) {
      staged.stage(i % kRows, i / kRows, a.low + static_cast<long>(i % kRows) * a.depth);
    }
  });
  group.each([&](int wave) {
    const int all = count * a.streams;
    for (int from = wave * Rows::kMost; from < all; from += kWaves * Rows::kMost) {
      const int some = all - from < Rows::kMost ? all - from : Rows::kMost;
      const auto weight = [&](int o) HIPJAX_INLINE {
        const int i = (from + o) / a.streams, s = (from + o) % a.streams;
        return up + (static_cast<long>(s) * a.hidden + first + i) * a.depth;
      };
      float values[Rows::kMost][kRows];
      if (staged.wide()) {
        staged.products(values, some, weight, weight(some - 1) + a.depth);
      } else {
        HIPJAX_UNROLL
        for (int o = 0; o < Rows::kMost; ++o) {
          for (int r = 0; r < kRows && o < some; ++r) {
            values[o][r] = narrow_dot(weight(o), a.low + static_cast<long>(r) * a.depth, a.depth);
          }
        }
      }
      HIPJAX_UNROLL
      for (int o = 0; o < Rows::kMost; ++o) {
        const int i = (from + o) / a.streams, s = (from + o) % a.streams;
        HIPJAX_UNROLL
        for (int r = 0; r < kRows; ++r) {
          if (o < some) put(dots + (s * kRows + r) * kHidden + i, values[o][r]);
        }
      }
    }
  });
  group.each([&](int wave) {
    for (int r = wave; r < kRows; r += kWaves) {
      F mixed = splat(0.0f);
      for (int s = 0; s < a.streams; ++s) {
        const F gate = sigmoid(load(dots + (s * kRows + r) * kHidden, kHidden));
        const long at = (static_cast<long>(r) * a.streams + s) * a.hidden + first;
        mixed = fma(gate, load(a.normed + at, count), mixed);
      }
      mixed = mixed / splat(static_cast<float>(a.streams));
      store(a.out + static_cast<long>(r) * a.hidden + first, mixed, count);
    }
  });
}

template <int>
FN void run(const HyperCombine& a, int block, Block<HyperCombine::kWaves> group) {
  const int stream = block / a.pieces();
  const int first = block % a.pieces() * HyperCombine::kPiece;
  const int end = first + HyperCombine::kPiece < a.hidden ? first + HyperCombine::kPiece : a.hidden;
  const long at = static_cast<long>(stream) * a.hidden;
  const float* branch = a.branch + static_cast<long>(stream / a.count) * a.hidden;
  const F strength = splat(a.strength[stream]);
  group.each([&](int wave) {
    for (int h = first + wave * kLanes; h < end; h += HyperCombine::kWaves * kLanes) {
      const int count = end - h;
      store(a.out + at + h, fma(strength, load(branch + h, count), load(a.streams + at + h, count)),
            count);
    }
  });
}

}  // namespace hipjax::HIPJAX_TARGET
#endif
