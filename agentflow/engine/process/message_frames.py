"""How messages lie on the socket between a server and the processes that it starts.

A frame is its length in four bytes, big-endian, and msgpack.
"""

from __future__ import annotations

import struct

import msgspec

_LENGTH = struct.Struct("!I")
READ_BYTES = 256 * 1024
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
