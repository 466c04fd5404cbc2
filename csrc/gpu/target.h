// A GPU as a target of kernels: the runtime that the JAX plugin has loaded, our code object
// in it, and launches on XLA's stream.
#pragma once

#include <string>

#include "kernels/all.h"
#include "xla/ffi/api/ffi.h"

namespace hipjax {

namespace ffi = xla::ffi;

enum class Runtime { kCuda, kHip };

// One launch: a kernel's variant, its grid, and its arguments as plain bytes.
struct Launch {
  KernelId kernel;
  int variant;
  int blocks;
  int threads;
  int shared_bytes;
  const void* arguments;
};
ffi::Error launch_on(Runtime runtime, void* stream, const Launch& launch);
// Of the device in use: its multiprocessors, at least 1, and the shared memory that one block
// may ask for, between 64 KiB (RDNA) and 227 KiB (sm_90).
int multiprocessors(Runtime runtime);
int shared_bytes(Runtime runtime);

template <Runtime kRuntime>
class Gpu {
 public:
  using Context = void*;
  static constexpr bool kGpu = true;
  static constexpr bool kAmd = kRuntime == Runtime::kHip;

  explicit Gpu(Context stream) : stream_(stream) {}

  template <class Arguments>
  ffi::Error launch(const Arguments& a) {
    if (a.blocks() == 0) return ffi::Error::Success();
    return launch_on(kRuntime, stream_,
                     {KernelOf<Arguments>::kId, a.variant(), a.blocks(), waves<Arguments>(a.variant()) * kLanes,
                      a.shared_bytes(), &a});
  }
  int parallel() const { return multiprocessors(kRuntime); }
  int shared_bytes() const { return hipjax::shared_bytes(kRuntime); }

 private:
  void* stream_;
};

using Cuda = Gpu<Runtime::kCuda>;
using Rocm = Gpu<Runtime::kHip>;

}  // namespace hipjax
