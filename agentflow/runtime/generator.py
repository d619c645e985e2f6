"""The interface of the interpreter to a text generator, such as an engine or a script.

It is the engine abstraction of Parrot (Lin et al., OSDI 2024, section 5.1: fill, generate, free) plus
``fork`` and ``score``. A *context* is the generator's representation of one state, such as token ids in the
engine. Only the generator encodes text."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, TypeVar

import msgspec

from agentflow.protocol.chat import Conversation, ToolChoice, ToolSpec
from agentflow.protocol.constraint import Constraint
from agentflow.protocol.decisions import Question
from agentflow.protocol.events import (
    Capabilities,
    DecidedBy,
    PassedOver,
    Stats,
    StepRecord,
    TopLogprobs,
    Usage,
    WatchedRequest,
)
from agentflow.protocol.images import Image, Video
from agentflow.protocol.ops import Objective
from agentflow.protocol.sampling import GenParams
from agentflow.runtime.programs.scheduling_hint import SchedulingHint

OnText = Callable[[str], None]
ContextT = TypeVar("ContextT")

METER: ContextVar[Callable[[int], None] | None] = ContextVar("meter", default=None)
"""Receives the numbers of new output tokens of the current task's generation while it runs, or lower bounds
of them. The usage at the end has the final number."""


class Generated(msgspec.Struct, frozen=True):
    """A complete generation. ``finish_reason``: ``eos``, ``stop`` or ``length``. ``forced`` and the fields
    after it: as in ``Value``."""

    text: str
    finish_reason: str
    usage: Usage
    logprobs: tuple[float | None, ...] | None = None
    top_logprobs: TopLogprobs | None = None
    forced: tuple[tuple[int, int], ...] | None = None
    reasoning: str | None = None
    tokens: tuple[str, ...] | None = None
    model: str = ""
    passed_over: tuple[PassedOver, ...] = ()


class Scored(msgspec.Struct, frozen=True):
    """The outcome of a select: each choice's score under the method, and the ``index`` of the first choice
    with the highest score. ``model`` and ``passed_over``: as in ``Value``."""

    index: int
    scores: tuple[float, ...]
    usage: Usage
    decided_by: DecidedBy = "logprobs"
    model: str = ""
    passed_over: tuple[PassedOver, ...] = ()


class Decided(msgspec.Struct, frozen=True):
    """The answers to questions: for each question the probabilities of its ``answers``, or None if the model
    refused to answer."""

    probabilities: tuple[tuple[float, ...] | None, ...]
    usage: Usage
    decided_by: DecidedBy = "logprobs"
    model: str = ""
    passed_over: tuple[PassedOver, ...] = ()


class EmbeddingOptions(msgspec.Struct, frozen=True):
    """The options of an ``ops.Embed``."""

    prompt: str | None = None  # inserted before each text
    prompt_name: str | None = None  # the name of one of the model's own prompts, instead of ``prompt``
    dimensions: int | None = None  # keep only this many leading dimensions


class Embeddings(NamedTuple):
    """Embeddings in the order of the texts, each in float32, little-endian, and the tokens of all texts."""

    vectors: list[bytes]
    usage: Usage


class StateHint(msgspec.Struct, frozen=True):
    """A hint about a state's next ops; see ``ops.Hint``. ``trace``: the ``traceparent`` of the next op.
    ``scheduling``: from the interpreter's graph of the program; if ``begins``, the state's next request
    begins now. ``is_dropped``: the state is a cancelled branch, and no state continues from its end."""

    objective: Objective | None = None
    output_tokens: int | None = None
    forks: int | None = None
    deadline_s: float | None = None
    speculate: bool | None = None
    trace: str = ""
    scheduling: SchedulingHint | None = None
    begins: bool = False
    is_dropped: bool = False


class UpcomingGen(NamedTuple):
    """A gen that follows in the turn of the running one."""

    params: GenParams
    constraint: Constraint | None = None


Upcoming = str | UpcomingGen
"""An item that follows in the turn of a gen: fixed text, or another gen."""


class SnapshotNode(NamedTuple):
    """A node of the radix tree, as ``TreeNode``, but with the backend's numbers, the time of its last use and
    the tenant's name."""

    number: int
    parent: int
    num_tokens: int
    num_generated: int
    locks: int
    keeps: int
    used_s: float
    tenant: str


class Snapshot(NamedTuple):
    """The backend's state, as far as a session may see it."""

    epoch: int  # changes when the backend's numbers start over
    time_s: float  # on the backend's clock
    steps: Sequence[StepRecord]  # the last ones, at most 512
    requests: Sequence[WatchedRequest]  # with the backend's numbers
    stats: Stats
    nodes: Sequence[SnapshotNode]  # the most recently used ones, parents before their children
    num_nodes: int  # in the whole tree


class NodeText(NamedTuple):
    """The text of a node's first tokens, and its number of tokens."""

    text: str
    num_tokens: int


class View(Protocol):
    """One watch's view of the backend."""

    async def snapshot(self, max_nodes: int, steps_after: int) -> Snapshot:
        """A snapshot with at most ``max_nodes`` nodes, and the steps after number ``steps_after``. May wait,
        so that watching does not slow the backend. Raises ``EngineDown``."""

    async def read_text(self, node: int) -> NodeText:
        """The text of a node of an earlier snapshot. ``BadArgument`` if it is gone, ``NotAuthorized`` if it
        is another tenant's, ``EngineDown``."""

    def spent(self, loop_s: float) -> None:
        """Work on a snapshot took ``loop_s`` seconds of the event loop's processor time, so later ones are
        delayed."""


class Embedder(Protocol):
    """Computes embeddings with one model."""

    async def embed(self, texts: Sequence[str], options: EmbeddingOptions) -> Embeddings:
        """The embeddings of texts. Cancelling it aborts the work. ``BadArgument`` if the model generates
        text."""


class Generator(Embedder, Protocol[ContextT]):
    """Generates text or computes embeddings with one model. All methods run in the event loop. Cancelling an
    async method aborts the work that it started."""

    capabilities: Capabilities

    def open(self, cache_salt: str, *, program: str = "", label: str = "") -> ContextT:
        """A new, empty context. Only contexts with the same salt share cached KV. Contexts of the same
        program are siblings whose results are needed together. ``label``: shown instead of the program."""

    def fill(self, context: ContextT, text: str) -> None:
        """Appends text as content."""

    def begin_role(
        self, context: ContextT, role: str, tool_call_id: str | None = None, name: str | None = None
    ) -> None:
        """Opens a turn of the conversation. ``tool_call_id`` and ``name``: the call that a ``tool`` turn
        answers, and the tool."""

    def end_role(self, context: ContextT) -> None:
        """Closes the turn."""

    def image(self, context: ContextT, image: Image) -> None:
        """Appends an image. Called only if ``capabilities.images``."""

    def video(self, context: ContextT, video: Video) -> None:
        """Appends a video, whose file has its bytes. Called only if ``capabilities.videos``."""

    async def converse(self, context: ContextT, conversation: Conversation) -> None:
        """Begins the context with a conversation. Called only if ``capabilities.conversations``."""

    async def offer_tools(self, context: ContextT, tools: tuple[ToolSpec, ...], choice: ToolChoice) -> None:
        """Replaces the tools that replies may call. Called only if ``capabilities.conversations``."""

    async def reply(
        self,
        context: ContextT,
        params: GenParams,
        on_text: OnText,
        constraint: Constraint | None = None,
        on_reasoning: OnText | None = None,
    ) -> Generated:
        """Like ``generate``, but the text is the notation of a reply (``protocol/chat``), which may call the
        tools of ``converse`` or ``offer_tools``. The constraint applies to replies without calls."""

    async def generate(
        self,
        context: ContextT,
        params: GenParams,
        on_text: OnText,
        constraint: Constraint | None = None,
        on_reasoning: OnText | None = None,
    ) -> Generated:
        """Generates a continuation and appends it.

        Args:
            context: The prompt; the continuation is appended to it.
            params: The sampling parameters.
            on_text: Receives each delta of the text.
            constraint: Constrains the text; its kind is among the ``capabilities``.
            on_reasoning: Receives each delta of reasoning; given only if ``params.stream_reasoning``.
        """

    # ``def expect(self, context: ContextT, upcoming: Sequence[Upcoming]) -> None`` is optional. It is called
    # before ``generate``, with the ops of the same turn that wait behind the gen.

    # ``async def fill_ahead(self, context: ContextT) -> None`` is optional. It is called while a state waits
    # for a variable or, after a turn, for its client. It computes the known beginning, at no other request's
    # cost, and changes no result.

    # ``def find_replica(self, context: ContextT) -> int | None`` is optional. It returns the number of the
    # replica on which the context's request runs, if there are several.

    async def score(self, context: ContextT, choices: Sequence[str], method: str) -> Scored:
        """Appends the choice with the highest score after the context."""

    async def decide(self, context: ContextT, questions: Sequence[Question]) -> Decided:
        """Answers questions about the context, independently of each other, and appends nothing. Called only
        if ``capabilities.decisions``. ``BadArgument`` within the assistant's turn."""

    async def fork(self, context: ContextT, count: int) -> list[ContextT]:
        """``count`` contexts that continue from here and share the prefix."""

    def hint(self, context: ContextT, hint: StateHint) -> None:
        """Receives a hint about the context's next ops. Does not affect results."""

    def text(self, context: ContextT) -> str:
        """The text of the context, including the markup of turns."""

    async def token_ids(self, context: ContextT) -> list[int]:
        """The token ids of the context. ``NotSupported`` if ``capabilities.token_ids`` is False."""

    async def token_texts(self, context: ContextT) -> list[str]:
        """The texts of the context's tokens; joined, they are its text. ``NotSupported`` as in
        ``token_ids``."""

    def free(self, context: ContextT) -> None:
        """Releases the context: nothing will be appended or generated any more. ``text``, ``token_ids`` and
        ``token_texts`` can still read it."""

    async def stats(self) -> Stats:
        """The counters of the backend."""

    def watching(self) -> AbstractContextManager[View]:
        """The scope of a watch. ``Overloaded`` if there are too many; ``NotSupported`` unless
        ``capabilities.watch``."""


class SessionModels(NamedTuple):
    """The models of one session: the generator of its default model, the generators of the tenant's other
    models by name, the embedding models by name, and the generators whose counters are summed (none: only
    the default's)."""

    default: Generator[Any]
    others: Mapping[str, Generator[Any]] = MappingProxyType({})
    embedders: Mapping[str, Embedder] = MappingProxyType({})
    counted: Sequence[Generator[Any]] = ()
