// Memory on huge pages: of arenas, and of large results, which is kept and handed out again.
#pragma once

#include <cstddef>

namespace terarec {

constexpr size_t kHugePage = size_t{2} << 20;

inline size_t whole_huge_pages(size_t bytes) { return (bytes + kHugePage - 1) / kHugePage * kHugePage; }

// mmap of whole huge pages, aligned to them, with its protection and flags; null if the system refuses.
void* map_huge_aligned(size_t bytes, int protection, int flags);

// At least `bytes` zeroed bytes, aligned to 2 MiB; null if the system refuses them.
void* map_huge(size_t bytes);
void unmap_huge(void* memory, size_t bytes);

// Writes to each page of fresh memory once, in parallel, so that pages lie near the cores that touch them.
void touch_pages(void* memory, size_t bytes, int threads);

// Memory for a result of `bytes`, its content unspecified; null if the system refuses it.
void* take_result(size_t bytes);
void give_result_back(void* memory);

// Memory for a call, its content unspecified: what is large comes from the results' memory. Throws std::bad_alloc.
class CallMemory {
 public:
  CallMemory() = default;
  explicit CallMemory(size_t bytes);
  ~CallMemory();
  CallMemory(CallMemory&& other) noexcept;
  CallMemory& operator=(CallMemory&& other) noexcept;

  void* get() const { return memory_; }

 private:
  void* memory_ = nullptr;
  bool is_pooled_ = false;
};

}  // namespace terarec
