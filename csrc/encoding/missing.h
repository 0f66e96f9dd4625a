// Which rows of a column hold no value.
#pragma once

#include <cstdint>

namespace terarec::encoding {

// A byte per row, 1 where missing; none at all if no row is.
struct MissingMask {
  const uint8_t* mask;
  bool operator[](int64_t row) const { return mask != nullptr && mask[row] != 0; }
};

}  // namespace terarec::encoding
