// Streams as the allocators use them: queueing under the lock, and events that only they wait for.
#pragma once

#include "actors.hpp"

namespace sim {

// Queues `run` on behalf of the calling host thread, which has captured the site already.
void queue(const Locked&, StreamIndex, const std::string& what, Site, const std::vector<Extent>&,
           std::function<void()> run);
// An event that orders nobody who is not told: the allocator's own.
Event quiet_event(const Locked&, StreamIndex);
bool happened(const Event&);
void wait_until_idle();  // all streams of all devices, without an edge for the caller

}  // namespace sim
