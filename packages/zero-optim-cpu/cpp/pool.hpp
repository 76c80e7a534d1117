// A pool of threads that runs one job after the other. Owns its threads. Does not know the work of a job.
//
// [Note: threads]  A job is a number of parts; whoever is free takes the next one:
//
//   caller     run() ──┬─ part 0 ── part 3 ── … ── waits for the last ── returns
//   worker 1   asleep ─┴─ part 1 ── part 4 ── … ── asleep
//
// At most `threads` of them work on a job, the blocked caller included. Workers start with the first job that needs
// them, sleep on a condition variable (never spin: torch's threads want the core), and keep the affinity that the
// pool was made under. A pool with `cores` has one worker on each of them and the caller sleeps: beside a GPU it is a
// thread of the host's, and the core that it runs on launches kernels. A job runs with denormals kept and rounding to nearest, whatever the caller's control word.
//
// [Note: fork]  A child has none of its parent's threads, and may have its mutex locked. State is therefore
// abandoned, not repaired: the first use in a child makes a new one. A handle of the parent's job raises there.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

namespace zero_optim {

class Job {
public:
    Job(std::int64_t parts, std::function<void(std::int64_t)> body);
    bool done() const { return finished_.load(std::memory_order_acquire) == parts_; }
    // False when `seconds` (negative: no limit) went by. Throws std::runtime_error in a forked child.
    bool wait(double seconds = -1.0);

private:
    friend class Pool;
    void participate();  // takes parts until none is left
    bool exhausted() const { return next_.load(std::memory_order_relaxed) >= parts_; }

    const std::int64_t parts_;
    const std::function<void(std::int64_t)> body_;  // must not throw
    const pid_t pid_;
    int joined_ = 0;  // guarded by the pool's mutex
    std::atomic<std::int64_t> next_{0}, finished_{0};
    std::mutex mutex_;
    std::condition_variable last_part_;
};

class Pool {
public:
    // `cores` empty: see above. Else one CPU a thread.
    explicit Pool(int threads, std::vector<int> cores = {});
    ~Pool();  // finishes all submitted jobs
    Pool(const Pool&) = delete;
    Pool& operator=(const Pool&) = delete;

    int threads() const { return threads_; }
    void run(const std::shared_ptr<Job>& job);     // returns when it is done
    void submit(const std::shared_ptr<Job>& job);  // returns at once

private:
    struct State;
    State& state();
    void enqueue(const std::shared_ptr<Job>& job, int workers_wanted, int joined);

    const int threads_;
    const std::vector<int> cores_;
    std::atomic<State*> state_;
};

}  // namespace zero_optim
