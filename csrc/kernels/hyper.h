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
  constexpr int kWaves = HyperMixUp::kWaves, kHidden = HyperMixUp::kHidden;
  constexpr int kOuts = !HIPJAX_GPU ? 1 : kRows > 3 ? 2 : 4;  // streams at once
  constexpr int kPart = part_lanes(kOuts * kRows);
  const int first = block * kHidden;
  const int count = a.hidden - first < kHidden ? a.hidden - first : kHidden;
  const int groups = a.groups(), pitch = groups * HyperMixUp::kGroup;
  const bool wide = a.depth % 8 == 0;
  const Bits* up = static_cast<const Bits*>(a.up);
  float* staged = reinterpret_cast<float*>(group.shared);
  float* dots = staged + kRows * pitch;  // [streams, rows, kHidden]

  group.each([&](int wave) {
    for (int i = wave; wide && i < kRows * groups; i += kWaves) {
      const int row = i / groups, at = i % groups * HyperMixUp::kGroup;
      const float* low = a.low + static_cast<long>(row) * a.depth;
      stage_group(staged + row * pitch + at, low + at, a.depth - at);
    }
  });
  group.each([&](int wave) {
    for (int i = wave; i < count; i += kWaves) {
      for (int from = 0; from < a.streams; from += kOuts) {
        const Bits* weights[kOuts];
        HIPJAX_UNROLL
        for (int o = 0; o < kOuts; ++o) {  // past the end: the last stream again, left out below
          const int s = from + o < a.streams ? from + o : a.streams - 1;
          weights[o] = up + (static_cast<long>(s) * a.hidden + first + i) * a.depth;
        }
        float* to = dots + from * kRows * kHidden + i;
        if (!wide) {
          HIPJAX_UNROLL
          for (int o = 0; o < kOuts; ++o) {
            for (int r = 0; r < kRows && from + o < a.streams; ++r) {
              const float* low = a.low + static_cast<long>(r) * a.depth;
              put(to + (o * kRows + r) * kHidden, narrow_dot(weights[o], low, a.depth));
            }
          }
          continue;
        }
        Folded folded[kOuts][kRows];
        for (int part = 0; part < kLanes / kPart; ++part) {
          Quads<kPart> total[kOuts][kRows] = {};
          add_groups(total, part, weights, 0, a.depth, staged, pitch, groups);
          HIPJAX_UNROLL
          for (int o = 0; o < kOuts; ++o) {
            HIPJAX_UNROLL
            for (int r = 0; r < kRows; ++r) fold(total[o][r], part, folded[o][r]);
          }
        }
        HIPJAX_UNROLL
        for (int o = 0; o < kOuts; ++o) {
          HIPJAX_UNROLL
          for (int r = 0; r < kRows; ++r) {
            const float dot = sum(folded[o][r]);
            if (from + o < a.streams) put(to + (o * kRows + r) * kHidden, dot);
          }
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
