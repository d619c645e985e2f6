"""The settings of a model that reads images: its files ``config.json``, ``preprocessor_config.json`` and
``processor_config.json``, or the metadata of its GGUF files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from agentflow.engine.store.gguf.file import find_gguf, open_gguf
from agentflow.engine.store.model_folder import read_object
from agentflow.errors import BadModelFolder

_CLIP: Final = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
_HALF: Final = (0.5, 0.5, 0.5), (0.5, 0.5, 0.5)
_MEAN_AND_STD: Final = {
    "idefics3": _HALF,
    "smolvlm": _HALF,
    "gemma3": _HALF,
    "siglip": _HALF,
}
"""The mean and deviation in these families' image processors, for configurations without them. The default of
other families is CLIP's."""
_NOT_OF_MEDIA: Final = (
    "text_config",
    "llm_config",
    "id2label",
    "label2id",
    "auto_map",
    "quantization_config",
)
"""Parts of ``config.json`` that do not affect the features of a medium."""


@dataclass(frozen=True, slots=True)
class PixelScaling:
    """How a vision tower scales bytes: ``(pixel * factor - mean) / std``, with a mean and a deviation for
    each of the channels red, green and blue."""

    factor: float
    mean: tuple[float, float, float]
    std: tuple[float, float, float]


class MediaSettings(msgspec.Struct, frozen=True):
    """The configuration files of one model. A dictionary is empty if there is no such file or part."""

    model: dict[str, Any]  # config.json, without the settings of the text model
    image: dict[str, Any]  # preprocessor_config.json, or image_processor in processor_config.json
    video: dict[str, Any]  # video_preprocessor_config.json, or video_processor in processor_config.json
    prompt: dict[str, Any]  # the rest of processor_config.json

    @property
    def family(self) -> str:
        """The model's ``model_type``, such as ``smolvlm``."""
        return str(self.model.get("model_type", ""))

    @property
    def scaling(self) -> PixelScaling:
        """How the model's tower scales pixels."""
        kind = str(self.image.get("image_processor_type", "")).lower()
        family = "siglip" if kind.startswith("siglip") else self.family
        mean, std = _MEAN_AND_STD.get(family, _CLIP)
        rescales, normalises = self.image.get("do_rescale", True), self.image.get("do_normalize", True)
        return PixelScaling(
            _number(self.image, "rescale_factor", 1 / 255) if rescales else 1.0,
            _channels(self.image, "image_mean", mean) if normalises else (0.0, 0.0, 0.0),
            _channels(self.image, "image_std", std) if normalises else (1.0, 1.0, 1.0),
        )


def read_media_settings(folder: Path) -> MediaSettings:
    """Reads the settings of the model in a folder or GGUF file. Raises ``BadModelFolder`` if a file is
    damaged."""
    if (gguf := find_gguf(folder)) is not None:
        file = open_gguf(gguf)
        if file.vision is None:
            return MediaSettings(model={}, image={}, video={}, prompt={})
        return MediaSettings(model=_of_media(file.config), image=file.vision.images, video={}, prompt={})
    prompt = _settings(folder / "processor_config.json")
    model = _settings(folder / "config.json")
    return MediaSettings(
        model=_of_media(model),
        image=_settings(folder / "preprocessor_config.json") or _part(prompt, "image_processor"),
        video=_settings(folder / "video_preprocessor_config.json") or _part(prompt, "video_processor"),
        prompt={key: value for key, value in prompt.items() if not key.endswith("_processor")},
    )


def pixel_scaling(folder: Path) -> PixelScaling:
    """Returns how the tower of the model in ``folder`` scales pixels. Raises ``BadModelFolder`` if a file is
    damaged."""
    return read_media_settings(folder).scaling


def _of_media(config: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in _NOT_OF_MEDIA}


def _settings(file: Path) -> dict[str, Any]:
    return read_object(file) or {}


def _part(settings: dict[str, Any], name: str) -> dict[str, Any]:
    part = settings.get(name)
    return part if isinstance(part, dict) else {}


def _number(settings: dict[str, Any], name: str, default: float) -> float:
    value = settings.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise BadModelFolder(f"preprocessor_config.json: {name} must be a number, not {value!r}")
    return float(value)


def _channels(
    settings: dict[str, Any], name: str, default: tuple[float, float, float]
) -> tuple[float, float, float]:
    value = settings.get(name) or default
    if not isinstance(value, list | tuple) or len(value) != 3:
        raise BadModelFolder(f"preprocessor_config.json: {name} must be 3 numbers, not {value!r}")
    red, green, blue = [_number({name: number}, name, 0.0) for number in value]
    return red, green, blue
