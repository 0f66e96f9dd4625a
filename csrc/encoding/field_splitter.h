// Cuts a line into its fields.
#pragma once

#include <cstddef>
#include <cstring>
#include <string>
#include <string_view>

#include "encoding/hex.h"

namespace terarec::encoding {

struct Field {
  // Without quotes and, if trimmed, the white space around; all of a badly quoted field. Valid until the next field.
  std::string_view content;
  bool badly_quoted;  // a quote does not end, or something follows it
};

inline bool is_space(char byte) { return byte == ' ' || (byte >= '\t' && byte <= '\r'); }

inline std::string_view trimmed(std::string_view text) {
  while (!text.empty() && is_space(text.front())) text.remove_prefix(1);
  while (!text.empty() && is_space(text.back())) text.remove_suffix(1);
  return text;
}

class FieldSplitter {
 public:
  FieldSplitter(const std::string& delimiter, bool quote, bool trim)
      : delimiter_(delimiter), quote_(quote), trim_(trim) {}

  // The field at `cursor`, which is left behind the delimiter, or behind `end` if the field is the line's last. Reads up
  // to eight bytes from `end` on.
  Field next(const char*& cursor, const char* end) const {
    if (quote_) {
      const char* first = cursor;
      while (trim_ && first < end && is_space(*first) && !at_delimiter(first, end)) ++first;
      if (first < end && *first == '"') {
        cursor = first + 1;
        return next_quoted(cursor, end);
      }
    }
    const char* stop = find(cursor, end);
    const std::string_view content(cursor, static_cast<size_t>(stop - cursor));
    cursor = behind(stop, end);
    return {trim_ ? trimmed(content) : content, false};
  }

  int count_fields(const char* cursor, const char* end) const {
    int fields = 0;
    for (; cursor <= end; ++fields) next(cursor, end);
    return fields;
  }

 private:
  Field next_quoted(const char*& cursor, const char* end) const;

  bool at_delimiter(const char* at, const char* end) const {
    return end - at >= static_cast<ptrdiff_t>(delimiter_.size()) && memcmp(at, delimiter_.data(), delimiter_.size()) == 0;
  }
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
  mutable std::string unquoted_;
};

// `cursor` is behind the opening quote. Two quotes inside stand for one.
inline Field FieldSplitter::next_quoted(const char*& cursor, const char* end) const {
  const char* begin = cursor;
  unquoted_.clear();
  bool doubled = false;
  const char* part = begin;
  for (;;) {
    const void* found = memchr(part, '"', static_cast<size_t>(end - part));
    if (found == nullptr) {
      cursor = end + 1;
      return {{begin - 1, static_cast<size_t>(end - begin + 1)}, true};
    }
    const char* quote = static_cast<const char*>(found);
    unquoted_.append(part, quote);
    if (end - quote < 2 || quote[1] != '"') {
      const char* stop = quote + 1;
      while (trim_ && stop < end && is_space(*stop) && !at_delimiter(stop, end)) ++stop;
      const bool good = stop == end || at_delimiter(stop, end);
      if (!good) stop = find(stop, end);
      cursor = behind(stop, end);
      if (!good) return {{begin - 1, static_cast<size_t>(stop - begin + 1)}, true};
      return {doubled ? std::string_view(unquoted_) : std::string_view(begin, static_cast<size_t>(quote - begin)), false};
    }
    unquoted_ += '"';
    doubled = true;
    part = quote + 2;
  }
}

}  // namespace terarec::encoding
