// SPDX-License-Identifier: Apache-2.0

// Bytes of pages and footers: docs/formats.md describes them.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "rowfile/page_table.h"

namespace terarec::rowfile {

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "files are little-endian, and read as they are");

constexpr int64_t kBlock = 4096;  // unit of files; pages are multiples
constexpr uint32_t kPageMagic = 0x50525254;    // "TRRP"
constexpr uint32_t kFooterMagic = 0x46525254;  // "TRRF"

enum class PageKind : uint16_t { kRows = 0, kErased = 1 };

struct PageHeader {
  uint32_t magic;
  uint32_t checksum;  // of all bytes of the page behind it
  uint64_t sequence;  // rises from page to page of the store, in the order in which they were filled
  uint16_t count;
  uint16_t kind;
  uint32_t page;
  uint64_t segment;
};
static_assert(sizeof(PageHeader) == 32);

struct FooterHeader {
  uint32_t magic;
  uint32_t checksum;  // of all bytes of the footer behind it
  uint64_t segment;
  uint64_t pages;
  uint64_t keys;
};
static_assert(sizeof(FooterHeader) == 32);

// A page in a footer.
struct PageEntry {
  uint64_t sequence;
  uint16_t count;
  uint16_t kind;
  uint32_t reserved;
};
static_assert(sizeof(PageEntry) == 16);

inline int64_t whole_blocks(int64_t bytes) { return (bytes + kBlock - 1) / kBlock * kBlock; }

// The parts of a row's place.
struct RowPlace {
  int64_t slot;  // of the segment
  int64_t page;
  int64_t row;
};

class Layout {
 public:
  Layout(int64_t row_bytes, int64_t page_bytes, int64_t segment_pages);

  int64_t row_bytes, page_bytes, segment_pages;
  int64_t page_rows;       // rows that a page holds
  int64_t erased_in_page;  // erased keys that a page holds
  // Footers make opening fast; for the smallest rows they would take too much space.
  bool has_footers;

  uint64_t place(int64_t slot, int64_t page, int64_t row) const {
    return static_cast<uint64_t>((slot * segment_pages + page) * page_rows + row);
  }
  RowPlace split(uint64_t place) const {
    const int64_t pages = static_cast<int64_t>(place) / page_rows;
    return {pages / segment_pages, pages % segment_pages, static_cast<int64_t>(place) % page_rows};
  }
  // Segments that places reach.
  int64_t most_segments() const { return static_cast<int64_t>(PageTable::kNone) / (segment_pages * page_rows); }

  int64_t* keys(char* page) const { return reinterpret_cast<int64_t*>(page + sizeof(PageHeader)); }
  const int64_t* keys(const char* page) const { return reinterpret_cast<const int64_t*>(page + sizeof(PageHeader)); }
  char* row(char* page, int64_t row) const { return page + first_row_ + row * row_bytes; }
  const char* row(const char* page, int64_t row) const { return page + first_row_ + row * row_bytes; }

  // Why a page that was read is not page `page` of segment `segment`, or "".
  std::string page_fault(const char* data, uint64_t segment, int64_t page) const;
  // Writes the checksum of a page.
  void seal_page(char* data) const;

 private:
  int64_t first_row_;
};

inline PageHeader& header_of(char* page) { return *reinterpret_cast<PageHeader*>(page); }
inline const PageHeader& header_of(const char* page) { return *reinterpret_cast<const PageHeader*>(page); }

// The keys of a segment, page by page: a footer's content.
struct SegmentKeys {
  std::vector<PageEntry> pages;
  std::vector<int64_t> keys;

  void add(const PageHeader& header, const int64_t* page_keys);
  void clear() { pages.clear(), keys.clear(); }
  // A whole number of blocks.
  int64_t footer_bytes() const;
  void write_footer(uint64_t segment, char* to) const;
  // Takes over a footer; returns what is wrong with it, or "".
  std::string read_footer(uint64_t segment, int64_t pages_expected, const Layout& layout, const char* data,
                          int64_t bytes);
};

}  // namespace terarec::rowfile
