// How a CPU thread walks through a tile of choices: included by kernels/experts.h only.
#pragma once

namespace hipjax::HIPJAX_TARGET {

// The rows of a tile, laid out for the products where the depth allows it.
template <int kRows>
struct TileRows {
  using Rows = StagedRows<outputs_at_once(kRows), kRows>;
  static constexpr int kMost = Rows::kMost;
  const float* x[kRows];
  Rows staged;

  FN void stage() const {
    for (int i = 0; staged.wide() && i < kRows * staged.groups(); ++i) {
      staged.stage(i % kRows, i / kRows, x[i % kRows]);
    }
  }
  // The products of all rows with `count` rows of weights.
  template <class Weight>
  FN void products(float (&values)[kMost][kRows], int count, Weight weight) const {
    if (staged.wide()) {
      staged.products(values, count, weight, weight(count - 1) + staged.terms);
      return;
    }
    for (int i = 0; i < count * kRows; ++i) {
      values[i / kRows][i % kRows] = narrow_dot(weight(i / kRows), x[i % kRows], staged.terms);
    }
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
    TileRows<kRows> in{{}, {reinterpret_cast<float*>(group.shared), a.hidden}};
    HIPJAX_UNROLL
    for (int r = 0; r < kRows; ++r) in.x[r] = a.x + tile.choice[r] / a.chosen * hidden;
    in.stage();
    constexpr int kMost = TileRows<kRows>::kMost;
    for (int from = first; from < last; from += kMost) {
      const int count = last - from < kMost ? last - from : kMost;
      float gates[kMost][kRows], ups[kMost][kRows];
      const Bits* gate = weight + from * hidden;
      in.products(gates, count, [&](int o) HIPJAX_INLINE { return gate + o * hidden; });
      const Bits* up = gate + a.width * hidden;
      in.products(ups, count, [&](int o) HIPJAX_INLINE { return up + o * hidden; });
      for (int i = 0; i < count; ++i) {
        for (int r = 0; r < tile.count; ++r) {
          a.inner[static_cast<long>(tile.choice[r]) * a.width + from + i] =
              silu(gates[i][r]) * ups[i][r];
        }
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
      constexpr int kMost = TileRows<kRows>::kMost;
      TileRows<kRows> in{{}, {staged, a.width}};
      HIPJAX_UNROLL
      for (int r = 0; r < kRows; ++r) in.x[r] = a.inner + tile.choice[r] * width;
      in.stage();
      for (int m = first; m < last; m += kMost) {
        const int count = last - m < kMost ? last - m : kMost;
        float values[kMost][kRows];
        in.products(values, count, [&](int o) HIPJAX_INLINE { return weight + (m + o) * width; });
        for (int o = 0; o < count; ++o) {
          for (int r = 0; r < tile.count; ++r) {
            products[static_cast<long>(tile.choice[r]) * a.per_block + m + o - first] = values[o][r];
          }
        }
      }
    });
  }
  group.each([&](int wave) { combine(a, products, first, a.per_block, wave); });
}

}  // namespace hipjax::HIPJAX_TARGET
