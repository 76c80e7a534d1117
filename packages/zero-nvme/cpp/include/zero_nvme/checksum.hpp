// A checksum of a range of memory that is limited by memory, not by arithmetic. For memory: no format on disk uses it.
#pragma once

#include <cstddef>
#include <cstdint>

namespace zero_nvme {

bool has_checksum() noexcept;  // this processor has the instruction (SSE4.2)

// Four CRC-32C, each of every fourth 8-byte word, and the CRC-32C of the four and of the bytes left over. One CRC waits
// three cycles for each word; four side by side take a word a cycle. It finds every flipped bit, and every error
// within one word. Only where has_checksum().
std::uint32_t checksum(const char* data, std::size_t nbytes) noexcept;

}  // namespace zero_nvme
