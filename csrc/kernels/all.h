// Every kernel: the type of its arguments, its own name, and its number of variants.
#pragma once

#include "kernels/argmax.h"
#include "kernels/hyper.h"
#include "kernels/norm.h"
#include "kernels/ple.h"
#include "kernels/row_product.h"

#define HIPJAX_KERNELS(KERNEL) \
  KERNEL(RmsNorm, rms_norm, 1) \
  KERNEL(RowProduct, row_product, 32) \
  KERNEL(HyperMixUp, hyper_mix_up, 16) \
  KERNEL(HyperCombine, hyper_combine, 1) \
  KERNEL(PleGate, ple_gate, 1) \
  KERNEL(PleOutput, ple_output, 8) \
  KERNEL(Argmax, argmax, 1)

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
