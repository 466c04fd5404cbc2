// All kernels for one instruction set. Compiled several times, see CMakeLists.txt.
#include <utility>

#include "lanes.h"
#include "cpu/table.h"
#include "kernels/all.h"

namespace hipjax::HIPJAX_TARGET {
namespace {

template <class Arguments, int kVariant>
void run_blocks(const void* arguments, int begin, int end, char* shared) {
  for (int block = begin; block < end; ++block) {
    run<kVariant>(*static_cast<const Arguments*>(arguments), block, Block<waves<Arguments>(kVariant)>{shared});
  }
}

template <class Arguments, int... kVariants>
RunBlocks variant(int which, std::integer_sequence<int, kVariants...>) {
  static constexpr RunBlocks all[] = {run_blocks<Arguments, kVariants>...};
  return all[which];
}

}  // namespace

RunBlocks kernel(KernelId id, int which) {
  switch (id) {
#define HIPJAX_CASE(Type, name, variants) \
  case KernelId::Type:          \
    return variant<Type>(which, std::make_integer_sequence<int, Type::kVariants>());
    HIPJAX_KERNELS(HIPJAX_CASE)
#undef HIPJAX_CASE
  }
  return nullptr;
}

}  // namespace hipjax::HIPJAX_TARGET
