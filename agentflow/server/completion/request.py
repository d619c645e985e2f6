"""What every HTTP API asks of the engine, in one form, and what it gets back.

One module per API translates its own requests into a ``CompletionRequest`` and the deltas into its own
answers; ``completion`` runs them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from agentflow.errors import NotSupported
from agentflow.protocol.chat import FREE_CHOICE, CalledTool, Conversation, Message, ToolChoice, ToolSpec
from agentflow.protocol.constraint import Constraint
from agentflow.protocol.events import Usage
from agentflow.protocol.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class TokenIds:
    """A prompt as the ids that the model is given, with nothing put before them."""

    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """``prompt``: a conversation, after which the assistant speaks (a last turn of the assistant's own is
    not ended, but goes on); or a text in which special tokens count; or token ids. ``n`` answers are
    generated. ``constraint``: of answers that call no tool. ``priority``: higher goes first, within the
    tenant. ``max_prompt_tokens``: a longer prompt is refused. ``opens_turn``: False where only the prompt's
    ids are wanted, of the conversation without the assistant's next turn."""

    prompt: tuple[Message, ...] | str | TokenIds
    params: SamplingParams
    constraint: Constraint | None = None
    tools: tuple[ToolSpec, ...] = ()
    tool_choice: ToolChoice = FREE_CHOICE
    n: int = 1
    cache_salt: str = ""
    priority: int = 0
    max_prompt_tokens: int | None = None
    opens_turn: bool = True

    @property
    def conversation(self) -> Conversation:
        """``NotSupported`` where the prompt is none."""
        if isinstance(self.prompt, str | TokenIds):
            raise NotSupported("tools need a conversation as the prompt, not plain text or token ids")
        return Conversation(self.prompt, self.tools, self.tool_choice)


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A generated token as log-probabilities name it; ``logprob`` is None where it was encoded anew.
    ``top``: the likeliest at its place."""

    token_id: int
    text: str
    raw: bytes
    logprob: float | None
    top: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class TextDelta:
    """Answer number ``index`` goes on by ``text``; ``tokens`` where log-probabilities are asked for."""

    index: int
    text: str
    tokens: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class ToolCallBegun:
    """Answer number ``index`` calls a tool; ``call`` counts its calls from 0."""

    index: int
    call: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ToolArguments:
    """The call's arguments, a JSON object, go on by ``text``."""

    index: int
    call: int
    text: str


FinishReason: TypeAlias = Literal["stop", "length", "tool_calls"]


@dataclass(frozen=True, slots=True)
class AnswerEnded:
    """The last delta of an answer. ``stop``: the stop string, or the token id of ``stop_token_ids``, that
    ended it; None for the model's own end."""

    index: int
    finish_reason: FinishReason
    usage: Usage
    stop: str | int | None = None


CompletionDelta: TypeAlias = TextDelta | ToolCallBegun | ToolArguments | AnswerEnded


@dataclass(frozen=True, slots=True)
class Answer:
    """All deltas of one answer, put together."""

    text: str
    tool_calls: tuple[CalledTool, ...]
    tokens: tuple[TokenLogprob, ...]
    finish_reason: FinishReason
    usage: Usage
    stop: str | int | None = None
