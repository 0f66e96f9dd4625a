#include "embedding/reserved_memory.h"

#include <sys/mman.h>

#include "embedding/huge_memory.h"

namespace terarec {
namespace {

#if defined(MAP_NORESERVE)
constexpr int kReserve = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
#else
constexpr int kReserve = MAP_PRIVATE | MAP_ANONYMOUS;
#endif

}  // namespace

void* reserve_memory(size_t bytes) { return map_huge_aligned(bytes, PROT_NONE, kReserve); }

bool commit_memory(void* reserved, size_t begin, size_t end) {
  const size_t first = begin / kHugePage * kHugePage, last = whole_huge_pages(end);
  char* memory = static_cast<char*>(reserved) + first;
  if (mprotect(memory, last - first, PROT_READ | PROT_WRITE) != 0) return false;
#if defined(MADV_HUGEPAGE)
  madvise(memory, last - first, MADV_HUGEPAGE);  // advice: where it is refused, ordinary pages do
#endif
  return true;
}

}  // namespace terarec
