"""Finds the family of a model folder."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

from agentflow.engine.models.config import (
    DecoderConfig,
    RawConfig,
    end_token_ids,
    read_architectures,
    read_folder,
)
from agentflow.engine.models.families import (
    deepseek,
    gemma,
    glm,
    gpt2,
    image_text,
    llama,
    mixture,
    olmo,
    parallel_blocks,
    phi,
    starcoder,
)
from agentflow.engine.models.families.family import Family
from agentflow.engine.models.rope import inverse_frequencies
from agentflow.engine.store.config_parts import given_fields, text_config
from agentflow.engine.store.embedding_folder import DECODERS
from agentflow.engine.store.native_architectures import OTHER_NAMES
from agentflow.engine.store.weight_scheme import read_scheme
from agentflow.errors import BadModelFolder

FAMILIES: Final[Mapping[str, Family]] = {
    family.architecture: family
    for module in (
        llama,
        mixture,
        gemma,
        phi,
        olmo,
        glm,
        deepseek,
        parallel_blocks,
        gpt2,
        starcoder,
        image_text,
    )
    for family in module.FAMILIES
}
"""The families that run natively, by the architecture's name in ``config.json``."""
_MAX_LAYERS: Final = 10_000
_MAX_OF_HEADS: Final = 1 << 20
"""The most heads, and their largest size. The KV pool and the order of rows are made before these sizes are
compared with the weights."""


def read_config(folder: Path) -> DecoderConfig:
    """Returns the model's shape. Raises ``UnknownModel`` if there is no folder, and ``BadModelFolder`` if the
    model is not supported."""
    raw, generation = read_folder(folder)
    try:
        family = _find_family(raw)
        read_scheme(raw)  # rejects unsupported formats
        text = text_config(raw)
        _check_layers(text)
        if text.get("per_layer_config"):
            message = "layers with other fields than the config are not supported"
            raise BadModelFolder(message, param="per_layer_config")
        shape = family.read(text)
        shape = replace(shape, max_context=_longest_text(shape))
        _check(shape)
        ends = end_token_ids({**text, **given_fields(raw)}, generation)
        return replace(shape, architecture=family.architecture, end_token_ids=ends)
    except BadModelFolder as error:
        raise BadModelFolder(f"{folder}: {error}", param=error.param) from None
    except KeyError as error:
        raise BadModelFolder(f"{folder}: config.json has no {error}", param=str(error.args[0])) from None
    except (TypeError, ValueError, AttributeError, ArithmeticError, IndexError) as error:
        message = f"{folder}: config.json has an invalid value: {error}"
        raise BadModelFolder(message, param="config.json") from error


def _longest_text(shape: DecoderConfig) -> int:
    """Returns the model's context. With "longrope", it ends where other factors begin: the keys in the cache
    were computed with the short ones."""
    ropes = filter(None, (shape.rope, shape.local_rope))
    return min([shape.max_context, *(rope.longest for rope in ropes if rope.longest)])


def _check_layers(text: RawConfig) -> None:
    """Rejects an impossible number of layers, before lists of this length are made."""
    for name in ("num_hidden_layers", "n_layer", "num_layers"):
        if int(text.get(name) or 0) > _MAX_LAYERS:
            raise ValueError(f"{name} is {text[name]}")


def _check(shape: DecoderConfig) -> None:
    """Rejects impossible sizes and scales, which would cause errors in the kernels or meaningless text."""
    sizes = {
        name: getattr(shape, name)
        for name in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_layers",
            "num_heads",
            "max_context",
        )
    }
    sizes |= {"num_kv_heads": shape.num_kv_heads, "head_dim": shape.head_dim}
    if (latent := shape.latent) is not None:
        sizes |= {
            name: getattr(latent, name) for name in ("kv_rank", "plain_dim", "rotated_dim", "value_dim")
        }
    if (experts := shape.experts) is not None:
        sizes |= {"num_experts": experts.num_experts, "experts of a token": experts.num_used}
        sizes |= {"the size of an expert": experts.intermediate_size, "groups": experts.num_groups}
        used, groups = experts.num_used, experts.num_groups
        if used > experts.num_experts or experts.num_experts % max(groups, 1):
            raise ValueError(f"{used} of {experts.num_experts} experts in {groups} groups")
        if not 0 < experts.num_used_groups <= groups:
            raise ValueError(f"{experts.num_used_groups} of {groups} groups of experts")
    for name, size in sizes.items():
        if size < 1 or (name in ("num_heads", "num_kv_heads", "head_dim") and size > _MAX_OF_HEADS):
            raise ValueError(f"{name} is {size}")
    scales = ("attention_scale", "attention_cap", "logit_scale", "logit_cap", "embedding_scale")
    for name in ("norm_eps", *scales):
        if not math.isfinite(value := getattr(shape, name)):
            raise ValueError(f"{name} is {value}")
    for rope in filter(None, (shape.rope, shape.local_rope)):
        frequencies = inverse_frequencies(rope, shape.rotated_dim)  # checks that the factors fit the heads
        if not (bool(frequencies.isfinite().all()) and math.isfinite(rope.amplitude)):
            raise BadModelFolder("its rotary frequencies are not finite", param="rope_parameters")


def is_native(folder: Path) -> bool:
    """Whether the folder's architecture has a family. False if its config has no architecture."""
    return any(_with_head(name) in FAMILIES for name in read_architectures(read_folder(folder)[0]))


def _with_head(architecture: object) -> str:
    """Returns the architecture's name in ``FAMILIES``: embedding models are saved without a head, under
    another name."""
    name = OTHER_NAMES.get(str(architecture), str(architecture))
    return name.removesuffix("Model") + "ForCausalLM" if name in DECODERS else name


def _find_family(raw: RawConfig) -> Family:
    names = [_with_head(name) for name in read_architectures(raw)]
    if len(names) == 1 and names[0] in FAMILIES:
        return FAMILIES[names[0]]
    found = ", ".join(map(str, names)) or f"none (model_type {raw.get('model_type')!r})"
    known = ", ".join(FAMILIES)
    raise BadModelFolder(f"its architecture is {found}; only {known} can be run", param="architectures")
