// SPDX-License-Identifier: Apache-2.0

// Python bindings of the kernels. Tensors are passed as addresses, or as objects where the overhead of a call matters;
// the launchers in terarec/kernels/cpu have checked types, shapes and devices.

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <string>
#include <vector>

#include "common/platform.h"
#include "common/parallel.h"
#include "embedding/bindings.h"
#include "embedding/kernels.h"
#include "embedding/result_memory.h"
#include "embedding/row_init.h"
#include "embedding/torch_tensors.h"

namespace nb = nanobind;
using namespace terarec;

namespace {

struct Mapping {
  void* memory;
  size_t bytes;
};

nb::capsule owner_of(void* memory, size_t bytes) {
  return nb::capsule(new Mapping{memory, bytes ? bytes : 1}, [](void* held) noexcept {
    Mapping* mapping = static_cast<Mapping*>(held);
    unmap_huge(mapping->memory, mapping->bytes);
    delete mapping;
  });
}

// Writes to each page of fresh memory once, in parallel, so that pages lie near the cores that touch them.
void touch_pages(void* memory, size_t bytes, int threads) {
  const int64_t pages = static_cast<int64_t>(whole_huge_pages(bytes) / kHugePage);
  parallel_for(threads, pages, [&](int64_t page) {
    const size_t begin = page * kHugePage, end = std::min(begin + kHugePage, bytes);
    for (size_t at = begin; at < end; at += small_page()) static_cast<volatile char*>(memory)[at] = 0;
  });
}

nb::object allocate_rows(const std::vector<size_t>& shape, int threads) {
  size_t bytes = sizeof(float);
  for (const size_t extent : shape) bytes *= extent;
  void* memory = map_huge(bytes ? bytes : 1);
  if (!memory) return nb::none();
  {
    nb::gil_scoped_release unlocked;
    touch_pages(memory, bytes, threads);
  }
  return nb::cast(nb::ndarray<nb::numpy, float>(memory, shape.size(), shape.data(), owner_of(memory, bytes)));
}

nb::object reserve(size_t bytes) {
  bytes = bytes ? bytes : 1;
  void* memory = reserve_memory(bytes);
  if (!memory) return nb::none();
  return nb::cast(nb::ndarray<nb::numpy, uint8_t, nb::ndim<1>>(memory, {bytes}, owner_of(memory, bytes)));
}

nb::object allocate_result(size_t rows, size_t columns) {
  void* memory = take_result(rows * columns * sizeof(float));
  if (!memory) return nb::none();
  nb::capsule owner(memory, [](void* held) noexcept { free_result(held); });
  return nb::cast(nb::ndarray<nb::numpy, float, nb::ndim<2>>(memory, {rows, columns}, owner));
}

void run_fill_rows(uintptr_t rows, int64_t num_rows, int64_t width, int64_t first_row, uint64_t seed, double scale,
                   bool normal, int threads) {
  nb::gil_scoped_release unlocked;
  fill_rows({at<float>(rows), num_rows, width, first_row, seed, scale, normal, threads});
}

// `addresses`: of the rows, the targets and the keys.
void run_fill_keyed_rows(const std::vector<uintptr_t>& addresses, int64_t num_rows, int64_t width, uint64_t seed,
                         double scale, bool normal, int threads) {
  nb::gil_scoped_release unlocked;
  fill_keyed_rows({at<float>(addresses[0]), at<const int64_t>(addresses[1]), at<const int64_t>(addresses[2]), num_rows,
                   width, seed, scale, normal, threads});
}

std::vector<std::string> runnable() {
  std::vector<std::string> names;
  while (const char* name = runnable_kernels(names.size())) names.push_back(name);
  return names;
}

}  // namespace

NB_MODULE(_embedding, m) {
  // A worker of torch's DataLoader keeps its data set, with our objects, in a global of torch until the
  // interpreter ends (WorkerInfo.dataset). Such references of others are not leaks to report.
  nb::set_leak_warnings(false);
  m.doc() = "Embedding kernels for CPUs, to be called by terarec.kernels.cpu alone.";
  m.def("use_exchange_api", &use_exchange_api);
  bind_dense(m);
  bind_lookup(m);
  bind_row_update(m);
  m.def("allocate_rows", &allocate_rows);
  m.def("allocate_result", &allocate_result);
  m.def("fill_rows", &run_fill_rows);
  m.def("fill_keyed_rows", &run_fill_keyed_rows);
  m.def("reserve", &reserve);
  m.def("commit", [](uintptr_t reserved, size_t begin, size_t end) {
    return commit_memory(at<void>(reserved), begin, end);
  });
  bind_hash_index(m);
  bind_slot_map(m);
  m.def("select", [](const std::string& name) { return select_kernels(name.c_str()); });
  m.def("selected", []() { return std::string(kernels().name); });
  m.def("runnable", &runnable);
  m.def("parallel_runtime", []() { return std::string(parallel_runtime()); });
}
