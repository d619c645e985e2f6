"""The engine's view of one program state: its tokens, and the encoding of whole conversations.

The generator opens, fills and forks an ``EngineContext``. ``fill_conversation`` writes a conversation that an
HTTP client sent into an empty context, turn by turn. Such a client sends the whole conversation again with
each turn, and earlier answers come back as text and tool calls. Encoded again, an answer may become other
tokens than the generated ones, and its calls other text; then the cache would not match anything after it.
``OutputTokenCache`` therefore keeps the generated tokens of recent answers, by the conversation that each one
ends. Only an identical conversation matches, so conversations do not affect each other.
"""

from __future__ import annotations

import hashlib
import json
import time
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from agentflow.engine.generator.prompt_changes import Outline, outline
from agentflow.engine.messages import Finished, UpdateHint
from agentflow.engine.request import AWAITED_GROUPS, PATIENT_GROUPS, Origin
from agentflow.engine.runner import RunnerInfo
from agentflow.engine.text.chat_template import ChatTemplate
from agentflow.engine.text.reasoning import (
    ReasoningFormat,
    reasoning_format_after,
    reasoning_marks,
    shown_reasoning,
)
from agentflow.engine.text.state.token_state import TokenState
from agentflow.engine.text.tokenizer import Tokenizer
from agentflow.engine.text.tool_format import takes_system, tool_description
from agentflow.engine.text.tools import ToolUse, tool_use
from agentflow.errors import BadArgument, PromptTooLong
from agentflow.protocol.chat import Conversation, Message
from agentflow.protocol.images import Medium, Video, medium_key, medium_kind
from agentflow.runtime.generator import StateHint
from agentflow.runtime.programs.scheduling_hint import SchedulingHint

# The estimate until a text is encoded.
CHARS_PER_TOKEN = 4
# The same for an image, and for a frame of a video, until it is read.
TOKENS_PER_IMAGE = 256
TOKENS_PER_FRAME = 64
# The frames of a video whose number of frames is not given.
FRAMES_PER_VIDEO = 16
# A text that is probably too long is encoded in pieces of this size, each some tenths of a second.
PIECE_CHARS = 65_536
# Rendering one turn costs about as much as encoding this many characters.
CHARS_PER_TURN = 32
# Appending this many characters of a conversation costs about as much as encoding one.
FILLED_CHARS = 16

MAX_TOKENS = 500_000
"""Default capacity of an ``OutputTokenCache``, at four bytes a token."""
TOKENS_PER_ENTRY = 64
"""The memory of one cache entry without its tokens, counted in tokens."""


class PromptLimits:
    """The longest prompt that one model accepts, with cheap checks against it."""

    def __init__(self, tokenizer: Tokenizer, info: RunnerInfo) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = info.vocab_size
        self.max_turns = info.max_context  # each turn is at least one token
        self.most_tokens = min(info.max_context, info.num_slots)
        """The limit of a prompt with its output: the smaller of the model's context and the KV pool."""

    def max_tokens(self, limit: int | None = None) -> int:
        """Returns the most tokens of a prompt: the smallest of the model's context, the KV pool and
        ``limit``."""
        return min(self.most_tokens, limit or self.most_tokens)

    def check_length(self, num_chars: int, max_tokens: int | None = None) -> None:
        """Raises ``PromptTooLong`` if every encoding of a text with ``num_chars`` characters exceeds
        ``max_tokens``. Call it before encoding, which would take long. Default: the limit of the model."""
        max_tokens = max_tokens or self.most_tokens
        fewest = self._tokenizer.fewest_tokens(num_chars)
        if fewest > max_tokens:
            raise PromptTooLong(
                f"the prompt has {num_chars:,} characters, which is at least {fewest:,} tokens; "
                f"the limit is {max_tokens:,}: shorten it"
            )

    def checking_texts(self, texts: Sequence[str], max_tokens: int | None = None) -> Iterator[int]:
        """Raises ``PromptTooLong`` for texts that are far longer than ``max_tokens``. Each step encodes one
        piece, and the first one beyond the limit is the last. Has no steps for texts that may well fit.
        Default: the limit of the model.

        Yields:
            The number of characters that the next step encodes.
        """
        max_tokens = max_tokens or self.most_tokens
        if sum(map(len, texts)) <= CHARS_PER_TOKEN * max_tokens:
            return
        num_tokens = 0
        for text in texts:
            for start in range(0, len(text), PIECE_CHARS):
                piece = text[start : start + PIECE_CHARS]
                yield len(piece)
                num_tokens += len(self._tokenizer.encode_markup(piece))
                # A text that is cut into pieces may have a few more tokens.
                if num_tokens > max_tokens + max_tokens // 4:
                    raise PromptTooLong(
                        f"the prompt has more than {max_tokens:,} tokens, which is the limit: shorten it"
                    )

    def check_texts(self, texts: Sequence[str], *, max_tokens: int | None = None) -> None:
        """``checking_texts`` without pauses, for a worker thread. Accepts one piece, whatever its tokens:
        the engine rejects it."""
        if sum(map(len, texts)) > PIECE_CHARS:
            for _ in self.checking_texts(texts, max_tokens):
                pass

    def check_num_tokens(self, num_tokens: int, max_tokens: int | None = None) -> None:
        """Raises ``PromptTooLong`` for more than ``max_tokens``. Default: the limit of the model."""
        max_tokens = max_tokens or self.most_tokens
        if num_tokens > max_tokens:
            raise PromptTooLong(
                f"the prompt has {num_tokens:,} tokens; this server takes at most {max_tokens:,}: shorten it"
            )

    def check_turns(self, num_turns: int) -> None:
        """Raises ``PromptTooLong`` for more turns than the context has tokens."""
        if num_turns > self.max_turns:
            raise PromptTooLong(
                f"the prompt has more than {self.max_turns:,} turns of at least one token each: shorten it"
            )

    def check_ids(self, token_ids: Sequence[int]) -> None:
        """Raises ``BadArgument`` for an id outside the vocabulary."""
        if not token_ids or (min(token_ids) >= 0 and max(token_ids) < self._vocab_size):
            return
        wrong = next(i for i in token_ids if not 0 <= i < self._vocab_size)
        raise BadArgument(
            f"{wrong} is not a token of this model: ids are 0 to {self._vocab_size - 1}", param="prompt"
        )


class FilledAhead(NamedTuple):
    """A request that computes known tokens of a waiting state. ``request_id``: as in ``compute_ahead``."""

    request_id: int
    num_tokens: int


class PrefilledAhead(NamedTuple):
    """A request that computes a prefix before forks need it. ``request_id``: as in ``compute_ahead``."""

    request_id: int
    token_ids: list[int]


@dataclass(eq=False)
class EngineContext:
    """One state of a program in the engine."""

    tokens: TokenState
    origin: Origin  # of its requests, without their scheduling hint
    limits: PromptLimits
    num_unencoded_chars: int = 0
    num_to_encode: int = 0  # the cost of rendering and encoding the appended text, in characters
    num_turns: int = 0
    num_media: int = 0
    has_run: bool = False  # the engine knows the state
    prefill_ahead: PrefilledAhead | None = None
    filled_ahead: FilledAhead | None = None  # while the state waits
    is_freed: bool = False
    outlived: bool = False  # the engine's state continues in a later context
    is_dropped: bool = False  # as in ``StateHint``
    scheduling: SchedulingHint | None = None
    deadline: float | None = None  # when the state should be done, on ``time.monotonic``
    tools: ToolUse | None = None  # of the conversation with which the state began, or offered since
    conversation_key: bytes | None = None  # of that conversation, if the model's answer to it comes next
    outline: Outline | None = None  # of that conversation, until its first request
    changed: str = ""  # as in ``Origin``, of the next request
    has_new_tools: bool = False  # since the last request
    num_rerendered: int = 0  # the tokens that had been rendered again at the last call of ``note_rerendered``
    # The beginnings of that conversation to keep in the cache, with seconds: as numbers of its messages and,
    # once it is encoded, as in ``Origin``.
    kept_messages: Sequence[tuple[int, float]] = ()
    kept_prefixes: Sequence[tuple[int, float]] = ()

    def fill(self, text: str) -> None:
        """Appends text, to be encoded later. Raises ``PromptTooLong`` if no output would fit after it."""
        self.limits.check_length(self.num_unencoded_chars + len(text))
        self.tokens.text(text)
        self.add_chars(len(text))

    def medium(self, medium: Medium) -> None:
        """Appends an image or a video, to be read later. Raises ``PromptTooLong`` for more of them than the
        context has tokens."""
        self.num_media += 1
        self.limits.check_turns(self.num_media)
        self.tokens.medium(medium)

    def begin_role(self, role: str, tool_call_id: str | None = None, name: str | None = None) -> None:
        """Opens a turn under the chat template. Raises ``PromptTooLong`` for more turns than the context has
        tokens."""
        self.limits.check_turns(self.num_turns + 1)
        self.tokens.begin_role(role, tool_call_id, name)
        self.num_turns += 1
        self.num_to_encode += CHARS_PER_TURN

    def end_role(self) -> None:
        """Closes the turn."""
        self.tokens.end_role()

    def offer_tools(self, template: ChatTemplate, offered: Conversation) -> None:
        """Replaces the tools that replies may call. The prompt changes from its beginning, unless the tools
        are the same. ``offered``: a conversation without messages. Raises the errors of
        ``fill_conversation``."""
        use = tool_use(template, offered)
        self.has_new_tools = True
        if use.form.is_native:
            self.tokens.tools(use.tools)
        else:
            description = tool_description(offered.tools) if offered.tools else ""
            self.tokens.plain_tools(description, has_system=takes_system(template))
        self.add_chars(_count_tool_chars(offered))
        self.tools = use

    def add_chars(self, num_chars: int) -> None:
        """Counts text that was appended."""
        self.num_unencoded_chars += num_chars
        self.num_to_encode += num_chars

    @property
    def num_guessed_tokens(self) -> int:
        """The number of its tokens, with an estimate for text that is not encoded yet."""
        num_text = self.tokens.num_settled + self.num_unencoded_chars // CHARS_PER_TOKEN
        return num_text + sum(map(_guess_tokens, self.tokens.unread.values()))

    def reasoning_format(self, budget: int | None = None, *, replies: bool = True) -> ReasoningFormat | None:
        """Returns how the output may begin with reasoning; None if it cannot. Appended text must be encoded
        first. ``replies``: the output may call tools."""
        marks = reasoning_marks(self.tokens.template.source)
        opening = None if marks is None else self.tokens.opening()
        if marks is None or opening is None:
            return None
        reasoning_format = reasoning_format_after(marks, *opening, budget=budget)
        use = self.tools if replies else None
        if reasoning_format is None or use is None:
            return reasoning_format
        return reasoning_format.for_answer(has_calls=bool(use.callable_names), must_call=use.must_call)

    def encode(self) -> None:
        """Encodes appended text, and finds the tokens of the beginnings to keep."""
        self.tokens.cut()
        if self.kept_messages and self.tools is not None:
            num_turns = self.tools.num_turns
            kept = [(self.tokens.num_ids_through(num_turns(n)), s) for n, s in self.kept_messages]
            self.kept_messages, self.kept_prefixes = (), [(count, s) for count, s in kept if count]

    def encoded_ids(self) -> list[int]:
        """``encode``, and then the ids of the whole prompt."""
        self.encode()
        return self.tokens.ids()

    def mark_encoded(self) -> None:
        """Records that all appended text is encoded."""
        self.num_unencoded_chars = self.num_to_encode = 0

    def note_rerendered(self) -> int:
        """Returns how many tokens were rendered again since the last call, and notes why the prompt of the
        next request changed."""
        num_new = self.tokens.num_rerendered_tokens - self.num_rerendered
        if num_new:
            self.changed = self.changed or ("tools_changed" if self.has_new_tools else "rerendered")
        self.num_rerendered += num_new
        self.has_new_tools = False
        return num_new

    def origin_now(self) -> Origin:
        """Returns the origin of a request that begins now, with its scheduling hint, the time left until the
        deadline, and why its prompt changed since the state's last request."""
        origin = self.origin_ahead()
        changed, self.changed = self.changed, ""
        if not changed and not self.kept_prefixes:
            return origin
        return msgspec.structs.replace(origin, changed=changed, kept_prefixes=self.kept_prefixes)

    def origin_ahead(self) -> Origin:
        """Returns the origin of a request for tokens that the state's next request will need."""
        origin, scheduling = self.origin, self.scheduling
        if scheduling is not None:
            group = group_of_hint(scheduling) or origin.task_group
            origin = origin.at(
                scheduling.program, group, scheduling.objective, scheduling.tpot_s, scheduling.ttft_s
            )
        if self.deadline is None:
            return origin
        left_s = max(0.0, self.deadline - time.monotonic())
        return msgspec.structs.replace(origin, deadline_s=left_s)

    def hint(self, hint: StateHint) -> UpdateHint | None:
        """Attaches a hint to the state's next requests. Returns the message to the scheduler, unless the
        engine learns the hint from the next request."""
        origin = self.origin
        if hint.trace or hint.objective is not None or hint.output_tokens:
            self.origin = msgspec.structs.replace(
                origin,
                trace=hint.trace or origin.trace,
                objective=hint.objective or origin.objective,
                output_tokens=hint.output_tokens or origin.output_tokens,
            )
        self.is_dropped = self.is_dropped or hint.is_dropped
        if hint.deadline_s is not None:
            self.deadline = time.monotonic() + hint.deadline_s
        scheduling = hint.scheduling
        if hint.objective is not None and (scheduling := scheduling or self.scheduling) is not None:
            scheduling = msgspec.structs.replace(scheduling, objective=hint.objective)
        if scheduling is None or scheduling == self.scheduling:
            return None
        self.scheduling = scheduling
        if hint.begins or not self.has_run or not origin.state:
            return None
        return UpdateHint(
            origin.state,
            scheduling.program,
            group_of_hint(scheduling) or origin.task_group,
            scheduling.objective,
            scheduling.steps,
            scheduling.returns_s,
            scheduling.tpot_s,
            scheduling.ttft_s,
        )

    def fork(self, origin: Origin) -> EngineContext:
        """Returns a context with the same tokens. Appended text must be encoded first, unless the template
        rejects it so far."""
        return EngineContext(
            self.tokens.fork(),
            origin,
            self.limits,
            num_unencoded_chars=self.num_unencoded_chars,
            num_to_encode=self.num_to_encode,
            num_turns=self.num_turns,
            num_media=self.num_media,
            scheduling=None if self.scheduling is None else msgspec.structs.replace(self.scheduling, group=0),
            deadline=self.deadline,
            tools=self.tools,
            conversation_key=self.conversation_key,
        )


def _guess_tokens(medium: Medium) -> int:
    if isinstance(medium, Video):
        return TOKENS_PER_FRAME * (medium.num_frames or FRAMES_PER_VIDEO)
    return TOKENS_PER_IMAGE


def number_of_name(name: str) -> int:
    """Returns the number of a program or task group with this name, the same in all sessions. Numbers without
    names count from 1 and never reach it."""
    digest = hashlib.blake2b(name.encode("utf-8", "backslashreplace"), digest_size=7).digest()
    return 2**60 + int.from_bytes(digest, "big")


def group_of_hint(hint: SchedulingHint) -> int:
    """Returns the task group of a hint, or 0. No other group has the number."""
    if not hint.group:
        return 0
    return (AWAITED_GROUPS if hint.group_objective == "latency" else PATIENT_GROUPS) + hint.group


def fill_conversation(
    context: EngineContext,
    conversation: Conversation,
    template: ChatTemplate,
    outputs: OutputTokenCache,
    *,
    opens_turn: bool = True,
) -> None:
    """Writes a conversation into an empty context and opens the assistant's turn. If the last message is the
    assistant's, that turn continues instead.

    Args:
        context: an empty context.
        conversation: the messages and tools.
        template: the chat template.
        outputs: the tenant's generated answers; an answer found there is appended as its generated tokens.
        opens_turn: open the assistant's turn.

    Raises:
        BadArgument: the template or the tools do not allow the conversation.
        NotSupported: the template cannot express it.
        PromptTooLong: it does not fit the model.
    """
    use = context.tools = tool_use(template, conversation)
    context.tokens.tools(use.tools)
    context.add_chars(_count_tool_chars(conversation))
    salt = f"({context.origin.cache_salt!r}, {template.values!r})"
    start = f"({salt}, {conversation.tools!r})".encode("utf-8", "backslashreplace")
    tools = hashlib.blake2b(start, digest_size=16).digest()
    # The keys of the messages with their calls, which the plain notation writes into contents.
    keys = conversation_keys(use.named, start=tools)
    context.outline = outline(use.named, tools, salt, keys)
    kept = iter([outputs.get(key) for one, key in zip(use.named, keys, strict=True) if _is_answer(one)])
    last = len(use.messages) - 1
    for number, message in enumerate(use.messages):
        reasoning = shown_reasoning(message.reasoning, message.content, template.source)
        answer = next(kept) if _is_answer(message) else None
        text = message.content if answer is None else answer.text(message.content)
        if message.tool_calls and not text.startswith(use.form.lead):
            answer = None  # the template would write ``lead`` before it, which was not in the prompt
        is_last = number == last and _is_answer(message)
        has_calls = bool(message.tool_calls) or message.role == "tool"
        if (has_calls and answer is None) or (reasoning and not is_last):
            context.tokens.turn(msgspec.structs.replace(message, reasoning=reasoning))
            context.add_chars(_count_chars(message) + len(reasoning or ""))
            continue
        context.begin_role(message.role)
        if message.images:
            for part in message.parts:
                if isinstance(part, str):
                    context.fill(part)
                else:
                    context.medium(part)
        elif answer is None:
            context.fill(text)
        else:
            context.tokens.generated(answer.token_ids, text)
        if message.tool_calls:
            context.tokens.called(message)
        elif is_last:
            return
        context.end_role()
    if opens_turn:
        context.begin_role("assistant")
        context.conversation_key = keys[-1] if keys else None


def fill_cost(conversation: Conversation) -> int:
    """Returns the cost of ``fill_conversation``, in characters that could be encoded in the same time."""
    num_items = len(conversation.tools)
    num_items += sum(1 + len(message.tool_calls) for message in conversation.messages)
    # Each character of a tool's parameters may be a value, which several functions walk through.
    num_walked = _count_tool_chars(conversation) // 4
    calls = [call for message in conversation.messages for call in message.tool_calls]
    num_walked += sum(len(call.arguments) for call in calls) // 4
    num_reasoning = sum(len(message.reasoning or "") for message in conversation.messages)
    num_filled = num_chars(conversation) + num_reasoning
    return CHARS_PER_TURN * num_items + num_walked + num_filled // FILLED_CHARS


@dataclass(frozen=True, slots=True)
class GeneratedAnswer:
    """The tokens of an answer."""

    token_ids: array[int]
    calling: bytes = b""  # the whole text in UTF-8, of an answer with tool calls or in channels

    def text(self, content: str) -> str:
        """Returns the text of the tokens. ``content``: of the message."""
        return self.calling.decode() or content

    @property
    def size(self) -> int:
        """Its memory, counted in tokens of four bytes."""
        return len(self.token_ids) + len(self.calling) // 4 + TOKENS_PER_ENTRY


class OutputTokenCache:
    """The generated tokens of one tenant's recent answers from one model, by conversation.

    Holds at most ``max_tokens`` tokens. Each entry costs ``TOKENS_PER_ENTRY`` in addition to its tokens, and
    a text with tool calls one token for four bytes. The least recently used entry is dropped first.
    """

    def __init__(self, max_tokens: int = MAX_TOKENS) -> None:
        self._max_tokens = max_tokens
        self._num_tokens = 0
        self._outputs: OrderedDict[bytes, GeneratedAnswer] = OrderedDict()

    def __len__(self) -> int:
        return len(self._outputs)

    def put_answer(self, context: EngineContext, end: Finished, answer: Message) -> None:
        """Stores the tokens generated for the context, if it holds a conversation. ``answer``: as the client
        gets it. An answer is not stored if the client could not continue it: if a limit truncated a call, or
        if it has reasoning that its template does not accept in the text (only channels do)."""
        is_truncated = end.finish_reason == "length"
        in_channels = context.tokens.template.has_channels and answer.content != end.text
        is_whole = answer.content == end.text or bool(answer.tool_calls) or in_channels
        if (end.reasoning_tokens and not in_channels) or not is_whole:
            return
        if is_truncated and answer.content != end.text:
            return
        if context.conversation_key is not None:
            [key] = conversation_keys([answer], start=context.conversation_key)
            self.put(key, end.token_ids, end.text if answer.tool_calls or in_channels else "")

    def put(self, key: bytes, token_ids: Sequence[int], calling: str = "") -> None:
        """Stores the answer that ends the conversation ``key``. ``calling``: its text if it calls tools.
        Ignores an empty answer."""
        self._drop(key)
        answer = GeneratedAnswer(array("i", token_ids), calling.encode())
        if not token_ids or answer.size > self._max_tokens:
            return
        self._outputs[key] = answer
        self._num_tokens += answer.size
        while self._num_tokens > self._max_tokens:
            self._drop(next(iter(self._outputs)))

    def get(self, key: bytes) -> GeneratedAnswer | None:
        """Returns the answer that ends the conversation ``key``, or None. Thread-safe."""
        answer = self._outputs.get(key)
        if answer is not None:
            with suppress(KeyError):  # dropped by another thread in the meantime
                self._outputs.move_to_end(key)
        return answer

    def _drop(self, key: bytes) -> None:
        dropped = self._outputs.pop(key, None)
        if dropped is not None:
            self._num_tokens -= dropped.size


# Encodes a field that is None, which differs from an empty one.
_NONE = b"\xff" * 8


def conversation_keys(messages: Iterable[Message], start: bytes = b"") -> list[bytes]:
    """Returns, for each message, the key of the conversation up to and including it: a chained BLAKE2b hash
    of all fields, without the ids of calls; images and videos count by their sources. Arguments are compared
    as JSON values, because clients may serialise them again. ``start``: the key of the preceding part."""
    keys: list[bytes] = []
    key = start
    for message in messages:
        fields = [message.role, message.content, message.tool_call_id, message.name, message.reasoning]
        for placed in message.images:
            fields += [medium_kind(placed.medium), str(placed.at), medium_key(placed.medium)]
        for call in message.tool_calls:
            fields += [call.name, _comparable(call.arguments)]
        digest = hashlib.blake2b(key, digest_size=16)
        for text in fields:
            data = b"" if text is None else text.encode("utf-8", "surrogatepass")
            digest.update(len(data).to_bytes(8, "little", signed=False) if text is not None else _NONE)
            digest.update(data)
        key = digest.digest()
        keys.append(key)
    return keys


def _comparable(arguments: str) -> str:
    """Returns equal texts for arguments with equal JSON values; other text is unchanged."""
    try:
        value = json.loads(arguments, parse_float=_number)
        return json.dumps(value, sort_keys=True, allow_nan=False)
    except (ValueError, RecursionError):
        return arguments


def _number(text: str) -> float:
    """JavaScript writes 1.0 as 1."""
    number = float(text)
    return int(number) if number.is_integer() and abs(number) < 2**53 else number


def _is_answer(message: Message) -> bool:
    return message.role == "assistant"


def num_chars(conversation: Conversation) -> int:
    """Counts the characters of all messages, tool calls and tool definitions."""
    return sum(map(_count_chars, conversation.messages)) + _count_tool_chars(conversation)


def list_texts(messages: Sequence[Message]) -> list[str]:
    """Returns the contents of the messages, the arguments of their tool calls, and the reasoning of the
    latest turn: templates drop earlier reasoning."""
    last = max([n for n, message in enumerate(messages) if message.role == "user"], default=-1)
    texts: list[str] = []
    for number, message in enumerate(messages):
        texts += [message.content, *[call.arguments for call in message.tool_calls]]
        if message.reasoning is not None and number > last:
            texts.append(message.reasoning)
    return texts


def _count_chars(message: Message) -> int:
    """Counts the characters of a message without reasoning, which templates may drop."""
    return len(message.content) + sum(len(call.name) + len(call.arguments) for call in message.tool_calls)


def _count_tool_chars(conversation: Conversation) -> int:
    return sum(
        len(tool.name) + len(tool.description) + len(msgspec.json.encode(tool.parameters))
        for tool in conversation.tools
    )
