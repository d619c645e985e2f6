"""What an engine tells of itself: its counters and gauges, read between two steps."""

from __future__ import annotations

import resource
import sys
from copy import deepcopy

from agentflow.engine.process.ipc import EngineStats
from agentflow.engine.scheduling.scheduler import Scheduler
from agentflow.engine.step_times import StepTimes


def engine_stats(ticket: int, model: str, scheduler: Scheduler, times: StepTimes) -> EngineStats:
    """The answer to ``Report(ticket)``."""
    memory = scheduler.memory
    counters = scheduler.counters
    return EngineStats(
        ticket=ticket,
        model=model,
        steps=counters.steps,
        prompt_tokens=counters.prompt_tokens,
        cached_tokens=counters.cached_tokens,
        cached_output_tokens=counters.cached_output_tokens,
        computed_tokens=counters.computed_tokens,
        generated_tokens=counters.generated_tokens,
        forced_tokens=counters.forced_tokens,
        evicted_tokens=counters.evicted_tokens,
        retractions=counters.retractions,
        free_slots=memory.slots.num_free,
        cached_slots=memory.cache.num_cached,
        held_slots=memory.num_held,
        total_slots=memory.slots.total,
        running=len(scheduler.running),
        waiting=len(scheduler.waiting),
        peak_resident_bytes=peak_resident_bytes(),
        step_times=deepcopy(times.phases),  # read in another thread, while this one counts on
    )


def peak_resident_bytes() -> int:
    """Largest resident memory of this process so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
