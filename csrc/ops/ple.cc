#include "kernels/ple.h"

#include <algorithm>

#include "ops/call.h"

namespace hipjax {
namespace {

// key [rows, count, hidden], streams [rows, count, hidden], value [rows, hidden], three norm
// weights [count * hidden], the table's scale if it has one -> gated, normed, shaped as key.
template <class Target>
ffi::Error ple_gate(Target& target, const Call& call) {
  const auto key = call.operand(0);
  PleGate a{};
  a.hidden = static_cast<int>(call.dim(key, -1));
  a.count = static_cast<int>(call.dim(key, -2));
  require(a.hidden >= 1 && a.count >= 1, "ple_gate: an axis is empty");
  const int64_t all = static_cast<int64_t>(key.element_count());
  const int64_t width = static_cast<int64_t>(a.count) * a.hidden;
  a.rows = static_cast<int>(all / width);
  a.key = call.floats(0, all);
  a.streams = call.floats(1, all);
  a.value = call.floats(2, static_cast<int64_t>(a.rows) * a.hidden);
  a.norm_key = call.vector(3, width);
  a.norm_query = call.vector(4, width);
  a.norm_conv = call.vector(5, width);
  if (call.operands() > 6) a.scale = call.vector(6, 1);
  a.gated = call.floats_out(0, all);
  a.normed = call.floats_out(1, all);
  a.eps = call.real("eps");
  return target.launch(a);
}

// streams [batch, rows, width], gated [batch, rows, width], columns [batch, reach + rows, width],
// weight [width, taps] -> [batch, rows, width]
template <class Target>
ffi::Error ple_output(Target& target, const Call& call) {
  const auto streams = call.operand(0);
  PleOutput a{};
  a.width = static_cast<int>(call.dim(streams, -1));
  a.all_rows = static_cast<int>(call.dim(streams, -2));
  a.taps = static_cast<int>(call.dim(call.operand(3), -1));
  a.dilation = call.integer("dilation");
  require(a.width >= 1 && a.all_rows >= 1, "ple_output: an axis is empty");
  require(a.taps >= 1 && a.dilation >= 1, "ple_output: taps and dilation are at least 1");
  const int64_t all = static_cast<int64_t>(streams.element_count());
  a.batch = static_cast<int>(all / a.width / a.all_rows);
  const int64_t columns = static_cast<int64_t>(a.taps - 1) * a.dilation + a.all_rows;
  a.streams = call.floats(0, all);
  a.gated = call.floats(1, all);
  a.columns = call.floats(2, a.batch * columns * a.width);
  a.weight = call.vector(3, static_cast<int64_t>(a.width) * a.taps);
  a.out = call.floats_out(0, all);
  for (a.from = 0; a.from < a.all_rows; a.from += kMaxRows) {
    a.rows = std::min(kMaxRows, a.all_rows - a.from);
    const ffi::Error error = target.launch(a);
    if (error.failure()) return error;
  }
  return ffi::Error::Success();
}

}  // namespace

HIPJAX_OPERATION(ple_gate, ple_gate);
HIPJAX_OPERATION(ple_output, ple_output);

}  // namespace hipjax
