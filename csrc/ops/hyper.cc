#include "kernels/hyper.h"

#include <algorithm>

#include "ops/call.h"

namespace hipjax {
namespace {

// low [rows, depth], normed [rows, streams, hidden], up [streams * hidden, depth]
// -> [rows, hidden]
template <class Target>
ffi::Error hyper_mix_up(Target& target, const Call& call) {
  const auto normed = call.operand(1);
  HyperMixUp a{};
  a.depth = static_cast<int>(call.dim(call.operand(0), -1));
  a.hidden = static_cast<int>(call.dim(normed, -1));
  a.streams = static_cast<int>(call.dim(normed, -2));
  require(a.depth >= 1 && a.hidden >= 1 && a.streams >= 1, "hyper_mix_up: an axis is empty");
  const int64_t width = static_cast<int64_t>(a.streams) * a.hidden;
  const int rows = static_cast<int>(normed.element_count() / width);
  const float* low = call.floats(0, static_cast<int64_t>(rows) * a.depth);
  const float* streams = call.floats(1, rows * width);
  const Vector up = call.vector(2, width * a.depth);
  float* out = call.floats_out(0, static_cast<int64_t>(rows) * a.hidden);
  a.up = up.data;
  a.bf16 = up.bf16;
  // Rows go in tiles whose staged rows leave room in 48 KiB of shared memory.
  a.rows = 1;
  const int most = std::clamp(48 * 1024 / a.shared_bytes(), 1, kMaxRows);
  for (int from = 0; from < rows; from += most) {
    a.rows = std::min(most, rows - from);
    a.low = low + static_cast<int64_t>(from) * a.depth;
    a.normed = streams + from * width;
    a.out = out + static_cast<int64_t>(from) * a.hidden;
    const ffi::Error error = target.launch(a);
    if (error.failure()) return error;
  }
  return ffi::Error::Success();
}

// streams [rows, count, hidden], branch [rows, hidden], strength [rows, count]
// -> [rows, count, hidden]
template <class Target>
ffi::Error hyper_combine(Target& target, const Call& call) {
  const auto streams = call.operand(0);
  HyperCombine a{};
  a.hidden = static_cast<int>(call.dim(streams, -1));
  a.count = static_cast<int>(call.dim(streams, -2));
  require(a.hidden >= 1 && a.count >= 1, "hyper_combine: an axis is empty");
  const int64_t all = static_cast<int64_t>(streams.element_count());
  a.rows = static_cast<int>(all / a.count / a.hidden);
  a.streams = call.floats(0, all);
  a.branch = call.floats(1, static_cast<int64_t>(a.rows) * a.hidden);
  a.strength = call.floats(2, static_cast<int64_t>(a.rows) * a.count);
  a.out = call.floats_out(0, all);
  return target.launch(a);
}

}  // namespace

HIPJAX_OPERATION(hyper_mix_up, hyper_mix_up);
HIPJAX_OPERATION(hyper_combine, hyper_combine);

}  // namespace hipjax
