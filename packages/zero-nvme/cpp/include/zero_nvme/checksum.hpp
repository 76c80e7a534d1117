// A checksum of a range of memory that is limited by memory, not by arithmetic. For memory: no format on disk uses it.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace zero_nvme {

bool has_checksum() noexcept;  // this processor has the instruction (SSE4.2)

// Four CRC-32C, each of every fourth 8-byte word; the bytes left over go to the first. One CRC waits three cycles for
// each word, four side by side take a word a cycle. They are not folded into one: a fold by another CRC confuses words
// that changed places between lanes. Only where has_checksum().
using Checksum = std::array<std::uint32_t, 4>;
Checksum checksum(const char* data, std::size_t nbytes) noexcept;

}  // namespace zero_nvme
