#include "gpu/target.h"

#include <dlfcn.h>
#include <link.h>

#include <cstring>
#include <map>
#include <utility>
#include <vector>

#include "gpu/code_objects.h"

// CUDA's driver and HIP's runtime have the same calls under other names. Only plain C types
// cross: a status is an int, 0 for success; contexts, modules and functions are pointers.
namespace hipjax {
namespace {

struct Api {
  int (*count)(int*);  // both report how many devices there are, numbered from 0
  int (*attribute)(int*, int, int);
  int (*load)(void**, const void*);
  int (*function)(void**, void*, const char*);
  int (*launch)(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void*,
                void**, void**);
  // CUDA works in the context that is current, HIP on the device that is.
  int (*cuda_init)(unsigned);
  int (*cuda_device)(int*, int);
  int (*cuda_function_attribute)(int*, int, void*);
  int (*cuda_allow)(void*, int, int);
  int (*cuda_retain)(void**, int);
  int (*cuda_push)(void*);
  int (*cuda_pop)(void**);
  int (*cuda_current)(void**);
  int (*hip_set)(int);
  int (*hip_current)(int*);
  int (*hip_properties)(void*, int);
};

// CUdevice_attribute, CUfunction_attribute and hipDeviceAttribute_t of their headers.
constexpr int kCudaMultiprocessors = 16;
constexpr int kCudaMajor = 75;
constexpr int kCudaMinor = 76;
constexpr int kCudaSharedOptin = 97;
constexpr int kCudaStaticShared = 1;
constexpr int kCudaMaxDynamicShared = 8;
constexpr int kHipMultiprocessors = 63;  // on RDNA, pairs of compute units

// One device of a runtime, with all kernels loaded.
struct Device {
  std::string architecture;
  std::string trouble;  // why it cannot be used; empty if it can
  int multiprocessors = 1;
  int shared_bytes = 64 * 1024;  // of one block at most: an RDNA workgroup's, or as CUDA says
  std::vector<void*> functions;
};

struct Opened {
  Api api{};
  std::string trouble;
  std::map<void*, Device> devices;  // by CUDA context, or by HIP ordinal
};

std::vector<int> first_function() {
  std::vector<int> first;
  int n = 0;
#define HIPJAX_FIRST(Type, name, variants) \
  first.push_back(n);                      \
  n += variants;
  HIPJAX_KERNELS(HIPJAX_FIRST)
#undef HIPJAX_FIRST
  return first;
}

std::vector<std::string> function_names() {
  std::vector<std::string> names;
#define HIPJAX_NAMES(Type, name, variants) \
  for (int i = 0; i < variants; ++i) names.push_back(#name "_" + std::to_string(i));
  HIPJAX_KERNELS(HIPJAX_NAMES)
#undef HIPJAX_NAMES
  return names;
}

// The library of that name which is in this process, whatever its version: the JAX plugin has
// loaded one, and a second one would know nothing of its streams. If there is none, the first
// of `versions` that the system finds.
void* runtime_library(const char* name, const std::vector<const char*>& versions) {
  std::pair<std::string, std::string> search{name, ""};
  dl_iterate_phdr(
      [](dl_phdr_info* info, size_t, void* data) {
        auto& [wanted, found] = *static_cast<std::pair<std::string, std::string>*>(data);
        const char* slash = std::strrchr(info->dlpi_name, '/');
        const std::string file = slash ? slash + 1 : info->dlpi_name;
        if (file.compare(0, wanted.size(), wanted) != 0) return 0;
        found = info->dlpi_name;
        return 1;
      },
      &search);
  if (!search.second.empty()) return dlopen(search.second.c_str(), RTLD_NOW | RTLD_NOLOAD);
  for (const char* version : versions) {
    if (void* library = dlopen(version, RTLD_NOW)) return library;
  }
  return nullptr;
}

template <class Fn>
bool find(void* library, Fn& to, const char* name) {
  to = reinterpret_cast<Fn>(dlsym(library, name));
  return to != nullptr;
}

bool find_cuda(void* library, Api& api) {
  return find(library, api.count, "cuDeviceGetCount") &&
         find(library, api.attribute, "cuDeviceGetAttribute") &&
         find(library, api.load, "cuModuleLoadData") &&
         find(library, api.function, "cuModuleGetFunction") &&
         find(library, api.launch, "cuLaunchKernel") && find(library, api.cuda_init, "cuInit") &&
         find(library, api.cuda_device, "cuDeviceGet") &&
         find(library, api.cuda_function_attribute, "cuFuncGetAttribute") &&
         find(library, api.cuda_allow, "cuFuncSetAttribute") &&
         find(library, api.cuda_retain, "cuDevicePrimaryCtxRetain") &&
         find(library, api.cuda_push, "cuCtxPushCurrent_v2") &&
         find(library, api.cuda_pop, "cuCtxPopCurrent_v2") &&
         find(library, api.cuda_current, "cuCtxGetCurrent");
}

bool find_hip(void* library, Api& api) {
  return find(library, api.count, "hipGetDeviceCount") &&
         find(library, api.attribute, "hipDeviceGetAttribute") &&
         find(library, api.load, "hipModuleLoadData") &&
         find(library, api.function, "hipModuleGetFunction") &&
         find(library, api.launch, "hipModuleLaunchKernel") &&
         find(library, api.hip_set, "hipSetDevice") &&
         find(library, api.hip_current, "hipGetDevice") &&
         (find(library, api.hip_properties, "hipGetDevicePropertiesR0600") ||
          find(library, api.hip_properties, "hipGetDeviceProperties"));
}

std::string failed(const char* what, int status) {
  return std::string(what) + " failed with status " + std::to_string(status);
}

// The code object of an architecture, or null.
const char* code_for(const std::string& architecture) {
  size_t count;
  const CodeObject* all = code_objects(count);
  for (size_t i = 0; i < count; ++i) {
    if (architecture == all[i].architecture) return all[i].begin;
  }
  return nullptr;
}

void load_kernels(const Api& api, const char* code, Device& device) {
  void* module;
  if (const int status = api.load(&module, code)) {
    device.trouble = failed("loading the kernels", status);
    return;
  }
  for (const std::string& name : function_names()) {
    void* function;
    if (const int status = api.function(&function, module, name.c_str())) {
      device.trouble = failed(("finding the kernel " + name).c_str(), status);
      return;
    }
    device.functions.push_back(function);
  }
}

// CUDA gives a block more than 48 KiB of shared memory only if that was asked for, and no more
// than the device's limit, of which the function's own static part is a share.
void allow_shared(const Api& api, Device& device) {
  for (void* function : device.functions) {
    int fixed = 0;
    api.cuda_function_attribute(&fixed, kCudaStaticShared, function);
    if (const int status = api.cuda_allow(function, kCudaMaxDynamicShared,
                                          device.shared_bytes - fixed)) {
      device.trouble = failed("asking for shared memory", status);
      return;
    }
  }
}

void open_cuda(Opened& opened) {
  const Api& api = opened.api;
  int count = 0;
  if (const int status = api.cuda_init(0)) {
    opened.trouble = failed("cuInit", status);
    return;
  }
  if (const int status = api.count(&count)) opened.trouble = failed("cuDeviceGetCount", status);
  for (int ordinal = 0; ordinal < count; ++ordinal) {
    int handle;
    void* context;
    int status = api.cuda_device(&handle, ordinal);
    // The primary context, which is JAX's. It is kept until the process ends.
    if (!status) status = api.cuda_retain(&context, handle);
    if (status) {
      opened.trouble = failed("cuDevicePrimaryCtxRetain", status);
      return;
    }
    Device& device = opened.devices[context];
    int major = 0, minor = 0;
    api.attribute(&major, kCudaMajor, handle);
    api.attribute(&minor, kCudaMinor, handle);
    api.attribute(&device.shared_bytes, kCudaSharedOptin, handle);
    api.attribute(&device.multiprocessors, kCudaMultiprocessors, handle);
    device.architecture = "sm_" + std::to_string(major) + std::to_string(minor);
    const char* code = code_for("ptx");
    if (!code) {
      device.trouble = missing_code();
    } else if (major < 8) {
      device.trouble = "it is older than sm_80, for which there is code";
    } else if ((status = api.cuda_push(context))) {
      device.trouble = failed("cuCtxPushCurrent", status);
    } else {
      load_kernels(api, code, device);
      if (device.trouble.empty()) allow_shared(api, device);
      api.cuda_pop(&context);
    }
  }
}

// The properties are a large structure whose layout changes; the architecture is the one
// string in it that begins with "gfx".
std::string hip_architecture(const Api& api, int ordinal) {
  std::vector<char> properties(1 << 14);
  if (api.hip_properties(properties.data(), ordinal)) return "an unknown architecture";
  for (size_t i = 0; i + 4 < properties.size(); ++i) {
    if (std::memcmp(&properties[i], "gfx", 3) == 0) {
      const std::string whole(&properties[i], strnlen(&properties[i], properties.size() - i));
      return whole.substr(0, whole.find(':'));
    }
  }
  return "an unknown architecture";
}

void open_hip(Opened& opened) {
  const Api& api = opened.api;
  int count = 0, before = 0;
  if (const int status = api.count(&count)) opened.trouble = failed("hipGetDeviceCount", status);
  api.hip_current(&before);
  for (int ordinal = 0; ordinal < count; ++ordinal) {
    Device& device = opened.devices[reinterpret_cast<void*>(static_cast<intptr_t>(ordinal))];
    device.architecture = hip_architecture(api, ordinal);
    api.attribute(&device.multiprocessors, kHipMultiprocessors, ordinal);
    const char* code = code_for(device.architecture);
    int status = 0;
    if (!code) {
      device.trouble = *missing_code() ? missing_code() : "there is no code for it";
    } else if ((status = api.hip_set(ordinal))) {
      device.trouble = failed("hipSetDevice", status);
    } else {
      load_kernels(api, code, device);
    }
  }
  api.hip_set(before);
}

Opened open(Runtime runtime) {
  Opened opened;
  const bool cuda = runtime == Runtime::kCuda;
  void* library = cuda ? runtime_library("libcuda.so", {"libcuda.so.1"})
                       : runtime_library("libamdhip64.so",
                                         {"libamdhip64.so.7", "libamdhip64.so.6", "libamdhip64.so"});
  if (!library) {
    opened.trouble = cuda ? "CUDA's driver, libcuda.so.1, was not found"
                          : "HIP's runtime, libamdhip64.so, was not found";
  } else if (cuda ? !find_cuda(library, opened.api) : !find_hip(library, opened.api)) {
    const char* said = dlerror();
    opened.trouble = std::string("the runtime lacks a function: ") + (said ? said : "");
  } else if (cuda) {
    open_cuda(opened);
  } else {
    open_hip(opened);
  }
  if (opened.trouble.empty() && opened.devices.empty()) opened.trouble = "there is no device";
  return opened;
}

// Opened once; everything that takes time or memory happens here and not in a launch.
const Opened& opened(Runtime runtime) {
  if (runtime == Runtime::kCuda) {
    static const Opened cuda = open(runtime);
    return cuda;
  }
  static const Opened hip = open(runtime);
  return hip;
}

const Device* current_device(Runtime runtime) {
  const Opened& all = opened(runtime);
  if (!all.trouble.empty()) return nullptr;
  void* key = nullptr;
  if (runtime == Runtime::kCuda) {
    all.api.cuda_current(&key);
  } else {
    int ordinal = 0;
    all.api.hip_current(&ordinal);
    key = reinterpret_cast<void*>(static_cast<intptr_t>(ordinal));
  }
  const auto found = all.devices.find(key);
  return found == all.devices.end() ? nullptr : &found->second;
}

}  // namespace

ffi::Error launch_on(Runtime runtime, void* stream, const Launch& l) {
  const Device* device = current_device(runtime);
  if (!device || !device->trouble.empty()) {
    return ffi::Error::Internal("hipjax cannot launch here: " +
                                (device ? device->trouble : opened(runtime).trouble));
  }
  static const std::vector<int> first = first_function();
  void* function = device->functions[first[static_cast<int>(l.kernel)] + l.variant];
  void* parameters[] = {const_cast<void*>(l.arguments)};
  const int status = opened(runtime).api.launch(function, l.blocks, 1, 1, l.threads, 1, 1,
                                                l.shared_bytes, stream, parameters, nullptr);
  if (status) {
    static const std::vector<std::string> names = function_names();
    return ffi::Error::Internal(failed(
        ("launching " + names[first[static_cast<int>(l.kernel)] + l.variant]).c_str(), status));
  }
  return ffi::Error::Success();
}

int multiprocessors(Runtime runtime) {
  const Device* device = current_device(runtime);
  return device ? device->multiprocessors : 1;
}

int shared_bytes(Runtime runtime) {
  const Device* device = current_device(runtime);
  return device ? device->shared_bytes : 48 * 1024;
}

}  // namespace hipjax

#define HIPJAX_EXPORT extern "C" __attribute__((visibility("default")))

// Architectures for which there is code, separated by spaces.
HIPJAX_EXPORT const char* hipjax_code_objects() {
  static const std::string names = [] {
    std::string all;
    size_t count;
    const hipjax::CodeObject* objects = hipjax::code_objects(count);
    for (size_t i = 0; i < count; ++i) all += (i ? " " : "") + std::string(objects[i].architecture);
    return all;
  }();
  return names.c_str();
}

HIPJAX_EXPORT const char* hipjax_missing_code() { return hipjax::missing_code(); }

// Opens a runtime ("cuda" or "rocm") and loads the kernels on all its devices. Writes a line
// for each device, "architecture" or "architecture: why it cannot be used", and for the whole
// runtime why it cannot. Returns 1 if every device can be used.
HIPJAX_EXPORT int hipjax_open_gpu(const char* platform, char* report, size_t size) {
  const bool cuda = std::strcmp(platform, "cuda") == 0;
  const hipjax::Opened& all = hipjax::opened(cuda ? hipjax::Runtime::kCuda : hipjax::Runtime::kHip);
  std::string said = all.trouble.empty() ? "" : all.trouble + "\n";
  bool good = all.trouble.empty();
  for (const auto& [key, device] : all.devices) {
    good = good && device.trouble.empty();
    said += device.architecture + (device.trouble.empty() ? "" : ": " + device.trouble) + "\n";
  }
  std::strncpy(report, said.c_str(), size - 1);
  report[size - 1] = 0;
  return good;
}
