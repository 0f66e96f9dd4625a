// SPDX-License-Identifier: Apache-2.0

// Reads of rows: their places are looked up, and the pages of all of them, of several files, fetched together.
#include <algorithm>
#include <cstring>
#include <utility>

#include "rowfile/row_file.h"

namespace terarec::rowfile {
namespace {

// Keys that are looked up while the index lock is held, and those whose pages are fetched together.
constexpr int64_t kLookedUp = 16384;
constexpr int64_t kTogether = 65536;
constexpr int kTries = 100;

}  // namespace

// A row that is to be read from its file.
struct RowFile::LocatedRow {
  uint64_t place;
  int64_t at;  // position in the request
  std::shared_ptr<Segment> segment;
};

void RowFile::read(const std::vector<Request>& requests) {
  std::vector<Request> together;
  int64_t keys = 0;
  for (const Request& each : requests) {
    if (each.store->fetcher_ != requests[0].store->fetcher_) throw StoreError("row files with readers of their own");
    for (int64_t first = 0; first < each.count; first += kLookedUp) {
      const int64_t count = std::min(kLookedUp, each.count - first);
      if (keys + count > kTogether) {
        read_together(together);
        together.clear();
        keys = 0;
      }
      together.push_back({each.store, each.keys + first, count,
                          {each.out.rows + first * each.out.stride, each.out.stride}, each.found + first});
      keys += count;
    }
  }
  if (keys > 0) read_together(together);
}

void RowFile::read_together(const std::vector<Request>& requests) {
  std::vector<std::vector<LocatedRow>> located(requests.size());
  for (int tries = 1;; tries++) {
    for (size_t i = 0; i < requests.size(); i++) look_up(requests[i], located[i]);
    try {
      return fetch(requests, located);
    } catch (const MissingError& error) {  // compaction removed the file before it was opened: the rows are elsewhere
      if (requests[0].store->options_.read_only) {
        throw StoreError(std::string(error.what()) + "; a refresh moves on to the last commit");
      }
      if (tries == kTries) throw;
    }
  }
}

// Copies the rows that lie in memory, and lists the others in the order in which they lie in their files.
void RowFile::look_up(const Request& request, std::vector<LocatedRow>& located) {
  RowFile& store = *request.store;
  const Layout& layout = store.layout_;
  std::vector<uint64_t> places(request.count);
  located.clear();
  {
    std::shared_lock<FairMutex> lock(store.index_lock_);
    store.check_open();
    store.contents_->table.find(request.keys, request.count, places.data());
    for (int64_t i = 0; i < request.count; i++) {
      request.found[i] = places[i] != PageTable::kNone;
      if (!request.found[i]) continue;
      const RowPlace place = layout.split(places[i]);
      const auto& segment = store.contents_->segments[place.slot];
      if (const Block* block = segment->pending.empty() ? nullptr : segment->block_of(place.page)) {
        const char* page = block->memory.get() + (place.page - block->first_page) * layout.page_bytes;
        memcpy(request.out.rows + i * request.out.stride, layout.row(page, place.row), layout.row_bytes);
      } else {
        located.push_back({places[i], i, segment});
      }
    }
  }
  std::sort(located.begin(), located.end(), [](const LocatedRow& a, const LocatedRow& b) { return a.place < b.place; });
}

// Pages that lie side by side are read at once, those of few enough files together.
void RowFile::fetch(const std::vector<Request>& requests, std::vector<std::vector<LocatedRow>>& located) {
  struct Rows {
    size_t request, first, end;  // in `located`
  };
  PageFetcher& fetcher = *requests[0].store->fetcher_;
  const auto most_files = static_cast<size_t>(std::max<int64_t>(1, requests[0].store->open_files_.most() / 4));
  std::vector<PageRun> runs;
  std::vector<Rows> rows;
  std::vector<std::shared_ptr<const File>> files;
  const auto fetch_runs = [&] {
    fetcher.fetch(runs, [&](int64_t run, const char* data) {
      const Rows& of_run = rows[run];
      const LocatedRow* first = located[of_run.request].data();
      copy_rows(requests[of_run.request], first + of_run.first, first + of_run.end, data, runs[run].offset);
    });
  };
  for (size_t request = 0; request < requests.size(); request++) {
    RowFile& store = *requests[request].store;
    const Layout& layout = store.layout_;
    int64_t slot = -1, last_page = -1;
    for (size_t i = 0; i < located[request].size(); i++) {
      const LocatedRow& row = located[request][i];
      const RowPlace place = layout.split(row.place);
      if (place.slot != slot || place.page != last_page) {
        const bool is_next = place.slot == slot && place.page == last_page + 1;
        if (is_next && runs.back().bytes + layout.page_bytes <= fetcher.most_bytes()) {
          runs.back().bytes += layout.page_bytes;
        } else {
          if (place.slot != slot) {
            if (files.size() == most_files) {
              fetch_runs();
              runs.clear(), rows.clear(), files.clear();
            }
            files.push_back(row.segment->file(OpenMode::kRead, store.open_files_));
          }
          runs.push_back({files.back().get(), place.page * layout.page_bytes, layout.page_bytes});
          rows.push_back({request, i, i});
        }
      }
      rows.back().end = i + 1;
      slot = place.slot, last_page = place.page;
    }
  }
  fetch_runs();
}

// Checks each page once.
void RowFile::copy_rows(const Request& request, const LocatedRow* first, const LocatedRow* end, const char* data,
                        int64_t offset) {
  const Layout& layout = request.store->layout_;
  int64_t checked = -1;
  for (const LocatedRow* row = first; row != end; row++) {
    const RowPlace place = layout.split(row->place);
    const char* page = data + place.page * layout.page_bytes - offset;
    if (place.page != checked) {
      const std::string fault = layout.page_fault(page, row->segment->number, place.page);
      if (!fault.empty()) throw DamagedError(row->segment->path, place.page, fault);
      checked = place.page;
    }
    const int64_t key = request.keys[row->at];
    if (place.row >= header_of(page).count || layout.keys(page)[place.row] != key) {
      throw DamagedError(row->segment->path, place.page, "does not hold key " + std::to_string(key));
    }
    memcpy(request.out.rows + row->at * request.out.stride, layout.row(page, place.row), layout.row_bytes);
  }
}

}  // namespace terarec::rowfile
