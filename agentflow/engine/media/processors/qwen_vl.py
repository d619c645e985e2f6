"""Qwen2-VL, Qwen2.5-VL and Qwen3-VL: images of any size, whose tokens have positions on three axes.

Wang et al., "Qwen2-VL", 2024, section 2.1; Bai et al., "Qwen2.5-VL technical report", 2025, section 2.1.2.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from agentflow.engine.media.processors.pixels import (
    BICUBIC,
    Clip,
    FrameSampling,
    Prepared,
    ProcessorOptions,
    Size,
    channels_first,
    positions_in_grid,
    resize,
    vision_config,
)
from agentflow.engine.media.settings import MediaSettings
from agentflow.engine.media_run import MediaPiece, Positions
from agentflow.errors import BadArgument

if TYPE_CHECKING:
    from PIL.Image import Image

_MAX_RATIO = 200


class QwenVLProcessor:
    """``pixels`` [frames, 3, height, width] and ``grid`` [3]: the patches in time, height and width before
    merging. An image is one frame, which the tower repeats for all frames of a patch. The last frame of a
    video is repeated here to fill its patch."""

    image_token = "<|image_pad|>"
    video_token = "<|video_pad|>"

    def __init__(self, settings: MediaSettings) -> None:
        options = ProcessorOptions(settings.image)
        options.require("do_resize")
        self._is_third = settings.family == "qwen3_vl"
        vision = vision_config(settings)
        self._patch = options.integer("patch_size", vision.integer("patch_size"))
        self._merge = options.integer("merge_size", vision.integer("spatial_merge_size"))
        self._time_patch = options.integer("temporal_patch_size", vision.integer("temporal_patch_size"))
        self._per_second = 0 if self._is_third else vision.integer("tokens_per_second")
        self._resample = options.integer("resample", BICUBIC)
        self._least, self._most = _pixel_limits(options, 56 * 56, 28 * 28 * 1_280)
        unit = 32 * 32 if self._is_third else 28 * 28
        video = ProcessorOptions(settings.video or settings.image, "video_preprocessor_config.json")
        multiple = 1 if self._is_third else self._time_patch
        self.sampling = video.sampling(FrameSampling(4, 768, per_second=2.0, multiple=multiple))
        self._least_video, self._most_video = _pixel_limits(video, 128 * unit, 768 * unit)

    def prepare_image(self, image: Image) -> Prepared:
        size = self._fitting((image.height, image.width), self._least, self._most)
        rows, columns = size[0] // self._patch, size[1] // self._patch
        return Prepared(
            {
                "pixels": channels_first(resize(image, size, self._resample))[None],
                "grid": np.array([1, rows, columns], dtype=np.int64),
            },
            (MediaPiece(self._positions(np.zeros(1, dtype=np.int64), rows, columns)),),
        )

    def prepare_video(self, clip: Clip) -> Prepared:
        size = self._fitting_frames(clip)
        frames = [channels_first(resize(frame, size, self._resample)) for frame in clip.frames]
        frames += frames[-1:] * (-len(frames) % self._time_patch)
        num_times = len(frames) // self._time_patch
        rows, columns = size[0] // self._patch, size[1] // self._patch
        return Prepared(
            {"pixels": np.stack(frames), "grid": np.array([num_times, rows, columns], dtype=np.int64)},
            self._video_pieces(clip, num_times, rows, columns),
        )

    def _video_pieces(
        self, clip: Clip, num_times: int, rows: int, columns: int
    ) -> tuple[str | MediaPiece, ...]:
        if not self._is_third:
            sampled_fps = len(clip) / clip.duration_s
            interval = np.float32(self._per_second * self._time_patch / sampled_fps)
            times = (np.arange(num_times, dtype=np.float32) * interval).astype(np.int64)
            return (MediaPiece(self._positions(times, rows, columns)),)
        pieces: list[str | MediaPiece] = []
        seconds = [*clip.times_s] + [clip.times_s[-1]] * (-len(clip.times_s) % self._time_patch)
        end = ""
        positions = self._positions(np.zeros(1, dtype=np.int64), rows, columns)
        for index in range(num_times):
            first = seconds[index * self._time_patch]
            last = seconds[index * self._time_patch + self._time_patch - 1]
            pieces += (
                f"{end}<{(first + last) / 2:.1f} seconds><|vision_start|>",
                MediaPiece(positions, index * len(positions[0])),
            )
            end = "<|vision_end|>"
        return (*pieces, end)

    def _positions(self, times: Positions, rows: int, columns: int) -> Positions:
        return positions_in_grid(times, rows // self._merge, columns // self._merge)

    def _fitting_frames(self, clip: Clip) -> Size:
        if not self._is_third:
            return self._fitting(clip.size, self._least_video, self._most_video)
        # Qwen3-VL limits the pixels of all frames together.
        count = max(len(clip), self._time_patch)
        rounded = round(count / self._time_patch) * self._time_patch
        return self._fitting(clip.size, self._least_video, self._most_video, count, rounded)

    def _fitting(self, size: Size, least: int, most: int, count: int = 1, rounded: int = 1) -> Size:
        """Returns the size in multiples of a merged patch, within limits of pixels.

        Args:
            size: the height and width of an image or frame.
            least: the least number of pixels.
            most: the largest number of pixels.
            count: the number of frames to which the limits apply together.
            rounded: ``count`` rounded to whole patches.
        """
        unit = self._patch * self._merge
        height, width = size
        if count > 1 and min(height, width) < unit:
            scale = max(unit / height, unit / width)
            height, width = int(height * scale), int(width * scale)
        if max(height, width) / min(height, width) > _MAX_RATIO:
            raise BadArgument(
                f"image: one side of {width:,} x {height:,} pixels is more than {_MAX_RATIO} times the other",
                param="image",
            )
        rows, columns = round(height / unit) * unit, round(width / unit) * unit
        if rounded * rows * columns > most:
            shrink = math.sqrt(count * height * width / most)
            rows = max(unit, math.floor(height / shrink / unit) * unit)
            columns = max(unit, math.floor(width / shrink / unit) * unit)
        elif rounded * rows * columns < least:
            grow = math.sqrt(least / (count * height * width))
            rows, columns = math.ceil(height * grow / unit) * unit, math.ceil(width * grow / unit) * unit
        return rows, columns


def _pixel_limits(options: ProcessorOptions, least: int, most: int) -> tuple[int, int]:
    size = options.part("size", {"shortest_edge": least, "longest_edge": most})
    return (
        options.integer("min_pixels", size.integer("shortest_edge", least)),
        options.integer("max_pixels", size.integer("longest_edge", most)),
    )
