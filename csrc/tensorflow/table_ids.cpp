// SPDX-License-Identifier: Apache-2.0

// Ids of tables that grow: which have rows, which get some, and which lose theirs to others.
#include <algorithm>
#include <chrono>
#include <cstring>
#include <string>
#include <vector>

#include "embedding/row_init.h"
#include "embedding/split_mix.h"
#include "tensorflow/tables.h"

namespace terarec {
namespace {

int64_t now() {
  using Microseconds = std::chrono::microseconds;
  return std::chrono::duration_cast<Microseconds>(std::chrono::system_clock::now().time_since_epoch()).count();
}

bool draws(uint64_t stream, int64_t id, double chance) {
  const uint64_t bits = mix(stream + static_cast<uint64_t>(id) * kMixStep);
  return static_cast<double>(bits >> 11) * 0x1p-53 < chance;
}

}  // namespace

void Table::find(const int64_t* ids, int64_t num_ids, std::vector<int64_t>& rows, int threads) const {
  rows.resize(num_ids);
  if (index_->find({ids, num_ids}, rows.data(), threads) == 0) return;
  for (int64_t& row : rows) row = std::max<int64_t>(row, 0);
}

void Table::find_present(const char* argument, const int64_t* ids, int64_t num_ids, std::vector<int64_t>& rows,
                         int threads) const {
  rows.resize(num_ids);
  if (index_->find({ids, num_ids}, rows.data(), threads) == 0) return;
  const auto first = std::find(rows.begin(), rows.end(), kAbsent) - rows.begin();
  throw TableError(TableError::kInvalid, std::string(argument) + ": got " + std::to_string(ids[first]) +
                                             " at position " + std::to_string(first) +
                                             ", expected ids that variable '" + name_ + "' has");
}

void Table::find_or_insert(const int64_t* ids, int64_t num_ids, Absent absent, std::vector<int64_t>& rows,
                           IdRows* evicted, int threads) {
  rows.resize(num_ids);
  if (index_->find({ids, num_ids}, rows.data(), threads) == 0) {
    touch(rows.data(), num_ids);
    return;
  }
  if (absent != Absent::kAdmit || growth_.admitted >= 1) {
    insert(ids, num_ids, rows.data(), evicted, threads);
    return;
  }
  // Another draw in every call, the same for all occurrences of an id in it.
  const uint64_t stream = mix(growth_.initial.seed + ++admissions_ * kMixStep);
  std::vector<int64_t> admitted;
  for (int64_t i = 0; i < num_ids; i++) {
    if (rows[i] != kAbsent || draws(stream, ids[i], growth_.admitted)) admitted.push_back(ids[i]);
  }
  std::vector<int64_t> of_admitted(admitted.size());
  insert(admitted.data(), static_cast<int64_t>(admitted.size()), of_admitted.data(), evicted, threads);
  find(ids, num_ids, rows, threads);
}

void Table::insert(const int64_t* ids, int64_t num_ids, int64_t* rows, IdRows* evicted, int threads) {
  check_narrow(ids, num_ids);
  if (growth_.forgets && used_ + num_ids > most_rows_) make_room(ids, num_ids, evicted, threads);
  std::vector<int64_t> added(num_ids);
  const int64_t first = used_;
  const int64_t count = index_->insert({ids, num_ids}, rows, {nullptr, 0, first, 1}, added.data(), threads);
  if (count == 0) return touch(rows, num_ids);
  try {
    if (count < 0 || first + count > most_rows_) fail_full();
    weights_.grow(first + count);
    ids_.insert(ids_.end(), added.begin(), added.begin() + count);
    if (growth_.forgets) times_.resize(first + count);
    used_ = first + count;
    grow_states();
  } catch (...) {
    std::vector<int64_t> removed(std::max<int64_t>(count, 0));
    if (count > 0) index_->erase({added.data(), count}, removed.data(), threads);
    ids_.resize(first);
    used_ = first;
    throw;
  }
  initialize(added.data(), count, first, threads);
  for (int state = 0; state < num_states_; state++) {
    std::fill(states_[state].row(first), states_[state].row(first + count), initial_state_[state]);
  }
  touch(rows, num_ids);
}

void Table::check_narrow(const int64_t* ids, int64_t num_ids) const {
  for (int64_t i = 0; growth_.narrow && i < num_ids; i++) {
    if (ids[i] == static_cast<int32_t>(ids[i])) continue;
    throw TableError(TableError::kInvalid, "ids: got " + std::to_string(ids[i]) + ", expected those of variable '" +
                                               name_ + "', which have 32 bits");
  }
}

void Table::fail_full() const {
  throw TableError(TableError::kNoSpace, "variable '" + name_ + "' is full: it has at most " +
                                             std::to_string(most_rows_ - 1) + " ids");
}

void Table::touch(const int64_t* rows, int64_t count) {
  if (!growth_.forgets) return;
  const int64_t time = now();
  for (int64_t i = 0; i < count; i++) times_[rows[i]] = time;
}

// Evicts as many ids as new ones have too little room, those that did not come for longest, and none of this call.
void Table::make_room(const int64_t* ids, int64_t num_ids, IdRows* evicted, int threads) {
  std::vector<int64_t> rows(num_ids), absent;
  index_->find({ids, num_ids}, rows.data(), threads);
  std::vector<bool> stays(used_);
  for (int64_t i = 0; i < num_ids; i++) {
    if (rows[i] == kAbsent) absent.push_back(ids[i]);
    else stays[rows[i]] = true;
  }
  std::sort(absent.begin(), absent.end());
  const int64_t added = std::unique(absent.begin(), absent.end()) - absent.begin();
  const int64_t excess = used_ + added - most_rows_;
  if (excess <= 0) return;
  std::vector<int64_t> oldest;
  for (int64_t row = 1; row < used_; row++) {
    if (!stays[row]) oldest.push_back(row);
  }
  if (static_cast<int64_t>(oldest.size()) < excess) fail_full();
  std::nth_element(oldest.begin(), oldest.begin() + excess - 1, oldest.end(), [this](int64_t a, int64_t b) {
    return times_[a] != times_[b] ? times_[a] < times_[b] : a < b;
  });
  oldest.resize(excess);
  std::sort(oldest.begin(), oldest.end());
  // Rows at the end take the place of those that go, so that rows stay without gaps.
  const int64_t end = used_ - excess;
  std::vector<int64_t> gone, moved, to, from;
  for (const int64_t row : oldest) {
    gone.push_back(ids_[row]);
    if (row < end) to.push_back(row);
  }
  for (int64_t row = end; row < used_; row++) {
    if (std::binary_search(oldest.begin(), oldest.end(), row)) continue;
    from.push_back(row);
    moved.push_back(ids_[row]);
  }
  if (evicted) {
    evicted->ids.insert(evicted->ids.end(), gone.begin(), gone.end());
    for (const int64_t row : oldest) {
      evicted->rows.insert(evicted->rows.end(), weights_.row(row), weights_.row(row) + width_);
    }
  }
  // First what may lack memory: until here nothing has changed.
  index_->assign({moved.data(), static_cast<int64_t>(moved.size())}, to.data(), threads);
  std::vector<int64_t> rows_of_gone(gone.size());
  index_->erase({gone.data(), excess}, rows_of_gone.data(), threads);
  for (size_t i = 0; i < from.size(); i++) {
    memcpy(weights_.row(to[i]), weights_.row(from[i]), sizeof(float) * width_);
    for (int s = 0; s < num_states_; s++) memcpy(states_[s].row(to[i]), states_[s].row(from[i]), sizeof(float) * width_);
    ids_[to[i]] = ids_[from[i]];
    times_[to[i]] = times_[from[i]];
  }
  ids_.resize(end);
  times_.resize(end);
  used_ = end;
}

void Table::initialize(const int64_t* ids, int64_t count, int64_t first_row, int threads) {
  const InitialRows& initial = growth_.initial;
  float* const values = weights_.row(first_row);
  if (initial.scale == 0) {
    std::fill(values, values + count * width_, static_cast<float>(initial.offset));
    return;
  }
  std::vector<int64_t> targets(count);
  for (int64_t i = 0; i < count; i++) targets[i] = i;
  fill_keyed_rows({values, targets.data(), ids, count, width_, initial.seed, initial.scale, initial.normal, threads});
  if (initial.offset == 0) return;
  for (int64_t i = 0; i < count * width_; i++) values[i] += static_cast<float>(initial.offset);
}

IdRows Table::since(int64_t microseconds) const {
  const Shared lock(mutex_);
  if (!growth_.forgets) throw TableError(TableError::kInvalid, "variable '" + name_ + "' knows no times");
  IdRows found;
  for (int64_t row = 1; row < used_; row++) {
    if (times_[row] < microseconds) continue;
    found.ids.push_back(ids_[row]);
    found.rows.insert(found.rows.end(), weights_.row(row), weights_.row(row) + width_);
  }
  return found;
}

void Table::clear() {
  const std::vector<int64_t> all(ids_.begin() + 1, ids_.end());
  std::vector<int64_t> rows(all.size());
  index_->erase({all.data(), static_cast<int64_t>(all.size())}, rows.data(), 1);
  ids_.resize(1);
  if (growth_.forgets) times_.resize(1);
  used_ = 1;
}

}  // namespace terarec
