"""The encodings of images: which media have features, and which slices of encodings a step runs.

Features are made when the first request needs them: when it is its turn, and the keys and values of the
image's tokens are not cached. The request then waits in the queue, without slots. The features of later
images are made when the request has computed everything before them. Encodings belong to media, not to
requests: several requests share one, and one that no request waits for any more is continued for the next
request.

Features stay within a budget of bytes. The least recently used ones go first, then unfinished encodings.
Features that a running request needs next stay. As long as a request wants it, so does an encoding that had a
slice in the last ``GRACE_STEPS`` steps with unfinished requests with media, and so do its features until they
are used. Otherwise two requests might drop each other's encodings forever. Only a medium that exceeds the
budget alone may exceed it.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable

from agentflow.engine.media_run import MediaRun, PreparedMedium
from agentflow.engine.request import Request
from agentflow.engine.runner import MediaEncoding, MediaRunner

GRACE_STEPS = 64
NUM_TIMES = 9
"""The time of a slice is learned from this many encodings of a step."""
MOST_OF_PLANNED = 1.2
"""A slice begins if it probably ends within this many times the time that was planned for all."""


class MediaWork:
    """The media of one engine.

    ``wanted``: the unfinished requests that have each medium. Without any, no step plans anything.
    ``completed``: the media whose features were made since the scheduler last took them out.
    ``planned``: the slices of each encoding that the step being planned runs. ``num_encoded``: media whose
    features were made. ``num_evicted``: media whose features, or parts of them, were dropped for room.
    Slices differ in their time, and other requests wait for the step: slices that would end long after the
    planned time run later.

    Args:
        runner: Encodes the media.
        most_bytes: The budget for features.
        clock: Seconds.
    """

    def __init__(
        self,
        runner: MediaRunner,
        most_bytes: float,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._runner = runner
        self._most_bytes = most_bytes
        self._clock = clock
        self._media: dict[str, PreparedMedium] = {}
        # Features in the order of their last use, with their bytes; unfinished ones are also in ``_begun``.
        self._features: OrderedDict[str, int] = OrderedDict()
        self._begun: dict[str, MediaEncoding] = {}
        self._used: set[str] = set()  # by the tokens of the step being planned
        self._failed: dict[str, Exception] = {}  # encodings that could not begin
        self.wanted: dict[str, dict[Request, None]] = {}
        self.completed: list[str] = []
        self._num_steps = 0
        self._fresh: dict[str, int] = {}  # the step of the last slice, until the features are used
        self._left_over: Counter[str] = Counter()  # slices that were planned and not run
        self._times: deque[float] = deque(maxlen=NUM_TIMES)  # the seconds of an operation
        self.planned: dict[str, int] = {}
        self.feature_bytes = 0
        self.pixel_bytes = 0
        self.num_encoded = self.num_evicted = 0

    def __contains__(self, identity: str) -> bool:
        """Whether the engine has the content of the medium."""
        return identity in self._media

    def add(self, medium: PreparedMedium) -> None:
        """The engine has the content of a medium."""
        self.drop(medium.identity)
        self._media[medium.identity] = medium
        self.pixel_bytes += medium.nbytes

    def drop(self, identity: str) -> None:
        """No request needs the content any more. Complete features stay until their room is needed."""
        medium = self._media.pop(identity, None)
        if medium is not None:
            self.pixel_bytes -= medium.nbytes
        self._failed.pop(identity, None)
        if identity in self._begun:
            self._forget(identity)

    def arrived(self, request: Request) -> None:
        """A request with media waits for the first time."""
        for run in request.media.runs:
            self.wanted.setdefault(run.identity, {})[request] = None

    def departed(self, request: Request) -> None:
        """A request has ended. May be repeated."""
        for run in request.media.runs:
            requests = self.wanted.get(run.identity, {})
            requests.pop(request, None)
            if not requests:
                self.wanted.pop(run.identity, None)
        if not self.wanted:
            self.planned.clear()
            self._used.clear()
            self._failed.clear()
            self.completed.clear()

    def start_step(self) -> None:
        """A step is being planned."""
        self._num_steps += 1
        self.planned.clear()
        self._used.clear()

    def missing(self, request: Request, num_done: int) -> MediaRun | None:
        """The first run of the request that is not computed after ``num_done`` tokens, if it has no features
        yet."""
        for run in request.media.runs:
            if run.end > num_done:
                return None if self.is_ready(run.identity) else run
        return None

    def first_missing(self, request: Request, num_done: int) -> MediaRun | None:
        """The first run after ``num_done`` tokens without features."""
        late = [run for run in request.media.runs if run.end > num_done]
        return next((run for run in late if not self.is_ready(run.identity)), None)

    def is_ready(self, identity: str) -> bool:
        """Whether the medium has its features."""
        return identity in self._features and identity not in self._begun

    def use(self, request: Request, start: int, end: int) -> None:
        """The step being planned computes these tokens of the request."""
        for run in request.media.runs:
            if run.start < end and start < run.end:
                self._used.add(run.identity)
                self._fresh.pop(run.identity, None)
                self._features.move_to_end(run.identity)

    def begin(self, identity: str, running: Iterable[Request]) -> bool:
        """Begins an encoding, or continues it. Returns whether slices of it may run in this step. If it
        cannot begin, ``run_planned`` returns the error."""
        if identity in self._features:
            self._features.move_to_end(identity)
            return True
        medium = self._media[identity]
        num_bytes = self._runner.feature_bytes(medium)
        if identity in self._failed or not self._make_room(num_bytes, running):
            return False
        try:
            self._begun[identity] = self._runner.encode_medium(medium)
        except Exception as error:
            self._failed[identity] = error
            return False
        self._features[identity] = num_bytes
        self.feature_bytes += num_bytes
        return True

    @property
    def has_work(self) -> bool:
        """Whether ``run_planned`` has something to run or to return."""
        return bool(self.planned or self._failed)

    def num_left(self, identity: str) -> int:
        """The slices of a begun encoding that are neither run nor planned."""
        return self._begun[identity].num_slices - self.planned.get(identity, 0)

    def slice_s(self, identity: str) -> float | None:
        """The seconds of a slice; None: unknown. The median of the latest ones: some are stalled, as the
        first one often is, and the first and the last one of an image are short."""
        if not self._times:
            return None
        return statistics.median_low(self._times) * self._begun[identity].flops_per_slice

    def plan(self, identity: str, count: int) -> int:
        """The step runs ``count`` more slices of the encoding. Returns how many of them no step has planned
        before."""
        self.planned[identity] = self.planned.get(identity, 0) + count
        self._fresh[identity] = self._num_steps
        num_again = min(count, self._left_over[identity])
        self._left_over[identity] -= num_again
        return count - num_again

    def run_planned(self) -> list[tuple[str, Exception]]:
        """Runs the planned slices. Returns the media whose encodings failed, which are forgotten, or could
        not begin."""
        failed = [*self._failed.items()]
        self._failed.clear()
        planned, self.planned = self.planned, {}
        for identity, count in planned.items():
            if identity not in self._begun:  # dropped since
                continue
            encoding = self._begun[identity]
            limit_s = MOST_OF_PLANNED * count * (self.slice_s(identity) or math.inf)
            began, took_s, num_run, next_s = self._clock(), 0.0, 0, 0.0
            try:
                while num_run < count and took_s + next_s <= limit_s:
                    encoding.run(1)
                    num_run += 1
                    took_s = self._clock() - began
                    next_s = took_s / num_run
            except Exception as error:
                self._forget(identity)
                failed.append((identity, error))
                continue
            self._left_over[identity] += count - num_run
            if took_s > 0:
                self._times.append(took_s / (num_run * encoding.flops_per_slice))
            if not encoding.num_slices:
                del self._begun[identity], self._left_over[identity]
                self.num_encoded += 1
                self.completed.append(identity)
        return failed

    def shrink(self, running: Iterable[Request]) -> bool:
        """Drops all features that no running request needs next, because memory is short. Returns whether
        there were any."""
        before = len(self._features)
        self._make_room(math.inf, running)
        return len(self._features) < before

    def _make_room(self, num_bytes: float, running: Iterable[Request]) -> bool:
        """Drops features until there is room. Returns whether there is, or nothing else is left."""
        if self.feature_bytes + num_bytes <= self._most_bytes:
            return True
        needed = self._used | self.planned.keys() | self._needed_by(running)
        for is_begun in (False, True):
            while (identity := self._first_unneeded(needed, is_begun=is_begun)) is not None:
                self._forget(identity)
                self.num_evicted += 1
                if self.feature_bytes + num_bytes <= self._most_bytes:
                    return True
        return not self._features

    def _first_unneeded(self, needed: set[str], *, is_begun: bool) -> str | None:
        """The least recently used features that may be dropped: complete ones, or ``is_begun`` ones."""
        for identity in self._features:
            is_needed = identity in needed or self._is_awaited(identity)
            if (identity in self._begun) == is_begun and not is_needed:
                return identity
        return None

    def _is_awaited(self, identity: str) -> bool:
        """Whether the medium is being encoded for a request, or was and is not used yet."""
        last = self._fresh.get(identity)
        return last is not None and self._num_steps - last < GRACE_STEPS and identity in self.wanted

    def _needed_by(self, running: Iterable[Request]) -> set[str]:
        """The media that running requests need next."""
        needed: set[str] = set()
        for request in running:
            run = next((one for one in request.media.runs if one.end > request.num_computed), None)
            if run is not None and self.is_ready(run.identity):
                needed.add(run.identity)
        return needed

    def _forget(self, identity: str) -> None:
        self.feature_bytes -= self._features.pop(identity)
        self._begun.pop(identity, None)
        self._left_over.pop(identity, None)
        self._fresh.pop(identity, None)
        self._runner.drop_medium(identity)
