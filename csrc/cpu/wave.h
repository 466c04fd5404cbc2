// The wave on a CPU: all 32 lanes in one thread, HIPJAX_WIDTH of them to a register.
// Included by lanes.h only. Compiled once per instruction set, each in its own namespace.
#pragma once

#include <string.h>

#include <utility>

#if HIPJAX_WIDTH > 4
#include <immintrin.h>
#endif

#include "arguments.h"

#define FN __attribute__((always_inline)) inline
#define HIPJAX_UNROLL

namespace hipjax::HIPJAX_TARGET {

constexpr int kWidth = HIPJAX_WIDTH;
constexpr int kRegisters = kLanes / kWidth;

typedef float V __attribute__((vector_size(4 * kWidth)));
typedef int32_t VI __attribute__((vector_size(4 * kWidth)));
typedef uint32_t VU __attribute__((vector_size(4 * kWidth)));

struct F {
  V v[kRegisters];
};
struct I {
  VI v[kRegisters];
};
struct M {
  VI v[kRegisters];  // all bits of a live lane, none of another
};

template <class Out, class Fn>
FN Out each_register(Fn fn) {
  Out out;
  for (int i = 0; i < kRegisters; ++i) out.v[i] = fn(i);
  return out;
}

alignas(64) constexpr int32_t kLaneNumbers[kLanes] = {
    0,  1,  2,  3,  4,  5,  6,  7,  8,  9,  10, 11, 12, 13, 14, 15,
    16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31};

FN I lane() {
  I out;
  memcpy(&out, kLaneNumbers, sizeof(out));
  return out;
}

FN F splat(float x) {
  return each_register<F>([=](int) { return V{} + x; });
}
FN I splat_int(int x) {
  return each_register<I>([=](int) { return VI{} + x; });
}
FN I as_int(F x) {
  return each_register<I>([=](int i) { return (VI)x.v[i]; });
}
FN F as_float(I x) {
  return each_register<F>([=](int i) { return (V)x.v[i]; });
}
FN F to_float(I x) {
  return each_register<F>([=](int i) { return __builtin_convertvector(x.v[i], V); });
}
FN I to_int(F x) {  // towards zero; x within int's range
  return each_register<I>([=](int i) { return __builtin_convertvector(x.v[i], VI); });
}
FN I shift_right(I x, int by) {
  return each_register<I>([=](int i) { return (VI)((VU)x.v[i] >> by); });
}
FN I times(I a, I b) {
  return each_register<I>([=](int i) { return (VI)((VU)a.v[i] * (VU)b.v[i]); });
}
FN I plus(I a, I b) {
  return each_register<I>([=](int i) { return (VI)((VU)a.v[i] + (VU)b.v[i]); });
}

#define HIPJAX_ARITHMETIC(T, op)                                            \
  FN T operator op(T a, T b) {                                              \
    return each_register<T>([=](int i) { return a.v[i] op b.v[i]; });       \
  }
HIPJAX_ARITHMETIC(F, +)
HIPJAX_ARITHMETIC(F, -)
HIPJAX_ARITHMETIC(F, *)
HIPJAX_ARITHMETIC(F, /)
HIPJAX_ARITHMETIC(I, +)
HIPJAX_ARITHMETIC(I, -)
HIPJAX_ARITHMETIC(I, &)
HIPJAX_ARITHMETIC(I, |)
HIPJAX_ARITHMETIC(I, ^)
#undef HIPJAX_ARITHMETIC
FN F operator-(F a) {
  return each_register<F>([=](int i) { return -a.v[i]; });
}
FN F operator*(F a, float b) { return a * splat(b); }
FN F operator*(float a, F b) { return splat(a) * b; }
FN F operator+(F a, float b) { return a + splat(b); }
FN F operator-(F a, float b) { return a - splat(b); }
FN F operator-(float a, F b) { return splat(a) - b; }
FN F operator/(F a, float b) { return a / splat(b); }
FN F operator/(float a, F b) { return splat(a) / b; }
FN I operator+(I a, int b) { return a + splat_int(b); }
FN I operator-(I a, int b) { return a - splat_int(b); }
FN I operator&(I a, int b) { return a & splat_int(b); }
FN I operator<<(I a, int by) {
  return each_register<I>([=](int i) { return (VI)((VU)a.v[i] << by); });
}

#define HIPJAX_COMPARISON(T, op)                                                 \
  FN M operator op(T a, T b) {                                                   \
    return each_register<M>([=](int i) { return (VI)(a.v[i] op b.v[i]); });      \
  }
HIPJAX_COMPARISON(F, <)
HIPJAX_COMPARISON(F, <=)
HIPJAX_COMPARISON(F, >)
HIPJAX_COMPARISON(F, >=)
HIPJAX_COMPARISON(F, ==)
HIPJAX_COMPARISON(I, <)
HIPJAX_COMPARISON(I, <=)
HIPJAX_COMPARISON(I, >)
HIPJAX_COMPARISON(I, >=)
HIPJAX_COMPARISON(I, ==)
#undef HIPJAX_COMPARISON

FN F select(M which, F yes, F no) {
  return each_register<F>([=](int i) { return which.v[i] ? yes.v[i] : no.v[i]; });
}
FN I select(M which, I yes, I no) {
  return each_register<I>([=](int i) { return which.v[i] ? yes.v[i] : no.v[i]; });
}
FN M both(M a, M b) {
  return each_register<M>([=](int i) { return a.v[i] & b.v[i]; });
}
FN M either(M a, M b) {
  return each_register<M>([=](int i) { return a.v[i] | b.v[i]; });
}
FN M opposite(M a) {
  return each_register<M>([=](int i) { return ~a.v[i]; });
}

FN V fma_register(V a, V b, V c) {
#if HIPJAX_WIDTH == 16
  return (V)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif HIPJAX_WIDTH == 8
  return (V)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
  for (int j = 0; j < kWidth; ++j) c[j] = __builtin_fmaf(a[j], b[j], c[j]);
  return c;
#endif
}
FN F fma(F a, F b, F c) {
  return each_register<F>([=](int i) { return fma_register(a.v[i], b.v[i], c.v[i]); });
}
FN F root(F x) {
  return each_register<F>([=](int i) {
#if HIPJAX_WIDTH == 16
    return (V)_mm512_sqrt_ps((__m512)x.v[i]);
#elif HIPJAX_WIDTH == 8
    return (V)_mm256_sqrt_ps((__m256)x.v[i]);
#else
    V out;
    for (int j = 0; j < kWidth; ++j) out[j] = __builtin_sqrtf(x.v[i][j]);
    return out;
#endif
  });
}

// The same operations on uniform values, so that a formula is written once for both.
FN float select(bool which, float yes, float no) { return which ? yes : no; }
FN int select(bool which, int yes, int no) { return which ? yes : no; }
FN float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
FN float root(float x) { return __builtin_sqrtf(x); }
FN int as_int(float x) {
  int out;
  memcpy(&out, &x, 4);
  return out;
}
FN float as_float(int x) {
  float out;
  memcpy(&out, &x, 4);
  return out;
}
FN float to_float(int x) { return static_cast<float>(x); }
FN int to_int(float x) { return static_cast<int>(x); }
FN int shift_right(int x, int by) { return static_cast<int>(static_cast<uint32_t>(x) >> by); }
FN int times(int a, int b) {
  return static_cast<int>(static_cast<uint32_t>(a) * static_cast<uint32_t>(b));
}
FN int plus(int a, int b) {
  return static_cast<int>(static_cast<uint32_t>(a) + static_cast<uint32_t>(b));
}
FN bool both(bool a, bool b) { return a && b; }
FN bool either(bool a, bool b) { return a || b; }
FN bool opposite(bool a) { return !a; }

FN F lanes_from(F x, I source) {
  return each_register<F>([=](int i) {
    V out;
    for (int j = 0; j < kWidth; ++j) {
      const int from = source.v[i][j];
      out[j] = x.v[from / kWidth][from % kWidth];
    }
    return out;
  });
}
FN I lanes_from(I x, I source) { return as_int(lanes_from(as_float(x), source)); }
FN float value_at(F x, int source) { return x.v[source / kWidth][source % kWidth]; }
FN int value_at(I x, int source) { return x.v[source / kWidth][source % kWidth]; }

// Halves the lanes with `op` until one is left: lane t takes its partner at t + offset.
template <class Scalar, class Register, class Fn>
FN Scalar tree(const Register* v, Fn op) {
  Register half[kRegisters];
  for (int i = 0; i < kRegisters; ++i) half[i] = v[i];
  for (int n = kRegisters / 2; n; n /= 2) {
    for (int i = 0; i < n; ++i) half[i] = op(half[i], half[i + n]);
  }
  Register last = half[0];
  for (int offset = kWidth / 2; offset; offset /= 2) {
    Register moved = last;
    for (int j = 0; j < offset; ++j) moved[j] = last[j + offset];
    last = op(last, moved);
  }
  return last[0];
}
#if HIPJAX_WIDTH > 4
FN float sum(F x) {
#if HIPJAX_WIDTH == 16
  const V sixteen = x.v[0] + x.v[1];
  __m256 halves[2];
  memcpy(halves, &sixteen, sizeof(sixteen));
  const __m256 eight = _mm256_add_ps(halves[0], halves[1]);
#else
  const __m256 eight = (__m256)((x.v[0] + x.v[2]) + (x.v[1] + x.v[3]));
#endif
  __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  four = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(four, _mm_shuffle_ps(four, four, 1)));
}
#else
FN float sum(F x) {
  return tree<float>(x.v, [](V a, V b) { return a + b; });
}
#endif
FN float greatest(F x) {
  return tree<float>(x.v, [](V a, V b) { return b > a ? b : a; });
}
FN int greatest(I x) {
  return tree<int>(x.v, [](VI a, VI b) { return b > a ? b : a; });
}
FN int least(I x) {
  return tree<int>(x.v, [](VI a, VI b) { return b < a ? b : a; });
}
FN int sum(I x) {
  return tree<int>(x.v, [](VI a, VI b) { return a + b; });
}
FN bool any(M x) {
  return tree<int>(x.v, [](VI a, VI b) { return a | b; }) != 0;
}
FN bool all(M x) {
  return tree<int>(x.v, [](VI a, VI b) { return a & b; }) != 0;
}

// Side by side: lane t reads or writes p[t]. From lane `count` on, lanes load zero and store
// nothing.
template <class Out, class T, class Fn>
FN Out loaded(const T* p, int count, Fn widen) {
  Out out;
  T some[kLanes];
  if (count < kLanes) {
    for (int j = 0; j < kLanes; ++j) some[j] = j < count ? p[j] : T(0);
    p = some;
  }
  typedef T Stored __attribute__((vector_size(sizeof(T) * kWidth)));
  for (int i = 0; i < kRegisters; ++i) {
    Stored stored;
    memcpy(&stored, p + i * kWidth, sizeof(stored));
    out.v[i] = widen(stored);
  }
  return out;
}
FN F load(const float* p, int count) {
  return loaded<F>(p, count, [](auto stored) { return stored; });
}
FN F load(const uint16_t* p, int count) {  // bfloat16
  return loaded<F>(p, count,
                   [](auto stored) { return (V)(__builtin_convertvector(stored, VU) << 16); });
}
FN I load(const int* p, int count) {
  return loaded<I>(p, count, [](auto stored) { return (VI)stored; });
}
FN I load(const int8_t* p, int count) {
  return loaded<I>(p, count, [](auto stored) { return __builtin_convertvector(stored, VI); });
}
template <class T, class In, class Fn>
FN void stored(T* p, const In& value, int count, Fn narrow) {
  for (int i = 0; i < kRegisters; ++i) {
    const auto one = narrow(value.v[i]);
    if (count >= (i + 1) * kWidth) {
      memcpy(p + i * kWidth, &one, sizeof(one));
    } else {
      for (int j = 0; j < kWidth && i * kWidth + j < count; ++j) p[i * kWidth + j] = one[j];
    }
  }
}
FN void store(float* p, F value, int count) {
  stored(p, value, count, [](V v) { return v; });
}
FN void store(int* p, I value, int count) {
  stored(p, value, count, [](VI v) { return v; });
}
FN void store(int8_t* p, I value, int count) {
  typedef int8_t Bytes __attribute__((vector_size(kWidth)));
  stored(p, value, count, [](VI v) { return __builtin_convertvector(v, Bytes); });
}
// Anywhere: each live lane reads p[index]; the others are zero.
template <class T>
FN T taken(const T* p, I index, M live, int lane) {
  return live.v[lane / kWidth][lane % kWidth] ? p[index.v[lane / kWidth][lane % kWidth]] : T(0);
}
FN F gather(const float* p, I index, M live) {
  F out;
  for (int j = 0; j < kLanes; ++j) out.v[j / kWidth][j % kWidth] = taken(p, index, live, j);
  return out;
}
FN F gather(const uint16_t* p, I index, M live) {  // bfloat16
  I out;
  for (int j = 0; j < kLanes; ++j) {
    out.v[j / kWidth][j % kWidth] = static_cast<int>(taken(p, index, live, j)) << 16;
  }
  return as_float(out);
}
FN I gather(const int* p, I index, M live) {
  I out;
  for (int j = 0; j < kLanes; ++j) out.v[j / kWidth][j % kWidth] = taken(p, index, live, j);
  return out;
}
// Every lane below `count` writes p[index].
FN void scatter(float* p, I index, F value, int count) {
  for (int j = 0; j < count; ++j) p[index.v[j / kWidth][j % kWidth]] = value.v[j / kWidth][j % kWidth];
}
// One uniform value: the first lane writes it.
FN void put(float* p, float value) { *p = value; }
FN void put(int* p, int value) { *p = value; }

FN int count_of(M live) {
  return -tree<int>(live.v, [](VI a, VI b) { return a + b; });
}
// The first `count` of the live lanes.
FN M first_of(M live, int count) {
  for (int j = 0; j < kLanes; ++j) {
    count += live.v[j / kWidth][j % kWidth];
    if (count < 0) live.v[j / kWidth][j % kWidth] = 0;
  }
  return live;
}
// Writes the values of live lanes one after the other, and says how many.
FN int list(int* p, I value, M live) {
  int at = 0;
  for (int j = 0; j < kLanes; ++j) {
    if (live.v[j / kWidth][j % kWidth]) p[at++] = value.v[j / kWidth][j % kWidth];
  }
  return at;
}

// a + b's partners: lanes with kOffset in their number take b, the others a.
template <int kOffset, int... kLane>
FN V partners(V a, V b, std::integer_sequence<int, kLane...>) {
  const V keep = __builtin_shufflevector(a, b, (kLane & kOffset ? kWidth + kLane : kLane)...);
  const V give = __builtin_shufflevector(
      a, b, (kLane & kOffset ? kWidth + (kLane ^ kOffset) : kLane ^ kOffset)...);
  return keep + give;
}
template <int kOffset, int kCount>
FN void halved(V (&x)[kCount]) {
  if constexpr (kOffset > 0) {
    constexpr std::make_integer_sequence<int, kWidth> all;
    if constexpr (kOffset >= kCount) {
      for (int t = 0; t < kCount; ++t) x[t] = partners<kOffset>(x[t], x[t], all);
    } else {
      for (int from = 0; from < kCount; from += kWidth) {
        for (int t = from; t < from + kOffset; ++t) {
          x[t] = partners<kOffset>(x[t], x[t + kOffset], all);
        }
      }
    }
    halved<kOffset / 2>(x);
  }
}
// Lane t of the result is sum(values[t % kCount]); kCount is a power of two, at most kLanes.
template <int kCount>
FN F sums(const F (&values)[kCount]) {
  V x[kCount];
  for (int t = 0; t < kCount; ++t) {
    V half[kRegisters];
    for (int i = 0; i < kRegisters; ++i) half[i] = values[t].v[i];
    for (int n = kRegisters / 2; n; n /= 2) {
      for (int i = 0; i < n; ++i) half[i] = half[i] + half[i + n];
    }
    x[t] = half[0];
  }
  halved<kWidth / 2>(x);
  return each_register<F>([&](int i) { return x[i * kWidth % kCount]; });
}

// The waves of a block, one after the other: what they leave in shared memory is there for
// all of them in the next `each`.
template <int kWaves>
struct Block {
  char* shared;
  template <class Fn>
  FN void each(Fn fn) const {
    for (int wave = 0; wave < kWaves; ++wave) fn(wave);
  }
};

// Four accumulators of each of kPart lanes, a lane's side by side; see order.md, "row
// products". A wave whose accumulators would not fit the registers runs part by part.
constexpr int part_lanes(int accumulators) {
  const int registers = kWidth == 16 ? 16 : 8;
  int part = kLanes;
  while (part > kWidth / 4 && part * 4 / kWidth * accumulators > registers) part /= 2;
  return part;
}

template <int kPart>
struct Quads {
  V v[kPart * 4 / kWidth];
};
template <int kPart>
FN Quads<kPart> fma(Quads<kPart> a, Quads<kPart> b, Quads<kPart> c) {
  for (int i = 0; i < kPart * 4 / kWidth; ++i) c.v[i] = fma_register(a.v[i], b.v[i], c.v[i]);
  return c;
}

// One register of `low` and of `high` quads from 2 * kWidth terms that lie side by side.
FN void split(V first, V second, V& low, V& high) {
#if HIPJAX_WIDTH == 16
  low = (V)_mm512_shuffle_f32x4((__m512)first, (__m512)second, 0x88);
  high = (V)_mm512_shuffle_f32x4((__m512)first, (__m512)second, 0xdd);
#elif HIPJAX_WIDTH == 8
  low = (V)_mm256_permute2f128_ps((__m256)first, (__m256)second, 0x20);
  high = (V)_mm256_permute2f128_ps((__m256)first, (__m256)second, 0x31);
#else
  low = first;
  high = second;
#endif
}
FN void load_pair(const float* p, V& low, V& high) {
  V both[2];
  memcpy(both, p, sizeof(both));
  split(both[0], both[1], low, high);
}
FN void load_pair(const uint16_t* p, V& low, V& high) {
#if HIPJAX_WIDTH == 16
  alignas(64) static constexpr uint16_t kLow[32] = {
      0, 0,  0, 1,  0, 2,  0, 3,  0, 8,  0, 9,  0, 10, 0, 11,
      0, 16, 0, 17, 0, 18, 0, 19, 0, 24, 0, 25, 0, 26, 0, 27};
  alignas(64) static constexpr uint16_t kHigh[32] = {
      0, 4,  0, 5,  0, 6,  0, 7,  0, 12, 0, 13, 0, 14, 0, 15,
      0, 20, 0, 21, 0, 22, 0, 23, 0, 28, 0, 29, 0, 30, 0, 31};
  const __m512i bits = _mm512_loadu_si512(p);
  low = (V)_mm512_maskz_permutexvar_epi16(0xaaaaaaaa, _mm512_load_si512(kLow), bits);
  high = (V)_mm512_maskz_permutexvar_epi16(0xaaaaaaaa, _mm512_load_si512(kHigh), bits);
#else
  typedef uint16_t Stored __attribute__((vector_size(2 * kWidth)));
  Stored bits[2];
  memcpy(bits, p, sizeof(bits));
  split((V)(__builtin_convertvector(bits[0], VU) << 16),
        (V)(__builtin_convertvector(bits[1], VU) << 16), low, high);
#endif
}

// The same where only `left` of the terms are real: the others are zero, and not read.
template <class T>
FN void load_some(const T* p, int left, V& low, V& high) {
  if (left >= 2 * kWidth) return load_pair(p, low, high);
  T some[2 * kWidth] = {};
  for (int j = 0; j < left; ++j) some[j] = p[j];
  load_pair(some, low, high);
}

// The eight terms of each lane, lane t's from t * 8 on: the first four and the last four.
template <int kPart, class T>
FN void load_quads(const T* w, int part, int left, Quads<kPart>& low, Quads<kPart>& high) {
  const T* p = w + part * kPart * 8;
  if (left >= 8 * kLanes) {
    for (int i = 0; i < kPart * 4 / kWidth; ++i) load_pair(p + 2 * i * kWidth, low.v[i], high.v[i]);
    return;
  }
  left -= part * kPart * 8;
  for (int i = 0; i < kPart * 4 / kWidth; ++i) {
    load_some(p + 2 * i * kWidth, left - 2 * i * kWidth, low.v[i], high.v[i]);
  }
}
// A group of 256 terms laid out in registers of quads, low and high by turns.
FN void stage_group(float* to, const float* x, int left) {
  for (int at = 0; at < 8 * kLanes; at += 2 * kWidth) {
    V both[2];
    load_some(x + at, left - at, both[0], both[1]);
    memcpy(to + at, both, sizeof(both));
  }
}
template <int kPart>
FN Quads<kPart> staged_half(const float* staged, int part, int half) {
  Quads<kPart> out;
  for (int i = 0; i < kPart * 4 / kWidth; ++i) {
    memcpy(&out.v[i], staged + part * kPart * 8 + (2 * i + half) * kWidth, sizeof(V));
  }
  return out;
}
FN void prefetch(const void* p) { __builtin_prefetch(p); }

// Each lane's four accumulators as one value, kept four times, and the tree over lanes.
struct Folded {
  V v[kLanes * 4 / kWidth];
};
FN V swapped(V x, int by) {  // partners within each lane's four
#if HIPJAX_WIDTH == 16
  const __m512 y = (__m512)x;
  return by == 1 ? (V)_mm512_permute_ps(y, 0xb1) : (V)_mm512_permute_ps(y, 0x4e);
#elif HIPJAX_WIDTH == 8
  const __m256 y = (__m256)x;
  return by == 1 ? (V)_mm256_permute_ps(y, 0xb1) : (V)_mm256_permute_ps(y, 0x4e);
#else
  return by == 1 ? V{x[1], x[0], x[3], x[2]} : V{x[2], x[3], x[0], x[1]};
#endif
}
template <int kPart>
FN void fold(const Quads<kPart>& a, int part, Folded& to) {
  const int count = kPart * 4 / kWidth;
  for (int i = 0; i < count; ++i) {
    const V pairs = a.v[i] + swapped(a.v[i], 1);
    to.v[part * count + i] = pairs + swapped(pairs, 2);
  }
}
FN float sum(const Folded& folded) {
  V half[kLanes * 2 / kWidth];
  const int count = kLanes * 2 / kWidth;
  for (int i = 0; i < count; ++i) half[i] = folded.v[i] + folded.v[i + count];
  for (int n = count / 2; n; n /= 2) {
    for (int i = 0; i < n; ++i) half[i] = half[i] + half[i + n];
  }
#if HIPJAX_WIDTH == 16
  const __m512 all = (__m512)half[0];
  const __m512 two = _mm512_add_ps(all, _mm512_shuffle_f32x4(all, all, 0x4e));
  return _mm512_cvtss_f32(_mm512_add_ps(two, _mm512_shuffle_f32x4(two, two, 0xb1)));
#elif HIPJAX_WIDTH == 8
  const __m256 two = (__m256)half[0];
  return _mm256_cvtss_f32(_mm256_add_ps(two, _mm256_permute2f128_ps(two, two, 0x01)));
#else
  return half[0][0];
#endif
}

}  // namespace hipjax::HIPJAX_TARGET
