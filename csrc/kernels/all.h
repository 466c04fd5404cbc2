// Every kernel: the type of its arguments, its own name, and its number of variants.
#pragma once

#include "kernels/attention.h"
#include "kernels/attention_inputs.h"
#include "kernels/math_probe.h"
#include "kernels/norm.h"
#include "kernels/row_product.h"
#include "kernels/select.h"

#define HIPJAX_KERNELS(KERNEL) \
  KERNEL(AttendFinish, attend_finish, 1) \
  KERNEL(AttendPiece, attend_piece, 8) \
  KERNEL(AttentionInputs, attention_inputs, 1) \
  KERNEL(BlockKeys, block_keys, 2) \
  KERNEL(BlockScores, block_scores, 8) \
  KERNEL(MathProbe, math_probe, 2) \
  KERNEL(RmsNorm, rms_norm, 1) \
  KERNEL(SelectBlocks, select_blocks, 1) \
  KERNEL(RowProduct, row_product, 32)

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

}  // namespace hipjax
