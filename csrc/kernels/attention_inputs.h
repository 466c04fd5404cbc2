// What a row brings to attention: norms and rotary embedding of queries and keys.
#pragma once

#include "arguments.h"

namespace hipjax {

// One wave per head: query heads, key heads and index query heads of every row. The products
// that the row comes as are left alone; gates, values and raw index keys are read from there.
struct AttentionInputs {
  static constexpr int kWaves = 1;
  static constexpr int kVariants = 1;
  const float* projected;  // [rows, heads, 2, width], query and gate of each head
  const float* key;        // [rows, groups, width]
  const float* index;      // [rows, index_heads + 1, index_width], queries and the raw key
  const int* positions;    // [rows]
  Vector query_norm, key_norm, index_norm;
  const float* frequencies;  // [half]
  float* query_out;          // [rows, heads, width]
  float* key_out;            // [rows, groups, width]
  float* index_out;          // [rows, index_heads, index_width]
  int rows, heads, groups, index_heads;
  int width, index_width, half;
  float eps;

  constexpr int variant() const { return 0; }
  constexpr int waves_of_row() const { return heads + groups + index_heads; }
  constexpr int blocks() const { return rows * waves_of_row(); }
  constexpr int shared_bytes() const { return 0; }
  constexpr long block_cost() const { return 16L * width + 64L * half; }
};

// out = the normed and rotated mean of `ratio` raw index keys, one wave per block.
struct BlockKeys {
  static constexpr int kWaves = 1;
  static constexpr int kVariants = 2;
  const void* raw;   // [sequences, count * ratio, width]
  const int* first;  // [sequences], number of the first block
  Vector norm;
  const float* frequencies;  // [half]
  float* out;                // [sequences, count, width]
  int sequences, count, ratio, width, half;
  int bf16;
  float eps;

  constexpr int variant() const { return bf16; }
  constexpr int blocks() const { return sequences * count; }
  constexpr int shared_bytes() const { return 0; }
  constexpr long block_cost() const { return 8L * width * ratio + 64L * half; }
};

}  // namespace hipjax

#ifdef HIPJAX_TARGET
#include <type_traits>

#include "lanes.h"
#include "math.h"

namespace hipjax::HIPJAX_TARGET {

// Norm over `width` values, scaled by 1 + weight, then the rotary embedding of the first
// 2 * half of them: value i is turned with value i + half. `values(at, count)` reads them.
template <class Fn>
FN void norm_and_rotate(Fn values, const Vector& weight, int width, float eps,
                        const float* frequencies, int half, float position, float* out) {
  const float squares = sum_over(width, [&](int base, int count) {
    const F v = values(base, count);
    return v * v;
  });
  const F scale = splat(reciprocal_root(squares / static_cast<float>(width) + eps));
  const auto normed = [&](int at, int count) HIPJAX_INLINE {
    return values(at, count) * scale * (load(weight, at, count) + splat(1.0f));
  };
  for (int base = 0; base < half; base += kLanes) {
    const int count = half - base < kLanes ? half - base : kLanes;
    F sine, cosine;
    sin_cos(splat(position) * load(frequencies + base, count), sine, cosine);
    const F first = normed(base, count), second = normed(half + base, count);
    store(out + base, first * cosine - second * sine, count);
    store(out + half + base, second * cosine + first * sine, count);
  }
  for (int base = 2 * half; base < width; base += kLanes) {
    const int count = width - base < kLanes ? width - base : kLanes;
    store(out + base, normed(base, count), count);
  }
}

template <int>
FN void run(const AttentionInputs& a, int block, Block<1>) {
  const int row = block / a.waves_of_row();
  int head = block % a.waves_of_row();
  const float* x;
  Vector weight;
  float* out;
  int width = a.width;
  if (head < a.heads) {
    const long at = (static_cast<long>(row) * a.heads + head) * width;
    x = a.projected + 2 * at;
    weight = a.query_norm;
    out = a.query_out + at;
  } else if (head -= a.heads; head < a.groups) {
    const long at = (static_cast<long>(row) * a.groups + head) * width;
    x = a.key + at;
    weight = a.key_norm;
    out = a.key_out + at;
  } else {
    head -= a.groups;
    width = a.index_width;
    x = a.index + (static_cast<long>(row) * (a.index_heads + 1) + head) * width;
    weight = a.index_norm;
    out = a.index_out + (static_cast<long>(row) * a.index_heads + head) * width;
  }
  const auto values = [&](int at, int count) HIPJAX_INLINE { return load(x + at, count); };
  norm_and_rotate(values, weight, width, a.eps, a.frequencies, a.half,
                  static_cast<float>(a.positions[row]), out);
}

template <int kVariant>
FN void run(const BlockKeys& a, int block, Block<1>) {
  using Bits = std::conditional_t<kVariant != 0, uint16_t, float>;
  const Bits* raw = static_cast<const Bits*>(a.raw) + static_cast<long>(block) * a.ratio * a.width;
  const auto mean = [&](int at, int count) HIPJAX_INLINE {
    F total = load(raw + at, count);
    for (int t = 1; t < a.ratio; ++t) total = total + load(raw + t * a.width + at, count);
    return total / splat(static_cast<float>(a.ratio));
  };
  const int number = a.first[block / a.count] + block % a.count;
  norm_and_rotate(mean, a.norm, a.width, a.eps, a.frequencies, a.half,
                  static_cast<float>(number * a.ratio),
                  a.out + static_cast<long>(block) * a.width);
}

}  // namespace hipjax::HIPJAX_TARGET
#endif
