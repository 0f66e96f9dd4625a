// SPDX-License-Identifier: Apache-2.0
#include "common/platform.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/uio.h>
#include <unistd.h>

#include <cstdint>
#include <cstring>

#if defined(__APPLE__)
#include <mach-o/dyld.h>
#else
#include <link.h>
#endif
#if defined(__linux__) && defined(__aarch64__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

namespace terarec {
namespace {

constexpr int kMap = MAP_PRIVATE | MAP_ANONYMOUS;
#if defined(MAP_NORESERVE)
constexpr int kReserve = kMap | MAP_NORESERVE;
#else
constexpr int kReserve = kMap;
#endif

// mmap of whole huge pages, aligned to them; null if the system has no memory.
void* map_aligned(size_t bytes, int protection, int flags) {
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

bool bind(OpenMpRuntime& runtime, void* library) {
  auto parallel = reinterpret_cast<decltype(runtime.parallel)>(dlsym(library, "GOMP_parallel"));
  if (!parallel) return false;
  Dl_info info{};
  dladdr(reinterpret_cast<void*>(parallel), &info);
  runtime = {parallel, info.dli_fname ? info.dli_fname : "?"};
  return true;
}

// Binds `path` if it is a loaded OpenMP runtime.
bool bind_loaded(OpenMpRuntime& runtime, const char* path) {
  if (!strstr(path, "libgomp") && !strstr(path, "libomp") && !strstr(path, "libiomp5")) return false;
  void* library = dlopen(path, RTLD_LAZY | RTLD_NOLOAD);
  return library && bind(runtime, library);
}

}  // namespace

size_t small_page() {
  static const size_t bytes = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  return bytes;
}

void* map_huge(size_t bytes) {
  void* memory = map_aligned(bytes, PROT_READ | PROT_WRITE, kMap);
  // The incomplete huge page at the end is left out: it would allocate memory that is not used.
  if (memory && bytes >= kHugePage) advise_huge_pages(memory, bytes / kHugePage * kHugePage);
  return memory;
}

void unmap_huge(void* memory, size_t bytes) { munmap(memory, whole_huge_pages(bytes)); }

void* map_pages(size_t bytes) {
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, kMap, -1, 0);
  return memory == MAP_FAILED ? nullptr : memory;
}

void unmap_pages(void* memory, size_t bytes) { munmap(memory, bytes); }

void advise_huge_pages(void* memory, size_t bytes) {
#if defined(MADV_HUGEPAGE)
  const uintptr_t start = reinterpret_cast<uintptr_t>(memory);
  const uintptr_t begin = (start + kHugePage - 1) & ~(kHugePage - 1), end = (start + bytes) & ~(kHugePage - 1);
  if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#else
  (void)memory, (void)bytes;
#endif
}

void* reserve_memory(size_t bytes) { return map_aligned(bytes, PROT_NONE, kReserve); }

bool commit_memory(void* reserved, size_t begin, size_t end) {
  const size_t first = begin / kHugePage * kHugePage, last = whole_huge_pages(end);
  char* memory = static_cast<char*>(reserved) + first;
  if (mprotect(memory, last - first, PROT_READ | PROT_WRITE) != 0) return false;
  advise_huge_pages(memory, last - first);
  return true;
}

void discard_memory(void* reserved, size_t begin, size_t end) {
#if defined(__linux__)
  const size_t first = (begin + small_page() - 1) / small_page() * small_page(), last = end / small_page() * small_page();
  if (first < last) madvise(static_cast<char*>(reserved) + first, last - first, MADV_DONTNEED);
#else
  (void)reserved, (void)begin, (void)end;
#endif
}

// A library that was loaded without RTLD_GLOBAL is not in the global scope, but it is in the list of objects.
OpenMpRuntime find_openmp() {
  OpenMpRuntime runtime;
  if (bind(runtime, RTLD_DEFAULT)) return runtime;
#if defined(__APPLE__)
  for (uint32_t i = 0; i < _dyld_image_count(); i++) {
    if (bind_loaded(runtime, _dyld_get_image_name(i))) break;
  }
#else
  dl_iterate_phdr(
      [](dl_phdr_info* object, size_t, void* found) -> int {
        return bind_loaded(*static_cast<OpenMpRuntime*>(found), object->dlpi_name);
      },
      &runtime);
#endif
  return runtime;
}

#if defined(__APPLE__)
int open_direct(const char* path, int flags) {
  const int descriptor = open(path, flags, 0666);
  if (descriptor >= 0) fcntl(descriptor, F_NOCACHE, 1);
  return descriptor;
}

bool flush_file(int descriptor) { return fcntl(descriptor, F_FULLFSYNC) == 0 || fsync(descriptor) == 0; }
#else
int open_direct(const char* path, int flags) { return open(path, flags | O_DIRECT, 0666); }

bool flush_file(int descriptor) { return fdatasync(descriptor) == 0; }
#endif

#if defined(POSIX_FADV_RANDOM)
void advise_random_reads(int descriptor) { posix_fadvise(descriptor, 0, 0, POSIX_FADV_RANDOM); }
#else
void advise_random_reads(int) {}
#endif

#if defined(RWF_NOWAIT)
int64_t read_cached(int descriptor, void* to, size_t bytes, int64_t offset) {
  const iovec part{to, bytes};
  return preadv2(descriptor, &part, 1, offset, RWF_NOWAIT);
}
#else
int64_t read_cached(int, void*, size_t, int64_t) { return -1; }
#endif

#if defined(__x86_64__)
bool cpu_has_crc32c() { return __builtin_cpu_supports("sse4.2"); }
#elif defined(__linux__) && defined(__aarch64__)
bool cpu_has_crc32c() { return (getauxval(AT_HWCAP) & HWCAP_CRC32) != 0; }
#else
bool cpu_has_crc32c() { return true; }  // every processor of Apple's
#endif

#if defined(__x86_64__)
bool cpu_has_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}

bool cpu_has_avx512() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}

bool cpu_has_avx512_bf16() { return cpu_has_avx512() && __builtin_cpu_supports("avx512bf16"); }
#else
bool cpu_has_avx2() { return false; }
bool cpu_has_avx512() { return false; }
bool cpu_has_avx512_bf16() { return false; }
#endif

}  // namespace terarec
