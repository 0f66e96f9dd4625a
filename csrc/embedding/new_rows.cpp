#include "embedding/new_rows.h"

#include <algorithm>
#include <vector>

#include "common/parallel.h"

namespace terarec {

int64_t number_new_keys(KeySpan keys, int64_t* rows, const NewRows& new_rows, int64_t most_rows, int64_t* new_keys,
                        int threads) {
  const int64_t blocks = num_blocks(keys.size);
  std::vector<int64_t> first(blocks + 1);
  parallel_for(threads, blocks, [&](int64_t block) {
    int64_t found = 0;
    for_block(block, keys.size, [&](int64_t i) { found += rows[i] == kAbsent; });
    first[block + 1] = found;
  });
  for (int64_t block = 0; block < blocks; block++) first[block + 1] += first[block];
  const int64_t fresh = std::max<int64_t>(0, first[blocks] - new_rows.num_free) * new_rows.step;
  if (new_rows.next + fresh > most_rows) return -1;
  parallel_for(threads, blocks, [&](int64_t block) {
    int64_t j = first[block];
    for_block(block, keys.size, [&](int64_t i) {
      if (rows[i] != kAbsent) return;
      if (new_keys) new_keys[j] = keys.keys[i];
      rows[i] = new_rows.row(j++);
    });
  });
  return first[blocks];
}

}  // namespace terarec
