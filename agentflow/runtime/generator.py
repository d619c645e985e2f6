"""What the interpreter needs of whatever generates text: an engine here, an API client elsewhere.

The engine abstraction of Parrot (Lin et al., OSDI 2024, section 5.1: fill, generate, free), with
``fork`` and ``score`` beside it. A *context* is the generator's own view of one state: token ids
in the engine, messages for an API. Only the generator encodes text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, Protocol, TypeVar

import msgspec

from agentflow.errors import NotSupported
from agentflow.protocol.chat import Conversation
from agentflow.protocol.constraint import Constraint, ConstraintKind
from agentflow.protocol.sampling import SamplingParams
from agentflow.protocol.token_logprob import TopLogprobs

OnText = Callable[[str], None]
ContextT = TypeVar("ContextT")


class Capabilities(msgspec.Struct, frozen=True):
    """What a generator can do; the rest is refused before anything runs."""

    model: str
    roles: bool = True
    select: bool = True
    logprobs: bool = True
    seeds: bool = True
    max_context: int | None = None
    constraints: tuple[ConstraintKind, ...] = ()
    images: bool = False
    token_ids: bool = True
    conversations: bool = False

    def require_conversations(self) -> None:
        """``NotSupported`` where the backend takes no whole conversations."""
        if not self.conversations:
            raise NotSupported(f"{self.model} takes no whole conversations: append its turns one by one")

    def require(self, constraint: Constraint | None) -> None:
        """``NotSupported`` where the backend could not keep the constraint."""
        for part in (constraint, constraint and constraint.instead):
            if part is not None and part.kind not in self.constraints:
                raise NotSupported(
                    f"{self.model} cannot generate under a constraint of the kind {part.kind!r} "
                    f"(it can: {', '.join(self.constraints) or 'none'})"
                )

    def require_images(self) -> None:
        """``NotSupported`` where the backend sees no images."""
        if not self.images:
            raise NotSupported(f"{self.model} sees no images: image() needs a model with vision")


class Usage(msgspec.Struct, frozen=True):
    """Tokens of one generation: prompt, of which cached, and output. Usages can be added.

    >>> await s["answer"]
    'Plants turn light into sugar.'
    >>> s["answer"].usage.output_tokens
    5
    >>> s["answer"].usage.hit_rate
    0.0
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0

    @property
    def hit_rate(self) -> float:
        """Cached share of the prompt tokens, 0 to 1."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    def __add__(self, other: Usage) -> Usage:
        return Usage(
            self.prompt_tokens + other.prompt_tokens,
            self.cached_tokens + other.cached_tokens,
            self.output_tokens + other.output_tokens,
        )


class Generated(msgspec.Struct, frozen=True):
    """The end of a generation. ``finish_reason``: ``eos``, ``stop`` or ``length``."""

    text: str
    finish_reason: str
    usage: Usage
    logprobs: tuple[float | None, ...] | None = None
    top_logprobs: TopLogprobs | None = None


class Scored(msgspec.Struct, frozen=True):
    """The outcome of a select: the chosen index, and each choice's score (what the method compares): the
    first of the largest is chosen."""

    index: int
    scores: tuple[float, ...]
    usage: Usage


class Stats(msgspec.Struct, frozen=True):
    """Counters of the backend since its start, and gauges of now. Tokens unless the name says
    otherwise; ``steps`` are forward passes, ``*_slots`` tokens in the KV pool.

    >>> await s
    >>> stats = await flow.stats()
    >>> stats.generated_tokens, stats.hit_rate
    (5, 0.0)
    """

    model: str
    steps: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    cached_output_tokens: int = 0
    computed_tokens: int = 0
    generated_tokens: int = 0
    evicted_tokens: int = 0
    rerendered_tokens: int = 0
    retractions: int = 0
    free_slots: int = 0
    cached_slots: int = 0
    held_slots: int = 0
    total_slots: int = 0
    running: int = 0
    waiting: int = 0
    peak_resident_bytes: int = 0
    restarts: int = 0
    forced_tokens: int = 0

    @property
    def hit_rate(self) -> float:
        """Cached share of all prompt tokens, 0 to 1."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0


class StateHint(msgspec.Struct, frozen=True):
    """What a program knows of a state's next ops; see ``ops.Hint``."""

    objective: Literal["latency", "throughput"] | None = None
    output_tokens: int | None = None
    forks: int | None = None
    deadline_s: float | None = None


class Generator(Protocol[ContextT]):
    """One per model. All methods belong to the event loop; those that wait can be cancelled, and
    then what they started is aborted."""

    capabilities: Capabilities

    def open(self, cache_salt: str, *, program: str = "") -> ContextT:
        """A new, empty context. Contexts share cached KV only under an equal salt. Those of one program are
        siblings: one consumer waits for them."""

    def fill(self, context: ContextT, text: str) -> None:
        """Appends text, as content."""

    def begin_role(self, context: ContextT, role: str) -> None:
        """Opens a turn of the conversation."""

    def end_role(self, context: ContextT) -> None:
        """Closes the turn."""

    def image(self, context: ContextT, source: str) -> None:
        """Appends an image, given as a URL."""

    async def converse(self, context: ContextT, conversation: Conversation) -> None:
        """Begins the context with a conversation. Where ``capabilities.conversations``."""

    async def reply(
        self,
        context: ContextT,
        params: SamplingParams,
        on_text: OnText,
        constraint: Constraint | None = None,
    ) -> Generated:
        """As ``generate``, after ``converse``: what comes is the text of a reply (``agentflow.reply``), which
        may call the conversation's tools. The constraint is for one that may call none."""

    async def generate(
        self,
        context: ContextT,
        params: SamplingParams,
        on_text: OnText,
        constraint: Constraint | None = None,
    ) -> Generated:
        """Continues the context under the constraint, and appends what came. ``on_text`` hears each
        delta. The constraint is of a kind that ``capabilities`` names."""

    async def score(self, context: ContextT, choices: Sequence[str], method: str) -> Scored:
        """Picks the choice that fits best after the context, and appends it."""

    async def fork(self, context: ContextT, count: int) -> list[ContextT]:
        """``count`` contexts that go on from here, sharing the prefix."""

    def hint(self, context: ContextT, hint: StateHint) -> None:
        """What the program knows of the context's next ops. Changes no result."""

    def text(self, context: ContextT) -> str:
        """All that the context holds, the marks of its turns included."""

    async def token_ids(self, context: ContextT) -> list[int]:
        """Its token ids. ``NotSupported`` where ``capabilities.token_ids`` is False."""

    def free(self, context: ContextT) -> None:
        """Nothing is appended to the context any more, and nothing is generated after it. ``text`` and
        ``token_ids`` may still read it."""

    async def stats(self) -> Stats:
        """What the backend counts."""
