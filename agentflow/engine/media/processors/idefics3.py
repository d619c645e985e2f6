"""Idefics3 and SmolVLM: an image is cut into tiles, in front of the whole image in the size of a tile.

Laurençon et al., "Building and better understanding vision-language models", 2024, section 3.2.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

import numpy as np

from agentflow.engine.media.processors.pixels import (
    LANCZOS,
    Clip,
    Options,
    Prepared,
    Size,
    channels_first,
    cut,
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


class Idefics3Processor:
    """``pixels`` [tiles, 3, side, side]: the tiles row by row, then the whole image; only the whole image if
    it fits into one tile. All tiles have the same number of tokens."""

    image_token = "<image>"
    video_token = ""

    def __init__(self, settings: MediaSettings) -> None:
        options = Options(settings.image)
        options.require("do_resize")
        self._longest = options.part("size", {"longest_edge": 4 * 364}).integer("longest_edge")
        self._side = options.part("max_image_size", {"longest_edge": 364}).integer("longest_edge")
        self._splits = options.switch("do_image_splitting", True)
        self._resample = options.integer("resample", LANCZOS)
        patch = vision_config(settings).integer("patch_size", 32)
        scale = Options(settings.model, "config.json").integer("scale_factor", 2)
        self._num_tokens = (self._side // patch) ** 2 // scale**2
        told = Options(settings.prompt, "processor_config.json").integer("image_seq_len", self._num_tokens)
        if told != self._num_tokens:
            raise BadModelFolder(
                f"processor_config.json: image_seq_len is {told}, but a tile of {self._side} pixels has "
                f"{self._num_tokens} tokens"
            )

    def prepare_image(self, image: Image) -> Prepared:
        image = resize(image, self._fitting(image), self._resample)
        if not self._splits:
            return self._alone(resize(image, (self._side, self._side), self._resample))
        image = resize(image, self._in_tiles(image), self._resample)
        if image.height == image.width == self._side:
            return self._alone(image)
        whole = channels_first(resize(image, (self._side, self._side), self._resample))
        tiles = cut(channels_first(image), self._side)
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
        raise NotSupported("video: models of this family read images, and no videos")

    def _alone(self, image: Image) -> Prepared:
        pieces = f"{_AROUND}{_WHOLE}", self._piece(0), _AROUND
        return Prepared({"pixels": channels_first(image)[None]}, pieces)

    def _piece(self, tile: int) -> MediaPiece:
        return in_line(self._num_tokens, tile * self._num_tokens)

    def _fitting(self, image: Image) -> Size:
        """The size with the configured longest edge; the other edge is even."""
        height, width, ratio = image.height, image.width, image.width / image.height
        if width >= height:
            width = self._longest
            height = int(width / ratio)
            height += height % 2
        else:
            height = self._longest
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
        """The size whose edges are multiples of the tile's side."""
        ratio = image.width / image.height
        if image.width >= image.height:
            width = self._whole_tiles(image.width)
            return self._whole_tiles(int(width / ratio)), width
        height = self._whole_tiles(image.height)
        return height, self._whole_tiles(int(height * ratio))

    def _whole_tiles(self, length: int) -> int:
        return math.ceil(length / self._side) * self._side
