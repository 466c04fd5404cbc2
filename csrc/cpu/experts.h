// How a CPU thread walks through a tile of choices: included by kernels/experts.h only.
#pragma once

namespace hipjax::HIPJAX_TARGET {

constexpr int whole_groups(int terms) {
  return (terms + RowProduct::kGroup - 1) / RowProduct::kGroup;
}

// The rows of a tile, laid out for the products where the depth allows it.
template <int kRows>
struct TileRows {
  const float* x[kRows];
  float* staged;
  int terms;

  FN bool wide() const { return terms % 8 == 0; }
  FN void stage() const {
    if (!wide()) return;
    const int groups = whole_groups(terms);
    for (int r = 0; r < kRows; ++r) {
      for (int g = 0; g < groups; ++g) {
        const int at = g * RowProduct::kGroup;
        stage_group(staged + static_cast<long>(r) * groups * RowProduct::kGroup + at, x[r] + at,
                    terms - at);
      }
    }
  }
  // The products of all rows with one row of weights.
  template <class Bits>
  FN void products(const Bits* weight, float (&sums)[kRows]) const {
    constexpr int kPart = part_lanes(kRows);
    if (!wide()) {
      for (int r = 0; r < kRows; ++r) sums[r] = narrow_dot(weight, x[r], terms);
      return;
    }
    const int groups = whole_groups(terms);
    Folded folded[kRows];
    for (int part = 0; part < kLanes / kPart; ++part) {
      Quads<kPart> total[1][kRows] = {};
      const Bits* const weights[1] = {weight};
      add_groups(total, part, weights, 0, terms, staged, groups * RowProduct::kGroup, groups);
      for (int r = 0; r < kRows; ++r) fold(total[0][r], part, folded[r]);
    }
    for (int r = 0; r < kRows; ++r) sums[r] = sum(folded[r]);
  }
};

template <int kVariant>
FN void run(const ExpertInner& a, int block, Block<ExpertInner::kWaves> group) {
  constexpr bool kSearch = kVariant / 2;
  using Bits = std::conditional_t<kVariant % 2 != 0, uint16_t, float>;
  const int own = block / a.parts(), part = block % a.parts();
  const Tile tile = tile_of<kSearch>(a.experts, a.choices(), own);
  if (part == 0) write_plan(a.plan, own, tile);
  if (tile.count == 0) return;
  const long hidden = a.hidden, expert = expert_of(a.experts, own, a.count);
  const Bits* weight = static_cast<const Bits*>(a.gate_up) + expert * 2 * a.width * hidden;
  const int first = part * a.per_block;
  const int last = first + a.per_block < a.width ? first + a.per_block : a.width;
  with_rows<kSearch>(tile.count, [&](auto rows) HIPJAX_INLINE {
    constexpr int kRows = decltype(rows)::value;
    TileRows<kRows> in{{}, reinterpret_cast<float*>(group.shared), a.hidden};
    for (int r = 0; r < kRows; ++r) in.x[r] = a.x + tile.choice[r] / a.chosen * hidden;
    in.stage();
    for (int i = first; i < last; ++i) {
      float gate[kRows], up[kRows];
      in.products(weight + i * hidden, gate);
      in.products(weight + (a.width + i) * hidden, up);
      for (int r = 0; r < tile.count; ++r) {
        a.inner[static_cast<long>(tile.choice[r]) * a.width + i] = silu(gate[r]) * up[r];
      }
    }
  });
}

template <int kVariant>
FN void run(const ExpertOutput& a, int block, Block<ExpertOutput::kWaves> group) {
  constexpr bool kSearch = kVariant / 2;
  using Bits = std::conditional_t<kVariant % 2 != 0, uint16_t, float>;
  const long width = a.width;
  const int first = block * a.per_block;
  const int last = first + a.per_block < a.hidden ? first + a.per_block : a.hidden;
  float* products = reinterpret_cast<float*>(group.shared);
  float* staged = products + (static_cast<long>(a.choices()) * a.per_block + 15) / 16 * 16;
  for (int own = 0; own < a.choices(); ++own) {
    const Tile tile = planned<kSearch>(a.plan, own);
    if (tile.count == 0) continue;
    const long expert = expert_of(a.experts, own, a.count);
    const Bits* weight = static_cast<const Bits*>(a.down) + expert * a.hidden * width;
    with_rows<kSearch>(tile.count, [&](auto rows) HIPJAX_INLINE {
      constexpr int kRows = decltype(rows)::value;
      TileRows<kRows> in{{}, staged, a.width};
      for (int r = 0; r < kRows; ++r) in.x[r] = a.inner + tile.choice[r] * width;
      in.stage();
      for (int m = first; m < last; ++m) {
        float sums[kRows];
        in.products(weight + m * width, sums);
        for (int r = 0; r < tile.count; ++r) {
          products[static_cast<long>(tile.choice[r]) * a.per_block + m - first] = sums[r];
        }
      }
    });
  }
  group.each([&](int wave) { combine(a, products, first, a.per_block, wave); });
}

}  // namespace hipjax::HIPJAX_TARGET
