#include "kernels/math_probe.h"

#include "ops/call.h"

namespace hipjax {
namespace {

// x [...] -> [...], for tests of math.h
template <class Target>
ffi::Error math_probe(Target& target, const Call& call) {
  const int function = call.integer("function");
  require(function >= 0 && function < static_cast<int>(MathFunction::kCount),
          "math_probe: there is no function " + std::to_string(function));
  MathProbe a{};
  a.count = static_cast<int64_t>(call.operand(0).element_count());
  a.x = call.floats(0, a.count);
  a.out = call.floats_out(0, a.count);
  a.function = static_cast<MathFunction>(function);
  a.uniform = call.integer("uniform") != 0;
  return target.launch(a);
}

}  // namespace

HIPJAX_OPERATION(math_probe, math_probe);

}  // namespace hipjax
