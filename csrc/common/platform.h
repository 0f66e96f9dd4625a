// SPDX-License-Identifier: Apache-2.0

// What differs between operating systems and processors: memory on huge pages, address space without memory, the OpenMP
// runtime of the process, vector instructions, files beyond POSIX. No other file depends on the system that it is
// compiled for, but rowfile/uring.cpp, which is io_uring's alone and compiles to nothing where there is none.
#pragma once

#include <cstddef>
#include <string>

namespace terarec {

constexpr size_t kHugePage = size_t{2} << 20;

inline size_t whole_huge_pages(size_t bytes) { return (bytes + kHugePage - 1) / kHugePage * kHugePage; }

// Bytes of an ordinary page: 4 KiB on x86-64, 16 KiB on Apple's processors, up to 64 KiB on other aarch64.
size_t small_page();

// `bytes` zeroed bytes, aligned to 2 MiB, on whole huge pages and for the rest small ones; null if the system has no memory.
void* map_huge(size_t bytes);

// Frees what map_huge or reserve_memory returned for `bytes`.
void unmap_huge(void* memory, size_t bytes);

// `bytes` zeroed bytes on small pages, of which they are a whole number; null if the system has no memory.
void* map_pages(size_t bytes);

// Frees whole small pages of any such memory.
void unmap_pages(void* memory, size_t bytes);

// Requests huge pages for memory; no effect on systems without such advice.
void advise_huge_pages(void* memory, size_t bytes);

// Address space for `bytes`, aligned to 2 MiB and without memory; null if the system has none.
void* reserve_memory(size_t bytes);

// Makes the bytes [begin, end) of the address space `reserved` readable, writable and zero; bytes that were committed
// before keep their values. The system allocates each page when it is first touched. False if it fails.
bool commit_memory(void* reserved, size_t begin, size_t end);

// Gives the memory of the whole pages in the committed bytes [begin, end) back to the system; they are zero when they
// are touched again, or keep their values on systems that cannot.
void discard_memory(void* reserved, size_t begin, size_t end);

// The entry point of an OpenMP runtime that starts a team: GOMP_parallel of libgomp, which libomp exports, too.
struct OpenMpRuntime {
  void (*parallel)(void (*body)(void*), void* data, unsigned threads, unsigned flags) = nullptr;  // null: none is loaded
  std::string path;
};

// The runtime that is loaded in this process.
OpenMpRuntime find_openmp();

bool cpu_has_avx2();    // AVX2, FMA and F16C
bool cpu_has_avx512();  // AVX-512 F, BW, DQ and VL
bool cpu_has_avx512_bf16();
bool cpu_has_crc32c();  // SSE 4.2, or the CRC extension of aarch64

// Opens a file past the page cache, creating it with mode 0666 if `flags` say so; -1 and errno as open(2).
int open_direct(const char* path, int flags);

// Returns once what was written to a file is on the disk, whatever the disk's own cache; false and errno on failure.
bool flush_file(int descriptor);

// Disables read-ahead of a file, on systems that support it.
void advise_random_reads(int descriptor);

// Reads the part of a file that is in the page cache, as pread(2); -1 if there is none or the system cannot tell.
int64_t read_cached(int descriptor, void* to, size_t bytes, int64_t offset);

}  // namespace terarec
