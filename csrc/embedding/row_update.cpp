#include "embedding/row_update.h"

#include <algorithm>
#include <map>

#include "common/parallel.h"
#include "embedding/row_groups.h"

namespace terarec {
namespace {

// Below this many bytes of rows one thread is done before others would have started.
constexpr int64_t kParallelBytes = 64 << 10;
// Bags that one unit of the check reads.
constexpr int64_t kCheckBags = 16384;
// Tables of at most this size, with at least a key for every fourth row, are summed densely: the sums stay in the L2.
constexpr int64_t kSumBytes = 1 << 20;
constexpr int64_t kSumRowsPerKey = 4;
// So are larger ones with so many keys a row that grouping would read each gradient often from the L3: 1.2 x faster with
// 5 keys a row of 8192 x 64, 1.2 x slower with 1.25 (Zen 3).
constexpr int64_t kManySumBytes = 8 << 20;
constexpr int64_t kSumKeysPerRow = 4;
// What a thread keeps between calls at most.
constexpr int64_t kKeptBytes = 64 << 20;

struct Table {
  int64_t rows = 0;
  int64_t num_keys = 0;
  std::vector<BagGradients> bags;
};

struct Unit {
  const Table* table;
  TablePart part;
  int64_t num_keys;  // estimate, to start the longest first
};

BagFault check_all(const UpdateCall& call, int threads) {
  FirstFault faults;
  struct Block {
    int64_t gradient, feature, first_bag, bags;
  };
  std::vector<Block> blocks;
  for (int64_t g = 0; g < static_cast<int64_t>(call.gradients.size()); g++) {
    const UpdateGradient& of = call.gradients[g];
    BagFault ends = check_ends(of.offsets, of.features * of.batch, of.num_keys);
    ends.gradient = g;
    faults.add(ends);
    for (int64_t f = 0; f < of.features; f++) {
      for (int64_t b = 0; b < of.batch; b += kCheckBags) {
        blocks.push_back({g, f, b, std::min(kCheckBags, of.batch - b)});
      }
    }
  }
  parallel_for(threads, blocks.size(), [&](int64_t unit) {
    const Block& block = blocks[unit];
    const UpdateGradient& of = call.gradients[block.gradient];
    const int64_t first = block.feature * of.batch + block.first_bag;
    BagFault fault =
        check_bags({of.keys, of.num_keys, of.offsets + first, block.bags, of.layout[block.feature].rows}).fault;
    if (fault.kind == BagFault::kOffset) fault.position += first;
    fault.gradient = block.gradient;
    fault.feature = block.feature;
    faults.add(fault);
  });
  return faults.get();
}

// The tables by first arena row, each with the bags of all gradients and features that touch it, in call order.
std::map<int64_t, Table> collect_tables(const UpdateCall& call) {
  std::map<int64_t, Table> tables;
  for (const UpdateGradient& of : call.gradients) {
    for (int64_t f = 0; f < of.features; f++) {
      const FeatureLayout& layout = of.layout[f];
      const int64_t* offsets = of.offsets + f * of.batch;
      const int64_t num_keys = offsets[of.batch] - offsets[0];
      if (num_keys == 0) continue;
      Table& table = tables[layout.base];
      table.rows = layout.rows;
      table.num_keys += num_keys;
      if (layout.pooling == Pooling::kNone) {
        const float* grad = of.grad + offsets[0] * of.grad_stride;
        table.bags.push_back({of.keys + offsets[0], nullptr, num_keys, grad, of.grad_stride, false});
      } else {
        const bool mean = layout.pooling == Pooling::kMean;
        table.bags.push_back({of.keys, offsets, of.batch, of.grad + f * call.width, of.grad_stride, mean});
      }
    }
  }
  return tables;
}

// Splits tables so that no unit has more than half of a thread's share; the longest come first.
std::vector<Unit> split_tables(const std::map<int64_t, Table>& tables, int64_t num_keys, int threads) {
  const int64_t most_keys = threads > 1 ? std::max<int64_t>(1, num_keys / (2 * threads)) : num_keys;
  std::vector<Unit> units;
  for (const auto& [base, table] : tables) {
    int shift = 0;
    while ((table.num_keys >> shift) > most_keys && (table.rows >> shift) > 1) shift++;
    for (int64_t part = 0; part < int64_t{1} << shift; part++) {
      units.push_back({&table, {base, table.rows, part, shift}, table.num_keys >> shift});
    }
  }
  std::stable_sort(units.begin(), units.end(), [](const Unit& a, const Unit& b) { return a.num_keys > b.num_keys; });
  return units;
}

// Decided by the table as a whole, so that its split among threads cannot change the arithmetic.
bool sums_densely(const Table& table, int64_t width) {
  const int64_t bytes = 4 * table.rows * width;
  return (bytes <= kSumBytes && table.rows <= kSumRowsPerKey * table.num_keys) ||
         (bytes <= kManySumBytes && kSumKeysPerRow * table.rows <= table.num_keys);
}

void update_part(const UpdateCall& call, const Unit& unit) {
  static thread_local RowScratch scratch;
  const Table& table = *unit.table;
  const RowGroups found = sums_densely(table, call.width)
                              ? sum_by_row(unit.part, table.bags, call.width, scratch)
                              : group_by_row(unit.part, table.bags, table.num_keys, scratch);
  UpdateRows rows{};
  rows.weights = call.weights;
  rows.state0 = call.state0;
  rows.state1 = call.state1;
  rows.width = call.width;
  rows.rule = call.rule;
  rows.constants = call.constants;
  rows.groups = found.groups;
  rows.rows = scratch.rows.data();
  rows.first = scratch.first.data();
  rows.begin = found.has_more ? scratch.begin.data() : nullptr;
  rows.more = scratch.more.data();
  rows.first_scales = found.scaled ? scratch.first_scales.data() : nullptr;
  rows.more_scales = scratch.more_scales.data();
  rows.buffer = at_least(scratch.buffer, call.width);
  kernels().update_rows(rows);
  if (scratch.bytes() > kKeptBytes) scratch = RowScratch{};
}

}  // namespace

BagFault row_update(const UpdateCall& call) {
  int64_t num_keys = 0;
  for (const UpdateGradient& of : call.gradients) num_keys += of.num_keys;
  const int threads = 4 * call.width * num_keys < kParallelBytes ? 1 : call.threads;
  const BagFault fault = check_all(call, threads);
  if (fault.kind != BagFault::kNone) return fault;
  const std::map<int64_t, Table> tables = collect_tables(call);
  const std::vector<Unit> units = split_tables(tables, num_keys, threads);
  parallel_for(threads, units.size(), [&](int64_t unit) { update_part(call, units[unit]); });
  return {};
}

}  // namespace terarec
