// SPDX-License-Identifier: Apache-2.0
#include "rowfile/row_file.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace terarec::rowfile {
namespace {

// Rows that a writer puts while it has the index lock.
constexpr int64_t kWriteKeys = 512;
constexpr int64_t kAhead = 16;

}  // namespace

void RowFile::create(const std::string& directory) { Manifest().write(directory); }

RowFile::RowFile(std::string directory, const Layout& layout, std::shared_ptr<PageFetcher> fetcher,
                 const RowFileOptions& options)
    : directory_(std::move(directory)),
      layout_(layout),
      options_(options),
      open_files_(options.open_files),
      fetcher_(std::move(fetcher)) {
  if (fetcher_->most_bytes() < layout.page_bytes) throw StoreError("pages are larger than the buffers of their reader");
  if (options_.read_only) {
    refresh();
    return;
  }
  manifest_ = Manifest::read(directory_);
  contents_ = load(manifest_);
  next_sequence_ = manifest_.next_sequence;
  next_segment_ = manifest_.next_segment;
  remove_unlisted(manifest_);
  queue_ = std::make_unique<WriteQueue>(layout_, open_files_, options_.queue_bytes,
                                        [this](const WriteTask& task) { on_written(task); });
  finish_segments();
  if (options_.space_ratio > 0) compaction_ = std::thread([this] { compact_in_background(); });
}

RowFile::~RowFile() { close(); }

void RowFile::close() {
  {
    std::lock_guard<std::mutex> lock(wake_mutex_);
    is_closing_ = true;
  }
  wake_.notify_all();
  if (compaction_.joinable()) compaction_.join();
  std::lock_guard<std::mutex> compacting(compaction_mutex_);
  std::lock_guard<std::mutex> writer(writer_mutex_);
  queue_.reset();
  std::lock_guard<FairMutex> index(index_lock_);
  if (contents_) {
    for (const auto& segment : contents_->segments) {
      if (segment) segment->pending.clear();  // they refer to each other
    }
  }
  contents_.reset();
  fresh_ = {}, moved_ = {};
  erased_.clear();
}

void RowFile::check_open() const {
  if (!contents_) throw StoreError("the store is closed");
}

void RowFile::check_writable() const {
  if (options_.read_only) throw StoreError("the store is open for reading only");
  check_open();
  if (!lost_.empty()) throw StoreError(lost_);
}

int64_t RowFile::size() const {
  std::shared_lock<FairMutex> lock(index_lock_);
  check_open();
  return contents_->table.size();
}

int64_t RowFile::index_bytes() const {
  std::shared_lock<FairMutex> lock(index_lock_);
  check_open();
  return contents_->table.memory_bytes();
}

int64_t RowFile::file_bytes() const {
  std::shared_lock<FairMutex> lock(index_lock_);
  check_open();
  int64_t bytes = 0;
  for (const auto& segment : contents_->segments) bytes += segment ? segment->file_bytes(layout_) : 0;
  return bytes + 64 + static_cast<int64_t>(manifest_.segments.size() * sizeof(SegmentRecord));
}

int64_t RowFile::memory_bytes() const {
  int64_t bytes = index_bytes();
  std::shared_lock<FairMutex> lock(index_lock_);
  check_open();
  bytes += static_cast<int64_t>(erased_.size()) * 32 + static_cast<int64_t>(contents_->segments.size()) * 256;
  for (const Head* head : {&fresh_, &moved_}) bytes += static_cast<int64_t>(head->keys.keys.capacity()) * 8;
  for (const auto& segment : contents_->segments) {
    if (!segment) continue;
    for (const auto& block : segment->pending) bytes += static_cast<int64_t>(block->memory.size());
  }
  return bytes;
}

int64_t RowFile::written_bytes() const {
  std::lock_guard<std::mutex> writer(writer_mutex_);
  return queue_ ? queue_->written_bytes() : 0;
}

int64_t RowFile::num_segments() const {
  std::shared_lock<FairMutex> lock(index_lock_);
  check_open();
  int64_t count = 0;
  for (const auto& segment : contents_->segments) count += segment != nullptr;
  return count;
}

uint64_t RowFile::last_commit() const {
  std::shared_lock<FairMutex> lock(index_lock_);
  return manifest_.commit;
}

std::string RowFile::metadata() const {
  std::shared_lock<FairMutex> lock(index_lock_);
  return manifest_.metadata;
}

void RowFile::write(const int64_t* keys, int64_t count, RowsIn rows) {
  wait_for_space(count * (layout_.row_bytes + 8));
  std::lock_guard<std::mutex> writer(writer_mutex_);
  check_writable();
  if (count == 0) return;
  changes_++;
  for (int64_t first = 0; first < count; first += kWriteKeys) {
    const int64_t end = std::min(first + kWriteKeys, count);
    queue_->wait_for_room();
    std::lock_guard<FairMutex> index(index_lock_);
    for (int64_t i = first; i < std::min(first + kAhead, end); i++) contents_->table.fetch(keys[i]);
    for (int64_t i = first; i < end; i++) {
      if (i + kAhead < end) contents_->table.fetch(keys[i + kAhead]);
      put(keys[i], rows.rows + i * rows.stride);
    }
  }
}

void RowFile::put(int64_t key, const char* row) {
  const uint64_t before = contents_->table.find(key);
  for (const Head* head : {&fresh_, &moved_}) {
    if (before != PageTable::kNone && head->holds(before)) {
      memcpy(layout_.row(head->page, static_cast<int64_t>(before - head->first_place)), row, layout_.row_bytes);
      return;
    }
  }
  memcpy(append(fresh_, key), row, layout_.row_bytes);
  if (!erased_.empty()) erased_.erase(key);
}

// Makes a place in the head's page the key's, and returns where its row is to be.
char* RowFile::append(Head& head, int64_t key) {
  if (head.page && header_of(head.page).count == layout_.page_rows) seal_page(head);
  if (!head.page) begin_page(head);
  PageHeader& header = header_of(head.page);
  const uint64_t before = contents_->table.set(key, head.first_place + header.count);
  if (before != PageTable::kNone) segment_of(before).live_rows--;
  head.segment->live_rows++;
  layout_.keys(head.page)[header.count] = key;
  return layout_.row(head.page, header.count++);
}

void RowFile::erase(const int64_t* keys, int64_t count) {
  std::lock_guard<std::mutex> writer(writer_mutex_);
  check_writable();
  if (count == 0) return;
  changes_++;
  for (int64_t first = 0; first < count; first += kWriteKeys) {
    const int64_t end = std::min(first + kWriteKeys, count);
    queue_->wait_for_room();
    std::lock_guard<FairMutex> index(index_lock_);
    for (int64_t i = first; i < end; i++) remove(keys[i]);
  }
  wake_compaction();
}

// In a page that is being filled the last row takes the place of a removed one.
void RowFile::remove(int64_t key) {
  const uint64_t before = contents_->table.find(key);
  if (before == PageTable::kNone) return;
  erased_.insert(key);
  contents_->table.erase(key);
  segment_of(before).live_rows--;
  for (Head* head : {&fresh_, &moved_}) {
    if (!head->holds(before)) continue;
    PageHeader& header = header_of(head->page);
    const auto row = static_cast<int64_t>(before - head->first_place);
    const int64_t last = --header.count;
    int64_t* keys = layout_.keys(head->page);
    if (row != last) {
      keys[row] = keys[last];
      memcpy(layout_.row(head->page, row), layout_.row(head->page, last), layout_.row_bytes);
      contents_->table.set(keys[row], before);
    }
    keys[last] = 0;
    memset(layout_.row(head->page, last), 0, layout_.row_bytes);
  }
  if (static_cast<int64_t>(erased_.size()) == layout_.erased_in_page) write_erased();
}

void RowFile::write_erased() {
  if (erased_.empty()) return;
  if (fresh_.page) seal_page(fresh_);
  begin_page(fresh_);
  PageHeader& header = header_of(fresh_.page);
  header.kind = static_cast<uint16_t>(PageKind::kErased);
  for (const int64_t key : erased_) layout_.keys(fresh_.page)[header.count++] = key;
  fresh_.segment->erased_keys += header.count;
  erased_.clear();
  seal_page(fresh_);
}

void RowFile::begin_page(Head& head) {
  if (head.segment && head.segment->pages == layout_.segment_pages) seal_segment(head);
  if (!head.segment) begin_segment(head);
  if (!head.block) {
    const int64_t pages = std::min(static_cast<int64_t>(kBlockBytes) / layout_.page_bytes,
                                   layout_.segment_pages - head.segment->pages);
    auto block = std::make_shared<Block>();
    block->memory = AlignedBuffer(pages * layout_.page_bytes);
    block->segment = head.segment;
    block->first_page = head.segment->pages;
    block->capacity = pages;
    head.segment->pending.push_back(block);
    head.block = std::move(block);
  }
  head.page = head.block->memory.get() + head.block->pages * layout_.page_bytes;
  head.page_number = head.segment->pages;
  head.first_place = layout_.place(head.segment->slot, head.page_number, 0);
  memset(head.page, 0, layout_.page_bytes);
  header_of(head.page) = {kPageMagic,
                          0,
                          0,
                          0,
                          static_cast<uint16_t>(PageKind::kRows),
                          static_cast<uint32_t>(head.page_number),
                          head.segment->number};
  head.block->pages++;
  head.segment->pages++;
}

int64_t RowFile::free_slot() {
  if (!contents_->free_slots.empty()) {
    const int64_t slot = contents_->free_slots.back();
    contents_->free_slots.pop_back();
    return slot;
  }
  const auto slot = static_cast<int64_t>(contents_->segments.size());
  if (slot >= layout_.most_segments()) {
    throw StoreError("holds " + std::to_string(slot) + " segments, and cannot hold more: larger ones are needed");
  }
  contents_->segments.push_back(nullptr);
  return slot;
}

void RowFile::begin_segment(Head& head) {
  const int64_t slot = free_slot();
  const uint64_t number = next_segment_++;
  head.segment = std::make_shared<Segment>(number, slot, segment_path(directory_, number), options_.direct);
  contents_->segments[slot] = head.segment;
  head.keys.clear();
}

void RowFile::seal_page(Head& head) {
  PageHeader& header = header_of(head.page);
  header.sequence = next_sequence_++;
  if (head.segment->first_sequence == 0) head.segment->first_sequence = header.sequence;
  head.segment->last_sequence = header.sequence;
  head.keys.add(header, layout_.keys(head.page));
  head.page = nullptr;
  if (head.block->pages == head.block->capacity) queue_block(head);
}

void RowFile::queue_block(Head& head) {
  if (!head.block) return;
  head.block->capacity = head.block->pages;
  head.segment->needs_flush = true;
  queue_->add({head.block, head.segment, {}, 0});
  head.block.reset();
}

void RowFile::seal_segment(Head& head) {
  queue_block(head);
  if (layout_.has_footers) {
    head.segment->footer_bytes = head.keys.footer_bytes();
    head.segment->is_footer_queued = true;
    queue_->add({nullptr, head.segment, std::move(head.keys), head.segment->pages * layout_.page_bytes});
  }
  head.segment->is_sealed = true;
  head.segment->needs_flush = true;
  head.keys = {};
  head.segment.reset();
  wake_compaction();
}

void RowFile::seal_all() {
  write_erased();
  for (Head* head : {&fresh_, &moved_}) {
    if (head->page) seal_page(*head);
    queue_block(*head);
  }
}

void RowFile::seal_heads() {
  seal_all();
  for (Head* head : {&fresh_, &moved_}) {
    if (head->segment) seal_segment(*head);
  }
}

void RowFile::seal() {
  std::lock_guard<std::mutex> writer(writer_mutex_);
  check_writable();
  std::lock_guard<FairMutex> index(index_lock_);
  seal_heads();
}

// Writes all to the files, without flushing these to the disk.
void RowFile::flush() {
  {
    std::lock_guard<FairMutex> index(index_lock_);
    seal_all();
  }
  queue_->drain();
}

void RowFile::on_written(const WriteTask& task) {
  bool can_move = false;
  {
    std::lock_guard<FairMutex> index(index_lock_);
    auto& pending = task.segment->pending;
    if (task.block) {
      pending.erase(std::find(pending.begin(), pending.end(), task.block));
      task.block->segment.reset();
    } else {
      task.segment->is_footer_queued = false;
    }
    can_move = task.segment->is_sealed && pending.empty() && !task.segment->is_footer_queued;
  }
  // Compaction may have found nothing else to move and sleep, and there need not be another writer to wake it.
  if (can_move) wake_compaction();
}

uint64_t RowFile::commit(const std::string& metadata) {
  std::lock_guard<std::mutex> writer(writer_mutex_);
  check_writable();
  flush();
  flush_segments();
  Manifest manifest = next_manifest(metadata);
  manifest.write(directory_);
  std::vector<std::shared_ptr<Segment>> superseded;
  {
    std::lock_guard<FairMutex> index(index_lock_);
    manifest_ = std::move(manifest);
    for (const auto& segment : contents_->segments) {
      if (!segment) continue;
      segment->is_listed = !segment->is_moved && segment->pages > 0;
      segment->listed_pages = segment->pages;
      segment->listed_footer_bytes = segment->footer_bytes;
      if (segment->is_moved) superseded.push_back(segment);
    }
  }
  for (const auto& segment : superseded) drop_segment(segment);
  wake_compaction();
  return last_commit();
}

void RowFile::flush_segments() {
  std::vector<std::shared_ptr<Segment>> changed;
  {
    std::lock_guard<FairMutex> index(index_lock_);
    for (const auto& segment : contents_->segments) {
      if (segment && segment->needs_flush && !segment->is_moved) changed.push_back(segment);
    }
  }
  for (const auto& segment : changed) {
    const auto file = segment->file(OpenMode::kWrite, open_files_);
    try {
      file->flush();
    } catch (const StoreError& error) {
      lost_ = std::string(error.what()) + "; the last commit remains valid, and is there when the store is opened again";
      throw StoreError(lost_, error.code());
    }
  }
  if (!changed.empty()) flush_directory(directory_);
  std::lock_guard<FairMutex> index(index_lock_);
  for (const auto& segment : changed) segment->needs_flush = false;
}

Manifest RowFile::next_manifest(const std::string& metadata) const {
  std::shared_lock<FairMutex> index(index_lock_);
  Manifest manifest;
  manifest.commit = manifest_.commit + 1;
  manifest.next_sequence = next_sequence_;
  manifest.next_segment = next_segment_;
  manifest.rows = static_cast<uint64_t>(contents_->table.size());
  manifest.metadata = metadata;
  for (const auto& segment : contents_->segments) {
    if (segment && !segment->is_moved && segment->pages > 0) manifest.segments.push_back(segment->record());
  }
  return manifest;
}

void RowFile::drop_segment(const std::shared_ptr<Segment>& segment) {
  {
    std::lock_guard<FairMutex> index(index_lock_);
    contents_->segments[segment->slot].reset();
    contents_->free_slots.push_back(segment->slot);
  }
  segment->close_file();  // its readers hold it open
  remove_file(segment->path);
}

void RowFile::snapshot(const std::string& directory) {
  if (options_.read_only) throw StoreError("the store is open for reading only");
  std::unique_lock<std::mutex> compacting(compaction_mutex_, std::defer_lock);
  if (options_.is_working) {  // files of the last commit may be gone
    compacting.lock();
    commit(metadata());
  }
  std::lock_guard<std::mutex> writer(writer_mutex_);
  check_writable();
  std::vector<std::pair<std::shared_ptr<Segment>, bool>> listed;
  {
    std::shared_lock<FairMutex> index(index_lock_);
    for (const auto& segment : contents_->segments) {
      if (!segment || !segment->is_listed) continue;
      const bool is_final = segment->is_sealed && segment->pages == segment->listed_pages &&
                            segment->footer_bytes == segment->listed_footer_bytes;
      listed.emplace_back(segment, is_final);
    }
  }
  // A writer of the copy may cut off or append to a segment that is not final, which may not be this one's.
  for (const auto& [segment, is_final] : listed) {
    const std::string to = segment_path(directory, segment->number);
    if (is_final) link_or_copy(segment->path, to);
    else copy_prefix(segment->path, to, segment->listed_pages * layout_.page_bytes + segment->listed_footer_bytes);
  }
  manifest_.write(directory);
}

// A segment without its footer gets one from whoever opens it for writing, and a longer one is cut off: those are copied.
void RowFile::clone(const std::string& from, const std::string& to, const Layout& layout) {
  const Manifest manifest = Manifest::read(from);
  for (const SegmentRecord& record : manifest.segments) {
    const std::string source = segment_path(from, record.number), target = segment_path(to, record.number);
    const int64_t bytes = int64_t{record.pages} * layout.page_bytes + static_cast<int64_t>(record.footer_bytes);
    const bool is_ended = record.has_footer || !layout.has_footers;
    if (is_ended && File(source, OpenMode::kRead, false).size() == bytes) link_or_copy(source, target);
    else copy_prefix(source, target, bytes);
  }
  manifest.write(to);
}

}  // namespace terarec::rowfile
