"""The requests of OpenAI's responses API.

``OpenAIResponses`` is the ``ApiFormat`` of the API. Requests are stateless: nothing is stored at OpenAI, and
each request has the whole conversation as *items*. Reasoning comes back encrypted, and is sent again in the
next requests, so that the model does not reason about the same twice.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

import msgspec

from agentflow.backends.apis.answers.answer import AnswerCollector
from agentflow.backends.apis.capability_table import ModelFacts
from agentflow.backends.apis.chat.flavours import OPENAI, constraint_fields
from agentflow.backends.apis.chat.sampling_fields import SamplingWriter
from agentflow.backends.apis.generation.api_format import (
    ApiRequest,
    Call,
    cannot_continue,
    choice_fields,
    turns_only,
)
from agentflow.backends.apis.generation.conversation import (
    ApiContext,
    call_item,
    list_images,
    prefix_key,
    shared_gate,
)
from agentflow.backends.apis.http.api_errors import ErrorMapping
from agentflow.backends.apis.http.file_slots import slot_url, without_nonce
from agentflow.backends.apis.responses.responses_stream import ResponsesReader
from agentflow.backends.apis.strict_schema import is_strict, strict_schema
from agentflow.protocol.chat import Message, ToolChoice, ToolSpec
from agentflow.protocol.images import Image

RESPONSES: Final = replace(
    OPENAI, params={"max_tokens": "max_output_tokens", "temperature": "temperature", "top_p": "top_p"}
)
"""The API has neither stops nor seeds, penalties or biases."""

RESPONSES_PATH: Final = "responses"

_encode = msgspec.json.Encoder().encode


class OpenAIResponses:
    """The format of ``/responses``.

    Args:
        model: The model's name.
        facts: The features of the model.
        errors: Makes the errors.
    """

    path = RESPONSES_PATH
    min_tokens = 16

    def __init__(self, model: str, facts: ModelFacts, errors: ErrorMapping) -> None:
        self._model = model
        self._facts = facts
        self.may_stop_reasoning = facts.may_stop_reasoning
        self._sampling = SamplingWriter(model, RESPONSES, facts)
        self._errors = errors
        self._head = b'{"model":' + _encode(model) + b',"input":['

    def request(self, context: ApiContext, call: Call) -> ApiRequest:
        """The request for a call. ``NotSupported`` if the API cannot express it."""
        if context.is_plain:
            raise turns_only(self._model)
        if context.role == "assistant" and context.open_text:
            raise cannot_continue(self._model)
        nodes = context.messages()
        constrained = constraint_fields(RESPONSES, RESPONSES.enforced(self._facts), call.constraint)
        fields: dict[str, Any] = {"stream": True, "store": False}
        fields |= self._sampled(call, is_wrapped=constrained.unwrap is not None)
        if "response_format" in constrained.fields:
            schema = constrained.fields["response_format"]["json_schema"]
            fields["text"] = {"format": {"type": "json_schema", **schema}}
        if context.tools:
            choice = context.choice if call.is_reply else ToolChoice("none")
            fields |= choice_fields(choice, {"name": choice.name}) | {
                "tools": [_tool(tool) for tool in context.tools]
            }
        encoded = [node.encoded(_items) for node in nodes]
        # Requests with equal keys go to the same machine, which has the prefix in its cache.
        first = encoded[0] if encoded else b""
        fields["prompt_cache_key"] = prefix_key(
            context.program.encode(), context.cache_salt.encode(), without_nonce(first)
        )
        body = self._head + b",".join(filter(None, encoded)) + b"]," + _encode(fields)[1:]
        gate = shared_gate(nodes, self._facts.min_cached_tokens)
        return ApiRequest(self.path, body, constrained.unwrap, gate=gate, images=list_images(nodes))

    def sink(self, request: ApiRequest, answer: AnswerCollector) -> ResponsesReader:
        """The reader of a stream."""
        return ResponsesReader(answer, self._errors, request.num_chars)

    def _sampled(self, call: Call, *, is_wrapped: bool) -> dict[str, Any]:
        """The fields of the sampling parameters, and of the reasoning and the log-probabilities to report."""
        fields = self._sampling.fields(call, is_wrapped=is_wrapped)
        if self._facts.max_tokens_field in fields:
            fields["max_output_tokens"] = fields.pop(self._facts.max_tokens_field)
        include: list[str] = []
        reasoning: dict[str, str] = {}
        if "reasoning_effort" in fields:
            reasoning["effort"] = fields.pop("reasoning_effort")
        elif self._facts.reasoning != "never":
            include.append("reasoning.encrypted_content")
            if call.params.stream_reasoning:
                # Organizations that OpenAI has not verified may not ask for it, so only programs do.
                reasoning["summary"] = "auto"
        if call.params.wants_logprobs:
            include.append("message.output_text.logprobs")
            fields["top_logprobs"] = call.params.top_logprobs
        given = {"include": include, "reasoning": reasoning}
        return fields | {name: value for name, value in given.items() if value}


def _tool(tool: ToolSpec) -> dict[str, Any]:
    # Where the API cannot enforce the schema, the program's check of the arguments remains.
    is_enforced = tool.strict and is_strict(tool.parameters)
    return {
        "type": "function",
        "name": tool.name,
        "description": tool.description,
        "parameters": strict_schema(tool.parameters).schema if is_enforced else tool.parameters,
        "strict": is_enforced,
    }


def _content(message: Message) -> str | list[dict[str, str]]:
    if not message.images:
        return message.content
    content: list[dict[str, str]] = []
    for part in message.parts:
        if isinstance(part, str):
            content.append({"type": "input_text", "text": part})
            continue
        assert isinstance(part, Image), "the model reads no videos"
        content.append({"type": "input_image", "image_url": slot_url(part), "detail": "auto"})
    return content


def _items(message: Message) -> bytes:
    """The items of a message, separated by commas. None if it has no content."""
    if message.role == "tool":
        result = {"call_id": message.tool_call_id or "", "output": _content(message)}
        return _encode({"type": "function_call_output", **result})
    items: list[dict[str, Any]] = []
    if message.content or message.role != "assistant":
        items.append({"role": message.role, "content": _content(message)})
    items += [call_item(call) for call in message.tool_calls]
    return b",".join(map(_encode, items))
