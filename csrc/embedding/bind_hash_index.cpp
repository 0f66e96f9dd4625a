// SPDX-License-Identifier: Apache-2.0
#include "embedding/bindings.h"

#include <nanobind/stl/tuple.h>

#include <tuple>

#include "embedding/hash_index.h"

namespace nb = nanobind;

namespace terarec {
namespace {

// Tensors are passed as addresses, as in bindings.cpp: keys, their number, rows; then further arguments.
KeySpan span(uintptr_t keys, int64_t size) { return {at<const int64_t>(keys), size}; }

int64_t find(const HashIndex& index, uintptr_t keys, int64_t size, uintptr_t rows, int threads) {
  return index.find(span(keys, size), at<int64_t>(rows), threads);
}

// `free_rows`, `num_free`, and the first row to use after them.
int64_t insert(HashIndex& index, uintptr_t keys, int64_t size, uintptr_t rows, uintptr_t free_rows, int64_t num_free,
               int64_t next_row, uintptr_t new_keys, int threads) {
  const NewRows new_rows{at<const int64_t>(free_rows), num_free, next_row, 1};
  return index.insert(span(keys, size), at<int64_t>(rows), new_rows, at<int64_t>(new_keys), threads);
}

void assign(HashIndex& index, uintptr_t keys, int64_t size, uintptr_t rows, int threads) {
  index.assign(span(keys, size), at<const int64_t>(rows), threads);
}

void count(HashIndex& index, uintptr_t keys, int64_t size, uintptr_t rows, int threads) {
  index.count(span(keys, size), at<int64_t>(rows), threads);
}

void erase(HashIndex& index, uintptr_t keys, int64_t size, uintptr_t rows, int threads) {
  index.erase(span(keys, size), at<int64_t>(rows), threads);
}

// (position to continue from, items written).
std::tuple<int64_t, int64_t> items(const HashIndex& index, int64_t start, int64_t most, uintptr_t keys,
                                   uintptr_t rows) {
  int64_t written = 0;
  const int64_t next = index.items(start, most, at<int64_t>(keys), at<int64_t>(rows), &written);
  return {next, written};
}

}  // namespace

void bind_hash_index(nb::module_& module) {
  nb::class_<HashIndex>(module, "HashIndex")
      .def(nb::init<uint64_t>())
      .def("size", &HashIndex::size)
      .def("memory_bytes", &HashIndex::memory_bytes)
      .def_static("pool_bytes", []() { return BucketPool::shared().held_bytes(); })
      .def("find", &find, Unlocked())
      .def("insert", &insert, Unlocked())
      .def("assign", &assign, Unlocked())
      .def("count", &count, Unlocked())
      .def("erase", &erase, Unlocked())
      .def("items", &items, Unlocked());
}

}  // namespace terarec
