"""The images and videos of a session: uploaded once, and used by any number of ops.

The memory of an image counts until it is no longer used: after its ``Release``, and when the contexts that
contain it have been freed.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterator
from weakref import finalize

from agentflow.errors import AgentflowError, BadArgument
from agentflow.protocol import ops
from agentflow.protocol.events import ErrorInfo
from agentflow.protocol.images import DIGEST, Image, MediumKind, Video, detect_media_type, detect_video_type
from agentflow.protocol.op_table import check_received_op
from agentflow.runtime.limits import MemoryBudget, MemoryReservation

_MAX_ERRORS = 256
"""The maximum number of failed uploads whose errors are kept."""
_MAX_PARTIAL = 16
"""The maximum number of concurrent unfinished uploads."""
_SLICE = 1_000_000
"""Bytes that are hashed in one step: about a millisecond."""


class _Upload:
    """An upload that is not complete."""

    def __init__(self, op: ops.Upload, memory: MemoryBudget) -> None:
        self.size = op.size
        # Its value is the buffer, which grows in place: a copy of a video would hold the event loop.
        self.data = io.BytesIO()
        self.digest = hashlib.sha256()
        self.reservation = MemoryReservation(memory, op.size)


class ImageStore:
    """The uploaded images of one session.

    Args:
        memory: Counts the bytes of the images.
    """

    __slots__ = ("_errors", "_images", "_memory", "_partial")

    def __init__(self, memory: MemoryBudget) -> None:
        self._memory = memory
        self._images: dict[str, Image] = {}
        self._partial: dict[str, _Upload] = {}
        self._errors: dict[str, ErrorInfo] = {}

    def upload(self, op: ops.Upload) -> Iterator[None]:
        """Stores a part of an image, in steps. An error fails the ops that use the image."""
        try:
            check_received_op(op)
            yield from self._take(op)
        except AgentflowError as error:
            self._partial.pop(op.source, None)
            while len(self._errors) >= _MAX_ERRORS:
                del self._errors[next(iter(self._errors))]
            self._errors[op.source[:100]] = ErrorInfo.of(error)

    def _take(self, op: ops.Upload) -> Iterator[None]:
        if op.source in self._images:
            return
        if op.at and op.source in self._errors:
            return  # an earlier part failed
        if not op.at:
            self._errors.pop(op.source, None)
            if len(self._partial) >= _MAX_PARTIAL:
                raise BadArgument(f"upload: {_MAX_PARTIAL} images are uploaded in part: complete one first")
            self._partial[op.source] = _Upload(op, self._memory)
        upload = self._partial.get(op.source)
        if upload is None or upload.data.tell() != op.at or upload.size != op.size:
            raise BadArgument("upload: the parts of an image must come in order")
        for first in range(0, len(op.data), _SLICE):
            upload.digest.update(memoryview(op.data)[first : first + _SLICE])
            yield
        is_whole = len(op.data) == op.size
        for first in range(0, 0 if is_whole else len(op.data), _SLICE):
            upload.data.write(memoryview(op.data)[first : first + _SLICE])
            yield
        if op.at + len(op.data) < op.size:
            return
        del self._partial[op.source]
        if DIGEST + upload.digest.hexdigest() != op.source:
            raise BadArgument("upload: the bytes of the image have another digest")
        data = op.data if is_whole else upload.data.getvalue()
        media_type = detect_video_type(data) if op.kind == "video" else detect_media_type(data)
        image = Image(op.source, media_type, data)
        finalize(image, _forget, upload.reservation)
        self._images[op.source] = image

    def release(self, source: str) -> None:
        """Forgets an image that no later op refers to."""
        self._images.pop(source, None)
        self._partial.pop(source, None)

    def find_images(self, op: ops.Op) -> tuple[Image, ...]:
        """The files that the op refers to. ``BadArgument`` if one was not uploaded, or its error."""
        match op:
            case ops.Image() | ops.Video():
                return (self._file(op.source, "video" if isinstance(op, ops.Video) else "image"),)
            case ops.Converse(conversation=conversation):
                return tuple(
                    [
                        self._file(medium.file.source, "video")
                        if isinstance(medium, Video)
                        else self._file(medium.source, "image")
                        for medium in conversation.media
                    ]
                )
        return ()

    def _file(self, source: str, kind: MediumKind) -> Image:
        image = self._images.get(source)
        if image is not None:
            if image.is_video != (kind == "video"):
                raise BadArgument(f"{kind}: {source[:100]!r} was uploaded as another kind of file")
            return image
        if source.startswith(DIGEST):
            error = self._errors.get(source)  # a new one each time, because tracebacks keep their frames
            raise (
                BadArgument(f"{kind}: {source[:100]!r} was not uploaded")
                if error is None
                else error.to_exception()
            )
        return Image(source)

    def close(self) -> None:
        """Forgets all images."""
        self._images.clear()
        self._partial.clear()


def _forget(reservation: MemoryReservation) -> None:
    """The image is gone, and with this call its reservation."""
