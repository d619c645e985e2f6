"""Writes a model folder with vision as two GGUF files, as llama.cpp's conversions do it: the text model, and
the tower with its projector (``mmproj``). Names come from the ``gguf`` package."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import MODEL_ARCH, GGUFValueType, GGUFWriter
from safetensors.numpy import load_file
from support.engine.gguf_models import Array, kind_of, write_model

PROJECTOR_TYPES = {
    "idefics3": "idefics3",
    "smolvlm": "idefics3",
    "llava": "mlp",
    "llava_next": "mlp",
    "gemma3": "gemma3",
    "qwen2_5_vl": "qwen2.5vl_merger",
    "qwen3_vl": "qwen3vl_merger",
}
TOWERS = (
    "vision_model.",
    "vision_tower.",
    "visual.",
    "connector.",
    "multi_modal_projector.",
    "image_newline",
)
# LLaVA's files are written by an older script, whose names the package does not know.
OLD_NAMES = {
    "embeddings.class_embedding": "v.class_embd",
    "embeddings.patch_embedding": "v.patch_embd",
    "embeddings.position_embedding": "v.position_embd",
    "pre_layrnorm": "v.pre_ln",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.out_proj": "attn_out",
    "layer_norm1": "ln1",
    "layer_norm2": "ln2",
    "mlp.fc1": "ffn_down",
    "mlp.fc2": "ffn_up",
}


def write_gguf_files(
    folder: Path,
    to: Path,
    kind: str = "F32",
    *,
    vocabulary: Callable[[GGUFWriter], None] | None = None,
    changes: Mapping[str, Any] | None = None,
) -> Path:
    """Writes ``model.gguf`` and ``mmproj-model-f32.gguf`` into the folder ``to``, and returns the former.

    Args:
        folder: a model of transformers.
        to: an empty folder.
        kind: of the matrices.
        vocabulary: writes the tokenizer.
        changes: metadata of the projector file that is replaced, or left out if None.
    """
    config = json.loads((folder / "config.json").read_text())
    text = {"eos_token_id": 1, **config["text_config"], "is_absorbed": False}
    text |= {"tie_word_embeddings": config.get("tie_word_embeddings", False)}
    weights = load_file(folder / "model.safetensors")
    decoder = {name: values for name, values in weights.items() if not is_tower(name)}
    plain = {
        name.replace("language_model.model.", "model.")
        .replace("model.language_model.", "model.")
        .replace("model.text_model.", "model.")
        .replace("language_model.lm_head", "lm_head"): values
        for name, values in decoder.items()
    }
    write_model(text, plain, to / "model.gguf", kind, vocabulary=vocabulary)
    settings = json.loads((folder / "preprocessor_config.json").read_text())
    tower = {name: values for name, values in weights.items() if is_tower(name)}
    _write_mmproj(to / "mmproj-model-f32.gguf", config, settings, tower, kind, changes or {})
    return to / "model.gguf"


def is_tower(name: str) -> bool:
    """Whether a tensor belongs to the tower or its projector."""
    return name.removeprefix("model.").startswith(TOWERS)


def _write_mmproj(
    file: Path,
    config: dict[str, Any],
    settings: dict[str, Any],
    weights: dict[str, Array],
    kind: str,
    changes: Mapping[str, Any],
) -> None:
    writer = GGUFWriter(file, gguf.MODEL_ARCH_NAMES[MODEL_ARCH.MMPROJ])
    vision, model = config["vision_config"], config["model_type"]
    num_layers = vision.get("num_hidden_layers") or vision["depth"]
    if model in ("llava", "llava_next"):
        num_layers -= 1
    writer.add_clip_has_vision_encoder(True)
    writer.add_clip_projector_type(PROJECTOR_TYPES[model])
    writer.add_vision_projection_dim(config["text_config"]["hidden_size"])
    writer.add_vision_image_size(vision.get("image_size") or 64)
    writer.add_vision_patch_size(vision["patch_size"])
    writer.add_vision_embedding_length(vision["hidden_size"])
    writer.add_vision_feed_forward_length(vision["intermediate_size"])
    writer.add_vision_block_count(num_layers)
    writer.add_vision_head_count(vision.get("num_attention_heads") or vision["num_heads"])
    writer.add_vision_attention_layernorm_eps(vision.get("layer_norm_eps", 1e-6))
    if "image_mean" in settings:
        writer.add_vision_image_mean(settings["image_mean"])
        writer.add_vision_image_std(settings["image_std"])
    match model:
        case "idefics3" | "smolvlm":
            writer.add_vision_use_gelu(True)
            writer.add_vision_projector_scale_factor(config["scale_factor"])
            writer.add_vision_preproc_image_size(settings["size"]["longest_edge"])
        case "gemma3":
            writer.add_vision_use_gelu(True)
            side = vision["image_size"] // vision["patch_size"]
            writer.add_vision_projector_scale_factor(side // int(config["mm_tokens_per_image"] ** 0.5))
        case "llava_next":
            pairs = [number for pair in config["image_grid_pinpoints"] for number in pair]
            writer.add_array("clip.vision.image_grid_pinpoints", pairs)
        case "qwen2_5_vl":
            writer.add_vision_use_silu(True)
            writer.add_vision_n_wa_pattern(vision["fullatt_block_indexes"][0] + 1)
            writer.add_uint32("clip.vision.window_size", vision["window_size"])
        case "qwen3_vl":
            writer.add_vision_use_gelu(True)
            writer.add_vision_spatial_merge_size(vision["spatial_merge_size"])
            deep = vision["deepstack_visual_indexes"]
            writer.add_vision_is_deepstack_layers([layer in deep for layer in range(num_layers)])
    for name in ("min_pixels", "max_pixels"):
        if name in settings:
            writer.add_uint32(f"clip.vision.image_{name}", settings[name])
    for key, value in changes.items():
        writer.kv_data[0].pop(key, None)
        if value is not None:
            writer.add_key_value(key, value, GGUFValueType.get_type(value))
    names = gguf.get_tensor_name_map(MODEL_ARCH.MMPROJ, num_layers)
    for name, values in _stored(weights, config):
        if model in ("llava", "llava_next"):
            stored = _old_name(name, num_layers)
            if stored is None:
                continue
        else:
            found = names.get_name(name.removesuffix(".1"), (".weight", ".bias"))
            assert found is not None, name
            stored = f"{found}.1" if name.endswith(".weight.1") else found
        stored_kind = kind_of(stored, values, kind if values.ndim == 2 and "embd" not in stored else "F32")
        data = gguf.quantize(np.ascontiguousarray(values), stored_kind)
        writer.add_tensor(stored, data, raw_dtype=stored_kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _stored(weights: dict[str, Array], config: dict[str, Any]) -> Iterator[tuple[str, Array]]:
    """The tensors under names that the ``gguf`` package knows, in the file's layout."""
    deep = config["vision_config"].get("deepstack_visual_indexes", [])
    for name, values in weights.items():
        if ".head." in name:  # SigLIP's pooling, which these models do not use
            continue
        if config["model_type"] == "qwen2_5_vl" and ".qkv." in name:
            for part, rows in zip("qkv", np.split(values, 3), strict=True):
                yield name.removeprefix("model.").replace("qkv", part), rows
        elif "visual.patch_embed.proj.weight" in name:
            plain = name.removeprefix("model.")
            yield plain, values[:, :, 0]
            yield f"{plain}.1", values[:, :, 1]
        elif "deepstack_merger_list." in name:
            number, _, rest = name.partition("deepstack_merger_list.")[2].partition(".")
            yield f"model.visual.deepstack_merger_list.{deep[int(number)]}.{rest}", values
        elif config["model_type"] == "gemma3":
            plain = name.removeprefix("model.").replace("_weight", ".weight")
            if "vision_model." not in plain:
                plain = plain.replace("vision_tower.", "vision_tower.vision_model.")
            yield plain, values + np.float32("soft_emb_norm" in name)
        elif "visual." in name:
            plain = name.removeprefix("model.")
            for qwen3, qwen2 in (("linear_fc1", "mlp.0"), ("linear_fc2", "mlp.2"), ("norm", "ln_q")):
                plain = plain.replace(f"visual.merger.{qwen3}.", f"visual.merger.{qwen2}.")
            yield plain, values
        else:
            yield name, values


def _old_name(name: str, num_layers: int) -> str | None:
    """The name of a tensor of LLaVA in the files of the older script; None: the script leaves the tensor
    out."""
    plain = name.removeprefix("model.")
    if plain == "image_newline":
        return "model.image_newline"
    if plain.startswith("multi_modal_projector."):
        return plain.replace("multi_modal_projector.linear_1", "mm.0").replace(
            "multi_modal_projector.linear_2", "mm.2"
        )
    plain = plain.removeprefix("vision_tower.").removeprefix("vision_model.")
    if plain.startswith("encoder.layers."):
        _, _, layer, *part, leaf = plain.split(".")
        if int(layer) >= num_layers:
            return None
        return f"v.blk.{layer}.{OLD_NAMES['.'.join(part)]}.{leaf}"
    stem, _, leaf = plain.rpartition(".")
    if plain in OLD_NAMES:
        return OLD_NAMES[plain]
    return f"{OLD_NAMES[stem]}.{leaf}" if stem in OLD_NAMES else None
