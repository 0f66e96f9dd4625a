// Python names of the pooled lookup and of its way back to the weights of keys.
#pragma once

#include <nanobind/nanobind.h>

namespace terarec {

// Adds lookup_fits, bag_lookup and row_dots to `module`.
void bind_lookup(nanobind::module_& module);

}  // namespace terarec
