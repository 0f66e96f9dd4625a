#include "embedding/row_groups.h"

#include <algorithm>
#include <cstring>

#include "embedding/kernels.h"

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

// Makes every row of the part a group in order of first appearance; lists further gradients with their groups and
// counts them.
template <class Index>
Found find_rows(const TablePart& part, const std::vector<BagGradients>& bags, Index index, bool scaled,
                RowScratch& scratch) {
  uint32_t* counts = scratch.begin.data() + 1;
  int64_t* rows = scratch.rows.data();
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
          scratch.first[found.groups] = grad;
          if (scaled) scratch.first_scales[found.groups] = scale;
          counts[found.groups] = 0;
          group = static_cast<uint32_t>(++found.groups);
        } else {
          counts[group - 1]++;
          scratch.found_groups[found.more] = group - 1;
          scratch.found[found.more] = grad;
          if (scaled) scratch.found_scales[found.more] = scale;
          found.more++;
        }
      }
    }
  }
  return found;
}

// Counting sort of the further gradients by group; stable, so that they stay in the order of the bags.
void sort_by_group(const Found& found, bool scaled, RowScratch& scratch) {
  uint32_t* next = scratch.begin.data() + 1;  // counts, then where a group's next goes, then where it ends
  uint32_t sum = 0;
  for (int64_t g = 0; g < found.groups; g++) {
    const uint32_t count = next[g];
    next[g] = sum;
    sum += count;
  }
  for (int64_t i = 0; i < found.more; i++) {
    const uint32_t to = next[scratch.found_groups[i]]++;
    scratch.more[to] = scratch.found[i];
    if (scaled) scratch.more_scales[to] = scratch.found_scales[i];
  }
  scratch.begin[0] = 0;
}

}  // namespace

int64_t RowScratch::bytes() const {
  return 4 * (index.capacity() + begin.capacity() + found_groups.capacity() + first_scales.capacity() +
              more_scales.capacity() + found_scales.capacity() + sums.capacity() + buffer.capacity()) +
         8 * (rows.capacity() + first.capacity() + more.capacity() + found.capacity()) + touched.capacity();
}

RowGroups group_by_row(const TablePart& part, const std::vector<BagGradients>& bags, int64_t num_keys,
                       RowScratch& scratch) {
  const bool scaled = std::any_of(bags.begin(), bags.end(), [](const BagGradients& of) { return of.scaled(); });
  const int64_t most_groups = std::min(num_keys, part.part_rows());
  at_least(scratch.rows, most_groups);
  at_least(scratch.first, most_groups);
  at_least(scratch.begin, most_groups + 1);
  at_least(scratch.more, num_keys);
  at_least(scratch.found, num_keys);
  at_least(scratch.found_groups, num_keys);
  if (scaled) {
    at_least(scratch.first_scales, most_groups);
    at_least(scratch.more_scales, num_keys);
    at_least(scratch.found_scales, num_keys);
  }
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
  if (found.more) sort_by_group(found, scaled, scratch);
  return {found.groups, found.more > 0, scaled};
}

RowGroups sum_by_row(const TablePart& part, const std::vector<BagGradients>& bags, int64_t width, RowScratch& scratch) {
  const int64_t rows = part.part_rows();
  float* sums = at_least(scratch.sums, rows * width);
  uint8_t* touched = at_least(scratch.touched, rows);
  memset(sums, 0, 4 * rows * width);
  memset(touched, 0, rows);
  for (const BagGradients& of : bags) {
    kernels().add_bags({of.keys, of.key_weights, of.offsets, of.bags, width, of.grad, of.grad_stride, of.pooling,
                        part.mask(), part.part, part.shift, sums, touched, at_least(scratch.buffer, width)});
  }
  at_least(scratch.rows, rows);
  at_least(scratch.first, rows);
  int64_t groups = 0;
  for (int64_t r = 0; r < rows; r++) {
    if (!touched[r]) continue;
    scratch.rows[groups] = part.base + (r << part.shift) + part.part;
    scratch.first[groups] = sums + r * width;
    groups++;
  }
  return {groups, false, false};
}

}  // namespace terarec
