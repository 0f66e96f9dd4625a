#include "embedding/row_update.h"

#include <algorithm>
#include <numeric>
#include <vector>

#include "common/parallel.h"

namespace terarec {
namespace {

// Rows that one unit of a sweep over a table moves.
constexpr int64_t kSweepRows = 4096;
// Into how many threads' work the norm's sum is split, whatever the number of threads, so that its order is one.
constexpr int kNormThreads = 16;

void complete(const UpdateCall& call, float lr_factor, UpdateRows& rows) {
  rows.weights = call.gradients.weights;
  rows.row_type = call.gradients.row_type;
  rows.state0 = call.state0;
  rows.state1 = call.state1;
  rows.rule = call.rule;
  rows.constants = call.constants;
  rows.constants.lr *= lr_factor;
  rows.extras = call.extras;
}

// Moves the rows of a unit; marks them in `touched` by arena row, if that is asked for.
void update_part(const UpdateCall& call, const UpdateUnit& unit, RowScratch& scratch, uint8_t* touched) {
  UpdateRows rows = group_unit(unit, call.gradients.width, scratch);
  complete(call, unit.table->lr_factor, rows);
  kernels().update_rows(rows);
  if (!touched) return;
  for (int64_t g = 0; g < rows.groups; g++) touched[rows.rows[g]] = 1;
}

// Moves those of the rows begin, ..., end - 1 that are not in `touched`, with gradients of zero.
void sweep_rows(const UpdateCall& call, float lr_factor, int64_t begin, int64_t end, const uint8_t* touched) {
  const int64_t width = call.gradients.width;
  std::vector<int64_t> untouched;
  for (int64_t row = begin; row < end; row++) {
    if (!touched[row]) untouched.push_back(row);
  }
  const std::vector<float> zeros(width);
  const std::vector<const float*> grads(untouched.size(), zeros.data());
  std::vector<float> buffer(update_floats(width));
  UpdateRows rows{};
  rows.width = width;
  rows.groups = untouched.size();
  rows.rows = untouched.data();
  rows.grads = grads.data();
  rows.buffer = buffer.data();
  complete(call, lr_factor, rows);
  kernels().update_rows(rows);
}

void sweep(const UpdateCall& call, const std::vector<UpdateTable>& tables, const std::vector<uint8_t>& touched) {
  struct Block {
    float lr_factor;
    int64_t begin, end;
  };
  std::vector<Block> blocks;
  int64_t swept = 0;  // tables come in the order of their rows; those that share rows are swept once
  for (const UpdateTable& table : tables) {
    const int64_t end = table.base + table.rows;
    for (int64_t row = std::max(table.base, swept); row < end; row += kSweepRows) {
      blocks.push_back({table.lr_factor, row, std::min(row + kSweepRows, end)});
    }
    swept = std::max(swept, end);
  }
  parallel_for(call.gradients.threads, blocks.size(), [&](int64_t unit) {
    const Block& block = blocks[unit];
    sweep_rows(call, block.lr_factor, block.begin, block.end, touched.data());
  });
}

int64_t end_of(const std::vector<UpdateTable>& tables) {
  int64_t end = 0;
  for (const UpdateTable& table : tables) end = std::max(end, table.base + table.rows);
  return end;
}

}  // namespace

BagFault row_update(const UpdateCall& call) {
  const BagFault fault = check_gradients(call.gradients);
  if (fault.kind != BagFault::kNone) return fault;
  const int threads = call.gradients.useful_threads();
  MaxGradients maxima;
  const std::vector<UpdateTable> tables = collect_tables(call.gradients, maxima);
  maxima.fill(threads);
  const std::vector<UpdateUnit> units = split_tables(tables, call.gradients.num_keys(), threads);
  std::vector<uint8_t> touched(call.sweeps ? end_of(tables) : 0);
  uint8_t* const marks = call.sweeps ? touched.data() : nullptr;
  CallScratch scratch;
  parallel_for(threads, units.size(), [&](int64_t u) { update_part(call, units[u], scratch.of_thread(), marks); });
  if (call.sweeps) sweep(call, tables, touched);
  return {};
}

GradientSquares gradient_squares(const UpdateGradients& gradients, int64_t first_row) {
  const BagFault fault = check_gradients(gradients);
  if (fault.kind != BagFault::kNone) return {fault, 0.0};
  MaxGradients maxima;
  const std::vector<UpdateTable> tables = collect_tables(gradients, maxima);
  maxima.fill(gradients.useful_threads());
  const std::vector<UpdateUnit> units = split_tables(tables, gradients.num_keys(), kNormThreads);
  std::vector<double> sums(units.size());
  CallScratch scratch;
  parallel_for(gradients.useful_threads(), units.size(), [&](int64_t unit) {
    sums[unit] = kernels().sum_squares(group_unit(units[unit], gradients.width, scratch.of_thread()), first_row);
  });
  return {{}, std::accumulate(sums.begin(), sums.end(), 0.0)};
}

}  // namespace terarec
