"""Models that read images and text: Idefics3 and SmolVLM (tiles of SigLIP), LLaVA (arXiv 2304.08485,
2310.03744) and its successors (tiles of CLIP or SigLIP), Qwen2.5-VL (arXiv 2502.13923) and Qwen3-VL (arXiv
2511.21631). The towers are in ``vision``; the text model is one of the other families.

The rotary positions of Qwen's models have three axes: time, height and width. In text, the three positions
of a token are equal."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Final

from agentflow.engine.models.config import DecoderConfig, RawConfig
from agentflow.engine.models.families.family import Family, WeightNames
from agentflow.engine.models.families.llama import read_llama, read_mistral, read_qwen2, read_qwen3
from agentflow.engine.models.rope import rope_parameters
from agentflow.errors import BadModelFolder

_READERS: Final[dict[str, Callable[[RawConfig], DecoderConfig]]] = {
    "llama": read_llama,
    "mistral": read_mistral,
    "qwen2": read_qwen2,
    "qwen3": read_qwen3,
}


_MAX_FREQUENCIES: Final = 1 << 20  # of a head


def _names(prefix: str, head: str, *vision: str) -> WeightNames:
    """Returns the names of a text model below a prefix. ``vision``: the prefixes of all other tensors, which
    belong to the tower."""
    return WeightNames(
        embedding=f"{prefix}embed_tokens",
        layers=f"{prefix}layers.{{}}.",
        final_norm=f"{prefix}norm",
        head=head,
        ignored_parts=vision,
    )


IDEFICS3 = _names("model.text_model.", "lm_head", "model.vision_model.", "model.connector.")
_LLAVA_VISION = tuple(
    f"{before}{part}"
    for before in ("", "model.")
    for part in ("vision_tower.", "multi_modal_projector.", "image_newline")
)
LLAVA = _names("language_model.model.", "language_model.lm_head", *_LLAVA_VISION)
LLAVA_BELOW = _names("model.language_model.", "lm_head", *_LLAVA_VISION)
QWEN = _names("model.", "lm_head", "visual.", "model.visual.")
QWEN_BELOW = _names("model.language_model.", "lm_head", "visual.", "model.visual.")


def read_text_config(raw: RawConfig) -> DecoderConfig:
    """Reads the text model, which may be of several types."""
    kind = str(raw.get("model_type"))
    if kind not in _READERS:
        raise BadModelFolder(
            f"its text model is {kind!r}, and only {', '.join(_READERS)} can be run with images",
            param="text_config",
        )
    return _READERS[kind](raw)


def read_qwen2_5_vl(raw: RawConfig) -> DecoderConfig:
    """Reads the shape. Each axis has a range of adjacent frequencies."""
    part, sections = _qwen_text(raw, [16, 24, 24])
    axes = [axis % 3 for axis, count in enumerate(sections) for _ in range(count)]
    return _with_axes(read_qwen2(part), axes)


def read_qwen3_vl(raw: RawConfig) -> DecoderConfig:
    """Reads the shape. The axes are interleaved, and the lowest frequencies belong to time."""
    part, sections = _qwen_text(raw, [24, 20, 20])
    axes = [0] * sum(sections)
    for axis in (1, 2):
        for i in range(axis, sections[axis] * 3, 3):
            axes[i] = axis
    return _with_axes(read_qwen3({**part, "use_sliding_window": False}), axes)


def _qwen_text(raw: RawConfig, default: list[int]) -> tuple[RawConfig, list[int]]:
    """Returns the config of the text model with a plain rope, and the number of frequencies of each axis."""
    parameters = rope_parameters(raw)
    sections = [int(count) for count in parameters.pop("mrope_section", default)]
    if len(sections) != 3 or min(sections) < 0 or sum(sections) > _MAX_FREQUENCIES:
        raise BadModelFolder(f"mrope_section must be 3 sizes, not {sections}", param="mrope_section")
    if parameters.get("rope_type", parameters.get("type")) == "mrope":  # its name in older files
        parameters["rope_type"] = "default"
    return {**raw, "rope_scaling": None, "rope_parameters": parameters}, sections


def _with_axes(shape: DecoderConfig, axes: list[int]) -> DecoderConfig:
    if len(axes) != shape.head_dim // 2:
        raise BadModelFolder(
            f"mrope_section has {len(axes)} frequencies, and a head has {shape.head_dim // 2}",
            param="mrope_section",
        )
    return replace(shape, rope_axes=tuple(axes))


FAMILIES = (
    *(
        Family(architecture, models, read_text_config, IDEFICS3)
        for architecture, models in (
            ("Idefics3ForConditionalGeneration", "Idefics3, SmolVLM: text and images"),
            ("SmolVLMForConditionalGeneration", "SmolVLM2: text and images"),
        )
    ),
    *(
        Family(architecture, models, read_text_config, LLAVA, (LLAVA_BELOW,))
        for architecture, models in (
            ("LlavaForConditionalGeneration", "LLaVA 1.5: text and images"),
            ("LlavaNextForConditionalGeneration", "LLaVA 1.6: text and images"),
            ("LlavaNextVideoForConditionalGeneration", "LLaVA-NeXT-Video: text, images and videos"),
            ("LlavaOnevisionForConditionalGeneration", "LLaVA-OneVision: text, images and videos"),
        )
    ),
    Family(
        "Qwen2_5_VLForConditionalGeneration",
        "Qwen2.5-VL: text, images and videos",
        read_qwen2_5_vl,
        QWEN,
        (QWEN_BELOW,),
        gguf=("qwen2vl",),
    ),
    Family(
        "Qwen3VLForConditionalGeneration",
        "Qwen3-VL: text, images and videos",
        read_qwen3_vl,
        QWEN_BELOW,
        (QWEN,),
        gguf=("qwen3vl",),
    ),
)
