// The accumulators of row products. Included by cpu/wave.h only.
#pragma once

namespace hipjax::HIPJAX_TARGET {

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
  HIPJAX_UNROLL
  for (int i = 0; i < kPart * 4 / kWidth; ++i) c.v[i] = fma_register(a.v[i], b.v[i], c.v[i]);
  return c;
}

// The first or the last four terms of each lane, lane t's eight from t * 8 on, for the lanes of
// one register of quads.
template <int kHalf>
FN V half_of(V first, V second) {
#if HIPJAX_WIDTH == 16
  return (V)_mm512_shuffle_f32x4((__m512)first, (__m512)second, kHalf ? 0xdd : 0x88);
#elif HIPJAX_WIDTH == 8
  return (V)_mm256_permute2f128_ps((__m256)first, (__m256)second, kHalf ? 0x31 : 0x20);
#else
  return kHalf ? second : first;
#endif
}
template <int kHalf>
FN V load_half(const float* p) {
  V first, second;
  memcpy(&first, p, sizeof(V));
  memcpy(&second, p + kWidth, sizeof(V));
  return half_of<kHalf>(first, second);
}
#if HIPJAX_WIDTH == 16
alignas(64) constexpr uint16_t kHalves[2][32] = {
    {0, 0, 0, 1, 0, 2, 0, 3, 0, 8, 0, 9, 0, 10, 0, 11,
     0, 16, 0, 17, 0, 18, 0, 19, 0, 24, 0, 25, 0, 26, 0, 27},
    {0, 4, 0, 5, 0, 6, 0, 7, 0, 12, 0, 13, 0, 14, 0, 15,
     0, 20, 0, 21, 0, 22, 0, 23, 0, 28, 0, 29, 0, 30, 0, 31}};
template <int kHalf>
FN V load_half(const uint16_t* p) {
  return (V)_mm512_maskz_permutexvar_epi16(0xaaaaaaaa, _mm512_load_si512(kHalves[kHalf]),
                                           _mm512_loadu_si512(p));
}
#else
template <int kHalf>
FN V load_half(const uint16_t* p) {
  typedef uint16_t Stored __attribute__((vector_size(2 * kWidth)));
  Stored bits[2];
  memcpy(bits, p, sizeof(bits));
  return half_of<kHalf>((V)(__builtin_convertvector(bits[0], VU) << 16),
                        (V)(__builtin_convertvector(bits[1], VU) << 16));
}
#endif
template <int kHalf, int kPart, class T>
FN Quads<kPart> load_quads(const T* p) {
  Quads<kPart> out;
  HIPJAX_UNROLL
  for (int i = 0; i < kPart * 4 / kWidth; ++i) out.v[i] = load_half<kHalf>(p + 2 * i * kWidth);
  return out;
}

FN void fetch(const void* p) { __builtin_prefetch(p, 0, 2); }  // into the second cache

// The lanes' values, (a0 + a1) + (a2 + a3), of four outputs: a lane's four side by side.
struct Folded {
  V v[kLanes * 4 / kWidth];
};
template <int... kPlace>
FN V pairs_of_fours(V a, V b, int odd, std::integer_sequence<int, kPlace...>) {
  // Of each four places: two from a, two from b, the even ones or the odd ones.
  return odd ? __builtin_shufflevector(
                   a, b, (kPlace / 4 * 4 + kPlace % 2 * 2 + 1 + (kPlace & 2 ? kWidth : 0))...)
             : __builtin_shufflevector(
                   a, b, (kPlace / 4 * 4 + kPlace % 2 * 2 + (kPlace & 2 ? kWidth : 0))...);
}
FN V sums_of_pairs(V a, V b) {
  constexpr std::make_integer_sequence<int, kWidth> all;
  return pairs_of_fours(a, b, 0, all) + pairs_of_fours(a, b, 1, all);
}
FN V fold(V a, V b, V c, V d) { return sums_of_pairs(sums_of_pairs(a, b), sums_of_pairs(c, d)); }

// The tree over lanes for all four outputs.
FN void sums(const Folded& folded, float* four) {
  V half[kLanes * 2 / kWidth];
  constexpr int kCount = kLanes * 2 / kWidth;
  HIPJAX_UNROLL
  for (int i = 0; i < kCount; ++i) half[i] = folded.v[i] + folded.v[i + kCount];
  HIPJAX_UNROLL
  for (int n = kCount / 2; n; n /= 2) {
    HIPJAX_UNROLL
    for (int i = 0; i < n; ++i) half[i] = half[i] + half[i + n];
  }
  V last = half[0];
  if constexpr (kWidth >= 16) last = last + moved<kWidth / 2>(last, std::make_integer_sequence<int, kWidth>());
  if constexpr (kWidth >= 8) last = last + moved<4>(last, std::make_integer_sequence<int, kWidth>());
  memcpy(four, &last, 4 * sizeof(float));
}

}  // namespace hipjax::HIPJAX_TARGET
