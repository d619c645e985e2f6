// How long each part of a forward takes, added up until they are asked for.
#pragma once

#include <chrono>

namespace agentflow {

// As `native_ops.PARTS` names them.
enum Part { PLAN, EMBED, NORM, QKV, ROPE, ATTENTION, OUTPUT, GATE_UP, DOWN, HEAD, CHOICE, NUM_PARTS };

inline double part_seconds[NUM_PARTS];

// Adds the time from its making to its end; two readings of a clock, about 50 nanoseconds.
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
