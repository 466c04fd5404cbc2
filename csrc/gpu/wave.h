// The wave on a GPU: one lane per thread. Included by lanes.h only.
#pragma once

#include "arguments.h"

#define HIPJAX_TARGET gpu
#define FN __attribute__((device, always_inline)) inline
#define HIPJAX_UNROLL _Pragma("unroll")

namespace hipjax::gpu {

using F = float;
using I = int;
using M = bool;

#if defined(__AMDGCN__)
FN int thread() { return static_cast<int>(__builtin_amdgcn_workitem_id_x()); }
FN int block_index() { return static_cast<int>(__builtin_amdgcn_workgroup_id_x()); }
FN void barrier() {
  __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
  __builtin_amdgcn_s_barrier();
  __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
}
FN int from_lane(int value, int source) {
  return __builtin_amdgcn_ds_bpermute(source << 2, value);
}
#else
FN int thread() { return static_cast<int>(__nvvm_read_ptx_sreg_tid_x()); }
FN int block_index() { return static_cast<int>(__nvvm_read_ptx_sreg_ctaid_x()); }
FN void barrier() { asm volatile("bar.sync 0;" ::: "memory"); }
FN int from_lane(int value, int source) {
  return __nvvm_shfl_sync_idx_i32(0xffffffff, value, source, 31);
}
#endif

FN int lane() { return thread() & (kLanes - 1); }

FN F splat(float x) { return x; }
FN I splat_int(int x) { return x; }
FN I as_int(F x) { return __builtin_bit_cast(int, x); }
FN F as_float(I x) { return __builtin_bit_cast(float, x); }
FN F to_float(I x) { return static_cast<float>(x); }
FN I to_int(F x) { return static_cast<int>(x); }  // towards zero; x within int's range
FN I shift_right(I x, int by) { return static_cast<int>(static_cast<unsigned>(x) >> by); }
FN I times(I a, I b) { return static_cast<int>(static_cast<unsigned>(a) * static_cast<unsigned>(b)); }
FN I plus(I a, I b) { return static_cast<int>(static_cast<unsigned>(a) + static_cast<unsigned>(b)); }

FN F select(M which, F yes, F no) { return which ? yes : no; }
FN I select(M which, I yes, I no) { return which ? yes : no; }
FN M both(M a, M b) { return a && b; }
FN M either(M a, M b) { return a || b; }
FN M opposite(M a) { return !a; }
FN F fma(F a, F b, F c) { return __builtin_fmaf(a, b, c); }
FN F root(F x) { return __builtin_sqrtf(x); }

FN F lanes_from(F x, I source) { return as_float(from_lane(as_int(x), source)); }
FN I lanes_from(I x, I source) { return from_lane(x, source); }
FN float value_at(F x, int source) { return lanes_from(x, source); }
FN int value_at(I x, int source) { return from_lane(x, source); }

// The tree of order.md. Both partners add, so every lane ends with lane 0's value.
FN float sum(F x) {
  for (int offset = 16; offset; offset >>= 1) x = x + lanes_from(x, lane() ^ offset);
  return x;
}
FN float greatest(F x) {
  for (int offset = 16; offset; offset >>= 1) {
    const F other = lanes_from(x, lane() ^ offset);
    x = other > x ? other : x;
  }
  return x;
}
FN int greatest(I x) {
  for (int offset = 16; offset; offset >>= 1) {
    const I other = from_lane(x, lane() ^ offset);
    x = other > x ? other : x;
  }
  return x;
}
FN int least(I x) {
  for (int offset = 16; offset; offset >>= 1) {
    const I other = from_lane(x, lane() ^ offset);
    x = other < x ? other : x;
  }
  return x;
}
FN int sum(I x) {
  for (int offset = 16; offset; offset >>= 1) x += from_lane(x, lane() ^ offset);
  return x;
}
FN bool any(M x) { return greatest(static_cast<int>(x)) != 0; }

// Side by side: lane t reads or writes p[t]. From lane `count` on, lanes load zero and store
// nothing.
FN F load(const float* p, int count) { return lane() < count ? p[lane()] : 0.0f; }
FN F load(const uint16_t* p, int count) {  // bfloat16
  return lane() < count ? as_float(static_cast<int>(p[lane()]) << 16) : 0.0f;
}
FN I load(const int* p, int count) { return lane() < count ? p[lane()] : 0; }
FN I load(const int8_t* p, int count) { return lane() < count ? p[lane()] : 0; }
FN void store(float* p, F value, int count) {
  if (lane() < count) p[lane()] = value;
}
FN void store(int* p, I value, int count) {
  if (lane() < count) p[lane()] = value;
}
FN void store(int8_t* p, I value, int count) {
  if (lane() < count) p[lane()] = static_cast<int8_t>(value);
}
// Anywhere: each live lane reads p[index]; the others are zero.
FN F gather(const float* p, I index, M live) { return live ? p[index] : 0.0f; }
FN F gather(const uint16_t* p, I index, M live) {  // bfloat16
  return live ? as_float(static_cast<int>(p[index]) << 16) : 0.0f;
}
FN I gather(const int* p, I index, M live) { return live ? p[index] : 0; }
// Every lane below `count` writes p[index].
FN void scatter(float* p, I index, F value, int count) {
  if (lane() < count) p[index] = value;
}
// One uniform value: the first lane writes it.
FN void put(float* p, float value) {
  if (lane() == 0) *p = value;
}
FN void put(int* p, int value) {
  if (lane() == 0) *p = value;
}

// Live lanes, one bit each.
#if defined(__AMDGCN__)
FN unsigned ballot(M live) { return __builtin_amdgcn_ballot_w32(live); }
#else
FN unsigned ballot(M live) { return __nvvm_vote_ballot_sync(0xffffffff, live); }
#endif
FN int live_before(M live) {  // how many lanes before this one
  return __builtin_popcount(ballot(live) & ((1u << lane()) - 1));
}
FN int count_of(M live) { return __builtin_popcount(ballot(live)); }
// The first `count` of the live lanes.
FN M first_of(M live, int count) {
  const int before = live_before(live);
  return live && before < count;
}
// Writes the values of live lanes one after the other, and says how many.
FN int list(int* p, I value, M live) {
  const int before = live_before(live);
  if (live) p[before] = value;
  return count_of(live);
}

// Lane t of the result is sum(x[t % kCount]); kCount is a power of two, at most kLanes.
template <int kCount>
FN F sums(F (&x)[kCount]) {
#pragma unroll
  for (int offset = kLanes / 2; offset; offset >>= 1) {
#pragma unroll
    for (int t = 0; t < (offset < kCount ? offset : kCount); ++t) {
      if (offset >= kCount) {
        x[t] = x[t] + lanes_from(x[t], lane() ^ offset);
      } else {
        const bool high = (lane() & offset) != 0;
        const F low_value = x[t], high_value = x[t + offset];  // a choice of places is memory
        const F keep = high ? high_value : low_value;
        const F give = high ? low_value : high_value;
        x[t] = keep + lanes_from(give, lane() ^ offset);
      }
    }
  }
  return x[0];
}

// The waves of a block. `each(fn)` runs fn(wave) in every wave and ends with a barrier: what
// waves leave in shared memory is there for all of them in the next `each`.
template <int kWaves>
struct Block {
  char* shared;
  template <class Fn>
  FN void each(Fn fn) const {
    [[clang::always_inline]] fn(thread() / kLanes);  // a call would bring what it captures to memory
    if constexpr (kWaves > 1) barrier();
  }
};

// Four accumulators of every lane; see order.md, "row products".

struct Quads {
  float v[4];
};
FN Quads fma(Quads a, Quads b, Quads c) {
  for (int i = 0; i < 4; ++i) c.v[i] = __builtin_fmaf(a.v[i], b.v[i], c.v[i]);
  return c;
}

// The eight terms of each lane as they are stored, lane t's from t * 8 on; `left` terms are
// real. Weights pass by the caches, since nobody reads them twice.
typedef float Four __attribute__((vector_size(16)));
typedef uint32_t Words __attribute__((vector_size(16)));
template <class Bits>
struct Raw;
template <>
struct Raw<uint16_t> {
  Words bits;
};
template <>
struct Raw<float> {
  Four low, high;
};
FN Four four(const float* p) { return *reinterpret_cast<const Four*>(p); }
// In the device's memory, as opposed to a block's. The compiler sees that by itself only where a
// pointer comes from the arguments directly; otherwise its loads are slower ones for both.
template <class T>
FN const __attribute__((address_space(1))) T* in_memory(const void* p) {
  return (const __attribute__((address_space(1))) T*)p;
}
FN Raw<uint16_t> load_raw(const uint16_t* w, int left) {
  if (lane() * 8 >= left) return Raw<uint16_t>{};
  return {__builtin_nontemporal_load(in_memory<Words>(w + lane() * 8))};
}
FN Raw<float> load_raw(const float* w, int left) {
  if (lane() * 8 >= left) return Raw<float>{};
  return {*in_memory<Four>(w + lane() * 8), *in_memory<Four>(w + lane() * 8 + 4)};
}
// The first four and the last four terms of each lane.
FN void widen(const Raw<uint16_t>& raw, Quads& low, Quads& high) {
  for (int i = 0; i < 4; ++i) {
    Quads& half = i < 2 ? low : high;
    half.v[2 * i % 4] = as_float(static_cast<int>(raw.bits[i] << 16));
    half.v[2 * i % 4 + 1] = as_float(static_cast<int>(raw.bits[i] & 0xffff0000u));
  }
}
FN void widen(const Raw<float>& raw, Quads& low, Quads& high) {
  for (int i = 0; i < 4; ++i) {
    low.v[i] = raw.low[i];
    high.v[i] = raw.high[i];
  }
}
template <class Bits>
FN void load_quads(const Bits* w, int left, Quads& low, Quads& high) {
  widen(load_raw(w, left), low, high);
}
// A group of 256 terms laid out so that the lanes' quads lie side by side.
FN void stage_group(float* to, const float* x, int left) {
  const bool live = lane() * 8 < left;
  const Four zero = {0, 0, 0, 0};
  reinterpret_cast<Four*>(to)[lane()] = live ? four(x + lane() * 8) : zero;
  reinterpret_cast<Four*>(to)[kLanes + lane()] = live ? four(x + lane() * 8 + 4) : zero;
}
FN Quads staged_half(const float* staged, int half) {
  const Four a = reinterpret_cast<const Four*>(staged)[half * kLanes + lane()];
  return {{a[0], a[1], a[2], a[3]}};
}
// Each lane's four accumulators as one value.
FN float folded(const Quads& a) { return (a.v[0] + a.v[1]) + (a.v[2] + a.v[3]); }
template <int kOuts, int kRows>
FN void lane_sums(const Quads (&totals)[kOuts][kRows], float (&values)[kOuts][kRows]) {
#pragma unroll
  for (int o = 0; o < kOuts; ++o) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) values[o][r] = sum(folded(totals[o][r]));
  }
}

constexpr int power_of_two(int atleast) {
  int n = 1;
  while (n < atleast) n *= 2;
  return n;
}

}  // namespace hipjax::gpu
