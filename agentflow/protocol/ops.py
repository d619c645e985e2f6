"""The operations: a program records them, a connection transfers them, the interpreter runs them.

The client numbers states and variables, from 1, unique in a session. The ops of one state run in the order in
which they were submitted; ops of different states run concurrently. ``Cancel``, ``TaskGroup``, ``Limit``,
``Provide``, ``Want`` and the ops without a state take effect immediately, before waiting ops. ``op_table``
has the properties of each op.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from agentflow.errors import AgentflowError, BadArgument, error_param, shown_error
from agentflow.protocol.chat import FREE_CHOICE, Conversation, ToolChoice, ToolSpec
from agentflow.protocol.constraint import Constraint
from agentflow.protocol.decisions import Question
from agentflow.protocol.events import ErrorInfo
from agentflow.protocol.images import MediumKind
from agentflow.protocol.sampling import MAX_INT, GenParams, is_number, is_whole
from agentflow.protocol.text.transform import Transform

Role = Literal["system", "user", "assistant", "tool"]
SelectMethod = Literal[
    "token_length_normalized",
    "greedy_token_selection",
    "unconditional_likelihood_normalized",
    "likelihood",
]

Objective = Literal["latency", "throughput"]
ReadWhat = Literal["text", "token_ids", "tokens"]

MAX_CHOICES = 1000
MAX_EMBED_TEXTS = 256
MAX_EMBED_CHARS = 200_000
"""The maximum number of characters of an ``Embed`` with several texts, including their prompts."""
MAX_SALT_CHARS = 256
MAX_TRACE_CHARS = 256
WATCH_INTERVALS_S = (0.1, 60.0)
"""The shortest and the longest ``interval_s`` of a ``Watch``."""
MAX_WATCHED_NODES = 5000


class _Op(msgspec.Struct, frozen=True, tag_field="op", tag=str.lower, omit_defaults=True):
    """Common configuration: one JSON object with an ``op`` field, defaults left out."""


class Ref(msgspec.Struct, frozen=True, tag_field="op", tag="ref", omit_defaults=True):
    """A reference to a variable in a text. The variable's value is inserted as plain text, after
    ``transforms`` are applied in their order."""

    var: int
    transforms: tuple[Transform, ...] = ()


Parts = tuple[str | Ref, ...]


class Open(_Op, frozen=True):
    """Creates a root state on ``model``, one of the session's models (empty: the default). Only states with
    the same ``cache_salt`` share cached KV. ``objective``: as in a ``Hint``. ``program``: the scheduler
    treats states of the same program as siblings. ``label``: the name that watches show instead of
    ``program``; it has no other effect. ``group``: the states of one group in the session form one stage: the
    client waits for all their results."""

    state: int
    cache_salt: str = ""
    objective: Objective | None = None
    program: str = ""
    label: str = ""
    model: str = ""
    group: str = ""


class Text(_Op, frozen=True):
    """Appends text; references are resolved when the op runs. Text before a reference is appended while its
    variable has no value yet."""

    state: int
    parts: Parts


class Upload(_Op, frozen=True):
    """Sends bytes of an image or a video to the session, once for all of its states: ``data`` begins at byte
    ``at`` of its ``size`` bytes. ``source``: as in ``Image``. A failed upload fails no state; an ``Image`` or
    ``Video`` that uses it does."""

    source: str
    size: int
    at: int
    data: bytes
    kind: MediumKind = "image"


class Release(_Op, frozen=True):
    """Declares that no later op refers to an uploaded image."""

    source: str


class Image(_Op, frozen=True):
    """Appends an image. ``source``: ``sha256:`` and the digest of an uploaded file in hexadecimal digits, or
    an ``https:`` URL, which the model's provider or the server fetches."""

    state: int
    source: str


class Video(_Op, frozen=True):
    """Appends a video. ``num_frames``: as in ``images.Video``. ``source``: as in ``Image``."""

    state: int
    source: str
    num_frames: int | None = None


class Converse(_Op, frozen=True):
    """Begins an empty state with a whole conversation, and opens the assistant's turn after it (or continues
    its last one). A ``Gen`` with ``reply`` may then call the tools."""

    state: int
    conversation: Conversation


class Tools(_Op, frozen=True):
    """From now on, a ``Gen`` with ``reply`` may call these tools, which the chat template describes to the
    model. They replace the tools of the state's conversation or of an earlier op."""

    state: int
    tools: tuple[ToolSpec, ...]
    choice: ToolChoice = FREE_CHOICE


class Begin(_Op, frozen=True):
    """Opens a turn under the model's chat template. ``tool_call_id`` and ``name``: the call that a ``tool``
    turn answers, and the tool."""

    state: int
    role: Role
    tool_call_id: str | None = None
    name: str | None = None


class End(_Op, frozen=True):
    """Closes the turn."""

    state: int


class Gen(_Op, frozen=True):
    """Generates text into variable ``var``. ``reply``: the text is the notation of a reply
    (``protocol.chat``) to the state's conversation. ``trace``: a W3C ``traceparent``, the parent of the
    server's spans."""

    state: int
    var: int
    name: str
    params: GenParams
    constraint: Constraint | None = None
    reply: bool = False
    trace: str = ""


class Select(_Op, frozen=True):
    """Appends the most likely of ``choices``, which becomes the value of variable ``var``. ``trace``: as in a
    ``Gen``."""

    state: int
    var: int
    name: str
    choices: tuple[str, ...]
    method: SelectMethod = "token_length_normalized"
    trace: str = ""


class Decide(_Op, frozen=True):
    """Answers ``questions`` about the state's content at this point, independently of each other, and sets
    variable ``var`` to the answers (``decisions.answers_text``). Appends nothing. ``trace``: as in a
    ``Gen``."""

    state: int
    var: int
    name: str
    questions: tuple[Question, ...]
    trace: str = ""


class Set(_Op, frozen=True):
    """Sets variable ``var`` to the text of ``parts``; appends nothing. Allowed in a sealed state."""

    state: int
    var: int
    name: str
    parts: Parts


class Read(_Op, frozen=True):
    """Sets variable ``var`` to the state's content at this point: its ``text``, including the markup of the
    chat template, its ``token_ids`` as a JSON list, or the texts of its ``tokens`` as a JSON list. Allowed in
    a sealed state."""

    state: int
    var: int
    name: str
    what: ReadWhat


class Embed(_Op, frozen=True):
    """Sets variable ``var`` to the embeddings of ``texts``, in their order: a JSON list of strings, each with
    the float32 values (little-endian) of one embedding in base64. Appends nothing. Allowed in a sealed
    state."""

    state: int
    var: int
    name: str
    texts: tuple[str, ...]
    model: str = ""  # one of ``Capabilities.embedding_models``; empty for the first
    dimensions: int | None = None  # keep only this many leading dimensions
    prompt: str | None = None  # inserted before each text
    prompt_name: str | None = None  # the name of one of the model's own prompts, instead of ``prompt``


class Done(_Op, frozen=True):
    """Sets variable ``var`` to the empty text when all earlier ops of the state are done, such as the ops of
    a branch that is joined. Allowed in a sealed state."""

    state: int
    var: int
    name: str


class Expect(_Op, frozen=True):
    """Declares variable ``var``, whose text the client will send in one or more ``Provide``."""

    state: int
    var: int
    name: str


class Provide(_Op, frozen=True):
    """Appends text to an expected variable, or fails it with ``error``. Without ``more``, the variable is
    complete. Takes effect immediately."""

    var: int
    text: str = ""
    error: ErrorInfo | None = None
    more: bool = False


class Want(_Op, frozen=True):
    """A hint for the scheduler: the client waits for the value of variable ``var`` or, with ``stream``, reads
    its text while it grows. Does not affect results. Takes effect immediately; ignored if the variable has
    ended."""

    var: int
    how: Literal["value", "stream"] = "value"
    objective: Objective | None = None  # of the request that generates it
    ttft_s: float | None = None  # the target for the time to its first token
    tpot_s: float | None = None  # the target for the time per further token


class Hint(_Op, frozen=True):
    """A hint for the scheduler about the state's next ops. Does not affect results."""

    state: int
    objective: Objective | None = None  # optimise for their latency, or for the total throughput
    output_tokens: int | None = None  # the expected length of each of its next gens
    forks: int | None = None  # the number of forks that follow
    deadline_s: float | None = None  # the seconds within which its next gens should end
    speculate: bool | None = None  # whether one call to an API also generates later gens of its turn


class Limit(_Op, frozen=True):
    """From now on, the state and all its forks (0: all states of the session) together may take
    ``deadline_s`` seconds and generate ``output_tokens`` tokens; beyond that, their ops fail. Takes effect
    immediately."""

    state: int
    deadline_s: float | None = None
    output_tokens: int | None = None


class SubmitGraph(_Op, frozen=True, tag="submit"):
    """Runs a whole graph. When all its states have ended, the root reaches ticket 1, without an ``Await``.
    ``Close`` of the root closes all states of the graph, and cancels the ops that still run."""

    state: int  # the number of its root
    # The root comes first. Number n of a state or variable, from 1, is the session's ``state`` + n - 1.
    ops: tuple[Op, ...]
    inputs: dict[int, str] = {}  # the values of its expected variables
    outputs: tuple[int, ...] = ()  # the variables that are reported
    seeds: str = ""  # the ``run`` of ``derived_seed`` for gens without a seed
    places: dict[int, str] = {}  # their ``place``, by variable
    live: bool = False  # outputs are reported while they are generated, not only when they are complete

    def session_number(self, number: int) -> int:
        """The number in the session of the graph's state or variable ``number``."""
        return self.state + number - 1


MAX_BRANCHES = 2_000
"""The maximum number of branches of one fork."""


class Fork(_Op, frozen=True):
    """Creates the states ``children``, at most ``MAX_BRANCHES``, which continue from here independently. On a
    ``model`` other than the state's they begin empty, because a context belongs to its model: the client
    appends the content."""

    state: int
    children: tuple[int, ...]
    model: str = ""


class TaskGroup(_Op, frozen=True):
    """Combines forked states in a task group: when one fails, the others are cancelled and ``state`` fails.
    Takes effect immediately."""

    state: int
    children: tuple[int, ...]


class Seal(_Op, frozen=True):
    """Ends the state's text. Its variables remain readable."""

    state: int


class Await(_Op, frozen=True):
    """Requests a ``Reached`` event with the same ticket once all earlier ops of the state are done. The
    tickets of one state increase."""

    state: int
    ticket: int


MAX_FAILURE_BYTES = 1_000
"""The maximum size of each text of a ``Failure``, in UTF-8."""


class Failure(msgspec.Struct, frozen=True, omit_defaults=True):
    """The exception that ended a program: the name of its class, and its text without notes and causes."""

    type: str
    message: str = ""

    @classmethod
    def of(cls, error: Exception) -> Failure:
        """The name and the text of an exception, each cut to ``MAX_FAILURE_BYTES``."""
        return cls(_cut(type(error).__name__), _cut(shown_error(error, str)))

    def __str__(self) -> str:
        return f"{self.type}: {self.message}" if self.message else self.type

    def check(self) -> None:
        """Raises ``BadArgument`` for a text that is too long."""
        for name, text in (("type", self.type), ("message", self.message)):
            if len(text.encode()) > MAX_FAILURE_BYTES:
                raise BadArgument(f"failure: its {name} has more than {MAX_FAILURE_BYTES:,} bytes")


def _cut(text: str) -> str:
    return text[:MAX_FAILURE_BYTES].encode("utf-8", "replace")[:MAX_FAILURE_BYTES].decode("utf-8", "ignore")


class Cancel(_Op, frozen=True):
    """Aborts the running and waiting ops of the state and its forks. Takes effect immediately. ``failure``:
    the program of the state failed; without it, the client cancels the state."""

    state: int
    failure: Failure | None = None


class Close(_Op, frozen=True):
    """Removes the state and its variables."""

    state: int


class GetStats(_Op, frozen=True):
    """Requests a ``StatsReply`` with the same ticket."""

    ticket: int


class GetGraph(_Op, frozen=True):
    """Requests a ``GraphReply`` with the same ticket. ``of_tenant``: with the graphs of the tenant's other
    sessions."""

    ticket: int
    of_tenant: bool = False


class Watch(_Op, frozen=True):
    """Requests ``Watched`` events with this ticket until ``Unwatch``. A session has one watch: another one
    replaces it."""

    ticket: int
    steps: bool = True  # whether the events contain steps
    tree: bool = True  # whether the events contain the radix tree
    interval_s: float = 0.5  # at least, between two events
    max_nodes: int = 1000  # of the tree, the most recently used ones
    graphs: bool = False  # whether the events contain the live graphs of the tenant's sessions


class Unwatch(_Op, frozen=True):
    """Ends the watch."""


class Peek(_Op, frozen=True):
    """Requests a ``Peeked`` with the same ticket: the text of a node of the watched tree."""

    ticket: int
    node: int


Declaring = Gen | Select | Decide | Set | Read | Embed | Done | Expect
"""Ops that declare a variable."""
Op = (
    Open
    | SubmitGraph
    | Text
    | Upload
    | Release
    | Image
    | Video
    | Converse
    | Tools
    | Begin
    | End
    | Declaring
    | Provide
    | Want
    | Hint
    | Limit
    | Fork
    | TaskGroup
    | Seal
    | Await
    | Cancel
    | Close
    | GetStats
    | GetGraph
    | Watch
    | Unwatch
    | Peek
)


@dataclass(frozen=True, slots=True)
class Rejected:
    """Replaces an op that was rejected with ``error`` in a state's stream; it is never sent. The op's
    ``state`` (0 if it has none) fails, and so do the variables (``names`` by number) and ``children`` that it
    would have declared. ``kind``: the op's tag; for a ``provide``, ``names`` has its variable."""

    state: int
    error: AgentflowError
    kind: str
    names: Mapping[int, str] = field(default_factory=dict)
    children: tuple[int, ...] = ()


def check_branches(count: int) -> None:
    """Raises ``BadArgument`` for more branches than a ``Fork`` may have."""
    if count > MAX_BRANCHES:
        raise BadArgument(
            f"fork({count}): a fork has at most {MAX_BRANCHES:,} branches; flow.map runs a program for any "
            "number of inputs"
        )


def check_hint(output_tokens: int | None, forks: int | None, deadline_s: float | None) -> None:
    """Raises ``BadArgument`` for invalid values of a ``Hint``."""
    for name, value in (("output_tokens", output_tokens), ("forks", forks)):
        if value is not None and not is_whole(value, 1, MAX_INT):
            raise BadArgument(f"hint: {name} must be a whole number above 0, not {value!r}", param=name)
    if deadline_s is not None and not (is_number(deadline_s, 0, math.inf) and deadline_s < math.inf):
        raise BadArgument(
            f"hint: deadline_s must be a number of seconds, not {deadline_s!r}", param="deadline_s"
        )


def check_want(ttft_s: float | None, tpot_s: float | None) -> None:
    """Raises ``BadArgument`` for invalid values of a ``Want``."""
    for name, value in (("ttft_s", ttft_s), ("tpot_s", tpot_s)):
        if value is not None and not (is_number(value, 0, math.inf) and value < math.inf):
            raise BadArgument(f"get: {name} must be a number of seconds, not {value!r}", param=name)


def check_watch(interval_s: float, max_nodes: int) -> None:
    """Raises ``BadArgument`` for invalid values of a ``Watch``."""
    least_s, most_s = WATCH_INTERVALS_S
    if not is_number(interval_s, least_s, most_s):
        raise BadArgument(
            f"watch: interval_s must be {least_s} to {most_s:g} seconds, not {interval_s!r}",
            param="interval_s",
        )
    if not is_whole(max_nodes, 1, MAX_WATCHED_NODES):
        raise BadArgument(
            f"watch: max_nodes must be 1 to {MAX_WATCHED_NODES}, not {max_nodes!r}", param="max_nodes"
        )


def check_limit(deadline_s: float | None, output_tokens: int | None) -> None:
    """Raises ``BadArgument`` for invalid values of a ``Limit``."""
    if deadline_s is not None and not is_number(deadline_s, 0, math.inf):
        raise BadArgument(
            f"limit: deadline_s must be a number of seconds, not {deadline_s!r}", param="deadline_s"
        )
    if output_tokens is not None and not is_whole(output_tokens, 0, math.inf):
        raise BadArgument(
            f"limit: output_tokens must be a whole number, not {output_tokens!r}", param="output_tokens"
        )


def check_embed(op: Embed) -> None:
    """Raises ``BadArgument`` for invalid texts or options of an ``Embed``."""
    if not 1 <= len(op.texts) <= MAX_EMBED_TEXTS:
        raise BadArgument(f"embed: 1 to {MAX_EMBED_TEXTS} texts, not {len(op.texts):,}", param="texts")
    if not all(op.texts):
        raise BadArgument(f"embed: text {op.texts.index('')} is empty: leave it out", param="texts")
    num_chars = sum(map(len, op.texts)) + len(op.texts) * len(op.prompt or "")
    if len(op.texts) > 1 and num_chars > MAX_EMBED_CHARS:
        raise BadArgument(
            f"embed: several texts have at most {MAX_EMBED_CHARS:,} characters together, not {num_chars:,}: "
            "send them in several ops",
            param="texts",
        )
    if op.dimensions is not None and not is_whole(op.dimensions, 1, MAX_INT):
        raise BadArgument(
            f"embed: dimensions must be a whole number above 0, not {op.dimensions!r}", param="dimensions"
        )
    if op.prompt is not None and op.prompt_name is not None:
        raise BadArgument("embed: give either prompt or prompt_name", param="prompt_name")


def check_choices(name: str, choices: Sequence[str]) -> None:
    """Raises ``BadArgument`` for invalid choices of the select ``name``."""
    with error_param("choices"):
        if not choices or not all(choices):
            raise BadArgument(f"select({name!r}): there must be at least one choice, and none may be empty")
        if len(choices) > MAX_CHOICES or len(set(choices)) != len(choices):
            raise BadArgument(f"select({name!r}): at most {MAX_CHOICES} choices, each of them once")
