// The two allocators' answers to the detector: the bytes that it follows, and their names in a report.
#pragma once

#include "report.hpp"

namespace sim {

std::string size_text(size_t bytes);  // "20.00 MiB"
MemoryNote note_of_device_memory(const Locked&, uintptr_t);
MemoryNote note_of_host_memory(const Locked&, uintptr_t);
// Parts of [begin, end) that are pinned or registered. Other host memory is not followed: nobody sees it being freed.
void followed_host_memory(const Locked&, uintptr_t begin, uintptr_t end, std::vector<std::pair<uintptr_t, uintptr_t>>&);

}  // namespace sim
