#include "embedding/bag_faults.h"

#include <tuple>

#include "embedding/kernels.h"

namespace terarec {
namespace {

BagFault first_bad_offset(const BagRange& range) {
  for (int64_t b = range.first_bag; b <= range.first_bag + range.bags; b++) {
    const int64_t offset = range.offsets[b];
    if (offset < 0 || offset > range.num_keys || (b > range.first_bag && offset < range.offsets[b - 1])) {
      return {BagFault::kOffset, 0, range.feature, b, offset};
    }
  }
  return {};
}

BagFault first_bad_key(const BagRange& range, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; i++) {
    if (range.keys[i] < 0 || range.keys[i] >= range.rows) {
      return {BagFault::kKey, 0, range.feature, i, range.keys[i]};
    }
  }
  return {};
}

}  // namespace

// Offsets and lengths gather their sign bits, so that compilers make vector code of the loop for any instruction set.
// Of offsets from 0 on no length wraps.
BagCheck check_bags(const BagRange& range) {
  const int64_t* offsets = range.offsets + range.first_bag;
  uint64_t falls = offsets[0], not_single = 0;
  for (int64_t b = 0; b < range.bags; b++) {
    const uint64_t next = offsets[b + 1], length = next - static_cast<uint64_t>(offsets[b]);
    falls |= next | length;
    not_single |= length ^ 1;
  }
  const int64_t begin = offsets[0], end = offsets[range.bags];
  if (static_cast<int64_t>(falls) < 0 || end > range.num_keys) return {first_bad_offset(range), false};
  if (kernels().has_outside({range.keys + begin, end - begin, range.rows})) {
    return {first_bad_key(range, begin, end), false};
  }
  return {{}, not_single == 0};
}

BagFault check_ends(const int64_t* offsets, int64_t bags, int64_t num_keys) {
  if (offsets[0] != 0) return {BagFault::kOffset, 0, 0, 0, offsets[0]};
  if (offsets[bags] != num_keys) return {BagFault::kOffset, 0, 0, bags, offsets[bags]};
  return {};
}

void FirstFault::add(const BagFault& fault) {
  if (fault.kind == BagFault::kNone) return;
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto order = [](const BagFault& f) { return std::make_tuple(f.gradient, f.kind, f.position); };
  if (first_.kind == BagFault::kNone || order(fault) < order(first_)) first_ = fault;
}

}  // namespace terarec
