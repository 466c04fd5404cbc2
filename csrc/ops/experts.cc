#include "kernels/experts.h"

#include <algorithm>

#include "kernels/route.h"
#include "ops/call.h"

namespace hipjax {
namespace {

// logits [rows, experts] -> experts [rows, chosen], weights [rows, chosen].
// Attributes: chosen; renormalise.
template <class Target>
ffi::Error route(Target& target, const Call& call) {
  const auto logits = call.operand(0);
  Route a{};
  a.count = static_cast<int>(call.dim(logits, -1));
  a.chosen = call.integer("chosen");
  a.renormalise = call.integer("renormalise");
  require(a.count <= Route::kMaxExperts, "route takes at most 512 experts");
  require(a.chosen >= 1 && a.chosen <= Route::kMaxChosen && a.chosen <= a.count,
          "route chooses 1 to 16 experts, and not more than there are");
  a.rows = static_cast<int>(logits.element_count() / a.count);
  a.logits = call.floats(0, static_cast<int64_t>(a.rows) * a.count);
  a.experts = call.ints_out(0, static_cast<int64_t>(a.rows) * a.chosen);
  a.weights = call.floats_out(1, static_cast<int64_t>(a.rows) * a.chosen);
  return target.launch(a);
}

// gate, up -> silu(gate) * up, all of one shape.
template <class Target>
ffi::Error swiglu(Target& target, const Call& call) {
  Swiglu a{};
  a.count = static_cast<int>(call.operand(0).element_count());
  a.gate = call.floats(0, a.count);
  a.up = call.floats(1, a.count);
  a.out = call.floats_out(0, a.count);
  return target.launch(a);
}

constexpr int kRowsAtOnce = 64;  // rows of one launch: their products lie in shared memory

int staged_bytes(int rows, int depth) {
  const int groups = (depth + RowProduct::kGroup - 1) / RowProduct::kGroup;
  return 4 * std::min(rows, kMaxRows) * groups * RowProduct::kGroup;
}

template <class Target>
void share_out(ExpertInner& inner, ExpertOutput& output) {
  inner.per_block = Target::kGpu ? 2 * ExpertInner::kWaves : 64;
  inner.shared = Target::kGpu ? 0 : staged_bytes(kMaxRows, inner.hidden);
  output.per_block = Target::kGpu ? 8 : 64;
  const int products = (output.choices() * output.per_block + 15) / 16 * 16;
  output.shared = 4 * products + (Target::kGpu ? 0 : staged_bytes(kMaxRows, output.width));
}

// x [rows, hidden], experts [rows, chosen], weights [rows, chosen], shared [rows, hidden],
// share [rows, 1], gate_up [E, 2 * width, hidden], down [E, hidden, width] -> [rows, hidden],
// and two results for the operation's own use.
template <class Target>
ffi::Error expert_rows(Target& target, const Call& call) {
  const auto x = call.operand(0), experts = call.operand(1), down = call.operand(6);
  ExpertInner inner{};
  ExpertOutput output{};
  inner.hidden = output.hidden = static_cast<int>(call.dim(x, -1));
  inner.chosen = output.chosen = static_cast<int>(call.dim(experts, -1));
  inner.count = output.count = static_cast<int>(call.dim(down, 0));
  inner.width = output.width = static_cast<int>(call.dim(down, -1));
  require(inner.chosen >= 1 && inner.chosen <= Route::kMaxChosen,
          "expert_rows takes 1 to 16 experts a row");
  const int rows = static_cast<int>(x.element_count() / inner.hidden);
  const int64_t choices = static_cast<int64_t>(rows) * inner.chosen;
  const int64_t weights = static_cast<int64_t>(inner.count) * inner.hidden * inner.width;
  const int64_t values = static_cast<int64_t>(rows) * inner.hidden;
  const Vector gate_up = call.vector(5, 2 * weights), out_of = call.vector(6, weights);
  require(gate_up.bf16 == out_of.bf16, "expert_rows takes gate_up and down of one dtype");
  inner.x = call.floats(0, values);
  inner.experts = output.experts = call.ints(1, choices);
  output.weights = call.floats(2, choices);
  output.other = call.floats(3, values);
  output.share = call.floats(4, rows);
  inner.gate_up = gate_up.data;
  output.down = out_of.data;
  inner.bf16 = output.bf16 = gate_up.bf16;
  output.out = call.floats_out(0, values);
  inner.inner = call.floats_out(1, choices * inner.width);
  output.inner = inner.inner;
  inner.plan = call.ints_out(2, choices * ExpertInner::kPlanned);
  output.plan = inner.plan;
  for (int from = 0; from < rows; from += kRowsAtOnce) {
    inner.rows = output.rows = std::min(kRowsAtOnce, rows - from);
    share_out<Target>(inner, output);
    if (const ffi::Error error = target.launch(inner); error.failure()) return error;
    if (const ffi::Error error = target.launch(output); error.failure()) return error;
    const int64_t done = kRowsAtOnce, done_choices = done * inner.chosen;
    inner.x += done * inner.hidden;
    inner.experts += done_choices;
    inner.inner += done_choices * inner.width;
    inner.plan += done_choices * ExpertInner::kPlanned;
    output.inner += done_choices * inner.width;
    output.plan += done_choices * ExpertInner::kPlanned;
    output.experts += done_choices;
    output.weights += done_choices;
    output.other += done * inner.hidden;
    output.share += done;
    output.out += done * inner.hidden;
  }
  return ffi::Error::Success();
}

}  // namespace

HIPJAX_OPERATION(route, route);
HIPJAX_OPERATION(swiglu, swiglu);
HIPJAX_OPERATION(expert_rows, expert_rows);

}  // namespace hipjax
