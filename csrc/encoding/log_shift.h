// ln(max(x, 1 - shift) + shift), rounded once to float.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

namespace terarec::encoding {

// Logarithms of small whole numbers come from a table: 16,384 entries are 64 KiB and cover 99 % of the integers
// of logs like Criteo's.
class LogTable {
 public:
  LogTable() : logs_(kSize) {
    for (int value = 1; value < kSize; ++value) logs_[value] = static_cast<float>(std::log(static_cast<double>(value)));
  }
  // Requires value >= 1 or NaN.
  float operator()(double value) const {
    if (value < kSize) {
      const int whole = static_cast<int>(value);
      if (static_cast<double>(whole) == value) return logs_[whole];
    }
    return static_cast<float>(std::log(value));
  }

 private:
  static constexpr int kSize = 16384;
  std::vector<float> logs_;
};

// A NaN in `values` counts as missing, which is 0.
template <typename Number>
void log_shift(const Number* values, int64_t num_values, double shift, float* out) {
  static const LogTable log_of;
  for (int64_t row = 0; row < num_values; ++row) {
    double value = static_cast<double>(values[row]);
    if (value != value) value = 0.0;
    out[row] = log_of(std::max(std::max(value, 1.0 - shift) + shift, 1.0));
  }
}

}  // namespace terarec::encoding
