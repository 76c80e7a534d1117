// Defines the argument and the result of a backend. No policy, no Python, no torch.
#pragma once

#include <cstddef>
#include <cstdint>

namespace zero_nvme {

enum class Op : std::uint8_t { read = 0, write = 1 };

// One read or write of one contiguous range, as the kernel sees it. The owner keeps it in place until it comes
// back in a Completion.
struct Transfer {
  Op op = Op::read;
  int fd = -1;
  char* address = nullptr;
  std::size_t nbytes = 0;
  std::uint64_t offset = 0;
};

struct Completion {
  Transfer* transfer;
  std::int64_t result;  // bytes moved, or -errno
};

}  // namespace zero_nvme
