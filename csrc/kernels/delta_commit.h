// The memory of a Gated DeltaNet layer after the rows that stand.
#pragma once

#include "kernels/delta_state.h"

namespace hipjax {

// One read and one write of the state, which may be the same memory.
struct DeltaCommit : DeltaSizes {
  static constexpr int kChannels = 32 * kLanes;  // of the convolution, per block
  DeltaState state;         // before the rows
  const float* key;         // [B, R, key heads, keys]
  const float* correction;  // [B, R, heads, values]
  const float* decay;       // [B, R, heads], logarithms
  const float* conv;        // [B, taps - 1, channels]
  const float* columns;     // [B, R, channels]
  const int* kept;          // [B]
  const int* length;        // [B] position of row 0; Q8 only
  float* floats;
  int8_t* codes;
  float* scales;
  float* conv_out;
  int past;  // taps - 1
  int channels;

  constexpr int conv_blocks() const { return (channels + kChannels - 1) / kChannels; }
  constexpr int blocks() const { return batch * (heads + conv_blocks()); }
};

}  // namespace hipjax

#ifdef HIPJAX_TARGET
namespace hipjax::HIPJAX_TARGET {

template <int kKeys, bool kQ8>
FN void commit(const DeltaCommit& a, const DeltaPlace& p, int kept, float* memory) {
  DeltaTile<kKeys> tile(memory);
  F scale = load_tile<kQ8>(a, a.state, p, tile);
  for (int row = 0; row < kept; ++row) {
    const float* key = again<kKeys>(a.key + key_place(a, p, row));
    const float decay = exp(a.decay[head_place(a, p, row)]);
    const F correction = load(a.correction + row_place(a, p, row), p.count);
    F peak = splat(0.0f);
    tile.each(a.keys, [&](int i, F& s) {
      s = fma(splat(uniform(key, i)), correction, faded<kQ8>(s, scale, decay));
      if constexpr (kQ8) peak = peak_of(peak, s);
    });
    if constexpr (kQ8) scale = quantise(a, p, a.length[p.sequence] + row, peak, tile);
  }
  if constexpr (kQ8) {
    const long at = scales_place(a, p);
    store(a.scales + at, scale, p.count);
    store_codes(tile, a.codes + at * a.keys, a.keys, p.count);
  } else {
    store_floats(tile, a.floats + floats_place(a, p), a.values, a.keys, p.count);
  }
}

// The last `past` columns that end at row `kept`, for some channels. Columns move towards the
// front, so the first may overwrite what has been read.
FN void keep_columns(const DeltaCommit& a, int sequence, int from, int to, int kept) {
  const long old = static_cast<long>(sequence) * a.past;
  const long fresh = static_cast<long>(sequence) * a.rows;
  for (int base = from; base < to; base += kLanes) {
    const int count = to - base < kLanes ? to - base : kLanes;
    for (int i = 0; i < a.past; ++i) {
      const int at = kept + i;
      const float* column = at < a.past ? a.conv + (old + at) * a.channels
                                        : a.columns + (fresh + at - a.past) * a.channels;
      store(a.conv_out + (old + i) * a.channels + base, load(column + base, count), count);
    }
  }
}

template <int kVariant>
FN void run(const DeltaCommit& a, int block, Block<DeltaSizes::kWaves> group) {
  constexpr int kKeys = DeltaSizes::keys_of(kVariant / 2);
  constexpr bool kQ8 = kVariant % 2;
  if constexpr (HIPJAX_GPU || kKeys == 0) {
    const int states = a.batch * a.heads;
    const int sequence = block < states ? block / a.heads : (block - states) / a.conv_blocks();
    int kept = a.kept[sequence];
    kept = kept < 0 ? 0 : kept > a.rows ? a.rows : kept;
    group.each([&](int wave) __attribute__((always_inline)) {
      if (block >= states) {
        const int first = (block - states) % a.conv_blocks() * DeltaCommit::kChannels;
        constexpr int kShare = DeltaCommit::kChannels / DeltaSizes::kWaves;
        const int end = first + (wave + 1) * kShare;
        keep_columns(a, sequence, first + wave * kShare, end < a.channels ? end : a.channels, kept);
        return;
      }
      const auto one = [&](int tile, float* memory) __attribute__((always_inline)) {
        commit<kKeys, kQ8>(a, place_of(a, block, tile), kept, memory);
      };
      each_tile<kKeys>(a, wave, group.shared, one);
    });
  }
}

}  // namespace hipjax::HIPJAX_TARGET
#endif
