"""A request's tools as the engine needs them: what the template is given, what the answer must look like, and
who reads it.

Tools for a model whose chat template knows of none: told in the system turn, called and answered in
contents, in the notation of ``tool_format.FALLBACK``.

From what the engine tells of an answer to the text of a reply (``reply``).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec.structs import replace

from agentflow.engine.text.chat_template import ChatTemplate, read_arguments
from agentflow.engine.text.tool_format import FALLBACK, ToolFormat, tool_format
from agentflow.engine.text.tool_output import ToolOutput
from agentflow.errors import BadArgument, NotSupported
from agentflow.protocol.chat import (
    Conversation,
    Message,
    Piece,
    ReplyWriter,
    TextPiece,
    ToolChoice,
    ToolSpec,
    hoisted,
)
from agentflow.protocol.constraint import Constraint
from agentflow.protocol.json_bounds import OBJECT_BOUNDS, JsonScan, TooMuchJson, pieces_of


def as_plain_messages(
    messages: Sequence[Message], tools: Sequence[ToolSpec], template: ChatTemplate
) -> tuple[Message, ...]:
    """The same conversation in messages that have nothing but a content.

    Tools are told in the system turn; where there is none one is added, or, where the template takes none,
    in front of the first turn's content. Results are turns of the user; several in a row are one, and what
    the user says right after them stands in it too, as many templates want the roles to alternate.
    """
    plain: list[Message] = []
    parts: list[list[str]] = []  # of each of them the lines of its content, put together once
    is_answering = False
    for message in messages:
        content = message.content
        if message.role == "tool":
            content, role = f"<tool_response>\n{content}\n</tool_response>", "user"
        else:
            role = message.role
        if message.tool_calls:
            content = _with_calls(message)
        if is_answering and role == "user":
            parts[-1].append(content)
        else:
            plain.append(Message(role, "", message.generated))
            parts.append([content])
        is_answering = message.role == "tool"
    plain = [replace(one, content="\n".join(said)) for one, said in zip(plain, parts, strict=True)]
    return tuple(_told(plain, tools, template) if tools else plain)


def _with_calls(message: Message) -> str:
    written: list[str] = []
    for call in message.tool_calls:
        read_arguments(call)  # refused like under other templates
        name = json.dumps(call.name, ensure_ascii=False)
        written.append(f'{FALLBACK.begin}{{"name": {name}, "arguments": {call.arguments}}}{FALLBACK.end}')
    calls = (FALLBACK.between or "").join(written)
    return f"{message.content}{FALLBACK.before}{calls}" if message.content else calls


def _told(plain: list[Message], tools: Sequence[ToolSpec], template: ChatTemplate) -> list[Message]:
    text = _description(tools)
    if plain and plain[0].role == "system":
        said = plain[0].content
        return [replace(plain[0], content=f"{said}\n\n{text}" if said else text), *plain[1:]]
    with_system = [Message("system", text), *plain]
    if not plain or _takes_system(template):
        return with_system
    return [replace(plain[0], content=f"{text}\n\n{plain[0].content}"), *plain[1:]]


def _takes_system(template: ChatTemplate) -> bool:
    try:
        template.render([Message("system", "x"), Message("user", "x")], add_generation_prompt=True)
    except NotSupported:
        return False
    return True


def _description(tools: Sequence[ToolSpec]) -> str:
    """Short: the models that need it are small."""
    lines = [
        json.dumps(
            {"name": tool.name, "description": tool.description, "parameters": tool.parameters},
            ensure_ascii=False,
        )
        for tool in tools
    ]
    how = f'{FALLBACK.begin}{{"name": ..., "arguments": {{...}}}}{FALLBACK.end}'
    return "\n".join(
        ["You can call these tools:", "<tools>", *lines, "</tools>", f"To call one, write {how}"]
    )


@dataclass(frozen=True, slots=True)
class ToolUse:
    """``messages`` and ``tools`` are for the ``TokenState``. ``callable_names``: tools that an answer may
    call. ``calls``: what an answer is that is nothing but calls; None where there may be none. Such an answer
    begins with one of ``begins``. ``must_call``: each answer is one."""

    messages: tuple[Message, ...]
    tools: tuple[ToolSpec, ...]
    form: ToolFormat
    callable_names: tuple[str, ...] = ()
    calls: Constraint | None = None
    begins: tuple[str, ...] = ()
    must_call: bool = False

    def constraint(self, otherwise: Constraint | None = None) -> Constraint | None:
        """For the generation. ``otherwise``: what an answer is that calls nothing; ``NotSupported`` where a
        call could not be told from it by how it begins."""
        if self.calls is None:
            return otherwise
        if self.must_call:
            return self.calls
        if otherwise is not None:
            if not self.form.mark and self.form.whitespace == "free":
                raise NotSupported(f"this model writes calls as any JSON: no {otherwise.kind} beside tools")
            jumps = otherwise.jump_forward
            return replace(self.calls, instead=otherwise, apart=self.begins, jump_forward=jumps)
        return replace(self.calls, between=None) if self.form.mark else None

    def output(self, otherwise: Constraint | None = None) -> ToolOutput:
        """The reader of one answer under this constraint."""
        return ToolOutput(
            self.form,
            self.callable_names,
            is_constrained=self.constraint(otherwise) is not None,
            begins=self.begins if otherwise is not None else (),
        )


def tool_use(template: ChatTemplate, conversation: Conversation) -> ToolUse:
    """What a conversation becomes, with tools or without.

    >>> use = tool_use(template, conversation)
    >>> tokens.tools(use.tools)
    >>> for message in use.messages:
    ...     tokens.turn(message)
    >>> tokens.begin_role("assistant")
    >>> output, heard = use.output(), []  # for each answer
    >>> def on_text(text: str) -> None:
    ...     heard.append(text)
    ...     tell(output.push(text))
    >>> end = await generator.generate(context, params, on_text, use.constraint())
    >>> tell(output.finish(end.text[len("".join(heard)) :]))
    >>> reason = "tool_calls" if output.num_calls else end.finish_reason

    ``required``: the answer is one call (or several, where that is asked for and the model's notation has a
    place for them) and nothing else. ``auto``: prose, in which whatever begins as a call is a valid one.
    Where the notation has no mark (Llama 3.1 writes a bare JSON object), an answer under ``auto`` is not
    constrained, as nothing says where a call begins; one that is a whole valid call is read as a call.
    ``auto`` with a constraint ``otherwise``: either calls and nothing else, or text under that constraint.

    ``BadArgument``: tools that make no sense. ``NotSupported``: a model without a chat template.
    """
    choice, tools = conversation.choice, conversation.tools
    _check(conversation)
    messages = _with_names(conversation.messages)
    form = tool_format(template)
    given = tools
    if not form.is_native:
        messages, given = as_plain_messages(messages, tools, template), ()
    if not tools or choice.mode == "none":
        return ToolUse(messages, given, form)
    if not template.has_template:
        raise NotSupported("this model has no chat template: it cannot be told of tools")
    allowed = [tool for tool in tools if choice.name in (None, tool.name)]
    names = tuple([tool.name for tool in allowed])
    calls = _calls(form, allowed, choice)
    begins = (form.mark,) if form.mark else tuple([_bare_begin(form, name) for name in names])
    return ToolUse(messages, given, form, names, calls, begins, must_call=choice.mode == "required")


def _bare_begin(form: ToolFormat, name: str) -> str:
    """What a call of this tool begins with in a format without a mark, up to its arguments (or its name,
    where these come first)."""
    comma, colon = (",", ":") if form.whitespace == "tight" else (", ", ": ")
    said = [(key, json.dumps(value, ensure_ascii=False)) for key, value in form.constants]
    if form.name_first:
        said.append((form.name_key, json.dumps(name, ensure_ascii=False)))
    members = [*said, (form.arguments_key, "{")]
    written = comma.join([f"{json.dumps(key, ensure_ascii=False)}{colon}{value}" for key, value in members])
    return ("[{" if form.is_list else "{") + written


def _with_names(messages: Sequence[Message]) -> tuple[Message, ...]:
    """Results with the names of what was called, which clients leave out and some templates want."""
    names: dict[str | None, str] = {}
    named: list[Message] = []
    for message in messages:
        names.update({call.id: call.name for call in message.tool_calls})
        is_unnamed = message.role == "tool" and message.name is None
        named.append(replace(message, name=names.get(message.tool_call_id)) if is_unnamed else message)
    return tuple(named)


def _check(conversation: Conversation) -> None:
    choice, names = conversation.choice, [tool.name for tool in conversation.tools]
    _check_bounds(conversation)
    if len(set(names)) != len(names):
        raise BadArgument(f"two tools have one name: {', '.join(names)}")
    if choice.mode == "required" and not names:
        raise BadArgument("a tool call is required, and there are no tools: give at least one")
    if choice.name is not None and choice.name not in names:
        raise BadArgument(
            f"tool {choice.name!r} is to be called, but the tools are: {', '.join(names) or 'none'}"
        )


def _check_bounds(conversation: Conversation) -> None:
    """Templates and compilers walk through all tools, and all arguments of calls."""
    tools, arguments = JsonScan(OBJECT_BOUNDS), JsonScan(OBJECT_BOUNDS)
    for tool in conversation.tools:
        try:
            _count(tools, msgspec.json.encode(tool.parameters))
        except (TooMuchJson, RecursionError) as error:
            raise BadArgument(f"tool {tool.name!r}: its parameters: with these, {error}") from None
    for message in conversation.messages:
        for call in message.tool_calls:
            try:
                _count(arguments, call.arguments.encode("utf-8", "surrogatepass"))
            except TooMuchJson as error:
                raise BadArgument(f"the arguments of a call of {call.name!r}: with these, {error}") from None


def _count(scan: JsonScan, text: bytes) -> None:
    for piece in pieces_of(text):
        scan.push(piece)


def _calls(form: ToolFormat, tools: Sequence[ToolSpec], choice: ToolChoice) -> Constraint:
    is_single = not choice.parallel or choice.name is not None or not form.allows_several
    schema = call_schema(form, tools)
    definitions = schema.pop("$defs", None)
    if form.is_list:
        schema = {"type": "array", "items": schema, "minItems": 1, **({"maxItems": 1} if is_single else {})}
    source = json.dumps({**schema, "$defs": definitions} if definitions else schema, ensure_ascii=False)
    if not form.mark:
        return Constraint("schema", source, whitespace=form.whitespace)
    rule = {"begin": form.mark, "kind": "schema", "source": source, "end": form.end}
    if lead := form.begin.removeprefix(form.mark):
        rule["lead"] = lead
    return Constraint(
        "tags",
        json.dumps([rule], ensure_ascii=False),
        whitespace=form.whitespace,
        between=form.between or "",
        max_tags=1 if is_single or form.is_list else None,
    )


def call_schema(form: ToolFormat, tools: Sequence[ToolSpec]) -> dict[str, Any]:
    """The JSON schema of one call of one of the tools, its members in the order of the format."""
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
    """Arguments are an object even where the schema does not say so, and one without parameters is empty."""
    schema = {"type": "object", **parameters}
    if schema.get("properties") == {} and not {"additionalProperties", "patternProperties"} & set(schema):
        schema["additionalProperties"] = False
    return schema


class ReplyText:
    """Of one answer. ``use``: the tools that it may call, if there are any. ``constraint``: what it is where
    it calls none; and, of this object, what all of it keeps."""

    def __init__(self, use: ToolUse | None, constraint: Constraint | None = None) -> None:
        self.constraint = constraint if use is None else use.constraint(constraint)
        self._output = use.output(constraint) if use is not None and use.callable_names else None
        self._writer = ReplyWriter()
        self._told: list[str] = []
        self._num_chars = 0

    def hear(self, text: str) -> str:
        """The answer goes on by ``text``, the reply by what comes back."""
        self._num_chars += len(text)
        return self._tell(self._pieces(text))

    def finish(self, text: str) -> str:
        """All of the reply, of the answer that was ``text``."""
        rest = text[self._num_chars :]
        self._tell(self._pieces(rest) if self._output is None else self._output.finish(rest))
        return "".join(self._told) + self._writer.finish()

    def _pieces(self, text: str) -> list[Piece]:
        if self._output is not None:
            return self._output.push(text)
        return [TextPiece(text)] if text else []

    def _tell(self, pieces: list[Piece]) -> str:
        written = self._writer.push(pieces)
        self._told.append(written)
        return written
