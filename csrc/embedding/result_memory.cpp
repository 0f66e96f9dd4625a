// SPDX-License-Identifier: Apache-2.0
#include "embedding/result_memory.h"

#include <pthread.h>

#include <algorithm>
#include <iterator>
#include <list>
#include <mutex>
#include <new>
#include <utility>

#include "common/platform.h"

namespace terarec {
namespace {

// Freed results, kept for the next call. A mapping of 218 MB costs 85 ms of page faults where
// refilling it costs 8 ms (two Zen 3 cores, 4 KiB pages), and malloc returns blocks above 32 MiB to the system.
constexpr size_t kKeptBytes = size_t{512} << 20;
// Least bytes of temporary memory from here; malloc would return larger blocks to the system, or fragment.
constexpr size_t kPooledBytes = size_t{64} << 10;
constexpr std::align_val_t kCacheLine{64};

// A mapping, or a piece of one.
struct Block {
  char* memory;
  size_t bytes;   // whole small pages
  char* mapping;  // where that begins

  bool is_before(const Block& other) const { return mapping == other.mapping && memory + bytes == other.memory; }
};

class ResultPool {
 public:
  // A block that is no more than a quarter too large, as it may be in use for long.
  void* take_whole(size_t bytes) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const size_t most = whole_huge_pages(bytes + bytes / 4);
    auto block = idle_.begin();
    while (block != idle_.end() && (block->bytes < bytes || block->bytes > most)) ++block;
    if (block == idle_.end() && !map(bytes)) return nullptr;
    if (block == idle_.end()) block = idle_.begin();
    idle_bytes_ -= block->bytes;
    in_use_.splice(in_use_.begin(), idle_, block);
    return block->memory;
  }

  // A piece of the smallest block that is large enough.
  void* take_piece(size_t bytes) {
    bytes = (bytes + small_page() - 1) / small_page() * small_page();
    const std::lock_guard<std::mutex> lock(mutex_);
    auto best = idle_.end();
    for (auto block = idle_.begin(); block != idle_.end(); ++block) {
      if (block->bytes >= bytes && (best == idle_.end() || block->bytes < best->bytes)) best = block;
    }
    if (best == idle_.end() && !map(whole_huge_pages(bytes))) return nullptr;
    if (best == idle_.end()) best = idle_.begin();
    in_use_.push_front({best->memory, bytes, best->mapping});
    idle_bytes_ -= bytes;
    best->memory += bytes;
    best->bytes -= bytes;
    if (best->bytes == 0) idle_.erase(best);
    return in_use_.front().memory;
  }

  void release(void* memory) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto is_it = [memory](const Block& block) { return block.memory == memory; };
    const auto freed = std::find_if(in_use_.begin(), in_use_.end(), is_it);
    idle_bytes_ += freed->bytes;
    for (auto block = idle_.begin(); block != idle_.end();) {  // merge adjacent pieces
      const bool before = block->is_before(*freed), after = freed->is_before(*block);
      if (before) freed->memory = block->memory;
      if (before || after) freed->bytes += block->bytes;
      block = before || after ? idle_.erase(block) : std::next(block);
    }
    // To the front, which the next call of this size takes first: these pages are the likeliest to be cached.
    idle_.splice(idle_.begin(), in_use_, freed);
    while (idle_bytes_ > kKeptBytes) {  // free the least recently used first
      idle_bytes_ -= idle_.back().bytes;
      unmap_pages(idle_.back().memory, idle_.back().bytes);
      idle_.pop_back();
    }
  }

  std::mutex& mutex() { return mutex_; }

 private:
  // Puts a new mapping before the idle ones; false if the system has no memory.
  bool map(size_t bytes) {
    char* memory = static_cast<char*>(map_huge(bytes));
    if (!memory) return false;
    idle_.push_front({memory, whole_huge_pages(bytes), memory});
    idle_bytes_ += idle_.front().bytes;
    return true;
  }

  std::mutex mutex_;
  std::list<Block> idle_, in_use_;
  size_t idle_bytes_ = 0;
};

// Never destroyed: results may outlive static objects. A fork takes the mutex first: a thread that held it would not
// exist in the child, where the mutex would stay locked.
ResultPool& pool() {
  static ResultPool* const only = [] {
    pthread_atfork([] { pool().mutex().lock(); }, [] { pool().mutex().unlock(); }, [] { pool().mutex().unlock(); });
    return new ResultPool;
  }();
  return *only;
}

}  // namespace

void* take_result(size_t bytes) { return pool().take_whole(bytes); }
void free_result(void* memory) { pool().release(memory); }

CallMemory::CallMemory(size_t bytes) : bytes_(bytes) {
  memory_ = bytes >= kPooledBytes ? pool().take_piece(bytes) : ::operator new(bytes, kCacheLine);
  if (!memory_) throw std::bad_alloc();
}

CallMemory::~CallMemory() {
  if (!memory_) return;
  if (bytes_ >= kPooledBytes) pool().release(memory_);
  else ::operator delete(memory_, kCacheLine);
}

CallMemory::CallMemory(CallMemory&& other) noexcept { *this = std::move(other); }

CallMemory& CallMemory::operator=(CallMemory&& other) noexcept {
  std::swap(memory_, other.memory_);
  std::swap(bytes_, other.bytes_);
  return *this;
}

void* CallMemory::at_least(size_t bytes) {
  if (!memory_ || bytes > bytes_) {
    *this = CallMemory();  // free before allocating more
    *this = CallMemory(bytes);
  }
  return memory_;
}

}  // namespace terarec
