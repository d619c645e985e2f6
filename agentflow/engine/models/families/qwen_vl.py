"""Qwen2.5-VL (arXiv 2502.13923) and Qwen3-VL (arXiv 2511.21631): Qwen 2 and 3 with rotary positions on three
axes, which are time, height and width in images and videos, and equal in text."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from agentflow.engine.models.config import DecoderConfig, RawConfig
from agentflow.engine.models.families.family import Family
from agentflow.engine.models.families.image_text import text_names
from agentflow.engine.models.families.llama import read_qwen2, read_qwen3
from agentflow.engine.models.text_config import text_config
from agentflow.errors import BadModelFolder


def read_qwen2_5_vl(raw: RawConfig) -> DecoderConfig:
    """Adjacent frequencies have one axis."""
    part, sections = _text(raw, [16, 24, 24])
    axes = [axis % 3 for axis, count in enumerate(sections) for _ in range(count)]
    return _with_axes(read_qwen2(part), axes)


def read_qwen3_vl(raw: RawConfig) -> DecoderConfig:
    """The axes take turns, and the lowest frequencies are of time."""
    part, sections = _text(raw, [24, 20, 20])
    axes = [0] * sum(sections)
    for axis in (1, 2):
        for i in range(axis, sections[axis] * 3, 3):
            axes[i] = axis
    return _with_axes(read_qwen3(part), axes)


def _text(raw: RawConfig, default: list[int]) -> tuple[RawConfig, list[int]]:
    """Returns the config of the text model with a plain rope, and the frequencies of each axis."""
    part = text_config(raw)
    parameters: dict[str, Any] = dict(part.get("rope_scaling") or {}) | dict(
        part.get("rope_parameters") or {}
    )
    sections = [int(count) for count in parameters.pop("mrope_section", default)]
    if len(sections) != 3 or min(sections) < 0:
        raise BadModelFolder(f"mrope_section must be 3 numbers, not {sections}", param="mrope_section")
    if parameters.get("rope_type", parameters.get("type")) == "mrope":  # its name in older files
        parameters["rope_type"] = "default"
    return {**part, "rope_scaling": None, "rope_parameters": parameters}, sections


def _with_axes(shape: DecoderConfig, axes: list[int]) -> DecoderConfig:
    if len(axes) != shape.head_dim // 2:
        raise BadModelFolder(
            f"mrope_section has {len(axes)} frequencies, and a head has {shape.head_dim // 2}",
            param="mrope_section",
        )
    return replace(shape, rope_axes=tuple(axes))


_VISION = ("visual.", "model.visual.")
_PLAIN = text_names("model.", "lm_head", *_VISION)
_BELOW = text_names("model.language_model.", "lm_head", *_VISION)

FAMILIES = (
    Family(
        "Qwen2_5_VLForConditionalGeneration",
        "Qwen2.5-VL: text, images and videos",
        read_qwen2_5_vl,
        _PLAIN,
        (_BELOW,),
        gguf=("qwen2vl",),
    ),
    Family(
        "Qwen3VLForConditionalGeneration",
        "Qwen3-VL: text, images and videos",
        read_qwen3_vl,
        _BELOW,
        (_PLAIN,),
        gguf=("qwen3vl",),
    ),
)
