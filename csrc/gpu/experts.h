// How the waves of a GPU share a tile of choices: included by kernels/experts.h only.
//
// A wave takes four rows of weights at once, or twice two where four would need too many
// registers. The rows of x are read where they lie: weights pass by the caches, so the few
// rows stay in the first one, and no wave waits for another.
#pragma once

namespace hipjax::gpu {

// A value that all lanes hold, which AMD's compiler cannot know of one that came from lanes:
// addresses made of it need no vector registers.
#if defined(__AMDGCN__)
FN int uniform(int x) { return __builtin_amdgcn_readfirstlane(x); }
#else
FN int uniform(int x) { return x; }
#endif
FN Tile uniform(Tile tile) {
#pragma unroll
  for (int r = 0; r < kMaxRows; ++r) tile.choice[r] = uniform(tile.choice[r]);
  tile.count = uniform(tile.count);
  return tile;
}

// sums[o][r] = x_r . weight_o, in the row products' order.
template <int kOuts, int kRows, class Bits>
FN void products(const Bits* const (&weights)[kOuts], const float* const (&x)[kRows], int terms,
                 float (&sums)[kOuts][kRows]) {
  if (terms % 8 != 0) {  // as narrow_dot
    F total[kOuts][kRows] = {};
    for (int base = 0; base < terms; base += kLanes) {
#pragma unroll
      for (int o = 0; o < kOuts; ++o) {
        const F some = load(weights[o] + base, terms - base);
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
          total[o][r] = fma(some, load(x[r] + base, terms - base), total[o][r]);
        }
      }
    }
#pragma unroll
    for (int o = 0; o < kOuts; ++o) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) sums[o][r] = sum(total[o][r]);
    }
    return;
  }
  Quads total[kOuts][kRows] = {};
  for (int at = 0; at < terms; at += RowProduct::kGroup) {
    Quads low[kOuts], high[kOuts];
#pragma unroll
    for (int o = 0; o < kOuts; ++o) load_quads(weights[o] + at, terms - at, low[o], high[o]);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      Quads x_low, x_high;
      load_quads(x[r] + at, terms - at, x_low, x_high);
#pragma unroll
      for (int o = 0; o < kOuts; ++o) {
        total[o][r] = fma(high[o], x_high, fma(low[o], x_low, total[o][r]));
      }
    }
  }
  lane_sums(total, sums);
}

template <int kVariant>
FN void run(const ExpertInner& a, int block, Block<ExpertInner::kWaves>) {
  constexpr bool kSearch = kVariant / 2;
  using Bits = std::conditional_t<kVariant % 2 != 0, uint16_t, float>;
  const int own = block / a.parts(), part = block % a.parts(), wave = uniform(thread() / kLanes);
  const Tile tile = uniform(tile_of<kSearch>(a.experts, a.choices(), own));
  if (part == 0 && wave == 0) write_plan(a.plan, own, tile);
  if (tile.count == 0) return;
  const long hidden = a.hidden, expert = expert_of(a.experts, own, a.count);
  const Bits* weight = static_cast<const Bits*>(a.gate_up) + expert * 2 * a.width * hidden;
  const int first = part * a.per_block + wave * 2;
  with_rows<kSearch>(tile.count, [&](auto rows) HIPJAX_INLINE {
    constexpr int kRows = decltype(rows)::value;
    constexpr int kPairs = kRows > 2 ? 1 : 2;
    const float* x[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) x[r] = a.x + tile.choice[r] / a.chosen * hidden;
#pragma unroll 1
    for (int i = first; i < first + 2 && i < a.width; i += kPairs) {
      // A pair past the end reads the last one again; nothing of it is written.
      const Bits* weights[2 * kPairs];
#pragma unroll
      for (int p = 0; p < kPairs; ++p) {
        const int real = i + p < a.width ? i + p : a.width - 1;
        weights[2 * p] = weight + real * hidden;
        weights[2 * p + 1] = weight + (a.width + real) * hidden;
      }
      float sums[2 * kPairs][kRows];
      products(weights, x, a.hidden, sums);
#pragma unroll
      for (int p = 0; p < kPairs; ++p) {
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
          if (r < tile.count && i + p < a.width) {
            put(a.inner + static_cast<long>(tile.choice[r]) * a.width + i + p,
                silu(sums[2 * p][r]) * sums[2 * p + 1][r]);
          }
        }
      }
    }
  });
}

// Two fours of outputs to a block; for each, four waves take turns at the tiles.
template <int kVariant>
FN void run(const ExpertOutput& a, int block, Block<ExpertOutput::kWaves> group) {
  constexpr bool kSearch = kVariant / 2;
  using Bits = std::conditional_t<kVariant % 2 != 0, uint16_t, float>;
  constexpr int kOuts = 4;
  const int fours = a.per_block / kOuts, turns = ExpertOutput::kWaves / fours;
  const long width = a.width;
  const int first = block * a.per_block;
  float* all = reinterpret_cast<float*>(group.shared);
  group.each([&](int any) HIPJAX_INLINE {
    // With many rows' addresses, too much would be uniform for the scalar registers.
    const int wave = kSearch ? any : uniform(any), place = wave % fours * kOuts;
    for (int own = wave / fours; own < a.choices(); own += turns) {
      const Tile tile = uniform(planned<kSearch>(a.plan, own));
      if (tile.count == 0) continue;
      const long expert = expert_of(a.experts, own, a.count);
      const Bits* weight = static_cast<const Bits*>(a.down) + expert * a.hidden * width;
      with_rows<kSearch>(tile.count, [&](auto rows) HIPJAX_INLINE {
        constexpr int kRows = decltype(rows)::value;
        constexpr int kSome = kRows > 2 ? 2 : kOuts;
        const float* x[kRows];
#pragma unroll
        for (int r = 0; r < kRows; ++r) x[r] = a.inner + tile.choice[r] * width;
#pragma unroll 1
        for (int o = place; o < place + kOuts; o += kSome) {
          // Outputs past the end read the last row again; `combine` leaves them out.
          const Bits* weights[kSome];
#pragma unroll
          for (int s = 0; s < kSome; ++s) {
            const int m = first + o + s;
            weights[s] = weight + (m < a.hidden ? m : a.hidden - 1) * width;
          }
          float sums[kSome][kRows];
          products(weights, x, a.width, sums);
#pragma unroll
          for (int r = 0; r < kRows; ++r) {
            if (r >= tile.count) continue;
#pragma unroll
            for (int s = 0; s < kSome; ++s) {
              put(all + tile.choice[r] * a.per_block + o + s, sums[s][r]);
            }
          }
        }
      });
    }
  });
  group.each([&](int wave) { combine(a, all, first, a.per_block, wave); });
}

}  // namespace hipjax::gpu
