"""Puts a whole conversation into a context: its turns in the template's notation, and what the model said in
it as the tokens that it generated.

What models wrote in conversations that may go on: each answer's tokens, by the conversation up to it.

A client of an HTTP API sends the whole conversation again with each turn, answers as text. Encoded anew, an
answer may become other tokens than those that were generated, and from there on nothing is cached. So the
answer of a conversation that the server has had is taken as it was generated, as sessions have it.

Only the very same conversation counts: what a conversation is given does not depend on what others said.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from agentflow.engine.context import CHARS_PER_TURN, EngineContext
from agentflow.engine.process.ipc import Finished
from agentflow.engine.text.tools import tool_use
from agentflow.protocol.chat import Conversation, Message

if TYPE_CHECKING:
    from agentflow.engine.generator import EngineGenerator


# Four bytes each.
MAX_TOKENS = 500_000
# An entry takes so much memory beside its tokens, counted in tokens.
TOKENS_PER_ENTRY = 64
_NOTHING = b"\xff" * 8


class AnswerMemory:
    """Of one tenant and model. The answers that were last asked for are kept: ``max_tokens`` in all, where
    each counts ``TOKENS_PER_ENTRY`` more than it has."""

    def __init__(self, max_tokens: int = MAX_TOKENS) -> None:
        self._max_tokens = max_tokens
        self._num_tokens = 0
        self._answers: OrderedDict[bytes, array[int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._answers)

    def remember(self, conversation: bytes, token_ids: Sequence[int]) -> None:
        """``conversation``: the key of the conversation that ends with this answer. An empty one is
        not worth its place."""
        self._forget(conversation)
        if not token_ids or _size(token_ids) > self._max_tokens:
            return
        self._answers[conversation] = array("i", token_ids)
        self._num_tokens += _size(token_ids)
        while self._num_tokens > self._max_tokens:
            self._forget(next(iter(self._answers)))

    def recall(self, conversation: bytes) -> Sequence[int] | None:
        """The tokens of the answer that the conversation ends with, if it is known."""
        token_ids = self._answers.get(conversation)
        if token_ids is not None:
            with suppress(KeyError):  # forgotten meanwhile: conversations are also filled in threads
                self._answers.move_to_end(conversation)
        return token_ids

    def _forget(self, conversation: bytes) -> None:
        forgotten = self._answers.pop(conversation, None)
        if forgotten is not None:
            self._num_tokens -= _size(forgotten)


def _size(token_ids: Sequence[int]) -> int:
    return len(token_ids) + TOKENS_PER_ENTRY


def conversation_keys(messages: Iterable[Message], start: bytes = b"") -> list[bytes]:
    """For each message the key of the conversation up to it; ``start``: of what comes before them."""
    keys: list[bytes] = []
    key = start
    for message in messages:
        said = [message.role, message.content, message.tool_call_id, message.name]
        for call in message.tool_calls:
            said += [call.name, call.arguments]
        digest = hashlib.blake2b(key, digest_size=16)
        for text in said:
            data = b"" if text is None else text.encode("utf-8", "surrogatepass")
            digest.update(len(data).to_bytes(8, "little", signed=False) if text is not None else _NOTHING)
            digest.update(data)
        key = digest.digest()
        keys.append(key)
    return keys


# So many characters are filled in while one is encoded.
FILLED_CHARS = 16


async def fill_beside(
    generator: EngineGenerator,
    context: EngineContext,
    conversation: Conversation,
    *,
    opens_turn: bool = True,
) -> None:
    """``fill_conversation``, in a thread where it is much."""
    fill = partial(fill_conversation, generator, context, conversation, opens_turn=opens_turn)
    await generator.encode_beside(_fill_cost(conversation), fill)


def _fill_cost(conversation: Conversation) -> int:
    """In characters that could be encoded in that time."""
    num_items = len(conversation.tools)
    num_items += sum(1 + len(message.tool_calls) for message in conversation.messages)
    return CHARS_PER_TURN * num_items + num_chars(conversation) // FILLED_CHARS


def fill_conversation(
    generator: EngineGenerator,
    context: EngineContext,
    conversation: Conversation,
    *,
    opens_turn: bool = True,
) -> None:
    """Fills an empty context. The assistant speaks next, unless its own turn is the last and goes on, or
    ``opens_turn`` is False. ``BadArgument`` and ``NotSupported`` where the template or the tools do not let
    it be, ``PromptTooLong``."""
    use = context.tools = tool_use(generator.template, conversation)
    context.tokens.tools(use.tools)
    context.num_unencoded_chars += _num_chars_of_tools(conversation)
    start = repr((context.origin.cache_salt, use.tools)).encode("utf-8", "backslashreplace")
    keys = conversation_keys(use.messages, start=start)
    last = len(use.messages) - 1
    for number, (message, key) in enumerate(zip(use.messages, keys, strict=True)):
        if message.tool_calls or message.role == "tool":
            context.tokens.turn(message)
            context.num_unencoded_chars += _num_chars_of(message)
            continue
        token_ids = generator.answers.recall(key) if message.role == "assistant" else None
        generator.begin_role(context, message.role)
        if token_ids is None:
            generator.fill(context, message.content)
        else:
            context.tokens.generated(token_ids, message.content)
        if number == last and message.role == "assistant":
            return  # it goes on
        generator.end_role(context)
    if opens_turn:
        generator.begin_role(context, "assistant")
        context.conversation = keys[-1] if keys else b""


def remember_answer(generator: EngineGenerator, context: EngineContext, end: Finished) -> None:
    """For when the conversation comes back with it as text."""
    if context.conversation is not None:
        [key] = conversation_keys([Message("assistant", end.text)], start=context.conversation)
        generator.answers.remember(key, end.token_ids)


def num_chars(conversation: Conversation) -> int:
    """Of all that is said and told."""
    return sum(map(_num_chars_of, conversation.messages)) + _num_chars_of_tools(conversation)


def texts_of(messages: Iterable[Message]) -> list[str]:
    """All that is said in them."""
    return [
        text
        for message in messages
        for text in (message.content, *[call.arguments for call in message.tool_calls])
    ]


def _num_chars_of(message: Message) -> int:
    return len(message.content) + sum(len(call.name) + len(call.arguments) for call in message.tool_calls)


def _num_chars_of_tools(conversation: Conversation) -> int:
    return sum(
        len(tool.name) + len(tool.description) + len(msgspec.json.encode(tool.parameters))
        for tool in conversation.tools
    )
