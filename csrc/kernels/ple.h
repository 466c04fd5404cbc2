// The n-gram embedding's way into the streams: gate, norm, causal convolution.
#pragma once

#include "arguments.h"

namespace hipjax {

// Per row and stream, with k and q the normalised key and stream: gated = sigmoid(signed root of
// k . q / sqrt(hidden)) * value, and normed = that, normalised for the convolution. Key and value
// are first multiplied by the table's `scale`, if it has one.
struct PleGate {
  static constexpr int kWaves = 8;
  static constexpr int kVariants = 1;
  const float* key;      // [rows, count, hidden]
  const float* streams;  // [rows, count, hidden]
  const float* value;    // [rows, hidden]
  Vector norm_key;       // [count * hidden], as the other two
  Vector norm_query;
  Vector norm_conv;
  Vector scale;          // one value; null: 1
  float* gated;          // [rows, count, hidden]
  float* normed;         // [rows, count, hidden]
  int rows;
  int count;
  int hidden;
  float eps;

  constexpr int variant() const { return 0; }
  constexpr int blocks() const { return rows * count; }
  constexpr int shared_bytes() const { return 4 * 4 * kWaves; }
  constexpr long block_cost() const { return 48L * hidden; }
};

// out[b, r, d] = streams + gated + silu(sum over taps i of weight[d, i] * columns[b, from + r +
// i * dilation, d]), for up to kMaxRows rows of each sequence, from row `from` of `all_rows` on.
struct PleOutput {
  static constexpr int kWaves = 1;
  static constexpr int kVariants = kMaxRows;
  const float* streams;  // [batch, all_rows, width], as `gated` and `out`
  const float* gated;
  const float* columns;  // [batch, reach + all_rows, width]
  Vector weight;         // [width, taps]
  float* out;
  int batch;
  int rows;
  int from;
  int all_rows;
  int width;
  int taps;
  int dilation;

  constexpr int variant() const { return rows - 1; }
  constexpr int pieces() const { return (width + kLanes - 1) / kLanes; }
  constexpr int blocks() const { return batch * pieces(); }
  constexpr int shared_bytes() const { return 0; }
  constexpr long block_cost() const { return 4L * kLanes * (3 + taps) * (rows + 1); }
};

}  // namespace hipjax

#ifdef HIPJAX_TARGET
#include "lanes.h"
#include "math.h"

namespace hipjax::HIPJAX_TARGET {

// One wave's share of a sum over `width` values: the groups of 32 at wave, wave + kWaves, …
template <int kWaves, class Fn>
FN float share_of_sum(int wave, int width, Fn values) {
  F total = splat(0.0f);
  for (int base = wave * kLanes; base < width; base += kWaves * kLanes) {
    const int count = width - base < kLanes ? width - base : kLanes;
    const F some = values(base, count);
    total = total + (count == kLanes ? some : select(lane() < splat_int(count), some, splat(0.0f)));
  }
  return sum(total);
}
FN float eight_shares(const float* p) {
  return ((p[0] + p[1]) + (p[2] + p[3])) + ((p[4] + p[5]) + (p[6] + p[7]));
}

// A score's root with the score's sign, no smaller than a thousandth; zero stays zero.
FN float signed_root(float score) {
  const float size = score < 0.0f ? -score : score;
  const float grown = root(size < 1e-6f ? 1e-6f : size);
  return score > 0.0f ? grown : (score < 0.0f ? -grown : score * grown);
}

template <int>
FN void run(const PleGate& a, int block, Block<PleGate::kWaves> group) {
  constexpr int kWaves = PleGate::kWaves;
  const int width = a.hidden;
  const long at = static_cast<long>(block) * width;
  const long part = static_cast<long>(block % a.count) * width;
  const float* value = a.value + static_cast<long>(block / a.count) * width;
  float* key_squares = reinterpret_cast<float*>(group.shared);
  float* query_squares = key_squares + kWaves;
  float* scores = query_squares + kWaves;
  float* squares = scores + kWaves;
  float table = 1.0f;
  if (a.scale.data) table = value_at(load(a.scale, 0, 1), 0);
  const F scale = splat(table);
  const auto mean_scale = [&](const float* shares) {
    return reciprocal_root(eight_shares(shares) / static_cast<float>(width) + a.eps);
  };
  const auto normalised = [&](F x, float by, const Vector& weight, int base, int count) {
    return x * splat(by) * (load(weight, part + base, count) + splat(1.0f));
  };

  group.each([&](int wave) {
    const float keys = share_of_sum<kWaves>(wave, width, [&](int base, int count) {
      const F k = load(a.key + at + base, count) * scale;
      return k * k;
    });
    const float queries = share_of_sum<kWaves>(wave, width, [&](int base, int count) {
      const F q = load(a.streams + at + base, count);
      return q * q;
    });
    put(key_squares + wave, keys);
    put(query_squares + wave, queries);
  });
  group.each([&](int wave) {
    const float by_key = mean_scale(key_squares), by_query = mean_scale(query_squares);
    const float share = share_of_sum<kWaves>(wave, width, [&](int base, int count) {
      const F k = load(a.key + at + base, count) * scale;
      const F q = load(a.streams + at + base, count);
      return normalised(k, by_key, a.norm_key, base, count) *
             normalised(q, by_query, a.norm_query, base, count);
    });
    put(scores + wave, share);
  });
  const auto gated = [&](float gate, int base, int count) {
    return splat(gate) * (load(value + base, count) * scale);
  };
  const auto gate_of = [&]() {
    return sigmoid(signed_root(eight_shares(scores) / root(static_cast<float>(width))));
  };
  group.each([&](int wave) {
    const float gate = gate_of();
    const float share = share_of_sum<kWaves>(wave, width, [&](int base, int count) {
      const F u = gated(gate, base, count);
      store(a.gated + at + base, u, count);
      return u * u;
    });
    put(squares + wave, share);
  });
  group.each([&](int wave) {
    const float gate = gate_of(), by = mean_scale(squares);
    for (int base = wave * kLanes; base < width; base += kWaves * kLanes) {
      const int count = width - base < kLanes ? width - base : kLanes;
      const F u = gated(gate, base, count);
      store(a.normed + at + base, normalised(u, by, a.norm_conv, base, count), count);
    }
  });
}

template <int kVariant>
FN void run(const PleOutput& a, int block, Block<1>) {
  constexpr int kRows = kVariant + 1;
  const int b = block / a.pieces(), first = block % a.pieces() * kLanes;
  const int count = a.width - first < kLanes ? a.width - first : kLanes;
  const long reach = static_cast<long>(a.taps - 1) * a.dilation;
  const float* columns = a.columns + (b * (reach + a.all_rows) + a.from) * a.width + first;
  const I taps_at = times(lane() + splat_int(first), splat_int(a.taps));
  const M live = lane() < splat_int(count);
  F total[kRows];
  HIPJAX_UNROLL
  for (int r = 0; r < kRows; ++r) total[r] = splat(0.0f);
  for (int i = 0; i < a.taps; ++i) {
    const I index = taps_at + splat_int(i);
    const F tap = a.weight.bf16
                      ? gather(static_cast<const uint16_t*>(a.weight.data), index, live)
                      : gather(static_cast<const float*>(a.weight.data), index, live);
    HIPJAX_UNROLL
    for (int r = 0; r < kRows; ++r) {
      const long column = r + static_cast<long>(i) * a.dilation;
      total[r] = fma(tap, load(columns + column * a.width, count), total[r]);
    }
  }
  const long at = (static_cast<long>(b) * a.all_rows + a.from) * a.width + first;
  HIPJAX_UNROLL
  for (int r = 0; r < kRows; ++r) {
    const long here = at + static_cast<long>(r) * a.width;
    const F kept = load(a.streams + here, count) + load(a.gated + here, count);
    store(a.out + here, kept + silu(total[r]), count);
  }
}

}  // namespace hipjax::HIPJAX_TARGET
#endif
