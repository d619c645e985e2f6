"""The values that transformers' config classes have for the fields that a ``config.json`` leaves out.

Published configs leave out values that equal the defaults of the class that wrote them. Fields with the same
default in every family, such as ``hidden_act``, are read with that default instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

Fields = Mapping[str, Any]


def _llama(
    vocab: int, hidden: int, mlp: int, layers: int, heads: int, kv: int | None, context: int, **others: Any
) -> Fields:
    """Returns the sizes of a decoder with the field names of Llama, and ``others``."""
    return {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "max_position_embeddings": context,
        **others,
    }


def _gpt2(vocab: int, hidden: int, layers: int, heads: int, context: int, **others: Any) -> Fields:
    """Returns the sizes of a decoder with the field names of GPT-2, and ``others``."""
    sizes = {"n_embd": hidden, "n_layer": layers, "n_head": heads, "n_positions": context}
    return {"vocab_size": vocab, **sizes, **others}


_GEMMA: Final[dict[str, Any]] = {
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "head_dim": 256,
}
_CAPS: Final = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
_GEMMA2: Final = _llama(256_000, 2304, 9216, 26, 8, 4, 8192, sliding_window=4096, **_CAPS, **_GEMMA)
_MISTRAL: Final = _llama(32_000, 4096, 14_336, 32, 32, 8, 131_072, sliding_window=4096)
_QWEN: Final = _llama(151_936, 4096, 22_016, 32, 32, 32, 32_768, sliding_window=4096, max_window_layers=28)
_GLM: Final = _llama(
    151_552, 4096, 13_696, 40, 32, 2, 131_072, rms_norm_eps=1.5625e-7, partial_rotary_factor=0.5, head_dim=128
)
_OLMO: Final = _llama(50_304, 4096, 11_008, 32, 32, None, 2048, rms_norm_eps=1e-5)
_COHERE: Final = _llama(
    256_000, 8192, 22_528, 40, 64, None, 8192, tie_word_embeddings=True, logit_scale=0.0625
)
_GPT_OSS_YARN: Final = {
    "rope_type": "yarn",
    "factor": 32.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
_SIGLIP: Final = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "image_size": 224,
    "patch_size": 16,
    "hidden_act": "gelu_pytorch_tanh",
    "layer_norm_eps": 1e-6,
}
_QWEN_PATCHES: Final = {"spatial_merge_size": 2, "temporal_patch_size": 2}
_IDEFICS3: Final = {**_SIGLIP, "hidden_size": 1152, "num_attention_heads": 16, "patch_size": 32}
DEFAULTS: Final[Mapping[str, Fields]] = {
    "cohere": {**_COHERE, "rope_theta": 500_000.0},
    "cohere2": {**_COHERE, "sliding_window": 4096},
    "deepseek_v2": _llama(
        *(102_400, 4096, 11_008, 32, 32, None, 2048),
        q_lora_rank=1536,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        n_routed_experts=64,
        n_shared_experts=2,
        moe_intermediate_size=1407,
    ),
    "ernie4_5": _llama(
        *(103_424, 1024, 3072, 18, 16, 2, 131_072),
        rms_norm_eps=1e-5,
        rope_theta=500_000.0,
        tie_word_embeddings=True,
        head_dim=128,
    ),
    "exaone4": _llama(102_400, 4096, 16_384, 32, 32, 32, 2048, rms_norm_eps=1e-5, sliding_window=4096),
    "falcon": {
        "vocab_size": 65_024,
        "hidden_size": 4544,
        "num_hidden_layers": 32,
        "num_attention_heads": 71,
        "max_position_embeddings": 2048,
        "multi_query": True,
        "activation": "gelu",
        "tie_word_embeddings": True,
    },
    "gemma": _llama(
        *(256_000, 3072, 24_576, 28, 16, 16, 8192),
        hidden_act="gelu_pytorch_tanh",
        tie_word_embeddings=True,
        head_dim=256,
    ),
    "gemma2": _GEMMA2,
    "gemma3_text": _llama(
        *(262_208, 2304, 9216, 26, 8, 4, 131_072),
        sliding_window=4096,
        rope_theta=1_000_000.0,
        rope_local_base_freq=10_000.0,
        **_GEMMA,
    ),
    "glm": _GLM,
    "glm4": _GLM,
    "gpt2": _gpt2(50_257, 768, 12, 12, 1024, activation_function="gelu_new", tie_word_embeddings=True),
    "gpt_bigcode": _gpt2(
        *(50_257, 768, 12, 12, 1024),
        activation_function="gelu_pytorch_tanh",
        tie_word_embeddings=True,
        multi_query=True,
    ),
    "gpt_neo": {
        "vocab_size": 50_257,
        "hidden_size": 2048,
        "num_layers": 24,
        "num_heads": 16,
        "max_position_embeddings": 2048,
        "attention_types": [[["global", "local"], 12]],
        "activation_function": "gelu_new",
        "tie_word_embeddings": True,
    },
    "gpt_neox": _llama(50_432, 6144, 24_576, 44, 64, None, 2048, hidden_act="gelu"),
    "gpt_oss": _llama(
        *(201_088, 2880, 2880, 36, 64, 8, 131_072),
        head_dim=64,
        sliding_window=128,
        rms_norm_eps=1e-5,
        num_local_experts=128,
        num_experts_per_tok=4,
        rope_theta=150_000.0,
        rope_parameters=_GPT_OSS_YARN,
    ),
    "gptj": _gpt2(50_400, 4096, 28, 16, 2048, rotary_dim=64, activation_function="gelu_new"),
    "granite": _llama(32_000, 4096, 11_008, 32, 32, None, 2048),
    "helium": _llama(
        48_000, 2560, 7040, 24, 20, 20, 4096, rms_norm_eps=1e-8, rope_theta=100_000.0, head_dim=128
    ),
    "hyperclovax": _llama(32_000, 4096, 11_008, 32, 32, None, 2048),
    "iquestcoder": _llama(76_800, 5120, 27_648, 80, 40, 8, 131_072, rms_norm_eps=1e-5, head_dim=128),
    "internlm3": _llama(128_512, 4096, 10_240, 48, 32, 2, 32_768, rms_norm_eps=1e-5, head_dim=128),
    "llama": _llama(32_000, 4096, 11_008, 32, 32, None, 2048),
    "ministral": _MISTRAL,
    "mistral": _MISTRAL,
    "mixtral": _llama(
        *(32_000, 4096, 14_336, 32, 32, 8, 131_072),
        rms_norm_eps=1e-5,
        rope_theta=1_000_000.0,
        num_local_experts=8,
        num_experts_per_tok=2,
    ),
    "olmo2": _OLMO,
    "olmo3": {**_OLMO, "sliding_window": 4096, "rope_theta": 500_000.0},
    "olmoe": _llama(
        *(50_304, 2048, 2048, 16, 16, None, 4096), rms_norm_eps=1e-5, num_experts=64, num_experts_per_tok=8
    ),
    "opt": {
        "vocab_size": 50_272,
        "hidden_size": 768,
        "ffn_dim": 3072,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "max_position_embeddings": 2048,
        "activation_function": "relu",
        "tie_word_embeddings": True,
    },
    "phi": _llama(51_200, 2048, 8192, 24, 32, None, 2048, hidden_act="gelu_new", partial_rotary_factor=0.5),
    "phi3": _llama(
        *(32_064, 3072, 8192, 32, 32, None, 4096), rms_norm_eps=1e-5, original_max_position_embeddings=4096
    ),
    "qwen2": _QWEN,
    "qwen2_5_vl_text": _llama(
        *(152_064, 8192, 29_568, 80, 64, 8, 32_768),
        rms_norm_eps=1e-5,
        rope_theta=1_000_000.0,
        sliding_window=4096,
        max_window_layers=80,
    ),
    "qwen3": {**_QWEN, "head_dim": 128},
    "qwen3_moe": _llama(
        *(151_936, 2048, 6144, 24, 32, 4, 32_768),
        sliding_window=4096,
        num_experts=128,
        num_experts_per_tok=8,
        moe_intermediate_size=768,
    ),
    "qwen3_vl_text": _llama(151_936, 4096, 22_016, 32, 32, 32, 128_000, rope_theta=500_000.0, head_dim=128),
    "seed_oss": _llama(155_136, 4096, 27_648, 64, 80, 8, 524_288, head_dim=128),
    "smollm3": _llama(
        *(128_256, 2048, 11_008, 36, 16, 4, 32_768), rope_theta=2_000_000.0, tie_word_embeddings=True
    ),
    "stablelm": _llama(50_304, 2560, 6912, 32, 32, 32, 4096, partial_rotary_factor=0.25),
    "starcoder2": _llama(
        *(49_152, 3072, 12_288, 30, 24, 2, 4096), hidden_act="gelu_pytorch_tanh", tie_word_embeddings=True
    ),
    "vaultgemma": _GEMMA2,
    # Vision towers.
    "clip_vision_model": {**_SIGLIP, "patch_size": 32, "hidden_act": "quick_gelu", "layer_norm_eps": 1e-5},
    "idefics3_vision": _IDEFICS3,
    "qwen2_5_vl_vision": {
        "depth": 32,
        "hidden_size": 3584,
        "intermediate_size": 3420,
        "num_heads": 16,
        **_QWEN_PATCHES,
        "patch_size": 14,
        "tokens_per_second": 4,
        "window_size": 112,
        "fullatt_block_indexes": [7, 15, 23, 31],
    },
    "qwen3_vl_vision": {
        "depth": 27,
        "hidden_size": 1152,
        "intermediate_size": 4304,
        "num_heads": 16,
        **_QWEN_PATCHES,
        "patch_size": 16,
        "hidden_act": "gelu_pytorch_tanh",
        "num_position_embeddings": 2304,
        "deepstack_visual_indexes": [8, 16, 24],
    },
    "siglip_vision_model": _SIGLIP,
    "smolvlm_vision": _IDEFICS3,
}
"""The defaults by ``model_type``."""
