// Types that host and device agree on: plain data, the same bytes for every target.
#pragma once

#include <stdint.h>

namespace hipjax {

constexpr int kLanes = 32;
constexpr int kMaxRows = 8;

// A small vector of parameters in the checkpoint's own storage.
struct Vector {
  const void* data;
  int bf16;  // 1: bfloat16, 0: float32
};

}  // namespace hipjax
