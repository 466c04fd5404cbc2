// Transcendental functions from IEEE operations alone, so that every target gives the same
// bits. T is F or float. Stated accuracy and methods: order.md; tests/ffi/test_math.py
// measures it. A value that needs more than a float's digits is kept as high + low.
#pragma once

#include "lanes.h"

namespace hipjax::HIPJAX_TARGET {

template <class T>
FN T constant(float x);
template <>
FN float constant<float>(float x) {
  return x;
}
#if !HIPJAX_GPU
template <>
FN F constant<F>(float x) {
  return splat(x);
}
#endif

// c[0] + c[1] x + c[2] x^2 + …, by Horner's rule.
template <class T, int n>
FN T polynomial(const float (&c)[n], T x) {
  T p = constant<T>(c[n - 1]);
  HIPJAX_UNROLL
  for (int i = n - 2; i >= 0; --i) p = fma(p, x, constant<T>(c[i]));
  return p;
}

// x rounded to the nearest integer, ties to even, for |x| < 2^22.
template <class T>
FN T nearest(T x) {
  const T magic = constant<T>(12582912.0f);  // 1.5 * 2^23
  return (x + magic) - magic;
}

// A value with about ten digits more than a float's, times 2^n for a whole n.
template <class T>
struct Scaled {
  T high;
  T low;
  T n;
};

// value * 2^n in two factors, each a normal number, so that results below 2^-126 round once.
template <class T>
FN T times_power(T value, T n) {
  const auto whole = to_int(n);
  const auto half = to_int(n * constant<T>(0.5f));
  return value * as_float((half + 127) << 23) * as_float((whole - half + 127) << 23);
}

// e^x for -112 <= x <= 89: 2^n e^r with |r| <= ln 2 / 2.
template <class T>
FN Scaled<T> exp_scaled(T x) {
  constexpr float kLog2e = 0x1.715476p+0f;
  constexpr float kLn2High = 0x1.62e4p-1f;  // n times it is exact
  constexpr float kLn2Low = 0x1.7f7d1cp-20f;
  constexpr float kTerms[] = {0x1p-1f,          0x1.555554p-3f,  0x1.5554e6p-5f,
                              0x1.111302p-7f, 0x1.6d4f4ep-10f, 0x1.9e188ap-13f};
  const T n = nearest(x * constant<T>(kLog2e));
  const T near = fma(n, constant<T>(-kLn2High), x);  // exact
  const T r = fma(n, constant<T>(-kLn2Low), near);
  const T lost = fma(n, constant<T>(-kLn2Low), near - r);
  // 1 + r + r^2 q(r), largest term first.
  const T sum = constant<T>(1.0f) + r;
  const T rest = fma(r * r, polynomial(kTerms, r), ((constant<T>(1.0f) - sum) + r) + lost);
  const T high = sum + rest;
  return {high, (sum - high) + rest, n};
}

template <class T>
FN T clamped(T x, float least, float most) {
  x = select(x < constant<T>(least), constant<T>(least), x);
  return select(x > constant<T>(most), constant<T>(most), x);
}

template <class T>
FN T magnitude(T x) {
  return select(x < constant<T>(0.0f), -x, x);
}

// e^x
template <class T>
FN T exp(T x) {
  const T inside = clamped(x, -112.0f, 89.0f);
  const Scaled<T> e = exp_scaled(select(x == x, inside, constant<T>(0.0f)));
  return select(x == x, times_power(e.high, e.n), x);
}

// (top + top_low) * 2^n / (1 + e^-|x|), where e is e^-|x|.
template <class T>
FN T over_one_plus(T top, T top_low, T n, const Scaled<T>& e) {
  const T small = times_power(e.high, e.n);
  const T sum = constant<T>(1.0f) + small;
  const T sum_low = ((constant<T>(1.0f) - sum) + small) + times_power(e.low, e.n);
  const T inverse = constant<T>(1.0f) / sum;
  const T quotient = top * inverse;
  const T left = fma(-quotient, sum, top) + fma(-quotient, sum_low, top_low);
  return times_power(fma(left, inverse, quotient), n);
}

// 1 / (1 + e^-x)
template <class T>
FN T sigmoid(T x) {
  const auto negative = x < constant<T>(0.0f);
  const T zero = constant<T>(0.0f);
  const T inside = select(x == x, magnitude(clamped(x, -112.0f, 112.0f)), zero);
  const Scaled<T> e = exp_scaled(-inside);
  const T one = constant<T>(1.0f);
  const T value = over_one_plus(select(negative, e.high, one), select(negative, e.low, zero),
                                select(negative, e.n, zero), e);
  return select(x == x, value, x);
}

// x / (1 + e^-x)
template <class T>
FN T silu(T x) {
  const auto negative = x < constant<T>(0.0f);
  const T zero = constant<T>(0.0f);
  const T inside = select(x == x, clamped(x, -112.0f, 112.0f), zero);
  const Scaled<T> e = exp_scaled(-magnitude(inside));
  const T product = inside * e.high;
  const T low = fma(inside, e.low, fma(inside, e.high, -product));
  const T value = over_one_plus(select(negative, product, inside), select(negative, low, zero),
                                select(negative, e.n, zero), e);
  // From 112 on, and for NaN and either zero, x itself.
  return select(both(x < constant<T>(112.0f), opposite(x == zero)), value, x);
}

// log(1 + y + low) for 0 <= 1 + y < infinity and a low below y's last digit.
template <class T>
FN T log_one_plus(T y, T low) {
  constexpr float kLn2High = 0x1.62e4p-1f;
  constexpr float kLn2Low = 0x1.7f7d1cp-20f;
  constexpr int kRootHalf = 0x3f3504f3;  // the bits of sqrt(1/2)
  constexpr int kOne = 0x3f800000;
  constexpr float kTerms[] = {0x1.555548p-2f,  -0x1.000006p-2f, 0x1.99a478p-3f,
                              -0x1.555c4ap-3f, 0x1.233b7p-3f,   -0x1.fc278ap-4f,
                              0x1.e6c212p-4f,  -0x1.de0a36p-4f, 0x1.1477e2p-4f};
  const T one = constant<T>(1.0f);
  const T sum = one + y;
  const T y_part = sum - one;
  const T sum_low = (one - (sum - y_part)) + (y - y_part) + low;  // sum + sum_low = 1 + y + low
  // sum = 2^k m with m from sqrt(1/2) to sqrt(2).
  const auto power = shift_right(as_int(sum) + (kOne - kRootHalf), 23);
  const T k = to_float(power - 127);
  const T m = as_float(as_int(sum) - (power << 23) + kOne);
  const auto whole = k == constant<T>(0.0f);
  const T f = select(whole, y, m - one);
  const T f_low = select(whole, low, sum_low) / sum;
  // k ln 2 + f - f^2 / 2 + f^3 p(f), largest terms first.
  const T large = k * constant<T>(kLn2High);
  const T head = large + f;
  const T head_low = ((large - head) + f) + fma(k, constant<T>(kLn2Low), f_low);
  const T square = f * f;
  const T tail = square * fma(f, polynomial(kTerms, f), constant<T>(-0.5f));
  return head + (head_low + tail);
}

// log(1 + x)
template <class T>
FN T log1p(T x) {
  const T infinity = constant<T>(__builtin_inff());
  const T zero = constant<T>(0.0f);
  const T edge = constant<T>(-1.0f);
  const auto inside = both(edge < x, x < infinity);
  const T value = log_one_plus(select(inside, x, zero), zero);
  const T below = select(x == edge, -infinity, constant<T>(__builtin_nanf("")));
  const T outside = select(x <= edge, below, x);
  return select(both(inside, opposite(x == zero)), value, outside);
}

// log(1 + e^x)
template <class T>
FN T softplus(T x) {
  const T zero = constant<T>(0.0f);
  const T inside = select(x == x, magnitude(clamped(x, -112.0f, 112.0f)), zero);
  const Scaled<T> e = exp_scaled(-inside);
  const T log = log_one_plus(times_power(e.high, e.n), times_power(e.low, e.n));
  return select(x == x, select(x > zero, x, zero) + log, x);
}

// 1 / sqrt(x)
template <class T>
FN T reciprocal_root(T x) {
  return constant<T>(1.0f) / root(x);
}

// sin x and cos x for |x| <= 2^18; NaN from 2^20 on.
template <class T>
FN void sin_cos(T x, T& sin, T& cos) {
  constexpr float kTwoOverPi = 0x1.45f306p-1f;
  constexpr float kHalfPi[] = {0x1.921fb6p+0f, -0x1.777a5cp-25f, -0x1.ee59dap-50f};  // their sum
  constexpr float kSin[] = {-0x1.555556p-3f, 0x1.11116ep-7f, -0x1.a05194p-13f, 0x1.79de78p-19f};
  constexpr float kCos[] = {0x1.555548p-5f, -0x1.6c0af4p-10f, 0x1.999116p-16f};
  const T one = constant<T>(1.0f);
  const auto inside = magnitude(x) < constant<T>(1048576.0f);
  const T angle = select(inside, x, constant<T>(0.0f));
  // x = q pi / 2 + r + r_low
  const T q = nearest(angle * constant<T>(kTwoOverPi));
  const T near = fma(q, constant<T>(-kHalfPi[0]), angle);  // exact
  const T step = q * constant<T>(kHalfPi[1]);
  const T step_low = fma(q, constant<T>(kHalfPi[1]), -step);
  const T nearer = near - step;
  const T taken = nearer - near;
  const T lost = (near - (nearer - taken)) - (step + taken);  // near - step - nearer
  const T more = fma(q, constant<T>(-kHalfPi[2]), lost - step_low);
  const T r = nearer + more;
  const T r_low = (nearer - r) + more;
  const T square = r * r;
  const T sine = r + fma(square * r, polynomial(kSin, square), r_low);
  const T half = square * constant<T>(0.5f);
  const T head = one - half;
  const T tail = fma(square * square, polynomial(kCos, square), -(r * r_low));
  const T cosine = head + (((one - head) - half) + tail);
  const auto turn = to_int(q);
  const auto odd = to_float(turn & 1) > constant<T>(0.0f);
  const T nan = constant<T>(__builtin_nanf(""));
  const auto sin_sign = (turn & 2) << 30;
  const auto cos_sign = ((turn + 1) & 2) << 30;
  sin = as_float(as_int(select(odd, cosine, sine)) ^ sin_sign);
  cos = as_float(as_int(select(odd, sine, cosine)) ^ cos_sign);
  sin = select(x == constant<T>(0.0f), x, select(inside, sin, nan));  // keeps the sign of zero
  cos = select(inside, cos, nan);
}

}  // namespace hipjax::HIPJAX_TARGET
