"""How long an engine process may be silent: while it loads, and in each step.

A process that hangs (stopped, or in an endless load or step) keeps its socket open and sends nothing, so its
supervisor measures time. The engine announces each forward pass with its number of scheduled tokens, and
sends the next frame after the pass. ``StepPace`` derives the limit of a pass from earlier passes of the same
size.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import anyio

from agentflow.engine.messages import SIGN_OF_LIFE_S

# A step may take this many times as long as the slowest recent step of its size.
STEP_FACTOR = 20.0
# The slowest duration decays with each step, so that an outlier is forgotten after a few dozen steps.
_FADE = 0.9
# The lowest limit between two steps, even if steps have a lower one.
_BETWEEN_STEPS_S = 2 * SIGN_OF_LIFE_S


@dataclass(frozen=True, slots=True)
class Deadlines:
    """The time limits of an engine process.

    Time is measured in slices of ``slice_s``. Time in which the server itself was stopped counts as at most
    one slice.
    """

    load_s: float = 600.0  # from the start of a process until it is ready for requests
    step_s: float = 30.0  # the lowest limit of a step, even if earlier steps were fast
    # The limit of the first step of each size, which may compile kernels and capture graphs, and the highest
    # limit of any step.
    first_step_s: float = 300.0
    # A parameter for tests.
    sleep: Callable[[float], Awaitable[None]] = anyio.sleep  # noqa: TID251  to measure it is its purpose

    @property
    def slice_s(self) -> float:
        return self.step_s / 4

    async def passes(self, limit_s: float, is_over: Callable[[], bool]) -> bool:
        """Waits for ``limit_s`` and returns True. Returns False at the end of the first slice after which
        ``is_over()`` is true."""
        waited_s = 0.0
        while waited_s < limit_s:
            await self.sleep(self.slice_s)
            if is_over():
                return False
            waited_s += self.slice_s
        return True


class StepPace:
    """The durations of one process's steps, by their number of tokens rounded up to a power of two."""

    def __init__(self, deadlines: Deadlines) -> None:
        self._deadlines = deadlines
        self._slowest_s: dict[int, float] = {}
        self._size: int | None = None  # the size of the running step, if it is known
        self._since = 0.0

    def received(self, now_s: float, num_tokens: int | None) -> None:
        """Records a frame that arrived at ``now_s``: the announced step has run. ``num_tokens``: the tokens
        of the step that starts now, or None."""
        if self._size is not None:
            before_s = self._slowest_s.get(self._size, 0.0)
            self._slowest_s[self._size] = max(now_s - self._since, before_s * _FADE)
        self._size = None if num_tokens is None else (num_tokens - 1).bit_length()
        self._since = now_s

    @property
    def limit_s(self) -> float:
        """The seconds within which the next frame must arrive."""
        limits = self._deadlines
        if not self._slowest_s or (self._size is not None and self._size not in self._slowest_s):
            return limits.first_step_s
        if self._size is None:
            return max(limits.step_s, _BETWEEN_STEPS_S)
        return min(max(limits.step_s, STEP_FACTOR * self._slowest_s[self._size]), limits.first_step_s)
