// How the waves of a block share row products: included by kernels/row_product.h only.
//
// A wave takes kOuts outputs at once, or with the order for long rows a quarter of their
// terms. The rows lie in shared memory, all of them once if they fit, else chunk by chunk.
#pragma once

namespace hipjax::gpu {

template <int kVariant>
FN void run(const RowProduct& a, int block, Block<RowProduct::kWaves> group) {
  constexpr int kRows = kVariant % kMaxRows + 1;
  constexpr bool kQuarters = kVariant / kMaxRows / 2;
  using Bits = std::conditional_t<kVariant / kMaxRows % 2 != 0, uint16_t, float>;
  constexpr int kSlices = kQuarters ? 4 : 1;
  constexpr int kWaves = RowProduct::kWaves, kOuts = RowProduct::kOuts;
  const int wave = thread() / kLanes;
  const int slice = kQuarters ? wave % 4 : 0;
  const int terms = a.depth / kSlices;
  const int groups = a.groups();
  const int pitch = a.chunk * RowProduct::kGroup;
  float* partial = reinterpret_cast<float*>(group.shared);
  float* all_staged = partial + (kQuarters ? RowProduct::kPartials : 0);
  const float* staged = all_staged + static_cast<long>(slice) * kRows * pitch;
  const bool wide = terms % 8 == 0;
  for (int turn = block; turn < a.turns(); turn += a.stride) {
    int first;
    const Matrix& to = matrix_of(a, turn, first);
    const int m = first + (kQuarters ? wave / 4 : wave) * kOuts;
    const Bits* weight = static_cast<const Bits*>(to.weight);
    if (!wide) {
      for (int o = 0; o < kOuts && m + o < to.outputs; ++o) {
        for (int r = 0; r < kRows; ++r) {
          const float value = narrow_dot(weight + static_cast<long>(m + o) * a.depth,
                                         a.x + static_cast<long>(r) * a.depth, terms);
          if (lane() == 0) finish(a, to, r, m + o, value);
        }
      }
      continue;
    }
    // Outputs past the end read the last row again; nothing of theirs is written.
    const Bits* weights[kOuts];
#pragma unroll
    for (int o = 0; o < kOuts; ++o) {
      const int real = m + o < to.outputs ? m + o : to.outputs - 1;
      weights[o] = weight + static_cast<long>(real) * a.depth + slice * terms;
    }
    Quads<kLanes> total[kOuts][kRows] = {};
    for (int from = 0; from < groups; from += a.chunk) {
      const int some = groups - from < a.chunk ? groups - from : a.chunk;
      if (a.chunk < groups || turn == block) {
        barrier();
        for (int i = wave; i < kSlices * kRows * some; i += kWaves) {
          const int g = i % some, row = i / some % kRows, s = i / some / kRows;
          const int at = (from + g) * RowProduct::kGroup;
          stage_group(all_staged + static_cast<long>(s * kRows + row) * pitch + g * RowProduct::kGroup,
                      a.x + static_cast<long>(row) * a.depth + s * terms + at, terms - at);
        }
        barrier();
      }
      add_groups(total, 0, weights, from * RowProduct::kGroup, terms, staged, pitch, some);
    }
#pragma unroll
    for (int o = 0; o < kOuts; ++o) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        Folded folded;
        fold(total[o][r], 0, folded);
        const float value = sum(folded);
        if constexpr (kQuarters) {
          put(partial + ((wave / 4 * 4 + slice) * kOuts + o) * kRows + r, value);
        } else {
          if (lane() == 0 && m + o < to.outputs) finish(a, to, r, m + o, value);
        }
      }
    }
    if constexpr (kQuarters) {
      barrier();
      const int mine = lane() + slice * kLanes;
      if (mine < kOuts * kRows) {
        const int o = mine / kRows, r = mine % kRows;
        const float* p = partial + wave / 4 * 4 * kOuts * kRows + mine;
        const int step = kOuts * kRows;
        const float value = (p[0] + p[step]) + (p[2 * step] + p[3 * step]);
        if (m + o < to.outputs) finish(a, to, r, m + o, value);
      }
      barrier();
    }
  }
}

}  // namespace hipjax::gpu
