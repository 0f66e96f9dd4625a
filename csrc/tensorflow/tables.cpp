// SPDX-License-Identifier: Apache-2.0
#include "tensorflow/tables.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <map>
#include <mutex>
#include <new>
#include <thread>
#include <utility>

#include "common/parallel.h"
#include "common/platform.h"
#include "embedding/kernels.h"
#include "embedding/update_tables.h"

namespace terarec {
namespace {

// Ids of a unit of work without pooling; the core splits the work between bags.
constexpr int64_t kUnitIds = 64;
// Whether ids are distinct is looked up in a bit for each row where there are no more rows an id than this.
constexpr int64_t kMostRowsPerId = 256;

// Offsets of bags of ids that are not pooled: the kernels take the ids between the first and the last.
std::vector<int64_t> unit_offsets(int64_t num_ids) {
  std::vector<int64_t> offsets{0};
  while (offsets.back() < num_ids) offsets.push_back(std::min(offsets.back() + kUnitIds, num_ids));
  if (num_ids == 0) offsets.push_back(0);
  return offsets;
}

// What the core takes in place of Bags: rows instead of ids, and offsets without pooling, too.
struct RowBags {
  RowBags(const Bags& bags, const int64_t* rows) : rows(rows), weights(bags.weights) {
    if (bags.pooling == Pooling::kNone) own = unit_offsets(bags.num_ids);
    offsets = own.empty() ? bags.offsets : own.data();
    count = own.empty() ? bags.bags : static_cast<int64_t>(own.size()) - 1;
  }

  std::vector<int64_t> own;
  const int64_t* rows;
  const int64_t* offsets;
  int64_t count;
  const float* weights;
};

// False also where it is not worth finding out.
bool are_distinct(const int64_t* rows, int64_t count, int64_t table_rows) {
  if (table_rows > kMostRowsPerId * count) return false;
  std::vector<uint64_t> seen((table_rows + 63) / 64);
  for (int64_t i = 0; i < count; i++) {
    const uint64_t bit = uint64_t{1} << (rows[i] & 63);
    if (seen[rows[i] >> 6] & bit) return false;
    seen[rows[i] >> 6] |= bit;
  }
  return true;
}

size_t bytes_of(int64_t rows, int64_t width) { return sizeof(float) * rows * width; }

}  // namespace

GrowingRows::GrowingRows(int64_t most_rows, int64_t width)
    : memory_(reserve_memory(std::max<size_t>(1, bytes_of(most_rows, width)))), most_rows_(most_rows), width_(width) {
  if (!memory_) throw TableError(TableError::kNoSpace, "the system has too little address space for the rows");
}

GrowingRows::~GrowingRows() {
  if (memory_) unmap_huge(memory_, std::max<size_t>(1, bytes_of(most_rows_, width_)));
}

GrowingRows::GrowingRows(GrowingRows&& other) noexcept { *this = std::move(other); }

GrowingRows& GrowingRows::operator=(GrowingRows&& other) noexcept {
  std::swap(memory_, other.memory_);
  std::swap(most_rows_, other.most_rows_);
  std::swap(width_, other.width_);
  std::swap(rows_, other.rows_);
  return *this;
}

void GrowingRows::grow(int64_t rows) {
  if (rows <= rows_) return;
  if (rows > most_rows_ || !commit_memory(memory_, bytes_of(rows_, width_), bytes_of(rows, width_))) {
    throw TableError(TableError::kNoSpace, "the system has too little memory for " + std::to_string(rows) + " rows");
  }
  rows_ = rows;
}

void MergedRows::add(RangeSums&& part) {
  parts_.push_back({size_, std::move(part)});
  size_ += static_cast<int64_t>(parts_.back().of.rows.size());
}

void MergedRows::write(int64_t width, int64_t* ids, float* sums, int threads) const {
  parallel_for(threads, parts_.size(), [&](int64_t unit) {
    const Part& part = parts_[unit];
    const int64_t rows = static_cast<int64_t>(part.of.rows.size());
    if (rows == 0) return;
    std::copy(part.of.rows.begin(), part.of.rows.end(), ids + part.first);
    memcpy(sums + part.first * width, part.of.sums.get(), bytes_of(rows, width));
  });
}

Table::Table(std::string name, int64_t width, int64_t rows, int64_t most_rows, const Growth& growth)
    : name_(std::move(name)), width_(width), most_rows_(rows < 0 ? most_rows + 1 : rows), growth_(growth),
      index_(rows < 0 ? std::make_unique<HashIndex>(mix(kMixStep)) : nullptr), used_(rows < 0 ? 1 : rows),
      ids_(rows < 0 ? 1 : 0), times_(growth.forgets ? 1 : 0), weights_(most_rows_, width) {
  weights_.grow(used_);
}

int64_t Table::size() const {
  const Shared lock(mutex_);
  return grows() ? used_ - 1 : used_;
}

void Table::fail(const BagFault& fault) const {
  const std::string value = std::to_string(fault.value), at = std::to_string(fault.position);
  if (fault.kind == BagFault::kOffset) {
    throw TableError(TableError::kInvalid, "row_splits: got " + value + " at position " + at +
                                               ", expected to rise from 0 to the number of ids");
  }
  throw TableError(TableError::kInvalid, "ids: got " + value + " at position " + at + ", expected 0 <= id < " +
                                             std::to_string(used_) + ", the rows of variable '" + name_ + "'");
}

void Table::check_ids(const int64_t* ids, int64_t num_ids) const {
  for (int64_t i = 0; i < num_ids; i++) {
    if (ids[i] < 0 || ids[i] >= used_) fail({BagFault::kKey, 0, 0, i, ids[i]});
  }
}

void Table::lookup(const Bags& bags, Absent absent, float* out, IdRows* evicted, int threads) {
  std::vector<int64_t> found;
  if (!grows() || absent == Absent::kZeros || !growth_.forgets) {
    const Shared lock(mutex_);
    if (!grows()) return pool(bags, bags.ids, out, threads);
    found.resize(bags.num_ids);
    const int64_t missing = index_->find({bags.ids, bags.num_ids}, found.data(), threads);
    if (missing == 0) return pool(bags, found.data(), out, threads);
    if (absent == Absent::kZeros) {
      for (int64_t& row : found) row = std::max<int64_t>(row, 0);
      return pool(bags, found.data(), out, threads);
    }
  }
  // Rows of a table that forgets move when another thread inserts ids.
  const Alone lock(mutex_);
  find_or_insert(bags.ids, bags.num_ids, absent, found, evicted, threads);
  pool(bags, found.data(), out, threads);
}

void Table::pool(const Bags& bags, const int64_t* rows_of_ids, float* out, int threads) const {
  const RowBags of(bags, rows_of_ids);
  const FeatureLayout layout{0, rows(), bags.pooling, 0};
  const BagFault fault = bag_lookup({{weights_.row(0), RowType::kFloat32, width_}, of.rows, bags.num_ids, of.weights,
                                     of.offsets, &layout, 1, of.count, out, threads});
  if (fault.kind != BagFault::kNone) fail(fault);
}

MergedRows Table::merge(const Bags& bags, const float* grad, int threads) const {
  std::vector<int64_t> found;
  const Shared lock(mutex_);
  if (grows()) find(bags.ids, bags.num_ids, found, threads);
  const RowBags of(bags, grows() ? found.data() : bags.ids);
  const FeatureLayout layout{0, rows(), bags.pooling, 0};
  const UpdateGradients gradients{
      weights_.row(0), RowType::kFloat32, width_, nullptr, threads,
      {{of.rows, nullptr, bags.num_ids, of.weights, of.offsets, &layout, 1, of.count, grad, width_}}};
  const BagFault fault = check_gradients(gradients);
  if (fault.kind != BagFault::kNone) fail(fault);
  MergedRows merged;
  const RowGradients rows_of{of.rows, bags.num_ids, bags.pooling == Pooling::kNone ? nullptr : bags.offsets, bags.bags,
                             bags.weights, bags.pooling, grad, width_, used_};
  if (sums_by_range(rows_of)) {
    for (RangeSums& range : sum_by_range(rows_of, threads)) merged.add(std::move(range));
    if (grows()) name_ids(merged);
    return merged;
  }
  MaxGradients maxima;
  const std::vector<UpdateTable> tables = collect_tables(gradients, maxima);
  maxima.fill(threads);
  const std::vector<UpdateUnit> units = split_tables(tables, bags.num_ids, gradients.useful_threads());
  std::vector<RangeSums> parts(units.size());
  CallScratch scratch;
  parallel_for(gradients.useful_threads(), units.size(), [&](int64_t unit) {
    const UpdateRows sums = group_unit(units[unit], width_, scratch.of_thread());
    RangeSums& part = parts[unit];
    part.rows.assign(sums.rows, sums.rows + sums.groups);
    part.sums = CallMemory(bytes_of(std::max<int64_t>(1, sums.groups), width_));
    float* to = static_cast<float*>(part.sums.get());
    for (int64_t g = 0; g < sums.groups; g++) {
      const float scale = sums.scales ? sums.scales[g] : 1.0f;
      for (int64_t c = 0; c < width_; c++) *to++ = scale * sums.grads[g][c];
    }
  });
  for (RangeSums& part : parts) merged.add(std::move(part));
  if (grows()) name_ids(merged);
  return merged;
}

// Puts ids in place of rows, and leaves out row 0, which stands for ids that the table lacks.
void Table::name_ids(MergedRows& merged) const {
  merged.size_ = 0;
  for (MergedRows::Part& part : merged.parts_) {
    std::vector<int64_t>& rows = part.of.rows;
    float* const sums = static_cast<float*>(part.of.sums.get());
    const auto absent = std::find(rows.begin(), rows.end(), 0);
    if (absent != rows.end()) {
      const int64_t place = absent - rows.begin(), after = static_cast<int64_t>(rows.size()) - place - 1;
      memmove(sums + place * width_, sums + (place + 1) * width_, bytes_of(after, width_));
      rows.erase(absent);
    }
    for (int64_t& row : rows) row = ids_[row];
    part.first = merged.size_;
    merged.size_ += static_cast<int64_t>(rows.size());
  }
}

// With s the sum of w_i r_i, a sum's gradient of w_i is d_i = r_i g; a mean's (s / W) is (d_i - sum(w_j d_j) / W) / W;
// that of s / N, N being the root of the sum of squares, d_i / N - sum(w_j d_j) w_i / N^3.
void Table::weight_gradient(const Bags& bags, const float* grad, float* out, int threads) const {
  std::vector<int64_t> found;
  const Shared lock(mutex_);
  if (grows()) find(bags.ids, bags.num_ids, found, threads);
  const RowBags of(bags, grows() ? found.data() : bags.ids);
  const FeatureLayout layout{0, rows(), bags.pooling, 0};
  const BagFault fault = row_dots({{weights_.row(0), RowType::kFloat32, width_}, of.rows, bags.num_ids, of.offsets,
                                   &layout, 1, of.count, grad, width_, out, threads});
  if (fault.kind != BagFault::kNone) fail(fault);
  if (bags.pooling != Pooling::kMean && bags.pooling != Pooling::kSqrtn) return;
  const bool mean = bags.pooling == Pooling::kMean;
  for (int64_t b = 0; b < bags.bags; b++) {
    const int64_t begin = bags.offsets[b], end = bags.offsets[b + 1];
    const float factor = bag_factor(bags.pooling, end - begin, bags.weights + begin);
    double total = 0;
    for (int64_t i = begin; i < end; i++) total += static_cast<double>(bags.weights[i]) * out[i];
    for (int64_t i = begin; i < end; i++) {
      const double inner = total * factor * (mean ? 1.0 : bags.weights[i] * factor);
      out[i] = static_cast<float>((out[i] - inner) * factor);
    }
  }
}

void Table::grow_states() {
  for (int state = 0; state < num_states_; state++) states_[state].grow(used_);
}

void Table::have_states(int states, float initial) {
  const Alone lock(mutex_);
  add_states(states, initial);
  // States that came from a file are there already, without what rows of new ids get.
  if (states > 0) initial_state_[0] = initial;
}

void Table::add_states(int states, float initial) {
  if (states < 0 || states > kMostStates) throw TableError(TableError::kInvalid, "states: expected 0 to 2");
  for (; num_states_ < states; num_states_++) {
    GrowingRows state(most_rows_, width_);
    state.grow(used_);
    // The first one alone: second states, the moments of Adam and the sums of FTRL, begin with zeros.
    const float value = num_states_ == 0 ? initial : 0.0f;
    if (value != 0) std::fill(state.row(0), state.row(used_), value);
    states_[num_states_] = std::move(state);
    initial_state_[num_states_] = value;
  }
}

int Table::states() const {
  const Shared lock(mutex_);
  return num_states_;
}

float Table::initial_state() const {
  const Shared lock(mutex_);
  return initial_state_[0];
}

void Table::apply(const RowRule& rule, int64_t step, const int64_t* ids, int64_t num_ids, const float* grads,
                  int threads) {
  std::vector<int64_t> found;
  const Alone lock(mutex_);
  std::vector<float> kept;
  if (grows() && growth_.forgets) {
    // Ids may have lost their rows since they were looked up.
    find(ids, num_ids, found, threads);
    if (const auto gone = std::count(found.begin(), found.end(), 0); gone > 0) {
      kept.reserve((num_ids - gone) * width_);
      for (int64_t i = 0; i < num_ids; i++) {
        if (found[i] > 0) kept.insert(kept.end(), grads + i * width_, grads + (i + 1) * width_);
      }
      found.erase(std::remove(found.begin(), found.end(), 0), found.end());
      num_ids = static_cast<int64_t>(found.size());
      grads = kept.data();
    }
  } else if (grows()) {
    find_present("grads_and_vars", ids, num_ids, found, threads);
  } else {
    check_ids(ids, num_ids);
  }
  const int64_t* const rows = grows() ? found.data() : ids;
  UpdateCall call{num_states_ > 0 ? states_[0].row(0) : nullptr, num_states_ > 1 ? states_[1].row(0) : nullptr,
                  nullptr, rule, step, 0, {weights_.row(0), RowType::kFloat32, width_, nullptr, threads, {}}};
  // Gradients of lookups are merged already; what a caller made of them may not be.
  if (are_distinct(rows, num_ids, used_)) {
    update_distinct_rows(call, rows, grads, num_ids, used_);
    return;
  }
  const std::vector<int64_t> offsets = unit_offsets(num_ids);
  const FeatureLayout layout{0, used_, Pooling::kNone, 0};
  const int64_t bags = static_cast<int64_t>(offsets.size()) - 1;
  call.gradients.list.push_back(
      {rows, nullptr, num_ids, nullptr, offsets.data(), &layout, 1, bags, grads, width_});
  const BagFault fault = row_update(call);
  if (fault.kind != BagFault::kNone) fail(fault);
}

void Table::change(Change change, const int64_t* ids, int64_t num_ids, const float* values, int threads) {
  std::vector<int64_t> found(grows() ? num_ids : 0);
  const Alone lock(mutex_);
  if (grows() && change == Change::kSet) insert(ids, num_ids, found.data(), nullptr, threads);
  else if (grows()) find_present("indices", ids, num_ids, found, threads);
  else check_ids(ids, num_ids);
  const int64_t* const rows = grows() ? found.data() : ids;
  const float sign = change == Change::kSubtract ? -1.0f : 1.0f;
  for (int64_t i = 0; i < num_ids; i++) {  // in order, as ids may repeat
    float* const row = weights_.row(rows[i]);
    const float* const from = values + i * width_;
    if (change == Change::kSet) memcpy(row, from, bytes_of(1, width_));
    else for (int64_t c = 0; c < width_; c++) row[c] += sign * from[c];
  }
}

void Table::set_state(int state, const int64_t* ids, int64_t num_ids, const float* values, int threads) {
  std::vector<int64_t> found;
  const Alone lock(mutex_);
  if (state < 0 || state >= num_states_) throw TableError(TableError::kInvalid, "state: no such state");
  if (grows()) find_present("ids", ids, num_ids, found, threads);
  else check_ids(ids, num_ids);
  const int64_t* const rows = grows() ? found.data() : ids;
  for (int64_t i = 0; i < num_ids; i++) {
    memcpy(states_[state].row(rows[i]), values + i * width_, bytes_of(1, width_));
  }
}

void Table::read(int64_t first, int64_t count, int64_t* ids, float* rows, float* const* states, int64_t* clock) const {
  const Shared lock(mutex_);
  const int64_t begin = first + (grows() ? 1 : 0);
  if (first < 0 || count < 0 || begin + count > used_) {
    throw TableError(TableError::kInvalid, "the number of rows of variable '" + name_ + "' changed meanwhile");
  }
  for (int64_t i = 0; i < count; i++) ids[i] = grows() ? ids_[begin + i] : begin + i;
  if (rows) memcpy(rows, weights_.row(begin), bytes_of(count, width_));
  for (int state = 0; states && state < num_states_; state++) {
    memcpy(states[state], states_[state].row(begin), bytes_of(count, width_));
  }
  if (!clock) return;
  *clock++ = static_cast<int64_t>(admissions_);
  if (forgets()) std::copy_n(times_.begin() + begin, count, clock);
}

void Table::replace(const int64_t* ids, int64_t num_ids, const float* rows, const std::vector<const float*>& states,
                    const float* initial, const int64_t* clock, int64_t clock_size, int threads) {
  std::vector<int64_t> found(grows() ? num_ids : 0);
  const int given = static_cast<int>(states.size());
  const Alone lock(mutex_);
  if (grows() && num_ids >= most_rows_) fail_full();
  if (grows()) check_narrow(ids, num_ids);
  else check_ids(ids, num_ids);
  add_states(given, initial_state_[0]);
  if (grows()) {
    weights_.grow(num_ids + 1);
    for (int state = 0; state < num_states_; state++) states_[state].grow(num_ids + 1);
  }
  if (initial) initial_state_[0] = *initial;
  if (grows()) {
    clear();
    insert(ids, num_ids, found.data(), nullptr, threads);
  }
  for (int state = given; state < num_states_; state++) {
    const int64_t first = grows() ? 1 : 0;
    std::fill(states_[state].row(first), states_[state].row(used_), initial_state_[state]);
  }
  for (int64_t i = 0; i < num_ids; i++) {
    const int64_t row = grows() ? found[i] : ids[i];
    memcpy(weights_.row(row), rows + i * width_, bytes_of(1, width_));
    for (int state = 0; state < given; state++) {
      memcpy(states_[state].row(row), states[state] + i * width_, bytes_of(1, width_));
    }
    if (forgets() && clock_size > num_ids) times_[row] = clock[1 + i];
  }
  if (clock_size > 0) admissions_ = static_cast<uint64_t>(clock[0]);
}

namespace {

struct Registry {
  std::mutex mutex;
  std::map<int64_t, std::weak_ptr<Table>> tables;
  int64_t next = 0;
};

// Never destroyed: kernels may outlive static objects.
Registry& registry() {
  static Registry* const only = new Registry;
  return *only;
}

std::atomic<int> threads_of_calls{0};

}  // namespace

int64_t add_table(const std::shared_ptr<Table>& table) {
  Registry& all = registry();
  const std::lock_guard<std::mutex> lock(all.mutex);
  for (auto entry = all.tables.begin(); entry != all.tables.end();) {
    entry = entry->second.expired() ? all.tables.erase(entry) : std::next(entry);
  }
  all.tables[all.next] = table;
  return all.next++;
}

std::shared_ptr<Table> table_of(int64_t number) {
  Registry& all = registry();
  const std::lock_guard<std::mutex> lock(all.mutex);
  const auto entry = all.tables.find(number);
  std::shared_ptr<Table> table = entry == all.tables.end() ? nullptr : entry->second.lock();
  if (!table) {
    throw TableError(TableError::kGone, "table: the variable of this op was deleted, or belongs to another process");
  }
  return table;
}

int table_threads() {
  const int threads = threads_of_calls.load(std::memory_order_relaxed);
  return threads > 0 ? threads : std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
}

void set_table_threads(int threads) { threads_of_calls.store(threads, std::memory_order_relaxed); }

}  // namespace terarec
