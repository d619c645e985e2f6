"""Idefics3 and SmolVLM: images in tiles of SigLIP, text by Llama or SmolLM2."""

from __future__ import annotations

from agentflow.engine.models.families.family import Family
from agentflow.engine.models.families.image_text import read_text_config, text_names

NAMES = text_names("model.text_model.", "lm_head", "model.vision_model.", "model.connector.")

FAMILIES = (
    Family(
        "Idefics3ForConditionalGeneration",
        "Idefics3, SmolVLM: text and images",
        read_text_config,
        NAMES,
    ),
    Family(
        "SmolVLMForConditionalGeneration",
        "SmolVLM2: text and images",
        read_text_config,
        NAMES,
    ),
)
