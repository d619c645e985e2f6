"""A completion request and the deltas of its answers, in one form for all HTTP APIs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import jiter
import msgspec

from agentflow.errors import NotSupported
from agentflow.protocol.chat import FREE_CHOICE, CalledTool, Conversation, Message, ToolChoice, ToolSpec
from agentflow.protocol.constraint import Constraint
from agentflow.protocol.events import Usage
from agentflow.protocol.sampling import SamplingParams

# A token with log-probabilities takes about 200 bytes for its text and bytes until its answer is sent.
MAX_LOGPROB_TOKENS = 2_000_000


@dataclass(frozen=True, slots=True)
class TokenIds:
    """A prompt as token ids, which the model gets unchanged."""

    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Continuation:
    """Token ids that end with an answer of the model, and the turns that follow it."""

    ids: tuple[int, ...]
    messages: tuple[Message, ...]


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """A prompt and how to answer it ``n`` times."""

    # A conversation, whose last turn is continued if it is the assistant's; or a text, in which special
    # tokens are recognised; or token ids; or token ids and further turns.
    prompt: tuple[Message, ...] | str | TokenIds | Continuation
    params: SamplingParams  # checked by the route
    constraint: Constraint | None = None  # for answers that call no tool
    tools: tuple[ToolSpec, ...] = ()
    tool_choice: ToolChoice = FREE_CHOICE
    n: int = 1
    cache_salt: str = ""
    priority: int = 0  # among the requests of one tenant, higher ones run first
    max_prompt_tokens: int | None = None  # longer prompts are rejected
    opens_turn: bool = True  # False: the prompt ends before the opening of the assistant's turn
    returns_prompt: bool = False  # a ``PromptDelta`` begins each answer
    prompt_logprobs: int | None = None  # return the prompt's log-probabilities, with this many alternatives
    generates: bool = True  # False if the answer is the prompt alone
    template_values: Mapping[str, Any] = field(default_factory=dict)  # variables of the chat template
    reasons: bool | None = None  # whether a reasoning model reasons first; None: its template decides
    reasoning_budget: int | None = None  # the limit of reasoning tokens
    effort: str | None = None  # the reasoning effort, for templates that have a variable for it
    # Prefixes of the conversation to keep in the cache: the number of messages, after the tools, and the
    # seconds to keep them after each use.
    kept: Sequence[tuple[int, float]] = ()
    unset: tuple[str, ...] = ()  # the names of ``params`` with the route's defaults, not the client's values

    @property
    def conversation(self) -> Conversation:
        """The prompt with its tools. ``NotSupported`` for text and token ids."""
        if isinstance(self.prompt, str | TokenIds | Continuation):
            raise NotSupported("tools need a conversation as the prompt, not plain text or token ids")
        return Conversation(self.prompt, self.tools, self.tool_choice)


def names_of_unset(**given: object) -> tuple[str, ...]:
    """The names of the parameters that are None, for ``CompletionRequest.unset``."""
    return tuple([name for name, value in given.items() if value is None])


@dataclass(frozen=True, slots=True)
class AnswerToken:
    """A token of an answer or a prompt."""

    token_id: int
    text: str
    raw: bytes  # the token's bytes, which may be parts of characters
    logprob: float | None  # None if the text was encoded again
    top: tuple[AnswerToken, ...] = ()  # the most likely tokens at this position
    rank: int | None = None  # for a token of the prompt: 1 for the likeliest


@dataclass(frozen=True, slots=True)
class PromptDelta:
    """The prompt of answer ``index``, before its first text. ``tokens``: one for each of ``token_ids``, if
    log-probabilities of the prompt were requested; the first has none. The first ``num_added`` tokens are not
    part of ``text``: the tokenizer adds them."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    tokens: tuple[AnswerToken, ...] = ()
    num_added: int = 0


@dataclass(frozen=True, slots=True)
class TextDelta:
    """More text of answer ``index``, with its tokens if log-probabilities were requested. The tokens may also
    come alone, before their text or within a call, whose tokens they are: an empty text ends nothing."""

    index: int
    text: str
    tokens: tuple[AnswerToken, ...] = ()


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """More text of the model's reasoning, with its tokens if log-probabilities were requested. Reasoning
    mostly precedes answer ``index``, but may follow a text or a call."""

    index: int
    text: str
    tokens: tuple[AnswerToken, ...] = ()


@dataclass(frozen=True, slots=True)
class ToolCallBegun:
    """Answer ``index`` begins a tool call. ``call`` numbers the calls of an answer from 0."""

    index: int
    call: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ToolArguments:
    """More text of the arguments of the latest call, which are a JSON object. No text and no reasoning comes
    within them."""

    index: int
    call: int
    text: str


def arguments_json(arguments: str) -> msgspec.Raw:
    """The arguments of a call as a JSON object in one line, for APIs whose answers have an object, not its
    text. The values are as the model wrote them: Python has no number for ``1e999``, and limits the depth. If
    a truncated answer ends within the arguments, returns the complete part, as clients read it from a stream.

    >>> bytes(arguments_json('{"city": "Oslo",\\n"far": 1e999}'))
    b'{"city":"Oslo","far":1e999}'
    >>> bytes(arguments_json('{"city": "Oslo", "da'))
    b'{"city":"Oslo"}'
    """
    if CalledTool("", "", arguments).is_whole:
        return msgspec.Raw(msgspec.json.format(arguments.encode(), indent=-1))
    try:
        read = jiter.from_json(
            arguments.encode(), partial_mode=True, float_mode="lossless-float", allow_inf_nan=False
        )
    except ValueError:
        return NO_ARGUMENTS
    return msgspec.Raw(_encode_object(read)) if isinstance(read, dict) else NO_ARGUMENTS


def _encode_number(number: object) -> msgspec.Raw:
    """A ``jiter.LosslessFloat`` as it was written."""
    return msgspec.Raw(str(number).encode())


NO_ARGUMENTS = msgspec.Raw(b"{}")
_encode_object = msgspec.json.Encoder(enc_hook=_encode_number).encode


FinishReason: TypeAlias = Literal["stop", "length", "tool_calls"]


@dataclass(frozen=True, slots=True)
class CheckedOutput:
    """The check of a call of the tool ``name``, or of an answer (an empty name), whose schema was relaxed.
    ``violated``: the paths of violated keywords in the schema; None if it could not be checked."""

    name: str
    violated: tuple[tuple[str, ...], ...] | None


@dataclass(frozen=True, slots=True)
class AnswerEnded:
    """The last delta of an answer. ``stop``: the stop string, or the id of ``stop_token_ids``, that ended it;
    None if the model ended it. ``token_ids``: the answer's tokens. ``checks``: the checks of tool calls and
    the answer under relaxed schemas."""

    index: int
    finish_reason: FinishReason
    usage: Usage
    stop: str | int | None = None
    token_ids: tuple[int, ...] = ()
    checks: tuple[CheckedOutput, ...] = ()


CompletionDelta: TypeAlias = (
    PromptDelta | ReasoningDelta | TextDelta | ToolCallBegun | ToolArguments | AnswerEnded
)


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer: all of its deltas, assembled."""

    text: str
    tool_calls: tuple[CalledTool, ...]
    tokens: tuple[AnswerToken, ...]
    finish_reason: FinishReason
    usage: Usage
    stop: str | int | None = None
    prompt: PromptDelta | None = None
    token_ids: tuple[int, ...] = ()
    reasoning: str = ""


@dataclass(slots=True)
class Times:
    """When the first answer of a request reached its stages, as ``time.perf_counter_ns``; 0: not yet.
    ``accepted``: it is in the engine's queue, or the API accepted it. ``first_token``: its first token was
    generated. ``ended``: it is complete."""

    accepted: int = 0
    first_token: int = 0
    ended: int = 0


_MERGED = TextDelta | ReasoningDelta | ToolArguments


def merge_deltas(deltas: Sequence[CompletionDelta]) -> list[CompletionDelta]:
    """Merges consecutive deltas of the same text."""
    runs: list[list[CompletionDelta]] = []
    last: dict[int, list[CompletionDelta]] = {}  # the last run of each answer
    for delta in deltas:
        run = last.get(delta.index)
        if run is not None and type(run[0]) is type(delta) and isinstance(delta, _MERGED):
            run.append(delta)
        else:
            last[delta.index] = run = [delta]
            runs.append(run)
    return [run[0] if len(run) == 1 else _join_deltas(run) for run in runs]


def _join_deltas(run: Sequence[CompletionDelta]) -> CompletionDelta:
    first = run[0]
    text = "".join([delta.text for delta in run if isinstance(delta, _MERGED)])
    if isinstance(first, ToolArguments):
        return ToolArguments(first.index, first.call, text)
    tokens = [
        token for delta in run if isinstance(delta, TextDelta | ReasoningDelta) for token in delta.tokens
    ]
    kind = ReasoningDelta if isinstance(first, ReasoningDelta) else TextDelta
    return kind(first.index, text, tuple(tokens))


def join_answers(deltas: Sequence[CompletionDelta], num_answers: int) -> list[Answer]:
    """Assembles answers from all of their deltas."""
    by_index: list[list[CompletionDelta]] = [[] for _ in range(num_answers)]
    for delta in deltas:
        by_index[delta.index].append(delta)
    return [_join_answer(own) for own in by_index]


def _join_answer(deltas: Sequence[CompletionDelta]) -> Answer:
    texts: list[str] = []
    reasoning: list[str] = []
    tokens: list[AnswerToken] = []
    calls: list[tuple[ToolCallBegun, list[str]]] = []
    end: AnswerEnded | None = None
    prompt: PromptDelta | None = None
    for delta in deltas:
        match delta:
            case PromptDelta():
                prompt = delta
            case TextDelta():
                texts.append(delta.text)
                tokens += delta.tokens
            case ReasoningDelta():
                reasoning.append(delta.text)
                tokens += delta.tokens
            case ToolCallBegun():
                calls.append((delta, []))
            case ToolArguments():
                calls[delta.call][1].append(delta.text)
            case AnswerEnded():
                end = delta
    assert end is not None
    called = tuple(CalledTool(begun.id, begun.name, "".join(parts)) for begun, parts in calls)
    return Answer(
        "".join(texts),
        called,
        tuple(tokens),
        end.finish_reason,
        end.usage,
        end.stop,
        prompt,
        end.token_ids,
        "".join(reasoning),
    )
