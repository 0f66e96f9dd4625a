// SPDX-License-Identifier: Apache-2.0

// The Python bindings of the encoding core, file by file.
#pragma once

#include <nanobind/nanobind.h>

namespace terarec::encoding {

// Adds stack_columns and concatenate_keys.
void bind_columns(nanobind::module_& module);

// Adds Hex32Counts, Int64Counts and TextCounts to `module`.
void bind_counts(nanobind::module_& module);

// Adds count_rows, DelimitedLayout and parse_delimited.
void bind_delimited(nanobind::module_& module);

// Adds widest_row and format_rows.
void bind_format_rows(nanobind::module_& module);

// Adds xxh64_int64, xxh64_text and xxh64_list.
void bind_hashes(nanobind::module_& module);

// Adds Hex32Ids, Int64Ids, TextIds and TablesOfColumns.
void bind_ids(nanobind::module_& module);

// Adds read_hex32 and cut_texts.
void bind_texts(nanobind::module_& module);

}  // namespace terarec::encoding
