// Sums and gathers, through shared memory, over the processes of one machine that compute a model together (tensor parallel).
//
// Each rank writes its values to its slot, waits until all ranks have done so, and reads all slots. The values are added in the
// order of the ranks, in float, and rounded once, so that all ranks compute the same bits. Each rank has two slots and alternates
// between them: it can write to a slot again only after all ranks have read it and arrived at the next barrier. So each step needs
// only one barrier.
//
// Ranks may share a processor. A waiting rank spins for SPIN_PAUSES, then yields its processor to others, then sleeps.
#pragma once

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <immintrin.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <climits>
#include <cstdint>
#include <cstring>
#include <stdexcept>

#include "simd.h"
#include "team.h"

namespace agentflow {

// Another rank has ended, or does not answer.
struct RankLost : std::runtime_error {
    using std::runtime_error::runtime_error;
};

// The function that a forward pass calls to sum over all ranks. Null: this process computes the whole model.
struct RankSum {
    // Replaces `count` values of type bf16 or float with their sums. Returns 0, or another number if a rank is lost.
    int (*add)(void* context, void* values, int64_t count, int is_bf16);
    void* context;

    explicit operator bool() const { return add != nullptr; }
};

class SharedRanks {
  public:
    static constexpr int MAX_RANKS = 64;

    // The bytes of the memory that the ranks share. It must be zeroed.
    static int64_t memory_bytes(int size, int64_t slot_bytes) { return int64_t(sizeof(Header)) + 2 * size * slot_bytes; }

    // `slot_bytes`: a multiple of 64.
    SharedRanks(void* memory, int rank, int size, int64_t slot_bytes, double limit_s)
        : header_(*static_cast<Header*>(memory)), slots_(static_cast<char*>(memory) + sizeof(Header)), rank_(rank), size_(size),
          slot_bytes_(slot_bytes), limit_s_(limit_s) {}

    // The caller must hold the team's lock.
    template <class S>
    void add(S* values, int64_t count) {
        const int64_t most = slot_bytes_ / int64_t(sizeof(S));
        for (int64_t done = 0; done < count; done += most) {
            const int64_t num = std::min(most, count - done);
            S* part = values + done;
            std::memcpy(slot(rank_), part, num * sizeof(S));
            meet();
            team().loop((num + CHUNK - 1) / CHUNK, 4, [&](int64_t first, int64_t end, int) {
                sum(part, first * CHUNK, std::min(end * CHUNK, num));
            });
            turn_ ^= 1;
        }
    }

    // Writes the matrices `part` [num_rows][widths[rank]] of all ranks next to each other to `out` of rank 0. `out` is null for the
    // other ranks.
    void gather(const float* part, int64_t num_rows, const int64_t* widths, float* out) {
        const int64_t widest = *std::max_element(widths, widths + size_), most = slot_bytes_ / int64_t(sizeof(float)) / widest;
        if (most < 1) throw std::length_error("a row is larger than a slot");
        int64_t width = 0;
        for (int i = 0; i < size_; i++) width += widths[i];
        for (int64_t done = 0; done < num_rows; done += most) {
            const int64_t num = std::min(most, num_rows - done);
            if (rank_) std::memcpy(slot(rank_), part + done * widths[rank_], num * widths[rank_] * sizeof(float));
            meet();
            int64_t at = 0;
            for (int i = 0; i < size_ && !rank_; at += widths[i++]) {
                const float* from = i ? reinterpret_cast<const float*>(slot(i)) : part + done * widths[0];
                for (int64_t t = 0; t < num; t++) {
                    std::memcpy(out + (done + t) * width + at, from + t * widths[i], widths[i] * sizeof(float));
                }
            }
            turn_ ^= 1;
        }
    }

    // Makes all ranks that wait, now or later, throw RankLost.
    void abort() {
        header_.is_aborted.store(1);
        for (int i = 0; i < size_; i++) futex(header_.ranks[i].met, FUTEX_WAKE, INT_MAX);
    }

  private:
    static constexpr int SPIN_PAUSES = 2000, YIELDS = 20;
    static constexpr int64_t CHUNK = 4096;  // values that a thread adds at a time
    static constexpr int64_t NAP_NS = 50'000'000;

    struct alignas(64) Rank {
        std::atomic<uint32_t> met;  // the number of barriers at which it has arrived
        std::atomic<uint32_t> num_asleep;  // the number of other ranks that sleep until it arrives
    };
    struct alignas(64) Header {
        std::atomic<uint32_t> is_aborted;
        Rank ranks[MAX_RANKS];
    };

    char* slot(int rank) const { return slots_ + (turn_ * size_ + rank) * slot_bytes_; }

    template <class S>
    void sum(S* out, int64_t first, int64_t end) const {
        for (int64_t k = first; k < end; k += LANES) {
            const int num = int(std::min<int64_t>(LANES, end - k));
            Vec total = load_first(reinterpret_cast<const S*>(slot(0)) + k, num);
            for (int i = 1; i < size_; i++) total = agentflow::add(total, load_first(reinterpret_cast<const S*>(slot(i)) + k, num));
            store_first(out + k, total, num);
        }
    }

    // Waits until all ranks are here.
    void meet() {
        const uint32_t now = ++num_met_;
        Rank& own = header_.ranks[rank_];
        own.met.store(now);
        if (own.num_asleep.load()) futex(own.met, FUTEX_WAKE, INT_MAX);
        for (int i = 0; i < size_; i++) {
            if (i != rank_) wait_for(header_.ranks[i], now);
        }
    }

    void wait_for(Rank& other, uint32_t now) {
        for (int tries = 0;; tries++) {
            const uint32_t met = other.met.load();
            if (int32_t(met - now) >= 0) return;
            if (header_.is_aborted.load()) throw RankLost("another rank of the model has ended");
            if (tries < SPIN_PAUSES) _mm_pause();
            else if (tries < SPIN_PAUSES + YIELDS) sched_yield();
            else return sleep_for(other, now);
        }
    }

    void sleep_for(Rank& other, uint32_t now) {
        using Clock = std::chrono::steady_clock;
        const auto began = Clock::now();
        for (;;) {
            other.num_asleep.fetch_add(1);
            const uint32_t met = other.met.load();
            const timespec nap{0, NAP_NS};
            if (int32_t(met - now) < 0 && !header_.is_aborted.load()) futex(other.met, FUTEX_WAIT, met, &nap);
            other.num_asleep.fetch_sub(1);
            if (int32_t(other.met.load() - now) >= 0) return;
            if (header_.is_aborted.load()) throw RankLost("another rank of the model has ended");
            if (std::chrono::duration<double>(Clock::now() - began).count() > limit_s_) {
                abort();
                throw RankLost("another rank of the model does not answer");
            }
        }
    }

    // Not FUTEX_PRIVATE: the waiting processes share only the memory.
    static void futex(std::atomic<uint32_t>& word, int operation, uint32_t value, const timespec* limit = nullptr) {
        syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), operation, value, limit, nullptr, 0);
    }

    Header& header_;
    char* const slots_;
    const int rank_, size_;
    const int64_t slot_bytes_;
    const double limit_s_;
    uint32_t num_met_ = 0;
    int turn_ = 0;
};

}  // namespace agentflow
