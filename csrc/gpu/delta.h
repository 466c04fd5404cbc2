// Tiles of the delta rule in registers, and Q8 codes: included by kernels/delta_state.h only.
#pragma once

namespace hipjax::gpu {

// An element of an array that every lane reads alike and no lane writes.
FN float uniform(const float* p, int i) {
#if defined(__AMDGCN__)
  typedef const __attribute__((address_space(4))) float* Constant;
  return ((Constant)(reinterpret_cast<uintptr_t>(p)))[i];
#else
  return p[i];
#endif
}

// The same pointer, of which the compiler no longer knows what it has loaded from there: it
// would keep all of a row's keys.
template <int kKeys>
FN const float* again(const float* p) {
#if defined(__AMDGCN__)
  asm volatile("" : "+s"(p));
#else
  asm volatile("" : "+l"(p));
  if constexpr (kKeys) p = static_cast<const float*>(__builtin_assume_aligned(p, 16));
#endif
  return p;
}

// The wave's number as a scalar.
FN int one_of_block(int wave) {
#if defined(__AMDGCN__)
  return __builtin_amdgcn_readfirstlane(wave);
#else
  return wave;
#endif
}

// The same value, computed before what follows and not put off beyond a branch.
FN F settled(F x) {
#if defined(__AMDGCN__)
  asm volatile("" : "+v"(x));
#else
  asm volatile("" : "+f"(x));
#endif
  return x;
}

// Nothing is moved across: else every load of a tile comes first, and does not fit.
FN void in_order() {
#if defined(__AMDGCN__)
  __builtin_amdgcn_sched_barrier(0);
#else
  asm volatile("" ::: "memory");
#endif
}
constexpr int kInOrder = 16;

template <int kKeys>
struct RegisterTile {
  F s[kKeys];
  FN explicit RegisterTile(float*) {}
  template <class Fn>
  FN void each(int, Fn fn) {
#pragma unroll
    for (int i = 0; i < kKeys; ++i) {
      fn(i, s[i]);
      if (i % kInOrder == kInOrder - 1) in_order();
    }
  }
};
template <>
struct DeltaTile<32> : RegisterTile<32> {
  using RegisterTile::RegisterTile;
};
template <>
struct DeltaTile<64> : RegisterTile<64> {
  using RegisterTile::RegisterTile;
};
template <>
struct DeltaTile<128> : RegisterTile<128> {
  using RegisterTile::RegisterTile;
};

// 32 value channels of float32 [keys, values], to and from a tile.
FN void load_floats(DeltaTile<0>& tile, const float* from, int values, int keys, int count) {
  tile.each(keys, [&](int i, F& s) { s = load(from + static_cast<long>(i) * values, count); });
}
FN void store_floats(DeltaTile<0>& tile, float* to, int values, int keys, int count) {
  tile.each(keys, [&](int i, F& s) { store(to + static_cast<long>(i) * values, s, count); });
}
// Lanes past the last channel repeat it, so that no load waits for a branch.
template <int kKeys>
FN void load_floats(DeltaTile<kKeys>& tile, const float* from, int values, int keys, int count) {
  const float* mine = from + (lane() < count ? lane() : count - 1);
  tile.each(keys, [&](int, F& s) {
    s = *mine;
    mine += values;
  });
}
template <int kKeys>
FN void store_floats(DeltaTile<kKeys>& tile, float* to, int values, int keys, int count) {
  if (lane() >= count) return;
  float* mine = to + lane();
  tile.each(keys, [&](int, F& s) {
    *mine = s;
    mine += values;
  });
}

// The codes of 32 value channels, each channel's side by side, to and from a tile of floats.
FN void load_codes(DeltaTile<0>& tile, const int8_t* codes, int keys, int count) {
  tile.each(keys, [&](int i, F& s) {
    s = lane() < count ? to_float(codes[lane() * keys + i]) : 0.0f;
  });
}
FN void store_codes(DeltaTile<0>& tile, int8_t* codes, int keys, int count) {
  tile.each(keys, [&](int i, F& s) {
    if (lane() < count) codes[lane() * keys + i] = static_cast<int8_t>(to_int(s));
  });
}

typedef int Sixteen __attribute__((vector_size(16)));
template <int kKeys>
FN void load_codes(DeltaTile<kKeys>& tile, const int8_t* codes, int, int count) {
  const int channel = lane() < count ? lane() : count - 1;
  const Sixteen* mine = reinterpret_cast<const Sixteen*>(codes + channel * kKeys);
#pragma unroll
  for (int i = 0; i < kKeys; i += 16) {
    const Sixteen some = mine[i / 16];
#pragma unroll
    for (int j = 0; j < 16; ++j) {
      tile.s[i + j] = to_float(static_cast<int8_t>(some[j / 4] >> (j % 4 * 8)));
    }
  }
}
template <int kKeys>
FN void store_codes(DeltaTile<kKeys>& tile, int8_t* codes, int, int count) {
  if (lane() >= count) return;
  Sixteen* mine = reinterpret_cast<Sixteen*>(codes + lane() * kKeys);
#pragma unroll
  for (int i = 0; i < kKeys; i += 16) {
    Sixteen some;
#pragma unroll
    for (int j = 0; j < 16; j += 4) {
      some[j / 4] = (to_int(tile.s[i + j]) & 255) | (to_int(tile.s[i + j + 1]) & 255) << 8 |
                    (to_int(tile.s[i + j + 2]) & 255) << 16 | to_int(tile.s[i + j + 3]) << 24;
    }
    mine[i / 16] = some;
    in_order();
  }
}

}  // namespace hipjax::gpu
