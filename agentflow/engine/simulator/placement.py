"""Which of several engines takes a request, by objective.

An engine that decodes for latency within a bound on its steps has little time for prompts: each such request
costs throughput work far more on an engine that has served none than on one that serves some already (Lin et
al., "Parrot", OSDI 2024, algorithm 1). So while there is throughput work, requests with the objective
``latency`` share as few engines as keep the bound, and the other engines compute prompts at full speed.

- *latency*: of the engines that serve latency, the one with the most such requests that can still decode one
  more within the bound. If none can, a wait and a further engine are compared: on an engine that is full, the
  request waits until a row becomes free; on an engine that serves none, it takes OTHERS_LOST of the time that
  the engine spends on it from throughput work.
- *throughput*: the engine that would be the first to compute all of its throughput work and this request.
  Beside latency work an engine computes prompts in the part of a step that the bound leaves.

Without a bound, before the costs of steps are known, or if no throughput work was submitted for KEPT_S
seconds, the engine with the fewest tokens of unfinished requests takes the request.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from agentflow.engine.scheduling.step_limits import StepCost
from agentflow.engine.submit import Objective

KEPT_S = 10.0
PLANNED_PART = 0.9
DECODE_PART = 0.75
OTHERS_LOST = 0.25
LEAST_RATE = 0.01
"""An engine without a free row, or without time for prompts, counts as this part of its speed."""


@dataclass(slots=True)
class EngineLoad:
    """The unfinished requests of one engine. ``cost``: of its steps. ``max_running``: requests in a batch."""

    cost: StepCost
    max_running: int
    num_requests: int = 0
    num_urgent: int = 0  # of the objective ``latency``
    num_tokens: int = 0  # of prompts and outputs
    num_urgent_tokens: int = 0

    def add(self, objective: Objective, num_tokens: int, count: int = 1) -> None:
        """A request with ``num_tokens`` tokens of prompt and output was given to the engine."""
        self.num_requests += count
        self.num_tokens += count * num_tokens
        if objective == "latency":
            self.num_urgent += count
            self.num_urgent_tokens += count * num_tokens

    def remove(self, objective: Objective, num_tokens: int) -> None:
        """A request has ended."""
        self.add(objective, num_tokens, -1)


class Placement:
    """Chooses engines. ``target_s``: the bound on the time per output token; None: there is none."""

    def __init__(self, engines: Sequence[EngineLoad], target_s: float | None) -> None:
        self._engines = engines
        self._step_s = math.inf if target_s is None else PLANNED_PART * target_s
        self._throughput_at = -math.inf  # when throughput work came last

    def choose(self, objective: Objective, num_tokens: int, now_s: float) -> int:
        """Returns the index of the engine that takes a request with this many tokens of prompt and output."""
        if objective != "latency":
            self._throughput_at = now_s
        engines = self._engines
        knows_costs = all(engine.cost.is_known for engine in engines)
        if self._step_s == math.inf or now_s - self._throughput_at > KEPT_S or not knows_costs:
            return min(range(len(engines)), key=lambda index: engines[index].num_tokens)
        if objective == "latency":
            return min(range(len(engines)), key=lambda index: self._loss(engines[index], num_tokens))
        return min(range(len(engines)), key=lambda index: self._finish_s(engines[index], num_tokens))

    def _loss(self, engine: EngineLoad, num_tokens: int) -> tuple[float, int, int]:
        """What a latency request costs on the engine, in parts of the time that it takes."""
        others = engine.num_tokens - engine.num_urgent_tokens
        if engine.num_urgent_tokens <= others:
            return OTHERS_LOST, 0, others
        constant_s = engine.cost.decode_s(0, 0, 0)
        limit_s = constant_s + DECODE_PART * (self._step_s - constant_s)
        each_s = engine.cost.row_s((engine.num_urgent_tokens + num_tokens) // (engine.num_urgent + 1))
        most = min(float(engine.max_running), (limit_s - constant_s) / max(each_s, 1e-12))
        waits = max(0.0, engine.num_urgent + 1 - most) / max(most, 1.0)
        return waits, -engine.num_urgent, others

    def _finish_s(self, engine: EngineLoad, num_tokens: int) -> float:
        """When the engine would have computed its throughput work and this request, in seconds."""
        token_s = engine.cost.chunk_s(1, 0, is_first=False)
        part = 1.0
        if engine.num_urgent:
            decode_s = engine.cost.decode_s(engine.num_urgent, engine.num_urgent, engine.num_urgent_tokens)
            part = 1 - decode_s / self._step_s
            if engine.num_requests >= engine.max_running:
                part = 0.0
        others = engine.num_tokens - engine.num_urgent_tokens
        return (others + num_tokens) * token_s / max(part, LEAST_RATE)
