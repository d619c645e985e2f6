"""How long an engine process may stay silent: deadlines of loads and steps.

A process that has died closes its socket. One that hangs (stopped, a step or a load that never ends) keeps it
open and sends nothing, so the supervisor measures. The engine announces each forward pass with its number of
rows; the next frame says that it has run. What a pass may take follows from what passes of its size took
before. While nothing is owed nothing is measured, and an idle process costs nothing.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import anyio

# A step may take so many times what the slowest one of its size took lately.
STEP_FACTOR = 20.0
# Of each step the slowest one counts for less: a single outlier is forgotten after some dozens.
_FADE = 0.9


@dataclass(frozen=True, slots=True)
class Deadlines:
    """``load_s``: from the start of a process until it is ready for requests. ``step_s``: of a step at least,
    however fast others were. ``first_step_s``: of the first step of each size, which may compile kernels and
    capture graphs; also the longest that any step may take. ``sleep``: how time passes, for tests.

    All are measured in slices of ``slice_s``, of which each must pass on its own: time in which the server
    itself was stopped counts as one slice at most.
    """

    load_s: float = 600.0
    step_s: float = 30.0
    first_step_s: float = 300.0
    sleep: Callable[[float], Awaitable[None]] = anyio.sleep  # noqa: TID251  to measure it is its purpose

    @property
    def slice_s(self) -> float:
        return self.step_s / 4

    async def passes(self, limit_s: float, is_over: Callable[[], bool]) -> bool:
        """Waits for ``limit_s`` and returns True; False as soon as a slice ends with ``is_over()``."""
        waited_s = 0.0
        while waited_s < limit_s:
            await self.sleep(self.slice_s)
            if is_over():
                return False
            waited_s += self.slice_s
        return True


class StepPace:
    """What the steps of one process took, by size: numbers of rows up to the same power of two."""

    def __init__(self, deadlines: Deadlines) -> None:
        self._deadlines = deadlines
        self._slowest_s: dict[int, float] = {}
        self._size: int | None = None  # of the step that runs; None: none is known to
        self._since = 0.0

    def received(self, now_s: float, num_rows: int | None) -> None:
        """A frame came at ``now_s``: the step that was announced before has run, and with ``num_rows`` the
        next one begins."""
        if self._size is not None:
            before_s = self._slowest_s.get(self._size, 0.0)
            self._slowest_s[self._size] = max(now_s - self._since, before_s * _FADE)
        self._size = None if num_rows is None else (num_rows - 1).bit_length()
        self._since = now_s

    @property
    def limit_s(self) -> float:
        """How long the next frame may take."""
        limits = self._deadlines
        if not self._slowest_s or (self._size is not None and self._size not in self._slowest_s):
            return limits.first_step_s
        slowest_s = 0.0 if self._size is None else self._slowest_s[self._size]
        return min(max(limits.step_s, STEP_FACTOR * slowest_s), limits.first_step_s)
