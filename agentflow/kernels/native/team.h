// A team of threads that runs one loop at a time, divided into pieces; each free thread takes the next piece.
//
// A loop waits only for threads that have a piece: if the system runs another process on a core, the other threads take
// the remaining pieces. Between loops the threads spin; after SPIN_PAUSES without work they sleep until the next loop.
//
// A job is a sequence of loops that one of these threads runs, so that the caller can do other work before it joins the
// team.
//
// An exception on any thread is rethrown to the caller: by `loop` when all pieces are done, for a job by `finish`. If a
// thread cannot be started, the team works with the threads that it has.
#pragma once

#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <immintrin.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <exception>
#include <functional>
#include <mutex>
#include <thread>
#include <utility>

namespace agentflow {

class Team {
  public:
    static constexpr int MAX_THREADS = 64;
    static constexpr int64_t ONE_BY_ONE = 0;

    // Sets the number of threads that run a loop, including the caller. Returns how many of the number set before could
    // not be started.
    int set_num_threads(int num) {
        num_threads_ = std::clamp(num, 1, MAX_THREADS);
        return num_refused_.exchange(0);
    }
    int num_threads() const { return num_threads_; }

    // Divides 0 to num into pieces, calls body(first, end, thread) for each, and returns when all are done. Pieces
    // become smaller towards the end, down to `least`; with ONE_BY_ONE, each has size 1. Rethrows the first exception
    // of a body. The caller must hold `in_use`.
    template <class Body>
    void loop(int64_t num, int64_t least, const Body& body) {
        if (num <= 0) return;
        if (num_threads_ == 1 || num <= std::max<int64_t>(least, 1)) {
            body(0, num, 0);
            return;
        }
        start_workers();
        const uint32_t epoch = epoch_ + 1;
        epoch_ = epoch;
        Loop& made = loops_[epoch % 2];
        made.call.store([](const void* b, int64_t first, int64_t end, int thread) {
            (*static_cast<const Body*>(b))(first, end, thread);
        }, std::memory_order_relaxed);
        made.body.store(&body, std::memory_order_relaxed);
        made.num.store(num, std::memory_order_relaxed);
        made.least.store(least, std::memory_order_relaxed);
        num_done_.store(0, std::memory_order_relaxed);
        next_.store(uint64_t(epoch) << 32);
        if (num_asleep_.load() > 0) wake();
        work(epoch, 0);
        for (int pauses = 0; num_done_.load(std::memory_order_acquire) < num; pauses++) {
            if (pauses < YIELD_PAUSES) _mm_pause();
            else sched_yield();
        }
        if (has_failed_.load(std::memory_order_relaxed)) {
            has_failed_.store(false, std::memory_order_relaxed);
            std::rethrow_exception(std::exchange(failure_, nullptr));
        }
    }

    // Starts `job`, which may call `loop`, on another thread; without another thread, `finish` runs it. The caller must
    // hold `in_use` and call `finish`.
    void start(std::function<void()> job) {
        job_ = std::move(job);
        start_workers();
        is_elsewhere_ = num_threads_ > 1 && num_workers_ > 0;
        if (!is_elsewhere_) return;
        is_finished_.store(false);
        is_started_.store(true);
        if (num_asleep_.load() > 0) wake();
    }

    // Runs pieces of the job's loops until the job is done, and rethrows its exception.
    void finish() {
        if (!is_elsewhere_) return job_();
        serve(1, [this] { return is_finished_.load(); });
        if (job_failure_) std::rethrow_exception(std::exchange(job_failure_, nullptr));
    }

    // Held during `loop`, or from `start` to `finish`: one forward pass runs at a time.
    std::mutex in_use;

    // For the child after a fork, which has none of the threads.
    void forget_workers() {
        num_workers_ = 0;
        num_asleep_.store(0);
        is_started_.store(false);
        has_failed_.store(false);
        failure_ = job_failure_ = nullptr;
        new (&in_use) std::mutex;
    }

  private:
    static constexpr int SPIN_PAUSES = 4000;   // 50 to 200 microseconds
    static constexpr int YIELD_PAUSES = 20000;

    struct Loop {
        std::atomic<void (*)(const void*, int64_t, int64_t, int)> call;
        std::atomic<const void*> body;
        std::atomic<int64_t> num, least;
    };

    // Runs pieces of loop `epoch` until none is left. `next_` holds the epoch and the next index in one word, so that
    // a late thread cannot take a piece of a later loop by mistake.
    void work(uint32_t epoch, int thread) {
        const Loop& taken = loops_[epoch % 2];
        uint64_t seen = next_.load();
        while (uint32_t(seen >> 32) == epoch) {
            const int64_t first = uint32_t(seen);
            const int64_t num = taken.num.load(std::memory_order_relaxed);
            const int64_t least = taken.least.load(std::memory_order_relaxed);
            if (first >= num) return;
            const auto call = taken.call.load(std::memory_order_relaxed);
            const void* body = taken.body.load(std::memory_order_relaxed);
            const int64_t share = least == ONE_BY_ONE ? 1 : (num - first) / (2 * num_threads_);
            const int64_t size = std::max<int64_t>(least, share);
            const int64_t end = std::min(num, first + size);
            if (!next_.compare_exchange_weak(seen, uint64_t(epoch) << 32 | uint64_t(end))) continue;
            try {
                call(body, first, end, thread);
            } catch (...) {
                if (!has_failed_.exchange(true)) failure_ = std::current_exception();
            }
            num_done_.fetch_add(end - first, std::memory_order_release);
            seen = next_.load();
        }
    }

    // Runs pieces of loops as `thread` until is_over().
    template <class IsOver>
    void serve(int thread, const IsOver& is_over) {
        uint32_t done = uint32_t(next_.load() >> 32) - 1;
        for (int pauses = 0; !is_over();) {
            const uint32_t epoch = uint32_t(next_.load(std::memory_order_acquire) >> 32);
            if (epoch != done) {
                if (thread < num_threads_) work(epoch, thread);
                done = epoch;
                pauses = 0;
            } else if (pauses++ < SPIN_PAUSES) {
                _mm_pause();
            } else {
                sleep(epoch, is_over);
                pauses = 0;
            }
        }
    }

    template <class IsOver>
    void sleep(uint32_t epoch, const IsOver& is_over) {
        const uint32_t ticket = wakes_.load();
        num_asleep_.fetch_add(1);
        if (uint32_t(next_.load() >> 32) == epoch && !is_over()) futex(FUTEX_WAIT_PRIVATE, ticket);
        num_asleep_.fetch_sub(1);
    }

    // The main function of a worker. Worker 1 also runs jobs; `finish` then runs its pieces on the caller's thread.
    void live(int thread) {
        for (;;) {
            serve(thread, [&] { return thread == 1 && is_started_.load(); });
            is_started_.store(false);
            try {
                job_();
            } catch (...) {
                job_failure_ = std::current_exception();
            }
            is_finished_.store(true);
            if (num_asleep_.load() > 0) wake();
        }
    }

    void wake() {
        wakes_.fetch_add(1);
        futex(FUTEX_WAKE_PRIVATE, MAX_THREADS);
    }

    void futex(int operation, uint32_t value) {
        syscall(SYS_futex, reinterpret_cast<uint32_t*>(&wakes_), operation, value, nullptr, nullptr, 0);
    }

    void start_workers() {
        try {
            for (; num_workers_ < num_threads_ - 1; num_workers_++) {
                std::thread([this, thread = num_workers_ + 1] { live(thread); }).detach();
            }
        } catch (const std::exception&) {  // no thread or no memory; the next set_num_threads allows another try
            num_refused_ = num_threads_ - 1 - num_workers_;
            num_threads_ = num_workers_ + 1;
        }
    }

    alignas(64) std::atomic<uint64_t> next_{0};
    alignas(64) std::atomic<int64_t> num_done_{0};
    alignas(64) std::atomic<uint32_t> wakes_{0};
    std::atomic<int> num_asleep_{0};
    Loop loops_[2] = {};
    std::function<void()> job_;
    std::exception_ptr failure_, job_failure_;  // of a loop's first failing piece; of the job
    std::atomic<bool> has_failed_{false};
    bool is_elsewhere_ = false;
    std::atomic<bool> is_started_{false}, is_finished_{true};
    uint32_t epoch_ = 0;
    std::atomic<int> num_threads_{1}, num_refused_{0};
    int num_workers_ = 0;
};

// Never destroyed, as its threads outlive main.
inline Team& team() {
    static Team* const the_team = [] {
        Team* made = new Team;
        pthread_atfork(nullptr, nullptr, [] { team().forget_workers(); });
        return made;
    }();
    return *the_team;
}

}  // namespace agentflow
