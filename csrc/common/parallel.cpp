// SPDX-License-Identifier: Apache-2.0
#include "common/parallel.h"

#include <atomic>
#include <exception>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "common/platform.h"

namespace terarec {
namespace {

const OpenMpRuntime& runtime() {
  static const OpenMpRuntime found = find_openmp();
  return found;
}

struct Job {
  void (*body)(void*, int64_t);
  void* context;
  int64_t units;
  std::atomic<int64_t> next{0};
  std::mutex mutex{};
  std::exception_ptr error{};
};

// Processes units until none is left, so it does not matter how many threads the runtime granted.
void work(void* data) {
  Job& job = *static_cast<Job*>(data);
  for (;;) {
    const int64_t unit = job.next.fetch_add(1, std::memory_order_relaxed);
    if (unit >= job.units) return;
    try {
      job.body(job.context, unit);
    } catch (...) {
      std::lock_guard<std::mutex> lock(job.mutex);
      if (!job.error) job.error = std::current_exception();
      job.next.store(job.units, std::memory_order_relaxed);
    }
  }
}

void work_on_threads(int threads, Job& job) {
  std::vector<std::thread> team;
  for (int i = 1; i < threads; i++) team.emplace_back(work, &job);
  work(&job);
  for (auto& member : team) member.join();
}

}  // namespace

const char* parallel_runtime() {
  static const std::string name = runtime().parallel ? "openmp (" + runtime().path + ")" : "std::thread";
  return name.c_str();
}

void parallel_for(int threads, int64_t units, void (*body)(void*, int64_t), void* context) {
  if (threads > units) threads = static_cast<int>(units);
  if (threads <= 1) {
    for (int64_t unit = 0; unit < units; unit++) body(context, unit);
    return;
  }
  Job job{body, context, units};
  if (runtime().parallel) {
    runtime().parallel(work, &job, static_cast<unsigned>(threads), 0);
  } else {
    work_on_threads(threads, job);
  }
  if (job.error) std::rethrow_exception(job.error);
}

}  // namespace terarec
