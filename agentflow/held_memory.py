"""What is held in memory for somebody, counted against a limit: a session's ops, states and values, say.

Counted is what grows with what is sent: texts, and what is made of them. The amounts are estimates, near
what CPython needs (a test compares them), and a limit is the sum of such amounts.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable

from agentflow import ops
from agentflow.constraint import Constraint
from agentflow.errors import Overloaded
from agentflow.events import Value

OP_BYTES = 600
"""Of an op in line, and of a reference in its text."""
STATE_BYTES = 3_000
"""Of a state with an empty context."""
VARIABLE_BYTES = 1_000
"""Of a variable without its text."""
CHAR_BYTES = 16
"""Of a character in a context, beside its text: its tokens, in the forms in which they are kept."""
FORKED_CHAR_BYTES = 4
"""Of a character that a context has from its parent: texts are shared, lists of tokens copied."""
NUMBER_BYTES = 32
TOP_TOKEN_BYTES = 160
BIAS_BYTES = 120


class HeldMemory:
    """At most ``most_bytes``. ``who`` begins the error that says so, and ``advice`` ends it. What is held
    counts ``within`` another one too.

    >>> server = HeldMemory(1_000, "all sessions together may hold")
    >>> session = HeldMemory(800, within=server)
    >>> session.hold(700)
    >>> server.num_bytes
    700
    """

    def __init__(
        self,
        most_bytes: float = math.inf,
        who: str = "this session may hold",
        advice: str = "close states that are not needed any more",
        *,
        within: HeldMemory | None = None,
    ) -> None:
        self.num_bytes = 0
        self._most_bytes = most_bytes
        self._who = who
        self._advice = advice
        self._within = within

    def hold(self, num_bytes: int) -> None:
        """So many bytes more, or ``Overloaded``, and then none of them."""
        level: HeldMemory | None = self
        while level is not None:
            if num_bytes > 0 and level.num_bytes + num_bytes > level._most_bytes:
                raise Overloaded(
                    f"{level._who} {level._most_bytes:,} bytes, and this would be "
                    f"{level.num_bytes + num_bytes:,}: {level._advice}"
                )
            level = level._within
        self._add(num_bytes)

    def release(self, num_bytes: int) -> None:
        """So many bytes less."""
        self._add(-num_bytes)

    def release_all(self) -> None:
        """Nothing is held any more."""
        self.release(self.num_bytes)

    def _add(self, num_bytes: int) -> None:
        level: HeldMemory | None = self
        while level is not None:
            level.num_bytes += num_bytes
            level = level._within


def op_bytes(op: ops.Op) -> int:
    """Of an op that waits."""
    match op:
        case ops.Text() | ops.Set():
            return OP_BYTES + sum(
                sys.getsizeof(part) if isinstance(part, str) else OP_BYTES for part in op.parts
            )
        case ops.Gen():
            return OP_BYTES + _params_bytes(op) + _constraint_bytes(op.constraint)
        case ops.Select():
            return OP_BYTES + _texts_bytes(op.choices)
        case ops.Image():
            return OP_BYTES + len(op.source)
        case ops.Fork():
            return OP_BYTES + NUMBER_BYTES * len(op.children)
        case _:
            return OP_BYTES


def text_bytes(text: str) -> int:
    """Of a text that a context has for its own."""
    return sys.getsizeof(text) + CHAR_BYTES * len(text)


def value_bytes(text: str, value: Value) -> int:
    """Of a variable's end."""
    num_bytes = sys.getsizeof(text)
    if value.logprobs is not None:
        num_bytes += NUMBER_BYTES * len(value.logprobs)
    if value.top_logprobs is not None:
        num_bytes += TOP_TOKEN_BYTES * sum(len(place or ()) for place in value.top_logprobs)
    if value.choices is not None:
        num_bytes += NUMBER_BYTES * len(value.choices) + _texts_bytes(value.choices)
    return num_bytes


def _texts_bytes(texts: Iterable[str]) -> int:
    return sum(map(sys.getsizeof, texts))


def _params_bytes(op: ops.Gen) -> int:
    params = op.params
    return (
        _texts_bytes(params.stop)
        + BIAS_BYTES * len(params.logit_bias)
        + NUMBER_BYTES * len(params.stop_token_ids)
    )


def _constraint_bytes(constraint: Constraint | None) -> int:
    return 0 if constraint is None else sys.getsizeof(constraint.source) + _texts_bytes(constraint.choices)
