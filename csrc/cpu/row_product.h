// How a CPU thread walks through row products: included by kernels/row_product.h only.
//
// A few outputs at a time, so that the staged rows are loaded once for all of them, and of
// each wave only as many lanes at once as the registers hold accumulators for. The weights
// of the outputs that come next are fetched meanwhile.
#pragma once

namespace hipjax::HIPJAX_TARGET {

constexpr int outputs_at_once(int rows) {
  if (rows == 1) return 1;
  if (kWidth == 16) return rows == 3 || rows == 4 ? 4 : 2;
  return rows <= 4 ? 2 : 1;
}

// The sums of kOuts weight rows with kRows staged rows, see add_group; `next` are the weight
// rows that will be asked for after these.
template <int kOuts, int kRows, class Bits>
FN void wide_sums(float (&sums)[kOuts][kRows], const Bits* const (&weights)[kOuts],
                  const Bits* next, long next_bytes, int terms, const float* staged, int pitch,
                  int groups) {
  constexpr int kPart = part_lanes(kOuts * kRows);
  constexpr int kParts = kLanes / kPart;
  constexpr int kLine = 64;
  const char* ahead = reinterpret_cast<const char*>(next);
  const long share = (next_bytes / kParts + kLine - 1) / kLine * kLine;
  Folded folded[kOuts][kRows];
  for (int part = 0; part < kParts; ++part) {
    Quads<kPart> total[kOuts][kRows] = {};
    const long from = part * share, to = from + share < next_bytes ? from + share : next_bytes;
    const long step = groups ? ((to - from) / groups + kLine - 1) / kLine * kLine : 0;
    for (int g = 0; g < groups; ++g) {
      for (long at = from + g * step; at < from + (g + 1) * step && at < to; at += kLine) {
        prefetch(ahead + at);
      }
      const int at = g * RowProduct::kGroup;
      add_groups(total, part, weights, at, terms, staged + at, pitch, 1);
    }
    for (int o = 0; o < kOuts; ++o) {
      for (int r = 0; r < kRows; ++r) fold(total[o][r], part, folded[o][r]);
    }
  }
  for (int o = 0; o < kOuts; ++o) {
    for (int r = 0; r < kRows; ++r) sums[o][r] = sum(folded[o][r]);
  }
}

template <int kVariant>
FN void run(const RowProduct& a, int block, Block<RowProduct::waves(kVariant)> group) {
  using Bits = typename Kind<kVariant>::Bits;
  constexpr int kRows = Kind<kVariant>::kRows, kSlices = Kind<kVariant>::kSlices;
  constexpr int kOuts = outputs_at_once(kRows);
  const int terms = a.depth / kSlices;
  const bool wide = terms % 8 == 0;
  const int groups = a.groups(), pitch = groups * RowProduct::kGroup;
  float* staged = reinterpret_cast<float*>(group.shared);
  for (int i = 0; wide && i < kSlices * kRows; ++i) {
    const float* x = a.x + static_cast<long>(i % kRows) * a.depth + i / kRows * terms;
    for (int g = 0; g < groups; ++g) {
      const int at = g * RowProduct::kGroup;
      stage_group(staged + static_cast<long>(i) * pitch + at, x + at, terms - at);
    }
  }
  for (int turn = block; turn < a.turns; turn += a.stride) {
    int first;
    const Matrix& to = matrix_of(a, turn, first);
    const int last = first + a.per_block < to.outputs ? first + a.per_block : to.outputs;
    const Bits* all = static_cast<const Bits*>(to.weight);
    for (int m = first; m < last; m += kOuts) {
      float sums[kSlices][kOuts][kRows];
      for (int slice = 0; slice < kSlices; ++slice) {
        // Outputs past the end read the last row again; nothing of theirs is written.
        const Bits* weights[kOuts];
        for (int o = 0; o < kOuts; ++o) {
          const int real = m + o < last ? m + o : last - 1;
          weights[o] = all + static_cast<long>(real) * a.depth + slice * terms;
        }
        if (wide) {
          const int soon = m + 2 * kOuts <= last ? kOuts : last - m > kOuts ? last - m - kOuts : 0;
          wide_sums(sums[slice], weights, weights[0] + static_cast<long>(kOuts) * a.depth,
                    slice == 0 ? static_cast<long>(soon) * a.depth * sizeof(Bits) : 0, terms,
                    staged + static_cast<long>(slice) * kRows * pitch, pitch, groups);
        } else {
          for (int o = 0; o < kOuts; ++o) {
            for (int r = 0; r < kRows; ++r) {
              sums[slice][o][r] =
                  narrow_dot(weights[o], a.x + static_cast<long>(r) * a.depth, terms);
            }
          }
        }
      }
      for (int o = 0; o < kOuts && m + o < last; ++o) {
        for (int r = 0; r < kRows; ++r) {
          float value = sums[0][o][r];
          if constexpr (kSlices == 4) {
            value = (value + sums[1][o][r]) + (sums[2][o][r] + sums[3][o][r]);
          }
          finish(a, to, r, m + o, value);
        }
      }
    }
  }
}

}  // namespace hipjax::HIPJAX_TARGET
