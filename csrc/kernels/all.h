// Every kernel: the type of its arguments, its own name, and its number of variants.
#pragma once

#include "kernels/delta.h"
#include "kernels/delta_commit.h"
#include "kernels/delta_rows.h"
#include "kernels/argmax.h"
#include "kernels/attention.h"
#include "kernels/attention_inputs.h"
#include "kernels/experts.h"
#include "kernels/hyper.h"
#include "kernels/math_probe.h"
#include "kernels/norm.h"
#include "kernels/ple.h"
#include "kernels/route.h"
#include "kernels/row_product.h"
#include "kernels/select.h"

#define HIPJAX_KERNELS(KERNEL) \
  KERNEL(DeltaInputs, delta_inputs, 1) \
  KERNEL(DeltaRows, delta_rows, 8) \
  KERNEL(DeltaCommit, delta_commit, 8) \
  KERNEL(Argmax, argmax, 1) \
  KERNEL(AttendFinish, attend_finish, 1) \
  KERNEL(AttendPiece, attend_piece, 8) \
  KERNEL(AttentionInputs, attention_inputs, 1) \
  KERNEL(BlockKeys, block_keys, 2) \
  KERNEL(BlockScores, block_scores, 8) \
  KERNEL(ExpertInner, expert_inner, 4) \
  KERNEL(ExpertOutput, expert_output, 4) \
  KERNEL(HyperCombine, hyper_combine, 1) \
  KERNEL(HyperMixUp, hyper_mix_up, 16) \
  KERNEL(MathProbe, math_probe, 2) \
  KERNEL(PleGate, ple_gate, 1) \
  KERNEL(PleOutput, ple_output, 8) \
  KERNEL(RmsNorm, rms_norm, 1) \
  KERNEL(Route, route, 1) \
  KERNEL(RowProduct, row_product, 40) \
  KERNEL(SelectBlocks, select_blocks, 1) \
  KERNEL(Swiglu, swiglu, 1)

namespace hipjax {

enum class KernelId : int {
#define HIPJAX_ID(Type, name, variants) Type,
  HIPJAX_KERNELS(HIPJAX_ID)
#undef HIPJAX_ID
};

template <class Arguments>
struct KernelOf;
#define HIPJAX_OF(Type, text, variants)                            \
  template <>                                            \
  struct KernelOf<Type> {                                \
    static constexpr KernelId kId = KernelId::Type;      \
    static constexpr const char* kName = #text;          \
    static_assert(Type::kVariants == variants);          \
  };
HIPJAX_KERNELS(HIPJAX_OF)
#undef HIPJAX_OF

// A kernel has kWaves waves to a block, or waves(variant) of them; and min_blocks(variant)
// blocks to a multiprocessor if it says so.
template <class T>
constexpr auto waves(int variant) -> decltype(T::waves(variant)) {
  return T::waves(variant);
}
template <class T>
constexpr auto waves(int) -> decltype(T::kWaves) {
  return T::kWaves;
}
template <class T>
constexpr auto min_blocks(int variant) -> decltype(T::min_blocks(variant)) {
  return T::min_blocks(variant);
}
template <class T, class... Other>
constexpr int min_blocks(Other...) {
  return 1;
}

}  // namespace hipjax
