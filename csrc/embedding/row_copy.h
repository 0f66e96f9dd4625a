// SPDX-License-Identifier: Apache-2.0

// Copies of rows between tensors, such as weights and optimizer state, and rows of bytes that hold a part of each.
#pragma once

#include <cstdint>
#include <vector>

namespace terarec {

// One tensor: row i begins at first + i * bytes, and takes up the bytes of a packed row from `offset` on.
struct RowPart {
  char* first;
  int64_t bytes;
  int64_t offset;
};

// Rows of bytes: row i begins at first + i * stride.
struct PackedRows {
  char* first;
  int64_t stride;
};

// Copies row slots[i] of all parts to packed row i, for i < count; none for a negative slot.
void gather_rows(const std::vector<RowPart>& parts, const int64_t* slots, int64_t count, PackedRows packed,
                 int threads);

// Copies packed row places[i], or i if `places` is null, to row slots[i] of all parts; none for a negative place.
void scatter_rows(const std::vector<RowPart>& parts, const int64_t* slots, const int64_t* places, int64_t count,
                  PackedRows packed, int threads);

}  // namespace terarec
