// Entry points of all kernels, NAME_VARIANT. Compiled once per device architecture.
#include "lanes.h"
#include "kernels/all.h"

namespace hipjax::gpu {

// Memory that the waves of a block share, as much as the launch asks for.
extern "C" __attribute__((shared)) char hipjax_shared[];

// The threads of a block, on which it depends how many registers one may have. AMD heeds only its
// own attribute: HIP's headers, which are not here, turn __launch_bounds__ into it.
#if defined(__AMDGCN__)
#define HIPJAX_THREADS(threads, blocks) amdgpu_flat_work_group_size(threads, threads)
#else
#define HIPJAX_THREADS(threads, blocks) launch_bounds(threads, blocks)
#endif
#define HIPJAX_ENTRY(Type, name, variant)                                                     \
  extern "C" __attribute__((                                                                  \
      global, HIPJAX_THREADS(waves<Type>(variant) * kLanes, min_blocks<Type>(variant))))      \
  void name##_##variant(Type arguments) {                                                     \
    run<variant>(arguments, block_index(), Block<waves<Type>(variant)>{hipjax_shared});       \
  }
#define HIPJAX_2(T, n, a, b) HIPJAX_ENTRY(T, n, a) HIPJAX_ENTRY(T, n, b)
#define HIPJAX_4(T, n, a, b, c, d) HIPJAX_2(T, n, a, b) HIPJAX_2(T, n, c, d)
#define HIPJAX_8(T, n, a, b, c, d, e, f, g, h) HIPJAX_4(T, n, a, b, c, d) HIPJAX_4(T, n, e, f, g, h)
#define HIPJAX_ENTRIES_1(T, n) HIPJAX_ENTRY(T, n, 0)
#define HIPJAX_ENTRIES_2(T, n) HIPJAX_2(T, n, 0, 1)
#define HIPJAX_ENTRIES_4(T, n) HIPJAX_4(T, n, 0, 1, 2, 3)
#define HIPJAX_ENTRIES_8(T, n) HIPJAX_8(T, n, 0, 1, 2, 3, 4, 5, 6, 7)
#define HIPJAX_ENTRIES_16(T, n) HIPJAX_ENTRIES_8(T, n) HIPJAX_8(T, n, 8, 9, 10, 11, 12, 13, 14, 15)
#define HIPJAX_ENTRIES_32(T, n)                       \
  HIPJAX_ENTRIES_16(T, n)                             \
  HIPJAX_8(T, n, 16, 17, 18, 19, 20, 21, 22, 23)      \
  HIPJAX_8(T, n, 24, 25, 26, 27, 28, 29, 30, 31)
#define HIPJAX_ENTRIES_40(T, n) HIPJAX_ENTRIES_32(T, n) HIPJAX_8(T, n, 32, 33, 34, 35, 36, 37, 38, 39)

#define HIPJAX_ALL(Type, name, variants) HIPJAX_ENTRIES_##variants(Type, name)
HIPJAX_KERNELS(HIPJAX_ALL)

}  // namespace hipjax::gpu
