"""From the messages and tools of OpenAI's chat requests to those that chat templates are given."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from agentflow.engine.text.chat_template import read_arguments
from agentflow.protocol.chat import CalledTool, Message, ToolChoice, ToolSpec
from agentflow.protocol.json_bounds import OBJECT_BOUNDS, JsonScan, TooMuchJson, object_of, pieces_of
from agentflow.server.openai.sampling import is_given, naming_param, refused, wrong
from agentflow.server.openai.types import (
    AssistantMessage,
    AudioPart,
    ChatMessage,
    Content,
    CustomTool,
    DeveloperMessage,
    FilePart,
    FunctionMessage,
    FunctionSpec,
    ImagePart,
    MessageToolCall,
    NamedChoice,
    Part,
    RefusalPart,
    SystemMessage,
    TextPart,
    Tool,
    ToolChoiceField,
    ToolMessage,
    UserMessage,
)

_NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}
_NOT_SEEN = {ImagePart: "images", AudioPart: "sound", FilePart: "files"}
_REFUSED_MEMBERS = {"audio": "the models here do not speak", "function_call": "use tool_calls"}


def conversation_of(messages: Sequence[ChatMessage], model: str) -> tuple[Message, ...]:
    """The turns. ``ApiError`` naming the message that is wrong."""
    turns: list[Message] = []
    called: dict[str, str] = {}  # of each call the tool
    scan = JsonScan(OBJECT_BOUNDS)  # of the arguments of all calls
    for number, message in enumerate(messages):
        place = f"messages[{number}]"
        match message:
            case SystemMessage() | DeveloperMessage():
                turns.append(Message("system", _text_of(message.content, place, model)))
            case UserMessage():
                turns.append(Message("user", _text_of(message.content, place, model)))
            case AssistantMessage():
                turns.append(_assistant_turn(message, place, model, scan))
                called.update({call.id: call.name for call in turns[-1].tool_calls})
            case ToolMessage():
                name = called.get(message.tool_call_id)
                if name is None:
                    raise wrong(
                        f"{place}.tool_call_id",
                        f"no message before {place} has a tool call {message.tool_call_id[:100]!r}",
                    )
                text = _text_of(message.content, place, model)
                turns.append(Message("tool", text, tool_call_id=message.tool_call_id, name=name))
            case FunctionMessage():
                raise refused(f"{place}.role", "messages of the role 'function' are gone: use 'tool'")
    return tuple(turns)


def _assistant_turn(message: AssistantMessage, place: str, model: str, scan: JsonScan) -> Message:
    for member, why in _REFUSED_MEMBERS.items():
        if is_given(getattr(message, member)):
            raise refused(f"{place}.{member}", why)
    calls = tuple(
        _called(call, f"{place}.tool_calls[{number}]", scan)
        for number, call in enumerate(message.tool_calls or ())
    )
    content = message.content if message.content is not None else message.refusal
    if content is None and not calls:
        raise wrong(f"{place}.content", f"{place} has neither content nor tool_calls: give it one of them")
    text = "" if content is None else _text_of(content, place, model)
    return Message("assistant", text, tool_calls=calls)


def _called(call: MessageToolCall, place: str, scan: JsonScan) -> CalledTool:
    arguments = call.function.arguments.strip() or "{}"
    param = f"{place}.function.arguments"
    called = CalledTool(call.id, call.function.name, arguments)
    try:
        for piece in pieces_of(arguments.encode()):
            scan.push(piece)
        msgspec.json.decode(arguments, type=dict[str, msgspec.Raw])
    except TooMuchJson as error:
        raise wrong(param, f"{param}: with this, the calls' arguments have {error}") from None
    except (msgspec.DecodeError, RecursionError):
        raise wrong(param, f"{param} is not the text of a JSON object") from None
    with naming_param(param):
        read_arguments(called)
    return called


def _text_of(content: Content, place: str, model: str) -> str:
    """Parts follow each other with nothing in between, as templates write them."""
    if isinstance(content, str):
        return content
    return "".join(
        [_part_text(part, f"{place}.content[{number}]", model) for number, part in enumerate(content)]
    )


def _part_text(part: Part, place: str, model: str) -> str:
    match part:
        case TextPart():
            return part.text
        case RefusalPart():
            return part.refusal
        case ImagePart() | AudioPart() | FilePart():
            raise refused(place, f"{model} takes no {_NOT_SEEN[type(part)]}, only text")


def tools_of(tools: Sequence[Tool]) -> tuple[ToolSpec, ...]:
    """What the model may ask to have called."""
    specs: dict[str, ToolSpec] = {}
    scan = JsonScan(OBJECT_BOUNDS)
    for number, tool in enumerate(tools):
        if isinstance(tool, CustomTool):
            raise refused(f"tools[{number}].type", "tools of the type 'custom' are not there: use 'function'")
        spec = _tool_spec(tool.function, f"tools[{number}].function.parameters", scan)
        if spec.name in specs:
            raise wrong(f"tools[{number}].function.name", f"there are two tools named {spec.name!r}")
        specs[spec.name] = spec
    return tuple(specs.values())


def _tool_spec(function: FunctionSpec, param: str, scan: JsonScan) -> ToolSpec:
    given = function.parameters
    parameters = _NO_PARAMETERS if given is None or not is_given(given) else object_of(given, param, scan)
    return ToolSpec(function.name, function.description or "", parameters)


def tool_choice_of(
    choice: ToolChoiceField | None, tools: Sequence[ToolSpec], parallel: bool | None
) -> ToolChoice:
    """Whether, and which, tools are called."""
    is_parallel = parallel is not False
    if isinstance(choice, NamedChoice):
        name = choice.function.name
        if all(tool.name != name for tool in tools):
            raise wrong("tool_choice", f"'tool_choice' names {name!r}, which is not among 'tools'")
        return ToolChoice("required", name, is_parallel)
    if choice is not None and not isinstance(choice, str):
        raise refused(
            "tool_choice", "its type must be 'function'; leave out the tools that may not be called"
        )
    if choice == "required" and not tools:
        raise wrong("tool_choice", "'tool_choice' requires a call, and there are no 'tools'")
    mode = choice or ("auto" if tools else "none")
    return ToolChoice(mode, None, is_parallel)
