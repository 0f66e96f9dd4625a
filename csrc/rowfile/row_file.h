// SPDX-License-Identifier: Apache-2.0

// A log-structured store of rows on a disk: docs/formats.md describes its files.
//
// Rows and erased keys are appended to pages of the newest segment; a page table in memory says where the newest row of
// each key is. A page gets its sequence number when it is full, and from then on it does not change; until then rows in
// it are overwritten where they are. So no two pages that are being filled hold the same key, and the page with the
// highest sequence that names a key has its newest row. Compaction appends the live rows of a segment to a segment for
// such rows, since rows that lived that long are likely to live on. A commit makes all pages durable and lists the
// segments in a new manifest; only then are files removed that the one before needed.
//
// Locks are taken in this order: `writer_mutex_` by calls that change the store; the index lock, shared by readers while they
// look up places and copy rows that lie in memory, and exclusive, for short times, where places change.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <string>
#include <thread>
#include <unordered_set>
#include <utility>
#include <vector>

#include "rowfile/layout.h"
#include "rowfile/manifest.h"
#include "rowfile/page_fetcher.h"
#include "rowfile/page_table.h"
#include "rowfile/segment.h"
#include "rowfile/write_queue.h"

namespace terarec::rowfile {

struct RowFileOptions {
  bool read_only = false;
  bool direct = false;
  int64_t queue_bytes = int64_t{16} << 20;
  int64_t open_files = 4096;
  double space_ratio = 1.5;  // compaction keeps files below so many times the live bytes; 0: it does not run by itself
  bool is_working = false;   // nothing is to outlive the process: files go before the commit that does without them
};

// A shared mutex that is fair: neither readers nor writers starve the other.
class FairMutex {
 public:
  void lock() {
    std::lock_guard<std::mutex> turn(turn_);
    mutex_.lock();
  }
  void unlock() { mutex_.unlock(); }
  void lock_shared() {
    std::lock_guard<std::mutex> turn(turn_);
    mutex_.lock_shared();
  }
  void unlock_shared() { mutex_.unlock_shared(); }

 private:
  std::mutex turn_;
  std::shared_mutex mutex_;
};

// Rows in memory: row i begins at rows + i * stride.
struct RowsOut {
  char* rows;
  int64_t stride;
};
struct RowsIn {
  const char* rows;
  int64_t stride;
};

// Segments by slot, and where the rows are. Guarded by the index lock.
struct Contents {
  explicit Contents(uint64_t seed) : table(seed) {}

  PageTable table;
  std::vector<std::shared_ptr<Segment>> segments;  // null: a free slot
  std::vector<int64_t> free_slots;
};

class Scan;

class RowFile {
 public:
  // Writes the files of an empty store to a directory that has its description.
  static void create(const std::string& directory);

  // Several files may share what fetches their pages; both read directly, or neither.
  RowFile(std::string directory, const Layout& layout, std::shared_ptr<PageFetcher> fetcher,
          const RowFileOptions& options);
  ~RowFile();
  RowFile(const RowFile&) = delete;
  RowFile& operator=(const RowFile&) = delete;

  const Layout& layout() const { return layout_; }
  int64_t size() const;
  int64_t file_bytes() const;
  // Without those of the fetcher.
  int64_t memory_bytes() const;
  int64_t index_bytes() const;
  int64_t written_bytes() const;
  int64_t num_segments() const;
  uint64_t last_commit() const;
  std::string metadata() const;

  // Rows of one file, and where they go.
  struct Request {
    RowFile* store;
    const int64_t* keys;
    int64_t count;
    RowsOut out;
    bool* found;
  };

  // Reads the pages of all requests together. The files share a fetcher.
  static void read(const std::vector<Request>& requests);
  void write(const int64_t* keys, int64_t count, RowsIn rows);
  void erase(const int64_t* keys, int64_t count);
  uint64_t commit(const std::string& metadata);
  // Ends the segments that take rows, so that a snapshot after the next commit can link them all.
  void seal();
  // Links or copies the files of the last commit.
  void snapshot(const std::string& directory);
  // The same for a directory that need not be open; no process may write to its segments.
  static void clone(const std::string& from, const std::string& to, const Layout& layout);
  // Opens the newest commit of the writer; returns whether there was one.
  bool refresh();
  // Moves the rows of all segments that are not nearly full of live ones.
  void compact();
  void close();

 private:
  friend class Scan;

  // Pages that are being filled, at the end of a segment.
  struct Head {
    std::shared_ptr<Segment> segment;
    std::shared_ptr<Block> block;
    char* page = nullptr;  // the one that takes rows; null: none does
    int64_t page_number = 0;
    uint64_t first_place = 0;  // of the page
    SegmentKeys keys;          // of the sealed pages

    bool holds(uint64_t place) const {
      return page && place - first_place < static_cast<uint64_t>(header_of(page).count);
    }
  };

  // row_file.cpp
  void check_open() const;
  void check_writable() const;
  void put(int64_t key, const char* row);
  char* append(Head& head, int64_t key);
  void remove(int64_t key);
  void begin_page(Head& head);
  void begin_segment(Head& head);
  void seal_page(Head& head);
  void seal_segment(Head& head);
  void queue_block(Head& head);
  void write_erased();
  void seal_all();
  void seal_heads();
  void flush();
  void on_written(const WriteTask& task);
  Manifest next_manifest(const std::string& metadata) const;
  void flush_segments();
  void drop_segment(const std::shared_ptr<Segment>& segment);
  int64_t free_slot();
  Segment& segment_of(uint64_t place) const { return *contents_->segments[layout_.split(place).slot]; }

  // reading.cpp
  struct LocatedRow;
  static void read_together(const std::vector<Request>& requests);
  static void fetch(const std::vector<Request>& requests, std::vector<std::vector<LocatedRow>>& located);
  static void look_up(const Request& request, std::vector<LocatedRow>& located);
  static void copy_rows(const Request& request, const LocatedRow* first, const LocatedRow* end, const char* data,
                        int64_t offset);

  // opening.cpp
  struct Loading;
  std::unique_ptr<Contents> load(const Manifest& manifest);
  std::shared_ptr<Segment> listed_segment(const SegmentRecord& record, int64_t slot);
  Loading new_pages(const SegmentRecord& record, const Segment* held, int64_t slot);
  bool catch_up(const Manifest& manifest);
  void read_keys(Segment& segment, SegmentKeys& keys, int64_t first_page);
  void scan_keys(const File& file, const Segment& segment, SegmentKeys& keys, int64_t first_page) const;
  void apply(Contents& contents, Loading& loading);
  void remove_unlisted(const Manifest& manifest);
  void finish_segments();

  // compaction.cpp
  struct Space {
    int64_t used = 0;  // by segments whose rows have not all moved
    int64_t live = 0;
    int64_t segments = 0;
  };
  Space space() const;
  bool has_excess(const Space& space, double ratio) const;
  std::shared_ptr<Segment> choose_victim(bool any_gain, uint64_t end) const;
  int64_t live_bytes(const Segment& segment) const;
  bool move_segment(const std::shared_ptr<Segment>& victim);
  void move_pages(const Segment& victim, const char* data, int64_t first, int64_t pages);
  void compact_in_background();
  bool is_stopping();
  void wake_compaction();
  void set_moving(int64_t bytes);
  void wait_for_space(int64_t bytes);

  const std::string directory_;
  const Layout layout_;
  const RowFileOptions options_;
  OpenFiles open_files_;
  const std::shared_ptr<PageFetcher> fetcher_;

  mutable std::mutex writer_mutex_;
  std::string lost_;  // why what was written may be lost, which cannot be mended: flushing again would not tell
  std::mutex compaction_mutex_;  // taken before all others, by those that move segments
  mutable FairMutex index_lock_;
  std::unique_ptr<Contents> contents_;  // null: closed
  Manifest manifest_;                   // of the last commit
  Head fresh_, moved_;
  std::unordered_set<int64_t> erased_;  // keys whose removal is in no page yet
  std::vector<std::pair<std::shared_ptr<Segment>, SegmentKeys>> unfinished_;  // segments that get a footer once open
  uint64_t next_sequence_ = 1;
  uint64_t next_segment_ = 0;
  std::atomic<int64_t> changes_{0};
  std::atomic<int64_t> scans_{0};
  std::unique_ptr<WriteQueue> queue_;

  std::mutex wake_mutex_;
  std::condition_variable wake_;
  bool is_closing_ = false;
  bool is_to_check_ = true;
  bool is_compacting_ = false;  // or is looking for something to move
  int64_t moving_bytes_ = 0;    // of the segment that moves: its live rows when that began
  int64_t moves_ = 0;           // that have begun
  std::thread compaction_;
};

// All rows, segment after segment; no row may change meanwhile.
class Scan {
 public:
  explicit Scan(RowFile& store);
  ~Scan();
  Scan(const Scan&) = delete;
  Scan& operator=(const Scan&) = delete;

  // Writes up to `most` rows and returns how many; 0 at the end.
  int64_t next(int64_t* keys, RowsOut out, int64_t most);

 private:
  bool next_pages();

  RowFile& store_;
  int64_t changes_;
  std::vector<std::shared_ptr<Segment>> segments_;
  size_t segment_ = 0;
  int64_t next_page_ = 0, first_page_ = 0;  // the latter: of the buffer
  std::shared_ptr<const File> file_;
  AlignedBuffer buffer_;
  int64_t num_pages_ = 0;        // in the buffer
  int64_t page_ = 0, row_ = 0;   // the next to be looked at
  std::vector<uint64_t> places_;  // of the keys of the page
};

}  // namespace terarec::rowfile
