// Memory for direct I/O: huge-page mappings and aligned bounce buffers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>

namespace zero_nvme {

constexpr std::size_t kHugePage = std::size_t{2} << 20;

constexpr std::uint64_t round_down(std::uint64_t value, std::uint64_t unit) { return value / unit * unit; }
constexpr std::uint64_t round_up(std::uint64_t value, std::uint64_t unit) {
  return (value + unit - 1) / unit * unit;
}

// An anonymous mapping of its own, 2 MiB aligned, on huge pages where the kernel gives them. A forked child sees
// zeros, so that the parent's pages are never copied under a transfer. Throws std::system_error.
class HugeMapping {
 public:
  explicit HugeMapping(std::size_t nbytes);
  ~HugeMapping();
  HugeMapping(const HugeMapping&) = delete;
  HugeMapping& operator=(const HugeMapping&) = delete;

  char* data() const noexcept { return data_; }
  std::size_t nbytes() const noexcept { return nbytes_; }

 private:
  char* data_ = nullptr;
  std::size_t nbytes_;
  void* mapping_ = nullptr;
  std::size_t mapped_bytes_ = 0;
};

// A bounce buffer that grows; on huge pages once it is that large.
class Bounce {
 public:
  // nullptr when there is no memory.
  char* take(std::size_t nbytes, std::size_t alignment) noexcept;
  void release() noexcept;
  std::size_t capacity() const noexcept { return capacity_; }

 private:
  struct Free {
    void operator()(char* p) const noexcept { std::free(p); }
  };
  std::unique_ptr<char, Free> data_;
  std::size_t capacity_ = 0;
};

}  // namespace zero_nvme
