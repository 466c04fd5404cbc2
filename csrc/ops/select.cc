#include "kernels/select.h"

#include <algorithm>

#include "ops/call.h"

namespace hipjax {
namespace {

// query [B, R, heads, width], keys [B, capacity, width], visible [B, R]
// -> selected [B, R, slots], count [B, R], and scratch: ranks [B, R, capacity], or [B, R, 0]
// where the budget holds every block
template <class Target>
ffi::Error select_blocks(Target& target, const Call& call) {
  const auto query = call.operand(0);
  BlockScores a{};
  a.sequences = static_cast<int>(call.dim(query, 0));
  a.rows = static_cast<int>(call.dim(query, 1));
  a.heads = static_cast<int>(call.dim(query, 2));
  a.width = static_cast<int>(call.dim(query, 3));
  a.capacity = static_cast<int>(call.dim(call.operand(1), 1));
  a.budget = static_cast<int>(call.dim(call.result(0), 2));
  require(a.budget <= a.capacity, "select_blocks: more slots than blocks");
  const int64_t rows = static_cast<int64_t>(a.sequences) * a.rows;
  a.query = call.floats(0, rows * a.heads * a.width);
  const Vector keys = call.vector(1, static_cast<int64_t>(a.sequences) * a.capacity * a.width);
  a.keys = keys.data;
  a.bf16 = keys.bf16;
  a.visible = call.ints(2, rows);

  SelectBlocks s{};
  s.visible = a.visible;
  s.selected = call.ints_out(0, rows * a.budget);
  s.count = call.ints_out(1, rows);
  s.rows = static_cast<int>(rows);
  s.capacity = a.capacity;
  s.slots = a.budget;
  s.most = a.capacity;
  if constexpr (!Target::kGpu) {
    s.most = rows ? std::min(a.capacity, *std::max_element(a.visible, a.visible + rows)) : 0;
  }
  if (s.most > a.budget) {
    require(a.shared_bytes() <= 64 * 1024, "select_blocks: index keys wider than 240");
    a.ranks = call.ints_out(2, rows * a.capacity);
    s.ranks = a.ranks;
    constexpr int kTile = BlockScores::kWaves * kLanes;
    a.tiles = (s.most + kTile - 1) / kTile;
    const ffi::Error error = target.launch(a);
    if (error.failure()) return error;
  }
  return target.launch(s);
}

}  // namespace

HIPJAX_OPERATION(select_blocks, select_blocks);

}  // namespace hipjax
