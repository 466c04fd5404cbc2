// How the waves of a block share row products: included by kernels/row_product.h only.
//
// A wave takes one output or a few at once, or with the order for long rows a quarter of their
// terms, four waves a team. Turns are dealt out to all blocks, so that no multiprocessor has more
// than one turn more than another. The rows lie in shared memory, all of them if they fit, else
// chunk by chunk. A wave asks for weights some groups before it needs them, past the end of its
// outputs into those of its next turn, so that the memory never waits for arithmetic.
#pragma once

namespace hipjax::gpu {

// The wide order: one group of kOuts weight rows, and of kRows staged rows side by side.
template <int kOuts, int kRows>
FN void add_group(Quads (&total)[kOuts][kRows], const Quads (&low)[kOuts],
                  const Quads (&high)[kOuts], const float* staged) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const auto x = staged_half(staged + r * RowProduct::kGroup, half);
#pragma unroll
      for (int o = 0; o < kOuts; ++o) total[o][r] = fma(half ? high[o] : low[o], x, total[o][r]);
    }
  }
}

// The weights of a wave's outputs in one turn. Outputs past the end read the last row again;
// nothing of theirs is written. kWhole: there are only whole groups.
template <class Bits, int kOuts, bool kWhole>
struct Turn {
  const Bits* weights[kOuts];
  bool real;

  FN void aim(const RowProduct& a, int turn, int start) {
    real = turn < a.turns;
    if (!real) return;
    int first;
    const Matrix& to = matrix_of(a, turn, first);
#pragma unroll
    for (int o = 0; o < kOuts; ++o) {
      const int m = first + o < to.outputs ? first + o : to.outputs - 1;
      weights[o] = static_cast<const Bits*>(to.weight) + static_cast<long>(m) * a.depth + start;
    }
  }
  FN void take(Raw<Bits> (&raw)[kOuts], int at, int terms) const {
    if (!real || (!kWhole && at >= terms)) return;
#pragma unroll
    for (int o = 0; o < kOuts; ++o) raw[o] = load_raw(weights[o] + at, kWhole ? 8 * kLanes : terms - at);
  }
};

// Group `from` and the next `some` of all slices' rows, the rows of a group side by side.
FN void stage_rows(const RowProduct& a, float* staged, int slices, int from, int some, int wave,
                   int waves) {
  const int terms = a.depth / slices;
  for (int i = wave; i < slices * a.rows * some; i += waves) {
    const int row = i % a.rows, g = i / a.rows % some, slice = i / a.rows / some;
    const int at = (from + g) * RowProduct::kGroup;
    const float* x = a.x + static_cast<long>(row) * a.depth + slice * terms;
    stage_group(staged + ((slice * a.chunk + g) * a.rows + row) * RowProduct::kGroup, x + at,
                terms - at);
  }
}

constexpr int outputs_at_once(int rows) { return rows > 3 ? 2 : 4; }

// Rows in shared memory for the products of kOuts outputs at a time, laid out in the same way.
template <int kOuts, int kRows>
struct StagedRows {
  static constexpr int kMost = kOuts, kGroup = RowProduct::kGroup;
  float* at;
  int terms;

  FN bool wide() const { return terms % 8 == 0; }
  FN int groups() const { return (terms + kGroup - 1) / kGroup; }
  FN void stage(int row, int group, const float* x) const {
    stage_group(at + (group * kRows + row) * kGroup, x + group * kGroup, terms - group * kGroup);
  }
  template <class Weight>
  FN void products(float (&values)[kMost][kRows], int count, Weight weight,
                   decltype(weight(0))) const {
    decltype(weight(0)) weights[kOuts];
#pragma unroll
    for (int o = 0; o < kOuts; ++o) weights[o] = weight(o < count ? o : count - 1);
    Quads total[kOuts][kRows] = {};
    for (int g = 0; g < groups(); ++g) {
      Quads low[kOuts], high[kOuts];
#pragma unroll
      for (int o = 0; o < kOuts; ++o) {
        load_quads(weights[o] + g * kGroup, terms - g * kGroup, low[o], high[o]);
      }
      add_group(total, low, high, at + g * kRows * kGroup);
    }
    lane_sums(total, values);
  }
};

template <class Bits>
FN void narrow_turn(const RowProduct& a, int first, const Matrix& to, int outs) {
  for (int i = 0; i < outs * a.rows; ++i) {
    const int m = first + i / a.rows, r = i % a.rows;
    if (m >= to.outputs) break;
    const Bits* weight = static_cast<const Bits*>(to.weight) + static_cast<long>(m) * a.depth;
    const float value = narrow_dot(weight, a.x + static_cast<long>(r) * a.depth, a.depth);
    if (lane() == 0) finish(a, to, r, m, value);
  }
}

template <int kVariant>
FN void run(const RowProduct& a, int block, Block<RowProduct::waves(kVariant)> group) {
  constexpr int kWaves = RowProduct::waves(kVariant);
  using Bits = typename Kind<kVariant>::Bits;
  constexpr int kRows = Kind<kVariant>::kRows, kSlices = Kind<kVariant>::kSlices;
  constexpr int kOuts = Kind<kVariant>::kOuts, kTeams = kWaves / kSlices;
  constexpr bool kWhole = Kind<kVariant>::kMany;
  constexpr int kAhead = RowProduct::ahead(kVariant);
  constexpr int kCount = power_of_two(kOuts * kRows);
  constexpr int kGroup = RowProduct::kGroup;
  const int wave = thread() / kLanes;
  const int slice = wave % kSlices, team = wave / kSlices;
  const int terms = a.depth / kSlices, groups = a.groups(), step = a.stride * kTeams;
  float* partial = reinterpret_cast<float*>(group.shared);
  float* staged = partial + (kSlices == 4 ? kWaves * kMaxRows : 0);
  const float* mine = staged + slice * a.chunk * kRows * kGroup;

  Turn<Bits, kOuts, kWhole> aimed;
  aimed.aim(a, block + team * a.stride, slice * terms);
  Raw<Bits> ahead[kAhead][kOuts] = {};
  if (kWhole || terms % 8 == 0) {
#pragma unroll
    for (int i = 0; i < kAhead; ++i) aimed.take(ahead[i], i * kGroup, terms);
  }
  for (int base = block; base < a.turns; base += step) {  // the same for all waves of a block
    const int turn = base + team * a.stride;
    const bool busy = turn < a.turns;
    int first = 0;
    const Matrix& to = matrix_of(a, busy ? turn : base, first);
    if (!kWhole && terms % 8 != 0) {
      if (busy && slice == 0) narrow_turn<Bits>(a, first, to, kOuts);
      continue;
    }
    Quads total[kOuts][kRows] = {};
    for (int from = 0; from < groups; from += a.chunk) {
      const int end = from + a.chunk < groups ? from + a.chunk : groups;
      if (a.chunk < groups || base == block) {
        barrier();
        stage_rows(a, staged, kSlices, from, end - from, wave, kWaves);
        barrier();
      }
      const float* x = mine;
      for (int g = from; busy && g < end; g += kAhead, x += kAhead * kRows * kGroup) {
        int next = g + kAhead;
        if (next >= groups) {
          aimed.aim(a, turn + step, slice * terms);
          next = 0;
        }
#pragma unroll
        for (int i = 0; i < kAhead; ++i) {
          if (kWhole || g + i < end) {
            Quads low[kOuts], high[kOuts];
#pragma unroll
            for (int o = 0; o < kOuts; ++o) widen(ahead[i][o], low[o], high[o]);
            add_group(total, low, high, x + i * kRows * kGroup);
          }
          aimed.take(ahead[i], (next + i) * kGroup, terms);
        }
      }
    }
    float values[kCount] = {};
#pragma unroll
    for (int o = 0; o < kOuts; ++o) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) values[o * kRows + r] = folded(total[o][r]);
    }
    float value = sums(values);
    const int which = lane();
    const int m = first + which / kRows;
    bool write = busy && which < kOuts * kRows && m < to.outputs;
    if constexpr (kSlices == 4) {
      if (write) partial[wave * kMaxRows + which] = value;
      barrier();
      write = write && slice == 0;
      if (write) {
        const float* p = partial + wave * kMaxRows + which;
        value = (p[0] + p[kMaxRows]) + (p[2 * kMaxRows] + p[3 * kMaxRows]);
      }
      barrier();
    }
    if (write) finish(a, to, which % kRows, m, value);
  }
}

}  // namespace hipjax::gpu
