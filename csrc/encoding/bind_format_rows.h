// Python names of format_rows.
#pragma once

#include <nanobind/nanobind.h>

namespace terarec::encoding {

// Adds widest_row and format_rows to `module`.
void bind_format_rows(nanobind::module_& module);

}  // namespace terarec::encoding
