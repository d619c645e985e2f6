"""Resizing, cutting, settings and the interface, for all processors.

Pillow resizes images in bytes, as in transformers' processors on Pillow, so that the values are the same. The
vision tower scales the bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from agentflow.engine.media.settings import MediaSettings
from agentflow.engine.media_run import MediaPiece, Positions
from agentflow.engine.store import config_parts
from agentflow.errors import BadArgument, BadModelFolder, NotSupported

if TYPE_CHECKING:
    from PIL.Image import Image, Resampling

Bytes = NDArray[np.uint8]
Size = tuple[int, int]
"""Height and width."""

MAX_RESIZED_PIXELS: Final = 64_000_000
LANCZOS: Final = 1
BILINEAR: Final = 2
BICUBIC: Final = 3
"""The numbers of Pillow's filters, as in the files of models."""


@dataclass(frozen=True, slots=True, eq=False)
class Prepared:
    """The fields of a ``PreparedMedium`` without its identity."""

    arrays: Mapping[str, NDArray[Any]]
    pieces: tuple[str | MediaPiece, ...]


@dataclass(frozen=True, slots=True)
class FrameSampling:
    """The number of frames of a video that a model reads: ``per_second`` frames a second, at least ``least``
    and at most ``most``; or ``most`` frames if ``per_second`` is 0. At most as many as the video has. A
    number above ``multiple`` is rounded down to a multiple of it."""

    least: int
    most: int
    per_second: float = 0.0
    multiple: int = 1

    def count(self, total: int, duration_s: float) -> int:
        """Returns the number for a video of ``total`` frames.

        >>> FrameSampling(4, 768, per_second=2, multiple=2).count(total=300, duration_s=10.5)
        20
        """
        wanted = int(duration_s * self.per_second) if self.per_second else self.most
        count = min(max(wanted, self.least), self.most, total)
        return max(count // self.multiple * self.multiple, 1) if count > self.multiple else max(count, 1)


NO_FRAMES: Final = FrameSampling(1, 1)
"""The sampling of models that read no videos."""


@dataclass(frozen=True, slots=True, eq=False)
class Clip:
    """Frames of a video. They are decoded during iteration, which is possible once. ``size``: the size of a
    frame. ``times_s``: the time of each frame. ``duration_s``: the duration of the whole video."""

    frames: Iterable[Image]
    size: Size
    times_s: Sequence[float]
    duration_s: float

    def __len__(self) -> int:
        return len(self.times_s)


class Processor(Protocol):
    """Prepares the media of one model.

    ``image_token`` and ``video_token``: the text of the token that a chat template writes for a medium, which
    the medium's pieces replace; empty: the model reads no such media. ``sampling``: the model's default
    sampling of frames. Images are RGB.
    """

    image_token: str
    video_token: str
    sampling: FrameSampling

    def prepare_image(self, image: Image) -> Prepared: ...

    def prepare_video(self, clip: Clip) -> Prepared: ...


def resize(image: Image, size: Size, resample: int) -> Image:
    """Resizes an image. Raises ``BadArgument`` if the result is too large."""
    height, width = size
    if height * width > MAX_RESIZED_PIXELS:
        raise BadArgument(
            f"image: {image.width:,} by {image.height:,} pixels are too elongated for this model",
            param="image",
        )
    # Pillow copies an image that already has this size.
    return image.resize((width, height), resample=_filter(resample))


def _filter(number: int) -> Resampling:
    from PIL.Image import Resampling

    return Resampling(number)


def channels_first(image: Image) -> Bytes:
    """Returns the pixels of an image in RGB: [3, height, width]."""
    return np.ascontiguousarray(np.asarray(image, dtype=np.uint8).transpose(2, 0, 1))


def cut_squares(pixels: Bytes, side: int) -> Bytes:
    """Cuts [3, height, width] into squares, row by row: [tiles, 3, side, side]. ``height`` and ``width`` must
    be multiples of ``side``."""
    _, height, width = pixels.shape
    tiles = pixels.reshape(3, height // side, side, width // side, side)
    return np.ascontiguousarray(tiles.transpose(1, 3, 0, 2, 4)).reshape(-1, 3, side, side)


def crop_center(pixels: Bytes, size: Size) -> Bytes:
    """Returns the center of [3, height, width], with zeros around an image that is smaller than ``size``."""
    height, width = size
    found = np.zeros((3, height, width), dtype=np.uint8)
    top, left = (pixels.shape[1] - height) // 2, (pixels.shape[2] - width) // 2
    # For a smaller image, the differences are negative: ``//`` rounds down, so ``-top`` and ``-left`` round
    # up.
    source = pixels[:, max(top, 0) : max(top, 0) + height, max(left, 0) : max(left, 0) + width]
    y, x = max(-top, 0), max(-left, 0)
    found[:, y : y + source.shape[1], x : x + source.shape[2]] = source
    return found


def shortest_edge(image: Image, edge: int) -> Size:
    """Returns the size with ``edge`` as its shorter side and the same proportions."""
    short, long = min(image.width, image.height), max(image.width, image.height)
    length = int(edge * long / short)
    return (length, edge) if image.width <= image.height else (edge, length)


def in_line(count: int, first: int = 0, *, sees_all: bool = False) -> MediaPiece:
    """Returns a run of ``count`` tokens with consecutive positions, like text."""
    return MediaPiece(np.arange(count)[None], first, sees_all)


@dataclass(frozen=True, slots=True)
class ProcessorOptions:
    """Reads the settings of an image processor, with the defaults of its class. Raises ``BadModelFolder`` for
    values of another type, and ``NotSupported`` for unsupported switches."""

    settings: Mapping[str, Any]
    file: str = field(default="preprocessor_config.json")

    def integer(self, name: str, default: int | None = None) -> int:
        value = self.settings.get(name)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise BadModelFolder(f"{self.file}: {name} must be an integer of at least 0, not {value!r}")
        return value

    def switch(self, name: str, default: bool) -> bool:
        value = self.settings.get(name)
        return default if value is None else bool(value)

    def part(
        self, name: str, default: Mapping[str, Any], meaning: Sequence[str] = ("height", "width")
    ) -> ProcessorOptions:
        """Returns the options in a part. ``meaning``: the names to which a plain number applies, as in old
        files."""
        value = self.settings.get(name)
        value = default if value is None else value
        if isinstance(value, int) and not isinstance(value, bool):
            value = dict.fromkeys(meaning, value)
        if not isinstance(value, dict):
            raise BadModelFolder(f"{self.file}: {name} must be an object, not {value!r}")
        return ProcessorOptions(
            {key: number for key, number in value.items() if number is not None}, self.file
        )

    def number(self, name: str, default: float) -> float:
        value = self.settings.get(name)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
            raise BadModelFolder(f"{self.file}: {name} must be a number of at least 0, not {value!r}")
        return float(value)

    def sampling(self, default: FrameSampling) -> FrameSampling:
        """Reads ``num_frames``, or ``fps``, ``min_frames`` and ``max_frames``."""
        if self.settings.get("num_frames") is not None:
            count = max(self.integer("num_frames"), 1)
            return FrameSampling(count, count)
        most = max(self.integer("max_frames", default.most), 1)
        least = min(self.integer("min_frames", default.least), most)
        return replace(default, least=least, most=most, per_second=self.number("fps", default.per_second))

    def size(self, name: str, default: Mapping[str, int]) -> Size:
        part = self.part(name, default)
        return part.integer("height"), part.integer("width")

    def require(self, *names: str) -> None:
        """Raises ``NotSupported`` if one of the switches is off."""
        for name in names:
            if not self.switch(name, True):
                raise NotSupported(f"{self.file}: {name}: false is not supported")


def vision_config(settings: MediaSettings) -> ProcessorOptions:
    """Returns the settings of the vision tower in ``config.json``, with the defaults of its type."""
    part = settings.model.get("vision_config")
    model = settings.model | {"vision_config": part if isinstance(part, dict) else {}}
    return ProcessorOptions(config_parts.vision_config(model), "config.json: vision_config")


def positions_in_grid(frames: Positions, rows: int, columns: int) -> Positions:
    """Returns the positions [3, tokens] of frames with ``rows`` by ``columns`` tokens: the position of the
    frame in ``frames``, the row and the column."""
    num = len(frames)
    return np.stack(
        [
            np.repeat(frames, rows * columns),
            np.tile(np.repeat(np.arange(rows), columns), num),
            np.tile(np.arange(columns), num * rows),
        ]
    )
