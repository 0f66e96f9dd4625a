// SPDX-License-Identifier: Apache-2.0

// Compaction: the live rows of segments with the most dead bytes move to the end, so that files take bounded space.
#include <algorithm>
#include <chrono>
#include <cstring>

#include "rowfile/row_file.h"

namespace terarec::rowfile {
namespace {

constexpr int64_t kMovedBytes = int64_t{1} << 18;  // read, and moved under the index lock, at once
constexpr auto kPause = std::chrono::milliseconds(2);
constexpr auto kLongestWait = std::chrono::seconds(10);  // of a writer, where others write all the time
// Up to this many segments are kept, whatever they hold; beyond, short ones are merged.
constexpr int64_t kFineSegments = 16;
// Compaction begins at this share of the space that files may take in addition to the live bytes; writers wait at all
// of it. Of 1 GiB with overwrites of Zipf 1.05, files took up to 1.76 times the live bytes when it began at all of it
// and writers waited at that and four segments. Where they waited only while a segment moved, they went on between two
// and before the first one: files of 64 MiB took 1.67 times the live bytes, and those of 8 MiB three times.
constexpr double kBegin = 0.75;
// Files may take so much more, since those of few rows end as they are.
constexpr int64_t kLeastExcess = int64_t{1} << 20;
// A segment with less than this share of the removable bytes is moved only because of its age.
constexpr int64_t kLeastGain = 16;
constexpr uint64_t kAnySegment = ~uint64_t{0};

}  // namespace

RowFile::Space RowFile::space() const {
  std::shared_lock<FairMutex> index(index_lock_);
  Space space;
  if (!contents_) return space;
  for (const auto& segment : contents_->segments) {
    if (!segment || segment->is_moved) continue;
    space.used += segment->file_bytes(layout_);
    space.segments++;
  }
  space.live = contents_->table.size() * (layout_.row_bytes + 8);
  return space;
}

// Whether files take more than `ratio` times the live bytes, or are many for what they take.
bool RowFile::has_excess(const Space& space, double ratio) const {
  const int64_t segment_bytes = layout_.segment_pages * layout_.page_bytes;
  const int64_t excess = space.used - std::min(segment_bytes, kLeastExcess);
  return static_cast<double>(excess) > ratio * static_cast<double>(space.live) ||
         space.segments > kFineSegments + 2 * (space.used / segment_bytes);
}

// The segment with the most dead bytes. If these are few, erased keys take the space, which can only be removed when no
// older segment is left: then the oldest segment, if `any_gain`, else none. Only segments of numbers below `end` count.
std::shared_ptr<Segment> RowFile::choose_victim(bool any_gain, uint64_t end) const {
  std::shared_lock<FairMutex> index(index_lock_);
  std::shared_ptr<Segment> best, oldest;
  int64_t best_gain = 0;
  if (!contents_) return nullptr;
  for (const auto& segment : contents_->segments) {
    if (!segment || segment->is_moved || !segment->is_sealed || segment->is_unreadable) continue;
    if (segment->is_footer_queued || !segment->pending.empty() || segment->number >= end) continue;
    const int64_t kept = segment->live_rows * layout_.page_bytes / layout_.page_rows + segment->erased_keys * 8;
    const int64_t gain = segment->file_bytes(layout_) - kept;
    if (gain > best_gain) best = segment, best_gain = gain;
    if (!oldest || segment->first_sequence < oldest->first_sequence) oldest = segment;
  }
  if (best && best_gain >= best->file_bytes(layout_) / kLeastGain) return best;
  return any_gain ? oldest : nullptr;
}

int64_t RowFile::live_bytes(const Segment& segment) const {
  std::shared_lock<FairMutex> index(index_lock_);
  return segment.live_rows * layout_.page_bytes / layout_.page_rows;
}

// False if the store is closed meanwhile.
bool RowFile::move_segment(const std::shared_ptr<Segment>& victim) {
  const auto file = victim->file(OpenMode::kRead, open_files_);
  const int64_t most = std::max<int64_t>(1, kMovedBytes / layout_.page_bytes);
  const AlignedBuffer buffer(most * layout_.page_bytes);
  // A sealed segment does not change, so it is read and checked without a lock; writers wait only while rows move.
  for (int64_t first = 0; first < victim->pages; first += most) {
    const int64_t pages = std::min(most, victim->pages - first);
    file->read(buffer.get(), pages * layout_.page_bytes, first * layout_.page_bytes);
    for (int64_t i = 0; i < pages; i++) {
      const std::string fault =
          layout_.page_fault(buffer.get() + i * layout_.page_bytes, victim->number, first + i);
      if (!fault.empty()) throw DamagedError(victim->path, first + i, fault);
    }
    std::unique_lock<std::mutex> writer(writer_mutex_);
    // A scan reads pages in order: a row that moved behind its position would be missed or come twice.
    while (scans_ > 0) {
      writer.unlock();
      std::this_thread::sleep_for(kPause);
      if (is_stopping()) return false;
      writer.lock();
    }
    if (is_stopping() || !contents_) return false;
    queue_->wait_for_room();
    std::lock_guard<FairMutex> index(index_lock_);
    move_pages(*victim, buffer.get(), first, pages);
  }
  std::lock_guard<std::mutex> writer(writer_mutex_);
  bool is_listed = false;
  {
    std::lock_guard<FairMutex> index(index_lock_);
    if (!contents_) return false;
    victim->is_moved = true;
    is_listed = victim->is_listed;
  }
  if (!is_listed || options_.is_working) drop_segment(victim);  // no commit needs it
  return true;
}

void RowFile::move_pages(const Segment& victim, const char* data, int64_t first, int64_t pages) {
  uint64_t oldest = ~uint64_t{0};  // sequence in other segments
  for (const auto& segment : contents_->segments) {
    if (!segment || segment.get() == &victim || segment->is_moved || segment->first_sequence == 0) continue;
    oldest = std::min(oldest, segment->first_sequence);
  }
  for (int64_t p = first; p < first + pages; p++) {
    const char* page = data + (p - first) * layout_.page_bytes;
    const PageHeader& header = header_of(page);
    const int64_t* keys = layout_.keys(page);
    if (p + 1 < first + pages) {
      const char* next = page + layout_.page_bytes;
      for (int64_t i = 0; i < header_of(next).count; i++) contents_->table.fetch(layout_.keys(next)[i]);
    }
    if (header.kind == static_cast<uint16_t>(PageKind::kErased)) {
      // Only rows in older pages need the key to be erased.
      for (int64_t i = 0; i < header.count && header.sequence > oldest; i++) {
        if (contents_->table.find(keys[i]) == PageTable::kNone) erased_.insert(keys[i]);
        if (static_cast<int64_t>(erased_.size()) == layout_.erased_in_page) write_erased();
      }
      continue;
    }
    const uint64_t first_place = layout_.place(victim.slot, p, 0);
    for (int64_t i = 0; i < header.count; i++) {
      if (contents_->table.find(keys[i]) != first_place + i) continue;  // erased, or written anew since
      memcpy(append(moved_, keys[i]), layout_.row(page, i), layout_.row_bytes);
    }
  }
}

bool RowFile::is_stopping() {
  std::lock_guard<std::mutex> lock(wake_mutex_);
  return is_closing_;
}

void RowFile::wake_compaction() {
  {
    std::lock_guard<std::mutex> lock(wake_mutex_);
    is_to_check_ = true;
  }
  wake_.notify_all();
}

// Ends after an error of writing, which the next writer gets.
void RowFile::compact_in_background() {
  for (;;) {
    {
      std::unique_lock<std::mutex> lock(wake_mutex_);
      wake_.wait(lock, [&] { return is_closing_ || is_to_check_; });
      if (is_closing_) return;
      is_to_check_ = false;
      is_compacting_ = true;
    }
    const double begin = 1 + kBegin * (options_.space_ratio - 1);
    while (!is_stopping() && scans_ == 0 && has_excess(space(), begin)) {
      std::lock_guard<std::mutex> compacting(compaction_mutex_);
      const auto victim = choose_victim(has_excess(space(), options_.space_ratio), kAnySegment);
      if (!victim) break;
      set_moving(live_bytes(*victim));
      bool goes_on = true;
      try {
        goes_on = move_segment(victim);
      } catch (const DamagedError&) {  // its readers get the error
        std::lock_guard<FairMutex> index(index_lock_);
        victim->is_unreadable = true;
      } catch (const std::exception&) {
        goes_on = false;
      }
      if (!goes_on) break;
    }
    set_moving(-1);
  }
}

// Notes the bytes of live rows that are about to be copied; -1 when none are to be.
void RowFile::set_moving(int64_t bytes) {
  {
    std::lock_guard<std::mutex> lock(wake_mutex_);
    is_compacting_ = bytes >= 0;
    moving_bytes_ = std::max<int64_t>(bytes, 0);
    moves_ += is_compacting_;
  }
  wake_.notify_all();
}

// Until `bytes` more do not exceed what files may take, as long as there is hope: compaction works, or will when what
// is queued for the disk is there, and not every segment has had its turn. A small store may stay above its bound for
// good, since its pages and segments are never full.
void RowFile::wait_for_space(int64_t bytes) {
  if (options_.space_ratio <= 0 || options_.read_only) return;
  const auto end = std::chrono::steady_clock::now() + kLongestWait;
  int64_t last_move = -1;
  while (std::chrono::steady_clock::now() < end) {
    Space needed = space();
    bool is_writing = false;
    {
      std::lock_guard<std::mutex> writer(writer_mutex_);
      is_writing = queue_ && queue_->is_writing();
    }
    std::unique_lock<std::mutex> lock(wake_mutex_);
    // Rows that move are there twice until all of their segment have moved.
    needed.used += bytes + moving_bytes_;
    if (!has_excess(needed, options_.space_ratio)) return;
    if (!(is_compacting_ || is_to_check_ || is_writing) || is_closing_ || scans_ > 0) return;
    if (last_move < 0) last_move = moves_ + needed.segments;
    if (moves_ >= last_move) return;
    wake_.wait_for(lock, kPause);
  }
}

void RowFile::compact() {
  if (options_.read_only) throw StoreError("the store is open for reading only");
  std::lock_guard<std::mutex> compacting(compaction_mutex_);
  if (scans_ > 0) throw StoreError("a scan is under way, expected its end before compaction");
  uint64_t end = 0;
  {
    std::lock_guard<std::mutex> writer(writer_mutex_);
    check_writable();
    std::lock_guard<FairMutex> index(index_lock_);
    seal_heads();
    end = next_segment_;
  }
  {
    std::lock_guard<std::mutex> writer(writer_mutex_);
    check_writable();
    queue_->drain();
  }
  // Only those of now: where others seal at the same time, the few rows moved since would be moved again and again.
  while (const auto victim = choose_victim(false, end)) {
    if (!move_segment(victim)) return;
  }
}

}  // namespace terarec::rowfile
