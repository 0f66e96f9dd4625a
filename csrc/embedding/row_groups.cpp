// SPDX-License-Identifier: Apache-2.0
#include "embedding/row_groups.h"

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <numeric>

namespace terarec {
namespace {

constexpr size_t kCacheLine = 64;

// Places arrays one after the other: first to compute their total size, then in the allocated memory.
class Layout {
 public:
  explicit Layout(void* memory) : memory_(static_cast<char*>(memory)) {}

  template <class T>
  void place(T*& array, int64_t count) {
    array = memory_ ? reinterpret_cast<T*>(memory_ + bytes_) : nullptr;
    bytes_ += (count * sizeof(T) + kCacheLine - 1) / kCacheLine * kCacheLine;
  }

  size_t bytes() const { return bytes_; }

 private:
  char* memory_;
  size_t bytes_ = 0;
};

// Calls place_all(layout) so that all arrays lie in `memory`.
template <class PlaceAll>
void lay_out(CallMemory& memory, PlaceAll&& place_all) {
  Layout measured(nullptr);
  place_all(measured);
  Layout placed(memory.at_least(measured.bytes()));
  place_all(placed);
}

// 0 stands for no call.
uint64_t next_call() {
  static std::atomic<uint64_t> last{0};
  return ++last;
}

}  // namespace

void RowScratch::have_groups(int64_t keys, int64_t groups, int64_t index_size, int64_t width, bool placed) {
  lay_out(arrays_, [&](Layout& layout) {
    layout.place(buffer, update_floats(width));
    layout.place(rows, groups);
    layout.place(places, placed ? groups : 0);
    layout.place(grads, groups);
    layout.place(scales, groups);
    layout.place(sum_of, groups);
    layout.place(more, keys);
    layout.place(index, index_size);
  });
}

void RowScratch::have_sums(int64_t count, int64_t width) {
  lay_out(sums_, [&](Layout& layout) {
    layout.place(first, count);
    layout.place(sums, count * width);
  });
}

void RowScratch::have_sums_of_all(int64_t count, int64_t width, bool placed) {
  lay_out(arrays_, [&](Layout& layout) {
    layout.place(buffer, update_floats(width));
    layout.place(rows, count);
    layout.place(places, placed ? count : 0);
    layout.place(grads, count);
    layout.place(touched, count);
  });
  lay_out(sums_, [&](Layout& layout) { layout.place(sums, count * width); });
}

CallScratch::CallScratch() : call_(next_call()) {}

RowScratch& CallScratch::of_thread() {
  static thread_local uint64_t call = 0;
  static thread_local RowScratch* scratch = nullptr;
  if (call != call_) {
    const std::lock_guard<std::mutex> lock(mutex_);
    scratch = &all_.emplace_front();
    call = call_;
  }
  return *scratch;
}

namespace {

// Up to this many rows per key, clearing an array indexed by row is cheaper than probing a hash table.
constexpr int64_t kDirectRowsPerKey = 4;

// Row -> group by array; 0 is a row not yet seen, g + 1 group g.
struct DirectIndex {
  uint32_t* table;
  int shift;

  uint32_t& find(int64_t row, const int64_t*) { return table[row >> shift]; }
};

// Row -> group by open addressing; the list of groups holds the rows themselves.
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

// Makes a group of every row of the part, in the order of first occurrence, with its first gradient. Marks the groups of
// repeated rows, and lists their further gradients with the group's number in the place of the sum.
template <class Index>
Found find_rows(const TablePart& part, const std::vector<BagGradients>& bags, Index index, bool scaled,
                RowScratch& scratch) {
  int64_t* rows = scratch.rows;
  uint32_t* sum_of = scratch.sum_of;
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
          if (of.places) scratch.places[found.groups] = of.places[i];
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
  uint32_t* sum_of = scratch.sum_of;
  const int64_t num_sums = std::accumulate(sum_of, sum_of + found.groups, int64_t{0});
  scratch.have_sums(num_sums, width);
  float* const sums = scratch.sums;
  SumTerm* const first = scratch.first;
  uint32_t sum = 0;
  for (int64_t g = 0; g < found.groups; g++) {
    if (!sum_of[g]) continue;
    first[sum] = {scratch.grads[g], scaled ? scratch.scales[g] : 1.0f, sum};
    scratch.grads[g] = sums + sum * width;
    if (scaled) scratch.scales[g] = 1.0f;
    sum_of[g] = sum++;
  }
  for (int64_t i = 0; i < found.more; i++) scratch.more[i].sum = sum_of[scratch.more[i].sum];
  kernels().add_terms({width, first, num_sums, scratch.more, found.more, sums});
}

bool has_places(const std::vector<BagGradients>& bags) { return !bags.empty() && bags.front().places; }

// Stores the places of the rows of a part's keys, by the row's number in the part.
void note_places(const TablePart& part, const std::vector<BagGradients>& bags, int64_t* places) {
  for (const BagGradients& of : bags) {
    const int64_t begin = of.offsets ? of.offsets[0] : 0, end = of.offsets ? of.offsets[of.bags] : of.bags;
    for (int64_t i = begin; i < end; i++) {
      if ((of.keys[i] & part.mask()) == part.part) places[of.keys[i] >> part.shift] = of.places[i];
    }
  }
}

}  // namespace

RowGroups group_by_row(const TablePart& part, const std::vector<BagGradients>& bags, int64_t num_keys, int64_t width,
                       RowScratch& scratch) {
  const bool scaled = std::any_of(bags.begin(), bags.end(), [](const BagGradients& of) { return of.scaled(); });
  const int64_t most_groups = std::min(num_keys, part.part_rows());
  const bool placed = has_places(bags);
  Found found;
  if (part.part_rows() <= kDirectRowsPerKey * num_keys) {
    scratch.have_groups(num_keys, most_groups, part.part_rows(), width, placed);
    memset(scratch.index, 0, 4 * part.part_rows());
    found = find_rows(part, bags, DirectIndex{scratch.index, part.shift}, scaled, scratch);
  } else {
    int bits = 6;
    while ((int64_t{1} << bits) < 2 * most_groups) bits++;
    const uint64_t size = uint64_t{1} << bits;
    scratch.have_groups(num_keys, most_groups, size, width, placed);
    memset(scratch.index, 0, 4 * size);
    const HashIndex index{scratch.index, part.shift, static_cast<uint64_t>(part.base), size - 1, bits};
    found = find_rows(part, bags, index, scaled, scratch);
  }
  if (found.more) sum_repeated(found, scaled, width, scratch);
  return {found.groups, scaled, placed};
}

RowGroups sum_by_row(const TablePart& part, const std::vector<BagGradients>& bags, int64_t width, RowScratch& scratch) {
  const int64_t rows = part.part_rows();
  const bool placed = has_places(bags);
  scratch.have_sums_of_all(rows, width, placed);
  float* const sums = scratch.sums;
  uint8_t* const touched = scratch.touched;
  memset(sums, 0, 4 * rows * width);
  memset(touched, 0, rows);
  for (const BagGradients& of : bags) {
    kernels().add_bags({of.keys, of.key_weights, of.offsets, of.bags, width, of.grad, of.grad_stride, of.pooling,
                        part.mask(), part.part, part.shift, sums, touched, scratch.buffer});
  }
  if (placed) note_places(part, bags, scratch.places);
  int64_t groups = 0;
  for (int64_t r = 0; r < rows; r++) {
    if (!touched[r]) continue;
    if (placed) scratch.places[groups] = scratch.places[r];  // groups <= r
    scratch.rows[groups] = part.base + (r << part.shift) + part.part;
    scratch.grads[groups] = sums + r * width;
    groups++;
  }
  return {groups, false, placed};
}

}  // namespace terarec
