// Which blocks of the cache a row reads: their scores, and the exact best of them.
#pragma once

#include "arguments.h"

namespace hipjax {

// Scores of the blocks that a row sees, as integers in the order of the scores: the bits of
// the score plus 1, and 0 for a NaN, which so comes last. Scores are never negative.
// Block (sequence, tile) scores kWaves times 32 cached blocks for every row of its sequence
// that sees more blocks than its budget; nobody asks for the scores of the others.
struct BlockScores {
  static constexpr int kWaves = 2;
  static constexpr int kPitch = kLanes + 1;  // staged columns lie in different memory banks
  static constexpr int kMaxWidth = 240;      // so that the columns fit 64 KiB
  static constexpr int kVariants = 8;
  const float* query;   // [sequences, rows, heads, width]
  const void* keys;     // [sequences, capacity, width]
  const int* visible;   // [sequences, rows]
  int* ranks;           // [sequences, rows, capacity]
  int sequences, rows, heads, width, capacity, budget;
  int tiles;
  int bf16;

  // Heads that are scored together: as many as divide their number, up to four.
  constexpr int tile_heads() const {
    return heads % 4 == 0 ? 4 : heads % 3 == 0 ? 3 : heads % 2 == 0 ? 2 : 1;
  }
  constexpr int variant() const { return bf16 * 4 + tile_heads() - 1; }
  constexpr int blocks() const { return sequences * tiles; }
  constexpr int shared_bytes() const { return kWaves * width * kPitch * 4; }
  constexpr long block_cost() const {
    return static_cast<long>(kWaves) * kLanes * width * (4 + rows * heads);
  }
};

// The best `budget` of the blocks that a row sees, by score, and the lower block where scores
// are equal. One block of waves per row. The result lists them by number; slots that stay
// empty hold -1.
struct SelectBlocks {
  static constexpr int kWaves = 16;
  static constexpr int kVariants = 1;
  const int* ranks;    // [rows, capacity]
  const int* visible;  // [rows]
  int* selected;       // [rows, slots]
  int* count;          // [rows]
  int rows, capacity, slots;
  int most;  // a bound on `visible`, for the cost only

  constexpr int variant() const { return 0; }
  constexpr int blocks() const { return rows; }
  constexpr int shared_bytes() const { return 4 * 6 * kWaves; }
  constexpr long block_cost() const { return most > slots ? 64L * most : 4L * slots; }
};

}  // namespace hipjax

#ifdef HIPJAX_TARGET
#include <type_traits>

#include "lanes.h"
#include "math.h"

namespace hipjax::HIPJAX_TARGET {

FN int within(int value, int most) { return value < 0 ? 0 : value < most ? value : most; }

template <int kVariant>
FN void run(const BlockScores& a, int block, Block<BlockScores::kWaves> group) {
  using Bits = std::conditional_t<kVariant / 4 != 0, uint16_t, float>;
  constexpr int kHeads = kVariant % 4 + 1;
  const int sequence = block / a.tiles;
  const int tile = block % a.tiles * BlockScores::kWaves * kLanes;
  const int* visible = a.visible + static_cast<long>(sequence) * a.rows;
  int needed = 0;
  for (int r = 0; r < a.rows; ++r) {
    const int seen = within(visible[r], a.capacity);
    if (seen > a.budget && seen > needed) needed = seen;
  }
  if (tile >= needed) return;
  float* all = reinterpret_cast<float*>(group.shared);
  const int columns = a.width * BlockScores::kPitch;
  group.each([&](int wave) HIPJAX_INLINE {
    const int first = tile + wave * kLanes;
    float* staged = all + wave * columns;
    const Bits* keys = static_cast<const Bits*>(a.keys) +
                       (static_cast<long>(sequence) * a.capacity + first) * a.width;
    const int some = needed - first < kLanes ? needed - first : kLanes;
    for (int b = 0; b < some; ++b) {
      for (int base = 0; base < a.width; base += kLanes) {
        const int count = a.width - base < kLanes ? a.width - base : kLanes;
        const F values = load(keys + static_cast<long>(b) * a.width + base, count);
        scatter(staged + base * BlockScores::kPitch + b,
                times(lane(), splat_int(BlockScores::kPitch)), values, count);
      }
    }
  });
  group.each([&](int wave) HIPJAX_INLINE {
    const int first = tile + wave * kLanes;
    const float* staged = all + wave * columns;
    const float divisor = root(static_cast<float>(a.width));
    for (int r = 0; r < a.rows; ++r) {
      const int seen = within(visible[r], a.capacity);
      if (seen <= a.budget || first >= seen) continue;
      const long row = static_cast<long>(sequence) * a.rows + r;
      F total = splat(0.0f);
      for (int head = 0; head < a.heads; head += kHeads) {
        const float* query = a.query + (row * a.heads + head) * a.width;
        F dot[kHeads];
        HIPJAX_UNROLL
        for (int h = 0; h < kHeads; ++h) dot[h] = splat(0.0f);
        for (int d = 0; d < a.width; ++d) {
          const F key = load(staged + d * BlockScores::kPitch, kLanes);
          HIPJAX_UNROLL
          for (int h = 0; h < kHeads; ++h) dot[h] = fma(splat(query[h * a.width + d]), key, dot[h]);
        }
        HIPJAX_UNROLL
        for (int h = 0; h < kHeads; ++h) {
          total = total + select(dot[h] < splat(0.0f), splat(0.0f), dot[h]);
        }
      }
      const F score = total / splat(divisor);
      const I rank = select(score == score, as_int(score) + splat_int(1), splat_int(0));
      store(a.ranks + row * a.capacity + first, rank, seen - first);
    }
  });
}

template <int>
FN void run(const SelectBlocks& a, int row, Block<SelectBlocks::kWaves> group) {
  constexpr int kWaves = SelectBlocks::kWaves, kAll = kWaves * kLanes;
  const int seen = within(a.visible[row], a.capacity);
  const int chosen = seen < a.slots ? seen : a.slots;
  int* selected = a.selected + static_cast<long>(row) * a.slots;
  const bool everything = seen <= a.slots;
  group.each([&](int wave) HIPJAX_INLINE {
    if (wave == 0) put(a.count + row, chosen);
    for (int base = wave * kLanes; everything && base < a.slots; base += kAll) {
      const I number = lane() + splat_int(base);
      const I value = select(number < splat_int(chosen), number, splat_int(-1));
      store(selected + base, value, a.slots - base);
    }
  });
  if (everything) return;

  // Each wave has a span of the ranks. `least` becomes the greatest rank that at least `slots`
  // blocks reach, two bits at a time from above; ranks are below 2^31.
  const int* ranks = a.ranks + static_cast<long>(row) * a.capacity;
  const int span = (seen + kAll - 1) / kAll * kLanes;
  int* tally = reinterpret_cast<int*>(group.shared);
  const auto over_span = [&](int wave, auto fn) HIPJAX_INLINE {
    const int end = (wave + 1) * span < seen ? (wave + 1) * span : seen;
    for (int at = wave * span; at < end; at += kLanes) {
      const int count = end - at < kLanes ? end - at : kLanes;
      fn(at, load(ranks + at, count), count);
    }
  };
  const auto totals = [&](const int* from) HIPJAX_INLINE {
    int total = 0;
    for (int w = 0; w < kWaves; ++w) total += from[w];
    return total;
  };
  int least = 0;
  bool exact = false;
  for (int pass = 0; pass < 16 && !exact; ++pass) {
    const int shift = pass < 15 ? 29 - 2 * pass : 0;
    int* counts = tally + pass % 2 * 3 * kWaves;
    group.each([&](int wave) HIPJAX_INLINE {
      I reached[3] = {splat_int(0), splat_int(0), splat_int(0)};
      over_span(wave, [&](int, I rank, int) HIPJAX_INLINE {
        HIPJAX_UNROLL
        for (int digit = 1; digit <= 3; ++digit) {
          const M high = rank >= splat_int(least + (digit << shift));
          reached[digit - 1] = reached[digit - 1] + select(high, splat_int(1), splat_int(0));
        }
      });
      HIPJAX_UNROLL
      for (int i = 0; i < 3; ++i) put(counts + i * kWaves + wave, sum(reached[i]));
    });
    int up = 0;
    for (int digit = 1; digit <= 3; ++digit) {
      const int total = totals(counts + (digit - 1) * kWaves);
      if (total >= a.slots) up = digit;
      if (total == a.slots) exact = true;
    }
    least += up << shift;
  }

  int* higher = tally;
  int* equal = tally + kWaves;
  group.each([](int) {});  // the last tally has been read
  group.each([&](int wave) HIPJAX_INLINE {
    int more = 0, same = 0;
    over_span(wave, [&](int, I rank, int count) HIPJAX_INLINE {
      more += count_of(rank > splat_int(least));
      same += count_of(both(rank == splat_int(least), lane() < splat_int(count)));
    });
    put(higher + wave, more);
    put(equal + wave, same);
  });
  const int ties = a.slots - totals(higher);
  group.each([&](int wave) HIPJAX_INLINE {
    int at = 0, used = 0;
    for (int w = 0; w < wave; ++w) {
      at += higher[w];
      used += equal[w];
    }
    int left = ties > used ? ties - used : 0;
    at += ties - left;
    over_span(wave, [&](int from, I rank, int count) HIPJAX_INLINE {
      const M same = both(rank == splat_int(least), lane() < splat_int(count));
      const M taken = either(rank > splat_int(least), first_of(same, left));
      const int equals = count_of(same);
      left = left > equals ? left - equals : 0;
      at += list(selected + at, lane() + splat_int(from), taken);
    });
  });
}

}  // namespace hipjax::HIPJAX_TARGET
#endif
