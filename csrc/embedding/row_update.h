// SPDX-License-Identifier: Apache-2.0

// The exact update of the rows that a batch touched, or of all rows of their tables.
#pragma once

#include <cmath>
#include <cstdint>
#include <vector>

#include "embedding/bag_lookup.h"
#include "embedding/kernels.h"
#include "embedding/update_tables.h"

namespace terarec {

// The update rule: the fields of the rule's class in kernels/row_rules.py; others keep the defaults below.
struct RowRule {
  Rule formula = Rule::kSgd;
  double lr = 0;
  double eps = 0, eps_hat = 0;
  double beta1 = 0, beta2 = 0;
  double beta = 0;  // of FTRL
  double weight_decay = 0;
  double l1 = 0, l2 = 0;
  double grad_scale = 1;
  double clip_value = HUGE_VAL, clip_norm = HUGE_VAL;
  bool lr_in_momentum = false;
  bool updates_all_rows = false;  // whether rows without a gradient are updated, too
  bool catches_up = false;        // whether a row is first updated for the steps that it missed

  // Null for a name that is none of `kind` in kernels/row_rules.py, "adamax", "adadelta" or "nadam".
  static const Rule* formula_of(const char* kind);

  // Constants of step number `step`.
  RuleConstants constants(int64_t step) const;

  // Whether gradients are scaled, clipped or regularised before the formula uses them.
  bool transforms_gradients() const;

  // Options of such gradients, and those of rows that catch up or are narrow.
  RowExtras extras(int64_t step, int32_t* last_steps, uint64_t rounding_seed) const;

 private:
  bool is_coupled() const { return formula != Rule::kFtrl && (l1 > 0 || l2 > 0); }
};

// The numbers of arena rows on which the bits of their rounding depend; by default the rows themselves.
struct RowNumbers {
  const int64_t* of_rows = nullptr;   // of each arena row
  const int64_t* segments = nullptr;  // [count, 3]: the first row of a segment, in their order, a factor and a shift
  int64_t count = 0;

  bool are_rows() const { return !of_rows && !segments; }
  std::vector<int64_t> of(const int64_t* rows, int64_t num_rows) const;
};

struct UpdateCall {
  float* state0;
  float* state1;
  int32_t* last_steps;  // of each row, for a rule that catches up; else null
  const RowRule& rule;
  int64_t step;
  uint64_t rounding_seed;
  UpdateGradients gradients;
  RowNumbers numbers = {};
};

// Updates each row once, with the sum of its gradients; the same bits for any number of threads.
// If a fault is returned, nothing was changed.
BagFault row_update(const UpdateCall& call);

// The same for one table of `table_rows` rows from arena row 0 on, of which `rows` are distinct and checked, each with
// one gradient: nothing has to be grouped. The list of `call.gradients` is not read.
void update_distinct_rows(const UpdateCall& call, const int64_t* rows, const float* grads, int64_t count,
                          int64_t table_rows);

struct GradientSquares {
  BagFault fault;
  double sum;
};

// The sum of the squares of the rows' summed gradients, the same bits for any number of threads; rows of tables that
// do not learn, and rows before `first_row`, do not count.
GradientSquares gradient_squares(const UpdateGradients& gradients, int64_t first_row);

}  // namespace terarec
