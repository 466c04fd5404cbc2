#include "cpu/target.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <memory>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace hipjax {
namespace {

// XLA flushes denormals on its threads. Kernels compute as IEEE says, on every target.
class IeeeArithmetic {
 public:
#if defined(__x86_64__)
  IeeeArithmetic() : before_(_mm_getcsr()) { _mm_setcsr(0x1f80); }
  ~IeeeArithmetic() { _mm_setcsr(before_); }

 private:
  unsigned before_;
#elif defined(__aarch64__)
  IeeeArithmetic() {
    asm volatile("mrs %0, fpcr" : "=r"(before_));
    asm volatile("msr fpcr, %0" ::"r"(uint64_t{0}));
  }
  ~IeeeArithmetic() { asm volatile("msr fpcr, %0" ::"r"(before_)); }

 private:
  uint64_t before_;
#endif
};

char* shared_memory(int bytes) {
  thread_local std::vector<char> memory;
  const size_t room = static_cast<size_t>(bytes) + 64;
  if (memory.size() < room) memory.resize(room);
  const auto at = reinterpret_cast<uintptr_t>(memory.data());
  return memory.data() + (64 - at % 64) % 64;
}

// One kernel's blocks, taken piece by piece by whichever thread is free.
struct Work {
  RunBlocks run;
  const void* arguments;
  int blocks;
  int piece;
  int shared_bytes;
  std::atomic<int> next{0};
  std::atomic<int> done{0};

  void help() {
    const int pieces = (blocks + piece - 1) / piece;
    int at = next.fetch_add(1);
    if (at >= pieces) return;
    const IeeeArithmetic ieee;
    char* shared = shared_memory(shared_bytes);
    for (; at < pieces; at = next.fetch_add(1)) {
      run(arguments, at * piece, std::min(blocks, (at + 1) * piece), shared);
      done.fetch_add(1, std::memory_order_release);
    }
  }
};

constexpr long kWorthAThread = 1 << 17;  // bytes of work; waking a thread takes microseconds
constexpr int kPiecesPerThread = 8;

const char* best_instruction_set() {
  const char* wish = std::getenv("HIPJAX_CPU");
  const std::string limit = wish ? wish : "";
#if defined(__x86_64__)
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") &&
                      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
                      __builtin_cpu_supports("avx512vl");
  if (avx512 && limit != "avx2" && limit != "portable") return "avx512";
  if (avx2 && limit != "portable") return "avx2";
#endif
  return "portable";
}

}  // namespace

const char* instruction_set() {
  static const char* const best = best_instruction_set();
  return best;
}

RunBlocks cpu_kernel(KernelId id, int variant) {
#if defined(__x86_64__)
  static const auto kernel = std::string(instruction_set()) == "avx512" ? avx512::kernel
                             : std::string(instruction_set()) == "avx2" ? avx2::kernel
                                                                        : portable::kernel;
  return kernel(id, variant);
#else
  return portable::kernel(id, variant);
#endif
}

void run_on_pool(ffi::ThreadPool& pool, RunBlocks run, const void* arguments, int blocks,
                 long block_cost, int shared_bytes) {
  const long cost = block_cost * blocks;
  const int threads = static_cast<int>(std::min<long>(pool.num_threads() + 1, cost / kWorthAThread));
  if (threads <= 1 || blocks <= 1) {
    const IeeeArithmetic ieee;
    run(arguments, 0, blocks, shared_memory(shared_bytes));
    return;
  }
  auto work = std::make_shared<Work>();
  work->run = run;
  work->arguments = arguments;
  work->blocks = blocks;
  work->piece = std::max(1, blocks / (threads * kPiecesPerThread));
  work->shared_bytes = shared_bytes;
  for (int i = 1; i < threads; ++i) {
    pool.Schedule([work] { work->help(); });
  }
  work->help();
  // A late thread finds no piece left and touches nothing but `work`.
  const int pieces = (blocks + work->piece - 1) / work->piece;
  while (work->done.load(std::memory_order_acquire) < pieces) std::this_thread::yield();
}

}  // namespace hipjax
