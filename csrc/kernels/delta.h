// What the gated delta rule reads: convolution, heads of length one, decay and strength.
#pragma once

#include "arguments.h"

namespace hipjax {

// One unit of work is a key head of the query, one of the key, a value head, or the decays and
// strengths of 32 value heads, of one row or of all rows of a sequence.
struct DeltaInputs {
  static constexpr int kWaves = 1;
  static constexpr int kVariants = 1;
  const float* past;     // [B, taps - 1, channels]
  const float* columns;  // [B, R, channels]: queries, keys, values
  const float* a;        // [B, R, heads]
  const float* b;        // [B, R, heads]
  Vector conv;           // [channels, taps]
  Vector a_log;          // [heads]
  Vector dt_bias;        // [heads]
  float* query;          // [B, R, key heads, keys]
  float* key;            // [B, R, key heads, keys]
  float* value;          // [B, R, heads, values]
  float* decay;          // [B, R, heads], logarithms
  float* strength;       // [B, R, heads]
  int batch;
  int rows;
  int taps;
  int key_heads;
  int heads;
  int keys;
  int values;
  int together;  // rows of one block
  float query_scale;

  constexpr int channels() const { return 2 * key_heads * keys + heads * values; }
  constexpr int gates() const { return (heads + kLanes - 1) / kLanes; }
  constexpr int units() const { return 2 * key_heads + heads + gates(); }
  constexpr int turns() const { return (rows + together - 1) / together; }
  constexpr int variant() const { return 0; }
  constexpr int blocks() const { return batch * turns() * units(); }
  constexpr int shared_bytes() const { return 0; }
  constexpr long block_cost() const { return 16L * (keys + values) * (together + taps); }
};

}  // namespace hipjax

#ifdef HIPJAX_TARGET
#include "lanes.h"
#include "math.h"

namespace hipjax::HIPJAX_TARGET {

FN F gather(const Vector& v, I index, M live) {
  if (v.bf16) return gather(static_cast<const uint16_t*>(v.data), index, live);
  return gather(static_cast<const float*>(v.data), index, live);
}

// The inputs of 32 channels, `back` tokens before a row.
FN F column(const DeltaInputs& a, int sequence, int row, int back, int channel, int count) {
  const int past = a.taps - 1, channels = a.channels();
  const int at = row - back;
  const float* from = at < 0 ? a.past + (static_cast<long>(sequence) * past + past + at) * channels
                             : a.columns + (static_cast<long>(sequence) * a.rows + at) * channels;
  return load(from + channel, count);
}

// silu(convolution) of `width` channels from `channel` on, for rows [begin, end); the values of
// row r go to out + r * pitch. Tap after tap, the oldest token first.
FN void convolve(const DeltaInputs& a, int sequence, int begin, int end, int channel, int width,
                 float* out, long pitch) {
  constexpr int kTaps = 4;
  for (int base = 0; base < width; base += kLanes) {
    const int first = channel + base, count = width - base < kLanes ? width - base : kLanes;
    const M live = lane() < splat_int(count);
    const I weights = times(plus(lane(), splat_int(first)), splat_int(a.taps));
    if (a.taps == kTaps) {
      F w[kTaps];
      HIPJAX_UNROLL
      for (int i = 0; i < kTaps; ++i) w[i] = gather(a.conv, plus(weights, splat_int(i)), live);
      for (int row = begin; row < end; ++row) {
        F total = w[0] * column(a, sequence, row, kTaps - 1, first, count);
        HIPJAX_UNROLL
        for (int i = 1; i < kTaps; ++i) {
          total = fma(w[i], column(a, sequence, row, kTaps - 1 - i, first, count), total);
        }
        store(out + row * pitch + base, silu(total), count);
      }
      continue;
    }
    for (int row = begin; row < end; ++row) {
      F total = gather(a.conv, weights, live) * column(a, sequence, row, a.taps - 1, first, count);
      for (int i = 1; i < a.taps; ++i) {
        const F w = gather(a.conv, plus(weights, splat_int(i)), live);
        total = fma(w, column(a, sequence, row, a.taps - 1 - i, first, count), total);
      }
      store(out + row * pitch + base, silu(total), count);
    }
  }
}

// x / sqrt(sum of squares + 1e-6) * scale, in place.
FN void make_unit(float* x, int width, float scale) {
  const float squares = sum_over(width, [&](int base, int count) {
    const F v = load(x + base, count);
    return v * v;
  });
  const float inverse = reciprocal_root(squares + 1e-6f);
  for (int base = 0; base < width; base += kLanes) {
    const int count = width - base < kLanes ? width - base : kLanes;
    store(x + base, load(x + base, count) * splat(inverse) * splat(scale), count);
  }
}

FN void gates(const DeltaInputs& a, long row, int first) {
  const int count = a.heads - first < kLanes ? a.heads - first : kLanes;
  const long at = row * a.heads + first;
  const F rate = exp(load(a.a_log, first, count));
  const F step = softplus(load(a.a + at, count) + load(a.dt_bias, first, count));
  store(a.decay + at, -(rate * step), count);
  store(a.strength + at, sigmoid(load(a.b + at, count)), count);
}

template <int>
FN void run(const DeltaInputs& a, int block, Block<1>) {
  const int unit = block % a.units(), turn = block / a.units() % a.turns();
  const int sequence = block / a.units() / a.turns();
  const int begin = turn * a.together;
  const int end = begin + a.together < a.rows ? begin + a.together : a.rows;
  const long start = static_cast<long>(sequence) * a.rows;
  const int key_heads = 2 * a.key_heads;
  if (unit < key_heads) {
    const bool query = unit < a.key_heads;
    const int head = query ? unit : unit - a.key_heads;
    const long pitch = static_cast<long>(a.key_heads) * a.keys;
    float* out = (query ? a.query : a.key) + start * pitch + head * a.keys;
    convolve(a, sequence, begin, end, unit * a.keys, a.keys, out, pitch);
    for (int row = begin; row < end; ++row) {
      make_unit(out + row * pitch, a.keys, query ? a.query_scale : 1.0f);
    }
  } else if (unit < key_heads + a.heads) {
    const int head = unit - key_heads;
    const long pitch = static_cast<long>(a.heads) * a.values;
    const int channel = key_heads * a.keys + head * a.values;
    convolve(a, sequence, begin, end, channel, a.values, a.value + start * pitch + head * a.values,
             pitch);
  } else {
    const int first = (unit - key_heads - a.heads) * kLanes;
    for (int row = begin; row < end; ++row) gates(a, start + row, first);
  }
}

}  // namespace hipjax::HIPJAX_TARGET
#endif
