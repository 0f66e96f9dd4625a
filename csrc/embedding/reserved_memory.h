// Address space that gets its memory by and by, so that what lies in it grows without moving.
#pragma once

#include <cstddef>

namespace terarec {

// Address space for `bytes`, aligned to 2 MiB and without memory, to be given back with unmap_huge; null if the system
// refuses it.
void* reserve_memory(size_t bytes);

// Makes the bytes [begin, end) of what lies at `reserved` readable, writable and zero; those that have been so keep
// their values. The system gives each page its memory when it is first touched. False if it refuses.
bool commit_memory(void* reserved, size_t begin, size_t end);

}  // namespace terarec
