#include "kernels/attention.h"

#include <algorithm>

#include "kernels/attention_inputs.h"
#include "ops/call.h"

namespace hipjax {
namespace {

int size_of(const Call& call, size_t operand, int axis) {
  return static_cast<int>(call.dim(call.operand(operand), axis));
}

// A cache's storage: float32, or bfloat16 as bits in uint16.
Vector cache_of(const Call& call, size_t i, int64_t count) { return call.vector(i, count); }

// projected [B, R, heads, 2, width], key [B, R, groups, width], index [B, R, 1 + queries, width],
// positions [B, R]; norms of query, key, index query; frequencies [half]
// -> query, key, index query
template <class Target>
ffi::Error attention_inputs(Target& target, const Call& call) {
  AttentionInputs a{};
  a.heads = size_of(call, 0, 2);
  a.width = size_of(call, 0, 4);
  a.groups = size_of(call, 1, 2);
  a.index_heads = size_of(call, 2, 2) - 1;
  a.index_width = size_of(call, 2, 3);
  a.half = size_of(call, 7, 0);
  a.rows = size_of(call, 0, 0) * size_of(call, 0, 1);
  const int64_t rows = a.rows;
  require(2 * a.half <= a.width && 2 * a.half <= a.index_width,
          "attention_inputs: more values rotate than a head has");
  a.projected = call.floats(0, rows * a.heads * 2 * a.width);
  a.key = call.floats(1, rows * a.groups * a.width);
  a.index = call.floats(2, rows * (a.index_heads + 1) * a.index_width);
  a.positions = call.ints(3, rows);
  a.query_norm = call.vector(4, a.width);
  a.key_norm = call.vector(5, a.width);
  a.index_norm = call.vector(6, a.index_width);
  a.frequencies = call.floats(7, a.half);
  a.query_out = call.floats_out(0, rows * a.heads * a.width);
  a.key_out = call.floats_out(1, rows * a.groups * a.width);
  a.index_out = call.floats_out(2, rows * a.index_heads * a.index_width);
  a.eps = call.real("eps");
  return target.launch(a);
}

// raw [B, blocks * ratio, width], first [B]; norm [width], frequencies [half]
// -> [B, blocks, width]
template <class Target>
ffi::Error block_keys(Target& target, const Call& call) {
  BlockKeys a{};
  a.ratio = call.integer("ratio");
  require(a.ratio > 0, "block_keys: ratio must be positive");
  a.sequences = size_of(call, 0, 0);
  a.count = size_of(call, 0, 1) / a.ratio;
  a.width = size_of(call, 0, 2);
  a.half = size_of(call, 3, 0);
  require(2 * a.half <= a.width, "block_keys: more values rotate than a key has");
  const int64_t values = static_cast<int64_t>(a.sequences) * a.count * a.width;
  const Vector raw = cache_of(call, 0, values * a.ratio);
  a.raw = raw.data;
  a.bf16 = raw.bf16;
  a.first = call.ints(1, a.sequences);
  a.norm = call.vector(2, a.width);
  a.frequencies = call.floats(3, a.half);
  a.out = call.floats_out(0, values);
  a.eps = call.real("eps");
  return target.launch(a);
}

// query [B, R, heads, width], keys and values [B, groups, S, width], selected [B, R, slots],
// count [B, R], positions [B, R], projected [B, R, heads, 2, width]
// -> [B, R, heads, width], and scratch: mixed [B, R, heads, pieces, width], peaks
// [B, R, heads, 2, pieces]
template <class Target>
ffi::Error attend(Target& target, const Call& call) {
  AttendPiece a{};
  a.sequences = size_of(call, 0, 0);
  a.rows = size_of(call, 0, 1);
  a.heads = size_of(call, 0, 2);
  a.width = size_of(call, 0, 3);
  a.groups = size_of(call, 1, 1);
  require(a.groups > 0 && a.heads % a.groups == 0, "attend: heads must be a multiple of groups");
  a.list.capacity = size_of(call, 1, 2);
  a.list.slots = size_of(call, 3, 2);
  a.list.ratio = call.integer("ratio");
  require(a.list.ratio > 0 && a.list.capacity > 0, "attend: ratio and capacity must be positive");
  a.pieces = static_cast<int>(call.dim(call.result(1), 3));
  const int longest = a.list.slots * a.list.ratio + a.list.ratio - 1;
  require(a.pieces == std::max(1, (longest + AttendPiece::kPiece - 1) / AttendPiece::kPiece),
          "attend: the scratch result has another number of pieces than the list needs");
  const int64_t rows = static_cast<int64_t>(a.sequences) * a.rows;
  const int64_t cached = static_cast<int64_t>(a.sequences) * a.groups * a.list.capacity * a.width;
  a.query = call.floats(0, rows * a.heads * a.width);
  const Vector keys = cache_of(call, 1, cached), values = cache_of(call, 2, cached);
  require(keys.bf16 == values.bf16, "attend: keys and values must be stored alike");
  a.keys = keys.data;
  a.values = values.data;
  a.bf16 = keys.bf16;
  a.list.selected = call.ints(3, rows * a.list.slots);
  a.list.count = call.ints(4, rows);
  a.list.positions = call.ints(5, rows);
  a.mixed = call.floats_out(1, rows * a.heads * a.pieces * a.width);
  a.peaks = call.floats_out(2, rows * a.heads * 2 * a.pieces);
  a.launched = a.pieces;
  if constexpr (!Target::kGpu) {
    int most = 0;
    for (int row = 0; row < rows; ++row) most = std::max(most, a.list.length(row));
    a.launched = std::max(1, (most + AttendPiece::kPiece - 1) / AttendPiece::kPiece);
  }
  AttendFinish f{};
  f.mixed = a.mixed;
  f.peaks = a.peaks;
  f.projected = call.floats(6, rows * a.heads * 2 * a.width);
  f.list = a.list;
  f.out = call.floats_out(0, rows * a.heads * a.width);
  f.rows = static_cast<int>(rows);
  f.heads = a.heads;
  f.width = a.width;
  f.pieces = a.pieces;
  const ffi::Error error = target.launch(a);
  return error.failure() ? error : target.launch(f);
}

}  // namespace

HIPJAX_OPERATION(attention_inputs, attention_inputs);
HIPJAX_OPERATION(block_keys, block_keys);
HIPJAX_OPERATION(attend, attend);

}  // namespace hipjax
