"""Images and videos of a program: their accepted forms, and the files that reach the backend.

``image`` and ``video`` make expressions. ``split_result`` finds images in the result of a tool.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, overload

from agentflow.errors import BadArgument, NotSupported, short_repr
from agentflow.language.expressions import (
    Expression,
    ImageExpression,
    MediumExpression,
    Sequence_,
    VideoExpression,
)
from agentflow.protocol.images import (
    Image,
    MediumKind,
    check_frames,
    image_at,
    image_file,
    max_file_bytes,
)

DEFAULT_FRAMES = 8
"""The frames of a video that is shown as images."""


def image(source: Any) -> ImageExpression:
    """An image in a turn of the user, or in the result of a tool.

    Args:
        source: The path of a file, its bytes, an image of Pillow, an array of numpy (height × width, or
            height × width × 3 or 4, of bytes), or a URL. ``data:`` URLs contain a file; the model's provider
            fetches ``https:`` URLs. An image that this function made is returned.

    Raises:
        BadArgument: The file cannot be read, is not a PNG, JPEG, GIF or WebP file, or is larger than 20 MB.

    Appending it raises ``NotSupported`` if the backend's model has no vision. A session sends the bytes of an
    image once, however many states have it.

    >>> s += af.user(af.image("chart.png"), "What does the chart show?")
    """
    if isinstance(source, ImageExpression):
        return source
    if isinstance(source, str) and source.startswith(("https:", "http:", "data:")):
        return ImageExpression(image_at(source))
    if is_picture(source):
        return ImageExpression(image_file(_encoded(source)))
    if hasattr(source, "__array_interface__"):
        return ImageExpression(image_file(_encoded(_from_array(source))))
    return ImageExpression(
        _file(source, "image", "a file's path or bytes, a picture of Pillow or numpy, or a URL")
    )


@overload
def video(
    source: Any, *, num_frames: int | None = ..., as_images: Literal[False] = ...
) -> VideoExpression: ...
@overload
def video(source: Any, *, num_frames: int | None = ..., as_images: bool) -> VideoExpression | Sequence_: ...
def video(
    source: Any, *, num_frames: int | None = None, as_images: bool = False
) -> VideoExpression | Sequence_:
    """A video in a turn of the user, or in the result of a tool. Only its pictures are shown, not its sound.

    Args:
        source: The path of a file, its bytes, or an ``https:`` URL, which the model's provider fetches; or a
            video that this function made.
        num_frames: The number of frames that the model sees, evenly spaced; by default as many as it is made
            for, and 8 with ``as_images``.
        as_images: Decode the file here, and append its frames as images, for models that accept images and no
            videos. Needs PyAV and Pillow (the extra ``vision``).

    Raises:
        BadArgument: The file cannot be read, is no video (MP4, MOV, WebM, Matroska, AVI, MPEG), or is larger
            than 50 MB.
        NotSupported: ``as_images`` without PyAV.

    Appending it raises ``NotSupported`` if the backend's model reads no videos.

    >>> s += af.user(af.video("match.mp4", num_frames=16), "Who scores?")
    """
    check_frames(num_frames)
    if isinstance(source, VideoExpression):
        if not as_images:
            return source if num_frames is None else VideoExpression(source.file, num_frames)
        num_frames = num_frames or source.medium.num_frames
        source = source.file.data or source.file.source
    if isinstance(source, str) and source.startswith("https:"):
        if as_images:
            raise BadArgument("video: frames of a URL cannot be read here: give the file", param="as_images")
        return VideoExpression(image_at(source), num_frames)
    file = _file(source, "video", "a file's path or bytes, or an https: URL")
    if as_images:
        return Sequence_(tuple(map(image, frames(file.data, num_frames or DEFAULT_FRAMES))))
    return VideoExpression(file, num_frames)


def check_is_text(where: str, parts: Sequence[object]) -> None:
    """Raises ``BadArgument`` for an image or a video in the value of a variable."""
    # In a trace, the stand-in for a value refuses to be asked for attributes.
    others = [
        part for part in parts if isinstance(part, MediumExpression) or not isinstance(part, Expression)
    ]
    if any(isinstance(part, MediumExpression) or is_picture(part) for part in others):
        raise BadArgument(
            f"{where}: the value of a variable is text, and holds no images or videos: keep what af.image or "
            "af.video returns in a Python variable, and append it to each state (its file is sent once)",
            param="value",
        )


def is_picture(value: object) -> bool:
    """Whether it is an image of Pillow."""
    return callable(getattr(value, "save", None)) and hasattr(value, "mode") and hasattr(value, "size")


def split_result(result: Any, text_of: Callable[[Any], str]) -> list[str | MediumExpression] | None:
    """The parts of a tool's result that has images or videos; None if it has none.

    Args:
        result: An image, a video, a picture of Pillow, or a list with some of these and other values.
        text_of: Writes other values.
    """
    items = result if isinstance(result, list | tuple) else [result]
    if not any(isinstance(item, MediumExpression) or is_picture(item) for item in items):
        return None
    return [
        item if isinstance(item, MediumExpression) else image(item) if is_picture(item) else text_of(item)
        for item in items
    ]


def _file(source: Any, kind: MediumKind, wanted: str) -> Image:
    if isinstance(source, bytes | bytearray | memoryview):
        return image_file(bytes(source), kind)
    if isinstance(source, str | os.PathLike):
        return image_file(_read(source, kind), kind)
    raise BadArgument(f"{kind}: give {wanted}, not {short_repr(source)}", param=kind)


def _read(path: str | os.PathLike[str], kind: MediumKind) -> bytes:
    """The bytes of a file, at most one more than allowed, so that a longer file can be detected."""
    try:
        with open(Path(path), "rb") as file:
            return file.read(max_file_bytes(kind) + 1)
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise BadArgument(f"{kind}: {os.fspath(path)!r:.200} cannot be read: {why}", param=kind) from None


_NOT_IN_PNG = dict.fromkeys(("CMYK", "YCbCr", "LAB", "HSV"), "RGB") | {"PA": "RGBA"}


def _encoded(picture: Any) -> bytes:
    """A Pillow image as a file: a PNG, or a JPEG if it was read from one and has its colors."""
    written = io.BytesIO()
    is_jpeg = getattr(picture, "format", None) == "JPEG" and picture.mode in ("L", "RGB", "CMYK")
    try:
        if not is_jpeg and picture.mode in _NOT_IN_PNG:
            picture = picture.convert(_NOT_IN_PNG[picture.mode])
        picture.save(written, "JPEG" if is_jpeg else "PNG")
    except (OSError, ValueError) as error:
        raise BadArgument(
            f"image: {picture!r:.80} cannot be written as a file: {error}", param="image"
        ) from None
    return written.getvalue()


def _from_array(array: Any) -> Any:
    try:
        from PIL import Image as pillow
    except ModuleNotFoundError:
        raise BadArgument("image: an array needs Pillow: pip install pillow", param="image") from None
    if getattr(array, "dtype", None) != "uint8":
        raise BadArgument(
            f"image: an array of bytes (uint8) is needed, not of {getattr(array, 'dtype', '?')}",
            param="image",
        )
    try:
        return pillow.fromarray(array)
    except (TypeError, ValueError) as error:
        raise BadArgument(
            f"image: an array of shape {array.shape} is no picture: {error}", param="image"
        ) from None


MAX_DECODED_FRAMES = 20_000
"""The most frames of a video that are read to show some of them."""


def frames(data: bytes, num_frames: int) -> list[Any]:
    """Pictures of evenly spaced frames of a video, each the middle one of an equal part; all if it has
    fewer."""
    try:
        import av
    except ModuleNotFoundError as error:
        raise NotSupported(
            f"the frames of a video need the package {error.name!r}: pip install 'agentflow-lm[vision]'",
            param="as_images",
        ) from None
    try:
        num_in_file = sum(1 for _ in _decoded(av, data))
        wanted = frozenset(_spaced(num_in_file, num_frames))
        found = [frame.to_image() for index, frame in enumerate(_decoded(av, data)) if index in wanted]
    except (av.FFmpegError, ValueError, IndexError) as error:
        raise BadArgument(f"video: the file cannot be decoded: {error}", param="video") from None
    if not found:
        raise BadArgument("video: the file has no frames", param="video")
    return found


def _spaced(num_in_file: int, wanted: int) -> Sequence[int]:
    """The numbers of the frames in the middle of ``wanted`` equal parts.

    >>> _spaced(8, 2), _spaced(2, 8)
    ([2, 6], [0, 1])
    """
    count = min(num_in_file, wanted)
    return [(2 * part + 1) * num_in_file // (2 * count) for part in range(count)]


def _decoded(av: Any, data: bytes) -> Iterator[Any]:
    with av.open(io.BytesIO(data)) as container:
        for number, frame in enumerate(container.decode(video=0)):
            if number >= MAX_DECODED_FRAMES:
                raise BadArgument(
                    f"video: it has more than {MAX_DECODED_FRAMES:,} frames: cut it", param="video"
                )
            yield frame
