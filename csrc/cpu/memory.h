// A wave's values in memory. Included by cpu/wave.h only.
#pragma once

namespace hipjax::HIPJAX_TARGET {

// Side by side: lane t reads or writes p[t]. From lane `count` on, lanes load zero and store
// nothing.
#if HIPJAX_WIDTH == 16
FN __mmask16 below(int count, int i) {  // of the lanes of register i
  const int some = count - i * kWidth;
  return some >= kWidth ? 0xffff : some <= 0 ? 0 : (1u << some) - 1;
}
FN F load(const float* p, int count) {
  return each_register<F>([=](int i) {
    return (V)_mm512_maskz_loadu_ps(below(count, i), p + i * kWidth);
  });
}
FN F load(const uint16_t* p, int count) {  // bfloat16
  return each_register<F>([=](int i) {
    const __m256i bits = _mm256_maskz_loadu_epi16(below(count, i), p + i * kWidth);
    return (V)_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16);
  });
}
FN I load(const int* p, int count) {
  return each_register<I>([=](int i) {
    return (VI)_mm512_maskz_loadu_epi32(below(count, i), p + i * kWidth);
  });
}
FN I load(const int8_t* p, int count) {
  return each_register<I>([=](int i) {
    return (VI)_mm512_cvtepi8_epi32(_mm_maskz_loadu_epi8(below(count, i), p + i * kWidth));
  });
}
FN void store(float* p, F value, int count) {
  HIPJAX_UNROLL
  for (int i = 0; i < kRegisters; ++i) {
    _mm512_mask_storeu_ps(p + i * kWidth, below(count, i), (__m512)value.v[i]);
  }
}
FN void store(int* p, I value, int count) {
  HIPJAX_UNROLL
  for (int i = 0; i < kRegisters; ++i) {
    _mm512_mask_storeu_epi32(p + i * kWidth, below(count, i), (__m512i)value.v[i]);
  }
}
FN void store(int8_t* p, I value, int count) {
  HIPJAX_UNROLL
  for (int i = 0; i < kRegisters; ++i) {
    _mm512_mask_cvtepi32_storeu_epi8(p + i * kWidth, below(count, i), (__m512i)value.v[i]);
  }
}
#else
template <class Out, class T, class Fn>
FN Out loaded(const T* p, int count, Fn widen) {
  Out out;
  T some[kLanes] = {};
  if (count < kLanes) {
    if (count > 0) memcpy(some, p, count * sizeof(T));
    p = some;
  }
  typedef T Stored __attribute__((vector_size(sizeof(T) * kWidth)));
  HIPJAX_UNROLL
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
template <class T, class In>
FN void stored(T* p, const In& value, int count) {
  typedef T Narrow __attribute__((vector_size(sizeof(T) * kWidth)));
  Narrow all[kRegisters];
  HIPJAX_UNROLL
  for (int i = 0; i < kRegisters; ++i) all[i] = __builtin_convertvector(value.v[i], Narrow);
  if (count >= kLanes) {
    memcpy(p, all, sizeof(all));
  } else if (count > 0) {
    memcpy(p, all, count * sizeof(T));
  }
}
FN void store(float* p, F value, int count) { stored(p, value, count); }
FN void store(int* p, I value, int count) { stored(p, value, count); }
FN void store(int8_t* p, I value, int count) { stored(p, value, count); }
#endif

// Lane by lane, through memory.
struct Lanes {
  int of[kLanes];
  template <class T>
  FN explicit Lanes(const T& x) {
    memcpy(of, &x, sizeof(x));
  }
  template <class T>
  FN T back() const {
    T x;
    memcpy(&x, of, sizeof(x));
    return x;
  }
};

// Anywhere: each live lane reads p[index]; the others are zero.
template <class Out, class T>
FN Out gathered(const T* p, I index, M live, int shift) {
  Lanes from(index);
  const Lanes use(live);
  for (int j = 0; j < kLanes; ++j) {
    int bits = 0;
    if (use.of[j]) {
      T x = p[from.of[j]];
      memcpy(&bits, &x, sizeof(x));
    }
    from.of[j] = bits << shift;
  }
  return from.back<Out>();
}
#if HIPJAX_WIDTH == 16
FN F gather(const float* p, I index, M live) {
  return each_register<F>([=](int i) {
    return (V)_mm512_mask_i32gather_ps(_mm512_setzero_ps(), _mm512_movepi32_mask((__m512i)live.v[i]),
                                       (__m512i)index.v[i], p, 4);
  });
}
#elif HIPJAX_WIDTH == 8
FN F gather(const float* p, I index, M live) {
  return each_register<F>([=](int i) {
    return (V)_mm256_mask_i32gather_ps(_mm256_setzero_ps(), p, (__m256i)index.v[i],
                                       (__m256)live.v[i], 4);
  });
}
#else
FN F gather(const float* p, I index, M live) { return gathered<F>(p, index, live, 0); }
#endif
FN F gather(const uint16_t* p, I index, M live) {  // bfloat16
  return gathered<F>(p, index, live, 16);
}
// Every lane below `count` writes p[index].
FN void scatter(float* p, I index, F value, int count) {
  const Lanes to(index), bits(value);
  for (int j = 0; j < count; ++j) memcpy(p + to.of[j], bits.of + j, 4);
}
// One uniform value: the first lane writes it.
FN void put(float* p, float value) { *p = value; }
FN void put(int* p, int value) { *p = value; }

FN int count_of(M live) {
  return -tree<int>(live.v, [](VI a, VI b) { return a + b; });
}
// The first `count` of the live lanes.
FN M first_of(M live, int count) {
  Lanes all(live);
  for (int j = 0; j < kLanes; ++j) {
    count += all.of[j];
    if (count < 0) all.of[j] = 0;
  }
  return all.back<M>();
}
// Writes the values of live lanes one after the other, and says how many.
FN int list(int* p, I value, M live) {
  const Lanes values(value), use(live);
  int at = 0;
  for (int j = 0; j < kLanes; ++j) {
    if (use.of[j]) p[at++] = values.of[j];
  }
  return at;
}

}  // namespace hipjax::HIPJAX_TARGET
