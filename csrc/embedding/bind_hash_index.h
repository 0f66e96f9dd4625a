// Python name of the hash index.
#pragma once

#include <nanobind/nanobind.h>

namespace terarec {

// Adds the class HashIndex to `module`.
void bind_hash_index(nanobind::module_& module);

}  // namespace terarec
