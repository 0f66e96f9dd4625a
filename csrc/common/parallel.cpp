#include "common/parallel.h"

#include <dlfcn.h>
#include <link.h>

#include <atomic>
#include <cstring>
#include <exception>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace terarec {
namespace {

struct Runtime {
  void (*parallel)(void (*body)(void*), void* data, unsigned threads, unsigned flags) = nullptr;
  std::string name = "std::thread";
};

bool bind(Runtime& runtime, void* library) {
  auto parallel = reinterpret_cast<decltype(runtime.parallel)>(dlsym(library, "GOMP_parallel"));
  if (!parallel) return false;
  Dl_info info{};
  dladdr(reinterpret_cast<void*>(parallel), &info);
  runtime.parallel = parallel;
  runtime.name = std::string("openmp (") + (info.dli_fname ? info.dli_fname : "?") + ")";
  return true;
}

// A library that was loaded without RTLD_GLOBAL is not in the global scope, but it is in the list of objects.
int bind_loaded_object(dl_phdr_info* object, size_t, void* data) {
  const char* path = object->dlpi_name;
  if (!strstr(path, "libgomp") && !strstr(path, "libomp") && !strstr(path, "libiomp5")) return 0;
  void* library = dlopen(path, RTLD_LAZY | RTLD_NOLOAD);
  return library && bind(*static_cast<Runtime*>(data), library);
}

Runtime find_runtime() {
  Runtime runtime;
  if (!bind(runtime, RTLD_DEFAULT)) dl_iterate_phdr(bind_loaded_object, &runtime);
  return runtime;
}

const Runtime& runtime() {
  static const Runtime found = find_runtime();
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

// Takes units until none is left: it need not know how many threads the runtime granted.
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

const char* parallel_runtime() { return runtime().name.c_str(); }

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
