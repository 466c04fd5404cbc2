// Q8 codes of a tile on a CPU: included by kernels/delta_state.h only.
#pragma once

namespace hipjax::HIPJAX_TARGET {

FN float uniform(const float* p, int i) { return p[i]; }
template <int>
FN const float* again(const float* p) { return p; }
FN int one_of_block(int wave) { return wave; }
FN F settled(F x) { return x; }

// 32 value channels of float32 [keys, values], to and from a tile.
FN void load_floats(DeltaTile<0>& tile, const float* from, int values, int keys, int count) {
  tile.each(keys, [&](int i, F& s) { s = load(from + static_cast<long>(i) * values, count); });
}
FN void store_floats(DeltaTile<0>& tile, float* to, int values, int keys, int count) {
  for (int i = 0; i < keys; ++i) {
    store(to + static_cast<long>(i) * values, load(tile.at + i * kLanes, kLanes), count);
  }
}

// The codes of 32 value channels, each channel's side by side, to and from a tile of floats.
FN void load_codes(DeltaTile<0>& tile, const int8_t* codes, int keys, int count) {
  for (int j = 0; j < kLanes; ++j) {
    for (int i = 0; i < keys; ++i) {
      tile.at[i * kLanes + j] = j < count ? static_cast<float>(codes[j * keys + i]) : 0.0f;
    }
  }
}
FN void store_codes(DeltaTile<0>& tile, int8_t* codes, int keys, int count) {
  for (int j = 0; j < count; ++j) {
    for (int i = 0; i < keys; ++i) {
      codes[j * keys + i] = static_cast<int8_t>(tile.at[i * kLanes + j]);
    }
  }
}

}  // namespace hipjax::HIPJAX_TARGET
