// Orders streams, host threads and tasks by a vector clock for each of them. Does not know memory.
//
// An actor's own component is its tick. It moves on at the first access after the actor has let somebody else know of
// its past, so that all accesses between two such moments share a tick: an access (a, t) happened before everything
// whose clock has at least t for a.
#pragma once

#include <string>
#include <vector>

#include "world.hpp"

namespace sim {

using Label = uint32_t;  // an operation's name, interned: "aten::mul", "copy to host"
Label label_of(const Locked&, const std::string&);
const std::string& text_of(const Locked&, Label);

Actor stream_actor(const Locked&, StreamIndex);
Actor host_actor(const Locked&);  // the calling thread's
Actor task_actor(const Locked&, const std::string& what, const Clock& starts_after);
void retire(const Locked&, Actor);  // its thread or task has ended
size_t components(const Locked&);   // of a clock

const Clock& clock_of(const Locked&, Actor);
inline uint64_t at(const Clock& clock, Actor actor) { return actor < clock.size() ? clock[actor] : 0; }
void join(Clock& into, const Clock& from);

void acquire(const Locked&, Actor, const Clock&);       // orders the actor after everything in the clock
const Clock& release(const Locked&, Actor);             // the actor's past, which others may know from now on
uint64_t tick_of_access(const Locked&, Actor, Label);   // of an access that it makes now

// The past that at least one host thread knows. The thread that drops the last reference to memory need not be the one
// that waited for its last use. The reference counts between them are edges that nobody sees, so frees use this clock.
const Clock& known_to_any_host(const Locked&);

enum class Kind { stream, host, task };
Kind kind_of(const Locked&, Actor);
std::string name_of(const Locked&, Actor, uint64_t tick);
// The last thing that `of` did which a clock with `tick` for it covers: "'aten::mul'", or "" if that is not known.
std::string last_seen(const Locked&, Actor of, uint64_t tick);

// The detector says which actors its records still name, so that the components of ended ones can be used again.
extern void (*mark_actors_in_use)(const Locked&, std::vector<bool>&);

}  // namespace sim
