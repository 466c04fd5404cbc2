// The kernels of each instruction set that this library was built for.
#pragma once

#include "kernels/all.h"

namespace hipjax {

// Runs blocks [begin, end) of a kernel; `shared` is the block's memory.
using RunBlocks = void (*)(const void* arguments, int begin, int end, char* shared);

namespace portable {
RunBlocks kernel(KernelId id, int variant);
}
#if defined(__x86_64__)
namespace avx2 {
RunBlocks kernel(KernelId id, int variant);
}
namespace avx512 {
RunBlocks kernel(KernelId id, int variant);
}
#endif

}  // namespace hipjax
