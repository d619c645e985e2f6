"""DeepSeek-V2 and V2-Lite (arXiv 2405.04434): latent attention, routed and shared experts."""

from __future__ import annotations

from dataclasses import replace

from agentflow.engine.models.config import DecoderConfig, ExpertsShape, LatentShape, LayerShape, RawConfig
from agentflow.engine.models.families.family import Family, LatentNames, WeightNames, standard_shape
from agentflow.engine.models.families.mixture import QWEN3_EXPERTS
from agentflow.engine.models.rope import read_rope, rope_parameters, yarn_amplitude
from agentflow.errors import BadModelFolder

NAMES = WeightNames(
    latent=LatentNames(),
    experts=replace(
        QWEN3_EXPERTS,
        shared=("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj", "mlp.shared_experts.down_proj"),
    ),
)


def read_deepseek_v2(raw: RawConfig) -> DecoderConfig:
    """Reads the shape. The first ``first_k_dense_replace`` layers have no experts."""
    latent = LatentShape(
        q_rank=int(raw.get("q_lora_rank") or 0),
        kv_rank=int(raw["kv_lora_rank"]),
        plain_dim=int(raw["qk_nope_head_dim"]),
        rotated_dim=int(raw["qk_rope_head_dim"]),
        value_dim=int(raw["v_head_dim"]),
    )
    shape = standard_shape({**raw, "head_dim": latent.rotated_dim, "num_key_value_heads": None})
    dense = int(raw.get("first_k_dense_replace") or 0)
    return replace(
        shape,
        latent=latent,
        num_kv_heads=1,
        head_dim=latent.pool_dim,
        attention_scale=_scale(raw, latent),
        experts=_experts(raw),
        layers=tuple(LayerShape(is_sparse=i >= dense) for i in range(shape.num_layers)),
    )


def _scale(raw: RawConfig, latent: LatentShape) -> float:
    """Returns the scale of the scores, which depends on yarn's amplitude."""
    scale = float((latent.plain_dim + latent.rotated_dim) ** -0.5)
    rope = read_rope(raw)
    if rope.kind != "default" and (mscale := float(rope_parameters(raw).get("mscale_all_dim") or 0)):
        scale *= yarn_amplitude(rope.factor, mscale) ** 2
    return scale


def _experts(raw: RawConfig) -> ExpertsShape:
    method = raw.get("topk_method") or "greedy"
    if method not in ("greedy", "group_limited_greedy"):
        raise BadModelFolder(f"topk_method {method!r} is not supported", param="topk_method")
    for name, expected in (("scoring_func", "softmax"), ("norm_topk_prob", False), ("moe_layer_freq", 1)):
        if raw.get(name, expected) != expected:
            raise BadModelFolder(f"{name} must be {expected!r}", param=name)
    is_limited = method == "group_limited_greedy"
    return ExpertsShape(
        int(raw["n_routed_experts"]),
        int(raw["num_experts_per_tok"]),
        int(raw["moe_intermediate_size"]),
        normalises=False,
        num_shared=int(raw.get("n_shared_experts") or 0),
        scale=float(raw.get("routed_scaling_factor", 1.0)),
        num_groups=int(raw["n_group"]) if is_limited else 1,
        num_used_groups=int(raw["topk_group"]) if is_limited else 1,
    )


FAMILIES = (
    Family(
        "DeepseekV2ForCausalLM",
        "DeepSeek-V2, V2-Lite and their Coder models",
        read_deepseek_v2,
        NAMES,
        gguf=("deepseek2",),
    ),
)
