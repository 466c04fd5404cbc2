// Attention of a row over its list of tokens: those of the selected blocks, then the tail
// after its last complete block. The list is cut into pieces; each has its own softmax, and a
// second kernel brings them together.
#pragma once

#include "arguments.h"

namespace hipjax {

// A row's list of tokens.
struct TokenList {
  const int* selected;   // [rows, slots]
  const int* count;      // [rows]
  const int* positions;  // [rows]
  int slots, ratio, capacity;

  constexpr int tail(int row) const { return (positions[row] + 1) % ratio; }
  constexpr int blocks_of(int row) const {
    return count[row] < 0 ? 0 : count[row] < slots ? count[row] : slots;
  }
  constexpr int length(int row) const {
    return positions[row] < 0 ? 0 : blocks_of(row) * ratio + tail(row);
  }
  // Token `i` of the list; a bad name of a block cannot lead out of the cache.
  constexpr int token(int row, int i) const {
    const int inside = blocks_of(row) * ratio;
    const int at = i < inside
                       ? selected[static_cast<long>(row) * slots + i / ratio] * ratio + i % ratio
                       : positions[row] + 1 - tail(row) + i - inside;
    return at < 0 ? 0 : at < capacity ? at : capacity - 1;
  }
};

// One piece: per head the greatest score, the sum of e^(score - greatest), and the values
// weighted with the same. A block takes kHeads heads of one group, so that they share loads.
struct AttendPiece {
  static constexpr int kPiece = 64;  // tokens
  static constexpr int kWaves = 8;
  static constexpr int kTokens = kPiece / kWaves;
  static constexpr int kVariants = 8;
  const float* query;  // [rows, heads, width]
  const void* keys;    // [sequences, groups, capacity, width]
  const void* values;
  TokenList list;
  float* mixed;  // [rows, heads, pieces, width]
  float* peaks;  // [rows, heads, 2, pieces]: greatest scores, then sums
  int sequences, rows, heads, groups, width;  // rows of each sequence
  int pieces;                                 // of the longest possible list
  int launched;                               // pieces that a row of this call can have
  int bf16;

  constexpr int tile_heads() const {
    const int share = heads / groups;
    return share % 4 == 0 ? 4 : share % 3 == 0 ? 3 : share % 2 == 0 ? 2 : 1;
  }
  constexpr int variant() const { return bf16 * 4 + tile_heads() - 1; }
  constexpr int blocks() const { return sequences * rows * launched * (heads / tile_heads()); }
  constexpr int shared_bytes() const { return 4 * (kPiece + 2 * tile_heads() * kPiece); }
  constexpr long block_cost() const { return 2L * kPiece * width * (2 + tile_heads()); }
};

// The pieces of one head brought together, times the sigmoid of its gate.
struct AttendFinish {
  static constexpr int kWaves = 8;
  static constexpr int kVariants = 1;
  const float* mixed;
  const float* peaks;
  const float* projected;  // [rows, heads, 2, width], query and gate of each head
  TokenList list;
  float* out;  // [rows, heads, width]
  int rows, heads, width, pieces;

  constexpr int variant() const { return 0; }
  constexpr int blocks() const { return rows * heads; }
  constexpr int shared_bytes() const { return 4 * (pieces + 1); }
  constexpr long block_cost() const { return 4L * (pieces + 8) * width; }
};

}  // namespace hipjax

#ifdef HIPJAX_TARGET
#include <type_traits>

#include "lanes.h"
#include "math.h"

namespace hipjax::HIPJAX_TARGET {

// Products of kHeads queries with the keys of `some` of kTokens tokens; lane h * kTokens + t
// of the result is that of head h and token t. On a CPU the sums of one token fill the
// registers; a GPU wave keeps those of all tokens.
template <int kHeads, int kTokens, class Bits>
FN F key_products(const float* query, const Bits* keys, const int (&tokens)[kTokens],
                  [[maybe_unused]] int some, int width) {
  constexpr int kSums = kHeads * kTokens <= 8 ? 8 : kHeads * kTokens <= 16 ? 16 : 32;
  F dot[kSums];
  HIPJAX_UNROLL
  for (int i = 0; i < kSums; ++i) dot[i] = splat(0.0f);
#if HIPJAX_GPU
  for (int base = 0; base < width; base += kLanes) {
    F q[kHeads];
    HIPJAX_UNROLL
    for (int h = 0; h < kHeads; ++h) q[h] = load(query + h * width + base, width - base);
    HIPJAX_UNROLL
    for (int t = 0; t < kTokens; ++t) {
      // A slot past the list repeats a token of it; nobody reads its products.
      const F key = load(keys + static_cast<long>(tokens[t]) * width + base, width - base);
      HIPJAX_UNROLL
      for (int h = 0; h < kHeads; ++h) {
        dot[h * kTokens + t] = fma(q[h], key, dot[h * kTokens + t]);
      }
    }
  }
#else
  for (int t = 0; t < some; ++t) {
    F total[kHeads];
    for (int h = 0; h < kHeads; ++h) total[h] = splat(0.0f);
    const Bits* of_token = keys + static_cast<long>(tokens[t]) * width;
    for (int base = 0; base < width; base += kLanes) {
      const F key = load(of_token + base, width - base);
      for (int h = 0; h < kHeads; ++h) {
        total[h] = fma(load(query + h * width + base, width - base), key, total[h]);
      }
    }
    for (int h = 0; h < kHeads; ++h) dot[h * kTokens + t] = total[h];
  }
#endif
  return sums<kSums>(dot);
}

template <int kVariant>
FN void run(const AttendPiece& a, int block, Block<AttendPiece::kWaves> group) {
  using Bits = std::conditional_t<kVariant / 4 != 0, uint16_t, float>;
  constexpr int kHeads = kVariant % 4 + 1;
  constexpr int kPiece = AttendPiece::kPiece, kTokens = AttendPiece::kTokens;
  const int tiles = a.heads / kHeads;
  const int head = block % tiles * kHeads;
  const int piece = block / tiles % a.launched;
  const int row = block / tiles / a.launched;
  const int left = a.list.length(row) - piece * kPiece;
  if (left <= 0) return;
  const int listed = left < kPiece ? left : kPiece;
  const long cache = (static_cast<long>(row / a.rows) * a.groups + head / (a.heads / a.groups)) *
                     a.list.capacity * a.width;
  const Bits* keys = static_cast<const Bits*>(a.keys) + cache;
  const Bits* values = static_cast<const Bits*>(a.values) + cache;
  const long of_row = static_cast<long>(row) * a.heads + head;
  int* tokens = reinterpret_cast<int*>(group.shared);                    // [kPiece]
  float* scores = reinterpret_cast<float*>(tokens + kPiece);             // [kWaves, kHeads, kTokens]
  float* weights = scores + kHeads * kPiece;                             // [kHeads, kPiece]

  group.each([&](int wave) HIPJAX_INLINE {
    const int first = wave * kTokens;
    const int some = listed - first < kTokens ? listed - first : kTokens;
    if (some <= 0) return;
    int mine[kTokens];
    HIPJAX_UNROLL
    for (int t = 0; t < kTokens; ++t) {
      const int real = t < some ? t : some - 1;
      mine[t] = a.list.token(row, piece * kPiece + first + real);
      put(tokens + first + t, mine[t]);
    }
    const F products = key_products<kHeads>(a.query + of_row * a.width, keys, mine, some, a.width);
    store(scores + wave * kHeads * kTokens, products, kHeads * kTokens);
  });
  group.each([&](int head) HIPJAX_INLINE {
    if (head >= kHeads) return;
    const float divisor = root(static_cast<float>(a.width));
    F score[2];
    F peak = splat(-__builtin_inff());
    HIPJAX_UNROLL
    for (int half = 0; half < 2; ++half) {
      const I token = lane() + splat_int(half * kLanes);
      const M real = token < splat_int(listed);
      const I at = times(shift_right(token, 3), splat_int(kHeads * kTokens)) +
                   (token & splat_int(kTokens - 1)) + splat_int(head * kTokens);
      score[half] = select(real, gather(scores, at, real) / splat(divisor), splat(-__builtin_inff()));
      peak = select(score[half] > peak, score[half], peak);
    }
    const float greatest_score = greatest(peak);
    F total = splat(0.0f);
    HIPJAX_UNROLL
    for (int half = 0; half < 2; ++half) {
      const M real = lane() + splat_int(half * kLanes) < splat_int(listed);
      const F weight = select(real, exp(score[half] - splat(greatest_score)), splat(0.0f));
      store(weights + head * kPiece + half * kLanes, weight, kLanes);
      total = total + weight;
    }
    float* peaks = a.peaks + (of_row + head) * 2 * a.pieces + piece;
    put(peaks, greatest_score);
    put(peaks + a.pieces, sum(total));
  });
  group.each([&](int wave) HIPJAX_INLINE {
    for (int base = wave * kLanes; base < a.width; base += AttendPiece::kWaves * kLanes) {
      const int count = a.width - base;
      F mixed[kHeads];
      HIPJAX_UNROLL
      for (int h = 0; h < kHeads; ++h) mixed[h] = splat(0.0f);
      for (int t = 0; t < listed; ++t) {
        const F value = load(values + static_cast<long>(tokens[t]) * a.width + base, count);
        HIPJAX_UNROLL
        for (int h = 0; h < kHeads; ++h) {
          mixed[h] = fma(splat(weights[h * kPiece + t]), value, mixed[h]);
        }
      }
      HIPJAX_UNROLL
      for (int h = 0; h < kHeads; ++h) {
        store(a.mixed + ((of_row + h) * a.pieces + piece) * a.width + base, mixed[h], count);
      }
    }
  });
}

template <int>
FN void run(const AttendFinish& a, int block, Block<AttendFinish::kWaves> group) {
  const int row = block / a.heads;
  const int pieces = (a.list.length(row) + AttendPiece::kPiece - 1) / AttendPiece::kPiece;
  const float* peaks = a.peaks + static_cast<long>(block) * 2 * a.pieces;
  float* total = reinterpret_cast<float*>(group.shared);
  float* factors = total + 1;  // [pieces]
  group.each([&](int wave) HIPJAX_INLINE {
    if (wave != 0) return;
    F peak = splat(-__builtin_inff());
    for (int base = 0; base < pieces; base += kLanes) {
      const F some = load(peaks + base, pieces - base);
      const M higher = both(some > peak, lane() < splat_int(pieces - base));
      peak = select(higher, some, peak);
    }
    const float greatest_score = greatest(peak);
    put(total, sum_over(pieces, [&](int base, int count) {
      const F factor = exp(load(peaks + base, count) - splat(greatest_score));
      store(factors + base, factor, count);
      return load(peaks + a.pieces + base, count) * factor;
    }));
  });
  group.each([&](int wave) HIPJAX_INLINE {
    const float* from = a.mixed + static_cast<long>(block) * a.pieces * a.width;
    const float* gate = a.projected + (2L * block + 1) * a.width;
    for (int base = wave * kLanes; base < a.width; base += AttendFinish::kWaves * kLanes) {
      const int count = a.width - base;
      F mixed = splat(0.0f);
      for (int p = 0; p < pieces; ++p) {
        mixed = fma(splat(factors[p]), load(from + static_cast<long>(p) * a.width + base, count),
                    mixed);
      }
      store(a.out + static_cast<long>(block) * a.width + base,
            mixed / splat(*total) * sigmoid(load(gate + base, count)), count);
    }
  });
}

}  // namespace hipjax::HIPJAX_TARGET
#endif
