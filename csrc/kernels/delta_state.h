// The recurrent state of the gated delta rule while rows advance, in float32 or as Q8.
//
// A lane holds one value channel; key channels follow one another.
#pragma once

#include "arguments.h"

namespace hipjax {

// Sizes that the kernels of the recurrence share.
struct DeltaSizes {
  static constexpr int kWaves = 4;
  static constexpr int kVariants = 8;
  static constexpr int kMaxWidth = 256;
  static constexpr int kMostValues = kWaves * kLanes;  // of tiles in registers
  // Key channels of the variants that keep a tile in registers; 0: any, in shared memory.
  static constexpr int keys_of(int size) { return size == 0 ? 0 : 16 << size; }

  int batch;
  int rows;
  int key_heads;
  int heads;   // value heads; each key head serves heads / key_heads of them in turn
  int keys;    // key channels of a head
  int values;  // value channels of a head
  int size;    // which of the variants above
  int q8;
  int nearest;  // 1: Q8 codes are rounded to nearest even, not by noise
  int active;   // waves of a block that have room for a tile

  constexpr int variant() const { return size * 2 + q8; }
  constexpr int tiles() const { return (values + kLanes - 1) / kLanes; }
  constexpr int shared_bytes() const { return size ? 0 : active * keys * kLanes * 4; }
  constexpr long block_cost() const { return 4L * keys * values * (rows + 1) * (q8 ? 3 : 1); }
};

// The state of all sequences: floats [B, heads, keys, values], or codes
// [B, heads, values, keys] with scales [B, heads, values].
struct DeltaState {
  const float* floats;
  const int8_t* codes;
  const float* scales;
};

}  // namespace hipjax

#ifdef HIPJAX_TARGET
#include "lanes.h"
#include "math.h"

namespace hipjax::HIPJAX_TARGET {

// Key channels of 32 value channels in shared memory.
template <int kKeys>
struct DeltaTile {
  float* at;
  FN explicit DeltaTile(float* memory) : at(memory) {}
  template <class Fn>
  FN void each(int keys, Fn fn) {
    for (int i = 0; i < keys; ++i) {
      F s = load(at + i * kLanes, kLanes);
      fn(i, s);
      store(at + i * kLanes, s, kLanes);
    }
  }
};

}  // namespace hipjax::HIPJAX_TARGET

#if HIPJAX_GPU
#include "gpu/delta.h"
#else
#include "cpu/delta.h"
#endif

namespace hipjax::HIPJAX_TARGET {

// Where a tile lies: value channels from `channel` on, `count` of them real.
struct DeltaPlace {
  int sequence;
  int head;
  int channel;
  int count;
};

FN DeltaPlace place_of(const DeltaSizes& a, int block, int tile) {
  const int channel = tile * kLanes;
  const int left = a.values - channel;
  return {block / a.heads, block % a.heads, channel, left < kLanes ? left : kLanes};
}
// The tiles of a head that one wave works on: a tile in registers is its only one.
template <int kKeys, class Fn>
FN void each_tile(const DeltaSizes& a, int wave, char* shared, Fn fn) {
  float* memory = reinterpret_cast<float*>(shared) + wave * a.keys * kLanes;
  if constexpr (kKeys) {
    if (wave < a.tiles()) fn(one_of_block(wave), memory);
  } else if (wave < a.active) {
    for (int tile = wave; tile < a.tiles(); tile += a.active) fn(tile, memory);
  }
}

// Element [sequence, row, head, channel] of an array [B, R, heads, values].
FN long row_place(const DeltaSizes& a, const DeltaPlace& p, int row) {
  const long item = static_cast<long>(p.sequence) * a.rows + row;
  return (item * a.heads + p.head) * a.values + p.channel;
}
FN long key_place(const DeltaSizes& a, const DeltaPlace& p, int row) {
  const long item = static_cast<long>(p.sequence) * a.rows + row;
  return (item * a.key_heads + p.head / (a.heads / a.key_heads)) * a.keys;
}
FN long head_place(const DeltaSizes& a, const DeltaPlace& p, int row) {
  return (static_cast<long>(p.sequence) * a.rows + row) * a.heads + p.head;
}
// Element [sequence, head, key 0, channel] of the floats; [sequence, head, channel] of scales.
FN long floats_place(const DeltaSizes& a, const DeltaPlace& p) {
  return (static_cast<long>(p.sequence) * a.heads + p.head) * a.keys * a.values + p.channel;
}
FN long scales_place(const DeltaSizes& a, const DeltaPlace& p) {
  return (static_cast<long>(p.sequence) * a.heads + p.head) * a.values + p.channel;
}

// The state before the rows: values, or codes as floats and the scales of their channels.
template <bool kQ8, class Tile>
FN F load_tile(const DeltaSizes& a, const DeltaState& state, const DeltaPlace& p, Tile& tile) {
  if constexpr (kQ8) {
    const long at = scales_place(a, p);
    load_codes(tile, state.codes + at * a.keys, a.keys, p.count);
    return load(state.scales + at, p.count);
  } else {
    load_floats(tile, state.floats + floats_place(a, p), a.values, a.keys, p.count);
    return splat(1.0f);
  }
}

// What is left of one element after a row's decay.
template <bool kQ8>
FN F faded(F s, F scale, float decay) {
  if constexpr (kQ8) s = scale * s;
  return s * splat(decay);
}

// The larger magnitude; a NaN stays.
FN F peak_of(F peak, F s) {
  const F size = select(s < splat(0.0f), -s, s);
  return select(either(size > peak, opposite(size == size)), size, peak);
}

// Rounds a row's values to codes, decoding-spec 13.2; returns the scales.
template <class Tile>
FN F quantise(const DeltaSizes& a, const DeltaPlace& p, int frame, F peak, Tile& tile) {
  const M zero = peak == splat(0.0f);
  const F inverse = select(zero, splat(0.0f), splat(127.0f) / peak);
  const int base = plus(times(p.head, 1664525), times(frame, 2531011));
  const I seed = plus(times(lane() + p.channel, splat_int(1013904223)), splat_int(base));
  // NaN becomes code 0: the scale is NaN or infinite then, and the product NaN again.
  const auto clamped = [](F x) {
    x = select(x < splat(-128.0f), splat(-128.0f), x);
    x = select(x > splat(127.0f), splat(127.0f), x);
    return select(x == x, x, splat(0.0f));
  };
  const M even = splat_int(a.nearest) == splat_int(1);
  tile.each(a.keys, [&](int i, F& s) {
    I x = plus(seed, splat_int(times(i, 214013)));
    x = plus(times(x, splat_int(1664525)), splat_int(1013904223));
    const F noise = to_float(shift_right(x, 8)) * splat(5.9604644775390625e-8f);  // 2^-24
    const F exact = s * inverse;
    const F at = clamped(select(even, exact, exact + noise));
    const F whole = to_float(to_int(at));
    s = select(even, nearest(at), select(at < whole, whole - splat(1.0f), whole));
  });
  return select(zero, splat(1.0f), peak / splat(127.0f));
}

}  // namespace hipjax::HIPJAX_TARGET
#endif
