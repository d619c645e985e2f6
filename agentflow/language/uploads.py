"""The images and videos that a session has sent to its backend.

Each file is sent once, before the first op that refers to it, and released when no part of the program uses
it any more.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Final
from weakref import finalize

from agentflow.protocol import ops
from agentflow.protocol.images import UPLOAD_BYTES, Image, MediumKind, known_file

REFERRING: Final = frozenset({ops.Image, ops.Video, ops.Converse, ops.SubmitGraph})
"""The ops that may refer to images."""


def images_in(op: ops.Op) -> Iterator[Image]:
    """The files that the op refers to."""
    sources: Iterable[str] = ()
    match op:
        case ops.Image() | ops.Video():
            sources = (op.source,)
        case ops.Converse():
            sources = [one.image.source for message in op.conversation.messages for one in message.images]
        case ops.SubmitGraph():
            for part in op.ops:
                yield from images_in(part)
    for source in sources:
        if (image := known_file(source)) is not None:
            yield image


class Uploads:
    """The images that one backend has."""

    def __init__(self) -> None:
        self._sent: set[str] = set()
        # Of images that nothing uses. The garbage collector may add to it at any time, in any thread.
        self._unused: deque[str] = deque()

    def before(self, sent: Iterable[ops.Op]) -> list[ops.Op]:
        """The ops to send before ``sent``: uploads of new images, and releases of unused ones. The caller
        must send them, or call ``mark_unsent``."""
        found: list[ops.Op] = []
        while self._unused:
            source = self._unused.popleft()
            if source not in self._sent:
                continue
            if (image := known_file(source)) is not None:  # loaded again meanwhile
                self._release_after(image)
                continue
            self._sent.remove(source)
            found.append(ops.Release(source))
        for op in sent:
            for image in images_in(op) if type(op) in REFERRING else ():
                if image.source not in self._sent:
                    self._sent.add(image.source)
                    self._release_after(image)
                    found += parts_of_upload(image)
        return found

    def _release_after(self, image: Image) -> None:
        """Notes the image as unused when nothing refers to it any more."""
        finalize(image, self._unused.append, image.source).atexit = False

    def mark_unsent(self, found: Iterable[ops.Op]) -> None:
        """The ops of ``before`` could not be sent."""
        for op in found:
            match op:
                case ops.Upload():
                    self._sent.discard(op.source)
                case ops.Release():
                    self._sent.add(op.source)
                    self._unused.append(op.source)

    def clear(self) -> None:
        """The backend has lost all images."""
        self._sent.clear()


def parts_of_upload(image: Image) -> list[ops.Op]:
    """The ops that send an image."""
    size = len(image.data)
    kind: MediumKind = "video" if image.is_video else "image"
    return [
        ops.Upload(image.source, size, at, image.data[at : at + UPLOAD_BYTES], kind)
        for at in range(0, size, UPLOAD_BYTES)
    ]
