// SPDX-License-Identifier: Apache-2.0

// Update rules as numbers, in which ops and the Python binding take them.
#pragma once

#include <cstdint>

#include "embedding/row_update.h"

namespace terarec {

// The numbers of a rule, in this order; kernels/row_rules.py describes them. The last two are 0 or 1.
constexpr struct {
  const char* name;
  double RowRule::* number;
} kNumbers[] = {{"lr", &RowRule::lr},       {"eps", &RowRule::eps},   {"eps_hat", &RowRule::eps_hat},
                {"beta1", &RowRule::beta1}, {"beta2", &RowRule::beta2}, {"beta", &RowRule::beta},
                {"l1", &RowRule::l1},       {"l2", &RowRule::l2},     {"weight_decay", &RowRule::weight_decay}};
constexpr struct {
  const char* name;
  bool RowRule::* flag;
} kFlags[] = {{"lr_in_momentum", &RowRule::lr_in_momentum}, {"updates_all_rows", &RowRule::updates_all_rows}};

constexpr int64_t kRuleNumbers = sizeof(kNumbers) / sizeof(kNumbers[0]) + sizeof(kFlags) / sizeof(kFlags[0]);

// `formula`: the number of a `Rule`.
inline RowRule rule_of(int64_t formula, const double* numbers) {
  RowRule rule;
  rule.formula = static_cast<Rule>(formula);
  for (const auto& known : kNumbers) rule.*known.number = *numbers++;
  for (const auto& known : kFlags) rule.*known.flag = *numbers++ != 0;
  return rule;
}

}  // namespace terarec
