"""LLaVA-OneVision: tiles of an image, whose features are reduced if there are many; pooled frames of a video.

Li et al., "LLaVA-OneVision: Easy visual task transfer", 2024, section 3.2.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

import numpy as np

from agentflow.engine.media.processors.anyres import (
    ONEVISION_RESOLUTIONS,
    choose_grid,
    cut_tiles,
    features_without_border,
    fewer_features,
    read_resolutions,
)
from agentflow.engine.media.processors.llava import patches_a_side
from agentflow.engine.media.processors.pixels import (
    BICUBIC,
    Clip,
    FrameSampling,
    Prepared,
    ProcessorOptions,
    channels_first,
    in_line,
    resize,
)
from agentflow.engine.media.settings import MediaSettings
from agentflow.errors import BadModelFolder, NotSupported

if TYPE_CHECKING:
    from PIL.Image import Image

_ANY_RESOLUTION: Final = "anyres_max_"
_FRAMES: Final = FrameSampling(32, 32)
"""The sampling of frames in training (section 3.2)."""


class LlavaOnevisionProcessor:
    """An image has ``pixels`` [tiles, 3, side, side], the whole image first, and ``sizes`` [2], its height
    and width. A video has only ``pixels`` [frames, 3, side, side]; its last token is the newline.

    Each image is cut into tiles, even in prompts with several images.
    """

    def __init__(self, settings: MediaSettings) -> None:
        options = ProcessorOptions(settings.image)
        options.require("do_resize")
        self._side, width = options.size("size", {"height": 384, "width": 384})
        if width != self._side:
            raise BadModelFolder(f"{options.file}: size must be a square")
        self._resample = options.integer("resample", BICUBIC)
        self._resolutions = read_resolutions(options, ONEVISION_RESOLUTIONS, self._side)
        self._patches = patches_a_side(settings, self._side)
        if settings.model.get("vision_feature_select_strategy", "full") != "full":
            raise NotSupported("config.json: vision_feature_select_strategy must be full")
        ratio = str(settings.model.get("vision_aspect_ratio", "anyres_max_9"))
        most = ratio.removeprefix(_ANY_RESOLUTION)
        if not ratio.startswith(_ANY_RESOLUTION) or not most.isdecimal():
            raise NotSupported(f"config.json: vision_aspect_ratio must be anyres_max_N, not {ratio!r}")
        self._max_tiles = int(most)
        frames = ProcessorOptions(settings.video or settings.image, "video_preprocessor_config.json")
        self._frame_size = frames.size("size", {"height": self._side, "width": self._side})
        self._frame_resample = frames.integer("resample", BICUBIC)
        self.sampling = ProcessorOptions(settings.video, frames.file).sampling(_FRAMES)
        self.image_token = str(settings.prompt.get("image_token", "<image>"))
        self.video_token = str(settings.prompt.get("video_token", "<video>"))

    def prepare_image(self, image: Image) -> Prepared:
        size = image.height, image.width
        grid = choose_grid(size, self._resolutions, self._side)
        kept = features_without_border(size, grid, self._patches)
        rows, columns = fewer_features(kept, self._max_tiles * self._patches**2)
        return Prepared(
            {
                "pixels": cut_tiles(image, grid, self._side, self._resample),
                "sizes": np.array(size, dtype=np.int64),
            },
            (in_line(self._patches**2 + rows * (columns + 1)),),
        )

    def prepare_video(self, clip: Clip) -> Prepared:
        frames = [
            channels_first(resize(frame, self._frame_size, self._frame_resample)) for frame in clip.frames
        ]
        pooled = math.ceil(self._patches / 2)
        return Prepared({"pixels": np.stack(frames)}, (in_line(len(frames) * pooled**2 + 1),))
