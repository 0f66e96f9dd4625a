// SPDX-License-Identifier: Apache-2.0
#include "embedding/kernels.h"

#include <atomic>
#include <cstring>

#include "common/platform.h"

namespace terarec {

// One for each compilation of isa/kernel_set.cpp; TERAREC_BASELINE_ONLY leaves out the sets of x86-64.
extern const Kernels kGenericKernels;
#if defined(__x86_64__) && !defined(TERAREC_BASELINE_ONLY)
extern const Kernels kAvx2Kernels;
extern const Kernels kAvx512Kernels;
extern const Kernels kWideKernels;
#elif defined(__aarch64__)
extern const Kernels kNeonKernels;
#endif

namespace {

struct KernelSet {
  const Kernels* kernels;
  bool (*runs)();
};

bool always() { return true; }

// Slowest first.
constexpr KernelSet kSets[] = {
    {&kGenericKernels, always},
#if defined(__x86_64__) && !defined(TERAREC_BASELINE_ONLY)
    {&kWideKernels, cpu_has_avx2},
    {&kAvx2Kernels, cpu_has_avx2},
    {&kAvx512Kernels, cpu_has_avx512},
#elif defined(__aarch64__)
    {&kNeonKernels, always},
#endif
};

const Kernels* best() {
  const Kernels* found = nullptr;
  for (const KernelSet& set : kSets) {
    if (set.runs()) found = set.kernels;
  }
  return found;
}

std::atomic<const Kernels*> selected{best()};

}  // namespace

const Kernels& kernels() { return *selected.load(std::memory_order_relaxed); }

bool select_kernels(const char* name) {
  const Kernels* found = strcmp(name, "auto") ? nullptr : best();
  for (const KernelSet& set : kSets) {
    if (!strcmp(name, set.kernels->name) && set.runs()) found = set.kernels;
  }
  if (found) selected.store(found, std::memory_order_relaxed);
  return found != nullptr;
}

const char* runnable_kernels(int index) {
  for (const KernelSet& set : kSets) {
    if (set.runs() && strcmp(set.kernels->name, "wide") && index-- == 0) return set.kernels->name;
  }
  return nullptr;
}

}  // namespace terarec
