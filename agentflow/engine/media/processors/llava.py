"""LLaVA-1.5: one square for each image, like CLIP's or SigLIP's image processor.

Liu et al., "Improved baselines with visual instruction tuning", 2023.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentflow.engine.media.processors.pixels import (
    BICUBIC,
    NO_FRAMES,
    Bytes,
    Clip,
    Prepared,
    ProcessorOptions,
    Size,
    channels_first,
    crop_center,
    in_line,
    resize,
    shortest_edge,
    vision_config,
)
from agentflow.engine.media.settings import MediaSettings
from agentflow.errors import BadModelFolder, NotSupported

if TYPE_CHECKING:
    from PIL.Image import Image


class Squares:
    """Turns each image into a square: resizes it to a square, or resizes it by its shorter side and crops it.
    If the settings require it, pads the image to a square with the mean color first."""

    def __init__(self, settings: MediaSettings, options: ProcessorOptions, *, pads: bool = False) -> None:
        options.require("do_resize")
        kind = str(options.settings.get("image_processor_type", ""))
        is_siglip = kind.startswith("Siglip")
        default = {"height": 224, "width": 224} if is_siglip else {"shortest_edge": 224}
        size = options.part("size", default, meaning=["shortest_edge"])
        self._size: Size | None = None
        self._edge = size.integer("shortest_edge", 0)
        if not self._edge:
            self._size = size.integer("height"), size.integer("width")
        self._crop: Size | None = None
        if options.switch("do_center_crop", not is_siglip and bool(self._edge)):
            self._crop = options.size("crop_size", {"height": 224, "width": 224})
        shape = self._crop or self._size
        if shape is None or shape[0] != shape[1]:
            raise BadModelFolder(f"{options.file}: size and crop_size must result in a square")
        self.side = shape[0]
        self._resample = options.integer("resample", BICUBIC)
        self._border: tuple[int, ...] | None = None
        if pads and options.switch("do_pad", False):
            self._border = tuple([int(value * 255) for value in settings.scaling.mean])

    def make(self, image: Image) -> Bytes:
        """Returns the square [3, side, side]."""
        if self._border is not None and image.width != image.height:
            image = _pad_to_square(image, self._border)
        pixels = channels_first(resize(image, self._size or shortest_edge(image, self._edge), self._resample))
        return pixels if self._crop is None else crop_center(pixels, self._crop)


def _pad_to_square(image: Image, color: tuple[int, ...]) -> Image:
    from PIL import Image as images

    side = max(image.width, image.height)
    padded = images.new("RGB", (side, side), color)
    padded.paste(image, ((side - image.width) // 2, (side - image.height) // 2))
    return padded


class LlavaProcessor:
    """``pixels`` [1, 3, side, side]."""

    video_token = ""
    sampling = NO_FRAMES

    def __init__(self, settings: MediaSettings) -> None:
        options = ProcessorOptions(settings.image)
        kind = str(options.settings.get("image_processor_type", ""))
        self._squares = Squares(settings, options, pads=kind.startswith("Llava"))
        self._num_tokens = num_features(settings, self._squares.side)
        self.image_token = str(settings.prompt.get("image_token", "<image>"))

    def prepare_image(self, image: Image) -> Prepared:
        return Prepared({"pixels": self._squares.make(image)[None]}, (in_line(self._num_tokens),))

    def prepare_video(self, clip: Clip) -> Prepared:
        raise NotSupported("video: models of this family read images, but no videos")


def patches_a_side(settings: MediaSettings, side: int) -> int:
    """Returns the number of patches on a side of the vision tower's square."""
    return side // vision_config(settings).integer("patch_size")


def num_features(settings: MediaSettings, side: int) -> int:
    """Returns the number of features of a square. CLIP has a class token before the patches; the strategy
    ``default`` drops the first feature."""
    has_first = vision_config(settings).settings["model_type"] == "clip_vision_model"
    leaves_out = settings.model.get("vision_feature_select_strategy", "default") == "default"
    return patches_a_side(settings, side) ** 2 + int(has_first) - int(leaves_out)
