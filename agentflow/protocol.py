"""The wire: frames between a client and a server, and how they are written.

One websocket carries one session. The first frame says which encoding both sides use from then on:
JSON in text frames, or msgpack in binary ones. ``docs/protocol.md`` documents every field.

The client's ops are numbered from 1 in the order they were submitted; an ``Ops`` frame carries a
run of them. The server says how far it has taken them (``ack``), so that after a broken connection
the client sends the rest again and nothing runs twice. Events carry their own position.
"""

from __future__ import annotations

from typing import Generic, TypeVar

import msgspec

from agentflow.errors import ProtocolError
from agentflow.events import ErrorInfo, Event
from agentflow.generator import Capabilities
from agentflow.ops import Op

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
ServerFrame = Welcome | Events | Refused
ReceivedT = TypeVar("ReceivedT")

_json_encoder = msgspec.json.Encoder()
_msgpack_encoder = msgspec.msgpack.Encoder()


def frame_name(frame: ClientFrame | ServerFrame) -> str:
    """What the frame's ``frame`` field says."""
    return type(frame).__name__.lower()


def encode(frame: ClientFrame | ServerFrame, *, binary: bool) -> bytes:
    """The frame as msgpack (``binary``) or JSON in UTF-8."""
    return _msgpack_encoder.encode(frame) if binary else _json_encoder.encode(frame)


class FrameDecoder(Generic[ReceivedT]):
    """Reads frames of one direction; anything else raises ``ProtocolError`` that names the field."""

    def __init__(self, frames: type[ReceivedT]) -> None:
        self._json = msgspec.json.Decoder(frames)
        self._msgpack = msgspec.msgpack.Decoder(frames)

    def decode(self, data: bytes | str) -> ReceivedT:
        """A frame from a binary (bytes: msgpack) or text (str: JSON) message."""
        try:
            return self._json.decode(data) if isinstance(data, str) else self._msgpack.decode(data)
        except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
            raise ProtocolError(f"a frame cannot be read: {error}") from None


def client_frames() -> FrameDecoder[ClientFrame]:
    """Reads what a client sends."""
    return FrameDecoder(ClientFrame)  # type: ignore[arg-type]


def server_frames() -> FrameDecoder[ServerFrame]:
    """Reads what a server sends."""
    return FrameDecoder(ServerFrame)  # type: ignore[arg-type]
