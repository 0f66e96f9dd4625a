// SPDX-License-Identifier: Apache-2.0
#include "tensorflow/range_sums.h"

#include <algorithm>
#include <cstring>
#include <limits>

#include "common/parallel.h"
#include "embedding/kernels.h"

namespace terarec {
namespace {

// Sums of a range: they stay in the L2 cache.
constexpr int64_t kRangeBytes = 256 << 10;
// With fewer ids a row, clearing a number for each row costs more than an index of the touched ones.
constexpr int64_t kMostRowsPerId = 8;

struct Term {
  uint32_t row;  // in its range
  uint32_t bag;
  float factor;
};

// Calls visit(position, bag, factor) for the rows of the bags from `first` to `end`.
template <class Visit>
void for_terms(const RowGradients& of, int64_t first, int64_t end, Visit&& visit) {
  for (int64_t b = first; b < end; b++) {
    const int64_t begin = of.offsets ? of.offsets[b] : b, stop = of.offsets ? of.offsets[b + 1] : b + 1;
    const float* const weights = of.weights ? of.weights + begin : nullptr;
    const float factor = of.offsets ? bag_factor(of.pooling, stop - begin, weights) : 1.0f;
    for (int64_t i = begin; i < stop; i++) visit(i, b, weights ? factor * of.weights[i] : factor);
  }
}

// The rows of a range that have a term, in the order of their first ones, and their sums.
RangeSums sum_range(const RowGradients& of, const Term* terms, int64_t count, int64_t first_row, int64_t range_rows) {
  const CallMemory memory(2 * sizeof(SumTerm) * count + sizeof(uint32_t) * range_rows);
  SumTerm* const first = static_cast<SumTerm*>(memory.get());
  SumTerm* const more = first + count;
  uint32_t* const numbers = reinterpret_cast<uint32_t*>(more + count);  // of a row's sum, from 1
  memset(numbers, 0, sizeof(uint32_t) * range_rows);
  RangeSums result;
  int64_t repeats = 0;
  for (int64_t i = 0; i < count; i++) {
    const Term term = terms[i];
    const float* const grad = of.grad + term.bag * of.width;
    uint32_t& number = numbers[term.row];
    if (number) {
      more[repeats++] = {grad, term.factor, number - 1};
      continue;
    }
    const uint32_t place = static_cast<uint32_t>(result.rows.size());
    first[place] = {grad, term.factor, place};
    number = place + 1;
    result.rows.push_back(first_row + term.row);
  }
  const int64_t sums = static_cast<int64_t>(result.rows.size());
  result.sums = CallMemory(sizeof(float) * std::max<int64_t>(1, sums) * of.width);
  kernels().add_terms({of.width, first, sums, more, repeats, static_cast<float*>(result.sums.get())});
  return result;
}

int shift_of(int64_t width) {
  int shift = 6;
  while ((int64_t{8} << shift) * width <= kRangeBytes) shift++;
  return shift;
}

}  // namespace

bool sums_by_range(const RowGradients& gradients) {
  return gradients.table_rows <= kMostRowsPerId * gradients.num_rows &&
         std::max(gradients.bags, gradients.num_rows) < std::numeric_limits<uint32_t>::max();
}

std::vector<RangeSums> sum_by_range(const RowGradients& of, int threads) {
  const int shift = shift_of(of.width);
  const int64_t ranges = ((of.table_rows - 1) >> shift) + 1, bags = of.offsets ? of.bags : of.num_rows;
  const int64_t chunks = std::max<int64_t>(1, std::min<int64_t>(threads, bags));
  const auto first_bag = [&](int64_t chunk) { return bags * chunk / chunks; };

  // Where the terms of each range and chunk begin, ranges first, so that those of a range keep the order of the bags.
  std::vector<int64_t> places(ranges * chunks + 1);
  parallel_for(threads, chunks, [&](int64_t chunk) {
    std::vector<int64_t> counts(ranges);
    for_terms(of, first_bag(chunk), first_bag(chunk + 1),
              [&](int64_t i, int64_t, float) { counts[of.rows[i] >> shift]++; });
    for (int64_t range = 0; range < ranges; range++) places[range * chunks + chunk + 1] = counts[range];
  });
  for (size_t i = 1; i < places.size(); i++) places[i] += places[i - 1];

  const CallMemory memory(sizeof(Term) * std::max<int64_t>(1, of.num_rows));
  Term* const terms = static_cast<Term*>(memory.get());
  const int64_t mask = (int64_t{1} << shift) - 1;
  parallel_for(threads, chunks, [&](int64_t chunk) {
    std::vector<int64_t> next(ranges);
    for (int64_t range = 0; range < ranges; range++) next[range] = places[range * chunks + chunk];
    for_terms(of, first_bag(chunk), first_bag(chunk + 1), [&](int64_t i, int64_t bag, float factor) {
      const int64_t row = of.rows[i];
      terms[next[row >> shift]++] = {static_cast<uint32_t>(row & mask), static_cast<uint32_t>(bag), factor};
    });
  });

  std::vector<RangeSums> results(ranges);
  parallel_for(threads, ranges, [&](int64_t range) {
    const int64_t begin = places[range * chunks], first_row = range << shift;
    results[range] = sum_range(of, terms + begin, places[(range + 1) * chunks] - begin, first_row,
                               std::min(mask + 1, of.table_rows - first_row));
  });
  return results;
}

}  // namespace terarec
