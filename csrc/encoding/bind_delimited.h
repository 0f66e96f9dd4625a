// Python names of the parser of delimited text.
#pragma once

#include <nanobind/nanobind.h>

namespace terarec::encoding {

// Adds count_rows, DelimitedLayout and parse_delimited.
void bind_delimited(nanobind::module_& module);

}  // namespace terarec::encoding
