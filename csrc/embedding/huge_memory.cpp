#include "embedding/huge_memory.h"

#include <sys/mman.h>

#include <cstdint>

#include "common/parallel.h"

namespace terarec {

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
  // Advice: if refused, ordinary pages do. So do they for the end, which would else take memory that nobody uses.
  if (memory && bytes >= kHugePage) madvise(memory, bytes / kHugePage * kHugePage, MADV_HUGEPAGE);
#endif
  return memory;
}

void unmap_huge(void* memory, size_t bytes) { munmap(memory, whole_huge_pages(bytes)); }

void touch_pages(void* memory, size_t bytes, int threads) {
  const int64_t pages = static_cast<int64_t>(whole_huge_pages(bytes) / kHugePage);
  parallel_for(threads, pages, [&](int64_t page) {
    const size_t begin = page * kHugePage, end = begin + kHugePage < bytes ? begin + kHugePage : bytes;
    for (size_t at = begin; at < end; at += kSmallPage) static_cast<volatile char*>(memory)[at] = 0;
  });
}

}  // namespace terarec
