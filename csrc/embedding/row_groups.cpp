#include "embedding/row_groups.h"

#include <algorithm>
#include <cstring>
#include <numeric>

namespace terarec {
namespace {

// Up to so many rows per key an array indexed by row is cheaper to clear than a hash is to probe.
constexpr int64_t kDirectRowsPerKey = 4;

// Row -> group by array; 0 is a row not yet seen, g + 1 group g.
struct DirectIndex {
  uint32_t* table;
  int shift;

  uint32_t& find(int64_t row, const int64_t*) { return table[row >> shift]; }
};

// Row -> group by open addressing; the rows themselves stand in the list of groups.
struct HashIndex {
  uint32_t* table;
  int shift;
  uint64_t base, mask;
  int bits;

  uint32_t& find(int64_t row, const int64_t* rows) {
    uint64_t at = static_cast<uint64_t>(row >> shift) * 0x9E3779B97F4A7C15u >> (64 - bits);
    while (table[at] != 0 && rows[table[at] - 1] != static_cast<int64_t>(base + row)) at = (at + 1) & mask;
    return table[at];
  }
};

struct Found {
  int64_t groups, more;
};

// Makes every row of the part a group in order of first appearance with its first gradient; marks those that come
// again, and lists their further gradients with the group in the place of the sum.
template <class Index>
Found find_rows(const TablePart& part, const std::vector<BagGradients>& bags, Index index, bool scaled,
                RowScratch& scratch) {
  int64_t* rows = scratch.rows.data();
  uint32_t* sum_of = scratch.sum_of.data();
  Found found{0, 0};
  for (const BagGradients& of : bags) {
    const float* grad = of.grad;
    for (int64_t b = 0; b < of.bags; b++, grad += of.grad_stride) {
      const int64_t begin = of.offsets ? of.offsets[b] : b;
      const int64_t end = of.offsets ? of.offsets[b + 1] : b + 1;
      const float factor = bag_factor(of.pooling, end - begin, of.key_weights ? of.key_weights + begin : nullptr);
      for (int64_t i = begin; i < end; i++) {
        if ((of.keys[i] & part.mask()) != part.part) continue;
        const float scale = of.key_weights ? factor * of.key_weights[i] : factor;
        uint32_t& group = index.find(of.keys[i], rows);
        if (group == 0) {
          rows[found.groups] = part.base + of.keys[i];
          scratch.grads[found.groups] = grad;
          if (scaled) scratch.scales[found.groups] = scale;
          sum_of[found.groups] = 0;
          group = static_cast<uint32_t>(++found.groups);
        } else {
          sum_of[group - 1] = 1;
          scratch.more[found.more++] = {grad, scale, group - 1};
        }
      }
    }
  }
  return found;
}

// Replaces the first gradient of each row that repeats by the sum of all.
void sum_repeated(const Found& found, bool scaled, int64_t width, RowScratch& scratch) {
  uint32_t* sum_of = scratch.sum_of.data();
  const int64_t num_sums = std::accumulate(sum_of, sum_of + found.groups, int64_t{0});
  float* const sums = scratch.sums.at_least(num_sums * width);
  SumTerm* const first = at_least(scratch.first, num_sums);
  uint32_t sum = 0;
  for (int64_t g = 0; g < found.groups; g++) {
    if (!sum_of[g]) continue;
    first[sum] = {scratch.grads[g], scaled ? scratch.scales[g] : 1.0f, sum};
    scratch.grads[g] = sums + sum * width;
    if (scaled) scratch.scales[g] = 1.0f;
    sum_of[g] = sum++;
  }
  for (int64_t i = 0; i < found.more; i++) scratch.more[i].sum = sum_of[scratch.more[i].sum];
  kernels().add_terms({width, first, num_sums, scratch.more.data(), found.more, sums});
}

}  // namespace

float* SumMemory::at_least(int64_t floats) {
  if (4 * floats > bytes_) {
    *this = SumMemory();  // given back before more is taken
    const int64_t bytes = whole_huge_pages(4 * floats);
    memory_ = CallMemory(bytes);
    bytes_ = bytes;
  }
  return static_cast<float*>(memory_.get());
}

int64_t RowScratch::bytes() const {
  return 4 * (index.capacity() + scales.capacity() + sum_of.capacity() + buffer.capacity()) +
         8 * (rows.capacity() + grads.capacity()) + sizeof(SumTerm) * (first.capacity() + more.capacity()) +
         sums.bytes() + touched.capacity();
}

RowGroups group_by_row(const TablePart& part, const std::vector<BagGradients>& bags, int64_t num_keys, int64_t width,
                       RowScratch& scratch) {
  const bool scaled = std::any_of(bags.begin(), bags.end(), [](const BagGradients& of) { return of.scaled(); });
  const int64_t most_groups = std::min(num_keys, part.part_rows());
  at_least(scratch.rows, most_groups);
  at_least(scratch.grads, most_groups);
  at_least(scratch.sum_of, most_groups);
  at_least(scratch.more, num_keys);
  if (scaled) at_least(scratch.scales, most_groups);
  Found found;
  if (part.part_rows() <= kDirectRowsPerKey * num_keys) {
    uint32_t* table = at_least(scratch.index, part.part_rows());
    memset(table, 0, 4 * part.part_rows());
    found = find_rows(part, bags, DirectIndex{table, part.shift}, scaled, scratch);
  } else {
    int bits = 6;
    while ((int64_t{1} << bits) < 2 * most_groups) bits++;
    const uint64_t size = uint64_t{1} << bits;
    uint32_t* table = at_least(scratch.index, size);
    memset(table, 0, 4 * size);
    const HashIndex index{table, part.shift, static_cast<uint64_t>(part.base), size - 1, bits};
    found = find_rows(part, bags, index, scaled, scratch);
  }
  if (found.more) sum_repeated(found, scaled, width, scratch);
  return {found.groups, scaled};
}

RowGroups sum_by_row(const TablePart& part, const std::vector<BagGradients>& bags, int64_t width, RowScratch& scratch) {
  const int64_t rows = part.part_rows();
  float* sums = scratch.sums.at_least(rows * width);
  uint8_t* touched = at_least(scratch.touched, rows);
  memset(sums, 0, 4 * rows * width);
  memset(touched, 0, rows);
  for (const BagGradients& of : bags) {
    kernels().add_bags({of.keys, of.key_weights, of.offsets, of.bags, width, of.grad, of.grad_stride, of.pooling,
                        part.mask(), part.part, part.shift, sums, touched, at_least(scratch.buffer, width)});
  }
  at_least(scratch.rows, rows);
  at_least(scratch.grads, rows);
  int64_t groups = 0;
  for (int64_t r = 0; r < rows; r++) {
    if (!touched[r]) continue;
    scratch.rows[groups] = part.base + (r << part.shift) + part.part;
    scratch.grads[groups] = sums + r * width;
    groups++;
  }
  return {groups, false};
}

}  // namespace terarec
