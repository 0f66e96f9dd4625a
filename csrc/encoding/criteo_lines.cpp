#include "encoding/criteo_lines.h"

#include <cstring>
#include <stdexcept>

#include "encoding/hex.h"

namespace terarec::encoding {
namespace {

// An upper bound of the bytes that parse_fast_row touches: label 2, integers 13 x (sign + 8), categories 26 x 9,
// "\r\n" 2, and 8 of the last load.
constexpr int64_t kFastRowBytes = 384;

constexpr uint64_t repeat(uint64_t byte) { return byte * 0x0101010101010101ULL; }

// Reads up to seven digits and the tab after them, eight bytes at a time; an empty field gives 0 and sets `missing`.
inline bool parse_fast_integer(const char*& cursor, int32_t& value, bool& missing) {
  const bool negative = *cursor == '-';
  cursor += negative;
  uint64_t word = load_word(cursor);
  const uint64_t tabs = word ^ repeat('\t');
  const uint64_t found = (tabs - repeat(0x01)) & ~tabs & repeat(0x80);
  if (found == 0) return false;
  const int length = __builtin_ctzll(found) >> 3;
  // Move the digits to the most significant bytes and fill up with '0'; two shifts, since one by 64 is undefined.
  word = (word << (56 - 8 * length)) << 8;
  word |= repeat('0') >> (8 * length);
  const uint64_t digits_only = (word & repeat(0xf0)) | (((word + repeat(0x06)) & repeat(0xf0)) >> 4);
  if (digits_only != repeat(0x33) || (negative && length == 0)) return false;
  word -= repeat('0');
  word = word * 10 + (word >> 8);
  const uint64_t low = (word & 0x000000ff000000ffULL) * 0x000f424000000064ULL;
  const uint64_t high = ((word >> 16) & 0x000000ff000000ffULL) * 0x0000271000000001ULL;
  const int32_t magnitude = static_cast<int32_t>((low + high) >> 32);
  value = negative ? -magnitude : magnitude;
  missing = length == 0;
  cursor += length + 1;
  return true;
}

// Reads nothing, or exactly eight hexadecimal digits; the cursor stops at the byte after.
inline bool parse_fast_category(const char*& cursor, char separator, uint32_t& value, bool& missing) {
  missing = *cursor == separator;
  if (missing) {
    value = 0;
    return true;
  }
  const uint64_t word = load_word(cursor);
  if (!is_hex_word(word)) return false;
  value = hex_word_value(word);
  cursor += 8;
  return *cursor == separator;
}

// Parses a line in its usual form; returns false, with the cursor anywhere, when it has another one.
// At least kFastRowBytes must be readable.
bool parse_fast_row(const char*& cursor, const CriteoColumns& out, int64_t row) {
  if ((*cursor != '0' && *cursor != '1') || cursor[1] != '\t') return false;
  out.label[row] = static_cast<float>(*cursor - '0');
  cursor += 2;
  uint64_t missing_bits = 0;
  bool missing = false;
  for (int column = 0; column < kIntegers; ++column) {
    if (!parse_fast_integer(cursor, out.integers[column * out.stride + row], missing)) return false;
    missing_bits |= static_cast<uint64_t>(missing) << column;
  }
  for (int column = 0; column < kCategories - 1; ++column) {
    if (!parse_fast_category(cursor, '\t', out.categories[column * out.stride + row], missing)) return false;
    missing_bits |= static_cast<uint64_t>(missing) << (kIntegers + column);
    ++cursor;
  }
  uint32_t& last = out.categories[(kCategories - 1) * out.stride + row];
  const bool carriage_return = *cursor == '\r' || (*cursor != '\n' && cursor[8] == '\r');
  if (!parse_fast_category(cursor, carriage_return ? '\r' : '\n', last, missing)) return false;
  missing_bits |= static_cast<uint64_t>(missing) << (kColumns - 2);
  cursor += carriage_return;
  if (*cursor != '\n') return false;
  ++cursor;
  out.missing[row] = missing_bits;
  return true;
}

LineFault parse_integer(const char* begin, const char* end, int32_t& value) {
  const bool negative = begin < end && *begin == '-';
  begin += negative;
  if (begin == end) return LineFault::integer;
  const int64_t limit = negative ? int64_t{INT32_MAX} + 1 : int64_t{INT32_MAX};
  int64_t magnitude = 0;
  for (; begin < end; ++begin) {
    if (*begin < '0' || *begin > '9') return LineFault::integer;
    if (magnitude <= limit) magnitude = magnitude * 10 + (*begin - '0');
  }
  value = static_cast<int32_t>(negative ? -magnitude : magnitude);
  return magnitude > limit ? LineFault::integer_range : LineFault::none;
}

LineFault parse_field(const char* begin, const char* end, int column, const CriteoColumns& out, int64_t row) {
  if (column == 0) {
    if (end - begin != 1 || (*begin != '0' && *begin != '1')) return LineFault::label;
    out.label[row] = static_cast<float>(*begin - '0');
    return LineFault::none;
  }
  const bool missing = begin == end;
  out.missing[row] |= static_cast<uint64_t>(missing) << (column - 1);
  if (column <= kIntegers) {
    int32_t& value = out.integers[(column - 1) * out.stride + row];
    value = 0;
    return missing ? LineFault::none : parse_integer(begin, end, value);
  }
  uint32_t& value = out.categories[(column - 1 - kIntegers) * out.stride + row];
  value = 0;
  return missing || parse_hex(begin, end, value) ? LineFault::none : LineFault::category;
}

// Parses the line [begin, end) in any accepted form, or tells its first fault; a wrong number of columns comes first.
LineFault parse_row(const char* begin, const char* end, const CriteoColumns& out, ParseResult& result) {
  int columns = 1;
  for (const char* byte = begin; byte < end; ++byte) columns += *byte == '\t';
  const char* field = begin;
  if (columns != kColumns) {
    result.column = columns;
    return LineFault::column_count;
  }
  out.missing[result.rows] = 0;
  for (int column = 0; column < kColumns; ++column) {
    const void* tab = memchr(field, '\t', static_cast<size_t>(end - field));
    const char* stop = tab != nullptr ? static_cast<const char*>(tab) : end;
    const LineFault fault = parse_field(field, stop, column, out, result.rows);
    if (fault != LineFault::none) {
      result.column = column;
      result.begin = field - begin;
      result.end = stop - begin;
      return fault;
    }
    field = stop + 1;
  }
  return LineFault::none;
}

}  // namespace

int64_t count_lines(const char* data, int64_t size) {
  const char* cursor = data;
  const char* end = data + size;
  int64_t lines = 0;
  while (cursor < end) {
    const void* found = memchr(cursor, '\n', static_cast<size_t>(end - cursor));
    ++lines;
    if (found == nullptr) break;
    cursor = static_cast<const char*>(found) + 1;
  }
  return lines;
}

ParseResult parse_lines(const char* data, int64_t size, const CriteoColumns& out) {
  ParseResult result;
  const char* cursor = data;
  const char* end = data + size;
  while (cursor < end) {
    if (result.rows == out.stride) throw std::invalid_argument("the output arrays are shorter than the block has lines");
    const char* next = cursor;
    if (end - cursor >= kFastRowBytes && parse_fast_row(next, out, result.rows)) {
      cursor = next;
      ++result.rows;
      continue;
    }
    const void* found = memchr(cursor, '\n', static_cast<size_t>(end - cursor));
    const char* line_end = found != nullptr ? static_cast<const char*>(found) : end;
    const char* content_end = line_end > cursor && line_end[-1] == '\r' ? line_end - 1 : line_end;
    result.fault = parse_row(cursor, content_end, out, result);
    if (result.fault != LineFault::none) {
      result.begin += cursor - data;
      result.end += cursor - data;
      return result;
    }
    cursor = line_end + 1;
    ++result.rows;
  }
  return result;
}

}  // namespace terarec::encoding
