#include "ops/call.h"

namespace hipjax {
namespace {

std::string& names() {
  static std::string all;
  return all;
}

}  // namespace

Listed::Listed(const char* name) { names() += (names().empty() ? "" : " ") + std::string(name); }

}  // namespace hipjax

#define HIPJAX_EXPORT extern "C" __attribute__((visibility("default")))

// The operations, separated by spaces; each has handlers hipjax_cpu_NAME and so on.
HIPJAX_EXPORT const char* hipjax_operations() { return hipjax::names().c_str(); }
HIPJAX_EXPORT const char* hipjax_cpu_instruction_set() { return hipjax::instruction_set(); }
