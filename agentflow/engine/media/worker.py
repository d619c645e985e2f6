"""The reading process: decodes images and videos, and prepares them for one model.

``python -m agentflow.engine.media.worker SOCKET LIFELINE FILE``: the file descriptors of a socket and a pipe
that the server keeps open (``ChildProcess``), and of a file for bytes and arrays. It reads one medium after
another, within limits (``LimitedWork``).
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import logging
import os
import socket
import sys
import time
from dataclasses import replace
from typing import Any, BinaryIO

import msgspec
import numpy as np
from numpy.typing import NDArray

from agentflow.engine.machine.child_limits import (
    LimitedWork,
    OverCpuTime,
    ServerGone,
    be_killed_first,
    inherited_files,
)
from agentflow.engine.machine.child_process import NICENESS, received_frames, to_frame
from agentflow.engine.media.decoding import decode_image, decode_video
from agentflow.engine.media.messages import (
    MAX_SAMPLED_FRAMES,
    ArrayInFile,
    MediumRead,
    PieceInFile,
    ReadMedium,
    Ready,
    medium_decoder,
    start_decoder,
)
from agentflow.engine.media.processors.pixels import FrameSampling, Prepared
from agentflow.engine.media.processors.registry import PROCESSORS
from agentflow.engine.media.settings import MediaSettings
from agentflow.errors import AgentflowError, BadArgument, incident
from agentflow.protocol.events import ErrorInfo

logger = logging.getLogger(__name__)


class MediaWorker:
    """Reads media at the process's end of the socket.

    Args:
        connection: The socket.
        lifeline: The pipe that closes when the server ends.
        file: The descriptor of the file for bytes and arrays.
    """

    def __init__(self, connection: socket.socket, lifeline: BinaryIO, file: int) -> None:
        self._connection = connection
        self._lifeline = lifeline
        self._file = file

    def run(self) -> int:
        """Reads media until the socket ends. Returns the exit code."""
        frames = received_frames(self._connection)
        first = next(frames, None)
        if first is None:
            return 0
        start = start_decoder.decode(first)
        self._limits = start.limits
        self._settings = settings_digest(start.settings)
        with contextlib.suppress(OSError):  # the server has ended
            try:
                self._processor = PROCESSORS[start.settings.family](start.settings)
                _load_decoders()
            except ImportError as error:
                problem = f"the package {error.name!r} is not installed: pip install 'agentflow-lm[vision]'"
                self._send(Ready(problem))
                return 1
            self._work = LimitedWork(
                self._lifeline,
                self._limits.image_cpu_s,
                self._limits.memory_bytes,
                self._limits.prepared_bytes,  # for the file of the results, which is in memory
            )
            self._send(Ready())
            for frame in frames:
                end = self._read_within_limits(medium_decoder.decode(frame))
                self._send(end)
                if end.is_last:
                    break
        return 0

    def _read_within_limits(self, medium: ReadMedium) -> MediumRead:
        kind, problem = medium.kind, ""
        cpu_s = self._limits.video_cpu_s if kind == "video" else self._limits.image_cpu_s
        is_out_of_memory = False
        began_s = time.process_time()
        try:
            read = self._work.run(lambda: self._read(medium), cpu_s)
        except OverCpuTime:
            problem = f"it takes more than {cpu_s:g} s of processor time to decode"
        except MemoryError:
            is_out_of_memory = True  # handled below: the memory is in use until this block ends
        except ServerGone:
            raise
        except AgentflowError as error:
            read = MediumRead(failure=ErrorInfo(error.code, str(error), param=error.param))
        except Exception as error:
            logged = incident(logger, f"{kind}: reading it", error)
            read = MediumRead(failure=ErrorInfo(logged.code, str(logged)))
        if is_out_of_memory:
            problem = f"it needs more than {self._limits.memory_bytes / 1e6:.3g} MB of memory to decode"
        if problem:
            message = f"{kind}: {problem}: make it smaller"
            read = MediumRead(failure=ErrorInfo(BadArgument.code, message, param=kind))
        return msgspec.structs.replace(
            read,
            is_last=is_out_of_memory or self._work.has_grown,
            cpu_s=time.process_time() - began_s,
        )

    def _read(self, medium: ReadMedium) -> MediumRead:
        data = _read_bytes(self._file, medium.num_bytes)
        if medium.kind == "image":
            prepared = self._processor.prepare_image(decode_image(data))
        else:
            prepared = self._processor.prepare_video(decode_video(data, self._sampling(medium.num_frames)))
        num_bytes = sum([array.nbytes for array in prepared.arrays.values()])
        if num_bytes > self._limits.prepared_bytes:
            raise BadArgument(
                f"{medium.kind}: it has {num_bytes:,} bytes of pixels as the model reads it, more than "
                f"{self._limits.prepared_bytes:,}: make it smaller",
                param=medium.kind,
            )
        return self._written(prepared)

    def _written(self, prepared: Prepared) -> MediumRead:
        os.ftruncate(self._file, 0)
        end = 0

        def write(array: NDArray[Any]) -> ArrayInFile:
            nonlocal end
            stored = ArrayInFile(array.dtype.str, array.shape, end)
            rest = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
            while rest:
                written = os.pwrite(self._file, rest, end)
                rest, end = rest[written:], end + written
            return stored

        return MediumRead(
            hash_medium(prepared, self._settings),
            {name: write(array) for name, array in prepared.arrays.items()},
            tuple(
                [
                    piece
                    if isinstance(piece, str)
                    else PieceInFile(
                        write(np.asarray(piece.positions, dtype=np.int64)), piece.first, piece.sees_all
                    )
                    for piece in prepared.pieces
                ]
            ),
        )

    def _sampling(self, num_frames: int) -> FrameSampling:
        if num_frames:
            return FrameSampling(num_frames, num_frames)
        chosen = self._processor.sampling
        return replace(
            chosen,
            least=min(chosen.least, MAX_SAMPLED_FRAMES),
            most=min(chosen.most, MAX_SAMPLED_FRAMES),
        )

    def _send(self, content: object) -> None:
        self._connection.sendall(to_frame(content))


def hash_medium(prepared: Prepared, settings: bytes) -> str:
    """Returns the identity of a ``PreparedMedium``. Each part is preceded by its length. The pieces are
    included: videos with equal frames but different times have different markup or positions."""
    digest = hashlib.sha256(settings)

    def add(head: list[Any], array: NDArray[Any] | None = None) -> None:
        encoded = msgspec.json.encode(head)
        digest.update(len(encoded).to_bytes(8, "big") + encoded)
        if array is not None:
            digest.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)

    for name in sorted(prepared.arrays):
        array = prepared.arrays[name]
        add([name, array.dtype.str, list(array.shape)], array)
    for piece in prepared.pieces:
        if isinstance(piece, str):
            add([piece])
        else:
            positions = np.asarray(piece.positions, dtype=np.int64)
            add([list(positions.shape), piece.first, piece.sees_all], positions)
    return digest.hexdigest()


def settings_digest(settings: MediaSettings) -> bytes:
    """Returns a digest of the settings."""
    return hashlib.sha256(msgspec.json.encode(settings, order="deterministic")).digest()


def _load_decoders() -> None:
    """Imports the decoders, which could not be loaded within the limits of a job."""
    for name in ("ImageOps", *[f"{kind}ImagePlugin" for kind in ("Png", "Jpeg", "Mpo", "Gif", "WebP")]):
        importlib.import_module(f"PIL.{name}")
    with contextlib.suppress(ImportError):  # only videos need it
        import av

        av.logging.set_level(av.logging.PANIC)


def _read_bytes(file: int, num_bytes: int) -> bytes:
    parts: list[bytes] = []
    done = 0
    while done < num_bytes and (part := os.pread(file, num_bytes - done, done)):
        parts.append(part)
        done += len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def main() -> int:
    """Runs a worker with the file descriptors in the arguments."""
    connection_file, lifeline_file, file = inherited_files()
    os.nice(NICENESS)  # like the server: at a lower priority, requests would wait behind the engine
    be_killed_first()
    with (
        socket.socket(fileno=connection_file) as connection,
        open(lifeline_file, "rb", buffering=0) as lifeline,
    ):
        return MediaWorker(connection, lifeline, file).run()


if __name__ == "__main__":
    sys.exit(main())
