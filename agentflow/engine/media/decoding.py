"""Decodes the files of images and videos. Runs in the reading process: a file may be hostile.

The content of a file determines its format, not a media type. An image is rotated by its EXIF orientation,
composited on white if it is transparent, and converted to RGB with 8 bits. Only the first frame of an
animation is read.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from agentflow.engine.media.processors.pixels import Clip, FrameSampling
from agentflow.errors import AgentflowError, BadArgument

if TYPE_CHECKING:
    from PIL.Image import Image

MAX_IMAGE_PIXELS: Final = 50_000_000
MAX_FRAME_PIXELS: Final = 10_000_000
MAX_VIDEO_FRAMES: Final = 500_000
"""The most frames in a video file, whether they are read or not."""
_FORMATS: Final = ("PNG", "JPEG", "GIF", "WEBP")
_ERROR_CHARS: Final = 120
_STRIP_ROWS: Final = 256


def decode_image(data: bytes) -> Image:
    """Returns the image in RGB. Raises ``BadArgument`` if it is damaged, too large, or in another format."""
    from PIL import Image, ImageOps, UnidentifiedImageError

    Image.MAX_IMAGE_PIXELS = None  # checked here
    with _naming_damage("image"):
        try:
            image: Image.Image = Image.open(io.BytesIO(data), formats=_FORMATS)
        except UnidentifiedImageError:
            raise BadArgument(
                "image: the file is not a PNG, JPEG, GIF or WebP, or is damaged", param="image"
            ) from None
        if image.width * image.height > MAX_IMAGE_PIXELS:
            raise BadArgument(
                f"image: {image.width:,} x {image.height:,} pixels are more than {MAX_IMAGE_PIXELS:,}: make "
                "it smaller",
                param="image",
            )
        image.load()
        return _as_rgb(ImageOps.exif_transpose(image))


def _as_rgb(image: Image) -> Image:
    from PIL import Image as images

    if image.mode == "RGB" and not image.has_transparency_data:
        return image
    found = images.new("RGB", image.size)
    for top in range(
        0, image.height, _STRIP_ROWS
    ):  # converted as a whole, it would take several times the memory
        box = (0, top, image.width, min(top + _STRIP_ROWS, image.height))
        found.paste(_strip_as_rgb(image.crop(box)), box)
    return found


def _strip_as_rgb(strip: Image) -> Image:
    from PIL import Image as images

    if strip.mode.startswith("I"):  # 16 bits of gray, which Pillow would clip instead of scale
        high = np.asarray(strip).clip(0, 65_535) >> 8
        return images.fromarray(high.astype(np.uint8)).convert("RGB")
    if strip.has_transparency_data:
        white = images.new("RGBA", strip.size, (255, 255, 255, 255))
        return images.alpha_composite(white, strip.convert("RGBA")).convert("RGB")
    return strip.convert("RGB")


@contextmanager
def _naming_damage(kind: str) -> Iterator[None]:
    """Turns exceptions of a decoder, which may have any class, into ``BadArgument``."""
    try:
        yield
    except (AgentflowError, MemoryError):
        raise
    except Exception as error:
        said = getattr(error, "strerror", None) or str(error)
        why = " ".join(said.split())[:_ERROR_CHARS] or type(error).__name__
        raise BadArgument(f"{kind}: it is damaged or truncated: {why}", param=kind) from None


def decode_video(data: bytes, sampling: FrameSampling) -> Clip:
    """Returns frames at equal distances, starting with the first. Raises ``BadArgument`` if the video is
    damaged, too large, or in another format."""
    import av

    with _naming_damage("video"):
        # With a given format, PyAV reads no playlist, which could refer to other files.
        container = av.open(io.BytesIO(data), format=_container_format(data), options=_NO_OTHER_FILES)
        if not container.streams.video:
            raise BadArgument("video: it has no video stream", param="video")
        stream = container.streams.video[0]
        stream.codec_context.thread_count = 1
        width, height = stream.codec_context.width, stream.codec_context.height
        if width * height > MAX_FRAME_PIXELS:
            raise BadArgument(
                f"video: {width:,} x {height:,} pixels are more than {MAX_FRAME_PIXELS:,}: make it smaller",
                param="video",
            )
        packets = _packets(container, stream)
        if not packets:
            raise BadArgument("video: it has no frames", param="video")
        total = len(packets)
        fps = float(stream.average_rate or stream.guessed_rate or 24)
        count = sampling.count(total, total / fps)
        wanted = [index * total // count for index in range(count)]
        frames = _checked(_frames(container, stream, packets, wanted))
        first = next(frames)
        return Clip(
            _chained(first, frames),
            (first.height, first.width),
            [index / fps for index in wanted],
            total / fps,
        )


_NO_OTHER_FILES: Final = {"protocol_whitelist": "none", "enable_drefs": "0"}


def _container_format(data: bytes) -> str:
    if data[4:8] == b"ftyp":
        return "mp4"
    if data.startswith(b"\x1aE\xdf\xa3"):
        return "matroska"
    if data.startswith(b"RIFF") and data[8:12] == b"AVI ":
        return "avi"
    raise BadArgument("video: the file is not MP4, QuickTime, Matroska, WebM or AVI", param="video")


def _packets(container: Any, stream: Any) -> list[tuple[int | None, bool]]:
    """Returns the time of each frame, in the stream's time base, and whether it is a key frame."""
    found: list[tuple[int | None, bool]] = []
    for packet in container.demux(stream):
        if packet.size:
            found.append((packet.pts, packet.is_keyframe))
        if len(found) > MAX_VIDEO_FRAMES:
            raise BadArgument(f"video: it has more than {MAX_VIDEO_FRAMES:,} frames: cut it", param="video")
    return found


def _frames(
    container: Any, stream: Any, packets: Sequence[tuple[int | None, bool]], wanted: Sequence[int]
) -> Iterator[Image]:
    """Decodes the wanted frames. ``wanted``: their indices in display order."""
    times = sorted([time for time, _ in packets if time is not None])
    if len(set(times)) < len(packets):  # without times, frames can only be counted
        container.seek(0, stream=stream)
        yield from _nth(container.decode(stream), wanted)
        return
    keys = sorted([time for time, is_key in packets if is_key and time is not None])
    decoded: Iterator[Any] = iter(())
    position: int | None = None
    for index in wanted:
        key = max([time for time in keys if time <= times[index]], default=times[0])
        if position is None or key > position:
            container.seek(key, stream=stream)
            decoded = container.decode(stream)
        for frame in decoded:
            position = frame.pts
            if position is not None and position >= times[index]:
                yield _picture(frame)
                break
        else:
            raise BadArgument(f"video: its frame {index:,} cannot be decoded", param="video")


def _nth(decoded: Iterator[Any], wanted: Sequence[int]) -> Iterator[Image]:
    left = list(reversed(wanted))
    for index, frame in enumerate(decoded):
        if index == left[-1]:
            yield _picture(frame)
            left.pop()
            if not left:
                return
    raise BadArgument(f"video: its frame {left[-1]:,} cannot be decoded", param="video")


def _picture(frame: Any) -> Image:
    image: Image = frame.to_image()
    rotation = getattr(frame, "rotation", 0)
    return image.rotate(rotation, expand=True) if rotation else image


def _checked(frames: Iterator[Image]) -> Iterator[Image]:
    size: tuple[int, int] | None = None
    with _naming_damage("video"):
        for frame in frames:
            if frame.width * frame.height > MAX_FRAME_PIXELS or (size or frame.size) != frame.size:
                raise BadArgument("video: the size of its frames changes", param="video")
            size = frame.size
            yield frame


def _chained(first: Image, rest: Iterator[Image]) -> Iterator[Image]:
    yield first
    yield from rest
