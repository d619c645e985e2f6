"""Images and videos in the bodies of requests, without their bytes until these are sent.

A message is encoded with *slots* in the place of files: a nonce of the process and the digest of the file, so
that no text contains one. Encodings are therefore small, can be kept, and are joined into requests that wait
for their turn. When a request is sent, its slots become the files in base64, a piece at a time.
"""

from __future__ import annotations

import base64
import re
import secrets
import threading
import weakref
from collections.abc import AsyncIterator, Iterable
from functools import partial
from typing import Final

import httpx2

from agentflow.errors import EngineFailed
from agentflow.protocol.chat import content_part
from agentflow.protocol.images import DIGEST, Image, Medium, num_base64_chars

_HEAD: Final = f"file-{secrets.token_hex(16)}-"
_SLOT: Final = re.compile(_HEAD.encode() + b"([0-9a-f]{64})")
_PIECE_BYTES: Final = 3 * 131_072
"""The bytes of a file that are encoded in one step: less than a millisecond."""
_lock: Final = threading.RLock()
_files: Final[dict[str, tuple[weakref.ref[Image], ...]]] = {}
"""The living files by digest. Several sessions may have the same file, each for as long as it lives. Tuples,
because a file may be forgotten while they are iterated over."""


def slot(image: Image) -> str:
    """Stands for the bytes of the file in base64. The image must live until the request was sent."""
    digest = image.source.removeprefix(DIGEST)
    with _lock:
        alive = [one for one in _files.get(digest, ()) if one() is not None]  # ``_forget`` may run in between
        if not any(one() is image for one in alive):
            alive.append(weakref.ref(image, partial(_forget, digest)))
        _files[digest] = tuple(alive)
    return _HEAD + digest


def _forget(digest: str, gone: weakref.ref[Image]) -> None:
    """The garbage collector may call this in any thread."""
    with _lock:
        known = tuple([one for one in _files.get(digest, ()) if one is not gone])
        if known:
            _files[digest] = known
        else:
            _files.pop(digest, None)


def slot_url(image: Image) -> str:
    """Like ``Image.url``, with a slot."""
    return f"data:{image.media_type};base64,{slot(image)}" if image.is_file else image.source


def slot_part(part: str | Medium) -> dict[str, object]:
    """Like ``content_part``, with a slot."""
    return content_part(part, slot_url)


def without_nonce(body: bytes) -> bytes:
    """The body with slots that are the same in each process, for digests and keys."""
    return body.replace(_HEAD.encode(), b"file-")


def files_in(body: bytes) -> list[Image]:
    """The files of its slots. ``EngineFailed`` if one is gone."""
    found: list[Image] = []
    for match in _SLOT.finditer(body):
        known = [one() for one in _files.get(match[1].decode(), ())]
        alive = [image for image in known if image is not None]
        if not alive:
            raise EngineFailed("an image of a request is gone, because its state has ended")
        found.append(alive[0])
    return found


def filled_size(body: bytes) -> int:
    """The size of the body when it is sent."""
    slot_bytes = len(_HEAD) + 64
    return len(body) + sum([num_base64_chars(len(image.data)) - slot_bytes for image in files_in(body)])


class FilledBody(httpx2.AsyncByteStream):
    """A body whose slots are filled while it is sent. It may be sent again.

    Args:
        body: With at least one slot.
    """

    def __init__(self, body: bytes) -> None:
        self._texts = _SLOT.split(body)[::2]
        self._images = files_in(body)
        self.size = filled_size(body)

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for piece in self._pieces():
            yield piece

    def _pieces(self) -> Iterable[bytes]:
        yield self._texts[0]
        for image, text in zip(self._images, self._texts[1:], strict=True):
            for first in range(0, len(image.data), _PIECE_BYTES):
                yield base64.b64encode(memoryview(image.data)[first : first + _PIECE_BYTES])
            yield text


def has_slots(body: bytes) -> bool:
    """Whether a file belongs into the body."""
    return _HEAD.encode() in body
