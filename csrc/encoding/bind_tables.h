// Python names of what works on parsed columns and on lists of Python values.
#pragma once

#include <nanobind/nanobind.h>

namespace terarec::encoding {

// Adds Hex32Counts, Int64Counts and TextCounts.
void bind_counts(nanobind::module_& module);

// Adds Hex32Ids, Int64Ids, TextIds and TablesOfColumns.
void bind_ids(nanobind::module_& module);

// Adds xxh64_int64, xxh64_text and xxh64_list.
void bind_hashes(nanobind::module_& module);

}  // namespace terarec::encoding
