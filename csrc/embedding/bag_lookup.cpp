// SPDX-License-Identifier: Apache-2.0
#include "embedding/bag_lookup.h"

#include <algorithm>
#include <tuple>

#include "common/parallel.h"
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

namespace {

// Keys that are checked, then looked up: enough to make prefetching free, few enough to stay in the L1 cache.
constexpr int64_t kBlockKeys = 2048;
// No unit of work has more than this share of a thread's keys. Long units bring a table's rows to the L2 cache of one
// core: with 100 tables of 8192 rows, ten keys, 1.1 to 1.2 x faster than blocks of 4096 keys at width 16 and 0.9 to
// 1.1 x at width 64 (two Zen 3 cores).
constexpr int64_t kThreadUnits = 8;
// Below this many bytes of rows one thread is done before others would have started.
constexpr int64_t kParallelBytes = 64 << 10;
// Outputs larger than the caches use non-temporal stores: 1.5 x faster on 16384 x 26 x 128 floats.
constexpr int64_t kStreamBytes = 16 << 20;

// Tables of at most this size are read in order before so many keys that most of their rows are needed anyway:
// prefetching single rows is too late where memory latency is high. The table of a thread's next unit is prefetched
// meanwhile. 100 tables of 8192 x 16, ten keys, batch 8192: 1.4 x faster with uniform keys, 1.6 x with Zipf(1.05);
// batch 16384: 1.25 and 1.35 x; no difference at width 64, with 2 MiB a table (two Zen 3 cores, 512 KiB of L2 each).
constexpr int64_t kReadBytes = 1 << 20;

struct Block {
  int64_t feature, first_bag, bags;
};

struct Memory {
  const char* first;
  int64_t bytes;
};

// Real reads, since the hardware prefetcher does not follow prefetch instructions.
void read_through(const Memory& memory) {
  const volatile char* const first = memory.first;
  for (int64_t at = 0; at < memory.bytes; at += 64) (void)first[at];
}

class Lookup {
 public:
  explicit Lookup(const LookupCall& call) : call_(call) {
    const int64_t bags = std::max<int64_t>(1, call.features * call.batch);
    block_ = std::max<int64_t>(1, kBlockKeys / std::max<int64_t>(1, call.num_keys / bags));
    const int64_t parts = parts_of_features();
    unit_bags_ = std::max<int64_t>(std::min<int64_t>(64, call.batch), (call.batch + parts - 1) / parts);
    units_ = unit_bags_ ? (call.batch + unit_bags_ - 1) / unit_bags_ : 0;
    const int64_t width = call.weights.width, vectors = std::max(call.features * call.batch, call.num_keys);
    const bool in_lines = width % 16 == 0 && reinterpret_cast<uintptr_t>(call.out) % 64 == 0;
    stream_ = in_lines && 4 * width * vectors >= kStreamBytes;
  }

  BagFault run() {
    faults_.add(check_ends(call_.offsets, call_.features * call_.batch, call_.num_keys));
    if (faults_.get().kind != BagFault::kNone) return faults_.get();
    const int threads = 4 * call_.weights.width * call_.num_keys < kParallelBytes ? 1 : call_.threads;
    parallel_for(threads, call_.features * units_, [&](int64_t unit) {
      const Block bags = bags_of(unit), next = bags_of(std::min(unit + threads, call_.features * units_ - 1));
      read_through(well_used(bags));
      const Memory soon = next.feature == bags.feature ? Memory{} : well_used(next);
      const int64_t step = soon.bytes / bags.bags;
      for (int64_t b = 0; b < bags.bags; b += block_) {
        look_up({bags.feature, bags.first_bag + b, std::min(block_, bags.bags - b)}, {soon.first + b * step, step});
      }
    });
    return faults_.get();
  }

 private:
  // How many keys a block has, as far as its offsets are right: they are still unchecked.
  int64_t likely_keys(const Block& block) const {
    const int64_t* offsets = call_.offsets + block.feature * call_.batch + block.first_bag;
    const auto bounded = [&](int64_t offset) { return std::clamp<int64_t>(offset, 0, call_.num_keys); };
    return bounded(offsets[block.bags]) - bounded(offsets[0]);
  }

  // Into how many units the features are to be split, by the one with the most keys.
  int64_t parts_of_features() const {
    if (call_.threads <= 1 || call_.num_keys == 0) return 1;
    int64_t most = 0;
    for (int64_t f = 0; f < call_.features; f++) most = std::max(most, likely_keys({f, 0, call_.batch}));
    return most * kThreadUnits * call_.threads / call_.num_keys + 1;
  }

  Block bags_of(int64_t unit) const {
    const int64_t first = unit % units_ * unit_bags_;
    return {unit / units_, first, std::min(unit_bags_, call_.batch - first)};
  }

  // A unit's table, if that is to be read in order; else nothing.
  Memory well_used(const Block& unit) const {
    const FeatureLayout& layout = call_.layout[unit.feature];
    const RowArray table = rows_from(call_.weights, layout.base);
    const int64_t bytes = row_bytes(table.type, table.width) * layout.rows;
    if (bytes > kReadBytes || likely_keys(unit) < layout.rows) return {};
    return {static_cast<const char*>(table.first), bytes};
  }

  // Prefetches `soon` meanwhile, this many bytes with each bag.
  void look_up(const Block& block, const Memory& soon) {
    const FeatureLayout& layout = call_.layout[block.feature];
    const int64_t first_bag = block.feature * call_.batch + block.first_bag;
    const BagCheck check = check_bags(
        {call_.keys, call_.num_keys, call_.offsets, block.feature, first_bag, block.bags, layout.rows});
    if (check.fault.kind != BagFault::kNone) {
      faults_.add(check.fault);
      return;
    }
    const RowArray table = rows_from(call_.weights, layout.base);
    const int64_t* offsets = call_.offsets + first_bag;
    const int64_t* keys = call_.keys + offsets[0];
    if (layout.pooling == Pooling::kNone) {
      const int64_t num_keys = offsets[block.bags] - offsets[0];
      float* out = call_.out + offsets[0] * table.width;
      kernels().copy_rows({table, keys, num_keys, out, table.width, stream_});
      return;
    }
    const int64_t stride = call_.features * table.width;
    float* out = call_.out + block.first_bag * stride + block.feature * table.width;
    if (check.all_single && !call_.key_weights) {
      kernels().copy_rows({table, keys, block.bags, out, stride, stream_});
    } else {
      kernels().pool_bags({table, call_.keys, call_.key_weights, offsets, block.bags, out, stride, layout.pooling,
                           stream_, soon.first, soon.bytes});
    }
  }

  const LookupCall& call_;
  int64_t block_, unit_bags_, units_;
  bool stream_;
  FirstFault faults_;
};

}  // namespace

BagFault bag_lookup(const LookupCall& call) { return Lookup(call).run(); }

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
