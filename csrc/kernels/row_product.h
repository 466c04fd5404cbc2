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
  int first_turn;  // of the turns that all matrices together make
  Finish finish;
};

// out_i[row, m] = finish(sum over k of x[row, k] * weight_i[m, k]), for up to kMaxRows rows
// and up to four matrices of one depth and storage.
struct RowProduct {
  static constexpr int kMatrices = 4;
  static constexpr int kVariants = 5 * kMaxRows;
  static constexpr int kGroup = 256;  // terms that one wave takes at once, eight a lane
  static constexpr int rows_of(int variant) { return variant % kMaxRows + 1; }
  static constexpr bool is_many(int variant) { return variant / kMaxRows == 4; }
  static constexpr bool is_long(int variant) { return !is_many(variant) && variant / kMaxRows % 2; }
  // How a GPU works, by variant. Outputs that a wave takes at once share the loads of staged rows;
  // fewer leave more waves to fill the card with a small matrix. AMD waves have fewer registers.
  static constexpr int outs(int variant, bool amd) {
    const int rows = rows_of(variant);
    if (is_many(variant)) return rows <= 3 || amd ? 2 : 4;
    return variant / kMaxRows == 2 && rows >= 4 ? 2 : 1;
  }
  // Waves of a block, and blocks that share a multiprocessor: they bound the registers of a wave.
  static constexpr int waves(int variant) {
    const int rows = rows_of(variant);
    if (is_long(variant)) return 12;
    if (!is_many(variant)) return rows >= 5 ? 12 : 16;
    return rows == 3 || rows == 4 ? 12 : 8;
  }
  static constexpr int min_blocks(int variant) {
    return is_many(variant) && rows_of(variant) <= 2 ? 2 : 1;
  }
  // Groups of weights that a wave asks for ahead of need; a chunk is a multiple of it.
  static constexpr int ahead(int variant) {
    const int rows = rows_of(variant);
    return rows <= 3 ? 5 : is_many(variant) || rows >= 7 ? 2 : 3;
  }
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
  int many;        // 1: more outputs a GPU wave, for whole groups of bfloat16 in the common order
  int per_turn;    // outputs of one turn, of a CPU thread or a GPU wave
  int turns;
  int stride;      // blocks launched; turns are dealt out to them one by one

  // Kinds of variants: bit 0 the order for long rows, bit 1 bfloat16; 4 is 2 with `many`.
  constexpr int variant() const {
    return (many ? 4 : bf16 * 2 + quarters) * kMaxRows + rows - 1;
  }
  constexpr int groups() const { return ((quarters ? depth / 4 : depth) + kGroup - 1) / kGroup; }
  constexpr int blocks() const { return stride; }
  constexpr int shared_bytes() const {
    const int partials = quarters ? waves(variant()) * kMaxRows : 0;
    return 4 * ((quarters ? 4 : 1) * rows * chunk * kGroup + partials);
  }
  constexpr long block_cost() const { return static_cast<long>(per_turn) * depth * (bf16 ? 2 : 4); }
};

}  // namespace hipjax

#ifdef HIPJAX_TARGET
#include "lanes.h"
#include "math.h"

namespace hipjax::HIPJAX_TARGET {

// What a variant's number says.
template <int kVariant>
struct Kind {
  static constexpr int kRows = RowProduct::rows_of(kVariant);
  static constexpr bool kMany = RowProduct::is_many(kVariant);
  static constexpr int kSlices = RowProduct::is_long(kVariant) ? 4 : 1;
#if defined(__AMDGCN__)
  static constexpr int kOuts = RowProduct::outs(kVariant, true);
#else
  static constexpr int kOuts = RowProduct::outs(kVariant, false);
#endif
  using Bits = std::conditional_t<kVariant / kMaxRows >= 2, uint16_t, float>;
};

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
  while (i + 1 < a.count && turn >= a.matrices[i + 1].first_turn) ++i;
  first = (turn - a.matrices[i].first_turn) * a.per_turn;
  return a.matrices[i];
}

}  // namespace hipjax::HIPJAX_TARGET

#if HIPJAX_GPU
#include "gpu/row_product.h"
#else
#include "cpu/row_product.h"
#endif
#endif
