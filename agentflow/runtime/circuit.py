"""A circuit breaker (Nygard, "Release It!", 2007): stops requests to an endpoint that fails.

An endpoint is a model at an address. Its circuit is closed while it answers. Failures in a row open it: the
endpoint gets no requests for a while. Then one request tries it (half-open). If this fails, the circuit is
open for longer; an answer closes it.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from agentflow.protocol.events import CircuitStatus
from agentflow.runtime.backoff import doubled_s, spread

MAX_FAILURES = 3
"""The failures in a row that open a circuit."""
FIRST_PAUSE_S = 5.0
"""The first period in which a circuit is open. It doubles with each failed trial, with jitter."""
MAX_PAUSE_S = 60.0
MAX_ASKED_S = 600.0
"""The longest pause that a server may ask for."""
HasAlternative = Callable[[], bool]
"""Whether another endpoint can answer a request now."""


def no_alternative() -> bool:
    """The ``HasAlternative`` of a request that only one endpoint can answer."""
    return False


class Attempt:
    """One request to an endpoint, which ends with one of the methods.

    Args:
        circuit: The circuit of the endpoint.
        period: The number of the circuit's openings so far.
    """

    def __init__(self, circuit: Circuit, period: int) -> None:
        self._circuit = circuit
        self.period = period

    def begun(self) -> None:
        """The answer has begun. A trial closes the circuit, although the rest of its answer may be lost."""
        self._circuit.begun(self)

    def succeeded(self) -> None:
        """The endpoint has answered."""
        self._circuit.succeeded(self)

    def failed(self, asked_s: float | None = None) -> None:
        """The endpoint has failed. ``asked_s``: a pause that the endpoint requested; the circuit then opens
        immediately."""
        self._circuit.failed(self, asked_s)

    def left(self) -> None:
        """The request ended without a result, if none of the other methods was called."""
        self._circuit.left(self)


class Circuit:
    """The circuit of one endpoint.

    Args:
        clock: The time in seconds.
        jitter: Returns the part of a pause that is kept, 0.5 to 1.

    >>> circuit = Circuit()
    >>> for _ in range(MAX_FAILURES):
    ...     circuit.attempt().failed()
    >>> circuit.status, circuit.is_ready
    ('open', False)
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        jitter: Callable[[], float] = lambda: spread(0.5, 1.0),
    ) -> None:
        self._clock = clock
        self._jitter = jitter
        self._num_failed = 0  # in a row, while it is closed
        self._num_opened = 0  # in a row
        self._period = 0
        self._opens_until: float | None = None  # None: it is closed
        self._trial: Attempt | None = None
        self.num_answered = 0
        self.num_failures = 0

    @property
    def status(self) -> CircuitStatus:
        """``closed``, ``open``, or ``half_open``: the pause is over, and one request may try the endpoint."""
        if self._opens_until is None:
            return "closed"
        return "open" if self.left_s > 0 else "half_open"

    @property
    def left_s(self) -> float:
        """The seconds until the endpoint is tried again; 0 if it can be asked now."""
        return 0.0 if self._opens_until is None else max(0.0, self._opens_until - self._clock())

    @property
    def is_ready(self) -> bool:
        """Whether the endpoint may be asked: a half-open circuit admits one request at a time."""
        return self._opens_until is None or (self.left_s == 0 and self._trial is None)

    def attempt(self) -> Attempt:
        """Begins a request. On a circuit that is not ready, it only counts if it succeeds."""
        attempt = Attempt(self, self._period)
        if self._opens_until is not None and self.is_ready:
            self._trial = attempt
        return attempt

    def begun(self, attempt: Attempt) -> None:
        """For ``Attempt``."""
        if attempt is self._trial:
            # The next failure opens it again.
            self._opens_until, self._trial, self._num_failed = None, None, MAX_FAILURES - 1

    def succeeded(self, attempt: Attempt) -> None:
        """For ``Attempt``."""
        self.num_answered += 1
        if attempt.period == self._period:
            self._opens_until, self._trial = None, None
            self._num_failed = self._num_opened = 0

    def failed(self, attempt: Attempt, asked_s: float | None) -> None:
        """For ``Attempt``. A request that began before the circuit opened changes nothing."""
        self.num_failures += 1
        if attempt.period != self._period:
            return
        if self._opens_until is None:
            self._num_failed += 1
            if self._num_failed >= MAX_FAILURES or asked_s is not None:
                self._open(asked_s)
        elif attempt is self._trial:
            self._open(asked_s)

    def left(self, attempt: Attempt) -> None:
        """For ``Attempt``."""
        if attempt is self._trial:
            self._trial = None

    def _open(self, asked_s: float | None) -> None:
        self._num_opened += 1
        pause_s = doubled_s(FIRST_PAUSE_S, MAX_PAUSE_S, self._num_opened) * self._jitter()
        if asked_s is not None:
            pause_s = max(pause_s, min(asked_s, MAX_ASKED_S))
        self._opens_until = self._clock() + pause_s
        self._num_failed, self._trial = 0, None
        self._period += 1
