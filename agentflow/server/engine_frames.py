"""What goes over the socket between a server and its engine process, and how messages lie on it.

First ``Start`` and the answer to it, then the messages of ``engine_messages``: one a frame to the
engine, one list a frame from it. A frame is its length in four bytes, big-endian, and msgpack.
"""

from __future__ import annotations

import struct
from typing import Any, Protocol

import msgspec

from agentflow.server.core.scheduler import SchedulerConfig
from agentflow.server.engine_messages import FromEngine, ToEngine
from agentflow.server.runner import ModelRunner, RunnerInfo
from agentflow.server.tokenizer import Tokenizer

_LENGTH = struct.Struct("!I")
READ_BYTES = 256 * 1024


class LoadEngine(Protocol):
    """What ``Start.loader`` names: makes all that an engine needs, in the engine's process."""

    def __call__(self, **options: Any) -> tuple[ModelRunner, Tokenizer, SchedulerConfig]: ...


class Start(msgspec.Struct, frozen=True):
    """What an engine process is to run: ``loader`` is the name of a ``LoadEngine``, as in
    ``package.module:function``, and ``options`` its arguments (plain values only)."""

    loader: str
    options: dict[str, Any]


class Loaded(msgspec.Struct, frozen=True, tag=True):
    """The engine is ready for messages."""

    info: RunnerInfo


class LoadFailed(msgspec.Struct, frozen=True, tag=True):
    """It will never be, and ends: an error of the tree in ``errors.py``, or the name of a package that
    is not installed."""

    code: str
    message: str
    missing_package: str | None = None


start_decoder = msgspec.msgpack.Decoder(Start)
answer_decoder: msgspec.msgpack.Decoder[Loaded | LoadFailed] = msgspec.msgpack.Decoder(Loaded | LoadFailed)
to_engine_decoder: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)
from_engine_decoder: msgspec.msgpack.Decoder[list[FromEngine]] = msgspec.msgpack.Decoder(list[FromEngine])
_encoder = msgspec.msgpack.Encoder()


def to_frame(content: object) -> bytes:
    """A message, or a list of them, as one frame. OverflowError for a number beyond 64 bits."""
    frame = bytearray(_LENGTH.size)
    _encoder.encode_into(content, frame, _LENGTH.size)
    _LENGTH.pack_into(frame, 0, len(frame) - _LENGTH.size)
    return bytes(frame)


class FrameBuffer:
    """Puts frames together again from the pieces that a socket gives."""

    def __init__(self) -> None:
        self._received = bytearray()

    def push(self, piece: bytes) -> list[bytes]:
        """The contents of the frames that are complete with ``piece``."""
        self._received += piece
        frames: list[bytes] = []
        start = 0
        while len(self._received) - start >= _LENGTH.size:
            begin = start + _LENGTH.size
            end = begin + _LENGTH.unpack_from(self._received, start)[0]
            if end > len(self._received):
                break
            frames.append(bytes(self._received[begin:end]))
            start = end
        del self._received[:start]
        return frames
