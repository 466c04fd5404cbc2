// The router's verdict: which experts a row passes through, and their weights.
#pragma once

#include "arguments.h"

namespace hipjax {

// The `chosen` greatest of each row's `count` logits, greatest first, equal ones by the lower
// expert, and their softmax weights; see order.md, "router".
struct Route {
  static constexpr int kWaves = 1;
  static constexpr int kVariants = 1;
  static constexpr int kMaxExperts = 512;  // the keys of a row stay in registers
  static constexpr int kMaxChosen = 16;
  const float* logits;
  int* experts;
  float* weights;
  int rows;
  int count;
  int chosen;
  int renormalise;  // 1: the chosen weights add up to one

  constexpr int variant() const { return 0; }
  constexpr int blocks() const { return rows; }
  constexpr int shared_bytes() const { return 0; }
  constexpr long block_cost() const { return 8L * count; }
};

}  // namespace hipjax

#ifdef HIPJAX_TARGET
#include "lanes.h"
#include "math.h"

namespace hipjax::HIPJAX_TARGET {

constexpr int kNever = -2147483647 - 1;  // below the key of any logit

// Integers in the order of the logits: both zeros are equal, a NaN comes after -infinity.
FN I route_key(F logit) {
  const I bits = as_int(logit + splat(0.0f));
  const I key = select(bits < splat_int(0), bits ^ splat_int(0x7fffffff), bits);
  return select(logit == logit, key, splat_int(kNever + 1));
}
FN float logit_of(int key) { return as_float(key < 0 ? key ^ 0x7fffffff : key); }

template <int>
FN void run(const Route& a, int block, Block<1>) {
  constexpr int kGroups = Route::kMaxExperts / kLanes;
  const float* logits = a.logits + static_cast<long>(block) * a.count;
  I keys[kGroups];
  HIPJAX_UNROLL
  for (int g = 0; g < kGroups; ++g) {
    if (g * kLanes >= a.count) break;
    const int left = a.count - g * kLanes;
    const I key = route_key(load(logits + g * kLanes, left));
    keys[g] = select(lane() < splat_int(left), key, splat_int(kNever));
  }
  // Slot i's key in lane i. Each search starts after the last one's find, in the order of
  // descending key and ascending expert.
  I chosen_key = splat_int(0), chosen = splat_int(0);
  int top = 2147483647, last_key = top, last = -1;
  for (int slot = 0; slot < a.chosen; ++slot) {
    I best = splat_int(kNever), where = splat_int(0);
    HIPJAX_UNROLL
    for (int g = 0; g < kGroups; ++g) {
      if (g * kLanes >= a.count) break;
      const I expert = lane() + splat_int(g * kLanes);
      const M later = either(keys[g] < splat_int(last_key),
                             both(keys[g] == splat_int(last_key), expert > splat_int(last)));
      const M better = both(later, keys[g] > best);
      best = select(better, keys[g], best);
      where = select(better, expert, where);
    }
    last_key = greatest(best);
    last = least(select(best == splat_int(last_key), where, splat_int(Route::kMaxExperts)));
    if (slot == 0) top = last_key;
    chosen_key = select(lane() == splat_int(slot), splat_int(last_key), chosen_key);
    chosen = select(lane() == splat_int(slot), splat_int(last), chosen);
  }
  const float highest = logit_of(top);
  const float total = sum_over(a.count, [&](int base, int count) {
    return exp(load(logits + base, count) - splat(highest));
  });
  const I bits = select(chosen_key < splat_int(0), chosen_key ^ splat_int(0x7fffffff), chosen_key);
  F weight = exp(as_float(bits) - splat(highest)) / splat(total);
  if (a.renormalise) {
    float all = value_at(weight, 0);
    for (int slot = 1; slot < a.chosen; ++slot) all = all + value_at(weight, slot);
    weight = weight / splat(all);
  }
  store(a.experts + static_cast<long>(block) * a.chosen, chosen, a.chosen);
  store(a.weights + static_cast<long>(block) * a.chosen, weight, a.chosen);
}

}  // namespace hipjax::HIPJAX_TARGET
#endif
