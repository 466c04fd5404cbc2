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
// Values of a wave stay in registers only where the loops over them are unrolled. Without vector
// instructions there are not enough registers anyway.
#if HIPJAX_WIDTH > 4
#define HIPJAX_UNROLL _Pragma("GCC unroll 32")
#else
#define HIPJAX_UNROLL
#endif

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
  HIPJAX_UNROLL
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

FN F splat(float x) {  // x - 0 is x, for a zero of either sign, and no instruction
  return each_register<F>([=](int) { return x - V{}; });
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

FN float value_at(F x, int source) {
  float lanes[kLanes];
  memcpy(lanes, &x, sizeof(x));
  return lanes[source];
}

// Lane j takes what is in lane j + kOffset.
template <int kOffset, class Register, int... kLane>
FN Register moved(Register x, std::integer_sequence<int, kLane...>) {
  return __builtin_shufflevector(x, x, ((kLane + kOffset) % kWidth)...);
}
template <int kOffset, class Register, class Fn>
FN Register within(Register x, Fn op) {
  if constexpr (kOffset > 0) {
    x = op(x, moved<kOffset>(x, std::make_integer_sequence<int, kWidth>()));
    return within<kOffset / 2>(x, op);
  }
  return x;
}
// Halves the lanes with `op` until one is left: lane t takes its partner at t + offset.
template <class Scalar, class Register, class Fn>
FN Scalar tree(const Register* v, Fn op) {
  Register half[kRegisters];
  HIPJAX_UNROLL
  for (int i = 0; i < kRegisters; ++i) half[i] = v[i];
  HIPJAX_UNROLL
  for (int n = kRegisters / 2; n; n /= 2) {
    HIPJAX_UNROLL
    for (int i = 0; i < n; ++i) half[i] = op(half[i], half[i + n]);
  }
  return within<kWidth / 2>(half[0], op)[0];
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
      HIPJAX_UNROLL
      for (int t = 0; t < kCount; ++t) x[t] = partners<kOffset>(x[t], x[t], all);
    } else {
      HIPJAX_UNROLL
      for (int from = 0; from < kCount; from += kWidth) {
        HIPJAX_UNROLL
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
  HIPJAX_UNROLL
  for (int t = 0; t < kCount; ++t) {
    V half[kRegisters];
    HIPJAX_UNROLL
    for (int i = 0; i < kRegisters; ++i) half[i] = values[t].v[i];
    HIPJAX_UNROLL
    for (int n = kRegisters / 2; n; n /= 2) {
      HIPJAX_UNROLL
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

}  // namespace hipjax::HIPJAX_TARGET

#include "cpu/memory.h"
#include "cpu/quads.h"
