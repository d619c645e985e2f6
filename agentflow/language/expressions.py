"""The items that can be appended to a state: text, variables, ``gen``, ``select``, roles, images, videos,
conversations, and sums of these.

``Expression`` is the base. An expression is inert: a state turns it into ops when it is appended
(``recorder.append``). ``system``, ``user``, ``assistant`` and ``conversation`` check their arguments and make
expressions; ``gen``, ``reply`` and ``select`` are in ``gen``, ``image`` and ``video`` in ``media``, and
``tool_result`` is in ``agents.tool_content``.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias, TypeVar

import msgspec

from agentflow.errors import BadArgument, StateClosed, error_param, short_repr
from agentflow.language.markers import MARKERS, Sum
from agentflow.language.typed.replies import Message, read_message
from agentflow.language.typed.tools import Tool, ToolCall, describe_tool
from agentflow.protocol import chat
from agentflow.protocol.chat import FREE_CHOICE, Conversation, ToolChoice, ToolSpec
from agentflow.protocol.images import Image, Medium, Video, known_file
from agentflow.protocol.op_table import check_types
from agentflow.protocol.ops import Role
from agentflow.protocol.record import Record

ItemT = TypeVar("ItemT")


class Expression:
    """Base of variables and of the results of ``gen``, ``select`` and the roles. ``+`` concatenates."""

    __slots__ = ()

    is_text = False  # in the result of a program, as variables are

    def __add__(self, other: Appendable) -> Sequence_:
        return Sequence_((self, other))

    def __radd__(self, other: Appendable) -> Sequence_:
        return Sequence_((other, self))

    def __format__(self, spec: str) -> str:
        if spec:
            raise BadArgument(f"an expression cannot be formatted with {spec!r}: use a plain {{…}}")
        return MARKERS.mark_expression(self)

    def __repr__(self) -> str:
        return f"<{type(self).__name__}{MARKERS.repr_tag}>"

    def __str__(self) -> str:
        raise BadArgument("str() of an expression: append it to a state, or an f-string with it")


class Sequence_(Expression, Sum):
    """A concatenation. Nested concatenations are flattened, so that a long sum is not a deep one."""

    __slots__ = ("parts",)

    def __init__(self, parts: tuple[Appendable, ...]) -> None:
        flat: list[Appendable] = []
        for part in parts:
            if not isinstance(part, str | Expression):
                raise not_appendable(part)
            flat += part.parts if isinstance(part, Sequence_) else (part,)
        self.parts: tuple[Appendable, ...] = tuple(flat)

    def has_text(self) -> bool:
        return all(isinstance(part, str) or part.is_text for part in self.parts)


class Offer(NamedTuple):
    """The tools that a reply may call."""

    tools: tuple[ToolSpec, ...]
    choice: ToolChoice


class RoleExpression(Expression):
    """A turn of a conversation. ``call``: the call that a tool's turn answers."""

    __slots__ = ("call", "parts", "role")

    def __init__(self, role: Role, parts: tuple[Appendable, ...], call: ToolCall | None = None) -> None:
        self.role: Role = role
        self.parts = parts
        self.call = call


class MediumExpression(Expression):
    """An image or a video."""

    __slots__ = ()

    @property
    def medium(self) -> Medium:
        """The image or the video. For the session."""
        raise NotImplementedError

    @property
    def file(self) -> Image:
        """The file or the URL. For the session."""
        medium = self.medium
        return medium.file if isinstance(medium, Video) else medium

    def without_bytes(self) -> MediumExpression:
        """The image or video with a reference to its file. For the session."""
        if isinstance(medium := self.medium, Video):
            return VideoExpression(medium.file.reference(), medium.num_frames)
        return ImageExpression(medium.reference())

    def whole(self) -> Medium:
        """The image or video with the bytes of its file. ``StateClosed`` if they are gone. For the
        session."""
        medium, file = self.medium, self.file
        if not file.is_file or file.data:
            return medium
        found = known_file(file.source)
        if found is None:
            raise StateClosed(
                "an image of this state has ended with its run: ask for the messages before that",
                reason="ended",
            )
        return Video(found, medium.num_frames) if isinstance(medium, Video) else found


class ImageExpression(MediumExpression):
    """An image in a program, as ``af.image`` makes it: ``af.Image``.

    >>> def screenshot() -> af.Image:
    ...     return af.image("screen.png")
    """

    __slots__ = ("image",)

    def __init__(self, image: Image) -> None:
        self.image = image

    @property
    def medium(self) -> Image:
        """The image. For the session."""
        return self.image

    def __repr__(self) -> str:
        return f"<image{MARKERS.repr_tag} {self.image.source[:24]}>"


class VideoExpression(MediumExpression):
    """A video in a program, as ``af.video`` makes it: ``af.Video``.

    >>> def clip() -> af.Video:
    ...     return af.video("match.mp4", num_frames=8)
    """

    __slots__ = ("_file", "num_frames")

    def __init__(self, file: Image, num_frames: int | None = None) -> None:
        self._file = file
        self.num_frames = num_frames

    @property
    def medium(self) -> Video:
        """The video. For the session."""
        return Video(self._file, self.num_frames)

    def __repr__(self) -> str:
        return f"<video{MARKERS.repr_tag} {self._file.source[:24]}>"


def medium_expression(medium: Medium) -> MediumExpression:
    """The image or video as an item of a program."""
    if isinstance(medium, Video):
        return VideoExpression(medium.file, medium.num_frames)
    return ImageExpression(medium)


class ConversationExpression(Expression):
    """A conversation, followed by the beginning of the assistant's turn."""

    __slots__ = ("conversation",)

    def __init__(self, conversation: Conversation) -> None:
        self.conversation = conversation


Appendable: TypeAlias = str | Expression


def system(*parts: Appendable) -> RoleExpression:
    """A system turn.

    >>> s += af.system("You are a strict judge of essays.")
    """
    return RoleExpression("system", parts)


def user(*parts: Appendable) -> RoleExpression:
    """A user turn.

    >>> s += af.user("Is it about science?")
    """
    return RoleExpression("user", parts)


def assistant(*parts: Appendable) -> RoleExpression:
    """An assistant turn. Text generated in it follows the model's chat template.

    >>> s += af.assistant("The answer is ", af.gen("answer", max_tokens=8))
    """
    return RoleExpression("assistant", parts)


def not_appendable(item: object) -> BadArgument:
    """The error for an item that is not ``Appendable``."""
    if inspect.iscoroutine(item):
        advice = "await it first"
    elif hasattr(item, "save") or isinstance(item, os.PathLike | bytes):
        advice = "wrap an image, as in af.image(…)"
    elif isinstance(item, dict) or (isinstance(item, list) and any(isinstance(one, dict) for one in item)):
        advice = "messages are af.conversation([…]), other values an f-string or json.dumps(…)"
    else:
        advice = "append a string, a variable, gen, select, image, video, a role or a conversation"
    return BadArgument(f"cannot append {type(item).__name__} {short_repr(item)}: {advice}")


def make_tuple(values: Iterable[ItemT], where: str, param: str, wanted: str) -> tuple[ItemT, ...]:
    """The values as a tuple; ``BadArgument`` for ``param`` if they cannot be iterated. A set is sorted: its
    order is another one in each process, so a recording would not fit."""
    try:
        if isinstance(values, str | Record) or (isinstance(values, Mapping) and wanted != "strings"):
            raise TypeError  # one of them, not several
        return tuple(_sorted(values) if isinstance(values, set | frozenset) else values)
    except TypeError:
        raise BadArgument(
            f"{where}: {param} must be a list of {wanted}, not {short_repr(values)}", param=param
        ) from None


def _sorted(values: Collection[Any]) -> list[Any]:
    try:
        return sorted(values)
    except TypeError:  # functions have no order, but names
        return sorted(values, key=lambda value: getattr(value, "__name__", None) or str(value))


_MODES = ("auto", "required", "none")


def conversation(messages: Sequence[Message | Mapping[str, Any]]) -> ConversationExpression:
    """A conversation, after which the assistant's turn is open; if the last message is the assistant's, its
    turn continues. A conversation must be the first item of a state. ``gen``, ``reply`` or ``assistant``
    write into the open turn. A turn of another role ends it, unless it is empty: then ``BadArgument`` says
    that the conversation waits for its answer. Without messages, nothing is appended.

    ``messages``: ``af.Message``, or dicts in the format of OpenAI's API, including the ``tool_calls`` of an
    assistant and the results of tools. Earlier answers of the model reuse the tokens that it generated.

    >>> async with flow.state() as s:
    ...     s += af.conversation([{"role": "user", "content": "What do plants do?"}])
    ...     s += af.reply("answer", max_tokens=32)
    ...     print((await s["answer"]).text)
    Plants turn light into sugar.
    """
    return conversation_with(messages)


def conversation_with(
    messages: Sequence[Message | Mapping[str, Any]],
    tools: Sequence[Tool | ToolSpec] = (),
    choice: str | ToolChoice = FREE_CHOICE,
) -> ConversationExpression:
    """``conversation``, with the tools of its replies. For adapters, which count the tokens of a prompt
    without a reply, or append several replies to forks of one prompt.

    Args:
        messages: As in ``conversation``.
        tools: Functions with annotated parameters, or schemas.
        choice: As in ``reply``.
    """
    checked = tuple(
        [read_message(message) for message in make_tuple(messages, "conversation", "messages", "messages")]
    )
    offered = offer(tools, choice, parallel=True, where="conversation")
    return ConversationExpression(checked_conversation(checked, offered))


def checked_conversation(messages: tuple[chat.Message, ...], offered: Offer) -> Conversation:
    """The conversation of these messages. ``BadArgument`` for a wrong type or value."""
    whole = Conversation(messages, *offered)
    check_types(whole)
    return whole.check()


def offer(tools: Sequence[Tool | ToolSpec], choice: str | ToolChoice, *, parallel: bool, where: str) -> Offer:
    """The tools and the choice among them. ``BadArgument``, which begins with ``where``."""
    given = make_tuple(tools, where, "tools", "functions or schemas")
    with error_param("tools"):
        specs = tuple([tool if isinstance(tool, ToolSpec) else describe_tool(tool) for tool in given])
    MARKERS.reject([str(spec) for spec in specs], f"{where}: a tool", "tools")
    if not isinstance(choice, ToolChoice):
        choice = ToolChoice(choice) if choice in _MODES else ToolChoice("required", choice)  # type: ignore[arg-type]
        choice = msgspec.structs.replace(choice, parallel=parallel)
    return Offer(specs, choice)
