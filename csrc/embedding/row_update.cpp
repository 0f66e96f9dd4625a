// SPDX-License-Identifier: Apache-2.0
#include "embedding/row_update.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <vector>

#include "common/parallel.h"
#include "embedding/split_mix.h"

namespace terarec {
namespace {

// Rows in one unit of work of an update of all rows of a table.
constexpr int64_t kUnitRows = 4096;
// The number of parts of the norm's sum, whatever the number of threads, so that the order of adding is fixed.
constexpr int kNormThreads = 16;

// State that all units of an update share.
struct Update {
  explicit Update(const UpdateCall& call)
      : call(call), constants(call.rule.constants(call.step)),
        extras(call.rule.extras(call.step, call.last_steps, call.rounding_seed)),
        has_extras(call.rule.transforms_gradients() || call.rule.catches_up ||
                   call.gradients.row_type != RowType::kFloat32) {}

  // Completes `rows`, of a table with this factor of the learning rate, and updates them.
  void move(float lr_factor, UpdateRows& rows) const {
    rows.weights = call.gradients.weights;
    rows.row_type = call.gradients.row_type;
    rows.state0 = call.state0;
    rows.state1 = call.state1;
    rows.rule = call.rule.formula;
    rows.constants = constants;
    rows.constants.lr *= lr_factor;
    rows.extras = has_extras ? &extras : nullptr;
    rows.numbers = rows.rows;
    std::vector<int64_t> numbers;
    if (rows.row_type != RowType::kFloat32 && !call.numbers.are_rows()) {
      numbers = call.numbers.of(rows.rows, rows.groups);
      rows.numbers = numbers.data();
    }
    kernels().update_rows(rows);
  }

  const UpdateCall& call;
  const RuleConstants constants;
  const RowExtras extras;
  const bool has_extras;  // an update without is faster
};

// Updates the rows of a unit; marks them in `touched` by arena row, unless it is null.
void update_part(const Update& update, const UpdateUnit& unit, RowScratch& scratch, uint8_t* touched) {
  UpdateRows rows = group_unit(unit, update.call.gradients.width, scratch);
  update.move(unit.table->lr_factor, rows);
  if (!touched) return;
  for (int64_t g = 0; g < rows.groups; g++) touched[rows.rows[g]] = 1;
}

// Updates the rows begin, ..., end - 1 that are not in `touched`, with gradients of zero.
void update_others(const Update& update, float lr_factor, int64_t begin, int64_t end, const uint8_t* touched) {
  const int64_t width = update.call.gradients.width;
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
  rows.rows = rows.places = untouched.data();
  rows.grads = grads.data();
  rows.buffer = buffer.data();
  update.move(lr_factor, rows);
}

void update_all_others(const Update& update, const std::vector<UpdateTable>& tables,
                       const std::vector<uint8_t>& touched) {
  struct Block {
    float lr_factor;
    int64_t begin, end;
  };
  std::vector<Block> blocks;
  int64_t done = 0;  // tables are in the order of their rows; those that share rows are updated once
  for (const UpdateTable& table : tables) {
    const int64_t end = table.base + table.rows;
    for (int64_t row = std::max(table.base, done); row < end; row += kUnitRows) {
      blocks.push_back({table.lr_factor, row, std::min(row + kUnitRows, end)});
    }
    done = std::max(done, end);
  }
  parallel_for(update.call.gradients.threads, blocks.size(), [&](int64_t unit) {
    const Block& block = blocks[unit];
    update_others(update, block.lr_factor, block.begin, block.end, touched.data());
  });
}

int64_t end_of(const std::vector<UpdateTable>& tables) {
  int64_t end = 0;
  for (const UpdateTable& table : tables) end = std::max(end, table.base + table.rows);
  return end;
}

}  // namespace

std::vector<int64_t> RowNumbers::of(const int64_t* rows, int64_t num_rows) const {
  std::vector<int64_t> numbers(num_rows);
  int64_t at = 0;
  for (int64_t i = 0; i < num_rows; i++) {
    const int64_t row = rows[i];
    if (of_rows) {
      numbers[i] = of_rows[row];
      continue;
    }
    // Mostly that of the row before: a unit has rows of one table.
    if (row < segments[3 * at] || (at + 1 < count && row >= segments[3 * (at + 1)])) {
      int64_t end = count;
      for (at = 0; end - at > 1;) {
        const int64_t middle = (at + end) / 2;
        (segments[3 * middle] <= row ? at : end) = middle;
      }
    }
    numbers[i] = row * segments[3 * at + 1] + segments[3 * at + 2];
  }
  return numbers;
}

const Rule* RowRule::formula_of(const char* kind) {
  static constexpr struct {
    const char* kind;
    Rule formula;
  } kFormulas[] = {{"sgd", Rule::kSgd},           {"momentum", Rule::kMomentum},
                   {"nesterov", Rule::kNesterov}, {"adagrad", Rule::kAdagrad},
                   {"rowwise_adagrad", Rule::kRowwiseAdagrad}, {"rmsprop", Rule::kRmsprop},
                   {"adam", Rule::kAdam},         {"adamw", Rule::kAdamw},
                   {"adamax", Rule::kAdamax},     {"adadelta", Rule::kAdadelta},
                   {"ftrl", Rule::kFtrl},         {"nadam", Rule::kNadam}};
  for (const auto& known : kFormulas) {
    if (!strcmp(known.kind, kind)) return &known.formula;
  }
  return nullptr;
}

// In double up to the last step: in float 1 - beta would lose four digits.
RuleConstants RowRule::constants(int64_t step) const {
  double first_scale = 1, second_scale = 1, grad_share = 0;
  if (lr_in_momentum) {
    first_scale = -lr;
  } else if (formula == Rule::kAdam || formula == Rule::kAdamw) {
    first_scale = 1 / (1 - std::pow(beta1, step));
    second_scale = 1 / std::sqrt(1 - std::pow(beta2, step));
  } else if (formula == Rule::kAdamax) {
    first_scale = 1 / (1 - std::pow(beta1, step));
  } else if (formula == Rule::kNadam) {
    // Dozat 2016, with Keras's decay of the momentum: that of step t is beta1 (1 - 0.96^t / 2).
    const auto momentum = [&](int64_t at) { return beta1 * (1 - 0.5 * std::pow(0.96, at)); };
    double product = 1;
    for (int64_t at = 1; at <= step && product > 1e-20; at++) product *= momentum(at);
    const double next = momentum(step + 1);
    first_scale = next / (1 - product * next);
    grad_share = (1 - momentum(step)) / (1 - product);
    second_scale = 1 / std::sqrt(1 - std::pow(beta2, step));
  }
  RuleConstants k{};
  k.lr = static_cast<float>(lr_in_momentum ? -1 : lr);
  k.eps = static_cast<float>(eps);
  k.beta1 = static_cast<float>(beta1);
  k.beta2 = static_cast<float>(beta2);
  k.gain1 = static_cast<float>(1 - beta1);
  k.gain2 = static_cast<float>(1 - beta2);
  k.first_scale = static_cast<float>(first_scale);
  k.second_scale = static_cast<float>(second_scale);
  k.grad_share = static_cast<float>(grad_share);
  k.weight_decay = static_cast<float>(weight_decay);
  k.beta = static_cast<float>(beta);
  k.l1 = static_cast<float>(l1);
  k.l2 = static_cast<float>(l2);
  k.eps_hat = static_cast<float>(eps_hat);
  return k;
}

bool RowRule::transforms_gradients() const {
  return grad_scale != 1 || std::min(clip_value, clip_norm) < HUGE_VAL || is_coupled();
}

RowExtras RowRule::extras(int64_t step, int32_t* last_steps, uint64_t rounding_seed) const {
  RowExtras extras{};
  extras.grad_scale = static_cast<float>(grad_scale);
  extras.clip_value = static_cast<float>(clip_value);
  extras.clip_norm = static_cast<float>(clip_norm);
  extras.l1 = is_coupled() ? static_cast<float>(l1) : 0;
  extras.l2 = is_coupled() ? static_cast<float>(l2) : 0;
  extras.beta1 = beta1;
  extras.beta2 = beta2;
  extras.step = static_cast<int32_t>(step);
  extras.last_steps = last_steps;
  extras.update_stream = stream_of_update(rounding_seed, static_cast<uint64_t>(step));
  return extras;
}

BagFault row_update(const UpdateCall& call) {
  const BagFault fault = check_gradients(call.gradients);
  if (fault.kind != BagFault::kNone) return fault;
  const int threads = call.gradients.useful_threads();
  MaxGradients maxima;
  const std::vector<UpdateTable> tables = collect_tables(call.gradients, maxima);
  maxima.fill(threads);
  const std::vector<UpdateUnit> units = split_tables(tables, call.gradients.num_keys(), threads);
  const bool all = call.rule.updates_all_rows;
  std::vector<uint8_t> touched(all ? end_of(tables) : 0);
  uint8_t* const marks = all ? touched.data() : nullptr;
  const Update update(call);
  CallScratch scratch;
  parallel_for(threads, units.size(), [&](int64_t u) { update_part(update, units[u], scratch.of_thread(), marks); });
  if (all) update_all_others(update, tables, touched);
  return {};
}

void update_distinct_rows(const UpdateCall& call, const int64_t* rows, const float* grads, int64_t count,
                          int64_t table_rows) {
  const int64_t width = call.gradients.width;
  const Update update(call);
  parallel_for(call.gradients.threads, (count + kUnitRows - 1) / kUnitRows, [&](int64_t unit) {
    const int64_t begin = unit * kUnitRows, size = std::min(kUnitRows, count - begin);
    std::vector<const float*> of_rows(size);
    for (int64_t i = 0; i < size; i++) of_rows[i] = grads + (begin + i) * width;
    std::vector<float> buffer(update_floats(width));
    UpdateRows part{};
    part.width = width;
    part.groups = size;
    part.rows = part.places = rows + begin;
    part.grads = of_rows.data();
    part.buffer = buffer.data();
    update.move(1.0f, part);
  });
  if (!call.rule.updates_all_rows) return;
  std::vector<uint8_t> touched(table_rows);
  for (int64_t i = 0; i < count; i++) touched[rows[i]] = 1;
  UpdateTable table{};
  table.rows = table_rows;
  table.lr_factor = 1.0f;
  update_all_others(update, {table}, touched);
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
