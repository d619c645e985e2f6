"""Translates the fields of OpenAI's requests: conversation, tools, sampling parameters, and constraint.

Errors contain the field that is wrong or not supported.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from agentflow.engine.generator.generator import EngineGenerator
from agentflow.engine.text.chat_template import RESERVED_VALUES
from agentflow.protocol.bounds.json_bounds import OBJECT_BOUNDS, VARIABLE_BOUNDS, JsonScan, decode_object
from agentflow.protocol.chat import CalledTool, Message, ToolChoice, ToolSpec
from agentflow.protocol.constraint import Constraint
from agentflow.protocol.events import Capabilities
from agentflow.protocol.images import Medium, PlacedImage, placed_in
from agentflow.protocol.sampling import SamplingParams
from agentflow.server.compatible.cache_marks import KeptBeginnings, seconds_of_breakpoint, seconds_of_control
from agentflow.server.compatible.field_errors import check_unsupported, naming_param
from agentflow.server.compatible.fields import Unread, is_given
from agentflow.server.compatible.forms import ANY_OBJECT, only_form, read_forms
from agentflow.server.compatible.functions import function_tool
from agentflow.server.compatible.images import check_images, check_videos, image_from_url, video_from_url
from agentflow.server.compatible.sampling import max_answer_tokens, read_nucleus, read_stops
from agentflow.server.errors import invalid_field, unsupported
from agentflow.server.http.json_body import decoded
from agentflow.server.models.models import TextGenerator
from agentflow.server.openai.types import (
    AssistantMessage,
    AudioPart,
    ChatMessage,
    CustomTool,
    DeveloperMessage,
    FilePart,
    FunctionMessage,
    ImagePart,
    ImageUrl,
    MessageContent,
    MessagePart,
    NamedChoice,
    RefusalPart,
    SharedFields,
    StreamOptions,
    SystemMessage,
    TextPart,
    Tool,
    ToolChoiceField,
    ToolMessage,
    UserMessage,
    VideoPart,
    VideoUrl,
)

# The default of OpenAI's API.
TEMPERATURE = 1.0
NO_EFFORT = ("none", "minimal")
"""Values of ``reasoning_effort`` that turn reasoning off."""

_WHY_UNSUPPORTED = {
    "skip_special_tokens": "answers have no special tokens except as marks of calls and reasoning",
    "include_stop_str_in_output": "the stop string is not part of the answer",
    "suffix": "the models continue a text, and cannot fill in a gap",
    "store": "nothing is stored",
}
# The values that are accepted, because they have no effect.
_NEUTRAL = {
    "store": False,
    "skip_special_tokens": True,
    "include_stop_str_in_output": False,
    "suffix": msgspec.Raw(b'""'),
}
_MARKED = SystemMessage | DeveloperMessage | UserMessage | AssistantMessage | ToolMessage
_KIND_OF_PART = {AudioPart: "audio", FilePart: "files"}
_UNSUPPORTED_MEMBERS = {"audio": "the models generate no audio", "function_call": "use tool_calls"}


def check_fields(request: SharedFields, max_n: int, *, ranks: bool = False) -> None:
    """``ApiError`` for a field that is not supported, or is wrong.

    Args:
        request: The body.
        max_n: The limit of answers.
        ranks: Whether the endpoint returns the best of several answers.
    """
    check_unsupported(request, _WHY_UNSUPPORTED, _NEUTRAL)
    n = request.n or 1
    best_of = request.best_of or n
    if best_of != n and not ranks:
        raise unsupported("best_of", "all answers are returned; use n")
    if best_of < n:
        raise invalid_field("best_of", f"it must be at least 'n', which is {n}")
    if best_of > n and request.stream:
        raise invalid_field("best_of", "a stream cannot wait for the best answers: it must equal 'n'")
    for name, number in (("n", n), ("best_of", best_of)):
        if number > max_n:
            raise invalid_field(name, f"{number} answers exceed the limit of {max_n} for a request")
    for name in ("prompt_logprobs", "return_token_ids"):
        if request.stream and getattr(request, name) not in (None, False):
            raise invalid_field(name, "it excludes 'stream'")
    if request.stream_options is not None:
        _check_stream_options(request, request.stream_options)


def _check_stream_options(request: SharedFields, options: StreamOptions) -> None:
    if not request.stream:
        raise invalid_field("stream_options", "it needs 'stream' to be true")
    if options.include_obfuscation:
        raise unsupported("stream_options.include_obfuscation", "chunks are not padded")


def read_sampling(
    request: SharedFields, generator: TextGenerator, max_tokens: int | None, top_logprobs: int | None
) -> SamplingParams:
    """The sampling parameters. ``max_tokens`` None: up to the end of the context. ``top_logprobs`` None: no
    log-probabilities."""
    top_p, top_k = read_nucleus(request.top_p, request.top_k)
    biases = request.logit_bias or {}
    if isinstance(generator, EngineGenerator):
        biases = biases | _bad_words(request.bad_words or (), generator)
    params = SamplingParams(
        max_tokens=max_answer_tokens(generator) if max_tokens is None else max_tokens,
        min_tokens=request.min_tokens or 0,
        temperature=_or(request.temperature, TEMPERATURE),
        top_p=top_p,
        top_k=top_k,
        min_p=request.min_p or 0.0,
        frequency_penalty=request.frequency_penalty or 0.0,
        presence_penalty=request.presence_penalty or 0.0,
        repetition_penalty=_or(request.repetition_penalty, 1.0),
        logit_bias=tuple(biases.items()),
        seed=None if request.seed is None else request.seed % 2**63,
        stop=read_stops(request.stop),
        stop_token_ids=tuple(request.stop_token_ids or ()),
        ignore_eos=bool(request.ignore_eos),
        logprobs=top_logprobs is not None,
        top_logprobs=top_logprobs or 0,
    )
    with naming_param():
        params.check()
    if not isinstance(generator, EngineGenerator):
        return params
    for name, token_ids in (("logit_bias", biases), ("stop_token_ids", params.stop_token_ids)):
        with naming_param(name):
            generator.limits.check_ids(tuple(token_ids))
    return params


def _bad_words(words: Sequence[str], generator: EngineGenerator) -> dict[int, float]:
    """Biases against words, at the start of a text and after other words. ``ApiError`` for a word of several
    tokens: other words have the same parts."""
    encode = generator.tokenizer.encode
    biases: dict[int, float] = {}
    for number, word in enumerate(words):
        spelled = [encode(word, continues=True), encode(f" {word.lstrip()}", continues=True)]
        single = [token_ids[0] for token_ids in spelled if len(token_ids) == 1]
        if not single:
            text = f"{word[:100]!r} is several tokens of this model, and only single tokens can be banned"
            raise unsupported(f"bad_words[{number}]", text)
        biases |= dict.fromkeys(single, -100.0)
    return biases


def _or(value: float | None, default: float) -> float:
    return default if value is None else value


def read_conversation(messages: Sequence[ChatMessage], model: Capabilities) -> tuple[Message, ...]:
    """The conversation. ``ApiError``, with the field, for a message that is wrong. ``model``: the features of
    the model."""
    turns: list[Message] = []
    called: dict[str, str] = {}  # the tool of each call
    for number, message in enumerate(messages):
        param = f"messages[{number}]"
        match message:
            case SystemMessage() | DeveloperMessage():
                turns.append(Message("system", _read_text(message.content, param, model)))
            case UserMessage():
                text, images = _shown(message.content, param, model)
                turns.append(Message("user", text, images=images))
            case AssistantMessage():
                turns.append(_assistant_turn(message, param, model))
                called.update({call.id: call.name for call in turns[-1].tool_calls})
            case ToolMessage():
                name = called.get(message.tool_call_id)
                if name is None:
                    raise invalid_field(
                        f"{param}.tool_call_id",
                        f"no earlier message has the tool call {message.tool_call_id[:100]!r}",
                    )
                text, images = _shown(message.content, param, model)
                turns.append(
                    Message("tool", text, tool_call_id=message.tool_call_id, name=name, images=images)
                )
            case FunctionMessage():
                raise unsupported(f"{param}.role", "use the role 'tool'")
    return tuple(turns)


def find_kept(messages: Sequence[ChatMessage], tools: Sequence[Tool]) -> Sequence[tuple[int, float]]:
    """The prefixes of the conversation that ``cache_control`` and ``prompt_cache_breakpoint`` keep."""
    kept = KeptBeginnings()
    is_system = [isinstance(message, SystemMessage | DeveloperMessage) for message in messages]
    num_system = next((number for number, one in enumerate(is_system) if not one), len(messages))
    for tool in tools:  # templates write them into the system turn
        kept.add(num_system, seconds_of_control(getattr(tool, "cache_control", None)))
    for number, message in enumerate(messages, start=1):
        kept.add(number, seconds_of_control(getattr(message, "cache_control", None)))
        for part in (
            message.content if isinstance(message, _MARKED) and isinstance(message.content, list) else ()
        ):
            kept.add(number, seconds_of_control(getattr(part, "cache_control", None)))
            if isinstance(part, TextPart):
                kept.add(number, seconds_of_breakpoint(part.prompt_cache_breakpoint))
    return kept.found


def _assistant_turn(message: AssistantMessage, param: str, model: Capabilities) -> Message:
    check_unsupported(message, _UNSUPPORTED_MEMBERS, prefix=f"{param}.")
    # Arguments may be any text: clients send a truncated call back unchanged.
    calls = tuple(
        CalledTool(call.id, call.function.name, call.function.arguments.strip() or "{}")
        for call in message.tool_calls or ()
    )
    content = message.content if message.content is not None else message.refusal
    given = message.reasoning_content if is_given(message.reasoning_content) else message.reasoning
    reasoning = _read_reasoning(given, param)
    if content is None and not calls and reasoning is None:
        raise invalid_field(f"{param}.content", "an assistant's message needs 'content' or 'tool_calls'")
    text = "" if content is None else _read_text(content, param, model)
    return Message("assistant", text, tool_calls=calls, reasoning=reasoning)


def _read_reasoning(given: Unread, param: str) -> str | None:
    """The reasoning, if it is a text; clients of other servers also send objects, which are ignored."""
    if given is None or bytes(memoryview(given)[:1]) != b'"':
        return None
    return decoded(given, str, f"{param}.reasoning_content")


def _read_text(content: MessageContent, param: str, model: Capabilities) -> str:
    """The text of a message without images."""
    text, images = _shown(content, param, model)
    if images:
        raise unsupported(f"{param}.content", "only the messages of users and tools may have images")
    return text


def _shown(content: MessageContent, param: str, model: Capabilities) -> tuple[str, tuple[PlacedImage, ...]]:
    """The parts, joined without a separator, as chat templates write them; and the images and videos."""
    if isinstance(content, str):
        return content, ()
    return placed_in(
        [_part(part, f"{param}.content[{number}]", model) for number, part in enumerate(content)]
    )


def _part(part: MessagePart, param: str, model: Capabilities) -> str | Medium:
    match part:
        case TextPart():
            return part.text
        case RefusalPart():
            return part.refusal
        case ImagePart():
            check_images(param, model)
            url = decoded(part.image_url, ImageUrl, f"{param}.image_url").url
            return image_from_url(url, f"{param}.image_url.url", model)
        case VideoPart():
            check_videos(param, model)
            video = decoded(part.video_url, VideoUrl, f"{param}.video_url")
            return video_from_url(video.url, video.num_frames, f"{param}.video_url.url", model)
        case AudioPart() | FilePart():
            raise unsupported(param, f"{model.model} accepts no {_KIND_OF_PART[type(part)]}")


def read_tools(tools: Sequence[Tool]) -> tuple[ToolSpec, ...]:
    """The tools that the model may call."""
    scan = JsonScan(OBJECT_BOUNDS)
    return tuple([_tool_spec(tool, f"tools[{number}]", scan) for number, tool in enumerate(tools)])


def _tool_spec(tool: Tool, param: str, scan: JsonScan) -> ToolSpec:
    if isinstance(tool, CustomTool):
        raise unsupported(f"{param}.type", "use tools of the type 'function'")
    return function_tool(tool.function, f"{param}.function", scan)


def read_tool_choice(choice: ToolChoiceField | None, *, has_tools: bool, parallel: bool | None) -> ToolChoice:
    """Which tools the model may or must call."""
    is_parallel = parallel is not False
    if isinstance(choice, NamedChoice):
        return ToolChoice("required", choice.function.name, is_parallel)
    if choice is not None and not isinstance(choice, str):
        why = "its type must be 'function'; leave out tools that may not be called"
        raise unsupported("tool_choice", why)
    return ToolChoice(choice or ("auto" if has_tools else "none"), None, is_parallel)


def read_template_values(given: msgspec.Raw | None) -> dict[str, Any]:
    """The variables of ``chat_template_kwargs``. ``ApiError`` for variables that the server sets itself."""
    if given is None or not is_given(given):
        return {}
    param = "chat_template_kwargs"
    with naming_param(param):
        values = decode_object(given, param, JsonScan(VARIABLE_BOUNDS))
    for name in values:
        if name in RESERVED_VALUES:
            raise invalid_field(f"{param}.{name[:100]}", "the server sets this variable itself")
    return values


def read_constraint(
    request: SharedFields, response_format: Constraint | None = None
) -> tuple[str, Constraint | None]:
    """The field of the constraint, and the constraint. ``ApiError`` if there are several, ``BadArgument`` for
    an invalid schema or grammar."""
    found = [*_forms(request)]
    if response_format is not None:
        found.append(("response_format", response_format))
    return only_form(found, "response_format")


def _forms(request: SharedFields) -> Iterator[tuple[str, Constraint]]:
    yield from read_forms("", regex=request.regex, grammar=request.grammar, ebnf=request.ebnf)
    yield from read_forms(
        "guided_",
        json=request.guided_json,
        regex=request.guided_regex,
        choice=request.guided_choice,
        grammar=request.guided_grammar,
    )
    if (asked := request.structured_outputs) is not None:
        prefix = "structured_outputs."
        found = [
            *read_forms(
                prefix, json=asked.json, regex=asked.regex, choice=asked.choice, grammar=asked.grammar
            )
        ]
        if asked.json_object:
            found.append((f"{prefix}json_object", ANY_OBJECT))
        if not found:
            text = "it needs one of json, regex, choice, grammar and json_object"
            raise invalid_field("structured_outputs", text)
        yield from found
