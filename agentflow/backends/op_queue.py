"""The ops that a client has submitted and its server has not acknowledged."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import cast

import msgspec

from agentflow.errors import BadArgument, FrameTooLarge, ProtocolError
from agentflow.protocol import ops
from agentflow.protocol.op_table import op_kind
from agentflow.protocol.wire import Ops, encode

# The size of an ``Ops`` frame without its ops, in either encoding: field names and two numbers.
FRAME_OVERHEAD_BYTES = 64
# The size of an ``Upload`` without its data: the names of its fields, a digest and two numbers.
UPLOAD_OVERHEAD_BYTES = 256
# The size of a ``Provide`` without its text: the names of its fields and a number.
PROVIDE_OVERHEAD_BYTES = 128
# A server decodes a frame in one step and limits the number of values in it, so a long queue of small ops is
# sent in several frames.
USUAL_FRAME_BYTES = 128 * 1024


class OpQueue:
    """Encoded ops, waiting or sent, oldest first, until the server acknowledges them."""

    def __init__(self, *, binary: bool, frame_bytes: int) -> None:
        self.frame_bytes = frame_bytes
        self._binary = binary
        self._encoder = msgspec.msgpack.Encoder() if binary else msgspec.json.Encoder()
        self._waiting: deque[bytes] = deque()
        self._sent: deque[bytes] = deque()
        self._num_acked = 0
        self.num_waiting_bytes = 0

    def __len__(self) -> int:
        return len(self._waiting) + len(self._sent)

    def fitting(self, op: ops.Op) -> Sequence[ops.Op]:
        """The op, or the parts of an upload or a provided text that would not fit into a frame."""
        room = self.frame_bytes - FRAME_OVERHEAD_BYTES
        if isinstance(op, ops.Upload):
            return self._cut_upload(op, room - UPLOAD_OVERHEAD_BYTES)
        if isinstance(op, ops.Provide) and op.error is None:
            return self._cut_text(op, room - PROVIDE_OVERHEAD_BYTES)
        return (op,)

    def _cut_upload(self, op: ops.Upload, room: int) -> Sequence[ops.Op]:
        most = room if self._binary else room // 4 * 3  # base64
        if len(op.data) <= most or most <= 0:
            return (op,)
        return [
            msgspec.structs.replace(op, at=op.at + first, data=op.data[first : first + most])
            for first in range(0, len(op.data), most)
        ]

    def _cut_text(self, op: ops.Provide, room: int) -> Sequence[ops.Op]:
        most = room // (4 if self._binary else 6)  # bytes of a character: UTF-8, or an escape of JSON
        if len(op.text) <= most or most <= 0:
            return (op,)
        *texts, last = [op.text[first : first + most] for first in range(0, len(op.text), most)]
        parts = [ops.Provide(op.var, text, more=True) for text in texts]
        return [*parts, ops.Provide(op.var, last, more=op.more)]

    def encoded(self, op: ops.Op) -> bytes:
        """The encoded op. ``FrameTooLarge`` if it does not fit into a frame, ``BadArgument`` if its text is
        not Unicode."""
        name = op_kind(op)
        try:
            data = self._encoder.encode(op)
        except (UnicodeEncodeError, OverflowError) as error:
            raise BadArgument(f"{name}: a text holds half a surrogate pair: {error}") from None
        if len(data) > self.frame_bytes - FRAME_OVERHEAD_BYTES:
            raise FrameTooLarge(
                f"{name}: the op takes {len(data):,} bytes, and the server accepts frames of at most "
                f"{self.frame_bytes:,} bytes: append the text in smaller parts"
            )
        return data

    def add(self, data: bytes) -> int:
        """Adds an encoded op, and returns its number."""
        self._waiting.append(data)
        self.num_waiting_bytes += len(data)
        return self._num_acked + len(self)

    def next_frame(self) -> bytes | None:
        """An ``Ops`` frame with as many waiting ops as fit, which count as sent from now on."""
        if not self._waiting:
            return None
        first = self._num_acked + len(self._sent) + 1
        room = min(self.frame_bytes - FRAME_OVERHEAD_BYTES, USUAL_FRAME_BYTES)
        taken: list[msgspec.Raw] = []
        while self._waiting and (room >= len(self._waiting[0]) or not taken):
            data = self._waiting.popleft()
            room -= len(data) + 1  # JSON puts a comma between
            self.num_waiting_bytes -= len(data)
            taken.append(msgspec.Raw(data))
            self._sent.append(data)
        return encode(Ops(first, cast("tuple[ops.Op, ...]", tuple(taken))), binary=self._binary)

    def acknowledge(self, ack: int) -> None:
        """The server has accepted the ops up to number ``ack``."""
        last = self._num_acked + len(self._sent)
        if ack > last:
            raise ProtocolError(f"the server acknowledged op {ack}, but only {last} were sent")
        while self._num_acked < ack:
            self._sent.popleft()
            self._num_acked += 1

    def resume(self, ack: int) -> None:
        """Continues on a new connection: the ops after ``ack`` wait again."""
        self.acknowledge(ack)
        self._waiting.extendleft(reversed(self._sent))
        self.num_waiting_bytes += sum(map(len, self._sent))
        self._sent.clear()

    def is_acknowledged(self, number: int) -> bool:
        """Whether the server has accepted the op with this number."""
        return number <= self._num_acked
