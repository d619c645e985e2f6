"""Idefics3 and SmolVLM: an image becomes tiles, then the whole image at the size of a tile. A frame of a
video becomes one tile, after its time.

Laurençon et al., "Building and better understanding vision-language models", 2024, section 3.2; Marafioti et
al., "SmolVLM", 2025, section 2.
"""

from __future__ import annotations

import math
from datetime import timedelta
from typing import TYPE_CHECKING, Final

import numpy as np

from agentflow.engine.media.processors.pixels import (
    LANCZOS,
    Bytes,
    Clip,
    FrameSampling,
    Prepared,
    ProcessorOptions,
    Size,
    channels_first,
    cut_squares,
    in_line,
    resize,
    vision_config,
)
from agentflow.engine.media.settings import MediaSettings
from agentflow.engine.media_run import MediaPiece
from agentflow.errors import BadModelFolder, NotSupported

if TYPE_CHECKING:
    from PIL.Image import Image

_MAX_SIDE: Final = 4_096
_AROUND: Final = "<fake_token_around_image>"
_WHOLE: Final = "<global-img>"

_FRAMES: Final = FrameSampling(1, 64, per_second=1.0)


class Idefics3Processor:
    """``pixels`` [tiles, 3, side, side]: the tiles row by row, then the whole image; an image that fits into
    one tile is only that. All tiles have the same number of tokens."""

    image_token = "<image>"

    def __init__(self, settings: MediaSettings) -> None:
        self.video_token = "<video>" if settings.family == "smolvlm" else ""
        options = ProcessorOptions(settings.image)
        options.require("do_resize")
        self._longest = options.part("size", {"longest_edge": 4 * 364}).integer("longest_edge")
        self._side = options.part("max_image_size", {"longest_edge": 364}).integer("longest_edge")
        self._splits = options.switch("do_image_splitting", True)
        self._resample = options.integer("resample", LANCZOS)
        video = ProcessorOptions(settings.video or settings.image, "video_preprocessor_config.json")
        sampling = video.part("video_sampling", {"video_size": dict(video.settings.get("size") or {})})
        self.sampling = sampling.sampling(_FRAMES)
        frame_size = sampling.part("video_size", {})
        self._longest_of_frames = frame_size.integer("longest_edge", self._longest)
        patch = vision_config(settings).integer("patch_size")
        scale = ProcessorOptions(settings.model, "config.json").integer("scale_factor", 2)
        self._num_tokens = (self._side // patch) ** 2 // scale**2
        told = ProcessorOptions(settings.prompt, "processor_config.json").integer(
            "image_seq_len", self._num_tokens
        )
        if told != self._num_tokens:
            raise BadModelFolder(
                f"processor_config.json: image_seq_len is {told}, but a tile of {self._side} pixels has "
                f"{self._num_tokens} tokens"
            )

    def prepare_image(self, image: Image) -> Prepared:
        image = resize(image, self._fitting(image, self._longest), self._resample)
        if not self._splits:
            return self._alone(resize(image, (self._side, self._side), self._resample))
        image = resize(image, self._in_tiles(image), self._resample)
        if image.height == image.width == self._side:
            return self._alone(image)
        whole = channels_first(resize(image, (self._side, self._side), self._resample))
        tiles = cut_squares(channels_first(image), self._side)
        pieces: list[str | MediaPiece] = []
        before = ""
        num_columns = image.width // self._side
        for index in range(len(tiles)):
            row, column = divmod(index, num_columns)
            pieces += f"{before}{_AROUND}<row_{row + 1}_col_{column + 1}>", self._piece(index)
            before = "\n" if column == num_columns - 1 else ""
        pieces += f"\n\n{_AROUND}{_WHOLE}", self._piece(len(tiles)), _AROUND
        return Prepared({"pixels": np.concatenate([tiles, whole[None]])}, tuple(pieces))

    def prepare_video(self, clip: Clip) -> Prepared:
        if not self.video_token:
            raise NotSupported("video: models of this family read images, but no videos")
        duration = timedelta(seconds=int(clip.duration_s))
        pieces: list[str | MediaPiece] = []
        before = (
            f"You are provided the following series of {number_in_words(len(clip))} frames from a {duration} "
            "[H:MM:SS] video.\n"
        )
        frames: list[Bytes] = []
        for frame, seconds in zip(clip.frames, clip.times_s, strict=True):
            fitting = resize(frame, self._fitting(frame, self._longest_of_frames), self._resample)
            frames.append(channels_first(resize(fitting, (self._side, self._side), self._resample)))
            minutes, rest = divmod(int(seconds), 60)
            pieces += (
                f"{before}\nFrame from {minutes:02d}:{rest:02d}:{_AROUND}{_WHOLE}",
                self._piece(len(frames) - 1),
            )
            before = _AROUND
        return Prepared({"pixels": np.stack(frames)}, (*pieces, f"{_AROUND}\n\n"))

    def _alone(self, image: Image) -> Prepared:
        pieces = f"{_AROUND}{_WHOLE}", self._piece(0), _AROUND
        return Prepared({"pixels": channels_first(image)[None]}, pieces)

    def _piece(self, tile: int) -> MediaPiece:
        return in_line(self._num_tokens, tile * self._num_tokens)

    def _fitting(self, image: Image, longest: int) -> Size:
        """Returns the size whose longer edge is ``longest`` and whose other edge is even."""
        height, width, ratio = image.height, image.width, image.width / image.height
        if width >= height:
            width = longest
            height = int(width / ratio)
            height += height % 2
        else:
            height = longest
            width = int(height * ratio)
            width += width % 2
        height, width = max(height, 1), max(width, 1)
        ratio = width / height
        if width >= height and width > _MAX_SIDE:
            height, width = int(_MAX_SIDE / ratio), _MAX_SIDE
        elif height > width and height > _MAX_SIDE:
            height, width = _MAX_SIDE, int(_MAX_SIDE * ratio)
        return max(height, 1), max(width, 1)

    def _in_tiles(self, image: Image) -> Size:
        """Returns the size whose edges are multiples of the tile's side."""
        ratio = image.width / image.height
        if image.width >= image.height:
            width = self._whole_tiles(image.width)
            return self._whole_tiles(int(width / ratio)), width
        height = self._whole_tiles(image.height)
        return height, self._whole_tiles(int(height * ratio))

    def _whole_tiles(self, length: int) -> int:
        return math.ceil(length / self._side) * self._side


_ONES: Final = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen "
    "seventeen eighteen nineteen"
)
_TENS: Final = "twenty thirty forty fifty sixty seventy eighty ninety"


def number_in_words(number: int) -> str:
    """Returns a number below 1,000 in words, as in the model's training.

    >>> number_in_words(8), number_in_words(64), number_in_words(120)
    ('eight', 'sixty-four', 'one hundred and twenty')
    """
    if number >= 100:
        rest = f" and {number_in_words(number % 100)}" if number % 100 else ""
        return f"{number_in_words(number // 100)} hundred{rest}"
    if number < 20:
        return _ONES.split()[number]
    return _TENS.split()[number // 10 - 2] + (f"-{number_in_words(number % 10)}" if number % 10 else "")
