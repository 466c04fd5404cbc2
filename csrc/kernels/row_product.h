// Products of a few rows with weight matrices, the weights read once for all rows.
#pragma once

#include <type_traits>

#include "arguments.h"

namespace hipjax {

// What happens to a value before it is written.
enum class Finish : int {
  kNone = 0,
  kSilu = 1,      // silu(value / divisor)
  kStrength = 2,  // 2 sigmoid(value / divisor)
  kAdd = 3,       // value + other[(row + skipped) / group, m]
  kCombine = 4,   // streams[row, s, m] + strength[row, s] * value, for every stream s
};

// One matrix [outputs, depth] in the checkpoint's layout, and where its products go.
struct Matrix {
  const void* weight;
  float* out;
  const float* other;     // kAdd: what is added; kCombine: the streams
  const float* strength;  // kCombine
  int outputs;
  Finish finish;
};

// out_i[row, m] = finish(sum over k of x[row, k] * weight_i[m, k]), for up to kMaxRows rows
// and up to four matrices of one depth and storage.
struct RowProduct {
  static constexpr int kMatrices = 4;
  static constexpr int kVariants = 2 * 2 * kMaxRows;
  static constexpr int kGroup = 256;  // terms that one wave takes at once, eight a lane
  static constexpr int kWaves = 8;
  static constexpr int kOuts = 4;  // outputs of a GPU wave
  static constexpr int kPartials = kWaves * kOuts * kMaxRows;
  const float* x;
  Matrix matrices[kMatrices];
  int count;
  int rows;
  int depth;
  int bf16;
  int quarters;    // 1: the order for long rows
  float divisor;   // of kSilu and kStrength
  int group;       // of kAdd: rows that share one row of `other`
  int skipped;     // of kAdd: rows of the first group that are not among these
  int streams;     // of kCombine
  int chunk;       // groups of x that are staged at once
  int per_block;   // outputs of one turn of a block
  int stride;      // blocks launched: block b takes turns b, b + stride, …

  constexpr int variant() const { return (quarters * 2 + bf16) * kMaxRows + rows - 1; }
  constexpr int turns() const {
    int n = 0;
    for (int i = 0; i < count; ++i) n += (matrices[i].outputs + per_block - 1) / per_block;
    return n;
  }
  constexpr int groups() const { return ((quarters ? depth / 4 : depth) + kGroup - 1) / kGroup; }
  constexpr int blocks() const { return stride; }
  constexpr int shared_bytes() const {
    const int staged = (quarters ? 4 : 1) * rows * chunk * kGroup;
    return 4 * (staged + (quarters ? kPartials : 0));
  }
  constexpr long block_cost() const { return static_cast<long>(per_block) * depth * (bf16 ? 2 : 4); }
};

}  // namespace hipjax

#ifdef HIPJAX_TARGET
#include "lanes.h"
#include "math.h"

namespace hipjax::HIPJAX_TARGET {

// Writes a value where it goes.
FN void finish(const RowProduct& a, const Matrix& to, int row, int m, float value) {
  const long at = static_cast<long>(row) * to.outputs + m;
  switch (to.finish) {
    case Finish::kNone:
      to.out[at] = value;
      return;
    case Finish::kSilu:
      to.out[at] = silu(value / a.divisor);
      return;
    case Finish::kStrength:
      to.out[at] = 2.0f * sigmoid(value / a.divisor);
      return;
    case Finish::kAdd:
      to.out[at] =
          value + to.other[static_cast<long>((row + a.skipped) / a.group) * to.outputs + m];
      return;
    case Finish::kCombine:
      for (int s = 0; s < a.streams; ++s) {
        const long stream = static_cast<long>(row) * a.streams + s;
        const long place = stream * to.outputs + m;
        to.out[place] = fma(to.strength[stream], value, to.other[place]);
      }
  }
}

// The wide order over `groups` groups of kOuts weight rows, from their term `from` on, and of
// kRows staged rows, `pitch` apart; the last group may have fewer than 256 of the `terms`.
template <int kPart, int kOuts, int kRows, class Bits>
FN void add_groups(Quads<kPart> (&total)[kOuts][kRows], int part, const Bits* const (&weights)[kOuts],
                   int from, int terms, const float* staged, int pitch, int groups) {
  for (int g = 0; g < groups; ++g) {
    const int at = g * RowProduct::kGroup;
    Quads<kPart> low[kOuts], high[kOuts];
    HIPJAX_UNROLL
    for (int o = 0; o < kOuts; ++o) {
      load_quads(weights[o] + from + at, part, terms - from - at, low[o], high[o]);
    }
    HIPJAX_UNROLL
    for (int r = 0; r < kRows; ++r) {
      Quads<kPart> x_low, x_high;
      staged_quads(staged + static_cast<long>(r) * pitch + at, part, x_low, x_high);
      HIPJAX_UNROLL
      for (int o = 0; o < kOuts; ++o) {
        total[o][r] = fma(high[o], x_high, fma(low[o], x_low, total[o][r]));
      }
    }
  }
}

// The narrow order, for a depth that is not a multiple of 8.
template <class Bits>
FN float narrow_dot(const Bits* weight, const float* x, int terms) {
  F total = splat(0.0f);
  for (int base = 0; base < terms; base += kLanes) {
    const int count = terms - base;
    total = fma(load(weight + base, count), load(x + base, count), total);
  }
  return sum(total);
}

// Which matrix a turn works on, and its first output there.
FN const Matrix& matrix_of(const RowProduct& a, int turn, int& first) {
  int i = 0;
  for (; i < a.count - 1; ++i) {
    const int turns = (a.matrices[i].outputs + a.per_block - 1) / a.per_block;
    if (turn < turns) break;
    turn -= turns;
  }
  first = turn * a.per_block;
  return a.matrices[i];
}

}  // namespace hipjax::HIPJAX_TARGET

#if HIPJAX_GPU
#include "gpu/row_product.h"
#else
#include "cpu/row_product.h"
#endif
#endif
