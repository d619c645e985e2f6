"""The images and videos of a recording: files in a folder next to the recording, named by their digests.

A thread writes them, because a file of 50 MB would block the event loop. ``read_image`` reads one.
"""

from __future__ import annotations

import logging
import os
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from os import PathLike
from pathlib import Path
from typing import Final, get_args

from agentflow.errors import BadArgument
from agentflow.protocol.images import FILE, Image, MediumKind, file_source, image_file
from agentflow.protocol.ops import Upload

logger = logging.getLogger(__name__)

MAX_WAITING_BYTES: Final = 64_000_000
"""The maximum number of bytes that wait for the disk. Beyond it, the session waits."""


def images_folder(path: str | PathLike[str]) -> Path:
    """The folder with the images of a recording, named by their digests."""
    return Path(f"{os.fspath(path)}.images")


def read_image(path: str | PathLike[str], source: str) -> Image | None:
    """The image, or the file of a video, in the folder of a recording; None if it is missing or damaged."""
    if not FILE.fullmatch(source):
        return None
    try:
        data = _file_path(images_folder(path), source).read_bytes()
    except OSError:
        return None
    if file_source(data) != source:
        return None
    for kind in get_args(MediumKind):
        with suppress(BadArgument):
            return image_file(data, kind)
    return None


class RecordedImages:
    """Writes the uploads of one session.

    Args:
        path: The recording.
        mode: The permissions of the recording and its images.
    """

    def __init__(self, path: str, mode: int) -> None:
        self._path = path
        self._folder = images_folder(path)
        self._mode = mode & 0o666
        self._thread: ThreadPoolExecutor | None = None
        self._waiting: deque[tuple[Future[None], int]] = deque()
        self._num_waiting = 0

    def add(self, op: Upload) -> None:
        """Queues a part of a file to be written."""
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "agentflow-recording")
        self._waiting.append((self._thread.submit(self._write, op), len(op.data)))
        self._num_waiting += len(op.data)
        while self._waiting and (self._waiting[0][0].done() or self._num_waiting > MAX_WAITING_BYTES):
            done, num_bytes = self._waiting.popleft()
            done.result()
            self._num_waiting -= num_bytes

    def close(self) -> None:
        """Waits until everything is written."""
        if self._thread is not None:
            self._thread.shutdown()

    def _write(self, op: Upload) -> None:
        file = _file_path(self._folder, op.source)
        try:
            with suppress(FileExistsError):
                self._folder.mkdir(0o700)
                self._folder.chmod(self._mode | (self._mode & 0o444) >> 2)  # may be entered if it may be read
            num_written = file.stat().st_size if file.exists() else 0
            if num_written == op.size or num_written < op.at:  # an earlier session wrote it, or a part failed
                return
            descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | (0 if op.at else os.O_TRUNC), 0o600)
            with open(descriptor, "wb") as written:
                os.fchmod(descriptor, self._mode)
                written.seek(op.at)
                written.write(op.data)
        except OSError as error:
            logger.error("the recording %s lacks an image: %s", self._path, error)


def _file_path(folder: Path, source: str) -> Path:
    return folder / source.replace(":", "-")
