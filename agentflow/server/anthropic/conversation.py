"""Translates the messages and tools of Anthropic's API into turns and tools of chat templates.

Consecutive messages of one role become one turn. The blocks of a message are joined without a separator, as
templates write them. The user's messages of one turn are separated by an empty line; the assistant's are not.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from agentflow.protocol.bounds.json_bounds import OBJECT_BOUNDS, JsonScan, decode_object, object_text
from agentflow.protocol.chat import CalledTool, Message, ToolChoice, ToolSpec
from agentflow.protocol.events import Capabilities
from agentflow.protocol.images import Image, placed_in
from agentflow.server.anthropic.types import (
    AnyChoice,
    AutoChoice,
    Base64Source,
    CacheControl,
    CountRequest,
    GivenText,
    ImageBlock,
    InputMessage,
    OneToolChoice,
    RedactedThinkingBlock,
    TextBlock,
    ThinkingBlock,
    Tool,
    ToolResultBlock,
    ToolUseBlock,
    UrlSource,
)
from agentflow.server.compatible.cache_marks import CACHE_CONTROL_TTL, SECONDS, KeptBeginnings
from agentflow.server.compatible.images import check_images, image_from_url
from agentflow.server.errors import invalid_field

_BETWEEN_MESSAGES = "\n\n"


@dataclass(slots=True)
class _Turn:
    """A turn that may continue. The parts of its text are joined once."""

    role: str
    parts: list[str | Image]
    reasoning: list[str] = field(default_factory=list)
    calls: list[CalledTool] = field(default_factory=list)
    tool_call_id: str | None = None
    name: str | None = None

    def message(self) -> Message:
        text, images = placed_in(self.parts)
        return Message(
            self.role,
            text,
            tool_calls=tuple(self.calls),
            tool_call_id=self.tool_call_id,
            name=self.name,
            reasoning="".join(self.reasoning) or None,
            images=images,
        )


@dataclass
class _Turns:
    """The conversation so far. ``model``: the features of the model. ``open_calls``: the tools of the
    assistant's last turn whose calls have no result yet, by the ids of the calls."""

    model: Capabilities
    made: list[_Turn] = field(default_factory=list)
    open_calls: dict[str, str] = field(default_factory=dict)
    arguments: JsonScan = field(default_factory=lambda: JsonScan(OBJECT_BOUNDS))
    kept: KeptBeginnings = field(default_factory=KeptBeginnings)

    def mark(self, controls: Iterable[CacheControl | None]) -> None:
        """Keeps the conversation so far, up to the end of its last turn."""
        for control in controls:
            if control is not None:
                self.kept.add(len(self.made), SECONDS[control.ttl or CACHE_CONTROL_TTL])

    def add(self, message: InputMessage, param: str) -> None:
        blocks = [TextBlock(text=message.content)] if isinstance(message.content, str) else message.content
        if message.role == "assistant":
            if self.made and self.made[-1].role != "assistant":
                self._check_answered(param)
            self._assistant(blocks, param)
        elif message.role == "user":
            self._user(blocks, param)
        else:
            self._check_answered(param)
            self._add("system", [_only_text(block, param) for block in blocks])
        self.mark([getattr(block, "cache_control", None) for block in blocks if not _is_result(block)])

    def finish(self) -> tuple[Message, ...]:
        self._check_answered("messages")
        return tuple([turn.message() for turn in self.made])

    def _assistant(self, blocks: Sequence[object], param: str) -> None:
        text = "".join([block.text for block in blocks if isinstance(block, TextBlock)])
        calls: list[CalledTool] = []
        for number, block in enumerate(blocks):
            if isinstance(block, ToolUseBlock):
                if block.id in self.open_calls:
                    raise invalid_field(
                        f"{param}.content[{number}].id", f"two tool_use blocks have the id {block.id[:100]!r}"
                    )
                arguments = object_text(block.input, f"{param}.content[{number}].input", self.arguments)
                self.open_calls[block.id] = block.name
                calls.append(CalledTool(block.id, block.name, arguments))
            elif not isinstance(block, TextBlock | ThinkingBlock | RedactedThinkingBlock):
                raise invalid_field(
                    f"{param}.content[{number}]", "tool_result blocks belong in the user's messages"
                )
        self._add("assistant", [text], calls)
        self.made[-1].reasoning += [block.thinking for block in blocks if isinstance(block, ThinkingBlock)]

    def _user(self, blocks: Sequence[object], param: str) -> None:
        parts: list[str | Image] = []
        for number, block in enumerate(blocks):
            if isinstance(block, ToolResultBlock):
                if parts:
                    raise invalid_field(
                        f"{param}.content[{number}]", "tool_result blocks must precede the text of a message"
                    )
                self._result(block, f"{param}.content[{number}]")
            else:
                parts.append(self._part(block, f"{param}.content[{number}]"))
        if parts or not blocks:
            self._check_answered(param)
            self._add("user", parts)

    def _part(self, block: object, param: str) -> str | Image:
        if not isinstance(block, ImageBlock):
            return _only_text(block, param)
        check_images(param, self.model)
        match block.source:
            case Base64Source(media_type=media_type, data=data):
                return image_from_url(f"data:{media_type};base64,{data}", f"{param}.source.data", self.model)
            case UrlSource(url=url):
                return image_from_url(url, f"{param}.source.url", self.model)

    def _result(self, block: ToolResultBlock, param: str) -> None:
        name = self.open_calls.pop(block.tool_use_id, None)
        if name is None:
            cause = f"the preceding assistant message has no open tool_use block {block.tool_use_id[:100]!r}"
            raise invalid_field(f"{param}.tool_use_id", cause)
        if block.content is None or isinstance(block.content, str):
            parts: list[str | Image] = [block.content or ""]
        else:
            parts = [
                self._part(one, f"{param}.content[{number}]") for number, one in enumerate(block.content)
            ]
        if block.is_error:
            parts = ["Error: ", *parts] if any(parts) else ["Error"]
        self.made.append(_Turn("tool", parts, tool_call_id=block.tool_use_id, name=name))
        nested = [] if isinstance(block.content, str | None) else block.content
        self.mark([block.cache_control, *[one.cache_control for one in nested]])

    def _add(self, role: str, parts: Sequence[str | Image], calls: Sequence[CalledTool] = ()) -> None:
        if not self.made or self.made[-1].role != role:
            self.made.append(_Turn(role, []))
        elif role != "assistant":
            self.made[-1].parts.append(_BETWEEN_MESSAGES)
        self.made[-1].parts += parts
        self.made[-1].calls += calls

    def _check_answered(self, param: str) -> None:
        if self.open_calls:
            ids = ", ".join([call[:100] for call in self.open_calls])
            raise invalid_field(
                param, f"the next message must have tool_result blocks for the tool_use blocks {ids}"
            )


def read_conversation(
    body: CountRequest, model: Capabilities
) -> tuple[tuple[Message, ...], Sequence[tuple[int, float]]]:
    """The conversation, and its prefixes to keep in the cache. ``ApiError``, with the field, for a block that
    is wrong. ``model``: the features of the model."""
    turns = _Turns(model)
    if body.system:
        turns.made.append(_Turn("system", [join_text(body.system)]))
        if not isinstance(body.system, str):
            turns.mark([block.cache_control for block in body.system])
    # Templates write the tools into the system turn.
    turns.mark([tool.cache_control for tool in body.tools or ()])
    for number, message in enumerate(body.messages):
        turns.add(message, f"messages[{number}]")
    turns.mark([body.cache_control])
    return turns.finish(), turns.kept.found


def join_text(text: GivenText) -> str:
    """The text as one string."""
    return text if isinstance(text, str) else "".join([block.text for block in text])


def _is_result(block: object) -> bool:
    return isinstance(block, ToolResultBlock)


def _only_text(block: object, param: str) -> str:
    if not isinstance(block, TextBlock):
        raise invalid_field(
            param,
            "thinking and tool_use blocks belong in the assistant's messages, tool_result blocks in the "
            "user's",
        )
    return block.text


def read_tools(tools: Sequence[Tool]) -> tuple[ToolSpec, ...]:
    """The tools that the model may call."""
    scan = JsonScan(OBJECT_BOUNDS)
    return tuple([_tool_spec(tool, f"tools[{number}]", scan) for number, tool in enumerate(tools)])


def _tool_spec(tool: Tool, param: str, scan: JsonScan) -> ToolSpec:
    schema = decode_object(tool.input_schema, f"{param}.input_schema", scan)
    if tool.input_examples:
        # Chat templates show a tool's schema, and have no other place for examples.
        schema["examples"] = [
            decode_object(example, f"{param}.input_examples[{number}]", scan)
            for number, example in enumerate(tool.input_examples)
        ]
    return ToolSpec(tool.name, tool.description or "", schema, strict=bool(tool.strict))


def read_tool_choice(body: CountRequest) -> ToolChoice:
    """Which tools the model may or must call."""
    choice = body.tool_choice
    match choice:
        case OneToolChoice():
            return ToolChoice("required", choice.name, not choice.disable_parallel_tool_use)
        case AnyChoice():
            return ToolChoice("required", None, not choice.disable_parallel_tool_use)
        case AutoChoice() if body.tools:
            return ToolChoice("auto", None, not choice.disable_parallel_tool_use)
        case None if body.tools:
            return ToolChoice("auto")
    return ToolChoice("none")
