// SPDX-License-Identifier: Apache-2.0
#include "embedding/update_tables.h"

#include <algorithm>
#include <map>
#include <utility>

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

namespace {

// Below this many bytes of rows one thread finishes before others would have started.
constexpr int64_t kParallelBytes = 64 << 10;
// Bags that one unit of the check reads.
constexpr int64_t kCheckBags = 16384;
// Tables of at most this size, with at least a key for every fourth row, are summed densely: the sums stay in the L2.
constexpr int64_t kSumBytes = 1 << 20;
constexpr int64_t kSumRowsPerKey = 4;
// So are larger ones with so many keys a row that grouping would read each gradient often from the L3: 1.2 x faster
// with 5 keys a row of 8192 x 64, 1.2 x slower with 1.25 (Zen 3).
constexpr int64_t kManySumBytes = 8 << 20;
constexpr int64_t kSumKeysPerRow = 4;

void add_bags_of(const UpdateGradients& gradients, const UpdateGradient& of, int64_t feature, MaxGradients& maxima,
                 UpdateTable& table) {
  const FeatureLayout& layout = of.layout[feature];
  const int64_t width = gradients.width;
  const int64_t* offsets = of.offsets + feature * of.batch;
  const int64_t num_keys = offsets[of.batch] - offsets[0];
  if (num_keys == 0) return;
  table.num_keys += num_keys;
  const int64_t* keys = of.keys + offsets[0];
  const int64_t* places = of.places ? of.places + offsets[0] : nullptr;
  const float* grad = of.grad + feature * width;
  if (layout.pooling == Pooling::kNone) {
    grad = of.grad + offsets[0] * of.grad_stride;
    table.bags.push_back({keys, places, nullptr, nullptr, num_keys, grad, of.grad_stride, Pooling::kNone});
  } else if (layout.pooling == Pooling::kMax) {
    const RowArray rows = rows_from({gradients.weights, gradients.row_type, width}, of.places ? 0 : layout.base);
    const float* spread =
        maxima.add({rows, of.places ? of.places : of.keys, offsets, of.batch, grad, of.grad_stride});
    table.bags.push_back({keys, places, nullptr, nullptr, num_keys, spread, width, Pooling::kNone});
  } else {
    table.bags.push_back(
        {of.keys, of.places, of.key_weights, offsets, of.batch, grad, of.grad_stride, layout.pooling});
  }
}

// Decided by the table as a whole, so that its split among threads cannot change the arithmetic.
bool sums_densely(const UpdateTable& table, int64_t width) {
  const int64_t bytes = 4 * table.rows * width;
  return (bytes <= kSumBytes && table.rows <= kSumRowsPerKey * table.num_keys) ||
         (bytes <= kManySumBytes && kSumKeysPerRow * table.rows <= table.num_keys);
}

}  // namespace

int64_t UpdateGradients::num_keys() const {
  int64_t sum = 0;
  for (const UpdateGradient& of : list) sum += of.num_keys;
  return sum;
}

int UpdateGradients::useful_threads() const { return 4 * width * num_keys() < kParallelBytes ? 1 : threads; }

BagFault check_gradients(const UpdateGradients& gradients) {
  FirstFault faults;
  struct Block {
    int64_t gradient, feature, first_bag, bags;
  };
  std::vector<Block> blocks;
  for (int64_t g = 0; g < static_cast<int64_t>(gradients.list.size()); g++) {
    const UpdateGradient& of = gradients.list[g];
    BagFault ends = check_ends(of.offsets, of.features * of.batch, of.num_keys);
    ends.gradient = g;
    faults.add(ends);
    for (int64_t f = 0; f < of.features; f++) {
      for (int64_t b = 0; b < of.batch; b += kCheckBags) {
        blocks.push_back({g, f, b, std::min(kCheckBags, of.batch - b)});
      }
    }
  }
  parallel_for(gradients.useful_threads(), blocks.size(), [&](int64_t unit) {
    const Block& block = blocks[unit];
    const UpdateGradient& of = gradients.list[block.gradient];
    const int64_t first = block.feature * of.batch + block.first_bag;
    const int64_t rows = of.layout[block.feature].rows;
    BagFault fault =
        check_bags({of.keys, of.num_keys, of.offsets, block.feature, first, block.bags, rows}).fault;
    fault.gradient = block.gradient;
    faults.add(fault);
  });
  return faults.get();
}

std::vector<UpdateTable> collect_tables(const UpdateGradients& gradients, MaxGradients& maxima) {
  std::map<std::pair<int64_t, int64_t>, UpdateTable> tables;  // by first row and number
  for (const UpdateGradient& of : gradients.list) {
    for (int64_t f = 0; f < of.features; f++) {
      const FeatureLayout& layout = of.layout[f];
      const float factor = gradients.table_lr ? gradients.table_lr[layout.table] : 1.0f;
      if (factor == 0.0f) continue;
      UpdateTable& table = tables[{layout.base, layout.table}];
      table.base = layout.base;
      table.rows = layout.rows;
      table.lr_factor = factor;
      add_bags_of(gradients, of, f, maxima, table);
    }
  }
  std::vector<UpdateTable> in_order;
  for (auto& [place, table] : tables) in_order.push_back(std::move(table));
  return in_order;
}

std::vector<UpdateUnit> split_tables(const std::vector<UpdateTable>& tables, int64_t num_keys, int threads) {
  const int64_t most_keys = threads > 1 ? std::max<int64_t>(1, num_keys / (2 * threads)) : num_keys;
  std::vector<UpdateUnit> units;
  for (const UpdateTable& table : tables) {
    if (table.num_keys == 0) continue;
    int shift = 0;
    while ((table.num_keys >> shift) > most_keys && (table.rows >> shift) > 1) shift++;
    for (int64_t part = 0; part < int64_t{1} << shift; part++) {
      units.push_back({&table, {table.base, table.rows, part, shift}, table.num_keys >> shift});
    }
  }
  std::stable_sort(units.begin(), units.end(),
                   [](const UpdateUnit& a, const UpdateUnit& b) { return a.num_keys > b.num_keys; });
  return units;
}

UpdateRows group_unit(const UpdateUnit& unit, int64_t width, RowScratch& scratch) {
  const UpdateTable& table = *unit.table;
  const RowGroups found = sums_densely(table, width)
                              ? sum_by_row(unit.part, table.bags, width, scratch)
                              : group_by_row(unit.part, table.bags, table.num_keys, width, scratch);
  UpdateRows rows{};
  rows.width = width;
  rows.groups = found.groups;
  rows.rows = scratch.rows;
  rows.places = found.placed ? scratch.places : scratch.rows;
  rows.grads = scratch.grads;
  rows.scales = found.scaled ? scratch.scales : nullptr;
  rows.buffer = scratch.buffer;
  return rows;
}

}  // namespace terarec
