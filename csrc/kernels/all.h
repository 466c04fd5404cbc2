// Every kernel: the type of its arguments, its own name, and its number of variants.
#pragma once

#include "kernels/delta.h"
#include "kernels/delta_commit.h"
#include "kernels/delta_rows.h"
#include "kernels/norm.h"
#include "kernels/row_product.h"

#define HIPJAX_KERNELS(KERNEL) \
  KERNEL(DeltaInputs, delta_inputs, 1) \
  KERNEL(DeltaRows, delta_rows, 8) \
  KERNEL(DeltaCommit, delta_commit, 8) \
  KERNEL(RmsNorm, rms_norm, 1) \
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
