// The greedy choice: the largest finite value of a row, the lowest index among equals.
#pragma once

#include "arguments.h"

namespace hipjax {

constexpr int kNoIndex = 0x7fffffff;

// Each block finds the best of one piece of a row. With `ids`, value i stands for index ids[i]:
// so a second launch finds the best of the pieces' bests. Where nothing is finite the index is
// kNoIndex, in a `last` launch 0 with `lost` set.
struct Argmax {
  static constexpr int kWaves = 8;
  static constexpr int kVariants = 1;
  static constexpr int kPiece = 8192;
  const float* values;  // [rows, width]
  const int* ids;       // [rows, width]; null: a value's own place
  float* best;          // [rows, pieces]; unused in a last launch
  int* index;           // [rows, pieces]
  int* lost;            // [rows]; null: not the last launch
  int rows;
  int width;

  constexpr int variant() const { return 0; }
  constexpr int pieces() const { return (width + kPiece - 1) / kPiece; }
  constexpr int blocks() const { return rows * pieces(); }
  constexpr int shared_bytes() const { return 2 * 4 * kWaves; }
  constexpr long block_cost() const { return 4L * (width < kPiece ? width : kPiece); }
};

}  // namespace hipjax

#ifdef HIPJAX_TARGET
#include "lanes.h"

namespace hipjax::HIPJAX_TARGET {

struct Best {
  float value;
  int index;
};

// The best of the lanes' own bests; a lane without one holds kNoIndex.
FN Best best_of(F value, I index) {
  const float top = greatest(value);
  return {top, least(select(value == splat(top), index, splat_int(kNoIndex)))};
}

template <int>
FN void run(const Argmax& a, int block, Block<Argmax::kWaves> group) {
  constexpr int kWaves = Argmax::kWaves;
  const float lowest = -__builtin_inff();
  const long row = static_cast<long>(block / a.pieces()) * a.width;
  const int first = block % a.pieces() * Argmax::kPiece;
  const int end = a.width - first < Argmax::kPiece ? a.width : first + Argmax::kPiece;
  float* values = reinterpret_cast<float*>(group.shared);
  int* indices = reinterpret_cast<int*>(values + kWaves);

  group.each([&](int wave) {
    F top = splat(lowest);
    I index = splat_int(kNoIndex);
    // A lane's places ascend, so that only a larger value replaces an earlier one.
    for (int at = first + wave * kLanes; at < end; at += kWaves * kLanes) {
      const int count = end - at;
      const F value = load(a.values + row + at, count);
      const I place = a.ids ? load(a.ids + row + at, count) : lane() + splat_int(at);
      const M finite = (as_int(value) & splat_int(0x7fffffff)) < splat_int(0x7f800000);
      const M better = both(both(finite, value > top), lane() < splat_int(count));
      top = select(better, value, top);
      index = select(better, place, index);
    }
    const Best best = best_of(top, index);
    put(values + wave, best.value);
    put(indices + wave, best.index);
  });
  group.each([&](int wave) {
    if (wave != 0) return;
    const M real = lane() < splat_int(kWaves);
    const Best best = best_of(select(real, load(values, kWaves), splat(lowest)),
                              select(real, load(indices, kWaves), splat_int(kNoIndex)));
    if (a.lost) {
      put(a.lost + block, best.index == kNoIndex ? 1 : 0);
      put(a.index + block, best.index == kNoIndex ? 0 : best.index);
    } else {
      put(a.best + block, best.value);
      put(a.index + block, best.index);
    }
  });
}

}  // namespace hipjax::HIPJAX_TARGET
#endif
