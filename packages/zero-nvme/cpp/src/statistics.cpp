#include "zero_nvme/statistics.hpp"

namespace zero_nvme {

// Values below 4 have a bucket each; above, the two bits after the leading one choose among four.
int Histogram::index_of(std::uint64_t value) noexcept {
  if (value < 4) return static_cast<int>(value);
  const int exponent = 63 - __builtin_clzll(value);
  return (exponent - 1) * 4 + static_cast<int>((value >> (exponent - 2)) & 3);
}

std::uint64_t Histogram::upper_edge(int index) noexcept {
  if (index < 4) return static_cast<std::uint64_t>(index);
  const int exponent = index / 4 + 1;
  if (exponent > 63) return ~std::uint64_t{0};
  return (std::uint64_t{1} << exponent) + (static_cast<std::uint64_t>(index % 4 + 1) << (exponent - 2)) - 1;
}

void Histogram::add(std::uint64_t value) noexcept {
  counts_[index_of(value)].fetch_add(1, std::memory_order_relaxed);
  if (value > maximum()) maximum_.store(value, std::memory_order_relaxed);
}

}  // namespace zero_nvme
