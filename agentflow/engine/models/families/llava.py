"""LLaVA (arXiv 2304.08485, 2310.03744) and its successors: tiles of CLIP or SigLIP and an MLP, text by
several families."""

from __future__ import annotations

from agentflow.engine.models.families.family import Family
from agentflow.engine.models.families.image_text import read_text_config, text_names

_VISION = tuple(
    f"{before}{part}" for before in ("", "model.") for part in ("vision_tower.", "multi_modal_projector.")
)
_NEWLINES = ("image_newline", "model.image_newline")
NAMES = text_names("language_model.model.", "language_model.lm_head", *_VISION, *_NEWLINES)
OTHER_NAMES = text_names("model.language_model.", "lm_head", *_VISION, *_NEWLINES)

FAMILIES = tuple(
    Family(architecture, models, read_text_config, NAMES, (OTHER_NAMES,))
    for architecture, models in (
        ("LlavaForConditionalGeneration", "LLaVA 1.5: text and images"),
        ("LlavaNextForConditionalGeneration", "LLaVA 1.6: text and images"),
        ("LlavaNextVideoForConditionalGeneration", "LLaVA-NeXT-Video: text, images and videos"),
        ("LlavaOnevisionForConditionalGeneration", "LLaVA-OneVision: text, images and videos"),
    )
)
