// How a CPU thread walks through row products: included by kernels/row_product.h only.
//
// A few outputs at a time, so that the staged rows are loaded once for all of them, and of
// each wave only as many lanes at once as the registers hold accumulators for. The weights
// of the outputs that come next are fetched meanwhile.
#pragma once

namespace hipjax::HIPJAX_TARGET {

// As many outputs as let their accumulators, one register each, stay in registers.
constexpr int outputs_at_once(int rows) {
  if (rows == 1) return 2;
  if (kWidth == 16) return rows <= 6 ? 4 : 3;
  return rows <= 4 ? 2 : 1;
}

// Rows laid out for products of kOuts outputs at a time: part by part, and there group by group,
// the rows of a group side by side.
template <int kOuts, int kRows>
struct StagedRows {
  static constexpr int kPart = part_lanes(kOuts * kRows), kParts = kLanes / kPart;
  static constexpr int kPiece = kPart * 8, kGroup = RowProduct::kGroup;
  static constexpr int kUsed = kPart * 4 / kWidth;  // registers of a sum in a part
  static constexpr int kPacks = (kOuts * kRows + 3) / 4;
  static constexpr int kSets = 4, kMost = kSets * kOuts;
  float* at;
  int terms;

  FN bool wide() const { return terms % 8 == 0; }
  FN int groups() const { return (terms + kGroup - 1) / kGroup; }
  FN long place(int part, int group) const {
    return (static_cast<long>(part) * groups() + group) * kRows * kPiece;
  }
  FN void stage(int row, int group, const float* x) const {
    x += group * kGroup;
    const int left = terms - group * kGroup;
    if (left >= kGroup) return lay_out(row, group, x);
    float last[kGroup] = {};
    memcpy(last, x, left * sizeof(float));
    lay_out(row, group, last);
  }

  // The products of `count` outputs, at most kMost, with all staged rows. `weight(o)` is the row of
  // an output's weights; meanwhile fetches as many weights from `next` on. A part of the staged
  // rows serves all outputs before the next part's turn.
  template <class Weight>
  FN void products(float (&values)[kMost][kRows], int count, Weight weight,
                   decltype(weight(0)) next) const {
    using Bits = std::remove_reference_t<decltype(*weight(0))>;
    Folded folded[kSets][kPacks];
    const int sets = (count + kOuts - 1) / kOuts;
    for (int part = 0; part < kParts; ++part) {
      for (int set = 0; set < sets; ++set) {
        if (part * kPiece >= terms) {
          HIPJAX_UNROLL
          for (int i = 0; i < kPacks * kUsed; ++i) folded[set][i / kUsed].v[part * kUsed + i % kUsed] = V{};
          continue;
        }
        Quads<kPart> total[kOuts][kRows] = {};
        const Bits* at[kOuts];
        HIPJAX_UNROLL
        for (int o = 0; o < kOuts; ++o) {  // past the end: the last one again, left out below
          const int real = set * kOuts + o < count ? set * kOuts + o : count - 1;
          at[o] = weight(real) + part * kPiece;
        }
        add_part(total, part, at, next);
        HIPJAX_UNROLL
        for (int p = 0; p < kPacks; ++p) {
          HIPJAX_UNROLL
          for (int i = 0; i < kUsed; ++i) {
            V four[4] = {};
            HIPJAX_UNROLL
            for (int j = 0; j < 4; ++j) {
              const int n = p * 4 + j;
              if (n < kOuts * kRows) four[j] = total[n / kRows][n % kRows].v[i];
            }
            folded[set][p].v[part * kUsed + i] = fold(four[0], four[1], four[2], four[3]);
          }
        }
      }
    }
    for (int set = 0; set < sets; ++set) {
      float sum[kPacks * 4];
      HIPJAX_UNROLL
      for (int p = 0; p < kPacks; ++p) sums(folded[set][p], sum + p * 4);
      memcpy(values[set * kOuts], sum, kOuts * kRows * sizeof(float));
    }
  }

 private:
  FN void lay_out(int row, int group, const float* x) const {
    for (int part = 0; part < kParts; ++part) {
      float* to = at + place(part, group) + row * kPiece;
      HIPJAX_UNROLL
      for (int i = 0; i < kPiece; i += 2 * kWidth) {
        const V low = load_half<0>(x + part * kPiece + i), high = load_half<1>(x + part * kPiece + i);
        memcpy(to + i, &low, sizeof(low));
        memcpy(to + i + kWidth, &high, sizeof(high));
      }
    }
  }

  template <int kHalf, class Bits>
  FN static void add_half(Quads<kPart> (&total)[kOuts][kRows], const Bits* (&weights)[kOuts],
                          const float* x) {
    Quads<kPart> weight[kOuts];
    HIPJAX_UNROLL
    for (int o = 0; o < kOuts; ++o) weight[o] = load_quads<kHalf, kPart>(weights[o]);
    HIPJAX_UNROLL
    for (int r = 0; r < kRows; ++r) {
      Quads<kPart> row;
      HIPJAX_UNROLL
      for (int i = 0; i < kPart * 4 / kWidth; ++i) {
        memcpy(&row.v[i], x + r * kPiece + (2 * i + kHalf) * kWidth, sizeof(V));
      }
      HIPJAX_UNROLL
      for (int o = 0; o < kOuts; ++o) total[o][r] = fma(weight[o], row, total[o][r]);
    }
  }

  template <class Bits>
  FN void add_part(Quads<kPart> (&total)[kOuts][kRows], int part, const Bits* (&at)[kOuts],
                   const Bits*& next) const {
    const float* x = this->at + place(part, 0);
    const int whole = terms / kGroup;
    for (int g = 0; g < whole; ++g) {
      HIPJAX_UNROLL
      for (int o = 0; o < kOuts; ++o) {
        HIPJAX_UNROLL
        for (int line = 0; line < kPiece; line += 64 / static_cast<int>(sizeof(Bits))) fetch(next + line);
        next += kPiece;
      }
      add_half<0>(total, at, x);
      add_half<1>(total, at, x);
      HIPJAX_UNROLL
      for (int o = 0; o < kOuts; ++o) at[o] += kGroup;
      x += kRows * kPiece;
    }
    if (whole * kGroup < terms) add_last(total, at, x, terms - whole * kGroup - part * kPiece);
  }

  // A group of which `left` terms from here on are real: filled up with zeros.
  template <class Bits>
  FN static void add_last(Quads<kPart> (&total)[kOuts][kRows], const Bits* (&weights)[kOuts],
                          const float* x, int left) {
    if (left >= kPiece) {
      add_half<0>(total, weights, x);
      add_half<1>(total, weights, x);
      return;
    }
    Bits last[kOuts][kPiece] = {};
    const Bits* filled[kOuts];
    HIPJAX_UNROLL
    for (int o = 0; o < kOuts; ++o) {
      if (left > 0) memcpy(last[o], weights[o], left * sizeof(Bits));
      filled[o] = last[o];
    }
    add_half<0>(total, filled, x);
    add_half<1>(total, filled, x);
  }
};

template <int kVariant>
FN void run(const RowProduct& a, int block, Block<RowProduct::waves(kVariant)> group) {
  if constexpr (Kind<kVariant>::kMany) return;  // never asked of a CPU
  using Bits = typename Kind<kVariant>::Bits;
  constexpr int kRows = Kind<kVariant>::kRows, kSlices = Kind<kVariant>::kSlices;
  constexpr int kOuts = outputs_at_once(kRows);
  const int terms = a.depth / kSlices;
  using Rows = StagedRows<kOuts, kRows>;
  const Rows staged{reinterpret_cast<float*>(group.shared), terms};
  const bool wide = staged.wide();
  const long slice_size = static_cast<long>(staged.groups()) * Rows::kGroup * kRows;
  for (int slice = 0; wide && slice < kSlices; ++slice) {
    const Rows to{staged.at + slice * slice_size, terms};
    for (int i = 0; i < kRows * to.groups(); ++i) {
      const int row = i % kRows;
      to.stage(row, i / kRows, a.x + static_cast<long>(row) * a.depth + slice * terms);
    }
  }
  for (int turn = block; turn < a.turns; turn += a.stride) {
    int first;
    const Matrix& to = matrix_of(a, turn, first);
    const int last = first + a.per_turn < to.outputs ? first + a.per_turn : to.outputs;
    const Bits* all = static_cast<const Bits*>(to.weight);
    for (int m = first; m < last; m += Rows::kMost) {
      const int count = last - m < Rows::kMost ? last - m : Rows::kMost;
      float values[kSlices][Rows::kMost][kRows];
      for (int slice = 0; slice < kSlices; ++slice) {
        const auto weight = [&](int o) HIPJAX_INLINE {
          return all + static_cast<long>(m + o) * a.depth + slice * terms;
        };
        if (wide) {
          const Rows from{staged.at + slice * slice_size, terms};
          from.products(values[slice], count, weight, weight(Rows::kMost));
        } else {
          for (int i = 0; i < count * kRows; ++i) {
            const float* x = a.x + static_cast<long>(i % kRows) * a.depth;
            values[slice][i / kRows][i % kRows] = narrow_dot(weight(i / kRows), x, terms);
          }
        }
      }
      for (int o = 0; o < count; ++o) {
        for (int r = 0; r < kRows; ++r) {
          float value = values[0][o][r];
          if constexpr (kSlices == 4) {
            value = (value + values[1][o][r]) + (values[2][o][r] + values[3][o][r]);
          }
          finish(a, to, r, m + o, value);
        }
      }
    }
  }
}

}  // namespace hipjax::HIPJAX_TARGET
