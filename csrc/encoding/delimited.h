// Delimited text -> columns.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "encoding/field_column.h"
#include "encoding/fields.h"
#include "encoding/growing_array.h"

namespace terarec::encoding {

enum class Policy : int { raise, skip, missing };

// kernels/delimited_types.py says what the fields mean.
struct DelimitedLayout {
  std::vector<FieldLayout> fields;
  std::string delimiter;
  bool quote;
  bool trim;
  std::vector<std::string> missing;
  Policy policy;
  int64_t max_line_bytes;
};

// One fault: `field` is its position, or the number of fields found where that is what is wrong; `bytes` the start of
// what the text holds there.
struct FieldFault {
  int64_t line;
  Fault kind;
  int64_t field;
  std::string bytes;
};

struct ParsedText {
  RowMemory memory;
  std::vector<FieldColumn> columns;
  int64_t lines = 0;                // line ends, plus one for a last line without
  int64_t rows_found = 0;           // lines that are not empty
  int64_t rows = 0;                 // those of them that were kept
  GrowingArray<int64_t> positions;  // of the kept rows among the found ones
  int64_t fault_counts[kFaults] = {};
  std::vector<FieldFault> first_faults;
};

constexpr int kFaultsKept = 10;
constexpr int64_t kFaultBytesKept = 80;

struct LineCount {
  int64_t lines;  // line ends, plus one for a last line without
  int64_t rows;   // lines that hold more than their end
};
LineCount count_rows(const char* data, int64_t size);

// Parses data[0, size) and reads nothing outside. Lines end in \n or \r\n. With Policy::raise it stops at the first fault.
ParsedText parse_delimited(const char* data, int64_t size, const DelimitedLayout& layout);

}  // namespace terarec::encoding
