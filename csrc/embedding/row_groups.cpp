#include "embedding/row_groups.h"

#include <algorithm>
#include <cstring>

#include "embedding/kernels.h"

namespace terarec {
namespace {

// Up to so many rows per key an array indexed by row is cheaper to clear than a hash is to probe.
constexpr int64_t kDirectRowsPerKey = 4;

// Row -> slot by array; 0 is a row not yet seen, s + 1 slot s.
struct DirectIndex {
  uint32_t* table;
  int shift;

  uint32_t& find(int64_t row, const int64_t*) { return table[row >> shift]; }
};

// Row -> slot by open addressing; the rows themselves stand in the list of groups.
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
  int64_t groups, keys;
};

// Gives every row of the part a slot in order of first appearance, and counts and lists its gradients.
template <class Index>
Found find_rows(const TablePart& part, const std::vector<BagGradients>& bags, Index index, bool scaled, RowScratch& scratch) {
  uint32_t* counts = scratch.begin.data() + 1;
  int64_t* rows = scratch.rows.data();
  Found found{0, 0};
  for (const BagGradients& of : bags) {
    const float* grad = of.grad;
    for (int64_t b = 0; b < of.bags; b++, grad += of.grad_stride) {
      const int64_t begin = of.offsets ? of.offsets[b] : b;
      const int64_t end = of.offsets ? of.offsets[b + 1] : b + 1;
      const float scale = of.mean && end - begin > 1 ? 1.0f / static_cast<float>(end - begin) : 1.0f;
      for (int64_t i = begin; i < end; i++) {
        if ((of.keys[i] & part.mask()) != part.part) continue;
        uint32_t& slot = index.find(of.keys[i], rows);
        if (slot == 0) {
          rows[found.groups] = part.base + of.keys[i];
          counts[found.groups] = 0;
          slot = static_cast<uint32_t>(++found.groups);
        }
        counts[slot - 1]++;
        scratch.slots[found.keys] = slot - 1;
        scratch.found[found.keys] = grad;
        if (scaled) scratch.found_scales[found.keys] = scale;
        found.keys++;
      }
    }
  }
  return found;
}

// Counting sort of what was found by slot; stable, so that a row's gradients stay in the order of the bags.
void sort_by_slot(const Found& found, bool scaled, RowScratch& scratch) {
  uint32_t* begin = scratch.begin.data();
  uint32_t* next = scratch.next.data();
  begin[0] = 0;
  for (int64_t g = 0; g < found.groups; g++) {
    next[g] = begin[g];
    begin[g + 1] += begin[g];
  }
  for (int64_t i = 0; i < found.keys; i++) {
    const uint32_t to = next[scratch.slots[i]]++;
    scratch.sources[to] = scratch.found[i];
    if (scaled) scratch.scales[to] = scratch.found_scales[i];
  }
}

}  // namespace

int64_t RowScratch::bytes() const {
  return 4 * (index.capacity() + slots.capacity() + begin.capacity() + next.capacity() + found_scales.capacity() +
              scales.capacity() + sums.capacity() + buffer.capacity()) +
         8 * (rows.capacity() + found.capacity() + sources.capacity()) + touched.capacity();
}

int64_t group_by_row(const TablePart& part, const std::vector<BagGradients>& bags, int64_t num_keys, RowScratch& scratch) {
  const bool scaled = std::any_of(bags.begin(), bags.end(), [](const BagGradients& of) { return of.mean; });
  const int64_t most_groups = std::min(num_keys, part.part_rows());
  at_least(scratch.slots, num_keys);
  at_least(scratch.found, num_keys);
  at_least(scratch.sources, num_keys);
  at_least(scratch.rows, most_groups);
  at_least(scratch.begin, most_groups + 1);
  at_least(scratch.next, most_groups);
  if (scaled) {
    at_least(scratch.found_scales, num_keys);
    at_least(scratch.scales, num_keys);
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
  sort_by_slot(found, scaled, scratch);
  return found.groups;
}

int64_t sum_by_row(const TablePart& part, const std::vector<BagGradients>& bags, int64_t width, RowScratch& scratch) {
  const int64_t rows = part.part_rows();
  float* sums = at_least(scratch.sums, rows * width);
  uint8_t* touched = at_least(scratch.touched, rows);
  memset(sums, 0, 4 * rows * width);
  memset(touched, 0, rows);
  for (const BagGradients& of : bags) {
    kernels().add_bags({of.keys, of.offsets, of.bags, width, of.grad, of.grad_stride, of.mean, part.mask(), part.part,
                        part.shift, sums, touched, at_least(scratch.buffer, width)});
  }
  at_least(scratch.rows, rows);
  at_least(scratch.sources, rows);
  at_least(scratch.begin, rows + 1);
  int64_t groups = 0;
  for (int64_t r = 0; r < rows; r++) {
    if (!touched[r]) continue;
    scratch.rows[groups] = part.base + (r << part.shift) + part.part;
    scratch.sources[groups] = sums + r * width;
    scratch.begin[groups] = static_cast<uint32_t>(groups);
    groups++;
  }
  scratch.begin[groups] = static_cast<uint32_t>(groups);
  return groups;
}

}  // namespace terarec
