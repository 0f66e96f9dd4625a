// A fault as Python takes it.
#pragma once

#include <nanobind/stl/tuple.h>

#include <cstdint>
#include <tuple>

#include "embedding/bag_faults.h"

namespace terarec {

// (kind, gradient, feature, position, value), kind 0 meaning that nothing is wrong.
using Report = std::tuple<int64_t, int64_t, int64_t, int64_t, int64_t>;

inline Report report(const BagFault& fault) {
  return {fault.kind, fault.gradient, fault.feature, fault.position, fault.value};
}

}  // namespace terarec
