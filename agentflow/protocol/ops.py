"""The operations: what a program records, what goes over the wire, what the interpreter runs.

States and variables are numbered by the client, from 1, unique in a session. The ops of one state
run in the order in which they were submitted; ops of different states run side by side. ``Cancel``,
``TaskGroup``, ``Limit`` and ``Provide`` act at once, whatever waits before them.

Seeds of generations that name none: they follow from where the generation stands.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from agentflow.errors import AgentflowError, BadArgument, ProtocolError
from agentflow.protocol.chat import Conversation
from agentflow.protocol.constraint import Constraint
from agentflow.protocol.events import ErrorInfo
from agentflow.protocol.sampling import MAX_INT, SamplingParams, is_number, is_whole
from agentflow.protocol.transform import Transform


def run_of(session_seed: int, index: int) -> str:
    """The first part of what a seed is derived from: the session's seed and the run's index."""
    return f"{session_seed}/{index}"


def place_of(path: tuple[int, ...], number: int) -> str:
    """The second part: the state's path in the fork tree, and the gen's number in the state."""
    return f"{path}/{number}"


def derived_seed(run: str, place: str) -> int:
    """``run`` and ``place``: from ``run_of`` and ``place_of``. The same places draw the same, in a replay and
    in a compiled graph."""
    digest = hashlib.blake2b(f"{run}/{place}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


Role = Literal["system", "user", "assistant", "tool"]
SelectMethod = Literal[
    "token_length_normalized", "greedy_token_selection", "unconditional_likelihood_normalized"
]

Objective = Literal["latency", "throughput"]
ReadWhat = Literal["text", "token_ids"]

MAX_CHOICES = 1000
MAX_SALT_CHARS = 256
MAX_NUMBER = 2**53 - 1
"""Of a state, variable or ticket: what every JSON reader takes for the same number."""


class _Op(msgspec.Struct, frozen=True, tag_field="op", tag=str.lower, omit_defaults=True):
    """Common configuration: one JSON object with an ``op`` field, defaults left out."""


class Ref(msgspec.Struct, frozen=True, tag_field="op", tag="ref", omit_defaults=True):
    """A variable inside text: its value, once there is one, stands here as plain text, after the
    ``transforms`` in their order."""

    var: int
    transforms: tuple[Transform, ...] = ()


Parts = tuple[str | Ref, ...]


class Open(_Op, frozen=True):
    """A new root state. States share cached KV only under an equal ``cache_salt``. ``objective``: as if a
    ``Hint`` came first. ``program``: states that name the same one are siblings to the scheduler."""

    state: int
    cache_salt: str = ""
    objective: Objective | None = None
    program: str = ""


class Text(_Op, frozen=True):
    """Appends text; references are resolved when the op's turn comes."""

    state: int
    parts: Parts


class Image(_Op, frozen=True):
    """Appends an image. ``source``: a ``data:`` or ``https:`` URL."""

    state: int
    source: str


class Converse(_Op, frozen=True):
    """Begins the state with a whole conversation, and opens the assistant's turn after it (or goes on with
    its last one). A ``Gen`` with ``reply`` may then call the tools."""

    state: int
    conversation: Conversation


class Begin(_Op, frozen=True):
    """Opens a turn under the model's chat template."""

    state: int
    role: Role


class End(_Op, frozen=True):
    """Closes the turn."""

    state: int


class Gen(_Op, frozen=True):
    """Generates text into variable ``var``. ``timeout_s`` counts from the op's turn. ``reply``: what
    a conversation's assistant says, as a reply (``agentflow.reply``)."""

    state: int
    var: int
    name: str
    params: SamplingParams
    constraint: Constraint | None = None
    timeout_s: float | None = None
    reply: bool = False


class Select(_Op, frozen=True):
    """Appends the likeliest of ``choices``; variable ``var`` takes it."""

    state: int
    var: int
    name: str
    choices: tuple[str, ...]
    method: SelectMethod = "token_length_normalized"


class Set(_Op, frozen=True):
    """Variable ``var`` takes the text of ``parts``; the state's own text stays as it is."""

    state: int
    var: int
    name: str
    parts: Parts


class Read(_Op, frozen=True):
    """Variable ``var`` takes what the state holds here: its ``text``, the template's marks included, or
    its ``token_ids`` as a JSON list."""

    state: int
    var: int
    name: str
    what: ReadWhat


class Expect(_Op, frozen=True):
    """Variable ``var`` is the client's own: a ``Provide`` will give its value."""

    state: int
    var: int
    name: str


class Provide(_Op, frozen=True):
    """The value of an expected variable, or why there is none. At once."""

    var: int
    text: str = ""
    error: ErrorInfo | None = None


class Hint(_Op, frozen=True):
    """What the program knows of the state's next ops: whether somebody waits for them (``latency``) or
    only the sum of all counts, how many tokens its gens will have, how many forks come next, in how
    many seconds its gens should be done. Changes no result."""

    state: int
    objective: Objective | None = None
    output_tokens: int | None = None
    forks: int | None = None
    deadline_s: float | None = None


class Limit(_Op, frozen=True):
    """From now on the state and all that is forked from it (0: all states of the session) may take so
    many seconds, and generate so many tokens together. At once. What goes on fails."""

    state: int
    deadline_s: float | None = None
    output_tokens: int | None = None


class Submit(_Op, frozen=True):
    """Runs a whole graph. In ``ops`` states and variables are numbered from 1, the root first; number n is
    the session's ``state`` + n - 1. ``inputs``: the values of its expected variables. Of its variables only
    ``outputs`` are told, each when it is complete; the root says when all has ended, as if asked by an
    ``Await`` with ticket 1. ``seeds`` and ``places``: what the seed of a gen that has none is derived from.
    ``Close`` of the root closes all its states, and cancels what still runs there."""

    state: int
    ops: tuple[Op, ...]
    inputs: dict[int, str] = {}
    outputs: tuple[int, ...] = ()
    seeds: str = ""
    places: dict[int, str] = {}

    def session_number(self, number: int) -> int:
        """The number in the session of the graph's state or variable ``number``."""
        return self.state + number - 1


class Fork(_Op, frozen=True):
    """New states ``children`` that go on from here, independently."""

    state: int
    children: tuple[int, ...]


class TaskGroup(_Op, frozen=True):
    """Couples forked states: when one fails, the others are cancelled and ``state`` fails. At once."""

    state: int
    children: tuple[int, ...]


class Seal(_Op, frozen=True):
    """Nothing more is appended; variables stay readable."""

    state: int


class Await(_Op, frozen=True):
    """Somebody waits for the state to get here: answered by ``Reached`` with the same ticket.
    Tickets of one state increase."""

    state: int
    ticket: int


class Cancel(_Op, frozen=True):
    """Aborts what the state and its forks run, and whatever waits there. At once."""

    state: int


class Close(_Op, frozen=True):
    """The state and its variables are not needed any more."""

    state: int


class GetStats(_Op, frozen=True):
    """Asks for ``StatsReply`` with the same ticket."""

    ticket: int


Declaring = Gen | Select | Set | Read | Expect
"""Ops that declare a variable."""
Op = (
    Open
    | Submit
    | Text
    | Image
    | Converse
    | Begin
    | End
    | Declaring
    | Provide
    | Hint
    | Limit
    | Fork
    | TaskGroup
    | Seal
    | Await
    | Cancel
    | Close
    | GetStats
)


@dataclass(frozen=True, slots=True)
class Rejected:
    """Not on the wire: stands for an op that was not taken because of ``error``. Its ``state`` (0: it has
    none) fails with that, and so does what the op would have declared: variables (``names`` by their numbers)
    and ``children``. Of a ``provide``, the variable is the one that it is for. ``kind``: the op's tag."""

    state: int
    error: AgentflowError
    kind: str
    names: Mapping[int, str] = field(default_factory=dict)
    children: tuple[int, ...] = ()


def rejected(op: Op, error: AgentflowError) -> Rejected:
    """What stands for ``op``."""
    names: dict[int, str] = {}
    if isinstance(op, Declaring):
        names[op.var] = op.name
    elif isinstance(op, Provide):
        names[op.var] = ""
    elif isinstance(op, Submit):
        declared = {one.var: one.name for one in op.ops if isinstance(one, Declaring)}
        names = {op.session_number(number): declared.get(number, "") for number in op.outputs}
    children = op.children if isinstance(op, Fork) else ()
    return Rejected(getattr(op, "state", 0), error, type(op).__name__.lower(), names, children)


def check_timeout(timeout_s: float | None) -> None:
    """Raises ``BadArgument`` where a gen could not have so many seconds."""
    if timeout_s is not None and not (is_number(timeout_s, 0, math.inf) and timeout_s > 0):
        raise BadArgument(f"gen: timeout_s must be a number of seconds above 0, not {timeout_s!r}")


def may_be_number(number: int) -> bool:
    """Whether a state, variable or ticket may have it."""
    return -MAX_NUMBER <= number <= MAX_NUMBER


def check_number(number: int) -> None:
    """Raises ``ProtocolError`` where no state, variable or ticket may have this number."""
    if not may_be_number(number):
        raise ProtocolError(f"states, variables and tickets have numbers up to {MAX_NUMBER}, not {number}")


def check_hint(output_tokens: int | None, forks: int | None, deadline_s: float | None) -> None:
    """Raises ``BadArgument`` where a state's future could not be like that."""
    for name, value in (("output_tokens", output_tokens), ("forks", forks)):
        if value is not None and not is_whole(value, 1, MAX_INT):
            raise BadArgument(f"hint: {name} must be a whole number above 0, not {value!r}")
    if deadline_s is not None and not (is_number(deadline_s, 0, math.inf) and deadline_s < math.inf):
        raise BadArgument(f"hint: deadline_s must be a number of seconds, not {deadline_s!r}")


def check_limit(deadline_s: float | None, output_tokens: int | None) -> None:
    """Raises ``BadArgument`` where what a limit allows is no amount."""
    if deadline_s is not None and not is_number(deadline_s, 0, math.inf):
        raise BadArgument(f"limit: deadline_s must be a number of seconds, not {deadline_s!r}")
    if output_tokens is not None and not is_whole(output_tokens, 0, math.inf):
        raise BadArgument(f"limit: output_tokens must be a whole number, not {output_tokens!r}")


def check_choices(name: str, choices: Sequence[str]) -> None:
    """Raises ``BadArgument`` where a select named ``name`` could not choose among ``choices``."""
    if not choices or not all(choices):
        raise BadArgument(f"select({name!r}): there must be at least one choice, and none may be empty")
    if len(choices) > MAX_CHOICES or len(set(choices)) != len(choices):
        raise BadArgument(f"select({name!r}): at most {MAX_CHOICES} choices, each of them once")
