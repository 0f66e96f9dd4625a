// SPDX-License-Identifier: Apache-2.0

// Lookups of tables whose rows are on several ranks. Each rank asks the owners for the rows of its distinct ids and
// pools them itself; backward, it sends them the sum of the gradients of each id.
#pragma once

#include <cstdint>

#include "tensorflow/mesh.h"
#include "tensorflow/tables.h"

namespace terarec {

// Where the rows of a table are.
struct Placement {
  static constexpr int64_t kSpread = -1;  // id k on rank k % N; of fixed rows, as row k / N there
  static constexpr int64_t kHere = -2;    // the table is that of a process alone

  int64_t home = kHere;  // or the rank that has all rows
  int64_t rows = -1;     // on all ranks; -1: any ids
};

// Calls of all ranks, of the part of a table that this one has; see the functions of Table.
void lookup_by_ranks(Mesh& mesh, Table& table, const Placement& placement, const Bags& bags, Absent absent, float* out,
                     IdRows* evicted, int threads);
// Returns the sums over all ranks, of rows that this rank has.
MergedRows merge_by_ranks(Mesh& mesh, const Table& table, const Placement& placement, const Bags& bags,
                          const float* grad, int threads);
void weight_gradient_by_ranks(Mesh& mesh, Table& table, const Placement& placement, const Bags& bags,
                              const float* grad, float* out, int threads);

}  // namespace terarec
