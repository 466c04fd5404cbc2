#include "kernels/delta.h"

#include <algorithm>

#include "kernels/delta_commit.h"
#include "kernels/delta_rows.h"
#include "ops/call.h"

namespace hipjax {
namespace {

// past [B, taps - 1, channels], columns [B, R, channels], a and b [B, R, heads], conv
// [channels, 1, taps], a_log and dt_bias [heads] -> query, key, value, decay, strength.
template <class Target>
ffi::Error delta_inputs(Target& target, const Call& call) {
  const auto columns = call.operand(1);
  DeltaInputs d{};
  d.batch = static_cast<int>(call.dim(columns, 0));
  d.rows = static_cast<int>(call.dim(columns, 1));
  d.heads = static_cast<int>(call.dim(call.operand(2), -1));
  d.taps = static_cast<int>(call.dim(call.operand(4), -1));
  d.key_heads = static_cast<int>(call.dim(call.result(0), -2));
  d.keys = static_cast<int>(call.dim(call.result(0), -1));
  d.values = static_cast<int>(call.dim(call.result(2), -1));
  d.together = Target::kGpu ? 1 : d.rows;
  d.query_scale = call.real("query_scale");
  require(d.taps >= 1, "delta_inputs: the convolution has no taps");
  require(call.dim(columns, -1) == d.channels(), "delta_inputs: channels do not match the heads");
  const int64_t rows = static_cast<int64_t>(d.batch) * d.rows, channels = d.channels();
  const int64_t key_values = rows * d.key_heads * d.keys;
  d.past = call.floats(0, static_cast<int64_t>(d.batch) * (d.taps - 1) * channels);
  d.columns = call.floats(1, rows * channels);
  d.a = call.floats(2, rows * d.heads);
  d.b = call.floats(3, rows * d.heads);
  d.conv = call.vector(4, channels * d.taps);
  d.a_log = call.vector(5, d.heads);
  d.dt_bias = call.vector(6, d.heads);
  d.query = call.floats_out(0, key_values);
  d.key = call.floats_out(1, key_values);
  d.value = call.floats_out(2, rows * d.heads * d.values);
  d.decay = call.floats_out(3, rows * d.heads);
  d.strength = call.floats_out(4, rows * d.heads);
  if (rows == 0) return ffi::Error::Success();
  return target.launch(d);
}

// Sizes from key [B, R, key heads, keys] and an array [B, R, heads, values].
template <class Target>
DeltaSizes sizes(const Call& call, const ffi::AnyBuffer& key, const ffi::AnyBuffer& value) {
  DeltaSizes s{};
  s.batch = static_cast<int>(call.dim(key, 0));
  s.rows = static_cast<int>(call.dim(key, 1));
  s.key_heads = static_cast<int>(call.dim(key, 2));
  s.keys = static_cast<int>(call.dim(key, 3));
  s.heads = static_cast<int>(call.dim(value, 2));
  s.values = static_cast<int>(call.dim(value, 3));
  require(s.keys >= 1 && s.keys <= DeltaSizes::kMaxWidth && s.values >= 1 &&
              s.values <= DeltaSizes::kMaxWidth,
          "the delta rule takes heads of 1 to 256 channels");
  require(s.key_heads >= 1 && s.heads % s.key_heads == 0,
          "the delta rule takes a number of value heads that its key heads divide");
  s.active = 1;
  if constexpr (Target::kGpu) {
    for (int size = 1; size < DeltaSizes::kVariants / 2; ++size) {
      const bool fits = s.values <= DeltaSizes::kMostValues;
      if (fits && s.keys == DeltaSizes::keys_of(size)) s.size = size;
    }
    // Tiles of other sizes share 48 KiB, which every GPU has.
    const int room = 48 * 1024 / (s.keys * kLanes * 4);
    s.active = s.size ? DeltaSizes::kWaves : std::clamp(room, 1, DeltaSizes::kWaves);
  }
  return s;
}

struct Counts {
  int64_t state, scales, keys, values, heads;
  explicit Counts(const DeltaSizes& s)
      : state(static_cast<int64_t>(s.batch) * s.heads * s.keys * s.values),
        scales(static_cast<int64_t>(s.batch) * s.heads * s.values),
        keys(static_cast<int64_t>(s.batch) * s.rows * s.key_heads * s.keys),
        values(static_cast<int64_t>(s.batch) * s.rows * s.heads * s.values),
        heads(static_cast<int64_t>(s.batch) * s.rows * s.heads) {}
};

// Operands from `i` on: the state as floats, or as codes, scales and the lengths.
size_t read_state(const Call& call, size_t i, const DeltaSizes& s, DeltaState& state,
                  const int*& length) {
  const Counts n(s);
  if (!s.q8) {
    state.floats = call.floats(i, n.state);
    return i + 1;
  }
  state.codes = call.bytes(i, n.state);
  state.scales = call.floats(i + 1, n.scales);
  length = call.ints(i + 2, s.batch);
  return i + 3;
}

// query, key, value, decay, strength, gate, the state, weight [values] -> out, correction.
// Attributes: q8, nearest, eps, silu.
template <class Target>
ffi::Error delta_rows(Target& target, const Call& call) {
  DeltaRows d{};
  static_cast<DeltaSizes&>(d) = sizes<Target>(call, call.operand(1), call.operand(2));
  d.q8 = call.integer("q8");
  d.nearest = call.integer("nearest");
  d.eps = call.real("eps");
  d.gated_by_silu = call.integer("silu");
  const Counts n(d);
  d.query = call.floats(0, n.keys);
  d.key = call.floats(1, n.keys);
  d.value = call.floats(2, n.values);
  d.decay = call.floats(3, n.heads);
  d.strength = call.floats(4, n.heads);
  d.gate = call.floats(5, n.values);
  d.weight = call.vector(read_state(call, 6, d, d.state, d.length), d.values);
  d.out = call.floats_out(0, n.values);
  d.correction = call.floats_out(1, n.values);
  return target.launch(d);
}

// key, correction, decay, past [B, taps - 1, channels], columns [B, R, channels], kept [B],
// the state -> past and state after the rows kept. Attributes: q8, nearest.
template <class Target>
ffi::Error delta_commit(Target& target, const Call& call) {
  DeltaCommit d{};
  static_cast<DeltaSizes&>(d) = sizes<Target>(call, call.operand(0), call.operand(1));
  d.q8 = call.integer("q8");
  d.nearest = call.integer("nearest");
  d.past = static_cast<int>(call.dim(call.operand(3), 1));
  d.channels = static_cast<int>(call.dim(call.operand(3), 2));
  const Counts n(d);
  const int64_t past = static_cast<int64_t>(d.batch) * d.past * d.channels;
  d.key = call.floats(0, n.keys);
  d.correction = call.floats(1, n.values);
  d.decay = call.floats(2, n.heads);
  d.conv = call.floats(3, past);
  d.columns = call.floats(4, static_cast<int64_t>(d.batch) * d.rows * d.channels);
  d.kept = call.ints(5, d.batch);
  read_state(call, 6, d, d.state, d.length);
  d.conv_out = call.floats_out(0, past);
  if (d.q8) {
    d.codes = call.bytes_out(1, n.state);
    d.scales = call.floats_out(2, n.scales);
  } else {
    d.floats = call.floats_out(1, n.state);
  }
  return target.launch(d);
}

}  // namespace

HIPJAX_OPERATION(delta_inputs, delta_inputs);
HIPJAX_OPERATION(delta_rows, delta_rows);
HIPJAX_OPERATION(delta_commit, delta_commit);

}  // namespace hipjax
