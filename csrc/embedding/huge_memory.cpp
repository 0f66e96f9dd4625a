#include "embedding/huge_memory.h"

#include <sys/mman.h>

#include <cstdint>
#include <list>
#include <mutex>
#include <new>
#include <utility>

#include "common/parallel.h"

namespace terarec {
namespace {

// Results that nobody uses any more, kept for the next call. A mapping of 218 MB costs 85 ms of page faults where
// refilling it costs 8 ms (two Zen 3 cores, 4 KiB pages), and malloc returns blocks above 32 MiB to the system.
constexpr size_t kKeptBytes = size_t{512} << 20;

struct Block {
  void* memory;
  size_t bytes;
};

class ResultPool {
 public:
  void* take(size_t bytes) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      for (auto block = idle_.begin(); block != idle_.end(); ++block) {
        if (block->bytes < bytes || block->bytes > bytes + bytes / 4) continue;
        void* memory = block->memory;
        idle_bytes_ -= block->bytes;
        in_use_.push_back(*block);
        idle_.erase(block);
        return memory;
      }
    }
    void* memory = map_huge(bytes);
    if (!memory) return nullptr;
    const std::lock_guard<std::mutex> lock(mutex_);
    in_use_.push_back({memory, bytes});
    return memory;
  }

  void give_back(void* memory) {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (auto block = in_use_.begin(); block != in_use_.end(); ++block) {
      if (block->memory != memory) continue;
      idle_bytes_ += block->bytes;
      idle_.splice(idle_.begin(), in_use_, block);
      break;
    }
    while (idle_bytes_ > kKeptBytes) {  // the longest unused goes first
      idle_bytes_ -= idle_.back().bytes;
      unmap_huge(idle_.back().memory, idle_.back().bytes);
      idle_.pop_back();
    }
  }

 private:
  std::mutex mutex_;
  std::list<Block> idle_, in_use_;
  size_t idle_bytes_ = 0;
};

ResultPool& pool() {
  static ResultPool* const only = new ResultPool;  // never destroyed: results may outlive static objects
  return *only;
}

}  // namespace

void* map_huge_aligned(size_t bytes, int protection, int flags) {
  if (bytes > SIZE_MAX - 2 * kHugePage) return nullptr;
  const size_t size = whole_huge_pages(bytes), reserved = size + kHugePage;
  void* mapped = mmap(nullptr, reserved, protection, flags, -1, 0);
  if (mapped == MAP_FAILED) return nullptr;
  const uintptr_t start = reinterpret_cast<uintptr_t>(mapped);
  const uintptr_t aligned = (start + kHugePage - 1) / kHugePage * kHugePage;
  if (aligned > start) munmap(mapped, aligned - start);
  const uintptr_t end = start + reserved, used_end = aligned + size;
  if (end > used_end) munmap(reinterpret_cast<void*>(used_end), end - used_end);
  return reinterpret_cast<void*>(aligned);
}

void* map_huge(size_t bytes) {
  void* memory = map_huge_aligned(bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS);
#if defined(MADV_HUGEPAGE)
  if (memory) madvise(memory, whole_huge_pages(bytes), MADV_HUGEPAGE);  // advice: if refused, ordinary pages do
#endif
  return memory;
}

void unmap_huge(void* memory, size_t bytes) { munmap(memory, whole_huge_pages(bytes)); }

void touch_pages(void* memory, size_t bytes, int threads) {
  constexpr size_t kSmallPage = 4096;
  const int64_t pages = static_cast<int64_t>(whole_huge_pages(bytes) / kHugePage);
  parallel_for(threads, pages, [&](int64_t page) {
    volatile char* start = static_cast<char*>(memory) + page * kHugePage;
    for (size_t at = 0; at < kHugePage; at += kSmallPage) start[at] = 0;
  });
}

void* take_result(size_t bytes) { return pool().take(bytes); }
void give_result_back(void* memory) { pool().give_back(memory); }

CallMemory::CallMemory(size_t bytes) : is_pooled_(bytes >= kHugePage) {
  memory_ = is_pooled_ ? take_result(bytes) : ::operator new(bytes);
  if (!memory_) throw std::bad_alloc();
}

CallMemory::~CallMemory() {
  if (!memory_) return;
  if (is_pooled_) give_result_back(memory_);
  else ::operator delete(memory_);
}

CallMemory::CallMemory(CallMemory&& other) noexcept : memory_(other.memory_), is_pooled_(other.is_pooled_) {
  other.memory_ = nullptr;
}

CallMemory& CallMemory::operator=(CallMemory&& other) noexcept {
  std::swap(memory_, other.memory_);
  std::swap(is_pooled_, other.is_pooled_);
  return *this;
}

}  // namespace terarec
