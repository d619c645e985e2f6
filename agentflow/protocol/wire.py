"""The wire: frames between a client and a server, and how they are written.

One websocket carries one session. The first frame says which encoding both sides use from then on:
JSON in text frames, or msgpack in binary ones. ``docs/reference/protocol.md`` documents every field.

The client's ops are numbered from 1 in the order they were submitted; an ``Ops`` frame carries a
run of them. The server says how far it has taken them (``ack``), so that after a broken connection
the client sends the rest again and nothing runs twice. Events carry their own position.

A frame is read first, and then each op in it by itself: an op that cannot be read costs its state, a frame
that cannot be read the session.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Generic, TypeVar

import msgspec

from agentflow.errors import BadArgument, ProtocolError
from agentflow.protocol.events import Capabilities, ErrorInfo, Event
from agentflow.protocol.ops import Op, Rejected

VERSION = 1
MAX_FRAME_BYTES = 8 * 1024 * 1024
DEFAULT_PORT = 8410
SESSION_PATH = "/v1/session"
# A websocket close code of our own (RFC 6455, section 7.4.2): the session has another connection now.
TAKEN_OVER = 4001


class _Frame(msgspec.Struct, frozen=True, tag_field="frame", tag=str.lower, omit_defaults=True):
    """Common configuration: one object with a ``frame`` field, defaults left out."""


class Resume(msgspec.Struct, frozen=True, omit_defaults=True):
    """What the client of a broken connection still has: ``variables`` maps each unfinished variable
    to the characters received, ``states`` each open state to the last ticket reached."""

    session: str
    secret: str
    variables: dict[int, int] = {}
    states: dict[int, int] = {}


class Hello(_Frame, frozen=True):
    """Client, first frame. ``model``: its name, where the server has several; the server's first one
    otherwise. An API key goes into the Authorization header."""

    version: int
    resume: Resume | None = None
    model: str | None = None


class Ops(_Frame, frozen=True):
    """Client: ops, the first of which has number ``first``."""

    first: int
    ops: tuple[Op, ...]


class UnreadOps(_Frame, frozen=True, tag="ops"):
    """The same as the server gets it: ``op_reader`` reads one op after the other."""

    first: int
    ops: tuple[msgspec.Raw, ...]


class Bye(_Frame, frozen=True):
    """Client, last frame: the session ends now, with no grace period."""


class Limits(msgspec.Struct, frozen=True):
    """What the server takes. ``resume_grace_s``: how long a session outlives its connection."""

    frame_bytes: int
    resume_grace_s: float


class Welcome(_Frame, frozen=True):
    """Server, answers ``Hello``. ``ack``: the last op taken (0 in a new session)."""

    version: int
    session: str
    secret: str
    capabilities: Capabilities
    limits: Limits
    ack: int = 0


class Events(_Frame, frozen=True):
    """Server: events, and the number of the last op taken."""

    ack: int
    events: tuple[Event, ...] = ()


class Refused(_Frame, frozen=True):
    """Server, last frame: why it closes the connection."""

    error: ErrorInfo


ClientFrame = Hello | Ops | Bye
ReceivedFrame = Hello | UnreadOps | Bye
ServerFrame = Welcome | Events | Refused
ReceivedT = TypeVar("ReceivedT")

_json_encoder = msgspec.json.Encoder()
_msgpack_encoder = msgspec.msgpack.Encoder()


def frame_name(frame: ClientFrame | ReceivedFrame | ServerFrame) -> str:
    """What the frame's ``frame`` field says."""
    return str(type(frame).__struct_config__.tag)


def encode(frame: ClientFrame | ServerFrame, *, binary: bool) -> bytes:
    """The frame as msgpack (``binary``) or JSON in UTF-8."""
    return _msgpack_encoder.encode(frame) if binary else _json_encoder.encode(frame)


class _Head(msgspec.Struct):
    """Whose an op is, as far as that can be read of any."""

    op: str
    state: int = 0
    var: int | None = None


class _Declared(msgspec.Struct):
    name: str = ""
    children: tuple[int, ...] = ()


UNREADABLE = (msgspec.DecodeError, UnicodeError, RecursionError)


def op_reader(*, binary: bool) -> Callable[[msgspec.Raw], Op | Rejected]:
    """Reads the ops of a frame; ``Rejected`` with ``BadArgument`` stands for one that cannot be read.
    ``ProtocolError`` where it does not even say which state it is for."""
    new_decoder = msgspec.msgpack.Decoder if binary else msgspec.json.Decoder
    read_op: Callable[[msgspec.Raw], Op] = new_decoder(Op).decode
    read_head: Callable[[msgspec.Raw], _Head] = new_decoder(_Head).decode
    read_declared: Callable[[msgspec.Raw], _Declared] = new_decoder(_Declared).decode

    def read(data: msgspec.Raw) -> Op | Rejected:
        try:
            return read_op(data)
        except UNREADABLE as error:
            wrong = str(error)
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
    """Reads frames of one direction; anything else raises ``ProtocolError`` that names the field."""

    def __init__(self, frames: type[ReceivedT]) -> None:
        self._json = msgspec.json.Decoder(frames)
        self._msgpack = msgspec.msgpack.Decoder(frames)

    def decode(self, data: bytes | str) -> ReceivedT:
        """A frame from a binary (bytes: msgpack) or text (str: JSON) message."""
        try:
            return self._json.decode(data) if isinstance(data, str) else self._msgpack.decode(data)
        except UNREADABLE as error:
            raise ProtocolError(f"a frame cannot be read: {error}") from None


def client_frames() -> FrameDecoder[ReceivedFrame]:
    """Reads what a client sends."""
    return FrameDecoder(ReceivedFrame)  # type: ignore[arg-type]


def server_frames() -> FrameDecoder[ServerFrame]:
    """Reads what a server sends."""
    return FrameDecoder(ServerFrame)  # type: ignore[arg-type]
