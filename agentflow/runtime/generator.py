"""What the interpreter needs of whatever generates text: an engine here, an API client elsewhere.

The engine abstraction of Parrot (Lin et al., OSDI 2024, section 5.1: fill, generate, free), with
``fork`` and ``score`` beside it. A *context* is the generator's own view of one state: token ids
in the engine, messages for an API. Only the generator encodes text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, Protocol, TypeVar

import msgspec

from agentflow.protocol.chat import Conversation
from agentflow.protocol.constraint import Constraint
from agentflow.protocol.events import Capabilities, Stats, TopLogprobs, Usage
from agentflow.protocol.sampling import SamplingParams

OnText = Callable[[str], None]
ContextT = TypeVar("ContextT")


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
