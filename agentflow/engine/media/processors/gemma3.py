"""Gemma 3: one square for each image, whose tokens attend to each other in both directions.

Gemma Team, "Gemma 3 technical report", 2025, section 2.1.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

import numpy as np

from agentflow.engine.media.processors.pixels import (
    BILINEAR,
    NO_FRAMES,
    Clip,
    Prepared,
    ProcessorOptions,
    channels_first,
    in_line,
    resize,
)
from agentflow.engine.media.settings import MediaSettings
from agentflow.engine.media_run import MediaPiece
from agentflow.errors import NotSupported

if TYPE_CHECKING:
    from PIL.Image import Image

_BEGIN: Final = "\n\n<start_of_image>"
_END: Final = "<end_of_image>\n\n"


class Gemma3Processor:
    """``pixels`` [1, 3, side, side]; with pan and scan, which is off by default, followed by the crops of a
    long image."""

    image_token = "<start_of_image>"
    video_token = ""
    sampling = NO_FRAMES

    def __init__(self, settings: MediaSettings) -> None:
        options = ProcessorOptions(settings.image)
        options.require("do_resize")
        self._size = options.size("size", {"height": 224, "width": 224})
        self._resample = options.integer("resample", BILINEAR)
        self._num_tokens = ProcessorOptions(settings.model, "config.json").integer("mm_tokens_per_image", 256)
        self._pans = options.switch("do_pan_and_scan", False)
        self._min_crop = options.integer("pan_and_scan_min_crop_size", 256)
        self._max_crops = options.integer("pan_and_scan_max_num_crops", 4)
        self._min_ratio = float(options.settings.get("pan_and_scan_min_ratio_to_activate") or 1.2)

    def prepare_image(self, image: Image) -> Prepared:
        crops = self._crops(image) if self._pans else []
        squares = [channels_first(resize(one, self._size, self._resample)) for one in (image, *crops)]
        pieces: list[str | MediaPiece] = []
        before = "Here is the original image " if crops else ""
        for index in range(len(squares)):
            pieces += before + _BEGIN, in_line(self._num_tokens, index * self._num_tokens, sees_all=True)
            before = _END + (" and here are some crops to help you see better " if not index else " ")
        return Prepared({"pixels": np.stack(squares)}, (*pieces, _END))

    def prepare_video(self, clip: Clip) -> Prepared:
        raise NotSupported("video: models of this family read images, but no videos")

    def _crops(self, image: Image) -> list[Image]:
        """Returns the crops of an image, adjacent along its longer side; none if it is almost square."""
        long, short = max(image.width, image.height), min(image.width, image.height)
        if long / short < self._min_ratio:
            return []
        count = min(long // self._min_crop, math.floor(long / short + 0.5))
        count = min(self._max_crops, max(2, count))
        length = math.ceil(long / count)
        if min(length, short) < self._min_crop:
            return []
        starts = [length * index for index in range(count)]
        if image.width >= image.height:
            boxes = [(start, 0, min(start + length, image.width), image.height) for start in starts]
        else:
            boxes = [(0, start, image.width, min(start + length, image.height)) for start in starts]
        return [image.crop(box) for box in boxes]
