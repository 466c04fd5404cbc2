// How a CPU thread walks through row products: included by kernels/row_product.h only.
#pragma once

namespace hipjax::HIPJAX_TARGET {

template <int kVariant>
FN void run(const RowProduct& a, int block, Block<RowProduct::kWaves> group) {
  constexpr int kRows = kVariant % kMaxRows + 1;
  constexpr bool kQuarters = kVariant / kMaxRows / 2;
  using Bits = std::conditional_t<kVariant / kMaxRows % 2 != 0, uint16_t, float>;
  constexpr int kSlices = kQuarters ? 4 : 1;
  constexpr int kPart = part_lanes(kRows);
  const int terms = a.depth / kSlices;
  const bool wide = terms % 8 == 0;
  const int groups = a.groups(), pitch = groups * RowProduct::kGroup;
  float* staged = reinterpret_cast<float*>(group.shared);
  if (wide) {
    for (int i = 0; i < kSlices * kRows; ++i) {
      const float* x = a.x + static_cast<long>(i % kRows) * a.depth + i / kRows * terms;
      for (int g = 0; g < groups; ++g) {
        const int at = g * RowProduct::kGroup;
        stage_group(staged + static_cast<long>(i) * pitch + at, x + at, terms - at);
      }
    }
  }
  for (int turn = block; turn < a.turns(); turn += a.stride) {
    int first;
    const Matrix& to = matrix_of(a, turn, first);
    const int last = first + a.per_block < to.outputs ? first + a.per_block : to.outputs;
    for (int m = first; m < last; ++m) {
      const Bits* weight = static_cast<const Bits*>(to.weight) + static_cast<long>(m) * a.depth;
      float sums[kSlices][kRows];
      for (int slice = 0; slice < kSlices; ++slice) {
        if (!wide) {
          for (int r = 0; r < kRows; ++r) {
            sums[slice][r] = narrow_dot(weight, a.x + static_cast<long>(r) * a.depth, terms);
          }
          continue;
        }
        Folded folded[kRows];
        for (int part = 0; part < kLanes / kPart; ++part) {
          Quads<kPart> total[1][kRows] = {};
          const Bits* const weights[1] = {weight + slice * terms};
          add_groups(total, part, weights, 0, terms,
                     staged + static_cast<long>(slice) * kRows * pitch, pitch, groups);
          for (int r = 0; r < kRows; ++r) fold(total[0][r], part, folded[r]);
        }
        for (int r = 0; r < kRows; ++r) sums[slice][r] = sum(folded[r]);
      }
      for (int r = 0; r < kRows; ++r) {
        float value = sums[0][r];
        if constexpr (kQuarters) value = (value + sums[1][r]) + (sums[2][r] + sums[3][r]);
        finish(a, to, r, m, value);
      }
    }
  }
}

}  // namespace hipjax::HIPJAX_TARGET
