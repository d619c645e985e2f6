"""A conversation as chat APIs have it: whole messages, the tool calls in them, the tools, and which of those
the next answer may call.

What an assistant says that may call tools: prose and calls, in the order in which they came.

Between backend and frontend it is a text, as every value is, so that it streams, is resumed and recorded like
others: a JSON list of parts, ``{"text": …}`` and ``{"id": …, "name": …, "arguments": …}``, its *notation*.
The arguments of a call are a JSON object as text, which an answer that was cut off may end within. The
notation is the same for all models, however they write calls.

Where a text is wanted (in a reference, a transform, a message), the text of a reply is its prose:
``ReplySoFar`` reads it from the notation, for the frontend and for the interpreter.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, Self, TypeAlias

import msgspec

from agentflow.errors import BadArgument, ProtocolError

ROLES: Final = ("system", "user", "assistant", "tool")


class ToolSpec(msgspec.Struct, frozen=True):
    """A tool that the model may ask to have called. ``parameters``: the JSON schema of an object."""

    name: str
    description: str
    parameters: dict[str, Any]


class CalledTool(msgspec.Struct, frozen=True):
    """A tool call of an assistant's turn. ``arguments``: a JSON object, as text.

    >>> call = af.CalledTool("call_1", "weather", '{"city": "Oslo"}')
    >>> json.loads(call.arguments)
    {'city': 'Oslo'}
    """

    id: str
    name: str
    arguments: str


class Message(msgspec.Struct, frozen=True, omit_defaults=True):
    """One turn: who speaks and what. ``generated``: a model wrote some of it. ``tool_calls``: what an
    assistant asked for; a ``tool`` turn answers the call ``tool_call_id``, of the tool ``name``.

    >>> question = af.Message("user", "What do plants do?")
    >>> async with flow.state() as s:
    ...     s += af.conversation([question]) + af.gen("answer")
    """

    role: str
    content: str
    generated: bool = False
    tool_calls: tuple[CalledTool, ...] = ()
    tool_call_id: str | None = None
    name: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """As OpenAI's API has it, and ``af.conversation`` takes it.

        >>> af.Message("tool", "12 degrees", tool_call_id="call_1").as_dict()
        {'role': 'tool', 'content': '12 degrees', 'tool_call_id': 'call_1'}
        """
        shown: dict[str, Any] = {"role": self.role, "content": self.content}
        if self.tool_calls:
            shown["tool_calls"] = [
                {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": c.arguments}}
                for c in self.tool_calls
            ]
        named = {"tool_call_id": self.tool_call_id, "name": self.name}
        return shown | {key: value for key, value in named.items() if value is not None}


class ToolChoice(msgspec.Struct, frozen=True, omit_defaults=True):
    """``auto``: the model may call tools, and writes what it likes beside them. ``required``: it calls at
    least one, and writes nothing else. ``none``: it calls none, though it is told of them. ``name``: with
    ``required``, this tool. ``parallel``: it may call several."""

    mode: Literal["auto", "required", "none"] = "auto"
    name: str | None = None
    parallel: bool = True


FREE_CHOICE = ToolChoice()
"""Where nobody says anything."""


class Conversation(msgspec.Struct, frozen=True, omit_defaults=True):
    """``messages``: after them the assistant speaks; a last turn of its own is not ended, but goes on.
    ``tools``: what it is told of. ``choice``: which of them it may call."""

    messages: tuple[Message, ...]
    tools: tuple[ToolSpec, ...] = ()
    choice: ToolChoice = FREE_CHOICE

    def check(self) -> Self:
        """Itself, or ``BadArgument`` for a message that nobody could have said."""
        for message in self.messages:
            if message.role not in ROLES:
                known = ", ".join(ROLES)
                raise BadArgument(f"conversation: there is no role {message.role!r} (there are: {known})")
            if message.tool_calls and message.role != "assistant":
                raise BadArgument(
                    f"conversation: a {message.role} message calls no tools: an assistant's does"
                )
        names = [tool.name for tool in self.tools]
        if len(set(names)) < len(names):
            twice = next(name for name, count in Counter(names).items() if count > 1)
            raise BadArgument(f"conversation: two tools have the name {twice!r}")
        if self.choice.mode == "required" and not names:
            raise BadArgument("conversation: a tool has to be called, and there are no tools")
        if self.choice.name is not None and self.choice.name not in names:
            known = ", ".join(map(repr, names))
            raise BadArgument(f"conversation: there is no tool {self.choice.name!r} (there are: {known})")
        return self


@dataclass(frozen=True, slots=True)
class TextPiece:
    """Prose goes on by ``text``."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegun:
    """A tool is called; what comes up to the next piece of another kind are its arguments."""

    id: str
    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """The arguments of the call that began last, a JSON object as text, go on by ``text``."""

    text: str


Piece: TypeAlias = TextPiece | CallBegun | Arguments


class Reply(msgspec.Struct, frozen=True):
    """A whole one: its prose, and its calls.

    >>> async with flow.state() as s:
    ...     s += af.conversation([{"role": "user", "content": "What do plants do?"}])
    ...     s += af.reply("answer")
    ...     answer = await s["answer"]
    >>> answer.text, answer.tool_calls
    ('Plants turn light into sugar.', ())
    """

    text: str
    tool_calls: tuple[CalledTool, ...] = ()

    def message(self) -> Message:
        """The assistant's turn, for the conversation that goes on from it.

        >>> af.Reply("It is cold.").message().role
        'assistant'
        """
        return Message("assistant", self.text, generated=True, tool_calls=self.tool_calls)


class ReplyWriter:
    """Pieces as the variable's text, as they come.

    >>> writer = ReplyWriter()
    >>> writer.push([TextPiece("I look."), CallBegun("c1", "weather"), Arguments("{")]) + writer.finish()
    '[{"text":"I look."},{"id":"c1","name":"weather","arguments":"{"}]'
    """

    def __init__(self) -> None:
        self._before = "["
        self._is_text = False  # whether prose stands open

    def push(self, pieces: Iterable[Piece]) -> str:
        """The text goes on by this."""
        return "".join([self._write(piece) for piece in pieces])

    def finish(self) -> str:
        """The end of the text."""
        return "[]" if self._before == "[" else '"}]'

    def _write(self, piece: Piece) -> str:
        match piece:
            case CallBegun():
                self._is_text = False
                return self._part(f'{{"id":{_quoted(piece.id)},"name":{_quoted(piece.name)},"arguments":"')
            case TextPiece() if not self._is_text:
                self._is_text = True
                return self._part('{"text":"') + _quoted(piece.text)[1:-1]
            case _:
                return _quoted(piece.text)[1:-1]

    def _part(self, begin: str) -> str:
        before, self._before = self._before, '"},'
        return before + begin


class ReplyReader:
    """The pieces of a variable's text, as it comes.

    >>> reader = ReplyReader()
    >>> reader.push('[{"text":"I lo') + reader.push('ok."},{"id":"c1","name":"weather","argum')
    [TextPiece(text='I lo'), TextPiece(text='ok.')]
    """

    def __init__(self) -> None:
        self._held = ""
        self._piece: type[TextPiece | Arguments] | None = None  # whose text is read
        self._has_begun = False
        self.is_over = False

    def push(self, text: str) -> list[Piece]:
        """The text goes on; what that says. ``ProtocolError`` where it is no reply."""
        self._held += text
        pieces: list[Piece] = []
        while self._read(pieces):
            continue
        return pieces

    def _read(self, pieces: list[Piece]) -> bool:
        """Whether there may be more to read in what is held."""
        return self._read_head(pieces) if self._piece is None else self._read_text(self._piece, pieces)

    def _read_head(self, pieces: list[Piece]) -> bool:
        """Up to the text of the next part, or to the end."""
        if self._held == ("]" if self._has_begun else "[]"):
            self._held, self.is_over = "", True
            return False
        end = self._held.find(_ARGUMENTS)
        text = self._held.find(_TEXT)
        if text in (0, 1):
            self._held = self._held[text + len(_TEXT) :]
            self._piece, self._has_begun = TextPiece, True
        elif end > 0:
            pieces.append(_call(self._held[1:end] + "}"))
            self._held = self._held[end + len(_ARGUMENTS) :]
            self._piece, self._has_begun = Arguments, True
        else:
            return False
        return True

    def _read_text(self, piece: type[TextPiece | Arguments], pieces: list[Piece]) -> bool:
        """Up to the quote that ends it; an escape that is not whole is held back."""
        end = _WHOLE_CHARS.match(self._held).end()  # type: ignore[union-attr]  # it matches nothing, too
        is_over = self._held.startswith('"}', end)
        if end:
            pieces.append(piece(_unquoted(self._held[:end])))
        self._held = self._held[end + 2 if is_over else end :]
        if is_over:
            self._piece = None
        return is_over


_WHOLE_CHARS = re.compile(r'(?:[^"\\]|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))*')
_TEXT = '{"text":"'
_ARGUMENTS = ',"arguments":"'


def _call(head: str) -> CallBegun:
    try:
        return msgspec.json.decode(head, type=CallBegun)
    except msgspec.DecodeError as error:
        raise ProtocolError(f"what should be a reply is none: {error}") from None


class ReplySoFar:
    """What there is of a reply while its notation grows.

    >>> ReplySoFar().follow('[{"text":"I look."},{"id":"c1","name":"weather","arguments":"{').now()
    Reply(text='I look.', tool_calls=(CalledTool(id='c1', name='weather', arguments='{'),))
    """

    def __init__(self) -> None:
        self._reader = ReplyReader()
        self._num_read = 0
        self._calls: list[tuple[CallBegun, list[str]]] = []
        self.text = ""

    @property
    def is_over(self) -> bool:
        """Whether it is complete."""
        return self._reader.is_over

    def follow(self, notation: str) -> Self:
        """``notation`` is what there is of it now. ``ProtocolError`` where it is no reply."""
        added, self._num_read = notation[self._num_read :], len(notation)
        for piece in self._reader.push(added) if added else ():
            match piece:
                case TextPiece():
                    self.text += piece.text
                case CallBegun():
                    self._calls.append((piece, []))
                case Arguments():
                    self._calls[-1][1].append(piece.text)
        return self

    def now(self) -> Reply:
        """The reply as far as it is there."""
        calls = [CalledTool(call.id, call.name, "".join(parts)) for call, parts in self._calls]
        return Reply(self.text, tuple(calls))


def read_reply(notation: str) -> Reply:
    """The whole one. ``ProtocolError`` where the notation is none."""
    found = ReplySoFar().follow(notation)
    if not found.is_over:
        raise ProtocolError(f"what should be a reply is none, or not whole: {notation[:100]!r}")
    return found.now()


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _unquoted(escaped: str) -> str:
    try:
        return str(json.loads(f'"{escaped}"'))
    except ValueError as error:
        raise ProtocolError(f"what should be a reply is none: {error}") from None


def hoisted(name: str, schema: dict[str, Any], definitions: dict[str, Any]) -> dict[str, Any]:
    """``schema`` as a part of a larger one: what it defines goes into the definitions of the whole, under
    the tool's name, and what it refers to is found there."""

    def moved(part: Any) -> Any:
        if isinstance(part, Mapping):
            return {
                key: new_place(value) if key == "$ref" and isinstance(value, str) else moved(value)
                for key, value in part.items()
            }
        return [moved(item) for item in part] if isinstance(part, list | tuple) else part

    def new_place(reference: str) -> str:
        for keyword in ("$defs", "definitions"):
            if reference.startswith(f"#/{keyword}/"):
                return f"#/$defs/{name}." + reference.removeprefix(f"#/{keyword}/")
        if reference.startswith("#"):
            raise BadArgument(f"tool {name!r}: its schema may only refer to its $defs, not to {reference!r}")
        return reference

    for keyword in ("$defs", "definitions"):
        for key, value in schema.get(keyword, {}).items():
            definitions[f"{name}.{key}"] = moved(value)
    return {key: moved(value) for key, value in schema.items() if key not in ("$defs", "definitions")}
