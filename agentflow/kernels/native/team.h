// A team of threads that runs one loop at a time, divided into pieces; each free thread takes the next piece.
//
// A loop waits only for threads that have a piece: if the system runs another process on a core, the other threads take
// the remaining pieces. Between loops the threads spin; after SPIN_PAUSES without work they yield to other threads, and
// after AWAKE more they sleep until the next loop. Waking them takes part of the time between two steps.
//
// On a machine with several NUMA nodes, a loop over weights divides them among the nodes in proportion to their threads, always
// in the same way. A thread first takes the pieces of its node, then the remaining pieces of other nodes. So memory that such a
// loop touches first is on the node of the threads that read it later. The threads that the team starts stay on their node; the
// system may move the caller, which also does other work.
//
// A job is a sequence of loops that one of the team's threads runs, so that the caller can do other work before it joins the
// team.
//
// An exception on any thread is rethrown to the caller: by `loop` when all pieces are done, and by `finish` for a job. If a
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
#include <chrono>
#include <cstdint>
#include <exception>
#include <functional>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "nodes.h"

namespace agentflow {

class Team {
  public:
    explicit Team(std::vector<cpu_set_t> nodes = usable_nodes()) : nodes_(std::move(nodes)) {}

    static constexpr int MAX_THREADS = 64;
    static constexpr int64_t ONE_BY_ONE = 0;

    // Sets the number of threads that run a loop, including the caller. Returns how many threads could not be started since the
    // last call.
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
        int64_t ends[MAX_NODES];
        std::fill_n(ends, num_queues(), num);
        run(num, ends, least, body);
    }

    // Calls body(units) for sequences of units, which together cover each of `num` items in each of `num_rounds` rounds.
    // units() moves to the next unit, or returns false at the end. Each item has a home node, the same in every call for `num`
    // items.
    template <class Body>
    void loop_at_homes(int64_t num_rounds, int64_t num, const Body& body) {
        int64_t ends[MAX_NODES];  // the ends of each node's items
        divide(num, ends);
        int64_t unit_ends[MAX_NODES];
        for (int i = 0; i < num_queues(); i++) unit_ends[i] = num_rounds * ends[i];
        run(num_rounds * num, unit_ends, 1, [&](int64_t first, int64_t end, int) {
            int node = 0;
            while (unit_ends[node] <= first) node++;
            const int64_t begin = node > 0 ? ends[node - 1] : 0;
            body(Units(first - num_rounds * begin, end - num_rounds * begin, begin, ends[node] - begin));
        });
    }

    class Units {
      public:
        // Units `at` to `end` (exclusive) of one node, whose `num` items start at `begin`.
        Units(int64_t at, int64_t end, int64_t begin, int64_t num) : at_(at - 1), end_(end), begin_(begin), num_(num) {}
        bool operator()() { return ++at_ < end_; }
        int64_t round() const { return at_ / num_; }
        int64_t item() const { return begin_ + at_ % num_; }

      private:
        int64_t at_, end_, begin_, num_;
    };

    // Starts `job`, which may call `loop`, on another thread; without another thread, `finish` runs it. The caller must
    // hold `in_use` and call `finish`.
    void start(std::function<void()> job) {
        job_ = std::move(job);
        has_caller_.store(false);
        start_workers();
        is_elsewhere_ = num_threads_ > 1 && num_workers_ > 0;
        if (!is_elsewhere_) return;
        is_finished_.store(false);
        is_started_.store(true);
        if (num_asleep_.load() > 0) wake();
    }

    // Runs pieces of the job's loops until the job is done, and rethrows its exception.
    void finish() {
        has_caller_.store(true);
        if (!is_elsewhere_) return job_();
        if (num_asleep_.load() > 0) wake();  // a job may sleep in `await_caller`
        serve(1, [this] { return is_finished_.load(); });
        if (job_failure_) std::rethrow_exception(std::exchange(job_failure_, nullptr));
    }

    // Waits until the caller of `start` has called `finish`. The job can then read all that the caller wrote before. Only a job may
    // call this. If the caller is late, this sleeps, because the caller may wait for a process that needs this core.
    void await_caller() {
        const auto is_here = [this] { return has_caller_.load(); };
        for (int pauses = 0; !is_here();) {
            if (pauses++ < YIELD_PAUSES) _mm_pause();
            else sleep(epoch_, is_here);
        }
    }

    // Held during `loop`, or from `start` to `finish`: one forward pass runs at a time.
    std::mutex in_use;

    // Must be called in the child process after a fork: the child has none of the threads.
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
    static constexpr std::chrono::milliseconds AWAKE{1};
    using Clock = std::chrono::steady_clock;

    struct Loop {
        std::atomic<void (*)(const void*, int64_t, int64_t, int)> call;
        std::atomic<const void*> body;
        std::atomic<int64_t> least;
        std::atomic<int64_t> ends[MAX_NODES];  // the ends of each queue's pieces
    };

    // The pieces of a node. `next` holds the loop's epoch and the next index in one word, so that a late thread cannot take a
    // piece of a later loop by mistake.
    struct alignas(64) Queue {
        std::atomic<uint64_t> next{0};
    };

    int num_queues() const { return std::max(int(nodes_.size()), 1); }

    // Queue i gets the pieces from the end of queue i - 1 to ends[i].
    template <class Body>
    void run(int64_t num, const int64_t* ends, int64_t least, const Body& body) {
        if (num <= 0) return;
        if (num_threads_ == 1 || num <= std::max<int64_t>(least, 1)) return run_alone(ends, body);
        start_workers();
        const uint32_t epoch = epoch_ + 1;
        epoch_ = epoch;
        Loop& made = loops_[epoch % 2];
        made.call.store([](const void* b, int64_t first, int64_t end, int thread) {
            (*static_cast<const Body*>(b))(first, end, thread);
        }, std::memory_order_relaxed);
        made.body.store(&body, std::memory_order_relaxed);
        made.least.store(least, std::memory_order_relaxed);
        for (int i = 0; i < num_queues(); i++) made.ends[i].store(ends[i], std::memory_order_relaxed);
        num_done_.store(0, std::memory_order_relaxed);
        // The threads check the first queue for a new loop, so it is set last. All queues are set in each loop, so none has
        // the epoch of the loop before the previous one, whose Loop object this loop reuses.
        for (int i = num_queues() - 1; i >= 0; i--) queues_[i].next.store(uint64_t(epoch) << 32 | uint64_t(i ? ends[i - 1] : 0));
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

    template <class Body>
    void run_alone(const int64_t* ends, const Body& body) {
        for (int i = 0; i < num_queues(); i++) {
            const int64_t begin = i ? ends[i - 1] : 0;
            if (begin < ends[i]) body(begin, ends[i], 0);
        }
    }

    // Sets ends[i] to the end of node i's items.
    void divide(int64_t num, int64_t* ends) {
        if (num_divided_ != num_threads_) {
            num_divided_ = num_threads_;
            std::fill_n(num_up_to_, num_queues(), 0);
            for (int thread = 0; thread < num_divided_; thread++) num_up_to_[node_of(thread, num_divided_)]++;
            for (int i = 1; i < num_queues(); i++) num_up_to_[i] += num_up_to_[i - 1];
        }
        for (int i = 0; i < num_queues(); i++) ends[i] = num * num_up_to_[i] / num_divided_;
    }

    // The node of one of `num` threads, which are spread over all usable processors.
    int node_of(int thread, int num) const {
        if (nodes_.size() <= 1) return 0;
        int num_processors = 0;
        for (const cpu_set_t& node : nodes_) num_processors += CPU_COUNT(&node);
        int at = int(int64_t(thread) * num_processors / num), node = 0;
        while (at >= CPU_COUNT(&nodes_[node])) at -= CPU_COUNT(&nodes_[node++]);
        return node;
    }

    // The node of the processor that runs this thread.
    int node_here() const {
        const int processor = nodes_.size() > 1 ? sched_getcpu() : -1;
        for (int i = 0; processor >= 0 && i < int(nodes_.size()); i++) {
            if (CPU_ISSET(processor, &nodes_[i])) return i;
        }
        return 0;
    }

    // Runs pieces of loop `epoch` until no piece is left, first the pieces of this thread's node.
    void work(uint32_t epoch, int thread) {
        const int home = node_here();
        for (int i = 0; i < num_queues(); i++) take_pieces(epoch, thread, (home + i) % num_queues());
    }

    void take_pieces(uint32_t epoch, int thread, int queue) {
        const Loop& taken = loops_[epoch % 2];
        std::atomic<uint64_t>& next = queues_[queue].next;
        uint64_t seen = next.load();
        while (uint32_t(seen >> 32) == epoch) {
            const int64_t first = uint32_t(seen);
            const int64_t stop = taken.ends[queue].load(std::memory_order_relaxed);
            const int64_t least = taken.least.load(std::memory_order_relaxed);
            if (first >= stop) return;
            const auto call = taken.call.load(std::memory_order_relaxed);
            const void* body = taken.body.load(std::memory_order_relaxed);
            const int64_t share = least == ONE_BY_ONE ? 1 : (stop - first) / (2 * num_threads_);
            const int64_t size = std::max<int64_t>(least, share);
            const int64_t end = std::min(stop, first + size);
            if (!next.compare_exchange_weak(seen, uint64_t(epoch) << 32 | uint64_t(end))) continue;
            try {
                call(body, first, end, thread);
            } catch (...) {
                if (!has_failed_.exchange(true)) failure_ = std::current_exception();
            }
            num_done_.fetch_add(end - first, std::memory_order_release);
            seen = next.load();
        }
    }

    // Runs pieces of loops as `thread` until is_over().
    template <class IsOver>
    void serve(int thread, const IsOver& is_over) {
        uint32_t done = uint32_t(queues_[0].next.load() >> 32) - 1;
        Clock::time_point sleeps_at;
        for (int pauses = 0; !is_over();) {
            const uint32_t epoch = uint32_t(queues_[0].next.load(std::memory_order_acquire) >> 32);
            if (epoch != done) {
                if (thread < num_threads_) work(epoch, thread);
                done = epoch;
                pauses = 0;
            } else if (pauses < SPIN_PAUSES) {
                _mm_pause();
                if (++pauses == SPIN_PAUSES) sleeps_at = Clock::now() + AWAKE;
            } else if (Clock::now() < sleeps_at) {
                sched_yield();
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
        if (uint32_t(queues_[0].next.load() >> 32) == epoch && !is_over()) futex(FUTEX_WAIT_PRIVATE, ticket);
        num_asleep_.fetch_sub(1);
    }

    // The main function of a worker. Worker 1 also runs jobs; `finish` then runs its pieces on the caller's thread.
    void live(int thread) {
        if (nodes_.size() > 1) {  // if the system refuses, the thread may run on another node, more slowly
            sched_setaffinity(0, sizeof(cpu_set_t), &nodes_[node_of(thread, num_threads_)]);
        }
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

    const std::vector<cpu_set_t> nodes_;
    Queue queues_[MAX_NODES];
    int num_divided_ = 0, num_up_to_[MAX_NODES] = {};  // threads: all, and the threads up to and including each node
    alignas(64) std::atomic<int64_t> num_done_{0};
    alignas(64) std::atomic<uint32_t> wakes_{0};
    std::atomic<int> num_asleep_{0};
    Loop loops_[2] = {};
    std::function<void()> job_;
    std::exception_ptr failure_, job_failure_;  // the exceptions of a loop's first failing piece, and of the job
    std::atomic<bool> has_failed_{false};
    bool is_elsewhere_ = false;
    std::atomic<bool> is_started_{false}, is_finished_{true}, has_caller_{false};
    uint32_t epoch_ = 0;
    std::atomic<int> num_threads_{1}, num_refused_{0};
    int num_workers_ = 0;
};

// The team is never destroyed, nor is memory that its threads use: they may compute while the process ends.
inline Team& team() {
    static Team* const the_team = [] {
        Team* made = new Team;
        pthread_atfork(nullptr, nullptr, [] { team().forget_workers(); });
        return made;
    }();
    return *the_team;
}

}  // namespace agentflow
