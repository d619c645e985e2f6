"""A model's chat template: Jinja source from its folder, rendered as transformers renders it.

The template receives messages, calls and tools as the dictionaries that templates expect. Untrusted strings
in them (names, descriptions, schemas, arguments) pass through a *mark*, by which ``chat_layout`` finds them
in the rendering. The arguments of a call are a dictionary that keeps its JSON text: a template that writes it
as JSON writes the text that the model wrote. The form in which a template expects calls is found by trying
each form.
"""

from __future__ import annotations

import copy
import hashlib
import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from agentflow.engine.store.gguf.file import reading_once
from agentflow.engine.text.channels import has_channels
from agentflow.engine.text.common_prefix import common_prefix
from agentflow.engine.text.tokenizer_files import chat_template_source, given_chat_template, template_tokens
from agentflow.errors import BadModelFolder, NotSupported, no_chat_template
from agentflow.protocol.bounds.json_bounds import MOST_NESTING, nests_deeper
from agentflow.protocol.chat import CalledTool, Message, ToolSpec
from agentflow.protocol.images import MediumKind, medium_kind
from agentflow.protocol.schemas.walk import ALL_TYPED, ANNOTATIONS, TYPES

MarkText: TypeAlias = Callable[[str], str]
"""Makes an untrusted string recognisable in a rendering."""

SHORT_ID_CHARS = 9
RESERVED_VALUES = frozenset({"messages", "tools", "documents", "add_generation_prompt", "strftime_now"})
"""Variables that every rendering sets."""


@dataclass(frozen=True, slots=True)
class ToolDialect:
    """The form in which a template expects calls."""

    arguments: Literal["object", "text"] = "object"  # an object, or its JSON text
    short_ids: bool = False  # ids must be nine letters and digits; others are replaced


class MediumMarkup(NamedTuple):
    """The text that a template writes for an image or a video. ``placeholder``: the special token in it that
    stands for the medium."""

    before: str
    placeholder: str
    after: str


class JsonObject(dict[str, Any]):
    """An object together with the JSON text from which it was read."""

    def __init__(self, members: dict[str, Any], text: str) -> None:
        super().__init__(members)
        self._text = text  # private, because templates access members by name


def unmarked(text: str) -> str:
    """The mark that changes nothing."""
    return text


def message_values(
    messages: Sequence[Message], dialect: ToolDialect, mark: MarkText = unmarked, *, in_parts: bool = False
) -> list[dict[str, Any]]:
    """Returns messages in the form of OpenAI's API. ``in_parts``: also the contents without images are lists
    of parts."""
    return [_message_value(message, dialect, mark, in_parts=in_parts) for message in messages]


def tool_values(tools: Sequence[ToolSpec], mark: MarkText = unmarked) -> list[dict[str, Any]] | None:
    """Returns tools in the form of OpenAI's API; None if there are none, because templates test for None."""
    if not tools:
        return None
    return [
        {
            "type": "function",
            "function": {
                "name": mark(tool.name),
                "description": mark(tool.description),
                "parameters": marked_leaves(tool.parameters, mark),
            },
        }
        for tool in tools
    ]


def marked_leaves(value: Any, mark: MarkText) -> Any:
    """Returns a JSON value with all strings marked, including names of members, except words of JSON schema,
    for which templates test."""
    if isinstance(value, str):
        return value if value in _SCHEMA_WORDS else mark(value)
    if isinstance(value, dict):
        return {marked_leaves(key, mark): marked_leaves(member, mark) for key, member in value.items()}
    if isinstance(value, list | tuple):
        return [marked_leaves(item, mark) for item in value]
    return value


def list_members(call: CalledTool) -> dict[str, Any]:
    """Returns the members of a call's arguments. Empty if they are not a JSON object, as in a truncated call,
    or nest too deeply for a template. A template that writes arguments as JSON writes their text in any
    case."""
    try:
        members = json.loads(call.arguments)
    except (ValueError, RecursionError):
        return {}
    return members if isinstance(members, dict) and not nests_deeper(members, MOST_NESTING) else {}


def to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """The ``tojson`` filter; the arguments are as in ``json.dumps``. Jinja's filter escapes HTML, but models
    were not trained on escaped text."""
    options: dict[str, Any] = {"ensure_ascii": ensure_ascii, "indent": indent, "separators": separators}
    if ensure_ascii or sort_keys or indent is not None or separators is not None:
        return json.dumps(value, sort_keys=sort_keys, **options)
    texts: dict[str, str] = {}
    written = json.dumps(_with_stand_ins(value, texts), ensure_ascii=False)
    for stand_in, text in texts.items():
        written = written.replace(json.dumps(stand_in), text)
    return written


def _with_stand_ins(value: Any, texts: dict[str, str]) -> Any:
    if isinstance(value, JsonObject):
        stand_in = secrets.token_hex(16)
        texts[stand_in] = value._text
        return stand_in
    if isinstance(value, dict):
        return {key: _with_stand_ins(member, texts) for key, member in value.items()}
    if isinstance(value, list | tuple):
        return [_with_stand_ins(item, texts) for item in value]
    return value


def _message_value(
    message: Message, dialect: ToolDialect, mark: MarkText, *, in_parts: bool
) -> dict[str, Any]:
    value: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.images or in_parts:
        value["content"] = [
            {"type": "text", "text": part} if isinstance(part, str) else {"type": medium_kind(part)}
            for part in message.parts or [""]
        ]
    if message.reasoning is not None:
        value["reasoning_content"] = mark(message.reasoning)
        if not (message.content and message.tool_calls):  # templates that read it reject the combination
            value["thinking"] = value["reasoning_content"]
    if message.tool_calls:
        value["tool_calls"] = [_call_value(call, dialect, mark) for call in message.tool_calls]
    if message.tool_call_id is not None:
        value["tool_call_id"] = _id(message.tool_call_id, dialect, mark)
    if message.name is not None:
        value["name"] = mark(message.name)
    return value


def _call_value(call: CalledTool, dialect: ToolDialect, mark: MarkText) -> dict[str, Any]:
    members = list_members(call)
    text = mark(call.arguments)
    as_object = dialect.arguments == "object"
    arguments: Any = JsonObject(marked_leaves(members, mark), text) if as_object else text
    function = {"name": mark(call.name), "arguments": arguments}
    return {"id": _id(call.id, dialect, mark), "type": "function", "function": function}


def _id(call_id: str, dialect: ToolDialect, mark: MarkText) -> str:
    if not dialect.short_ids:
        return mark(call_id)
    if len(call_id) == SHORT_ID_CHARS and call_id.isascii() and call_id.isalnum():
        return call_id
    return hashlib.sha256(call_id.encode(errors="replace")).hexdigest()[:SHORT_ID_CHARS]


_SCHEMA_WORDS = frozenset(
    {"", "type", *TYPES, *ALL_TYPED, *ANNOTATIONS}
    | {"properties", "required", "items", "enum", "const", "anyOf", "oneOf", "allOf", "$ref", "$defs"}
    | {"additionalProperties", "description", "title", "default", "format"}
)


RenderIn: TypeAlias = Callable[[Sequence[Message], ToolDialect], str]
"""Renders messages, or raises ``NotSupported``."""

_DIALECTS = tuple(
    ToolDialect(arguments, short_ids) for short_ids in (False, True) for arguments in ("text", "object")
)


def find_dialect(render: RenderIn) -> ToolDialect:
    """Returns the first form in which a call is rendered unchanged, or the default. Text is tried before
    objects, because a template that accepts both leaves text unchanged."""
    # A template may reject a call without its result, or any result.
    for is_answered in (True, False):
        for dialect in _DIALECTS:
            # Clients choose ids: one template requires at least nine characters, another exactly nine.
            if all(
                _shows_calls(render, dialect, call_id, is_answered) for call_id in ("1", "call_0123456789")
            ):
                return dialect
    return ToolDialect()


def _shows_calls(render: RenderIn, dialect: ToolDialect, call_id: str, is_answered: bool) -> bool:
    name, key, value = [f"n{secrets.token_hex(8)}" for _ in range(3)]
    # No JSON encoder writes white space like this: if the rendering has it, the text was not changed.
    arguments = f'{{"{key}" :  "{value}"}}'
    call = CalledTool(call_id, name, arguments)
    messages = [Message("user", "?"), Message("assistant", "", tool_calls=(call,))]
    if is_answered:
        messages.append(Message("tool", "!", tool_call_id=call_id, name=name))
    try:
        text = render(messages, dialect)
    except NotSupported:
        return False
    if name not in text or arguments in text:
        return name in text
    # A template may also write the members one by one. But the model was not trained on Python's notation of
    # a dictionary, or on JSON in a JSON string.
    is_misread = f"'{key}'" in text or f'\\"{key}' in text
    return dialect.arguments == "object" and key in text and not is_misread


class ChatTemplate:
    """A model's chat template.

    Args:
        source: the template's Jinja text; None if the model has none.
        special_tokens: passed to the template by name, such as ``{"bos_token": "<s>"}``.
        where: the name of the template in messages.
    """

    def __init__(
        self,
        source: str | None,
        special_tokens: Mapping[str, str] | None = None,
        *,
        where: str = "the chat template",
    ) -> None:
        """Raises ``BadModelFolder`` if the source is not valid Jinja."""
        self.special_tokens = dict(special_tokens or {})
        self.source = source or ""
        self.values: Mapping[str, Any] = {}
        self.base = self
        try:
            self._template = None if source is None else _environment().from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise BadModelFolder(
                f"{where} is not a valid Jinja template (line {error.lineno}): {error}",
                param="chat_template",
            ) from error

    def with_values(self, values: Mapping[str, Any]) -> ChatTemplate:
        """Returns the template with further variables, such as ``enable_thinking``. Text that it writes from
        their values is markup. The attribute ``base`` is the template without them."""
        if not values:
            return self
        made = copy.copy(self)
        made.values = dict(values)
        return made

    @classmethod
    @reading_once()
    def from_folder(cls, folder: Path, file: str | None = None) -> ChatTemplate:
        """Reads the folder's default chat template, if any, or the one in ``file``. Raises ``BadModelFolder``
        or ``BadArgument``."""
        source = chat_template_source(folder) if file is None else given_chat_template(file)
        return cls(source, template_tokens(folder), where=f"the chat template in {file or folder}")

    @property
    def has_template(self) -> bool:
        """Whether the model supports conversations in roles."""
        return self._template is not None

    @cached_property
    def has_channels(self) -> bool:
        """Whether it writes answers in channels."""
        return has_channels(self.source)

    @cached_property
    def wants_parts(self) -> bool:
        """Whether it shows contents only if they are lists of parts, as templates of models with vision
        may."""
        text = secrets.token_hex(16)

        def shows(content: Any) -> bool:
            try:
                return text in self._rendered([{"role": "user", "content": content}])
            except Exception:  # a template is a program and may raise anything
                return False

        return self.has_template and not shows(text) and shows([{"type": "text", "text": text}])

    def medium_markup(
        self, kind: MediumKind, special_spans: Callable[[str], Sequence[tuple[int, int]]], token: str = ""
    ) -> MediumMarkup | None:
        """Returns how the template writes an image or a video; None if it writes nothing, or no special
        token.

        Args:
            kind: image or video.
            special_spans: finds the special tokens in a text.
            token: the text that stands for the medium; empty: the special token in the middle, as between a
                begin and an end.
        """
        texts = [{"type": "text", "text": secrets.token_hex(16)} for _ in range(2)]
        try:
            alone = self._rendered([{"role": "user", "content": texts}])
            content = [texts[0], {"type": kind}, texts[1]]
            shown = self._rendered([{"role": "user", "content": content}])
        except Exception:  # a template is a program and may raise anything
            return None
        start = common_prefix(alone, shown)
        end = common_prefix(alone[start:][::-1], shown[start:][::-1])
        written = shown[start : len(shown) - end]
        places = special_spans(written)
        if token in written:
            places = [(written.index(token), written.index(token) + len(token))] if token else places
        if not places:
            return None
        low, high = places[len(places) // 2]
        return MediumMarkup(written[:low], written[low:high], written[high:])

    @cached_property
    def dialect(self) -> ToolDialect:
        """The form in which it expects calls, which the first conversation with calls determines."""
        return find_dialect(lambda messages, dialect: self.render(messages, dialect=dialect))

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[ToolSpec] = (),
        add_generation_prompt: bool = False,
        now: datetime | None = None,
        dialect: ToolDialect | None = None,
        mark: MarkText = unmarked,
        in_parts: bool | None = None,
    ) -> str:
        """Renders a conversation.

        Args:
            messages: the turns.
            tools: the tools that the template describes.
            add_generation_prompt: end with the beginning of an assistant's turn.
            now: the time for the template; None: the current time.
            dialect: the form of calls; None: the form that the template expects.
            mark: applied to all strings of tools and calls.
            in_parts: contents without images are lists of parts too; None: ``wants_parts``.

        Raises:
            NotSupported: there is no template, or it rejects these messages.
        """
        if self._template is None:
            raise no_chat_template()
        moment = now or datetime.now()
        if dialect is None:
            has_calls = any(message.tool_calls or message.tool_call_id for message in messages)
            dialect = self.base.dialect if has_calls else ToolDialect()
        in_parts = self.base.wants_parts if in_parts is None else in_parts
        values = message_values(messages, dialect, mark, in_parts=in_parts)
        try:
            return self._rendered(values, tool_values(tools, mark), add_generation_prompt, moment)
        except Exception as error:  # a template is a program and may raise anything
            roles = ", ".join(message.role for message in messages) or "none"
            raise NotSupported(
                f"the model's chat template rejects turns of these roles ({roles}): {error}"
            ) from error

    def _rendered(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = False,
        now: datetime | None = None,
    ) -> str:
        """Returns the text that the template renders. It may raise anything."""
        if self._template is None:
            raise no_chat_template()
        return self._template.render(
            **{**self.special_tokens, **self.values},
            messages=messages,
            tools=tools,
            documents=None,
            add_generation_prompt=add_generation_prompt,
            strftime_now=(now or datetime.now()).strftime,
        )

    def turn_markup(self) -> str:
        """Returns the markup around turns of a user and an assistant; empty if the template rejects them."""
        marker = secrets.token_hex(16)
        turns = [Message(role, marker) for role in ("user", "assistant", "user")]
        try:
            return self.render(turns).replace(marker, "\0")
        except NotSupported:
            return ""


class _Generation(jinja2.ext.Extension):
    """Parses ``{% generation %}…{% endgeneration %}``, which marks a model's text, as its body. The body has
    its own scope, as in transformers."""

    tags = {"generation"}  # noqa: RUF012  (the name and type that Jinja asks for)

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_text"), [], [], body).set_lineno(line)

    def _text(self, caller: Callable[[], str]) -> str:
        return caller()


class _Dict:
    """``dict`` for templates: creates dictionaries and has no other attributes."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _Namespace(jinja2.utils.Namespace):
    """``namespace`` for templates, without names that start with an underscore."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # ``namespace(self=1)`` is valid
        self, *rest = args
        attributes = dict(*rest, **kwargs)
        for name in attributes:
            _check_name(name)
        jinja2.utils.Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace cannot have the attribute {name!r}")


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = to_json
    given: dict[str, Callable[..., Any]] = {"raise_exception": _refuse, "dict": _Dict()}
    given["namespace"] = _Namespace
    environment.globals.update(given)
    return environment
