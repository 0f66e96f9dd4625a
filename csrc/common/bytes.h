// SPDX-License-Identifier: Apache-2.0

// Copies of bytes that may be none.
#pragma once

#include <cstddef>
#include <cstring>

namespace terarec {

// memcpy for what may be empty: that takes no null pointer, which an empty vector or text may have.
inline void copy_bytes(void* to, const void* from, size_t bytes) {
  if (bytes) memcpy(to, from, bytes);
}

}  // namespace terarec
