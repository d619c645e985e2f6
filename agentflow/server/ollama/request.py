"""Translates the fields of Ollama's requests: the model, options, constraint, tools, and conversation.

Errors contain the field that is wrong or not supported.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from agentflow.engine.generator.generator import EngineGenerator
from agentflow.engine.text.reasoning import reasoning_marks
from agentflow.errors import no_chat_template
from agentflow.protocol.bounds.json_bounds import OBJECT_BOUNDS, JsonScan, object_text, schema_constraint
from agentflow.protocol.chat import IMAGE_ROLES, CalledTool, Message, ToolSpec
from agentflow.protocol.constraint import Constraint
from agentflow.protocol.images import PlacedImage, image_in_base64
from agentflow.protocol.sampling import SamplingParams
from agentflow.server.compatible.field_errors import check_num_logprobs, naming_param
from agentflow.server.compatible.fields import Unread, is_given
from agentflow.server.compatible.forms import ANY_OBJECT
from agentflow.server.compatible.functions import function_tool
from agentflow.server.compatible.images import check_images
from agentflow.server.compatible.sampling import max_answer_tokens, read_nucleus, read_stops
from agentflow.server.completion.request import Continuation, names_of_unset
from agentflow.server.errors import invalid_field, unsupported
from agentflow.server.http.call import ApiCall
from agentflow.server.http.json_body import decoded
from agentflow.server.models.models import TextGenerator
from agentflow.server.ollama.types import (
    GivenToolCall,
    OllamaChatRequest,
    OllamaGenerateRequest,
    OllamaMessage,
    OllamaOptions,
    OllamaTool,
)

LATEST = ":latest"
"""The end of a name that Ollama's clients may write or leave out."""
# The defaults of Ollama, except its penalty of repetitions, which its newer engine does not have.
TEMPERATURE = 0.8
TOP_K = 40
TOP_P = 0.9

Generation = OllamaChatRequest | OllamaGenerateRequest


def resolve_name(call: ApiCall, name: str) -> str:
    """The server's name of the model that a client calls ``name``."""
    known = {model.name for model in call.service.models.seen_by(call.tenant)}
    return name if name in known else name.removesuffix(LATEST)


def check_generation(body: Generation, generator: TextGenerator) -> None:
    """``ApiError`` for a field that is not supported, or is wrong."""
    if body.think and isinstance(generator, EngineGenerator):
        _check_can_reason(generator)
    if body.top_logprobs and not body.logprobs:
        raise invalid_field("top_logprobs", "it needs 'logprobs' to be true")
    if body.debug_render_only:
        raise unsupported("_debug_render_only", "an answer is generated")


def _check_can_reason(generator: EngineGenerator) -> None:
    if reasoning_marks(generator.template.source) is None:
        raise unsupported("think", f"{generator.capabilities.model} does not reason before its answer")


def asks_to_reason(body: Generation) -> bool | None:
    """Whether the model reasons before its answer; None: its chat template decides."""
    return None if body.think is None else bool(body.think)


def read_effort(body: Generation) -> str | None:
    """The reasoning effort, for templates that have a variable for it."""
    return body.think if isinstance(body.think, str) else None


def read_sampling(body: Generation, generator: TextGenerator) -> SamplingParams:
    """The sampling parameters, with Ollama's defaults."""
    options = body.options or OllamaOptions()
    limit = options.num_predict or 0
    top_p, top_k = read_nucleus(
        TOP_P if options.top_p is None else options.top_p, TOP_K if options.top_k is None else options.top_k
    )
    penalty = options.repeat_penalty if options.repeat_last_n != 0 else None
    params = SamplingParams(
        max_tokens=limit if limit > 0 else max_answer_tokens(generator),
        temperature=TEMPERATURE if options.temperature is None else options.temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=options.min_p or 0.0,
        frequency_penalty=options.frequency_penalty or 0.0,
        presence_penalty=options.presence_penalty or 0.0,
        repetition_penalty=penalty or 1.0,
        seed=None if options.seed in (None, -1) else options.seed % 2**63,
        stop=read_stops(options.stop),
        logprobs=bool(body.logprobs),
        top_logprobs=body.top_logprobs or 0,
    )
    check_num_logprobs(params, generator, 1, "top_logprobs")
    return params.check()


def list_unset(body: Generation) -> tuple[str, ...]:
    """The parameters that a request leaves to the server, by the names of ``SamplingParams``."""
    options = body.options or OllamaOptions()
    limit = None if (options.num_predict or 0) <= 0 else options.num_predict
    return names_of_unset(
        max_tokens=limit, temperature=options.temperature, top_p=options.top_p, top_k=options.top_k
    )


def read_constraint(form: Unread) -> Constraint | None:
    """The constraint: any object, or an object that conforms to a schema. None for any text."""
    if form is None or not is_given(form):
        return None
    first = bytes(memoryview(form)[:1])
    if first == b"{":
        with naming_param("format"):
            return schema_constraint(form, "format")
    text = msgspec.json.decode(form) if first == b'"' else None
    if text not in ("json", ""):
        raise invalid_field("format", "it must be 'json' or a JSON schema")
    return ANY_OBJECT if text else None


def read_tools(tools: Sequence[OllamaTool]) -> tuple[ToolSpec, ...]:
    """The tools that the model may call."""
    scan = JsonScan(OBJECT_BOUNDS)
    return tuple(
        [function_tool(tool.function, f"tools[{number}].function", scan) for number, tool in enumerate(tools)]
    )


def read_prompt(
    body: OllamaGenerateRequest, generator: TextGenerator
) -> tuple[Message, ...] | Continuation | str:
    """The prompt: a message; with ``context``, the message after these tokens; with ``raw``, or for a model
    without a chat template, only its text."""
    for name in ("suffix", "template"):
        if getattr(body, name):
            raise unsupported(name, "the models continue a text, and use their own templates")
    images = _read_images(body.images, "images", generator)
    prompt, context = body.prompt or "", body.context or []
    is_text = body.raw or not generator.capabilities.conversations
    for name, value in (("system", body.system), ("context", context), ("images", images)):
        if value and is_text:
            why = "'raw' excludes it" if body.raw else str(no_chat_template())
            raise unsupported(name, why)
    if is_text:
        return prompt
    turns = (
        *([Message("system", body.system)] if body.system else ()),
        Message("user", prompt, images=images),
    )
    if not context:
        return turns
    if not isinstance(generator, EngineGenerator):
        model = generator.capabilities.model
        raise unsupported("context", f"{model} is behind an API, which accepts no token ids")
    with naming_param("context"):
        generator.limits.check_ids(context)
    return Continuation(tuple(context), turns)


def read_conversation(messages: Sequence[OllamaMessage], generator: TextGenerator) -> tuple[Message, ...]:
    """The conversation. ``ApiError``, with the field, for a message that is wrong."""
    turns = _Turns()
    for number, message in enumerate(messages):
        param = f"messages[{number}]"
        turns.add(message, param, _read_images(message.images, f"{param}.images", generator))
    return tuple(turns.made)


@dataclass
class _Turns:
    """The conversation so far. ``open_calls``: the tools of calls without a result, by the ids of the calls.
    Most clients send no ids: then calls are numbered, and results belong to them in their order."""

    made: list[Message] = field(default_factory=list)
    open_calls: dict[str, str] = field(default_factory=dict)
    num_calls: int = 0
    arguments: JsonScan = field(default_factory=lambda: JsonScan(OBJECT_BOUNDS))

    def add(self, message: OllamaMessage, param: str, images: tuple[PlacedImage, ...]) -> None:
        text = message.content or ""
        if images and message.role not in IMAGE_ROLES:
            raise unsupported(f"{param}.images", "only the messages of users and tools may have images")
        if message.tool_calls and message.role != "assistant":
            raise invalid_field(f"{param}.tool_calls", "only the assistant calls tools")
        if message.role == "tool":
            call_id = self._answered(message, param)
            name = self.open_calls.pop(call_id)
            self.made.append(Message("tool", text, tool_call_id=call_id, name=name, images=images))
            return
        calls = [
            self._called(call, f"{param}.tool_calls[{number}]")
            for number, call in enumerate(message.tool_calls or ())
        ]
        reasoning = message.thinking if message.role == "assistant" else None
        self.made.append(
            Message(message.role, text, tool_calls=tuple(calls), reasoning=reasoning or None, images=images)
        )

    def _called(self, call: GivenToolCall, param: str) -> CalledTool:
        given, arguments = call.function.arguments, "{}"
        if given is not None and is_given(given):
            with naming_param():
                arguments = object_text(given, f"{param}.function.arguments", self.arguments)
        call_id = call.id or f"call_{self.num_calls}"
        self.num_calls += 1
        self.open_calls[call_id] = call.function.name
        return CalledTool(call_id, call.function.name, arguments)

    def _answered(self, message: OllamaMessage, param: str) -> str:
        """The id of the call that a result belongs to."""
        if message.tool_call_id in self.open_calls:
            return message.tool_call_id
        for call_id, name in self.open_calls.items():
            if message.tool_name in (None, "", name):
                return call_id
        raise invalid_field(f"{param}.tool_name", "no earlier message has an open call of this tool")


def _read_images(images: Unread, param: str, generator: TextGenerator) -> tuple[PlacedImage, ...]:
    """The images of a message, which precede its text."""
    if images is None or not is_given(images):
        return ()
    # An empty list is not an error for models without images. Large lists are not decoded for that.
    if bytes(memoryview(images)[:64]).translate(None, b" \t\r\n") == b"[]":
        return ()
    check_images(param, generator.capabilities)
    found: list[PlacedImage] = []
    for number, encoded in enumerate(decoded(images, list[str], param)):
        with naming_param(f"{param}[{number}]"):
            found.append(PlacedImage(0, image_in_base64(encoded)))
    return tuple(found)
