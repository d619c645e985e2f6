"""The tools of a request: the template's input, the constraint of the answer, and its reader.

``tool_use`` combines a conversation with the template's notation of calls (``tool_format``); ``ToolUse``
has the constraint and the reader (``tool_output``) of an answer. ``ReplyText`` writes the answer as the text
of a reply.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec.structs import replace

from agentflow.engine.grammar.compiler.messages import PartedConstraint, SchemaPart
from agentflow.engine.text.channel_output import ChannelOutput
from agentflow.engine.text.channels import CALL_MARK, call_head
from agentflow.engine.text.chat_template import ChatTemplate
from agentflow.engine.text.reasoning import (
    AnswerOutput,
    ReasoningFormat,
    ReasoningOutput,
    ReasoningText,
    finish_output,
    push_output,
)
from agentflow.engine.text.tool_format import (
    IN_CHANNELS,
    ToolFormat,
    as_plain_messages,
    num_plain_turns,
    tool_format,
)
from agentflow.engine.text.tool_output import CallMarks, ToolOutput
from agentflow.errors import BadArgument, NotSupported, error_param, no_chat_template
from agentflow.protocol.bounds.json_bounds import OBJECT_BOUNDS, JsonScan, TooMuchJson, split_pieces
from agentflow.protocol.chat import (
    Conversation,
    Message,
    ReasoningPiece,
    ReplyPiece,
    ReplyWriter,
    TextPiece,
    ToolChoice,
    ToolSpec,
)
from agentflow.protocol.constraint import Constraint
from agentflow.protocol.schemas.hoisting import hoisted
from agentflow.protocol.schemas.walk import resolved


@dataclass(frozen=True, slots=True)
class ToolUse:
    """How the engine runs a conversation with tools."""

    messages: tuple[Message, ...]  # for the ``TokenState``
    named: tuple[Message, ...]  # the client's messages, with the tool's name in each result
    tools: tuple[ToolSpec, ...]  # for the ``TokenState``
    form: ToolFormat
    callable_names: tuple[str, ...] = ()  # the tools that an answer may call
    calls: PartedConstraint | None = None  # of an answer that consists of calls; None if none are allowed
    begins: tuple[str, ...] = ()  # such an answer begins with one of these
    must_call: bool = False  # every answer must consist of calls

    def constraint(self, otherwise: Constraint | None = None) -> Constraint | None:
        """Returns the constraint of the generation. ``otherwise``: the constraint of an answer without calls.
        Raises ``NotSupported`` if the beginning of an answer does not show which of the two applies."""
        if self.calls is None:
            return otherwise
        if self.must_call:
            return self.calls
        if otherwise is not None:
            if not self.form.mark and self.form.whitespace == "free":
                raise NotSupported(
                    f"this model writes calls as plain JSON: no {otherwise.kind} can be used with tools"
                )
            jumps = otherwise.jump_forward
            other = PartedConstraint.of(otherwise)
            either = replace(self.calls, instead=other, apart=self.begins, jump_forward=jumps)
            either.check_instead()
            return either
        return replace(self.calls, between=None) if self.form.mark else None

    def num_turns(self, num_messages: int) -> int:
        """Returns how many turns of ``messages`` the first ``num_messages`` of ``named`` become."""
        if self.form.is_native:
            return num_messages
        num_added = len(self.messages) - num_plain_turns(self.named)
        return num_added + num_plain_turns(self.named[:num_messages])

    @property
    def marks(self) -> CallMarks | None:
        """Returns the marks around the calls of an answer; None if it may have none."""
        if not self.callable_names:
            return None
        if self.form.has_channels:
            return CallMarks(CALL_MARK, "")
        return CallMarks(self.form.mark, self.form.end.strip())

    def output(self, otherwise: Constraint | None = None) -> ToolOutput:
        """Returns the reader of one answer under this constraint."""
        return ToolOutput(
            self.form,
            self.callable_names,
            is_constrained=otherwise is not None
            or (self.calls is not None and (self.must_call or bool(self.form.mark))),
            begins=self.begins if otherwise is not None else (),
        )


def answer_output(
    use: ToolUse | None, otherwise: Constraint | None, reasoning_format: ReasoningFormat | None
) -> AnswerOutput | None:
    """Returns the reader of an answer under ``use.constraint(otherwise)``; None if it is only text."""
    can_call = use is not None and bool(use.callable_names)
    if reasoning_format is not None and reasoning_format.has_channels:
        names = use.callable_names if use is not None and use.form.has_channels else ()
        return ChannelOutput(names, is_open=reasoning_format.is_open, is_constrained=can_call)
    tools = use.output(otherwise) if use is not None and can_call and not use.form.has_channels else None
    return tools if reasoning_format is None else ReasoningOutput(reasoning_format, tools)


def tool_use(template: ChatTemplate, conversation: Conversation) -> ToolUse:
    """Prepares a conversation that was checked, with or without tools, for the engine.

    >>> use = tool_use(template, conversation)
    >>> tokens.tools(use.tools)
    >>> for message in use.messages:
    ...     tokens.turn(message)
    >>> tokens.begin_role("assistant")
    >>> output, texts = use.output(), []  # for each answer
    >>> def on_text(text: str) -> None:
    ...     texts.append(text)
    ...     send(output.push(text))
    >>> end = await generator.generate(context, params, on_text, use.constraint())
    >>> send(output.finish(end.text[len("".join(texts)) :]))
    >>> reason = "tool_calls" if output.num_calls else end.finish_reason

    ``required``: the answer is one call (or several, if allowed by the request and by the model's notation)
    and no text. ``auto``: prose, in which each text that begins like a call is a valid call. If the notation
    has no mark (Llama 3.1 writes a bare JSON object), an answer under ``auto`` is not constrained, because
    nothing shows where a call begins; an answer that is a valid call as a whole is read as one. ``auto`` with
    ``otherwise``: either only calls, or text under that constraint.

    Raises:
        BadArgument: a tool is invalid.
        NotSupported: the model has no chat template.
    """
    choice, tools = conversation.choice, conversation.tools
    _check_bounds(conversation)
    messages = named = _with_names(conversation.messages)
    form = tool_format(template.base)
    given = tools
    if not form.is_native:
        messages, given = as_plain_messages(messages, tools, template), ()
    if not tools or choice.mode == "none":
        return ToolUse(messages, named, given, form)
    if not template.has_template:
        raise no_chat_template()
    allowed = {number: tool for number, tool in enumerate(tools) if choice.name in (None, tool.name)}
    names = tuple([tool.name for tool in allowed.values()])
    calls = _calls(form, allowed, choice)
    with error_param("tools"):
        calls.check()
    begins = (form.mark,) if form.mark else tuple([_bare_begin(form, name) for name in names])
    return ToolUse(messages, named, given, form, names, calls, begins, must_call=choice.mode == "required")


def _bare_begin(form: ToolFormat, name: str) -> str:
    """Returns the beginning of a call of this tool in a format without a mark, up to its arguments (or its
    name, if that comes later)."""
    comma, colon = (",", ":") if form.whitespace == "tight" else (", ", ": ")
    said = [(key, json.dumps(value, ensure_ascii=False)) for key, value in form.constants]
    if form.name_first:
        said.append((form.name_key, json.dumps(name, ensure_ascii=False)))
    members = [*said, (form.arguments_key, "{")]
    written = comma.join([f"{json.dumps(key, ensure_ascii=False)}{colon}{value}" for key, value in members])
    return ("[{" if form.is_list else "{") + written


def _with_names(messages: Sequence[Message]) -> tuple[Message, ...]:
    """Returns the messages with the name of the tool in each result, which clients omit and some templates
    require."""
    names: dict[str | None, str] = {}
    named: list[Message] = []
    for message in messages:
        names.update({call.id: call.name for call in message.tool_calls})
        is_unnamed = message.role == "tool" and message.name is None
        named.append(replace(message, name=names.get(message.tool_call_id)) if is_unnamed else message)
    return tuple(named)


def _check_bounds(conversation: Conversation) -> None:
    """Bounds the JSON that templates and compilers process."""
    tools, arguments = JsonScan(OBJECT_BOUNDS), JsonScan(OBJECT_BOUNDS)
    for number, tool in enumerate(conversation.tools):
        try:
            _count(tools, msgspec.json.encode(tool.parameters))
        except (TooMuchJson, RecursionError) as error:
            text = f"tool {tool.name!r}: parameters: {error}"
            raise BadArgument(text, param=f"tools[{number}]") from None
    for message in conversation.messages:
        for call in message.tool_calls:
            try:
                _count(arguments, call.arguments.encode("utf-8", "surrogatepass"))
            except TooMuchJson as error:
                text = f"call of {call.name!r}: arguments: {error}"
                raise BadArgument(text, param="messages") from None


def _count(scan: JsonScan, text: bytes) -> None:
    for piece in split_pieces(text):
        scan.push(piece)


def _calls_in_channels(tools: Mapping[int, ToolSpec]) -> PartedConstraint:
    """Returns the constraint of calls in channels: a call is the last message of its answer. ``tools``: as
    for ``_calls``."""
    rules: list[dict[str, str]] = []
    parts: list[SchemaPart] = []
    for place, (number, tool) in enumerate(tools.items()):
        definitions: dict[str, Any] = {}
        schema = hoisted(tool.name, _of_object(tool.parameters), definitions)
        schema = {**schema, "$defs": definitions} if definitions else schema
        source = json.dumps(schema, ensure_ascii=False)
        rules.append({"begin": call_head(tool.name), "kind": "schema", "source": source, "end": ""})
        path = ("anyOf", place) if len(tools) > 1 else ()
        parts.append(SchemaPart(path, tool.name, f"tools[{number}]", tool.strict))
    source = json.dumps(rules, ensure_ascii=False)
    return PartedConstraint(
        "tags", source, whitespace=IN_CHANNELS.whitespace, between="", max_tags=1, parts=tuple(parts)
    )


def _calls(form: ToolFormat, tools: Mapping[int, ToolSpec], choice: ToolChoice) -> PartedConstraint:
    """Returns the constraint of calls. ``tools``: by their numbers in the conversation."""
    if form.has_channels:
        return _calls_in_channels(tools)
    is_single = not choice.parallel or choice.name is not None or not form.allows_several
    schema = call_schema(form, [*tools.values()])
    definitions = schema.pop("$defs", None)
    if form.is_list:
        schema = {"type": "array", "items": schema, "minItems": 1, **({"maxItems": 1} if is_single else {})}
    source = json.dumps({**schema, "$defs": definitions} if definitions else schema, ensure_ascii=False)
    parts: list[SchemaPart] = []
    for place, (number, tool) in enumerate(tools.items()):
        path = ("items",) if form.is_list else ()
        option = ("anyOf", place) if len(tools) > 1 else ()
        arguments = (*path, *option, "properties", form.arguments_key)
        parts.append(SchemaPart(arguments, tool.name, f"tools[{number}]", tool.strict))
    if not form.mark:
        return PartedConstraint("schema", source, whitespace=form.whitespace, parts=tuple(parts))
    rule = {"begin": form.mark, "kind": "schema", "source": source, "end": form.end}
    if lead := form.begin.removeprefix(form.mark):
        rule["lead"] = lead
    return PartedConstraint(
        "tags",
        json.dumps([rule], ensure_ascii=False),
        whitespace=form.whitespace,
        between=form.between or "",
        max_tags=1 if is_single or form.is_list else None,
        parts=tuple(parts),
    )


def call_schema(form: ToolFormat, tools: Sequence[ToolSpec]) -> dict[str, Any]:
    """Returns the JSON schema of one call of one of the tools, with members in the format's order."""
    definitions: dict[str, Any] = {}
    calls: list[dict[str, Any]] = []
    for tool in tools:
        arguments = hoisted(tool.name, _of_object(tool.parameters), definitions)
        name: dict[str, Any] = {form.name_key: {"const": tool.name}, form.arguments_key: arguments}
        members = name if form.name_first else dict(reversed(name.items()))
        properties = {**{key: {"const": value} for key, value in form.constants}, **members}
        calls.append(
            {
                "type": "object",
                "properties": properties,
                "required": list(properties),
                "additionalProperties": False,
            }
        )
    schema = calls[0] if len(calls) == 1 else {"anyOf": calls}
    return {**schema, "$defs": definitions} if definitions else schema


def _of_object(parameters: dict[str, Any]) -> dict[str, Any]:
    """Returns the schema of arguments, which are an object even if ``parameters`` does not say so. A tool
    without parameters accepts an empty object."""
    if "$ref" in parameters and resolved(parameters, parameters).get("type") == "object":
        return parameters
    schema = {"type": "object", **parameters}
    if schema.get("properties") == {} and not {"additionalProperties", "patternProperties"} & set(schema):
        schema["additionalProperties"] = False
    return schema


class ReplyText:
    """The text of one reply. ``use``: the tools, if any. ``constraint``: of an answer without calls; the
    attribute is the constraint of any answer. ``reasoning_format``: how the answer may begin with
    ``reasoning``."""

    def __init__(
        self,
        use: ToolUse | None,
        constraint: Constraint | None = None,
        reasoning_format: ReasoningFormat | None = None,
    ) -> None:
        self.constraint = constraint if use is None else use.constraint(constraint)
        self._output = answer_output(use, constraint, reasoning_format)
        self.reasoning = ReasoningText()
        self._writer = ReplyWriter()
        self._written: list[str] = []
        self._num_chars = 0

    def push(self, text: str, answer_at: int | None) -> str:
        """Reads more of the answer. ``answer_at``: from ``Progress``. Returns the new text of the reply."""
        self._num_chars += len(text)
        if self._output is None:
            return self._write_text(text)
        return self._write(push_output(self._output, text, answer_at))

    def finish(self, text: str, answer_at: int | None, *, is_truncated: bool) -> str:
        """Returns the whole reply. ``text``: the whole answer. ``is_truncated``: a limit ended it."""
        rest = text[self._num_chars :]
        if self._output is None:
            self._write_text(rest)
        else:
            self._write(finish_output(self._output, rest, answer_at, is_truncated=is_truncated))
        return "".join(self._written) + self._writer.finish()

    def _write_text(self, text: str) -> str:
        return self._write([TextPiece(text)] if text else [])

    def _write(self, pieces: list[ReplyPiece]) -> str:
        self.reasoning.append(pieces)
        written = self._writer.push(piece for piece in pieces if not isinstance(piece, ReasoningPiece))
        self._written.append(written)
        return written
