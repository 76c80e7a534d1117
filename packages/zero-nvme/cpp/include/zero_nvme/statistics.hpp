// Counters of one path. Written by its I/O thread only, read from any thread.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>

namespace zero_nvme {

// Counts by magnitude: four buckets to the power of two. Good to 19 % over the whole range of 64 bits.
class Histogram {
 public:
  static constexpr int kBuckets = 64 * 4;
  void add(std::uint64_t value) noexcept;
  std::uint64_t maximum() const noexcept { return maximum_.load(std::memory_order_relaxed); }
  std::uint64_t bucket(int index) const noexcept { return counts_[index].load(std::memory_order_relaxed); }
  static std::uint64_t upper_edge(int index) noexcept;  // the largest value that falls in it

 private:
  static int index_of(std::uint64_t value) noexcept;
  std::array<std::atomic<std::uint64_t>, kBuckets> counts_{};
  std::atomic<std::uint64_t> maximum_{0};
};

struct Direction {
  std::atomic<std::uint64_t> bytes{0};    // the callers' bytes that arrived
  std::atomic<std::uint64_t> blocks{0};   // transfers that completed
  std::atomic<std::uint64_t> retries{0};  // short or interrupted transfers that were resumed
  std::atomic<std::uint64_t> failures{0};
  std::atomic<std::uint64_t> bounced_bytes{0};  // of bytes: copied through an aligned buffer
  Histogram latency_nanoseconds;  // of a block, from start to completion
};

struct Statistics {
  std::array<Direction, 2> direction;  // by Op
  Histogram depth;                     // blocks in flight, sampled as each block starts
};

}  // namespace zero_nvme
