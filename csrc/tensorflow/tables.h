// SPDX-License-Identifier: Apache-2.0

// Embedding tables that own their rows and the optimizer's state of them, for callers whose tensors are plain memory.
#pragma once

#include <cstdint>
#include <memory>
#include <shared_mutex>
#include <stdexcept>
#include <string>
#include <vector>

#include "embedding/bag_lookup.h"
#include "embedding/hash_index.h"
#include "embedding/row_update.h"
#include "tensorflow/range_sums.h"

namespace terarec {

// What a caller did wrong, or what the system lacks, with the argument that it is about.
class TableError : public std::runtime_error {
 public:
  enum Kind { kInvalid, kGone, kNoSpace };

  TableError(Kind kind, const std::string& problem) : std::runtime_error(problem), kind(kind) {}

  const Kind kind;
};

// Rows of floats in address space that gets memory as they grow, so that they never move.
class GrowingRows {
 public:
  GrowingRows() = default;
  // Throws TableError if the system has no address space.
  GrowingRows(int64_t most_rows, int64_t width);
  ~GrowingRows();
  GrowingRows(GrowingRows&& other) noexcept;
  GrowingRows& operator=(GrowingRows&& other) noexcept;

  // Gives zeroed memory to the first `rows` rows; throws TableError if there is none.
  void grow(int64_t rows);
  float* row(int64_t row) const { return static_cast<float*>(memory_) + row * width_; }

 private:
  void* memory_ = nullptr;
  int64_t most_rows_ = 0, width_ = 0, rows_ = 0;
};

// Initial values of the rows of new keys: `offset` plus numbers of a distribution with this scale; 0: none.
struct InitialRows {
  double offset = 0, scale = 0;
  bool normal = false;  // else uniform
  uint64_t seed = 0;
};

// What a lookup does with ids that a growing table lacks: they count as zeros, get rows, or get rows with the chance of
// `Growth::admitted`.
enum class Absent : int64_t { kZeros = 0, kInsert = 1, kAdmit = 2 };

// How a table of ids of any value grows.
struct Growth {
  InitialRows initial;
  double admitted = 1;  // chance of a new id in a lookup that admits
  // Whether the table knows when ids came last, and gives the rows of those that did not come for longest to new ones
  // when it is full.
  bool forgets = false;
  bool narrow = false;  // whether ids have to fit in 32 bits
};

// Ids and their rows, one after the other.
struct IdRows {
  std::vector<int64_t> ids;
  std::vector<float> rows;
};

// Ids in bags. Without pooling every id is a bag, and there are no offsets and no weights.
struct Bags {
  const int64_t* ids;
  int64_t num_ids;
  const int64_t* offsets;  // bags + 1
  int64_t bags;
  const float* weights;  // of each id, or null
  Pooling pooling;

  int64_t results() const { return pooling == Pooling::kNone ? num_ids : bags; }
};

// Distinct ids, and the sum of the gradients of each.
class MergedRows {
 public:
  int64_t size() const { return size_; }
  void write(int64_t width, int64_t* ids, float* sums, int threads) const;

 private:
  friend class Table;
  struct Part {
    int64_t first;  // in the result
    RangeSums of;
  };

  void add(RangeSums&& part);

  std::vector<Part> parts_;
  int64_t size_ = 0;
};

// All calls may come from several threads; those that change rows wait for the others.
class Table {
 public:
  static constexpr int kMostStates = 2;
  enum class Change : int64_t { kSet = 0, kAdd = 1, kSubtract = 2 };

  // A table of `rows` rows for ids below it, all zero; or for `rows` < 0, of any ids, at most `most_rows` of them.
  Table(std::string name, int64_t width, int64_t rows, int64_t most_rows, const Growth& growth);

  const std::string& name() const { return name_; }
  int64_t width() const { return width_; }
  bool grows() const { return index_ != nullptr; }
  bool forgets() const { return growth_.forgets; }
  // Number of rows, or of ids of a table that grows.
  int64_t size() const;

  // Rows of a table that no other thread knows, to fill.
  float* memory() { return weights_.row(0); }

  // Fills `out` float[bags.results(), width]. What makes room for new ids goes to `evicted`, unless that is null.
  void lookup(const Bags& bags, Absent absent, float* out, IdRows* evicted, int threads);

  // `grad` float[bags.results(), width]; ids that the table lacks are left out. The order of the ids depends on the
  // number of threads, their sums do not.
  MergedRows merge(const Bags& bags, const float* grad, int threads) const;

  // The gradient of the bags' weights, float[num_ids].
  void weight_gradient(const Bags& bags, const float* grad, float* out, int threads) const;

  // Gives the first `states` states memory, filled with `initial` in rows that did not have it, as in those of new ids.
  void have_states(int states, float initial);
  int states() const;
  // The first state of the rows of new ids.
  float initial_state() const;

  // Updates each row once with the sum of its gradients.
  void apply(const RowRule& rule, int64_t step, const int64_t* ids, int64_t num_ids, const float* grads, int threads);

  // Changes rows by float[num_ids, width]; later ones of a repeated id come last. Setting inserts ids.
  void change(Change change, const int64_t* ids, int64_t num_ids, const float* values, int threads);
  // The same for the state number `state`, of ids that the table has.
  void set_state(int state, const int64_t* ids, int64_t num_ids, const float* values, int threads);

  // Writes the first `count` ids, rising in a table that does not grow, with their rows, or those of a state; and to
  // `clock` the number of lookups that admitted, and for each id of a table that forgets when it came.
  void read(int64_t first, int64_t count, int64_t* ids, float* rows, float* const* states, int64_t* clock) const;

  // Puts what `read` has written in place of all rows, or changes nothing. States that are not given get their initial
  // values. Ids come now without `clock`, and without the times in it, where `clock_size` is 1.
  void replace(const int64_t* ids, int64_t num_ids, const float* rows, const std::vector<const float*>& states,
               const float* initial, const int64_t* clock, int64_t clock_size, int threads);

  // The ids that came, or were set, at or after a time in microseconds since 1970, and their rows.
  IdRows since(int64_t microseconds) const;

 private:
  using Shared = std::shared_lock<std::shared_mutex>;
  using Alone = std::unique_lock<std::shared_mutex>;

  int64_t rows() const { return used_; }
  // The caller has locked the table, for itself where ids may be inserted. Rows of absent ids are 0.
  void find(const int64_t* ids, int64_t num_ids, std::vector<int64_t>& rows, int threads) const;
  void find_or_insert(const int64_t* ids, int64_t num_ids, Absent absent, std::vector<int64_t>& rows,
                      IdRows* evicted, int threads);
  void find_present(const char* argument, const int64_t* ids, int64_t num_ids, std::vector<int64_t>& rows,
                    int threads) const;
  void insert(const int64_t* ids, int64_t num_ids, int64_t* rows, IdRows* evicted, int threads);
  void make_room(const int64_t* ids, int64_t num_ids, IdRows* evicted, int threads);
  void touch(const int64_t* rows, int64_t count);
  void clear();
  void check_narrow(const int64_t* ids, int64_t num_ids) const;
  [[noreturn]] void fail_full() const;
  void initialize(const int64_t* ids, int64_t count, int64_t first_row, int threads);
  void pool(const Bags& bags, const int64_t* rows, float* out, int threads) const;
  void add_states(int states, float initial);
  void grow_states();
  void name_ids(MergedRows& merged) const;
  void check_ids(const int64_t* ids, int64_t num_ids) const;
  [[noreturn]] void fail(const BagFault& fault) const;

  const std::string name_;
  const int64_t width_, most_rows_;
  const Growth growth_;
  const std::unique_ptr<HashIndex> index_;  // null: ids are rows
  mutable std::shared_mutex mutex_;
  int64_t used_;  // rows in use; row 0 of a table that grows stands for ids that it lacks, and stays zero
  std::vector<int64_t> ids_;  // of each row of a table that grows
  std::vector<int64_t> times_;  // when it came last, in microseconds since 1970, if the table forgets
  uint64_t admissions_ = 0;  // lookups that admitted
  GrowingRows weights_;
  GrowingRows states_[kMostStates];
  float initial_state_[kMostStates] = {};
  int num_states_ = 0;
};

// The tables of this process by number, for ops that know no more of them.
int64_t add_table(const std::shared_ptr<Table>& table);
// Throws TableError if the table is gone.
std::shared_ptr<Table> table_of(int64_t number);

// Threads of a call.
int table_threads();
void set_table_threads(int threads);

}  // namespace terarec
