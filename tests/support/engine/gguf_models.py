"""Writes a model folder of transformers as a GGUF file, like llama.cpp's own conversion.

The names come from the ``gguf`` package; the changes for each architecture (order of rows, shifted norms,
stacked experts) are written here once more, from the model's side.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import MODEL_ARCH, GGMLQuantizationType, GGUFWriter
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

Array = NDArray[np.float32]

ARCHITECTURES = {
    "llama": MODEL_ARCH.LLAMA,
    "mistral": MODEL_ARCH.LLAMA,
    "mixtral": MODEL_ARCH.LLAMA,
    "qwen2": MODEL_ARCH.QWEN2,
    "qwen3": MODEL_ARCH.QWEN3,
    "qwen3_moe": MODEL_ARCH.QWEN3MOE,
    "smollm3": MODEL_ARCH.SMOLLM3,
    "granite": MODEL_ARCH.GRANITE,
    "seed_oss": MODEL_ARCH.SEED_OSS,
    "olmo2": MODEL_ARCH.OLMO2,
    "olmo3": MODEL_ARCH.OLMO2,
    "exaone4": MODEL_ARCH.EXAONE4,
    "glm4": MODEL_ARCH.GLM4,
    "ernie4_5": MODEL_ARCH.ERNIE4_5,
    "olmoe": MODEL_ARCH.OLMOE,
    "gemma": MODEL_ARCH.GEMMA,
    "phi3": MODEL_ARCH.PHI3,
    "gemma2": MODEL_ARCH.GEMMA2,
    "gemma3_text": MODEL_ARCH.GEMMA3,
    "gpt_oss": MODEL_ARCH.GPT_OSS,
    "gpt2": MODEL_ARCH.GPT2,
    "gpt_bigcode": MODEL_ARCH.STARCODER,
    "deepseek_v2": MODEL_ARCH.DEEPSEEK2,
    "starcoder2": MODEL_ARCH.STARCODER2,
    "phi": MODEL_ARCH.PHI2,
    "gpt_neox": MODEL_ARCH.GPTNEOX,
    "falcon": MODEL_ARCH.FALCON,
    "stablelm": MODEL_ARCH.STABLELM,
    "cohere": MODEL_ARCH.COMMAND_R,
    "cohere2": MODEL_ARCH.COHERE2,
    "qwen2_5_vl_text": MODEL_ARCH.QWEN2VL,
    "qwen3_vl_text": MODEL_ARCH.QWEN3VL,
}
PAIRED = ("llama", "mistral", "mixtral", "smollm3", "granite")
SHIFTED = ("gemma", "gemma2", "gemma3_text")
TRANSPOSING = ("gpt2", "gpt_oss")
TRANSPOSED = ("c_attn.weight", "c_proj.weight", "c_fc.weight", "experts.gate_up_proj", "experts.down_proj")


def write_gguf(
    folder: Path,
    file: Path,
    kind: str = "F32",
    *,
    vocabulary: Callable[[GGUFWriter], None] | None = None,
    changes: Mapping[str, Any] | None = None,
    is_absorbed: bool = False,
) -> None:
    """The model of ``folder`` with its matrices in the type ``kind``; rows that this type cannot hold,
    routers and vectors stay float32. ``vocabulary`` writes the tokenizer. ``changes``: metadata that is
    replaced, or left out if None. ``is_absorbed``: latent attention in the form of newer files."""
    config = json.loads((folder / "config.json").read_text()) | {"is_absorbed": is_absorbed}
    weights = load_file(folder / "model.safetensors")
    write_model(config, weights, file, kind, vocabulary=vocabulary, changes=changes)


def write_model(
    config: dict[str, Any],
    weights: dict[str, Array],
    file: Path,
    kind: str = "F32",
    *,
    vocabulary: Callable[[GGUFWriter], None] | None = None,
    changes: Mapping[str, Any] | None = None,
) -> None:
    """The same of a model that has this config and these weights."""
    architecture = ARCHITECTURES[config["model_type"]]
    writer = GGUFWriter(file, gguf.MODEL_ARCH_NAMES[architecture])
    _write_config(writer, config)
    ends = config["eos_token_id"]
    ends = ends if isinstance(ends, list) else [ends]
    writer.add_eos_token_id(ends[0])
    if len(ends) > 1:
        writer.add_eot_token_id(ends[1])
    if vocabulary is not None:
        vocabulary(writer)
    for key, value in (changes or {}).items():
        writer.kv_data[0].pop(key, None)
        if value is not None:
            writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value))
    num_layers = config.get("num_hidden_layers") or config["n_layer"]
    names = gguf.get_tensor_name_map(architecture, num_layers)
    for name, values in _stored(weights, config):
        stored_name = names.get_name(name, (".weight", ".bias")) or name
        stored_kind = kind_of(stored_name, values, kind)
        data = gguf.quantize(np.ascontiguousarray(values), stored_kind)
        writer.add_tensor(stored_name, data, raw_dtype=stored_kind)
    for name, factors in _rope_tensors(config):
        writer.add_tensor(name, factors)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_vocabulary(folder: Path, writer: GGUFWriter) -> None:
    """The tokenizer of ``folder``, which is one of GPT-2's kind."""
    spec = json.loads((folder / "tokenizer.json").read_text())
    special = {token["content"] for token in spec["added_tokens"]}
    tokens = sorted(spec["model"]["vocab"], key=spec["model"]["vocab"].get)
    later = {token["id"]: token["content"] for token in spec["added_tokens"] if token["id"] >= len(tokens)}
    tokens += [later[number] for number in sorted(later)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in special else 1 for token in tokens])
    writer.add_token_merges([" ".join(merge) for merge in spec["model"]["merges"]])
    writer.add_add_bos_token(False)


def round_weights(folder: Path, kind: str) -> None:
    """Rounds the weights of ``folder`` to values of a GGUF file of that type."""
    weights = load_file(folder / "model.safetensors")
    kind_of_model = json.loads((folder / "config.json").read_text())["model_type"]
    for name, values in weights.items():
        is_transposed = kind_of_model in TRANSPOSING and name.endswith(TRANSPOSED)
        rows = values.swapaxes(-1, -2) if is_transposed else values
        rounding = kind_of("router" if _is_router(name) else name, rows, kind)
        rows = gguf.dequantize(gguf.quantize(np.ascontiguousarray(rows), rounding), rounding)
        rounded = rows.swapaxes(-1, -2) if is_transposed else rows
        weights[name] = np.ascontiguousarray(rounded, dtype=np.float32).reshape(values.shape)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def kind_of(name: str, values: NDArray[Any], kind: str) -> GGMLQuantizationType:
    """The type in which a tensor is stored."""
    wanted = GGMLQuantizationType[kind]
    per_block = gguf.GGML_QUANT_SIZES[wanted][0]
    is_matrix = values.ndim > 1 and not name.endswith((".bias", "_bias"))
    fits = is_matrix and values.shape[-1] % per_block == 0 and not _is_router(name)
    return wanted if fits else GGMLQuantizationType.F32


def _is_router(name: str) -> bool:
    return name.endswith(("router", "ffn_gate_inp.weight", "mlp.gate.weight", "router.weight")) or (
        "block_sparse_moe.gate" in name
    )


def _write_config(writer: GGUFWriter, config: dict[str, Any]) -> None:
    if config["model_type"] in ("gpt2", "gpt_bigcode"):
        writer.add_context_length(config["n_positions"])
        writer.add_embedding_length(config["n_embd"])
        writer.add_block_count(config["n_layer"])
        writer.add_feed_forward_length(4 * config["n_embd"])
        writer.add_head_count(config["n_head"])
        writer.add_layer_norm_eps(config["layer_norm_epsilon"])
        if config["model_type"] == "gpt_bigcode":
            writer.add_head_count_kv(1)
        return
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    if config["model_type"] == "falcon":
        config["num_key_value_heads"] = _falcon_kv_heads(config)
        config["intermediate_size"] = config["ffn_hidden_size"]
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(1 if config["is_absorbed"] else config["num_key_value_heads"] or heads)
    for name in ("norm_epsilon", "layer_norm_eps", "layer_norm_epsilon"):
        if name in config:
            writer.add_layer_norm_eps(config[name])
    if "rms_norm_eps" in config:
        writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    if config["model_type"] == "deepseek_v2":
        _write_deepseek2(writer, config)
        return
    if config.get("head_dim"):
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    _write_rope(writer, config, head_dim)
    match config["model_type"]:
        case "llama" | "mistral" | "mixtral" | "smollm3":
            writer.add_vocab_size(config["vocab_size"])
            writer.add_rope_dimension_count(head_dim)
            if config.get("sliding_window"):
                writer.add_sliding_window(config["sliding_window"])
        case "gemma2" | "gemma3_text" | "gpt_oss":
            if config["model_type"] != "gpt_oss":
                for cap, add in (
                    ("attn_logit_softcapping", writer.add_attn_logit_softcapping),
                    ("final_logit_softcapping", writer.add_final_logit_softcapping),
                ):
                    if config.get(cap):
                        add(config[cap])
            writer.add_sliding_window(config["sliding_window"])
        case "olmo3" | "exaone4":
            if config["sliding_window"]:
                writer.add_sliding_window(config["sliding_window"])
        case "granite":
            writer.add_attention_scale(config["attention_multiplier"])
            writer.add_embedding_scale(config["embedding_multiplier"])
            writer.add_residual_scale(config["residual_multiplier"])
            writer.add_logit_scale(config["logits_scaling"])
        case "phi3":
            writer.add_sliding_window(config.get("sliding_window") or 0)
        case "gpt_neox":
            writer.add_parallel_residual(config["use_parallel_residual"])
        case "cohere" | "cohere2":
            writer.add_logit_scale(config["logit_scale"])
            if config["model_type"] == "cohere2":
                writer.add_sliding_window(config["sliding_window"])
    if count := config.get("num_local_experts") or config.get("num_experts"):
        writer.add_expert_count(count)
        writer.add_expert_used_count(config["num_experts_per_tok"])
        if size := config.get("moe_intermediate_size") or config["intermediate_size"]:
            writer.add_expert_feed_forward_length(size)


def _falcon_kv_heads(config: dict[str, Any]) -> int:
    return config["num_kv_heads"] if config["new_decoder_architecture"] else 1


def _write_deepseek2(writer: GGUFWriter, config: dict[str, Any]) -> None:
    rank, rotated = config["kv_lora_rank"], config["qk_rope_head_dim"]
    sizes = config["qk_nope_head_dim"] + rotated, config["v_head_dim"]
    if config["is_absorbed"]:
        writer.add_key_length(rank + rotated)
        writer.add_value_length(rank)
        writer.add_key_length_mla(sizes[0])
        writer.add_value_length_mla(sizes[1])
    else:
        writer.add_key_length(sizes[0])
        writer.add_value_length(sizes[1])
    writer.add_kv_lora_rank(rank)
    if config["q_lora_rank"]:
        writer.add_q_lora_rank(config["q_lora_rank"])
    writer.add_rope_dimension_count(rotated)
    writer.add_leading_dense_block_count(config["first_k_dense_replace"])
    writer.add_expert_count(config["n_routed_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_expert_shared_count(config["n_shared_experts"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_expert_weights_scale(config["routed_scaling_factor"])
    if (config.get("n_group") or 1) > 1:
        writer.add_expert_group_count(config["n_group"])
        writer.add_expert_group_used_count(config["topk_group"])
    _write_rope(writer, config, rotated)
    if mscale := config["rope_parameters"].get("mscale_all_dim"):
        writer.add_rope_scaling_yarn_log_mul(0.1 * mscale)


def _write_rope(writer: GGUFWriter, config: dict[str, Any], head_dim: int) -> None:
    rope = config["rope_parameters"]
    if "sliding_attention" in rope:
        writer.add_rope_freq_base_swa(rope["sliding_attention"]["rope_theta"])
        rope = rope["full_attention"]
    writer.add_rope_freq_base(rope["rope_theta"])
    if (fraction := rope.get("partial_rotary_factor", 1.0)) != 1:
        writer.add_rope_dimension_count(int(head_dim * fraction))
    if "mrope_section" in rope:
        writer.add_rope_dimension_sections([*rope["mrope_section"], 0])
    original = rope.get("original_max_position_embeddings")
    match rope["rope_type"]:
        case "linear":
            writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
            writer.add_rope_scaling_factor(rope["factor"])
        case "yarn":
            writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
            writer.add_rope_scaling_factor(rope["factor"])
            writer.add_rope_scaling_orig_ctx_len(original)
            if "beta_fast" in rope:
                writer.add_rope_scaling_yarn_beta_fast(rope["beta_fast"])
        case "longrope":
            writer.add_rope_scaling_orig_ctx_len(original)
            scale = config["max_position_embeddings"] / original
            amplitude = math.sqrt(1 + math.log(scale) / math.log(original)) if scale > 1 else 1.0
            writer.add_rope_scaling_attn_factors(amplitude)


def _rope_tensors(config: dict[str, Any]) -> Iterator[tuple[str, Array]]:
    rope = config.get("rope_parameters") or {}
    if rope.get("rope_type") == "longrope":
        for length in ("short", "long"):
            yield f"rope_factors_{length}.weight", np.array(rope[f"{length}_factor"], np.float32)
    if rope.get("rope_type") == "llama3":
        head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        yield "rope_freqs.weight", np.array(list(_llama3_factors(rope, head_dim)), np.float32)


def _llama3_factors(rope: dict[str, Any], head_dim: int) -> Iterator[float]:
    original, low, high = (
        rope["original_max_position_embeddings"],
        rope["low_freq_factor"],
        rope["high_freq_factor"],
    )
    for i in range(0, head_dim, 2):
        length = 2 * math.pi * rope["rope_theta"] ** (i / head_dim)
        if length < original / high:
            yield 1.0
        elif length > original / low:
            yield rope["factor"]
        else:
            smooth = (original / length - low) / (high - low)
            yield 1 / ((1 - smooth) / rope["factor"] + smooth)


def _stored(weights: dict[str, Array], config: dict[str, Any]) -> Iterator[tuple[str, Array]]:
    """The tensors under names that the ``gguf`` package knows, in the file's layout."""
    kind = config["model_type"]
    experts: dict[str, list[Array]] = {}
    norms: dict[str, list[Array]] = {}
    for name, values in sorted(weights.items(), key=lambda pair: _number_in(pair[0])):
        is_transposed = kind in TRANSPOSING and name.endswith(TRANSPOSED)
        stored = values.swapaxes(-1, -2) if is_transposed else values
        if config["is_absorbed"] and name.endswith("kv_b_proj.weight"):
            by_head = stored.reshape(config["num_attention_heads"], -1, stored.shape[1])
            keys, values_up = np.split(by_head, [config["qk_nope_head_dim"]], axis=1)
            yield name.replace("kv_b_proj", "k_b_proj"), keys.swapaxes(1, 2)
            yield name.replace("kv_b_proj", "v_b_proj"), values_up
        elif ".query_key_value." in name:
            num_kv_heads = _falcon_kv_heads(config) if kind == "falcon" else config["num_attention_heads"]
            head_dim = config["hidden_size"] // config["num_attention_heads"]
            groups = stored.reshape(num_kv_heads, -1, head_dim, *stored.shape[1:])
            parts = groups[:, :-2], groups[:, -2], groups[:, -1]
            yield name, np.concatenate([part.reshape(-1, *stored.shape[1:]) for part in parts])
        elif "layernorm.norms." in name:
            norms.setdefault(f"{name.partition('.norms.')[0]}.weight", []).append(stored)
        elif kind in SHIFTED and name.endswith("norm.weight"):
            yield name, stored + np.float32(1)
        elif kind in PAIRED and ".self_attn." in name and name.split(".")[-2] in ("q_proj", "k_proj"):
            is_query = ".q_proj." in name
            heads = config["num_attention_heads"] if is_query else config["num_key_value_heads"]
            yield name, _adjacent(stored, heads)
        elif ".experts." in name and name.split(".experts.")[1][0].isdigit():
            layer, _, rest = name.partition(".experts.")
            which = rest.split(".")[1]
            which = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}.get(which, which)
            layer = layer.replace("block_sparse_moe", "mlp")
            experts.setdefault(f"{layer}.experts.{which}.weight", []).append(stored)
        elif name.endswith("experts.gate_up_proj"):
            yield name.replace("gate_up_proj", "gate_proj.weight"), stored[:, ::2]
            yield name.replace("gate_up_proj", "up_proj.weight"), stored[:, 1::2]
        elif name.endswith("experts.gate_up_proj_bias"):
            yield name.replace("gate_up_proj_bias", "gate_proj.bias"), stored[:, ::2]
            yield name.replace("gate_up_proj_bias", "up_proj.bias"), stored[:, 1::2]
        elif name.endswith("experts.down_proj_bias"):
            yield name.replace("_bias", ".bias"), stored
        elif name.endswith(("experts.down_proj", "self_attn.sinks")):
            yield f"{name}.weight", stored
        else:
            yield name, stored
    for name, matrices in (experts | norms).items():
        yield name, np.stack(matrices)


def _number_in(name: str) -> list[tuple[int, str]]:
    """Sorts expert 10 behind expert 9."""
    return [(int(part) if part.isdigit() else -1, part) for part in name.split(".")]


def _adjacent(values: Array, num_heads: int) -> Array:
    """The rows i and i + half of each head become 2i and 2i + 1."""
    result = np.empty_like(values)
    head_dim = len(values) // num_heads
    for head in range(num_heads):
        rows = values[head * head_dim : (head + 1) * head_dim]
        result[head * head_dim : (head + 1) * head_dim : 2] = rows[: head_dim // 2]
        result[head * head_dim + 1 : (head + 1) * head_dim : 2] = rows[head_dim // 2 :]
    return result
