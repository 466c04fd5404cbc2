// A HIP runtime and a CUDA driver that have devices and no hardware. They write what is asked of
// them to the file $FAKE_LOG, one call a line. Built twice, see support.py.
//
// $FAKE_DEVICES: architectures, separated by commas: "gfx1151,gfx1201", or "80,90".
// $FAKE_FAILS: "load", or the name of the kernel that is not found.
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

namespace {

int current = 0;
uintptr_t functions = 0;

std::vector<std::string> devices() {
  std::vector<std::string> all{""};
  for (const char* c = std::getenv("FAKE_DEVICES"); c && *c; ++c) {
    if (*c == ',') {
      all.emplace_back();
    } else {
      all.back() += *c;
    }
  }
  if (all.back().empty()) all.pop_back();
  return all;
}

void note(const char* format, ...) {
  FILE* log = std::fopen(std::getenv("FAKE_LOG"), "a");
  va_list rest;
  va_start(rest, format);
  std::vfprintf(log, format, rest);
  va_end(rest);
  std::fputc('\n', log);
  std::fclose(log);
}

std::string fails() {
  const char* said = std::getenv("FAKE_FAILS");
  return said ? said : "";
}

int count(int* n) {
  *n = static_cast<int>(devices().size());
  return 0;
}

// An AMD code object names its architecture in the flags of its ELF header.
int load(void** module, const void* image) {
  const auto* bytes = static_cast<const unsigned char*>(image);
  if (std::memcmp(bytes, "\177ELF", 4) == 0) {
    uint32_t flags;
    std::memcpy(&flags, bytes + 48, 4);
    note("load device=%d elf=%02x", current, flags & 0xff);
  } else {
    note("load device=%d text=%.12s length=%zu", current, strstr((const char*)image, ".version"),
         std::strlen(static_cast<const char*>(image)));
  }
  *module = reinterpret_cast<void*>(uintptr_t{16});
  return fails() == "load" ? 209 : 0;
}

int function(void** found, void*, const char* name) {
  note("function device=%d %s", current, name);
  *found = reinterpret_cast<void*>(++functions);
  return fails() == name ? 500 : 0;
}

int launch(void* function, unsigned x, unsigned y, unsigned z, unsigned threads, unsigned, unsigned,
           unsigned shared, void* stream, void** parameters, void** extra) {
  note("launch device=%d function=%d grid=%u,%u,%u threads=%u shared=%u stream=%d parameters=%d "
       "extra=%d", current, static_cast<int>(reinterpret_cast<uintptr_t>(function)), x, y, z, threads,
       shared, static_cast<int>(reinterpret_cast<uintptr_t>(stream)), parameters[0] != nullptr,
       extra != nullptr);
  return 0;
}

}  // namespace

extern "C" {
#ifdef FAKE_HIP
int hipGetDeviceCount(int* n) { return count(n); }
int hipDeviceGetAttribute(int* value, int attribute, int device) {
  *value = attribute == 63 ? 20 + device : -1;
  return 0;
}
int hipGetDevice(int* device) { return *device = current, 0; }
int hipSetDevice(int device) { return current = device, 0; }
int hipModuleLoadData(void** module, const void* image) { return load(module, image); }
int hipModuleGetFunction(void** f, void* module, const char* name) { return function(f, module, name); }
int hipModuleLaunchKernel(void* f, unsigned a, unsigned b, unsigned c, unsigned d, unsigned e,
                          unsigned g, unsigned shared, void* stream, void** p, void** extra) {
  return launch(f, a, b, c, d, e, g, shared, stream, p, extra);
}
// The name comes first and the architecture somewhere later, as in the real structure.
int hipGetDevicePropertiesR0600(void* properties, int device) {
  std::memset(properties, 0, 1472);
  std::strcpy(static_cast<char*>(properties), "AMD Radeon Graphics");
  const std::string whole = devices()[device] + ":sramecc-:xnack-";
  std::strcpy(static_cast<char*>(properties) + 1160, whole.c_str());
  return 0;
}
#else
namespace {
bool ready = false;
uintptr_t contexts[8] = {0};
}  // namespace
int cuInit(unsigned) { return ready = true, 0; }
int cuDeviceGetCount(int* n) { return ready ? count(n) : 3; }
int cuDeviceGet(int* device, int ordinal) { return *device = ordinal + 100, 0; }
int cuDeviceGetAttribute(int* value, int attribute, int device) {
  const int capability = std::atoi(devices()[device - 100].c_str());
  switch (attribute) {
    case 16: *value = 132; return 0;
    case 75: *value = capability / 10; return 0;
    case 76: *value = capability % 10; return 0;
    case 97: *value = capability == 90 ? 232448 : 101376; return 0;
  }
  return 1;
}
int cuDevicePrimaryCtxRetain(void** context, int device) {
  *context = &contexts[device - 100];
  return 0;
}
int cuCtxPushCurrent_v2(void* context) {
  return current = static_cast<int>(static_cast<uintptr_t*>(context) - contexts), 0;
}
int cuCtxPopCurrent_v2(void** context) { return *context = &contexts[current], current = 0, 0; }
int cuCtxGetCurrent(void** context) { return *context = &contexts[current], 0; }
int cuModuleLoadData(void** module, const void* image) { return load(module, image); }
int cuModuleGetFunction(void** f, void* module, const char* name) { return function(f, module, name); }
int cuFuncGetAttribute(int* value, int attribute, void*) {
  return *value = attribute == 1 ? 1024 : -1, 0;  // static shared memory
}
int cuFuncSetAttribute(void*, int attribute, int value) {
  note("allow device=%d attribute=%d bytes=%d", current, attribute, value);
  const int capability = std::atoi(devices()[current].c_str());
  return value + 1024 > (capability == 90 ? 232448 : 101376);
}
int cuLaunchKernel(void* f, unsigned a, unsigned b, unsigned c, unsigned d, unsigned e, unsigned g,
                   unsigned shared, void* stream, void** p, void** extra) {
  return launch(f, a, b, c, d, e, g, shared, stream, p, extra);
}
#endif
}
