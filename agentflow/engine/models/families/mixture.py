"""Mixtral (arXiv 2401.04088) and Qwen3-MoE (arXiv 2505.09388): the Llama shape with a mixture of experts."""

from __future__ import annotations

from dataclasses import replace

from agentflow.engine.models.config import DecoderConfig, ExpertsShape, RawConfig
from agentflow.engine.models.families.family import ExpertNames, Family, WeightNames
from agentflow.engine.models.families.llama import read_mistral, read_qwen3

MIXTRAL = WeightNames(
    experts=ExpertNames(
        router="block_sparse_moe.gate",
        gate="block_sparse_moe.experts.{}.w1",
        up="block_sparse_moe.experts.{}.w3",
        down="block_sparse_moe.experts.{}.w2",
    )
)
QWEN3 = WeightNames(
    experts=ExpertNames(
        router="mlp.gate",
        gate="mlp.experts.{}.gate_proj",
        up="mlp.experts.{}.up_proj",
        down="mlp.experts.{}.down_proj",
    )
)


def read_mixtral(raw: RawConfig) -> DecoderConfig:
    shape = read_mistral({"rms_norm_eps": 1e-5} | dict(raw))
    experts = ExpertsShape(
        int(raw["num_local_experts"]), int(raw.get("num_experts_per_tok", 2)), shape.intermediate_size
    )
    layers = tuple(replace(shape.layer(i), is_sparse=True) for i in range(shape.num_layers))
    return replace(shape, experts=experts, layers=layers)


def read_qwen3_moe(raw: RawConfig) -> DecoderConfig:
    """Some layers may have a plain MLP instead."""
    shape = read_qwen3(raw)
    experts = ExpertsShape(
        int(raw.get("num_experts") or raw["num_local_experts"]),
        int(raw["num_experts_per_tok"]),
        int(raw["moe_intermediate_size"]),
        bool(raw.get("norm_topk_prob", False)),
    )
    dense, step = set(raw.get("mlp_only_layers") or ()), int(raw.get("decoder_sparse_step", 1))
    layers = tuple(
        replace(shape.layer(i), is_sparse=i not in dense and (i + 1) % step == 0)
        for i in range(shape.num_layers)
    )
    return replace(shape, experts=experts, layers=layers)


FAMILIES = (
    Family("MixtralForCausalLM", "Mixtral", read_mixtral, MIXTRAL, gguf=("llama",)),
    Family("Qwen3MoeForCausalLM", "Qwen3 with experts", read_qwen3_moe, QWEN3, gguf=("qwen3moe",)),
)
