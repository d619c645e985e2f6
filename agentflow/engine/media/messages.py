"""The messages between a server and its reading process, and the limits of reading.

The server sends ``StartReading`` and receives ``Ready``; then it sends one ``ReadMedium`` at a time and
receives a ``MediumRead`` for each. Bytes and arrays are in an unnamed file that both have open.
"""

from __future__ import annotations

from typing import Final, Literal

import msgspec

from agentflow.engine.media.settings import MediaSettings
from agentflow.protocol.events import ErrorInfo
from agentflow.runtime.declared import Count, Declared, Seconds

MAX_SAMPLED_FRAMES: Final = 256
"""The most frames of a video that a model reads."""


class MediaLimits(Declared, frozen=True, kw_only=True):
    """The limits of reading images and videos."""

    image_cpu_s: Seconds = 10.0  # processor time for an image
    video_cpu_s: Seconds = 60.0  # processor time for a video
    memory_bytes: Count = 1_000_000_000  # memory to decode an image or a video
    prepared_bytes: Count = 500_000_000  # the model's input for an image or a video
    # wall-clock time per second of processor time, after which the request fails with ``Overloaded``
    wall_s: Seconds = 6.0
    num_processes: Count = 3  # that read at the same time
    cache_bytes: Count = 256_000_000  # the size of the cache of prepared media


class StartReading(msgspec.Struct, frozen=True):
    """The model whose media the process prepares."""

    settings: MediaSettings
    limits: MediaLimits


class Ready(msgspec.Struct, frozen=True):
    """The process waits for media, or exits if there is a ``problem``."""

    problem: str = ""


class ReadMedium(msgspec.Struct, frozen=True):
    """A medium, whose bytes are the first ``num_bytes`` of the file. ``num_frames``: the frames to sample
    from a video; 0: the model's default."""

    kind: Literal["image", "video"]
    num_bytes: int
    num_frames: int = 0


class ArrayInFile(msgspec.Struct, frozen=True, array_like=True):
    """An array in the file."""

    dtype: str
    shape: tuple[int, ...]
    at: int


class PieceInFile(msgspec.Struct, frozen=True, array_like=True):
    """A ``MediaPiece``."""

    positions: ArrayInFile
    first: int
    sees_all: bool


class MediumRead(msgspec.Struct, frozen=True):
    """The answer to a medium: a ``PreparedMedium`` whose arrays are in the file, or a failure."""

    identity: str = ""
    arrays: dict[str, ArrayInFile] = {}
    pieces: tuple[str | PieceInFile, ...] = ()
    failure: ErrorInfo | None = None
    cpu_s: float = 0.0  # the processor time of reading
    is_last: bool = False  # the process has grown too large and exits


start_decoder = msgspec.msgpack.Decoder(StartReading)
ready_decoder = msgspec.msgpack.Decoder(Ready)
medium_decoder = msgspec.msgpack.Decoder(ReadMedium)
read_decoder = msgspec.msgpack.Decoder(MediumRead)
