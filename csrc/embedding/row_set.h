// SPDX-License-Identifier: Apache-2.0

// The distinct rows of a list, numbered in the order in which they first occur.
#pragma once

#include <cstdint>
#include <vector>

#include "embedding/hash_insertion.h"
#include "embedding/split_mix.h"

namespace terarec {

class RowSet {
 public:
  // Writes the number of each row of the list to `places`.
  RowSet(KeySpan rows, uint64_t seed, int64_t* places);

  int64_t size() const { return static_cast<int64_t>(firsts_.size()); }
  // Position in the list at which row number i first occurs.
  const int64_t* firsts() const { return firsts_.data(); }

  // Writes the number of each row, or -1 if it is not in the set.
  void find(KeySpan rows, int64_t* places) const;
  // As find; the rows found are no longer in the set. Returns how many are left.
  int64_t take(KeySpan rows, int64_t* places);

 private:
  struct Entry {
    int64_t row;
    int64_t number;  // -1: none
  };

  template <class Visit>
  void for_each(KeySpan rows, Visit&& visit) const;

  uint64_t home(int64_t row) const { return hash_(row) >> shift_; }
  const Entry& entry(int64_t row) const;

  KeyHash hash_;
  int shift_ = 63;
  std::vector<Entry> entries_;  // twice as many as rows or more
  std::vector<int64_t> firsts_;
  std::vector<bool> is_gone_;
  int64_t left_ = 0;
};

}  // namespace terarec
