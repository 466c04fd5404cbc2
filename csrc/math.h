// Transcendental functions from IEEE operations alone, so that every target gives the same
// bits. T is F or float. Accuracy: tests/ffi/test_math.py.
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

// x rounded to the nearest integer, ties to even, for |x| < 2^22.
template <class T>
FN T nearest(T x) {
  const T magic = constant<T>(12582912.0f);  // 1.5 * 2^23
  return (x + magic) - magic;
}

// e^x: 0 below -104, infinity above 89.
template <class T>
FN T exp(T x) {
  T clamped = select(x < constant<T>(-104.0f), constant<T>(-104.0f), x);
  clamped = select(x > constant<T>(89.0f), constant<T>(89.0f), clamped);
  const T n = nearest(clamped * constant<T>(1.44269504f));
  T r = fma(n, constant<T>(-0.693145751953125f), clamped);
  r = fma(n, constant<T>(-1.42860682e-6f), r);
  T p = constant<T>(1.3981999e-3f);
  p = fma(p, r, constant<T>(8.3334519e-3f));
  p = fma(p, r, constant<T>(4.1665795e-2f));
  p = fma(p, r, constant<T>(1.6666665e-1f));
  p = fma(p, r, constant<T>(0.5f));
  p = fma(p * r, r, r) + constant<T>(1.0f);
  // Two factors, each a normal number, so that results below 2^-126 round once.
  const auto whole = to_int(n);
  const auto half = to_int(n * constant<T>(0.5f));
  const T first = as_float((half + 127) << 23);
  const T second = as_float((whole - half + 127) << 23);
  return select(x == x, p * first * second, x);
}

// 1 / (1 + e^-x).
template <class T>
FN T sigmoid(T x) {
  const auto negative = x < constant<T>(0.0f);
  const T e = exp(select(negative, x, -x));
  return select(negative, e, constant<T>(1.0f)) / (constant<T>(1.0f) + e);
}

// x / (1 + e^-x).
template <class T>
FN T silu(T x) {
  const auto negative = x < constant<T>(0.0f);
  const T e = exp(select(negative, x, -x));
  return select(negative, x * e, x) / (constant<T>(1.0f) + e);
}

template <class T>
FN T reciprocal_root(T x) {
  return constant<T>(1.0f) / root(x);
}

}  // namespace hipjax::HIPJAX_TARGET
