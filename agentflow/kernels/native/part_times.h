// The time spent in each part of a forward pass, summed until af_part_seconds reads it.
#pragma once

#include <chrono>

namespace agentflow {

// In the order of `native_ops.team.PARTS`.
enum Part { PLAN, EMBED, NORM, QKV, ROPE, ATTENTION, OUTPUT, GATE_UP, DOWN, HEAD, CHOICE, RANKS, NUM_PARTS };

inline double part_seconds[NUM_PARTS];

// Adds the time of its scope to a part. The two clock readings take about 50 nanoseconds.
class Timed {
  public:
    explicit Timed(Part part) : part_(part), began_(Clock::now()) {}
    ~Timed() { part_seconds[part_] += std::chrono::duration<double>(Clock::now() - began_).count(); }
    Timed(const Timed&) = delete;

  private:
    using Clock = std::chrono::steady_clock;
    Part part_;
    Clock::time_point began_;
};

}  // namespace agentflow
