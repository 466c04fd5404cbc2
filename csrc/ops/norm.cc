#include "kernels/norm.h"

#include "ops/call.h"

namespace hipjax {
namespace {

// x [..., width], weight [parts * width] -> [..., width]
template <class Target>
ffi::Error rms_norm(Target& target, const Call& call) {
  const auto x = call.operand(0);
  const auto weight = call.operand(1);
  RmsNorm a{};
  a.width = static_cast<int>(call.dim(x, -1));
  a.groups = static_cast<int>(x.element_count()) / a.width;
  a.parts = static_cast<int>(weight.element_count()) / a.width;
  a.x = call.floats(0, static_cast<int64_t>(a.groups) * a.width);
  a.weight = call.vector(1, static_cast<int64_t>(a.parts) * a.width);
  a.out = call.floats_out(0, static_cast<int64_t>(a.groups) * a.width);
  a.eps = call.real("eps");
  return target.launch(a);
}

}  // namespace

HIPJAX_OPERATION(rms_norm, rms_norm);

}  // namespace hipjax
