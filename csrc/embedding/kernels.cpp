#include "embedding/kernels.h"

#include <atomic>
#include <cstring>

#include "common/cpu.h"

namespace terarec {
namespace {

const Kernels* best() {
#if defined(__x86_64__)
  if (cpu_has_avx512()) return &kAvx512Kernels;
  if (cpu_has_avx2()) return &kAvx2Kernels;
#endif
  return &kGenericKernels;
}

std::atomic<const Kernels*> selected{best()};

}  // namespace

const Kernels& kernels() { return *selected.load(std::memory_order_relaxed); }

bool select_kernels(const char* name) {
  const Kernels* found = nullptr;
  if (!strcmp(name, "auto")) found = best();
  if (!strcmp(name, kGenericKernels.name)) found = &kGenericKernels;
#if defined(__x86_64__)
  if (!strcmp(name, kAvx2Kernels.name) && cpu_has_avx2()) found = &kAvx2Kernels;
  if (!strcmp(name, kWideKernels.name) && cpu_has_avx2()) found = &kWideKernels;
  if (!strcmp(name, kAvx512Kernels.name) && cpu_has_avx512()) found = &kAvx512Kernels;
#endif
  if (found) selected.store(found, std::memory_order_relaxed);
  return found != nullptr;
}

}  // namespace terarec
