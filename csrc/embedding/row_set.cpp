// SPDX-License-Identifier: Apache-2.0
#include "embedding/row_set.h"

namespace terarec {
namespace {

constexpr int64_t kAhead = 16;

}  // namespace

// The entry of a row, or the one where it would be.
const RowSet::Entry& RowSet::entry(int64_t row) const {
  const uint64_t last = entries_.size() - 1;
  uint64_t at = home(row);
  while (entries_[at].number >= 0 && entries_[at].row != row) at = (at + 1) & last;
  return entries_[at];
}

RowSet::RowSet(KeySpan rows, uint64_t seed, int64_t* places) : hash_{seed} {
  while ((int64_t{1} << (64 - shift_)) < 2 * rows.size) shift_--;
  entries_.assign(size_t{1} << (64 - shift_), {0, -1});
  firsts_.reserve(rows.size);
  for (int64_t i = 0; i < rows.size; i++) {
    if (i + kAhead < rows.size) __builtin_prefetch(&entries_[home(rows.keys[i + kAhead])], 1);
    auto& found = const_cast<Entry&>(entry(rows.keys[i]));
    if (found.number < 0) {
      found = {rows.keys[i], size()};
      firsts_.push_back(i);
    }
    places[i] = found.number;
  }
  is_gone_.assign(size(), false);
  left_ = size();
}

// Calls visit(position, number or -1) for each row.
template <class Visit>
void RowSet::for_each(KeySpan rows, Visit&& visit) const {
  for (int64_t i = 0; i < rows.size; i++) {
    if (i + kAhead < rows.size) __builtin_prefetch(&entries_[home(rows.keys[i + kAhead])]);
    const int64_t number = entry(rows.keys[i]).number;
    visit(i, number < 0 || is_gone_[number] ? -1 : number);
  }
}

void RowSet::find(KeySpan rows, int64_t* places) const {
  for_each(rows, [places](int64_t i, int64_t number) { places[i] = number; });
}

int64_t RowSet::take(KeySpan rows, int64_t* places) {
  for_each(rows, [this, places](int64_t i, int64_t number) {
    places[i] = number;
    if (number < 0) return;
    is_gone_[number] = true;
    left_--;
  });
  return left_;
}

}  // namespace terarec
