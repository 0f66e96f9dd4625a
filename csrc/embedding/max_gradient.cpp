#include "embedding/max_gradient.h"

#include <algorithm>

#include "common/parallel.h"
#include "embedding/kernels.h"

namespace terarec {
namespace {

// Bags of one unit of work.
constexpr int64_t kUnitBags = 256;

}  // namespace

const float* MaxGradients::add(const MaxBags& bags) {
  const int64_t keys = bags.offsets[bags.bags] - bags.offsets[0];
  spreads_.push_back({bags, CallMemory(keys * bags.table.width * sizeof(float))});
  return spreads_.back().gradients();
}

void MaxGradients::fill(int threads) const {
  struct Block {
    const Spread* spread;
    int64_t first_bag;
  };
  std::vector<Block> blocks;
  for (const Spread& spread : spreads_) {
    for (int64_t b = 0; b < spread.bags.bags; b += kUnitBags) blocks.push_back({&spread, b});
  }
  parallel_for(threads, blocks.size(), [&](int64_t unit) {
    const MaxBags& of = blocks[unit].spread->bags;
    const int64_t first = blocks[unit].first_bag, bags = std::min(kUnitBags, of.bags - first);
    float* to = blocks[unit].spread->gradients() + (of.offsets[first] - of.offsets[0]) * of.table.width;
    std::vector<float> buffer(2 * of.table.width);
    kernels().spread_max({of.table, of.keys, of.offsets + first, bags, of.grad + first * of.grad_stride,
                          of.grad_stride, to, buffer.data()});
  });
}

}  // namespace terarec
