// SPDX-License-Identifier: Apache-2.0

// Opening: the page table is built from the keys of all segments, in the order in which their pages were filled. A
// reader that follows the writer takes over the pages that are new to it.
#include <dirent.h>

#include <algorithm>
#include <queue>
#include <random>
#include <unordered_map>
#include <utility>

#include "rowfile/row_file.h"

namespace terarec::rowfile {
namespace {

constexpr int64_t kAhead = 16;
constexpr int64_t kScanBytes = int64_t{1} << 20;
constexpr int kTries = 100;  // of a reader whose writer commits again and again

uint64_t random_seed() {
  std::random_device device;
  return static_cast<uint64_t>(device()) << 32 | device();
}

std::vector<std::string> names_in(const std::string& directory) {
  DIR* opened = opendir(directory.c_str());
  if (!opened) throw_system_error(directory, "list");
  std::vector<std::string> names;
  while (const dirent* entry = readdir(opened)) names.emplace_back(entry->d_name);
  closedir(opened);
  return names;
}

}  // namespace

// A segment whose keys are being read.
struct RowFile::Loading {
  std::shared_ptr<Segment> segment;
  SegmentKeys keys;
  size_t page = 0;         // the next one of `keys`
  size_t key = 0;          // its first key
  int64_t first_page = 0;  // number in the segment of the first one of `keys`

  bool is_done() const { return page == keys.pages.size(); }
  uint64_t sequence() const { return keys.pages[page].sequence; }
};

// Few segments are open at a time, so that their keys take little memory: pages of a segment have rising sequences, and
// only the segments that were filled side by side overlap.
std::unique_ptr<Contents> RowFile::load(const Manifest& manifest) {
  auto contents = std::make_unique<Contents>(random_seed());
  int64_t most_rows = 0;
  for (const SegmentRecord& record : manifest.segments) most_rows += int64_t{record.pages} * layout_.page_rows;
  contents->table.reserve(std::min(most_rows, static_cast<int64_t>(manifest.rows)));
  std::vector<SegmentRecord> records = manifest.segments;
  std::sort(records.begin(), records.end(), [](const SegmentRecord& a, const SegmentRecord& b) {
    return a.first_sequence < b.first_sequence;
  });
  std::vector<Loading> open;
  size_t next = 0;
  while (next < records.size() || !open.empty()) {
    auto first = open.begin();
    uint64_t limit = next < records.size() ? records[next].first_sequence : ~uint64_t{0};
    for (auto each = open.begin(); each != open.end(); ++each) {
      if (each->sequence() < first->sequence()) first = each;
    }
    if (first == open.end() || limit < first->sequence()) {
      Loading loading{listed_segment(records[next], static_cast<int64_t>(next)), {}};
      contents->segments.push_back(loading.segment);
      read_keys(*loading.segment, loading.keys, 0);
      if (!loading.is_done()) open.push_back(std::move(loading));
      next++;
      continue;
    }
    for (auto each = open.begin(); each != open.end(); ++each) {
      if (each != first) limit = std::min(limit, each->sequence());
    }
    while (!first->is_done() && first->sequence() <= limit) apply(*contents, *first);
    if (!first->is_done()) continue;
    if (!options_.read_only && layout_.has_footers && first->segment->footer_bytes == 0) {
      unfinished_.emplace_back(first->segment, std::move(first->keys));
    }
    open.erase(first);
  }
  if (contents->table.size() != static_cast<int64_t>(manifest.rows)) {
    throw DamagedError(Manifest::path(directory_), -1,
                       "segments hold " + std::to_string(contents->table.size()) + " rows, expected " +
                           std::to_string(manifest.rows));
  }
  return contents;
}

std::shared_ptr<Segment> RowFile::listed_segment(const SegmentRecord& record, int64_t slot) {
  const std::string path = segment_path(directory_, record.number);
  if (record.pages == 0 || record.pages > layout_.segment_pages || record.footer_bytes % kBlock != 0 ||
      slot >= layout_.most_segments()) {
    throw DamagedError(Manifest::path(directory_), -1, "lists " + std::to_string(record.pages) + " pages of " + path +
                                                           ", expected 1 to " + std::to_string(layout_.segment_pages));
  }
  auto segment = std::make_shared<Segment>(record.number, slot, path, options_.direct);
  // A reader's stay open: the writer's next commit may remove files of this one.
  if (options_.read_only) segment->file(OpenMode::kRead, open_files_);
  segment->pages = segment->listed_pages = record.pages;
  segment->first_sequence = record.first_sequence;
  segment->last_sequence = record.last_sequence;
  segment->footer_bytes = segment->listed_footer_bytes = static_cast<int64_t>(record.footer_bytes);
  segment->is_sealed = segment->is_listed = true;
  return segment;
}

// Of the pages from `first_page` on; a footer has those of all pages.
void RowFile::read_keys(Segment& segment, SegmentKeys& keys, int64_t first_page) {
  const auto file = segment.file(OpenMode::kRead, open_files_);
  const int64_t expected = segment.file_bytes(layout_), size = file->size();
  if (size < expected) {
    throw DamagedError(segment.path, -1,
                       "got " + std::to_string(size) + " bytes, expected " + std::to_string(expected));
  }
  if (segment.footer_bytes == 0) {
    scan_keys(*file, segment, keys, first_page);
  } else {
    const AlignedBuffer footer(segment.footer_bytes);
    file->read(footer.get(), footer.size(), segment.pages * layout_.page_bytes);
    const std::string fault =
        keys.read_footer(segment.number, segment.pages, layout_, footer.get(), segment.footer_bytes);
    if (!fault.empty()) throw DamagedError(segment.path, -1, fault);
  }
  for (const PageEntry& page : keys.pages) {
    if (page.kind == static_cast<uint16_t>(PageKind::kErased)) segment.erased_keys += page.count;
  }
}

void RowFile::scan_keys(const File& file, const Segment& segment, SegmentKeys& keys, int64_t first_page) const {
  const int64_t most = std::max<int64_t>(1, kScanBytes / layout_.page_bytes);
  const AlignedBuffer buffer(most * layout_.page_bytes);
  for (int64_t first = first_page; first < segment.pages; first += most) {
    const int64_t pages = std::min(most, segment.pages - first);
    file.read(buffer.get(), pages * layout_.page_bytes, first * layout_.page_bytes);
    for (int64_t i = 0; i < pages; i++) {
      const char* page = buffer.get() + i * layout_.page_bytes;
      const std::string fault = layout_.page_fault(page, segment.number, first + i);
      if (!fault.empty()) throw DamagedError(segment.path, first + i, fault);
      keys.add(header_of(page), layout_.keys(page));
    }
  }
}

// Reads the keys of the next page.
void RowFile::apply(Contents& contents, Loading& loading) {
  const PageEntry& page = loading.keys.pages[loading.page];
  const int64_t* keys = loading.keys.keys.data() + loading.key;
  const auto left = static_cast<int64_t>(loading.keys.keys.size() - loading.key);
  const int64_t number = loading.first_page + static_cast<int64_t>(loading.page);
  const uint64_t first_place = layout_.place(loading.segment->slot, number, 0);
  for (int64_t i = 0; i < page.count; i++) {
    if (i + kAhead < left) contents.table.fetch(keys[i + kAhead]);
    const bool is_erased = page.kind == static_cast<uint16_t>(PageKind::kErased);
    const uint64_t before = is_erased ? contents.table.erase(keys[i]) : contents.table.set(keys[i], first_place + i);
    if (before != PageTable::kNone) contents.segments[layout_.split(before).slot]->live_rows--;
    if (!is_erased) loading.segment->live_rows++;
  }
  loading.page++;
  loading.key += page.count;
}

// A process that ended without a commit leaves the bytes that it had appended since the last commit.
void RowFile::remove_unlisted(const Manifest& manifest) {
  std::vector<uint64_t> listed;
  for (const SegmentRecord& record : manifest.segments) listed.push_back(record.number);
  std::sort(listed.begin(), listed.end());
  for (const std::string& name : names_in(directory_)) {
    const int64_t number = segment_number(name);
    const bool is_listed = std::binary_search(listed.begin(), listed.end(), static_cast<uint64_t>(number));
    if ((number >= 0 && !is_listed) || name == "manifest.partial") remove_file(directory_ + "/" + name);
  }
  for (const auto& segment : contents_->segments) {
    const File file(segment->path, OpenMode::kWrite, false);
    if (file.size() > segment->file_bytes(layout_)) file.truncate(segment->file_bytes(layout_));
  }
}

// No page is appended to a segment of an earlier process: it gets its footer.
void RowFile::finish_segments() {
  std::lock_guard<FairMutex> index(index_lock_);
  for (auto& [segment, keys] : unfinished_) {
    segment->footer_bytes = keys.footer_bytes();
    segment->is_footer_queued = segment->needs_flush = true;
    queue_->add({nullptr, segment, std::move(keys), segment->pages * layout_.page_bytes});
  }
  unfinished_.clear();
}

// The keys of a segment's pages that are new in `record`; the segment takes the place of the one that is held, if any.
RowFile::Loading RowFile::new_pages(const SegmentRecord& record, const Segment* held, int64_t slot) {
  Loading loading{listed_segment(record, slot), {}};
  const int64_t before = held ? held->pages : 0;
  if (held && record.pages == held->pages) {
    loading.segment->erased_keys = held->erased_keys;  // only a footer has come
    return loading;
  }
  if (record.footer_bytes == 0) loading.first_page = before;
  read_keys(*loading.segment, loading.keys, before);
  if (record.footer_bytes == 0) {
    loading.segment->erased_keys += held ? held->erased_keys : 0;
    return loading;
  }
  for (; loading.page < static_cast<size_t>(before); loading.page++) loading.key += loading.keys.pages[loading.page].count;
  return loading;
}

// Takes over what was committed since, unless that is most of the store; returns whether it did. Pages are filled before
// a commit or after it, so the new ones have the higher sequences.
bool RowFile::catch_up(const Manifest& manifest) {
  if (manifest.commit < manifest_.commit) return false;  // another store has taken the place
  std::unordered_map<uint64_t, const Segment*> held;
  for (const auto& segment : contents_->segments) {
    if (segment) held.emplace(segment->number, segment.get());
  }
  std::vector<std::pair<const SegmentRecord*, const Segment*>> changed;
  int64_t pages = 0, added = 0;
  for (const SegmentRecord& record : manifest.segments) {
    const auto found = held.find(record.number);
    const Segment* before = found == held.end() ? nullptr : found->second;
    if (before && (before->first_sequence != record.first_sequence || before->pages > record.pages)) return false;
    pages += record.pages;
    added += record.pages - (before ? before->pages : 0);
    const bool is_same = before && before->pages == record.pages &&
                         before->footer_bytes == static_cast<int64_t>(record.footer_bytes);
    if (!is_same) changed.emplace_back(&record, before);
    if (before) held.erase(found);
  }
  if (added * 2 > pages) return false;

  std::vector<Loading> loadings;
  std::vector<int64_t> free_slots = contents_->free_slots;
  auto slots = static_cast<int64_t>(contents_->segments.size());
  for (const auto& [record, before] : changed) {
    int64_t slot = before ? before->slot : slots;
    if (!before && !free_slots.empty()) {
      slot = free_slots.back();
      free_slots.pop_back();
    } else if (!before) {
      slots++;
    }
    loadings.push_back(new_pages(*record, before, slot));
    const Loading& last = loadings.back();
    if (!last.is_done() && last.sequence() < manifest_.next_sequence) return false;
  }

  std::lock_guard<FairMutex> index(index_lock_);
  auto contents = std::move(contents_);  // gone if this fails: the next call starts from scratch
  contents->segments.resize(slots);
  contents->free_slots = std::move(free_slots);
  using Next = std::pair<uint64_t, Loading*>;
  std::priority_queue<Next, std::vector<Next>, std::greater<>> next;
  for (Loading& loading : loadings) {
    auto& place = contents->segments[loading.segment->slot];
    if (place) loading.segment->live_rows = place->live_rows;
    place = loading.segment;
    if (!loading.is_done()) next.emplace(loading.sequence(), &loading);
  }
  while (!next.empty()) {
    Loading& first = *next.top().second;
    next.pop();
    apply(*contents, first);
    if (!first.is_done()) next.emplace(first.sequence(), &first);
  }
  bool has_stale = false;
  for (const auto& [number, segment] : held) has_stale |= segment->live_rows > 0;
  if (has_stale) {  // of erased keys whose removal compaction has dropped with their rows
    std::vector<bool> is_gone(slots);
    for (const auto& [number, segment] : held) is_gone[segment->slot] = true;
    contents->table.erase_if([&](uint64_t place) { return is_gone[layout_.split(place).slot]; });
  }
  for (const auto& [number, segment] : held) {
    const int64_t slot = segment->slot;
    contents->segments[slot].reset();
    contents->free_slots.push_back(slot);
  }
  if (contents->table.size() != static_cast<int64_t>(manifest.rows)) return false;
  contents_ = std::move(contents);
  manifest_ = manifest;
  changes_++;
  return true;
}

bool RowFile::refresh() {
  if (!options_.read_only) throw StoreError("the store is open for writing, and sees its own changes");
  std::lock_guard<std::mutex> writer(writer_mutex_);
  if (contents_) {
    if (Manifest::read(directory_).commit == manifest_.commit) return false;
  } else if (is_closing_) {
    check_open();
  }
  for (int tries = 1;; tries++) {
    Manifest manifest = Manifest::read(directory_);
    try {
      if (contents_ && catch_up(manifest)) return true;
      auto contents = load(manifest);
      std::lock_guard<FairMutex> index(index_lock_);
      contents_ = std::move(contents);
      manifest_ = std::move(manifest);
      changes_++;
      return true;
    } catch (const MissingError&) {  // the writer has removed a segment since
      if (tries == kTries || Manifest::read(directory_).commit == manifest.commit) throw;
    }
  }
}

}  // namespace terarec::rowfile
