"""Limits of a session: the tokens and seconds that states may still use, and the memory that it takes.

``Budget`` bounds the tokens and the time of a state and its forks. ``MemoryBudget`` bounds bytes. Byte counts
estimate the allocations of CPython (a test compares them) for objects that grow with the client's input. A
``MemoryReservation`` counts bytes for as long as the object that owns it lives.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from weakref import WeakValueDictionary

import anyio
import msgspec

from agentflow.errors import BadArgument, BudgetExceeded, DeadlineExceeded, LimitExceeded, Overloaded
from agentflow.protocol import ops
from agentflow.protocol.bounds.sized import sized
from agentflow.protocol.events import Usage, Value
from agentflow.protocol.sampling import GenParams

STATE_BYTES = 3_500
"""A state with an empty context."""
_VARIABLE_BYTES = 1_800
"""A variable without its text, with its node in the graph."""
READER_BYTES = 500
"""A reader of a variable, in addition to the reader of the session's events."""
GROWING_CHAR_BYTES = 5
"""A character of a variable's text while the client provides it in parts."""
_CHAR_BYTES = 16
"""A character in a context, in addition to its text: its tokens in all their forms."""
OWN_CHAR_BYTES = 1 + _CHAR_BYTES
"""About the memory of a character in a context, with its text."""
FORKED_CHAR_BYTES = 4
"""A character that a context has from its parent: texts are shared, lists of tokens are copied."""
TURN_CHARS = 32
"""A turn without its text counts like this many characters."""
_TOP_TOKEN_BYTES = 160


class MemoryBudget:
    """A limit on memory.

    Args:
        most_bytes: The maximum number of bytes.
        subject: The beginning of the error of an exceeded limit.
        advice: The end of that error.
        within: A shared budget in which bytes beyond ``free_bytes`` also count.
        free_bytes: The bytes that are available even when the shared budget is full.

    >>> server = MemoryBudget(1_000, "all sessions together may hold")
    >>> session = MemoryBudget(800, within=server, free_bytes=100)
    >>> session.reserve(700)
    >>> server.num_bytes
    600
    """

    def __init__(
        self,
        most_bytes: float = math.inf,
        subject: str = "this session may hold",
        advice: str = "close states that are not needed any more",
        *,
        within: MemoryBudget | None = None,
        free_bytes: int = 0,
    ) -> None:
        self.num_bytes = 0
        self._most_bytes = most_bytes
        self._subject = subject
        self._advice = advice
        self._within = within
        self._free_bytes = free_bytes
        self._is_closed = False
        self.is_unlimited = most_bytes == math.inf and within is None
        """Whether no number of bytes exceeds a limit, so that nothing needs to be measured for it."""

    def reserve(self, num_bytes: int) -> None:
        """Adds the bytes, or raises ``Overloaded`` and adds none. 0 bytes never exceed a limit."""
        if not num_bytes:
            return
        total = self.num_bytes + num_bytes
        if total > self._most_bytes:
            raise Overloaded(
                f"{self._subject} {self._most_bytes:,} bytes, and this would be {total:,}: {self._advice}"
            )
        if total > self._free_bytes and self._within is not None:
            self._within.reserve(total - max(self.num_bytes, self._free_bytes))
        self.num_bytes = total

    def count(self, num_bytes: int) -> None:
        """Adds (or subtracts) bytes that are already in use, regardless of the limit."""
        if self._is_closed:
            return
        total = self.num_bytes + num_bytes
        if self._within is not None:
            more = max(total, self._free_bytes) - max(self.num_bytes, self._free_bytes)
            if more:
                self._within.count(more)
        self.num_bytes = total

    def close(self) -> None:
        """Releases all bytes; later calls count nothing."""
        self.count(-self.num_bytes)
        self._is_closed = True


class MemoryReservation:
    """Bytes in a memory budget that are released when the reservation is deleted, together with the object
    that owns it. ``Overloaded`` if there is no room.

    This relies on CPython, which deletes an object with its last reference.
    """

    __slots__ = ("_memory", "_num_bytes")

    def __init__(self, memory: MemoryBudget, num_bytes: int) -> None:
        self._num_bytes = 0
        self._memory = memory
        memory.reserve(num_bytes)
        self._num_bytes = num_bytes

    def add(self, num_bytes: int) -> None:
        """Reserves more bytes, or raises ``Overloaded`` and reserves none."""
        self._memory.reserve(num_bytes)
        self._num_bytes += num_bytes

    def count(self, num_bytes: int) -> None:
        """Adds bytes that are already in use, regardless of the limit."""
        self._memory.count(num_bytes)
        self._num_bytes += num_bytes

    def __del__(self) -> None:
        self._memory.count(-self._num_bytes)


def variable_bytes(name: str) -> int:
    """The memory of a variable without its value."""
    return _VARIABLE_BYTES + sys.getsizeof(name)


def text_bytes(text: str, num_chars: int = 0) -> int:
    """The memory of a text in a context, and of content that counts like ``num_chars`` characters."""
    return sys.getsizeof(text) + _CHAR_BYTES * (len(text) + num_chars)


def error_bytes(error: BaseException, text: str = "") -> int:
    """The memory of an error, and of the text that a variable had before."""
    return sys.getsizeof(str(error)) + sys.getsizeof(text)


_NUMBER_BYTES = 32


def value_bytes(value: Value) -> int:
    """The memory of a complete value."""
    num_bytes = sys.getsizeof(value.text)
    if value.reasoning is not None:
        num_bytes += sys.getsizeof(value.reasoning)
    if value.logprobs is not None:
        num_bytes += _NUMBER_BYTES * len(value.logprobs)
    if value.tokens is not None:
        num_bytes += sum(map(sys.getsizeof, value.tokens))
    if value.top_logprobs is not None:
        num_bytes += _TOP_TOKEN_BYTES * sum(len(place or ()) for place in value.top_logprobs)
    if value.choices is not None:
        num_bytes += sized(value.choices)
    return num_bytes


class Budget:
    """The time and tokens that a state and its forks may use. ``deadline``: on the event loop's clock.
    ``tokens_left``: for all generations together; concurrent generations may make it negative, and every
    generation that then gets a token fails. ``tokens_running``: charged by generations that have not
    ended."""

    __slots__ = ("deadline", "tokens_left", "tokens_running")

    def __init__(self, *, deadline_s: float | None = None, output_tokens: int | None = None) -> None:
        self.deadline = math.inf if deadline_s is None else anyio.current_time() + deadline_s
        self.tokens_left: float = math.inf if output_tokens is None else output_tokens
        self.tokens_running = 0

    def tighten(self, other: Budget) -> None:
        """Applies the limits of another budget of the same states as well, to which nothing was charged."""
        self.deadline = min(self.deadline, other.deadline)
        self.tokens_left = min(self.tokens_left, other.tokens_left - self.tokens_running)


def earliest_deadline(budgets: Sequence[Budget]) -> float:
    """The earliest deadline of the budgets; infinite if there is none."""
    return min([budget.deadline for budget in budgets], default=math.inf)


def deadline_exceeded() -> DeadlineExceeded:
    """The error of an op after its deadline."""
    return DeadlineExceeded("the deadline has passed")


def exceeded(budgets: Sequence[Budget], num_tokens: int) -> LimitExceeded:
    """The error of an op that a limit ended while it ran. ``num_tokens``: that it had generated."""
    if earliest_deadline(budgets) <= anyio.current_time():
        return deadline_exceeded()
    return budget_exceeded(Usage(output_tokens=num_tokens))


def exceeded_with(error: BaseException, text: str, budgets: Sequence[Budget]) -> LimitExceeded | None:
    """If the budgets also exceed the limit that raised ``error``, an error of the same kind with ``text``."""
    if isinstance(error, DeadlineExceeded) and earliest_deadline(budgets) <= anyio.current_time():
        return DeadlineExceeded(text)
    if isinstance(error, BudgetExceeded) and any(budget.tokens_left < 1 for budget in budgets):
        return BudgetExceeded(text, param="output_tokens")
    return None


def clipped(params: GenParams, budgets: Sequence[Budget], default_max_tokens: int | None) -> GenParams:
    """``params`` with ``max_tokens`` clipped to the tokens that are left; the same object if they suffice.
    ``default_max_tokens``: as in ``Capabilities``. ``BudgetExceeded`` if no tokens are left."""
    most = params.max_tokens or default_max_tokens or math.inf
    left = min([budget.tokens_left for budget in budgets], default=math.inf)
    if left < 1:
        raise budget_exceeded()
    if left >= most:
        return params
    least = None if params.min_tokens is None else min(params.min_tokens, int(left))
    return msgspec.structs.replace(params, max_tokens=int(left), min_tokens=least)


def budget_exceeded(usage: Usage | None = None) -> BudgetExceeded:
    # Without a number: a budget may be the rest of a limit that other models or a batch share.
    error = BudgetExceeded("the limit of output tokens is used up", param="output_tokens")
    error.usage = usage
    return error


def limit_op(state_id: int, deadline_s: float | None, output_tokens: int | None) -> ops.Limit:
    """A checked ``Limit``. ``BadArgument``."""
    if deadline_s is None and output_tokens is None:
        raise BadArgument("limit: give deadline_s or output_tokens, or both")
    ops.check_limit(deadline_s, output_tokens)
    return ops.Limit(state_id, deadline_s, output_tokens)


_MAX_PART = 0.5


def tenant_part(limit: int, tenant_name: str) -> int:
    """The largest part of a shared ``limit`` that one tenant may use: half of it (at least 1), or all on a
    server without keys.

    >>> tenant_part(1000, "alice"), tenant_part(1000, "")
    (500, 1000)
    """
    return max(1, int(limit * _MAX_PART)) if tenant_name else limit


class TenantMemory:
    """A memory budget of ``most_bytes`` that all tenants share, each up to its part. ``subject`` and
    ``advice``: as in ``MemoryBudget``.

    >>> sessions = TenantMemory(1_000, "sessions may hold", "wait")
    >>> sessions.of("alice").reserve(600)
    Traceback (most recent call last):
    agentflow.errors.Overloaded: of one tenant, sessions may hold 500 bytes, and this would be 600: wait
    """

    def __init__(self, most_bytes: int, subject: str, advice: str) -> None:
        self._most_bytes = most_bytes
        self._subject = subject
        self._advice = advice
        self._all = MemoryBudget(most_bytes, subject, advice)
        self._of_tenant: WeakValueDictionary[str, MemoryBudget] = WeakValueDictionary()

    @property
    def num_bytes(self) -> int:
        """The bytes in use by all tenants."""
        return self._all.num_bytes

    def of(self, tenant: str) -> MemoryBudget:
        """The tenant's budget. Keep a reference for as long as it is in use."""
        part = self._of_tenant.get(tenant)
        if part is None:
            most = tenant_part(self._most_bytes, tenant)
            part = MemoryBudget(most, f"of one tenant, {self._subject}", self._advice, within=self._all)
            self._of_tenant[tenant] = part
        return part
