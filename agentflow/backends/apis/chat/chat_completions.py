"""OpenAI's chat completions: the body of a request, and the reading of its stream.

``ChatCompletions`` is the ``ApiFormat`` of the API; the ``Flavour`` has the names and features of a server.
The reader is tolerant of fields it does not know and of the liberties that servers take (missing indexes and
ids of tool calls, null in place of lists, a stream without ``[DONE]``), and strict about the rest.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, Generic

import msgspec

from agentflow.backends.apis.answers.answer import CHARS_PER_TOKEN, NO_TOKEN_ID, AnswerCollector, TokenInfo
from agentflow.backends.apis.answers.reported_usage import NULL, is_given, read_usage
from agentflow.backends.apis.answers.stream_reader import PartT, StreamReader
from agentflow.backends.apis.capability_table import ModelFacts
from agentflow.backends.apis.chat.flavours import Flavour, constraint_fields
from agentflow.backends.apis.chat.sampling_fields import SamplingWriter
from agentflow.backends.apis.generation.api_format import (
    ApiFormat,
    ApiRequest,
    Call,
    cannot_continue,
    choice_fields,
    turns_only,
)
from agentflow.backends.apis.generation.conversation import (
    ApiContext,
    MessageNode,
    list_images,
    prefix_key,
    shared_gate,
)
from agentflow.backends.apis.generation.prefix_gate import PrefixGate
from agentflow.backends.apis.http.api_errors import ErrorMapping
from agentflow.backends.apis.http.event_stream import EventSink, ServerEvent
from agentflow.backends.apis.http.file_slots import slot_part, without_nonce
from agentflow.backends.apis.strict_schema import is_strict, strict_schema
from agentflow.errors import NotSupported, ProtocolError
from agentflow.protocol.chat import Message, ToolChoice, ToolSpec
from agentflow.protocol.events import TokenLogprob, Usage
from agentflow.protocol.images import Medium, medium_kind

DONE = b"[DONE]"

_encode = msgspec.json.Encoder().encode


class ChatCompletions:
    """The format of ``/chat/completions``.

    Args:
        model: The model's name.
        flavour: The kind of server.
        facts: The features of the model.
        errors: Makes the errors.
        plain: The format for states without turns; None: they are refused.
    """

    path = "chat/completions"
    min_tokens = 1

    def __init__(
        self,
        model: str,
        flavour: Flavour,
        facts: ModelFacts,
        errors: ErrorMapping,
        plain: ApiFormat | None = None,
    ) -> None:
        self._model = model
        self._flavour = flavour
        self._facts = facts
        self.may_stop_reasoning = facts.may_stop_reasoning
        self._sampling = SamplingWriter(model, flavour, facts)
        self._plain = plain
        self._errors = errors
        self._head = b'{"model":' + _encode(model) + b',"messages":['

    def request(self, context: ApiContext, call: Call) -> ApiRequest:
        """The request for a call. ``NotSupported`` if the API cannot express it."""
        if context.is_plain and self._plain is not None:
            return self._plain.request(context, call)
        if context.is_plain:
            raise turns_only(self._model)
        nodes = context.messages()
        continues = context.role == "assistant" and bool(context.open_text)
        if continues and not self._facts.continuation:
            raise cannot_continue(self._model)
        fields: dict[str, Any] = {"stream": True, "stream_options": stream_options(self._flavour)}
        if continues:
            fields |= self._flavour.continuing
        constrained = constraint_fields(self._flavour, self._flavour.enforced(self._facts), call.constraint)
        fields |= self._sampling.fields(call, is_wrapped=constrained.unwrap is not None)
        if call.params.wants_logprobs:
            fields["logprobs"] = True
            if call.params.top_logprobs:
                fields["top_logprobs"] = call.params.top_logprobs
        fields |= constrained.fields
        if context.tools:
            if call.is_reply and context.choice.mode == "required" and not self._facts.required_calls:
                raise NotSupported(
                    f"{self._model} cannot be made to call a tool: ask for it in the prompt",
                    param="choice",
                )
            if call.params.wants_logprobs and not self._flavour.has_logprobs_with_tools:
                raise NotSupported(
                    f"{self._model} reports no log-probabilities with tools: leave them out",
                    param="logprobs",
                )
            if not self._facts.offers_tools(self._sampling.reasons(call)):
                raise NotSupported(
                    f"{self._model} takes no tools in the chat API while it reasons: give "
                    'max_reasoning_tokens=0, or af.OpenAI(…, api="responses")',
                    param="tools",
                )
            fields |= self._tools(context.tools, context.choice if call.is_reply else ToolChoice("none"))
        fields |= self._cache_fields(context, nodes)
        encoded = b",".join(self._encoded(nodes))
        body = self._head + encoded + b"]," + _encode(fields)[1:]
        gate = self._gate(call, nodes)
        return ApiRequest(self.path, body, constrained.unwrap, gate=gate, images=list_images(nodes))

    def sink(self, request: ApiRequest, answer: AnswerCollector) -> EventSink:
        """The reader of a stream."""
        if request.path != self.path and self._plain is not None:
            return self._plain.sink(request, answer)
        return ChatReader(answer, self._errors, request.num_chars)

    def _gate(self, call: Call, nodes: list[MessageNode]) -> PrefixGate | None:
        """The gate before the call."""
        reasons = self._sampling.reasons(call)
        reasons = self._facts.reasons_by_default if reasons is None else reasons
        if reasons or not self._flavour.awaits_cache:
            return None  # reasoning is not streamed: the others would wait for all of it
        return shared_gate(nodes, self._facts.min_cached_tokens)

    def _tools(self, tools: tuple[ToolSpec, ...], choice: ToolChoice) -> dict[str, Any]:
        named = {"function": {"name": choice.name}}
        return {"tools": [self._tool(tool) for tool in tools], **choice_fields(choice, named)}

    def _tool(self, tool: ToolSpec) -> dict[str, Any]:
        function: dict[str, Any] = {"name": tool.name, "description": tool.description}
        parameters = tool.parameters
        # Where the provider cannot enforce the schema, the program's check of the arguments remains.
        if tool.strict and (not self._flavour.is_strict or is_strict(parameters)):
            function["strict"] = True
            if self._flavour.is_strict:
                parameters = strict_schema(parameters).schema
        function["parameters"] = parameters
        return {"type": "function", "function": function}

    def _cache_fields(self, context: ApiContext, nodes: list[MessageNode]) -> dict[str, Any]:
        if self._flavour.name == "openai":
            # Requests with equal keys go to the same machine, which has the prefix in its cache.
            first = nodes[0].encoded(self._encode_message) if nodes else b""
            key = prefix_key(context.program.encode(), context.cache_salt.encode(), without_nonce(first))
            return {"prompt_cache_key": key}
        if context.cache_salt and self._flavour.takes_salt:
            return {"cache_salt": context.cache_salt}
        return {}

    def _encoded(self, nodes: list[MessageNode]) -> list[bytes]:
        """The messages. The API takes no images in the results of tools: a message of the user after the
        results has them."""
        encoded: list[bytes] = []
        shown: list[str | Medium] = []
        for number, node in enumerate(nodes):
            encoded.append(node.encoded(self._encode_message))
            if node.message.role == "tool":
                shown += _shown_result(node.message)
                if number + 1 < len(nodes) and nodes[number + 1].message.role == "tool":
                    continue
            if shown:
                encoded.append(_encode({"role": "user", "content": [slot_part(part) for part in shown]}))
                shown = []
        return encoded

    def _encode_message(self, message: Message) -> bytes:
        fields: dict[str, Any] = {"role": message.role, "content": _content(message)}
        if message.tool_calls:
            fields["content"] = message.content or None
            fields["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call in message.tool_calls
            ]
        if message.tool_call_id is not None:
            fields["tool_call_id"] = message.tool_call_id
        if message.reasoning and self._flavour.takes_reasoning:
            fields["reasoning_content"] = message.reasoning
        return _encode(fields)


def _content(message: Message) -> str | list[dict[str, object]]:
    if not message.images:
        return message.content
    if message.role == "tool":
        names = iter(_names(message))
        return "".join([part if isinstance(part, str) else f"[{next(names)}]" for part in message.parts])
    return [slot_part(part) for part in message.parts]


def _names(message: Message) -> list[str]:
    """The names of the images in the result of a tool, by which its text refers to them."""
    return [f"{medium_kind(one.medium)} {number}" for number, one in enumerate(message.images, start=1)]


def _shown_result(message: Message) -> list[str | Medium]:
    """The images in the result of a tool, each after the name that the result has for it."""
    where = f"of the result of {message.tool_call_id}" if message.tool_call_id else "of the last result"
    shown: list[str | Medium] = []
    for name, placed in zip(_names(message), message.images, strict=True):
        shown += [f"{name.capitalize()} {where}:", placed.medium]
    return shown


def stream_options(flavour: Flavour) -> dict[str, bool]:
    """The fields that ask for the usage in the stream."""
    options = {"include_usage": True}
    if flavour.counts_always:
        options["continuous_usage_stats"] = True
    return options


class _Function(msgspec.Struct):
    name: str | None = None
    arguments: msgspec.Raw = NULL  # a text, or the object itself


class _ToolCall(msgspec.Struct):
    index: int | None = None
    id: str | None = None
    function: _Function | None = None


class _Delta(msgspec.Struct):
    content: str | list[dict[str, Any]] | None = None
    reasoning_content: Any = None
    reasoning: Any = None
    refusal: str | None = None
    tool_calls: list[_ToolCall] | None = None


class _Likely(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int] | None = None

    @property
    def text(self) -> str:
        if self.bytes is None:
            return self.token
        try:
            return bytes(self.bytes).decode("utf-8", "replace")
        except ValueError:  # a number that is no byte
            return self.token


class _Token(_Likely):
    top_logprobs: list[_Likely] | None = None

    def info(self) -> TokenInfo:
        top = tuple([TokenLogprob(NO_TOKEN_ID, one.text, one.logprob) for one in self.top_logprobs or ()])
        return TokenInfo(self.text, self.logprob, top)


class TokenLogprobs(msgspec.Struct):
    """The log-probabilities of a part of an answer."""

    content: list[_Token] | None = None


class ChoicePart(msgspec.Struct):
    """A part of an answer. ``stop_reason`` (vLLM) and ``matched_stop`` (SGLang): the stop that ended it."""

    index: int | None = None
    finish_reason: str | None = None
    stop_reason: Any = msgspec.UNSET
    matched_stop: Any = msgspec.UNSET
    logprobs: msgspec.Raw = NULL

    @property
    def stop(self) -> Any:
        """The stop that ended the text; unset if the server does not say."""
        return self.matched_stop if self.stop_reason is msgspec.UNSET else self.stop_reason


class _Choice(ChoicePart):
    delta: _Delta | None = None
    message: _Delta | None = None  # of an answer that is not streamed


class Chunk(msgspec.Struct, Generic[PartT]):
    """An event of a stream."""

    choices: list[PartT] | None = None
    usage: msgspec.Raw = NULL
    error: Any = None
    object: Any = None


_FINISHED = {
    "stop": "eos",
    "tool_calls": "eos",
    "function_call": "eos",
    "length": "length",
    "eos": "eos",  # Together
    "eos_token": "eos",  # Hugging Face's server, as the next one
    "stop_sequence": "stop",
    "model_length": "length",  # Mistral
}


class ChunkReader(StreamReader):
    """The parts that the streams of chat completions and completions share."""

    chunks: msgspec.json.Decoder[Any]

    def __init__(self, answer: AnswerCollector, errors: ErrorMapping, num_sent: int) -> None:
        super().__init__(answer, errors, num_sent)
        self._usage = NULL  # the latest one

    def _read_event(self, event: ServerEvent) -> None:
        if event.data.startswith(DONE):
            self.is_over = True
            self.close()
            return
        chunk = self._decoded(self.chunks.decode, event.data)
        if chunk.error or chunk.object == "error" or event.name == "error":
            raise self.errors.of_event(event_error(event.data))
        if is_given(chunk.usage):
            self._usage = chunk.usage
        for choice in chunk.choices or ():
            self.read(choice)

    @abstractmethod
    def read(self, choice: Any) -> None:
        """Reads a part of the answer."""

    def end(self, reason: str, stop: object) -> None:
        """The server ends the answer. ``stop``: the stop that ended it; unset if the server does not say."""
        if reason == "content_filter":
            raise self.errors.filtered()
        if reason not in _FINISHED:
            raise self._unknown_end(reason)
        is_stop = reason == "stop" and self.answer.was_stopped_by(stop)
        self._end("stop" if is_stop else _FINISHED[reason])

    def _set_usage(self) -> None:
        guess = Usage(self._num_sent // CHARS_PER_TOKEN, 0, self.answer.num_deltas)
        self.answer.usage, self.answer.written_tokens = read_usage(self._usage, guess)


_logprobs = msgspec.json.Decoder(TokenLogprobs)
_text = msgspec.json.Decoder(str)


class ChatReader(ChunkReader):
    """Reads the stream of a chat completion."""

    chunks = msgspec.json.Decoder(Chunk[_Choice])

    def __init__(self, answer: AnswerCollector, errors: ErrorMapping, num_sent: int) -> None:
        super().__init__(answer, errors, num_sent)
        self._calls: dict[int, str] = {}  # the ids of the calls that have begun, by index
        self._refusal: list[str] = []
        self._has_begun = False  # something of the answer has come

    def read(self, choice: _Choice) -> None:
        """Reads a part of the answer."""
        if choice.index:
            return
        if self.answer.wants_logprobs and is_given(choice.logprobs):
            for token in self._decoded(_logprobs.decode, choice.logprobs).content or ():
                self.answer.add_token(token.info())
        delta = choice.message if choice.delta is None else choice.delta
        if delta is not None:
            if not self._has_begun and (delta.content or delta.tool_calls or delta.refusal):
                self._has_begun = True
                self.answer.on_begin()
            for reasoning in (delta.reasoning_content, delta.reasoning):
                if reasoning and isinstance(reasoning, str):
                    self.answer.add_reasoning(reasoning)
                    break  # servers that send both send the same
            if isinstance(delta.content, list):  # Mistral's
                for part in delta.content:
                    self._read_part(part)
            elif delta.content:
                self.answer.add_text(delta.content)
            if delta.refusal:
                self._refusal.append(delta.refusal)
            for number, call in enumerate(delta.tool_calls or ()):
                is_whole = delta is choice.message and call.index is None
                self._read_call(call, number if is_whole else call.index)
        if choice.finish_reason:  # some servers send an empty one until the end
            if self._refusal:
                raise self.errors.refused("".join(self._refusal))
            self.end(choice.finish_reason, choice.stop)

    def _read_part(self, part: dict[str, Any]) -> None:
        text = part.get("text")
        if part.get("type") == "text" and isinstance(text, str):
            self.answer.add_text(text)
        for inner in part.get("thinking") or () if part.get("type") == "thinking" else ():
            if isinstance(inner, dict) and isinstance(inner.get("text"), str):
                self.answer.add_reasoning(inner["text"])

    def _read_call(self, call: _ToolCall, index: int | None) -> None:
        function = call.function or _Function()
        latest = max(self._calls, default=-1)
        is_other = bool(call.id) and bool(function.name) and self._calls.get(latest, call.id) != call.id
        if index is None:
            index = latest + 1 if function.name and (is_other or not self._calls) else max(latest, 0)
        elif index == latest and is_other:  # some servers number all calls 0
            index = latest + 1
        if index not in self._calls:
            if not function.name:
                raise self._wrong("a tool call without a name")
            self._calls[index] = call.id or ""
            self.answer.begin_call(call.id or "", function.name)
        elif index != latest:
            raise ProtocolError(f"{self.errors.server} mixed the parts of several tool calls")
        if is_given(function.arguments):
            given = function.arguments
            # Some servers send an object in place of its text.
            is_object = bytes(given).startswith(b"{")
            arguments = self._compact(given) if is_object else self._decoded(_text.decode, given)
            if arguments:
                self.answer.add_arguments(arguments)


def event_error(data: bytes) -> Any:
    """The error in an event."""
    found = msgspec.json.decode(data)
    return found.get("error", found) if isinstance(found, dict) else found
