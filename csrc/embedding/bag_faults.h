// What is wrong with the keys or offsets of a call, and the checks that find it.
#pragma once

#include <cstdint>
#include <mutex>

namespace terarec {

struct BagFault {
  enum Kind : int64_t { kNone, kOffset, kKey };
  Kind kind = kNone;
  int64_t gradient = 0;  // number of the gradient, for a row update
  int64_t feature = 0;
  int64_t position = 0;  // in the offsets or the keys
  int64_t value = 0;
};

// Bags of one feature of a call.
struct BagRange {
  const int64_t* keys;
  int64_t num_keys;
  const int64_t* offsets;
  int64_t feature;
  int64_t first_bag, bags;  // first_bag counts from the call's first
  int64_t rows;  // of the feature's table
};

struct BagCheck {
  BagFault fault;
  bool all_single = false;  // every bag holds one key
};

BagCheck check_bags(const BagRange& range);

// Whether the first and last of the call's offsets are 0 and num_keys.
BagFault check_ends(const int64_t* offsets, int64_t bags, int64_t num_keys);

// Keeps the fault that comes first in the call, whichever thread finds its fault first.
class FirstFault {
 public:
  void add(const BagFault& fault);
  const BagFault& get() const { return first_; }

 private:
  std::mutex mutex_;
  BagFault first_;
};

}  // namespace terarec
