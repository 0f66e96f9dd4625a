// SPDX-License-Identifier: Apache-2.0

// A segment: a file of pages that are written once, and its blocks that are still in memory.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "rowfile/file.h"
#include "rowfile/layout.h"
#include "rowfile/manifest.h"

namespace terarec::rowfile {

class Segment;

// Adjacent pages that are filled in memory and written to the file at once.
struct Block {
  AlignedBuffer memory;
  std::shared_ptr<Segment> segment;
  int64_t first_page = 0;
  int64_t pages = 0;
  int64_t capacity = 0;
};

// Closes files that were opened before others, since the open files of a process are limited. Those of all its row files
// are counted together.
class OpenFiles {
 public:
  explicit OpenFiles(int64_t most) : most_(most) {}
  // How many stay open: at most half of those that the process may open now.
  int64_t most() const;
  void opened(const std::shared_ptr<Segment>& segment) const;
  // Closes the half that was opened first where more than `most` are open; false if none was closed.
  static bool close_half(int64_t most);

 private:
  const int64_t most_;
};

// Members without a remark are guarded by the store's index lock; `number`, `slot` and `path` never change.
class Segment : public std::enable_shared_from_this<Segment> {
 public:
  Segment(uint64_t number, int64_t slot, std::string path, bool direct)
      : number(number), slot(slot), path(std::move(path)), direct_(direct) {}

  const uint64_t number;
  const int64_t slot;
  const std::string path;

  int64_t pages = 0;  // that were begun
  int64_t live_rows = 0;
  int64_t erased_keys = 0;
  uint64_t first_sequence = 0, last_sequence = 0;  // 0: no page is sealed
  bool is_sealed = false;                          // no page is appended any more
  bool is_moved = false;                           // all its rows lie elsewhere: the next commit needs it no more
  bool is_listed = false;                          // the last commit's manifest names it
  bool needs_flush = false;
  bool is_unreadable = false;                      // compaction found damage
  int64_t footer_bytes = 0;       // 0: it has none
  bool is_footer_queued = false;
  int64_t listed_pages = 0, listed_footer_bytes = 0;  // what the manifest says
  std::vector<std::shared_ptr<Block>> pending;  // blocks that are not in the file yet

  int64_t file_bytes(const Layout& layout) const { return pages * layout.page_bytes + footer_bytes; }
  // The pending block that holds a page, or null.
  Block* block_of(int64_t page) const;
  SegmentRecord record() const;

  // The file, opened if it is not. Any thread may call these.
  std::shared_ptr<const File> file(OpenMode mode, OpenFiles& open_files);
  void close_file();

 private:
  const bool direct_;
  std::mutex file_mutex_;
  std::shared_ptr<const File> file_;
  bool is_writable_ = false;
};

}  // namespace terarec::rowfile
