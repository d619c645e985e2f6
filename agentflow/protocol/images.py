"""Images and videos in a conversation: the bytes of a file, or a URL that the model's provider fetches.

The bytes of a file are sent once in a session, by ``ops.Upload``. Ops, recordings and caches refer to them by
``source``, which contains their digest.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Sequence
from typing import Final, Literal, TypeAlias
from weakref import WeakValueDictionary

import msgspec

from agentflow.errors import BadArgument
from agentflow.protocol.sampling import is_whole

MAX_IMAGE_BYTES: Final = 20_000_000
MAX_VIDEO_BYTES: Final = 50_000_000
MAX_FRAMES: Final = 512
"""The maximum ``num_frames`` of a video."""
UPLOAD_BYTES: Final = 3_000_000
"""The maximum number of bytes in one ``Upload``. They fit into a frame even as base64 in JSON."""
DIGEST: Final = "sha256:"
FILE: Final = re.compile(DIGEST + "[0-9a-f]{64}")
"""The ``source`` of a file."""
_MAX_URL_CHARS: Final = 8_000
_STARTS: Final = {"png": b"\x89PNG\r\n", "jpeg": b"\xff\xd8\xff", "gif": b"GIF8", "webp": b"RIFF"}
_STILL_BRANDS: Final = (b"avif", b"avis", b"heic", b"heix", b"mif1", b"msf1")
"""Brands of images in the container of MP4 files."""

MediumKind: TypeAlias = Literal["image", "video"]


class Image(msgspec.Struct, frozen=True, omit_defaults=True, weakref=True):
    """An image, or the file or URL of a ``Video``. ``source``: ``sha256:`` and the digest of a file in
    hexadecimal digits, or an ``https:`` URL. ``media_type`` and ``data``: of a file; empty in ops, because
    its bytes were uploaded."""

    source: str
    media_type: str = ""
    data: bytes = b""

    def __repr__(self) -> str:
        """Without the bytes, which are large, and private in logs and errors."""
        return f"Image({self.source!r})"

    @property
    def is_video(self) -> bool:
        """Whether it is the file of a video. Unknown, so False, without the bytes."""
        return self.media_type.startswith("video/")

    @property
    def is_file(self) -> bool:
        """Whether it is a file, not a URL."""
        return self.source.startswith(DIGEST)

    def reference(self) -> Image:
        """The image without its bytes, as in ops."""
        return Image(self.source) if self.data else self

    @property
    def base64(self) -> str:
        """The bytes of the file in base64."""
        return base64.b64encode(self.data).decode("ascii")

    @property
    def url(self) -> str:
        """A URL that contains the file, or the URL of the image."""
        return f"data:{self.media_type};base64,{self.base64}" if self.is_file else self.source


class Video(msgspec.Struct, frozen=True):
    """A video. ``num_frames``: the number of frames that the model sees, evenly spaced; None: the model's
    default."""

    file: Image
    num_frames: int | None = None

    def reference(self) -> Video:
        """The video without its bytes."""
        return Video(self.file.reference(), self.num_frames) if self.file.data else self


Medium: TypeAlias = Image | Video


def medium_kind(medium: Medium) -> MediumKind:
    """Whether it is an image or a video."""
    return "video" if isinstance(medium, Video) else "image"


def medium_key(medium: Medium) -> str:
    """A text that differs between images, videos, and videos with other numbers of frames.

    >>> medium_key(Video(Image("https://example.org/x.mp4"), 8))
    'video:8:https://example.org/x.mp4'
    """
    if isinstance(medium, Video):
        return f"video:{medium.num_frames or ''}:{medium.file.source}"
    return medium.source


class PlacedImage(msgspec.Struct, frozen=True, omit_defaults=True):
    """An image in a text, before its character ``at``; or with ``video``, a video. ``num_frames``: as in
    ``Video``."""

    at: int
    image: Image
    video: bool = False
    num_frames: int | None = None

    @property
    def medium(self) -> Medium:
        """The image or the video."""
        return Video(self.image, self.num_frames) if self.video else self.image


def placed_medium(at: int, medium: Medium) -> PlacedImage:
    """The image or video before a character."""
    if isinstance(medium, Video):
        return PlacedImage(at, medium.file, True, medium.num_frames)
    return PlacedImage(at, medium)


def num_base64_chars(num_bytes: int) -> int:
    """The length of bytes in base64."""
    return (num_bytes + 2) // 3 * 4


_files: WeakValueDictionary[str, Image] = WeakValueDictionary()


def file_source(data: bytes | bytearray) -> str:
    """The ``source`` of a file."""
    return DIGEST + hashlib.sha256(data).hexdigest()


def check_frames(num_frames: int | None, param: str = "num_frames") -> None:
    """Raises ``BadArgument`` for an invalid number of frames."""
    if num_frames is not None and not is_whole(num_frames, 1, MAX_FRAMES):
        raise BadArgument(f"video: num_frames must be 1 to {MAX_FRAMES}, not {num_frames!r}", param=param)


def check_source(source: str, param: str) -> None:
    """Raises ``BadArgument`` for ``param`` unless ``source`` is a file's source or an ``https:`` URL."""
    if not source.startswith("https:") and not FILE.fullmatch(source):
        raise BadArgument(
            f"image: the source must be sha256: with a digest, or an https: URL, not {source[:40]!r}",
            param=param,
        )
    if len(source) > _MAX_URL_CHARS:
        raise BadArgument(f"image: a URL has {_MAX_URL_CHARS:,} characters at most", param=param)


def image_at(url: str, kind: MediumKind = "image") -> Image:
    """The image, or the file of a video, at an ``https:`` URL or in a ``data:`` URL. ``BadArgument`` for
    other URLs, and as in ``image_file``."""
    head, comma, body = url.partition(",")
    if url.startswith("https:"):
        check_source(url, "image")
        return Image(url)
    if not (comma and head.startswith(f"data:{kind}/") and head.endswith(";base64")):
        raise BadArgument(
            f"{kind}: a URL must begin with https:, or with data:{kind}/…;base64, unlike {url[:40]!r}",
            param=kind,
        )
    return image_in_base64(body, kind)


def image_in_base64(encoded: str, kind: MediumKind = "image") -> Image:
    """The image, or the file of a video, whose bytes are in base64. ``BadArgument`` as in ``image_file``."""
    try:
        data = base64.b64decode(encoded, validate=True)
    except ValueError:
        raise BadArgument(f"{kind}: this is no valid base64", param=kind) from None
    return image_file(data, kind)


def detect_media_type(data: bytes | bytearray) -> str:
    """The media type of an image, by its first bytes. ``BadArgument`` for other files."""
    for kind, start in _STARTS.items():
        if data.startswith(start) and (kind != "webp" or data[8:12] == b"WEBP"):
            return f"image/{kind}"
    raise BadArgument(
        f"image: {bytes(data[:12])!r}… begins no known image: PNG, JPEG, GIF and WebP are supported",
        param="image",
    )


def detect_video_type(data: bytes | bytearray) -> str:
    """The media type of a video, by its first bytes. ``BadArgument`` for other files."""
    start = bytes(data[:64])
    if start[4:8] == b"ftyp" and start[8:12] not in _STILL_BRANDS:
        return "video/quicktime" if start[8:12] == b"qt  " else "video/mp4"
    if start.startswith(b"\x1aE\xdf\xa3"):
        return "video/webm" if b"webm" in start else "video/x-matroska"
    if start.startswith(b"RIFF") and start[8:12] == b"AVI ":
        return "video/x-msvideo"
    if start.startswith(b"\x00\x00\x01\xba"):
        return "video/mpeg"
    raise BadArgument(
        f"video: {start[:12]!r}… begins no known video: MP4, MOV, WebM, Matroska, AVI and MPEG are supported",
        param="video",
    )


def max_file_bytes(kind: MediumKind) -> int:
    """The size of the largest file."""
    return MAX_VIDEO_BYTES if kind == "video" else MAX_IMAGE_BYTES


def image_file(data: bytes, kind: MediumKind = "image") -> Image:
    """The image in a file, or the file of a video: the same object for the same bytes, as long as it is in
    use. ``BadArgument`` if the file has another format or is too large."""
    if len(data) > max_file_bytes(kind):
        raise BadArgument(
            f"{kind}: {len(data):,} bytes are more than {max_file_bytes(kind):,}: make it smaller", param=kind
        )
    media_type = detect_video_type(data) if kind == "video" else detect_media_type(data)
    source = file_source(data)
    image = _files.get(source)
    if image is None:
        image = _files[source] = Image(source, media_type, data)
    return image


def known_file(source: str) -> Image | None:
    """The image of ``image_file`` with this source, if the process still uses it."""
    return _files.get(source)


def split_at_media(text: str, images: tuple[PlacedImage, ...]) -> list[str | Medium]:
    """The text cut at its images and videos, in order, without empty texts.

    >>> split_at_media("ab", (PlacedImage(1, Image("https://example.org/x.png")),))
    ['a', Image('https://example.org/x.png'), 'b']
    """
    parts: list[str | Medium] = []
    done = 0
    for placed in images:
        if text[done : placed.at]:
            parts.append(text[done : placed.at])
        parts.append(placed.medium)
        done = placed.at
    return [*parts, text[done:]] if text[done:] else parts


def placed_in(parts: Sequence[str | Medium]) -> tuple[str, tuple[PlacedImage, ...]]:
    """The text of some parts, and its images: the inverse of ``split_at_media``."""
    texts: list[str] = []
    images: list[PlacedImage] = []
    num_chars = 0
    for part in parts:
        if isinstance(part, str):
            texts.append(part)
            num_chars += len(part)
        else:
            images.append(placed_medium(num_chars, part))
    return "".join(texts), tuple(images)


def shift_images(images: tuple[PlacedImage, ...], num_chars: int) -> tuple[PlacedImage, ...]:
    """The images of a text after ``num_chars`` characters are inserted before it."""
    return tuple([msgspec.structs.replace(placed, at=placed.at + num_chars) for placed in images])
