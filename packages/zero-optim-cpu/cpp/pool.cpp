#include "pool.hpp"

#include <pthread.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <deque>
#include <stdexcept>
#include <thread>
#include <utility>
#include <vector>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace zero_optim {
namespace {

// Round to nearest, denormals kept, for its lifetime.
class FloatControl {
public:
#if defined(__x86_64__)
    FloatControl() : saved_(_mm_getcsr()) { _mm_setcsr(0x1f80); }
    ~FloatControl() { _mm_setcsr(saved_); }

private:
    unsigned saved_;
#elif defined(__aarch64__)
    FloatControl() {
        asm volatile("mrs %0, fpcr" : "=r"(saved_));
        asm volatile("msr fpcr, %0" : : "r"(std::uint64_t(0)));
    }
    ~FloatControl() { asm volatile("msr fpcr, %0" : : "r"(saved_)); }

private:
    std::uint64_t saved_ = 0;
#endif
};

}  // namespace

Job::Job(std::int64_t parts, std::function<void(std::int64_t)> body)
    : parts_(parts), body_(std::move(body)), pid_(getpid()) {}

void Job::participate() {
    const FloatControl control;
    for (;;) {
        const std::int64_t part = next_.fetch_add(1, std::memory_order_relaxed);
        if (part >= parts_) return;
        body_(part);
        if (finished_.fetch_add(1, std::memory_order_acq_rel) + 1 == parts_) {
            const std::lock_guard<std::mutex> lock(mutex_);
            last_part_.notify_all();
        }
    }
}

bool Job::wait(double seconds) {
    if (done()) return true;
    if (getpid() != pid_) {
        throw std::runtime_error("this update was started before a fork, by process " + std::to_string(pid_) +
                                 "; wait for it there");
    }
    std::unique_lock<std::mutex> lock(mutex_);
    const auto is_done = [this] { return done(); };
    if (seconds < 0.0) {
        last_part_.wait(lock, is_done);
        return true;
    }
    return last_part_.wait_for(lock, std::chrono::duration<double>(std::min(seconds, 1e9)), is_done);
}

struct Pool::State {
    std::mutex mutex;
    std::condition_variable work;
    std::deque<std::shared_ptr<Job>> queue;
    std::vector<std::thread> workers;
    bool stopping = false;
    const pid_t pid = getpid();
    cpu_set_t affinity;
    bool has_affinity = false;

    // The first job that has parts left and room for another thread. Drops exhausted jobs.
    std::shared_ptr<Job> take(int threads) {
        queue.erase(std::remove_if(queue.begin(), queue.end(), [](const auto& job) { return job->exhausted(); }),
                    queue.end());
        for (const auto& job : queue) {
            if (job->joined_ < threads) {
                ++job->joined_;
                return job;
            }
        }
        return nullptr;
    }

    // Binds a worker before the call that started it returns, whether or not the worker has run yet. `core` negative:
    // anywhere that the pool may be.
    void bind(std::thread& worker, int core) {
        if (core >= 0) {
            cpu_set_t one;
            CPU_ZERO(&one);
            CPU_SET(core, &one);
            pthread_setaffinity_np(worker.native_handle(), sizeof one, &one);
        } else if (has_affinity) {
            pthread_setaffinity_np(worker.native_handle(), sizeof affinity, &affinity);
        }
    }

    void work_until_stopped(int threads) {
        std::unique_lock<std::mutex> lock(mutex);
        for (;;) {
            std::shared_ptr<Job> job = take(threads);
            if (job != nullptr) {
                lock.unlock();
                job->participate();
                job.reset();
                lock.lock();
            } else if (stopping) {
                return;
            } else {
                work.wait(lock);
            }
        }
    }
};

Pool::Pool(int threads, std::vector<int> cores) : threads_(threads), cores_(std::move(cores)), state_(new State) {
    State& s = *state_.load();
    s.has_affinity = sched_getaffinity(0, sizeof s.affinity, &s.affinity) == 0;
}

Pool::~Pool() {
    State* s = state_.load();
    if (s->pid != getpid()) return;  // [Note: fork]
    {
        const std::lock_guard<std::mutex> lock(s->mutex);
        s->stopping = true;
    }
    s->work.notify_all();
    for (std::thread& worker : s->workers) worker.join();
    delete s;
}

Pool::State& Pool::state() {
    State* s = state_.load();
    if (s->pid == getpid()) return *s;
    State* fresh = new State;
    fresh->affinity = s->affinity;
    fresh->has_affinity = s->has_affinity;
    if (!state_.compare_exchange_strong(s, fresh)) delete fresh;
    return *state_.load();
}

void Pool::enqueue(const std::shared_ptr<Job>& job, int workers_wanted, int joined) {
    State& s = state();
    {
        const std::lock_guard<std::mutex> lock(s.mutex);
        while (int(s.workers.size()) < workers_wanted) {
            const int core = cores_.empty() ? -1 : cores_[s.workers.size() % cores_.size()];
            s.workers.emplace_back([this, &s] { s.work_until_stopped(threads_); });
            s.bind(s.workers.back(), core);
        }
        job->joined_ = joined;
        s.queue.push_back(job);
    }
    if (workers_wanted == 1) s.work.notify_one();
    else s.work.notify_all();
}

void Pool::run(const std::shared_ptr<Job>& job) {
    if (cores_.empty()) {
        const int helpers = int(std::min<std::int64_t>(threads_, job->parts_)) - 1;
        if (helpers > 0) enqueue(job, helpers, 1);
        job->participate();
    } else {
        submit(job);
    }
    job->wait();
}

void Pool::submit(const std::shared_ptr<Job>& job) {
    if (job->parts_ > 0) enqueue(job, int(std::min<std::int64_t>(threads_, job->parts_)), 0);
}

}  // namespace zero_optim
