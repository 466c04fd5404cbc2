// Mixture of experts for decoded rows: two launches, in which rows that chose the same expert
// share the reads of its weights.
//
// A choice is one slot of one row's list, `chosen` to a row. A tile is up to kMaxRows choices
// of the same expert; the first of them, in the order of rows and slots, owns it.
#pragma once

#include <type_traits>

#include "arguments.h"

namespace hipjax {

// out = silu(gate) * up, element by element.
struct Swiglu {
  static constexpr int kWaves = 1;
  static constexpr int kVariants = 1;
  static constexpr int kPerBlock = 8 * kLanes;
  const float* gate;
  const float* up;
  float* out;
  int count;

  constexpr int variant() const { return 0; }
  constexpr int blocks() const { return (count + kPerBlock - 1) / kPerBlock; }
  constexpr int shared_bytes() const { return 0; }
  constexpr long block_cost() const { return 48L * kPerBlock; }
};

// inner[choice, i] = silu(x_row . gate_up_e[i]) * (x_row . gate_up_e[width + i]), and the plan:
// for every choice the size of the tile that it owns, or 0, and the tile's choices.
struct ExpertInner {
  static constexpr int kWaves = 8;
  static constexpr int kVariants = 4;
  static constexpr int kPlanned = 1 + kMaxRows;
  const float* x;      // [rows, hidden]
  const int* experts;  // [rows, chosen]
  const void* gate_up;  // [count, 2 * width, hidden]
  float* inner;        // [rows, chosen, width]
  int* plan;           // [rows, chosen, kPlanned]
  int rows;
  int chosen;
  int count;
  int hidden;
  int width;
  int bf16;
  int per_block;  // values of `width` that a block makes
  int shared;     // bytes

  constexpr int variant() const { return (rows > 1 ? 2 : 0) + bf16; }
  constexpr int choices() const { return rows * chosen; }
  constexpr int parts() const { return (width + per_block - 1) / per_block; }
  constexpr int blocks() const { return choices() * parts(); }
  constexpr int shared_bytes() const { return shared; }
  constexpr long block_cost() const { return 2L * per_block * hidden * (bf16 ? 2 : 4); }
};

// out[row, m] = sum over slots of weight * (inner_choice . down_e[m]), in the list's order,
// + sigmoid(share[row]) * other[row, m].
struct ExpertOutput {
  static constexpr int kWaves = 8;
  static constexpr int kVariants = 4;
  const float* inner;    // [rows, chosen, width]
  const int* experts;    // [rows, chosen]
  const int* plan;       // [rows, chosen, ExpertInner::kPlanned]
  const float* weights;  // [rows, chosen]
  const float* other;    // [rows, hidden]: the shared expert's output
  const float* share;    // [rows]
  const void* down;      // [count, hidden, width]
  float* out;            // [rows, hidden]
  int rows;
  int chosen;
  int count;
  int hidden;
  int width;
  int bf16;
  int per_block;  // values of `hidden` that a block makes
  int shared;     // bytes: the products of all choices, and what a target stages

  constexpr int variant() const { return (rows > 1 ? 2 : 0) + bf16; }
  constexpr int choices() const { return rows * chosen; }
  constexpr int blocks() const { return (hidden + per_block - 1) / per_block; }
  constexpr int shared_bytes() const { return shared; }
  constexpr long block_cost() const {
    return static_cast<long>(choices()) * per_block * width * (bf16 ? 2 : 4);
  }
};

}  // namespace hipjax

#ifdef HIPJAX_TARGET
#include "kernels/row_product.h"
#include "lanes.h"
#include "math.h"

namespace hipjax::HIPJAX_TARGET {

template <int>
FN void run(const Swiglu& a, int block, Block<1>) {
  const int first = block * Swiglu::kPerBlock;
  for (int base = first; base < first + Swiglu::kPerBlock && base < a.count; base += kLanes) {
    const int count = a.count - base;
    store(a.out + base, silu(load(a.gate + base, count)) * load(a.up + base, count), count);
  }
}

// The expert of a choice; a wrong number reads some expert, never elsewhere.
FN long expert_of(const int* experts, int choice, int count) {
  const int expert = experts[choice];
  return expert < 0 ? 0 : expert < count ? expert : count - 1;
}

// A tile's choices. From `count` on they repeat the first, and nothing of theirs is written.
struct Tile {
  int choice[kMaxRows];
  int count;
};

// The first choice from `from` on of an expert, or `choices`.
FN int next_choice(const int* experts, int choices, int from, int expert) {
  for (int base = from; base < choices; base += kLanes) {
    const I found = load(experts + base, choices - base);
    const M same = both(found == splat_int(expert), lane() < splat_int(choices - base));
    const int at = least(select(same, lane(), splat_int(kLanes)));
    if (at < kLanes) return base + at;
  }
  return choices;
}

// The tile that a choice owns; its count is 0 if another one does. One row is not searched:
// its experts differ.
template <bool kSearch>
FN Tile tile_of(const int* experts, int choices, int own) {
  Tile tile;
  HIPJAX_UNROLL
  for (int r = 0; r < kMaxRows; ++r) tile.choice[r] = own;
  tile.count = 1;
  if constexpr (kSearch) {
    const int expert = experts[own];
    I earlier = splat_int(0);
    for (int base = 0; base < own; base += kLanes) {
      const M same = both(load(experts + base, own - base) == splat_int(expert),
                          lane() < splat_int(own - base));
      earlier = earlier + select(same, splat_int(1), splat_int(0));
    }
    if (own > 0 && sum(earlier) % kMaxRows != 0) {
      tile.count = 0;
      return tile;
    }
    int last = own;
    HIPJAX_UNROLL
    for (int r = 1; r < kMaxRows; ++r) {
      if (last < choices) last = next_choice(experts, choices, last + 1, expert);
      if (last < choices) {
        tile.choice[r] = last;
        ++tile.count;
      }
    }
  }
  return tile;
}

FN void write_plan(int* plan, int own, const Tile& tile) {
  int* to = plan + static_cast<long>(own) * ExpertInner::kPlanned;
  put(to, tile.count);
  HIPJAX_UNROLL
  for (int r = 0; r < kMaxRows; ++r) put(to + 1 + r, tile.choice[r]);
}
template <bool kSearch>
FN Tile planned(const int* plan, int own) {
  Tile tile;
  const int* from = plan + static_cast<long>(own) * ExpertInner::kPlanned;
  tile.count = kSearch ? from[0] : 1;
  HIPJAX_UNROLL
  for (int r = 0; r < kMaxRows; ++r) tile.choice[r] = own;
  if (kSearch && tile.count > 1) {
    HIPJAX_UNROLL
    for (int r = 1; r < kMaxRows; ++r) tile.choice[r] = from[1 + r];
  }
  return tile;
}

// Calls fn with the number of rows to compute as a constant: `count`, or the next power of two.
template <bool kSearch, class Fn>
FN void with_rows(int count, Fn fn) {
  if constexpr (kSearch) {
    if (count > 4) return fn(std::integral_constant<int, 8>());
    if (count > 2) return fn(std::integral_constant<int, 4>());
    if (count > 1) return fn(std::integral_constant<int, 2>());
  }
  fn(std::integral_constant<int, 1>());
}

// The rows' final sums over outputs first … first + outputs - 1, from the products
// [choices, outputs] of all choices; rows are dealt out to waves.
FN void combine(const ExpertOutput& a, const float* products, int first, int outputs, int wave) {
  for (int row = wave; row < a.rows; row += ExpertOutput::kWaves) {
    const float share = sigmoid(a.share[row]);
    const long at = static_cast<long>(row) * a.hidden + first;
    for (int base = 0; base < outputs; base += kLanes) {
      const int count = outputs - base < a.hidden - first - base ? outputs - base
                                                                 : a.hidden - first - base;
      if (count <= 0) break;
      F total = splat(0.0f);
      for (int slot = 0; slot < a.chosen; ++slot) {
        const int choice = row * a.chosen + slot;
        const F product = load(products + static_cast<long>(choice) * outputs + base, count);
        total = fma(splat(a.weights[choice]), product, total);
      }
      total = fma(splat(share), load(a.other + at + base, count), total);
      store(a.out + at + base, total, count);
    }
  }
}

}  // namespace hipjax::HIPJAX_TARGET

#if HIPJAX_GPU
#include "gpu/experts.h"
#else
#include "cpu/experts.h"
#endif
#endif
