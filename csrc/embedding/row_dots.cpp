#include "embedding/row_dots.h"

#include <algorithm>

#include "common/parallel.h"
#include "embedding/kernels.h"

namespace terarec {
namespace {

// Bags of one unit of work.
constexpr int64_t kUnitBags = 1024;

BagFault dot_bags(const RowDotsCall& call, int64_t feature, int64_t first) {
  const FeatureLayout& layout = call.layout[feature];
  const int64_t bags = std::min(kUnitBags, call.batch - first), first_bag = feature * call.batch + first;
  const BagFault fault =
      check_bags({call.keys, call.num_keys, call.offsets, feature, first_bag, bags, layout.rows}).fault;
  if (fault.kind != BagFault::kNone) return fault;
  const float* grad = call.grad + first * call.grad_stride + feature * call.weights.width;
  kernels().dot_rows({rows_from(call.weights, layout.base), call.keys, call.offsets + first_bag, bags, grad,
                      call.grad_stride, call.dots});
  return {};
}

}  // namespace

BagFault row_dots(const RowDotsCall& call) {
  FirstFault faults;
  faults.add(check_ends(call.offsets, call.features * call.batch, call.num_keys));
  if (faults.get().kind != BagFault::kNone) return faults.get();
  const int64_t blocks = (call.batch + kUnitBags - 1) / kUnitBags;
  parallel_for(call.threads, call.features * blocks, [&](int64_t unit) {
    faults.add(dot_bags(call, unit / blocks, unit % blocks * kUnitBags));
  });
  return faults.get();
}

}  // namespace terarec
