// Launches on the second device of a runtime, through the code that every handler uses. Its
// two code objects are these; the fake runtime does not look into them.
#include <dlfcn.h>

#include <cstdio>
#include <cstring>

#include "gpu/code_objects.h"
#include "gpu/target.h"

extern "C" int hipjax_open_gpu(const char*, char*, size_t);

namespace hipjax {

const CodeObject* code_objects(size_t& count) {
  static const char elf[64] = "\177ELF", text[] = "// .version 7.0";
  static const CodeObject all[] = {{"gfx1151", elf, elf + 64}, {"ptx", text, text + sizeof(text)}};
  count = 2;
  return all;
}
const char* missing_code() { return ""; }

template <Runtime kRuntime>
bool launched() {
  RmsNorm a{};
  a.width = 64;
  a.groups = 3;
  a.parts = 1;
  const ffi::Error error = Gpu<kRuntime>(reinterpret_cast<void*>(7)).launch(a);
  if (error.failure()) std::printf("%s\n", error.message().c_str());
  std::printf("blocks %d threads %d shared %d multiprocessors %d\n", a.blocks(),
              RmsNorm::kWaves * kLanes, a.shared_bytes(),
              Gpu<kRuntime>(nullptr).parallel());
  RmsNorm none{};
  none.width = none.parts = 1;
  return error.success() && Gpu<kRuntime>(nullptr).launch(none).success();
}

}  // namespace hipjax

int main(int, char** arguments) {
  char report[256];
  const bool cuda = std::strcmp(arguments[1], "cuda") == 0;
  hipjax_open_gpu(arguments[1], report, sizeof(report));
  std::printf("%s", report);
  void* runtime = dlopen(cuda ? "libcuda.so.1" : "libamdhip64.so.7", RTLD_NOW);
  if (cuda) {
    void* context = nullptr;
    reinterpret_cast<int (*)(void**, int)>(dlsym(runtime, "cuDevicePrimaryCtxRetain"))(&context, 101);
    reinterpret_cast<int (*)(void*)>(dlsym(runtime, "cuCtxPushCurrent_v2"))(context);
    return !hipjax::launched<hipjax::Runtime::kCuda>();
  }
  reinterpret_cast<int (*)(int)>(dlsym(runtime, "hipSetDevice"))(1);
  return !hipjax::launched<hipjax::Runtime::kHip>();
}
