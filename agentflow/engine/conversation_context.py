"""Puts a whole conversation into a context: its turns in the template's notation, and what the model said in
it as the tokens that it generated."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from agentflow.engine.answer_memory import conversation_keys
from agentflow.engine.engine_context import CHARS_PER_TURN, EngineContext
from agentflow.engine.process.ipc import Finished
from agentflow.engine.text.tools import tool_use
from agentflow.protocol.chat import Conversation, Message

if TYPE_CHECKING:
    from agentflow.engine.generator import EngineGenerator

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
