// The CPU as a target of kernels: instruction set, threads, rounding mode.
#pragma once

#include <string>

#include "cpu/table.h"
#include "xla/ffi/api/ffi.h"

namespace hipjax {

namespace ffi = xla::ffi;

// "portable", "avx2" or "avx512": the best that both this processor and the environment
// variable HIPJAX_CPU allow.
const char* instruction_set();
RunBlocks cpu_kernel(KernelId id, int variant);
void run_on_pool(ffi::ThreadPool& pool, RunBlocks run, const void* arguments, int blocks,
                 long block_cost, int shared_bytes);

class Cpu {
 public:
  using Context = ffi::ThreadPool;
  static constexpr bool kGpu = false;

  explicit Cpu(Context& pool) : pool_(pool) {}

  template <class Arguments>
  ffi::Error launch(const Arguments& a) {
    run_on_pool(pool_, cpu_kernel(KernelOf<Arguments>::kId, a.variant()), &a, a.blocks(),
                a.block_cost(), a.shared_bytes());
    return ffi::Error::Success();
  }
  // How many blocks run at once, for kernels whose blocks take turns.
  int parallel() const { return static_cast<int>(pool_.num_threads()) + 1; }

 private:
  ffi::ThreadPool& pool_;
};

}  // namespace hipjax
