"""A config that leaves fields out, or has null in them, is read as transformers reads it."""

from __future__ import annotations

import copy
import dataclasses
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.engine.family_models import COMPOSED, MODELS, SIZES
from transformers import CONFIG_MAPPING, AutoConfig
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from agentflow.engine import models, store
from agentflow.engine.models.config import DecoderConfig
from agentflow.engine.models.families import registry
from agentflow.engine.models.families.registry import FAMILIES
from agentflow.engine.models.memory_need import kv_bytes_per_token
from agentflow.engine.store.config_parts import vision_config
from agentflow.errors import BadModelFolder

ARCHITECTURES = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES | MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
NATIVE_KINDS = sorted(kind for kind, name in ARCHITECTURES.items() if name in FAMILIES)
REQUIRED: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"num_experts_per_tok": 6},
    # Without this part, it has other defaults.
    "idefics3": {"text_config": {}},
    "smolvlm": {"text_config": {}},
}
# With the defaults of a class in all fields, and with small sizes.
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    **{f"class_{kind}": (kind, REQUIRED.get(kind, {})) for kind in NATIVE_KINDS},
    "class_gptj_wide": ("gptj", {"n_embd": 256, "n_head": 2}),
    "class_qwen2_window": ("qwen2", {"use_sliding_window": True}),
    "class_smollm3_window": ("smollm3", {"use_sliding_window": True, "sliding_window": 8}),
    **{name: (kind, SIZES | own) for name, (kind, own) in (MODELS | COMPOSED).items()},
}


def as_transformers_reads(raw: dict[str, Any]) -> dict[str, Any]:
    """The config with the values that transformers has after reading it."""
    given = {name: value for name, value in copy.deepcopy(raw).items() if name != "model_type"}
    read = AutoConfig.for_model(raw["model_type"], **given).to_dict()
    return json.loads(json.dumps(read | {"architectures": raw["architectures"]}, default=str))


def shape_of(raw: dict[str, Any]) -> DecoderConfig | None:
    """The shape; None if the config cannot be run. The tokenizer has the tokens that end a text. No file is
    written for each of 18,000 configs."""
    config = json.loads(json.dumps(raw))
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(registry, "read_folder", lambda folder: (config, {}))
            shape = registry.read_config(Path())
    except BadModelFolder:
        return None
    scale = shape.attention_scale or shape.head_dim**-0.5
    return dataclasses.replace(shape, end_token_ids=(), attention_scale=scale)


SOURCES = [Path(models.__file__).parent, Path(store.__file__).parent]
WORDS = {
    word
    for folder in SOURCES
    for file in folder.rglob("*.py")
    for word in re.findall(r'"(\w+)"', file.read_text())
}
"""The fields that may be read are among these."""


def changed_configs(raw: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The config without each field that may be read, with null in it, without all others, and in the
    notations of older releases."""
    for part, of_part in (("", raw), ("text_config", raw.get("text_config") or {})):
        read = {
            key: value
            for key, value in of_part.items()
            if key in WORDS or key in ("architectures", "model_type")
        }
        yield f"{part} only what is read", raw | {part: read} if part else read
        # The pattern is in configs of some releases next to the types of layers that follow from it.
        names = read.keys() - {"architectures", "model_type", "text_config", "_sliding_window_pattern"}
        for name in sorted(names - ({"layer_types"} if "_sliding_window_pattern" in of_part else set())):
            left = {key: value for key, value in of_part.items() if key != name}
            for what, less in (("no", left), ("null", of_part | {name: None})):
                yield f"{what} {part}.{name}", raw | {part: less} if part else less
    rope = raw.get("rope_parameters") or {}
    if "rope_theta" in rope:
        rest = {name: value for name, value in raw.items() if name != "rope_parameters"}
        scaling = {name: value for name, value in rope.items() if name != "rope_theta"}
        fraction = scaling.pop("partial_rotary_factor", None)
        old = (
            rest
            | {"rope_theta": rope["rope_theta"]}
            | ({"partial_rotary_factor": fraction} if fraction else {})
        )
        kind = scaling.pop("rope_type", "default")
        yield "rope_scaling null", old | {"rope_scaling": None}
        yield "rope_scaling", old | {"rope_scaling": scaling | {"rope_type": kind}}
        yield "rope_scaling.type", old | {"rope_scaling": scaling | {"type": kind}}
        yield "no rope_theta", raw | {"rope_parameters": scaling | {"rope_type": kind}}
        for name in scaling:
            left = {key: value for key, value in rope.items() if key != name}
            yield f"no rope_parameters.{name}", raw | {"rope_parameters": left}
        yield "rope_scaling added", raw | {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}


@pytest.mark.parametrize("name", CONFIGS)
def test_f37_fields_that_are_left_out_have_the_defaults_of_transformers(name: str) -> None:
    kind, own = CONFIGS[name]
    if kind not in CONFIG_MAPPING:
        pytest.skip(f"the installed transformers has no {kind}")
    short = {"architectures": [ARCHITECTURES[kind]], "model_type": kind, **own}
    whole = as_transformers_reads(short)
    different: dict[str, Any] = {}
    num_compared = 0
    for change, raw in [("short", short), *changed_configs(whole)]:
        try:
            read = as_transformers_reads(raw)
        except Exception:  # transformers checks the types of the fields, and raises several exceptions
            continue
        num_compared += 1
        if (mine := shape_of(raw)) != (expected := shape_of(read)):
            different[change] = mine, expected
        elif mine is not None and kv_bytes_per_token(raw, 2) != kv_bytes_per_token(read, 2):
            different[change] = kv_bytes_per_token(raw, 2), kv_bytes_per_token(read, 2)
    assert not different
    assert num_compared > 5


@pytest.mark.parametrize(
    "kind", [kind for kind in NATIVE_KINDS if kind in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES]
)
def test_f37_a_vision_tower_has_the_defaults_of_its_type(kind: str) -> None:
    architectures = {"architectures": [ARCHITECTURES[kind]]}
    given = AutoConfig.for_model(kind, vision_config={}).vision_config.to_dict()
    mine = vision_config({**architectures, "vision_config": {}})
    assert mine == {name: given.get(name) for name in mine}
    assert len(mine) > 6
