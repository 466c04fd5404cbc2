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

// The operations, separated by spaces; each has handlers hipjax_cpu_NAME and so on.
extern "C" __attribute__((visibility("default"))) const char* hipjax_operations() { return hipjax::names().c_str(); }
extern "C" __attribute__((visibility("default"))) const char* hipjax_cpu_instruction_set() { return hipjax::instruction_set(); }
