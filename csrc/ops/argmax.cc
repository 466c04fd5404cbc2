#include "kernels/argmax.h"

#include "ops/call.h"

namespace hipjax {
namespace {

// logits [rows, width] -> index [rows], lost [rows], and for rows of more than one piece room for
// the pieces' bests: values [rows, pieces], indices [rows, pieces]
template <class Target>
ffi::Error argmax(Target& target, const Call& call) {
  const auto logits = call.operand(0);
  Argmax a{};
  a.width = static_cast<int>(call.dim(logits, -1));
  require(a.width >= 1, "argmax takes rows of at least one value");
  a.rows = static_cast<int>(logits.element_count() / a.width);
  const int pieces = a.pieces();
  require(pieces <= Argmax::kPiece, "argmax: the rows are too long");
  a.values = call.floats(0, static_cast<int64_t>(a.rows) * a.width);
  int* index = call.ints_out(0, a.rows);
  int* lost = call.ints_out(1, a.rows);
  if (pieces > 1) {
    const int64_t bests = static_cast<int64_t>(a.rows) * pieces;
    a.best = call.floats_out(2, bests);
    a.index = call.ints_out(3, bests);
    const ffi::Error error = target.launch(a);
    if (error.failure()) return error;
    a.values = a.best;
    a.ids = a.index;
    a.width = pieces;
  }
  a.index = index;
  a.lost = lost;
  return target.launch(a);
}

}  // namespace

HIPJAX_OPERATION(argmax, argmax);

}  // namespace hipjax
