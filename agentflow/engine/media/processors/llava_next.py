"""LLaVA-NeXT and LLaVA-NeXT-Video: tiles of an image, or the frames of a video with pooled features.

Zhang et al., "LLaVA-NeXT: A strong zero-shot video understanding model", 2024.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from agentflow.engine.media.processors.anyres import (
    NEXT_RESOLUTIONS,
    choose_grid,
    cut_tiles,
    features_without_border,
    read_resolutions,
)
from agentflow.engine.media.processors.llava import Squares, num_features, patches_a_side
from agentflow.engine.media.processors.pixels import (
    BICUBIC,
    NO_FRAMES,
    Clip,
    FrameSampling,
    Prepared,
    ProcessorOptions,
    in_line,
)
from agentflow.engine.media.settings import MediaSettings
from agentflow.errors import NotSupported

if TYPE_CHECKING:
    from PIL.Image import Image

_FRAMES: Final = FrameSampling(8, 8)


class LlavaNextProcessor:
    """An image has ``pixels`` [tiles, 3, side, side], the whole image first, and ``sizes`` [2], its height
    and width. A video has only ``pixels`` [frames, 3, side, side]."""

    def __init__(self, settings: MediaSettings) -> None:
        options = ProcessorOptions(settings.image)
        self._side = Squares(settings, options).side
        self._resample = options.integer("resample", BICUBIC)
        self._resolutions = read_resolutions(options, NEXT_RESOLUTIONS, self._side)
        self._patches = patches_a_side(settings, self._side)
        self._num_whole = num_features(settings, self._side)
        self.image_token = str(settings.prompt.get("image_token", "<image>"))
        self.video_token = ""
        self.sampling = NO_FRAMES
        if settings.family == "llava_next_video":
            self.video_token = str(settings.prompt.get("video_token", "<video>"))
            stride = ProcessorOptions(settings.model, "config.json").integer("spatial_pool_stride", 2)
            self._frames = Squares(settings, ProcessorOptions(settings.video or settings.image))
            self.sampling = ProcessorOptions(settings.video, "video_preprocessor_config.json").sampling(
                _FRAMES
            )
            self._num_pooled = (patches_a_side(settings, self._frames.side) // stride) ** 2

    def prepare_image(self, image: Image) -> Prepared:
        size = image.height, image.width
        grid = choose_grid(size, self._resolutions, self._side)
        rows, columns = features_without_border(size, grid, self._patches)
        return Prepared(
            {
                "pixels": cut_tiles(image, grid, self._side, self._resample),
                "sizes": np.array(size, dtype=np.int64),
            },
            (in_line(self._num_whole + rows * (columns + 1)),),
        )

    def prepare_video(self, clip: Clip) -> Prepared:
        if not self.video_token:
            raise NotSupported("video: models of this family read images, but no videos")
        pixels = np.stack([self._frames.make(frame) for frame in clip.frames])
        return Prepared({"pixels": pixels}, (in_line(len(pixels) * self._num_pooled),))
