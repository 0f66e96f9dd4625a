// Python names of the row update and of the norm of the rows' gradients.
#pragma once

#include <nanobind/nanobind.h>

namespace terarec {

// Adds row_update and gradient_squares to `module`.
void bind_row_update(nanobind::module_& module);

}  // namespace terarec
