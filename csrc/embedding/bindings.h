// SPDX-License-Identifier: Apache-2.0

// The Python bindings of the kernels, file by file.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/tuple.h>

#include <cstdint>
#include <tuple>

#include "embedding/bag_lookup.h"

namespace terarec {

using Unlocked = nanobind::call_guard<nanobind::gil_scoped_release>;

// Tensors are passed as addresses, with which a call costs less than with arrays.
template <class T>
T* at(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

// (kind, gradient, feature, position, value), kind 0: no fault.
using Report = std::tuple<int64_t, int64_t, int64_t, int64_t, int64_t>;

inline Report report(const BagFault& fault) {
  return {fault.kind, fault.gradient, fault.feature, fault.position, fault.value};
}

// Adds mask_gradient, dot_pairs and pair_gradients to `module`.
void bind_dense(nanobind::module_& module);

// Adds the class HashIndex to `module`.
void bind_hash_index(nanobind::module_& module);

// Adds lookup_fits, bag_lookup and row_dots to `module`.
void bind_lookup(nanobind::module_& module);

// Adds row_update and gradient_squares to `module`.
void bind_row_update(nanobind::module_& module);

// Adds the classes SlotMap and RowSet, and copies of rows, to `module`.
void bind_slot_map(nanobind::module_& module);

}  // namespace terarec
