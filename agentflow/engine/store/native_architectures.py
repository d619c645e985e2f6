"""The architectures of models that run natively, as in ``config.json``. Needs no torch."""

from __future__ import annotations

from typing import Final

NATIVE_ARCHITECTURES: Final = frozenset(
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
        "Gemma3ForConditionalGeneration",
        "GemmaForCausalLM",
        "Glm4ForCausalLM",
        "GlmForCausalLM",
        "GptOssForCausalLM",
        "GraniteForCausalLM",
        "HeliumForCausalLM",
        "HyperCLOVAXForCausalLM",
        "Idefics3ForConditionalGeneration",
        "InternLM3ForCausalLM",
        "LlamaForCausalLM",
        "LlavaForConditionalGeneration",
        "LlavaNextForConditionalGeneration",
        "LlavaNextVideoForConditionalGeneration",
        "LlavaOnevisionForConditionalGeneration",
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
        "Qwen2_5_VLForConditionalGeneration",
        "Qwen3ForCausalLM",
        "Qwen3MoeForCausalLM",
        "Qwen3VLForConditionalGeneration",
        "SeedOssForCausalLM",
        "SmolLM3ForCausalLM",
        "SmolVLMForConditionalGeneration",
        "StableLmForCausalLM",
        "Starcoder2ForCausalLM",
        "VaultGemmaForCausalLM",
    }
)
"""The keys of ``families/registry.FAMILIES``."""

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
