"""The architectures of models that run natively, as in ``config.json``. Needs no torch."""

from __future__ import annotations

from typing import Final

IMAGE_ARCHITECTURES: Final = frozenset(
    {
        "Gemma3ForConditionalGeneration",
        "Idefics3ForConditionalGeneration",
        "LlavaForConditionalGeneration",
        "LlavaNextForConditionalGeneration",
        "LlavaNextVideoForConditionalGeneration",
        "LlavaOnevisionForConditionalGeneration",
        "Qwen2_5_VLForConditionalGeneration",
        "Qwen3VLForConditionalGeneration",
        "SmolVLMForConditionalGeneration",
    }
)
"""The architectures that read images: the keys of ``vision/loading.TOWERS``."""

NATIVE_ARCHITECTURES: Final = IMAGE_ARCHITECTURES | frozenset(
    {
        "Cohere2ForCausalLM",
        "CohereForCausalLM",
        "DeepseekV2ForCausalLM",
        "Ernie4_5ForCausalLM",
        "Exaone4ForCausalLM",
        "FalconForCausalLM",
        "GPT2LMHeadModel",
        "GPTBigCodeForCausalLM",
        "GPTJForCausalLM",
        "GPTNeoForCausalLM",
        "GPTNeoXForCausalLM",
        "Gemma2ForCausalLM",
        "Gemma3ForCausalLM",
        "GemmaForCausalLM",
        "Glm4ForCausalLM",
        "GlmForCausalLM",
        "GptOssForCausalLM",
        "GraniteForCausalLM",
        "HeliumForCausalLM",
        "HyperCLOVAXForCausalLM",
        "InternLM3ForCausalLM",
        "LlamaForCausalLM",
        "MinistralForCausalLM",
        "MistralForCausalLM",
        "MixtralForCausalLM",
        "OPTForCausalLM",
        "Olmo2ForCausalLM",
        "Olmo3ForCausalLM",
        "OlmoeForCausalLM",
        "Phi3ForCausalLM",
        "PhiForCausalLM",
        "Qwen2ForCausalLM",
        "Qwen3ForCausalLM",
        "Qwen3MoeForCausalLM",
        "SeedOssForCausalLM",
        "SmolLM3ForCausalLM",
        "StableLmForCausalLM",
        "Starcoder2ForCausalLM",
        "VaultGemmaForCausalLM",
    }
)
"""The keys of ``families/registry.FAMILIES``."""

OTHER_NAMES: Final = {"Ernie4_5_ForCausalLM": "Ernie4_5ForCausalLM"}
"""The names of native architectures in older configs."""
