"""The ops on their way to a server: numbered, encoded once, and kept until the server has taken them."""

from __future__ import annotations

from collections import deque
from typing import cast

import msgspec

from agentflow.errors import BadArgument, FrameTooLarge, ProtocolError
from agentflow.protocol.ops import Op
from agentflow.protocol.wire import Ops, encode

# What an Ops frame needs besides its ops, in either encoding: field names and two numbers.
FRAME_OVERHEAD_BYTES = 64
# A server reads a frame in one go, and refuses one of very many values: many small ops go in several frames.
USUAL_FRAME_BYTES = 128 * 1024


class OpQueue:
    """Ops that wait, then ops that were sent, oldest first, until ``acknowledge`` drops them."""

    def __init__(self, *, binary: bool, frame_bytes: int) -> None:
        self.frame_bytes = frame_bytes
        self._binary = binary
        self._encoder = msgspec.msgpack.Encoder() if binary else msgspec.json.Encoder()
        self._waiting: deque[bytes] = deque()
        self._sent: deque[bytes] = deque()
        self._num_acked = 0

    def __len__(self) -> int:
        return len(self._waiting) + len(self._sent)

    def encoded(self, op: Op) -> bytes:
        """The op's bytes. ``FrameTooLarge`` where it can't be sent alone, ``BadArgument`` where its
        text is not Unicode."""
        name = type(op).__name__.lower()
        try:
            data = self._encoder.encode(op)
        except (UnicodeEncodeError, OverflowError) as error:
            raise BadArgument(
                f"{name}: the op cannot be sent, for it holds half a character: {error}"
            ) from None
        if len(data) > self.frame_bytes - FRAME_OVERHEAD_BYTES:
            raise FrameTooLarge(
                f"{name}: the op takes {len(data):,} bytes, and the server takes frames of at most "
                f"{self.frame_bytes:,} bytes: append the text in smaller parts"
            )
        return data

    def add(self, data: bytes) -> int:
        """Takes an encoded op; its number."""
        self._waiting.append(data)
        return self._num_acked + len(self)

    def next_frame(self) -> bytes | None:
        """An ``Ops`` frame with waiting ops, as many as fit; they count as sent."""
        if not self._waiting:
            return None
        first = self._num_acked + len(self._sent) + 1
        room = min(self.frame_bytes - FRAME_OVERHEAD_BYTES, USUAL_FRAME_BYTES)
        taken: list[msgspec.Raw] = []
        while self._waiting and (room >= len(self._waiting[0]) or not taken):
            data = self._waiting.popleft()
            room -= len(data) + 1  # JSON puts a comma between
            taken.append(msgspec.Raw(data))
            self._sent.append(data)
        return encode(Ops(first, cast("tuple[Op, ...]", tuple(taken))), binary=self._binary)

    def acknowledge(self, ack: int) -> None:
        """The server has taken the ops up to number ``ack``."""
        if ack > self._num_acked + len(self._sent):
            last = self._num_acked + len(self._sent)
            raise ProtocolError(f"the server confirms op {ack}, but only {last} were sent")
        while self._num_acked < ack:
            self._sent.popleft()
            self._num_acked += 1

    def resume(self, ack: int) -> None:
        """A new connection, and the server has taken the ops up to ``ack``: the rest waits again."""
        self.acknowledge(ack)
        self._waiting.extendleft(reversed(self._sent))
        self._sent.clear()

    def is_acknowledged(self, number: int) -> bool:
        """Whether the server has taken the op with this number."""
        return number <= self._num_acked
