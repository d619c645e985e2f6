"""Conversion of LangChain's messages to agentflow's, and of agentflow's answers to LangChain's."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from langchain_core.messages import (
    AIMessage,
    AIMessageChunk,
    BaseMessage,
    ChatMessage,
    HumanMessage,
    SystemMessage,
    ToolMessage,
    convert_to_messages,
)
from langchain_core.messages.ai import InputTokenDetails, UsageMetadata
from langchain_core.messages.tool import invalid_tool_call, tool_call, tool_call_chunk

import agentflow as af
from agentflow.integrations import Answer, Arguments, CallBegun, ReplyPiece, read_reply

_ROLES = {"human": "user", "ai": "assistant", "developer": "system"}


def to_agentflow(messages: Sequence[BaseMessage]) -> list[af.Message]:
    """Converts a conversation. Raises ``BadArgument`` for content that is not text."""
    return [_turn(message) for message in convert_to_messages(messages)]


def _turn(message: BaseMessage) -> af.Message:
    text = _text(message)
    match message:
        case SystemMessage():
            return af.Message("system", text)
        case HumanMessage():
            return af.Message("user", text)
        case AIMessage():
            calls = [af.ToolCall(call["name"], call["args"], call["id"] or "") for call in message.tool_calls]
            return af.Message("assistant", text, tuple(calls))
        case ToolMessage():
            return af.Message("tool", text, tool_call_id=message.tool_call_id, name=message.name)
        case ChatMessage():
            return af.Message(_ROLES.get(message.role, message.role), text)
    raise af.errors.BadArgument(
        f"messages of type {message.type!r} are not supported: use a ToolMessage for results"
    )


def _text(message: BaseMessage) -> str:
    if isinstance(message.content, str):
        return message.content
    return "".join([_block_text(block, message) for block in message.content])


def _block_text(block: str | dict[Any, Any], message: BaseMessage) -> str:
    if isinstance(block, str):
        return block
    kind = block.get("type")
    if kind == "text":
        return str(block.get("text", ""))
    if isinstance(message, AIMessage):
        # Perhaps of another model. Its reasoning is dropped, and its calls are in ``tool_calls``.
        return str(block.get("refusal", ""))
    if kind == "json":
        return json.dumps(block.get("json"), ensure_ascii=False)
    raise af.errors.BadArgument(
        f"a {message.type} message has a content block of type {kind!r}, and this model takes only text"
    )


def to_langchain(answer: Answer) -> AIMessage:
    """Converts a complete answer."""
    reply = read_reply(answer.text)
    calls, invalid = [], []
    for call in reply.tool_calls:
        arguments, why = _read(call.text)
        if why:
            invalid.append(invalid_tool_call(name=call.name, args=call.text, id=call.id, error=why))
        else:
            calls.append(tool_call(name=call.name, args=arguments, id=call.id))
    return AIMessage(
        content=reply.text,
        tool_calls=calls,
        invalid_tool_calls=invalid,
        usage_metadata=make_usage(answer),
        response_metadata=metadata_of(answer, has_calls=bool(reply.tool_calls)),
    )


def _read(arguments: str) -> tuple[dict[str, Any], str]:
    try:
        found = json.loads(arguments)
    except (ValueError, RecursionError) as error:  # truncated by max_tokens, for example
        return {}, str(error)
    return (found, "") if isinstance(found, dict) else ({}, "the arguments are not an object")


def finish_reason_of(answer: Answer, *, has_calls: bool) -> str:
    """Returns the finish reason in OpenAI's terms, which other integrations expect."""
    if answer.finish_reason == "length":
        return "length"
    return "tool_calls" if has_calls else "stop"


def metadata_of(answer: Answer, *, has_calls: bool) -> dict[str, Any]:
    """Returns the ``response_metadata`` of an answer."""
    metadata: dict[str, Any] = {
        "model_name": answer.model,
        "model_provider": "agentflow",
        "finish_reason": finish_reason_of(answer, has_calls=has_calls),
    }
    if answer.logprobs is not None:
        metadata["logprobs"] = {"content": logprobs_of(answer)}
    return metadata


def logprobs_of(answer: Answer) -> list[dict[str, Any]]:
    """Returns for each token its text, its bytes and its log-probability, as in OpenAI's API, and the
    likeliest tokens at its position if they were requested. The log-probability is None for a token that was
    encoded again at the end of the text, and so are the bytes of a part of a character."""
    logprobs = answer.logprobs or ()
    top = answer.top_logprobs or [None] * len(logprobs)
    tokens = answer.tokens or [None] * len(logprobs)
    return [
        {
            **_token(token, logprob),
            "top_logprobs": [_token(likely.text, likely.logprob) for likely in place or ()],
        }
        for token, logprob, place in zip(tokens, logprobs, top, strict=True)
    ]


def _token(text: str | None, logprob: float | None) -> dict[str, Any]:
    data = None if text is None or "\N{REPLACEMENT CHARACTER}" in text else list(text.encode())
    return {"token": text, "bytes": data, "logprob": logprob}


def make_usage(answer: Answer) -> UsageMetadata:
    """Returns the token counts; ``input_tokens`` includes the cached ones."""
    usage = answer.usage
    return UsageMetadata(
        input_tokens=usage.prompt_tokens,
        output_tokens=usage.output_tokens,
        total_tokens=usage.prompt_tokens + usage.output_tokens,
        input_token_details=InputTokenDetails(cache_read=usage.cached_tokens),
    )


class ChunkWriter:
    """Makes the chunks of one streamed answer."""

    def __init__(self) -> None:
        self._num_calls = 0

    def chunk(self, piece: ReplyPiece) -> AIMessageChunk:
        """Returns the chunk for the next piece."""
        match piece:
            case CallBegun():
                self._num_calls += 1
                begun = tool_call_chunk(name=piece.name, args="", id=piece.id, index=self._num_calls - 1)
                return AIMessageChunk(content="", tool_call_chunks=[begun])
            case Arguments():
                more = tool_call_chunk(args=piece.text, index=self._num_calls - 1)
                return AIMessageChunk(content="", tool_call_chunks=[more])
        return AIMessageChunk(content=piece.text)

    def last(self, answer: Answer) -> AIMessageChunk:
        """Returns the last chunk, which has the usage and the metadata."""
        return AIMessageChunk(
            content="",
            usage_metadata=make_usage(answer),
            response_metadata=metadata_of(answer, has_calls=self._num_calls > 0),
            chunk_position="last",
        )
