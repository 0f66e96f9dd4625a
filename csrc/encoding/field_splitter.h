// Cuts a line into its fields.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <string>
#include <string_view>

#include "encoding/hex.h"

namespace terarec::encoding {

inline bool is_space(char byte) { return byte == ' ' || (byte >= '\t' && byte <= '\r'); }

inline std::string_view trimmed(std::string_view text) {
  while (!text.empty() && is_space(text.front())) text.remove_prefix(1);
  while (!text.empty() && is_space(text.back())) text.remove_suffix(1);
  return text;
}

// Of records whose quotes are right, which RecordScanner tells.
class FieldSplitter {
 public:
  FieldSplitter(const std::string& delimiter, bool quote, bool trim, bool trim_quoted)
      : delimiter_(delimiter), quote_(quote), trim_(trim), trim_quoted_(trim_quoted) {}

  // The content of the field at `cursor`, without quotes and, if trimmed, the white space around; valid until the next
  // field. `cursor` is left behind the delimiter, or behind `end` if the field is the record's last. Reads up to eight
  // bytes from `end` on.
  std::string_view next(const char*& cursor, const char* end) const {
    if (quote_) {
      const char* first = cursor;
      while (trim_ && first < end && is_space(*first) && !at_delimiter(first, end)) ++first;
      if (first < end && *first == '"') {
        cursor = first + 1;
        const std::string_view content = next_quoted(cursor, end);
        return trim_quoted_ ? trimmed(content) : content;
      }
    }
    const char* stop = find(cursor, end);
    const std::string_view content(cursor, static_cast<size_t>(stop - cursor));
    cursor = behind(stop, end);
    return trim_ ? trimmed(content) : content;
  }

  int count_fields(const char* cursor, const char* end) const {
    int fields = 0;
    for (; cursor <= end; ++fields) next(cursor, end);
    return fields;
  }

  bool at_delimiter(const char* at, const char* end) const {
    return end - at >= static_cast<ptrdiff_t>(delimiter_.size()) && memcmp(at, delimiter_.data(), delimiter_.size()) == 0;
  }

 private:
  std::string_view next_quoted(const char*& cursor, const char* end) const;

  const char* behind(const char* stop, const char* end) const {
    return stop < end ? stop + delimiter_.size() : end + 1;
  }
  // The first delimiter in [begin, end), or `end`.
  const char* find(const char* begin, const char* end) const {
    if (delimiter_.size() != 1) {
      const std::string_view rest(begin, static_cast<size_t>(end - begin));
      const size_t at = rest.find(delimiter_);
      return at == std::string_view::npos ? end : begin + at;
    }
    // Most fields are short: two words spare the call of memchr.
    const char mark = delimiter_[0];
    for (int words = 0; words < 2 && begin < end; ++words, begin += 8) {
      const int position = first_in_word(load_word(begin), mark);
      if (position < 8) return begin + position < end ? begin + position : end;
    }
    if (begin >= end) return end;
    const void* found = memchr(begin, mark, static_cast<size_t>(end - begin));
    return found != nullptr ? static_cast<const char*>(found) : end;
  }

  const std::string& delimiter_;
  const bool quote_;
  const bool trim_;
  const bool trim_quoted_;
  mutable std::string unquoted_;
};

// `cursor` is behind the opening quote. Two quotes inside stand for one.
inline std::string_view FieldSplitter::next_quoted(const char*& cursor, const char* end) const {
  const char* begin = cursor;
  unquoted_.clear();
  const char* part = begin;
  for (;;) {
    const char* quote = static_cast<const char*>(memchr(part, '"', static_cast<size_t>(end - part)));
    if (quote == nullptr) quote = end;
    if (end - quote < 2 || quote[1] != '"') {
      const bool doubled = part != begin;
      if (doubled) unquoted_.append(part, quote);
      cursor = behind(find(std::min(quote + 1, end), end), end);
      return doubled ? std::string_view(unquoted_) : std::string_view(begin, static_cast<size_t>(quote - begin));
    }
    unquoted_.append(part, quote + 1);
    part = quote + 2;
  }
}

}  // namespace terarec::encoding
