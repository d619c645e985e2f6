"""LangChain's messages as agentflow's, and agentflow's replies as LangChain's."""

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
from agentflow.integrations.client import Ended
from agentflow.protocol.chat import Arguments, CallBegun, Piece, read_reply

_ROLES = {"human": "user", "ai": "assistant", "developer": "system"}


def to_agentflow(messages: Sequence[BaseMessage]) -> list[af.Message]:
    """The conversation. ``BadArgument`` where a message holds what is no text."""
    return [_turn(message) for message in convert_to_messages(messages)]


def _turn(message: BaseMessage) -> af.Message:
    text = _text(message)
    match message:
        case SystemMessage():
            return af.Message("system", text)
        case HumanMessage():
            return af.Message("user", text)
        case AIMessage():
            calls = tuple([_call(call["id"], call["name"], call["args"]) for call in message.tool_calls])
            return af.Message("assistant", text, tool_calls=calls)
        case ToolMessage():
            return af.Message("tool", text, tool_call_id=message.tool_call_id, name=message.name)
        case ChatMessage():
            return af.Message(_ROLES.get(message.role, message.role), text)
    raise af.BadArgument(
        f"messages of the type {message.type!r} are not taken: use a ToolMessage for results"
    )


def _call(call_id: str | None, name: str, arguments: dict[str, Any]) -> af.CalledTool:
    # As a model under a schema writes it: what it said is found again as the same tokens.
    return af.CalledTool(call_id or "", name, json.dumps(arguments, ensure_ascii=False))


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
        # Another model's, perhaps: what it thought is not said again, and its calls stand in ``tool_calls``.
        return str(block.get("refusal", ""))
    if kind == "json":
        return json.dumps(block.get("json"), ensure_ascii=False)
    raise af.BadArgument(
        f"a {message.type} message holds a block of the type {kind!r}, and this model takes text"
    )


def to_langchain(end: Ended) -> AIMessage:
    """A whole answer."""
    reply = read_reply(end.text)
    calls, invalid = [], []
    for call in reply.tool_calls:
        arguments, why = _read(call.arguments)
        if why:
            invalid.append(invalid_tool_call(name=call.name, args=call.arguments, id=call.id, error=why))
        else:
            calls.append(tool_call(name=call.name, args=arguments, id=call.id))
    return AIMessage(
        content=reply.text,
        tool_calls=calls,
        invalid_tool_calls=invalid,
        usage_metadata=usage_of(end),
        response_metadata=metadata_of(end, has_calls=bool(reply.tool_calls)),
    )


def _read(arguments: str) -> tuple[dict[str, Any], str]:
    try:
        found = json.loads(arguments)
    except ValueError as error:  # max_tokens cut it off
        return {}, str(error)
    return found, ""


def finish_reason_of(end: Ended, *, has_calls: bool) -> str:
    """As OpenAI's API has it, which others read."""
    if end.finish_reason == "length":
        return "length"
    return "tool_calls" if has_calls else "stop"


def metadata_of(end: Ended, *, has_calls: bool) -> dict[str, Any]:
    """What is told of an answer beside it."""
    told: dict[str, Any] = {
        "model_name": end.model,
        "model_provider": "agentflow",
        "finish_reason": finish_reason_of(end, has_calls=has_calls),
    }
    if end.logprobs is not None:
        told["logprobs"] = {"content": logprobs_of(end)}
    return told


def logprobs_of(end: Ended) -> list[dict[str, Any]]:
    """Of each token its log-probability, and those of the likeliest at its place where these were asked for.
    A token that was encoded anew at the end of the text has none."""
    top = end.top_logprobs or [None] * len(end.logprobs or ())
    return [
        {
            "logprob": logprob,
            "top_logprobs": [{"token": likely.text, "logprob": likely.logprob} for likely in place or ()],
        }
        for logprob, place in zip(end.logprobs or (), top, strict=True)
    ]


def usage_of(end: Ended) -> UsageMetadata:
    """Tokens, those from the cache among them."""
    usage = end.usage
    return UsageMetadata(
        input_tokens=usage.prompt_tokens,
        output_tokens=usage.output_tokens,
        total_tokens=usage.prompt_tokens + usage.output_tokens,
        input_token_details=InputTokenDetails(cache_read=usage.cached_tokens),
    )


class ChunkWriter:
    """The chunks of one streamed answer."""

    def __init__(self) -> None:
        self._num_calls = 0

    def chunk(self, piece: Piece) -> AIMessageChunk:
        """The answer goes on."""
        match piece:
            case CallBegun():
                self._num_calls += 1
                begun = tool_call_chunk(name=piece.name, args="", id=piece.id, index=self._num_calls - 1)
                return AIMessageChunk(content="", tool_call_chunks=[begun])
            case Arguments():
                more = tool_call_chunk(args=piece.text, index=self._num_calls - 1)
                return AIMessageChunk(content="", tool_call_chunks=[more])
        return AIMessageChunk(content=piece.text)

    def last(self, end: Ended) -> AIMessageChunk:
        """The one that says so."""
        return AIMessageChunk(
            content="",
            usage_metadata=usage_of(end),
            response_metadata=metadata_of(end, has_calls=self._num_calls > 0),
            chunk_position="last",
        )
