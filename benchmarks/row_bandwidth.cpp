// What random rows cost at best: gathers and read-modify-writes of rows at random places of a table on huge pages, with
// prefetching, and nothing else. Prints one JSON object with the best rate of each, in bytes of rows per second; a
// read-modify-write counts a row once. Usage: row_bandwidth <GiB of table> <repeats>
#include <omp.h>
#include <sys/mman.h>

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <algorithm>
#include <vector>

namespace {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif
typedef float Lanes __attribute__((vector_size(kLanes * 4)));

constexpr size_t kHugePage = size_t{2} << 20;
constexpr size_t kBytesPerRun = size_t{256} << 20;

volatile float sink;

double seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

char* map_table(size_t bytes) {
  char* mapped = static_cast<char*>(
      mmap(nullptr, bytes + kHugePage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  if (mapped == MAP_FAILED) exit(1);
  char* table = reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(mapped) + kHugePage - 1) & ~(kHugePage - 1));
  madvise(table, bytes, MADV_HUGEPAGE);
#pragma omp parallel for
  for (long page = 0; page < static_cast<long>(bytes / kHugePage); page++) {
    memset(table + page * kHugePage, 0, kHugePage);
  }
  return table;
}

std::vector<int64_t> random_rows(size_t count, size_t rows, uint64_t seed) {
  std::vector<int64_t> chosen(count);
  for (auto& row : chosen) {
    uint64_t z = (seed += 0x9E3779B97F4A7C15u);
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    row = static_cast<int64_t>((static_cast<unsigned __int128>(z ^ (z >> 31)) * rows) >> 64);
  }
  return chosen;
}

// Seconds to visit the rows once.
template <int kRowBytes, bool kWrite>
double visit(char* table, const std::vector<int64_t>& rows, long ahead) {
  const long count = static_cast<long>(rows.size());
  const double start = seconds();
#pragma omp parallel
  {
    Lanes sums[4] = {};
    const long threads = omp_get_num_threads(), me = omp_get_thread_num();
    const long end = count * (me + 1) / threads;
    for (long i = count * me / threads; i < end; i++) {
      if (i + ahead < end) {
        const char* next = table + rows[i + ahead] * kRowBytes;
        for (int b = 0; b < kRowBytes; b += 64) __builtin_prefetch(next + b, kWrite, 3);
      }
      Lanes* row = reinterpret_cast<Lanes*>(table + rows[i] * kRowBytes);
      for (int v = 0; v < kRowBytes / (kLanes * 4); v++) {
        if (kWrite) row[v] += 1.0f;
        else sums[v % 4] += row[v];
      }
    }
    const Lanes sum = sums[0] + sums[1] + sums[2] + sums[3];
    sink = sum[0];
  }
  return seconds() - start;
}

// The best rate over prefetch distances.
template <int kRowBytes, bool kWrite>
double best_rate(char* table, size_t bytes, int threads, int repeats) {
  omp_set_num_threads(threads);
  double best = 0;
  for (int repeat = 0; repeat < repeats; repeat++) {
    const auto rows = random_rows(kBytesPerRun / kRowBytes, bytes / kRowBytes, repeat);
    for (const long ahead : {4, 8, 16, 24, 48}) {
      best = std::max(best, kBytesPerRun / visit<kRowBytes, kWrite>(table, rows, ahead));
    }
  }
  return best;
}

template <int kRowBytes>
void print_rates(char* table, size_t bytes, int threads, int repeats, const char* last) {
  printf("  \"gather_%d_bytes_%d_threads\": %.4g,\n", kRowBytes, threads,
         best_rate<kRowBytes, false>(table, bytes, threads, repeats));
  printf("  \"modify_%d_bytes_%d_threads\": %.4g%s\n", kRowBytes, threads,
         best_rate<kRowBytes, true>(table, bytes, threads, repeats), last);
}

}  // namespace

int main(int count, char** arguments) {
  const size_t bytes = static_cast<size_t>(count > 1 ? atof(arguments[1]) * 1073741824.0 : 4.0 * 1073741824.0);
  const int repeats = count > 2 ? atoi(arguments[2]) : 5;
  const int all = omp_get_max_threads();
  char* table = map_table(bytes / kHugePage * kHugePage);
  printf("{\n");
  if (all > 1) {
    print_rates<512>(table, bytes, 1, repeats, ",");
    print_rates<256>(table, bytes, 1, repeats, ",");
  }
  print_rates<512>(table, bytes, all, repeats, ",");
  print_rates<256>(table, bytes, all, repeats, "");
  printf("}\n");
}
