#include "kernels/row_product.h"

#include <algorithm>

#include "ops/call.h"

namespace hipjax {
namespace {

// How a target's threads share the work; none of it changes any value.
template <class Target>
void share_out(const Target& target, RowProduct& a) {
  int64_t outputs = 0;
  for (int i = 0; i < a.count; ++i) outputs += a.matrices[i].outputs;
  a.chunk = a.groups();
  a.many = 0;
  if constexpr (Target::kGpu) {
    const int slices = a.quarters ? 4 : 1;
    RowProduct more = a;
    more.many = 1;
    const int outs = RowProduct::outs(more.variant(), Target::kAmd);
    const int groups_at_once = RowProduct::kGroup * RowProduct::ahead(more.variant());
    a.many = a.bf16 && !a.quarters && a.depth % groups_at_once == 0 &&
             outputs >= int64_t{8} * outs * target.parallel();
    a.per_turn = RowProduct::outs(a.variant(), Target::kAmd);
    // All staged rows at once if they fit, else as many groups as fit.
    const int ahead = RowProduct::ahead(a.variant());
    const int partials = a.quarters ? RowProduct::waves(a.variant()) * kMaxRows : 0;
    const int floats = target.shared_bytes() / 4 - partials;
    const int room = floats / RowProduct::kGroup / slices / a.rows;
    if (room < a.chunk) a.chunk = std::max(1, room / ahead) * ahead;
  } else {
    // A CPU thread takes some pieces, each large enough that laying out the rows costs nothing;
    // 48 is a multiple of what it takes at once, for any number of rows.
    a.per_turn = 48 * std::max<int>(1, outputs / (48 * 8 * target.parallel()));
  }
  a.turns = 0;
  for (int i = 0; i < a.count; ++i) {
    a.matrices[i].first_turn = a.turns;
    a.turns += (a.matrices[i].outputs + a.per_turn - 1) / a.per_turn;
  }
  a.stride = a.turns;
  if constexpr (Target::kGpu) {
    a.stride = std::min(a.turns, target.parallel() * RowProduct::min_blocks(a.variant()));
  }
}

// x [rows, depth], then what the finishes take, then one weight [outputs, depth] a matrix -> one
// result a matrix. Attributes: finishes, one a matrix; quarters; divisor; group.
template <class Target>
ffi::Error row_products(Target& target, const Call& call) {
  const auto x = call.operand(0);
  const auto finishes = call.integers("finishes");
  RowProduct a{};
  a.count = static_cast<int>(finishes.size());
  require(a.count >= 1 && a.count <= RowProduct::kMatrices, "row_products takes 1 to 4 matrices");
  a.depth = static_cast<int>(call.dim(x, -1));
  require(a.depth >= 1, "row_products takes rows of at least one value");
  const int rows = static_cast<int>(x.element_count() / a.depth);
  const float* first = call.floats(0, static_cast<int64_t>(rows) * a.depth);
  a.quarters = call.integer("quarters");
  a.divisor = call.real("divisor");
  a.group = call.integer("group");
  require(a.group >= 1 && rows % a.group == 0, "row_products: group does not divide the rows");
  size_t extra = 1;
  const size_t weights = call.operands() - a.count;
  for (int i = 0; i < a.count; ++i) {
    Matrix& m = a.matrices[i];
    const auto weight = call.operand(weights + i);
    m.outputs = static_cast<int>(call.dim(weight, 0));
    const Vector stored = call.vector(weights + i, static_cast<int64_t>(m.outputs) * a.depth);
    require(i == 0 || stored.bf16 == a.bf16, "row_products takes matrices of one dtype");
    m.weight = stored.data;
    a.bf16 = stored.bf16;
    m.finish = static_cast<Finish>(finishes[i]);
    const int64_t values = static_cast<int64_t>(rows) * m.outputs;
    if (m.finish == Finish::kAdd) {
      m.other = call.floats(extra++, values / a.group);
    } else if (m.finish == Finish::kCombine) {
      const int streams = static_cast<int>(call.dim(call.operand(extra), -2));
      require(a.streams == 0 || a.streams == streams, "row_products takes one number of streams");
      a.streams = streams;
      m.other = call.floats(extra++, values * a.streams);
      m.strength = call.floats(extra++, static_cast<int64_t>(rows) * a.streams);
    }
    m.out = call.floats_out(i, m.finish == Finish::kCombine ? values * a.streams : values);
  }
  // Rows beyond eight go in further tiles, each row in the same order.
  for (int from = 0; from < rows; from += kMaxRows) {
    RowProduct tile = a;
    tile.rows = std::min(kMaxRows, rows - from);
    tile.skipped = from % a.group;
    tile.x = first + static_cast<int64_t>(from) * a.depth;
    for (int i = 0; i < a.count; ++i) {
      Matrix& m = tile.matrices[i];
      const int64_t copies = m.finish == Finish::kCombine ? a.streams : 1;
      m.out += from * copies * m.outputs;
      if (m.finish == Finish::kCombine) m.other += from * copies * m.outputs;
      if (m.finish == Finish::kCombine) m.strength += static_cast<int64_t>(from) * a.streams;
      if (m.finish == Finish::kAdd) m.other += static_cast<int64_t>(from / a.group) * m.outputs;
    }
    share_out(target, tile);
    const ffi::Error error = target.launch(tile);
    if (error.failure()) return error;
  }
  return ffi::Error::Success();
}

}  // namespace

HIPJAX_OPERATION(row_products, row_products);

}  // namespace hipjax
