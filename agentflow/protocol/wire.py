"""The frames between a client and a server, and their encodings.

One websocket carries one session. The client's first frame decides the encoding of both directions: JSON in
text messages, or MessagePack in binary ones. ``docs/reference/protocol.md`` documents every field.

Ops are numbered from 1 in the order of submission; an ``Ops`` frame contains consecutive ops. The server
acknowledges the ops that it has accepted, so that after a broken connection the client resends only the rest
and nothing runs twice. Each event contains its position.

The server decodes a frame first, and then each op in it separately: a malformed op fails its state, a
malformed frame ends the session.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from contextlib import suppress
from typing import Final, Generic, TypeVar

import msgspec

from agentflow.errors import BadArgument, ProtocolError
from agentflow.protocol.events import Capabilities, ErrorInfo, Event
from agentflow.protocol.ops import Op, Rejected
from agentflow.protocol.unreadable import HALF_PAIR, UNREADABLE, json_fault

VERSION = 2
MAX_FRAME_BYTES = 8 * 1024 * 1024
DEFAULT_PORT = 8410
# The default of sessions, servers and `agentflow pull`.
DEFAULT_MODEL = "smollm2-135m"
SESSION_PATH = "/v1/session"
# The query parameter with the id of the resumed session, by which a proxy finds its server.
SESSION_PARAM = "session"
# The same with the default model of a new session, by which a proxy finds a server that has it.
MODEL_PARAM = "model"
# Clients that offer subprotocols, such as pages with a ticket, must offer this one; the server selects it.
SUBPROTOCOL = "agentflow.v2"
API_KEY: Final = re.compile(r"[!-~]([ -~]*[!-~])?")
"""A key that can be in a header without escaping."""
# A private close code (RFC 6455, section 7.4.2): another connection has taken the session over.
TAKEN_OVER = 4001


class _Frame(msgspec.Struct, frozen=True, tag_field="frame", tag=str.lower, omit_defaults=True):
    """Common configuration: one object with a ``frame`` field, defaults left out."""


class Resume(msgspec.Struct, frozen=True, omit_defaults=True):
    """The client's position before its connection broke: ``variables`` maps each unfinished variable to the
    number of characters received, ``states`` each open state to the last ticket reached."""

    session: str
    secret: str
    variables: dict[int, int] = {}
    states: dict[int, int] = {}


class Hello(_Frame, frozen=True):
    """Client, first frame. ``model``: the default model of the session's states; None: the server's first
    model. An API key is in the Authorization header instead."""

    version: int
    resume: Resume | None = None
    model: str | None = None


class Ops(_Frame, frozen=True):
    """Client: ops, the first of which has number ``first``."""

    first: int
    ops: tuple[Op, ...]


class UnreadOps(_Frame, frozen=True, tag="ops"):
    """An ``Ops`` frame on the server's side: ``op_reader`` decodes the ops one by one."""

    first: int
    ops: tuple[msgspec.Raw, ...]


class Bye(_Frame, frozen=True):
    """Client, last frame: the session ends immediately, without a grace period."""


class Limits(msgspec.Struct, frozen=True):
    """``frame_bytes``: the maximum size of a frame. ``resume_grace_s``: how long a session outlives its
    connection, in seconds."""

    frame_bytes: int
    resume_grace_s: float


class Welcome(_Frame, frozen=True):
    """Server, the answer to ``Hello``. ``models``: the capabilities of each model by name. ``model``: the
    default of the session's states. ``ack``: the number of the last accepted op (0 in a new session)."""

    version: int
    session: str
    secret: str
    model: str
    models: dict[str, Capabilities]
    limits: Limits
    ack: int = 0


class Events(_Frame, frozen=True):
    """Server: events, and the number of the last accepted op."""

    ack: int
    events: tuple[Event, ...] = ()


class Refused(_Frame, frozen=True):
    """Server, last frame: the error for which it closes the connection."""

    error: ErrorInfo


ClientFrame = Hello | Ops | Bye
ReceivedFrame = Hello | UnreadOps | Bye
ServerFrame = Welcome | Events | Refused
ReceivedT = TypeVar("ReceivedT")

_json_encoder = msgspec.json.Encoder()
_msgpack_encoder = msgspec.msgpack.Encoder()


def frame_name(frame: ClientFrame | ReceivedFrame | ServerFrame) -> str:
    """The value of the frame's ``frame`` field."""
    return str(type(frame).__struct_config__.tag)


def encode(frame: ClientFrame | ServerFrame, *, binary: bool) -> bytes:
    """The frame as msgpack (``binary``) or JSON in UTF-8."""
    return _msgpack_encoder.encode(frame) if binary else _json_encoder.encode(frame)


class _Head(msgspec.Struct):
    """The fields of a malformed op that contain its states and variables, which fail."""

    op: str
    state: int = 0
    var: int | None = None


class _Declared(msgspec.Struct):
    name: str = ""
    children: tuple[int, ...] = ()


@functools.cache
def op_reader(*, binary: bool) -> Callable[[msgspec.Raw], Op | Rejected]:
    """A function that decodes one op of a frame. For a malformed op it returns a ``Rejected`` with
    ``BadArgument``; it raises ``ProtocolError`` if the op's state cannot be read either."""
    new_decoder = msgspec.msgpack.Decoder if binary else msgspec.json.Decoder
    read_op: Callable[[msgspec.Raw], Op] = new_decoder(Op).decode
    read_head: Callable[[msgspec.Raw], _Head] = new_decoder(_Head).decode
    read_declared: Callable[[msgspec.Raw], _Declared] = new_decoder(_Declared).decode

    def read(data: msgspec.Raw) -> Op | Rejected:
        try:
            return read_op(data)
        except UNREADABLE as error:
            wrong = str(error) if binary else json_fault(bytes(data), error)
        try:
            head = read_head(data)
        except UNREADABLE:
            raise ProtocolError(f"an op cannot be read: {wrong}") from None
        declared = _Declared()
        with suppress(*UNREADABLE):
            declared = read_declared(data)
        names = {} if head.var is None else {head.var: declared.name}
        children = declared.children if head.op == "fork" else ()
        return Rejected(head.state, BadArgument(f"{head.op}: {wrong}"), head.op, names, children)

    return read


class FrameDecoder(Generic[ReceivedT]):
    """Decodes the frames of one direction."""

    def __init__(self, frames: type[ReceivedT]) -> None:
        self._json = msgspec.json.Decoder(frames)
        self._msgpack = msgspec.msgpack.Decoder(frames)

    def decode(self, data: bytes | str) -> ReceivedT:
        """The frame in a binary message (``bytes``: MessagePack) or a text message (``str``: JSON).
        ``ProtocolError`` if it is invalid, with the field."""
        try:
            return self._json.decode(data) if isinstance(data, str) else self._msgpack.decode(data)
        except UNREADABLE as error:
            why = str(error)
            if isinstance(data, str):
                # The text itself may have the half, rather than its escape.
                why = HALF_PAIR if isinstance(error, UnicodeError) else json_fault(data.encode(), error)
            raise ProtocolError(f"a frame cannot be read: {why}") from None


@functools.cache
def client_frames() -> FrameDecoder[ReceivedFrame]:
    """The decoder of a client's frames."""
    return FrameDecoder(ReceivedFrame)  # type: ignore[arg-type]


@functools.cache
def server_frames() -> FrameDecoder[ServerFrame]:
    """The decoder of a server's frames."""
    return FrameDecoder(ServerFrame)  # type: ignore[arg-type]
