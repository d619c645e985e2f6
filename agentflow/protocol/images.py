"""Images in a conversation: the bytes of a file, or a URL that the model's provider fetches.

The bytes of a file travel once in a session, in ``ops.Upload``. Ops, recordings and caches refer to them by
``source``, which contains their digest.
"""

from __future__ import annotations

import base64
import hashlib
import re
from typing import Final
from weakref import WeakValueDictionary

import msgspec

from agentflow.errors import BadArgument

MAX_IMAGE_BYTES: Final = 20_000_000
UPLOAD_BYTES: Final = 3_000_000
"""The most bytes of an image in one op. In JSON, which has them in base64, they still fit into a frame."""
DIGEST: Final = "sha256:"
FILE: Final = re.compile(DIGEST + "[0-9a-f]{64}")
"""The ``source`` of a file."""
_MAX_URL_CHARS: Final = 8_000
_STARTS: Final = {"png": b"\x89PNG\r\n", "jpeg": b"\xff\xd8\xff", "gif": b"GIF8", "webp": b"RIFF"}


class Image(msgspec.Struct, frozen=True, omit_defaults=True, weakref=True):
    """An image. ``source``: ``sha256:`` and the digest of a file in hexadecimal digits, or an ``https:`` URL.
    ``media_type`` and ``data``: of a file; ops leave them out, because its bytes were uploaded."""

    source: str
    media_type: str = ""
    data: bytes = b""

    def __repr__(self) -> str:
        """Without the bytes, which are large, and private in logs and errors."""
        return f"Image({self.source!r})"

    @property
    def is_file(self) -> bool:
        """Whether it is a file, and no URL."""
        return self.source.startswith(DIGEST)

    def reference(self) -> Image:
        """The image as ops have it, without its bytes."""
        return Image(self.source) if self.data else self

    @property
    def base64(self) -> str:
        """The bytes of the file in base64."""
        return base64.b64encode(self.data).decode("ascii")

    @property
    def url(self) -> str:
        """A URL that contains the file, or the URL of the image."""
        return f"data:{self.media_type};base64,{self.base64}" if self.is_file else self.source


class PlacedImage(msgspec.Struct, frozen=True):
    """An image in a text, before its character ``at``."""

    at: int
    image: Image


def num_base64_chars(num_bytes: int) -> int:
    """The length of bytes in base64."""
    return (num_bytes + 2) // 3 * 4


_files: WeakValueDictionary[str, Image] = WeakValueDictionary()


def digest_of(data: bytes | bytearray) -> str:
    """The ``source`` of a file."""
    return DIGEST + hashlib.sha256(data).hexdigest()


def check_source(source: str, param: str) -> None:
    """``BadArgument`` of ``param`` for another ``source`` than that of a file, or an ``https:`` URL."""
    if not source.startswith("https:") and not FILE.fullmatch(source):
        raise BadArgument(
            f"image: the source must be sha256: with a digest, or an https: URL, not {source[:40]!r}",
            param=param,
        )
    if len(source) > _MAX_URL_CHARS:
        raise BadArgument(f"image: a URL has {_MAX_URL_CHARS:,} characters at most", param=param)


def image_at(url: str) -> Image:
    """The image at an ``https:`` URL, or in a ``data:`` URL. ``BadArgument`` for another URL, and as
    ``image_file``."""
    head, comma, body = url.partition(",")
    if url.startswith("https:"):
        check_source(url, "image")
        return Image(url)
    if not (comma and head.startswith("data:image/") and head.endswith(";base64")):
        raise BadArgument(
            f"image: a URL must begin with https:, or with data:image/…;base64, unlike {url[:40]!r}",
            param="image",
        )
    return image_in_base64(body)


def image_in_base64(encoded: str) -> Image:
    """The image in a file whose bytes are in base64. ``BadArgument`` as ``image_file``."""
    try:
        data = base64.b64decode(encoded, validate=True)
    except ValueError:
        raise BadArgument("image: this is no valid base64", param="image") from None
    return image_file(data)


def media_type_of(data: bytes | bytearray) -> str:
    """The media type of a file, by its first bytes. ``BadArgument`` for other files than images."""
    for kind, start in _STARTS.items():
        if data.startswith(start) and (kind != "webp" or data[8:12] == b"WEBP"):
            return f"image/{kind}"
    raise BadArgument(
        f"image: {bytes(data[:12])!r}… begins no known image: PNG, JPEG, GIF and WebP are supported",
        param="image",
    )


def image_file(data: bytes) -> Image:
    """The image in a file: the same object for the same bytes, as long as it is in use. ``BadArgument`` if it
    is no image or too large."""
    if len(data) > MAX_IMAGE_BYTES:
        raise BadArgument(
            f"image: {len(data):,} bytes are more than {MAX_IMAGE_BYTES:,}: make it smaller", param="image"
        )
    media_type = media_type_of(data)
    source = digest_of(data)
    image = _files.get(source)
    if image is None:
        image = _files[source] = Image(source, media_type, data)
    return image


def known_file(source: str) -> Image | None:
    """The image of ``image_file`` with this source, if the process still uses it."""
    return _files.get(source)


def parts_of(text: str, images: tuple[PlacedImage, ...]) -> list[str | Image]:
    """The text cut at its images, in order, without empty texts.

    >>> parts_of("ab", (PlacedImage(1, Image("https://example.org/x.png")),))
    ['a', Image('https://example.org/x.png'), 'b']
    """
    parts: list[str | Image] = []
    done = 0
    for placed in images:
        if text[done : placed.at]:
            parts.append(text[done : placed.at])
        parts.append(placed.image)
        done = placed.at
    return [*parts, text[done:]] if text[done:] else parts


def placed_in(parts: list[str | Image]) -> tuple[str, tuple[PlacedImage, ...]]:
    """The text of some parts, and its images: the inverse of ``parts_of``."""
    texts: list[str] = []
    images: list[PlacedImage] = []
    num_chars = 0
    for part in parts:
        if isinstance(part, Image):
            images.append(PlacedImage(num_chars, part))
        else:
            texts.append(part)
            num_chars += len(part)
    return "".join(texts), tuple(images)


def moved(images: tuple[PlacedImage, ...], num_chars: int) -> tuple[PlacedImage, ...]:
    """The images of a text that stands behind ``num_chars`` more characters."""
    return tuple([PlacedImage(placed.at + num_chars, placed.image) for placed in images])
