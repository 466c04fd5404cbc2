// Runs the GPU's row products and norms here: a thread for every lane, a barrier for every wave and block.
// `emulated` prints what it has checked, one line each; it fails if a value is not that of order.md,
// which is written out below once more, from the text.
#include <barrier>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <thread>
#include <vector>

namespace {
thread_local int own_thread, own_block;
std::barrier<>* block_barrier;
std::vector<std::unique_ptr<std::barrier<>>> wave_barriers;
int exchanged[1024];
}  // namespace

// What lanes.h takes for the instructions of a GPU.
int __nvvm_read_ptx_sreg_tid_x() { return own_thread; }
int __nvvm_read_ptx_sreg_ctaid_x() { return own_block; }
void emulated_barrier() { block_barrier->arrive_and_wait(); }
int __nvvm_shfl_sync_idx_i32(unsigned, int value, int source, int) {
  const int wave = own_thread / 32;
  exchanged[own_thread] = value;
  wave_barriers[wave]->arrive_and_wait();
  const int found = exchanged[wave * 32 + source % 32];
  wave_barriers[wave]->arrive_and_wait();
  return found;
}
unsigned __nvvm_vote_ballot_sync(unsigned, bool) { std::abort(); }

#define __NVPTX__ 1
#include "lanes.h"  // defines the target that the kernels are for
#include "kernels/norm.h"
#include "kernels/row_product.h"

using namespace hipjax;

namespace {

alignas(64) char shared[1 << 20];
int wrong;

float widened(float weight) { return weight; }
float widened(uint16_t weight) {
  const uint32_t bits = static_cast<uint32_t>(weight) << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}
void narrowed(float value, float& weight) { weight = value; }
void narrowed(float value, uint16_t& weight) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  weight = static_cast<uint16_t>(bits >> 16);
}

float tree(float (&lanes)[32]) {
  for (int offset = 16; offset; offset /= 2) {
    for (int t = 0; t < offset; ++t) lanes[t] += lanes[t + offset];
  }
  return lanes[0];
}
template <class Bits>
float stated(const Bits* w, const float* x, int terms) {
  float lanes[32] = {};
  if (terms % 8) {
    for (int k = 0; k < terms; ++k) lanes[k % 32] = std::fmaf(widened(w[k]), x[k], lanes[k % 32]);
    return tree(lanes);
  }
  for (int t = 0; t < 32; ++t) {
    float a[4] = {};
    for (int from = t * 8; from < terms; from += 256) {
      for (int j = 0; j < 8; ++j) a[j % 4] = std::fmaf(widened(w[from + j]), x[from + j], a[j % 4]);
    }
    lanes[t] = (a[0] + a[1]) + (a[2] + a[3]);
  }
  return tree(lanes);
}

template <class Kernel>
void launch(int blocks, int threads, Kernel kernel) {
  for (int block = 0; block < blocks; ++block) {
    std::memset(shared, 0xff, sizeof shared);
    std::barrier<> all(threads);
    block_barrier = &all;
    wave_barriers.clear();
    for (int i = 0; i < threads / 32; ++i) {
      wave_barriers.push_back(std::make_unique<std::barrier<>>(32));
    }
    std::vector<std::thread> running;
    for (int t = 0; t < threads; ++t) {
      running.emplace_back([&kernel, t, block] {
        own_thread = t;
        own_block = block;
        kernel(block);
      });
    }
    for (std::thread& thread : running) thread.join();
  }
}

// Three groups of values with two parts of a weight, in the order of sums over a width.
void check_norm(int width) {
  std::mt19937 generator(width);
  std::normal_distribution<float> normal;
  std::vector<float> x(3 * width), weight(2 * width), found(3 * width);
  for (float& value : x) value = normal(generator);
  for (float& value : weight) value = normal(generator);
  const RmsNorm a{x.data(), {weight.data(), false}, found.data(), 3, width, 2, 1e-6f};
  launch(a.blocks(), RmsNorm::kWaves * 32,
         [&a](int block) { gpu::run<0>(a, block, gpu::Block<RmsNorm::kWaves>{shared}); });
  for (int g = 0; g < 3; ++g) {
    float lanes[32] = {};
    for (int i = 0; i < width; ++i) lanes[i % 32] += x[g * width + i] * x[g * width + i];
    const float scale = 1.0f / std::sqrt(tree(lanes) / static_cast<float>(width) + 1e-6f);
    for (int i = 0; i < width; ++i) {
      const float wanted = x[g * width + i] * scale * (weight[g % 2 * width + i] + 1.0f);
      wrong += std::memcmp(&wanted, &found[g * width + i], 4) != 0;
    }
  }
  std::printf("norm of %d: %d wrong\n", width, wrong);
}

// Two matrices, all values against the stated order. `room`: groups that are staged at once, if not
// all; `processors`: how many blocks run side by side.
template <int kVariant>
void check(int first_outputs, int second_outputs, int depth, int processors, int room = 0) {
  using Bits = typename gpu::Kind<kVariant>::Bits;
  constexpr int kRows = RowProduct::rows_of(kVariant), kThreads = RowProduct::waves(kVariant) * 32;
  std::mt19937 generator(first_outputs + depth + kVariant);
  std::normal_distribution<float> normal;
  const int outputs[2] = {first_outputs, second_outputs};
  std::vector<Bits> weights[2];
  std::vector<float> found[2], x(kRows * depth);
  for (float& value : x) value = normal(generator);
  RowProduct a{};
  a.x = x.data();
  a.count = 2;
  a.rows = kRows;
  a.depth = depth;
  a.bf16 = sizeof(Bits) == 2;
  a.quarters = RowProduct::is_long(kVariant);
  a.many = RowProduct::is_many(kVariant);
  a.divisor = 1;
  a.group = 1;
  a.per_turn = RowProduct::outs(kVariant, false);
  const int ahead = RowProduct::ahead(kVariant);
  a.chunk = room && room < a.groups() ? std::max(1, room / ahead) * ahead : a.groups();
  for (int i = 0; i < 2; ++i) {
    weights[i].resize(static_cast<size_t>(outputs[i]) * depth);
    for (Bits& weight : weights[i]) narrowed(normal(generator), weight);
    found[i].assign(kRows * outputs[i], std::numeric_limits<float>::quiet_NaN());
    a.matrices[i].weight = weights[i].data();
    a.matrices[i].out = found[i].data();
    a.matrices[i].outputs = outputs[i];
    a.matrices[i].first_turn = a.turns;
    a.turns += (outputs[i] + a.per_turn - 1) / a.per_turn;
  }
  a.stride = std::min(a.turns, processors * RowProduct::min_blocks(kVariant));
  if (a.variant() != kVariant || a.shared_bytes() > static_cast<int>(sizeof shared)) std::abort();
  launch(a.stride, kThreads, [&a](int block) {
    gpu::run<kVariant>(a, block, gpu::Block<RowProduct::waves(kVariant)>{shared});
  });
  const int slices = a.quarters ? 4 : 1, terms = depth / slices;
  for (int i = 0; i < 2; ++i) {
    for (int at = 0; at < kRows * outputs[i]; ++at) {
      const Bits* w = weights[i].data() + static_cast<size_t>(at % outputs[i]) * depth;
      const float* row = x.data() + at / outputs[i] * depth;
      float s[4];
      for (int j = 0; j < slices; ++j) s[j] = stated(w + j * terms, row + j * terms, terms);
      const float wanted = slices == 4 ? (s[0] + s[1]) + (s[2] + s[3]) : s[0];
      wrong += std::memcmp(&wanted, &found[i][at], 4) != 0;
    }
  }
  std::printf("variant %d: %d rows, %d + %d outputs, depth %d, %d of %d groups at once: %d wrong\n",
              kVariant, kRows, first_outputs, second_outputs, depth, a.chunk, a.groups(), wrong);
}

}  // namespace

int main() {
  for (int width : {1, 77, 2560, 5000}) check_norm(width);
  check<0>(30, 3, 520, 2);
  check<7>(9, 1, 1024, 2);
  check<8>(7, 1, 8224, 1);
  check<16>(37, 1, 2560, 2);
  check<16>(5, 3, 320, 3);
  check<16>(9, 2, 77, 2);
  check<17>(20, 1, 640, 2);
  check<18>(40, 2, 3072, 2, 5);
  check<19>(37, 9, 600, 2);
  check<20>(21, 5, 776, 1);
  check<23>(33, 1, 2560, 2);
  check<24>(11, 1, 10240, 2);
  check<27>(13, 2, 8192, 3);
  check<31>(7, 1, 10240, 2, 3);
  check<32>(100, 7, 2560, 2);
  check<33>(50, 1, 2560, 1);
  check<34>(77, 1, 2560, 2);
  check<35>(203, 9, 2560, 2);
  check<36>(70, 1, 1024, 1);
  check<39>(131, 3, 2560, 2);
  check<39>(50, 1, 6144, 1, 10);
  return wrong != 0;
}
