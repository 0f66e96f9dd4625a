// Memory on huge pages.
#pragma once

#include <cstddef>

namespace terarec {

constexpr size_t kHugePage = size_t{2} << 20;
constexpr size_t kSmallPage = 4096;

inline size_t whole_huge_pages(size_t bytes) { return (bytes + kHugePage - 1) / kHugePage * kHugePage; }

// mmap of whole huge pages, aligned to them, with its protection and flags; null if the system refuses.
void* map_huge_aligned(size_t bytes, int protection, int flags);

// `bytes` zeroed bytes, aligned to 2 MiB, on whole huge pages and for the rest small ones; null if the system refuses.
void* map_huge(size_t bytes);
void unmap_huge(void* memory, size_t bytes);

// Writes to each page of fresh memory once, in parallel, so that pages lie near the cores that touch them.
void touch_pages(void* memory, size_t bytes, int threads);

}  // namespace terarec
