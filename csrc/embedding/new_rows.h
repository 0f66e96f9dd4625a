// The rows that new keys of a hash index get.
#pragma once

#include <cstdint>

#include "embedding/segment_entries.h"

namespace terarec {

// Row of new key j: free_rows[j] below num_free, then next, next + step, ...
struct NewRows {
  const int64_t* free_rows;
  int64_t num_free;
  int64_t next;
  int64_t step;

  int64_t row(int64_t j) const { return j < num_free ? free_rows[j] : next + (j - num_free) * step; }
};

// Gives the keys of a call whose row is kAbsent their rows, in its order, and writes them to `new_keys` if that is not
// null. Returns how many they are, or -1, having changed nothing, if rows would reach `most_rows`.
int64_t number_new_keys(KeySpan keys, int64_t* rows, const NewRows& new_rows, int64_t most_rows, int64_t* new_keys,
                        int threads);

}  // namespace terarec
