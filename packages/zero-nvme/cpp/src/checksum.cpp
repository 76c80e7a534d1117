#include "zero_nvme/checksum.hpp"

#include <cstring>

#if defined(__x86_64__)
#include <nmmintrin.h>
#endif

namespace zero_nvme {

#if defined(__x86_64__)

bool has_checksum() noexcept { return __builtin_cpu_supports("sse4.2"); }

__attribute__((target("sse4.2"))) Checksum checksum(const char* data, std::size_t nbytes) noexcept {
  constexpr std::size_t kRow = 4 * sizeof(std::uint64_t);
  std::uint64_t lanes[4] = {~0u, ~0u, ~0u, ~0u};
  const char* const end = data + nbytes / kRow * kRow;
  for (; data != end; data += kRow) {
    std::uint64_t words[4];
    std::memcpy(words, data, kRow);
    lanes[0] = _mm_crc32_u64(lanes[0], words[0]);
    lanes[1] = _mm_crc32_u64(lanes[1], words[1]);
    lanes[2] = _mm_crc32_u64(lanes[2], words[2]);
    lanes[3] = _mm_crc32_u64(lanes[3], words[3]);
  }
  Checksum result;
  for (int lane = 0; lane < 4; ++lane) result[lane] = static_cast<std::uint32_t>(lanes[lane]);
  for (std::size_t i = 0; i < nbytes % kRow; ++i) {
    result[0] = _mm_crc32_u8(result[0], static_cast<unsigned char>(end[i]));
  }
  return result;
}

#else

bool has_checksum() noexcept { return false; }
Checksum checksum(const char*, std::size_t) noexcept { return {}; }

#endif

}  // namespace zero_nvme
