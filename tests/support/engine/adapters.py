"""Adapters with random weights, made by PEFT for a model folder."""

from __future__ import annotations

import copy
import functools
import json
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file

_MADE: dict[Path, Any] = {}
"""Adapted models by the folders of their latest adapters, until they are merged."""


def write_adapter(model: Path, folder: Path, *, seed: int = 0, **settings: Any) -> Path:
    """Saves an adapter of the model with random ``A`` and ``B``. ``settings``: of ``LoraConfig``."""
    from peft import LoraConfig, get_peft_model  # takes seconds, and most tests need plain adapters only

    base = copy.deepcopy(_base(model))
    adapted = get_peft_model(base, LoraConfig(**({"r": 4, "lora_alpha": 8} | settings)))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    adapted.create_or_update_model_card = lambda folder: None  # a page from a template, for the hub
    adapted.save_pretrained(folder)
    if len(_MADE) >= 4:
        _MADE.clear()
    _MADE[folder] = adapted
    return folder


def merged_logits(model: Path, adapter: Path | None, token_ids: list[int]) -> torch.Tensor:
    """The logits of PEFT's merged model: [tokens, vocabulary]."""
    with torch.inference_mode():
        logits: torch.Tensor = _merged(model, adapter)(torch.tensor([token_ids])).logits[0]
    return logits


@functools.lru_cache(maxsize=4)  # the adapters of one test
def _merged(model: Path, adapter: Path | None) -> Any:
    if adapter is None:
        return _base(model)
    return _MADE.pop(adapter).merge_and_unload().eval()


@functools.lru_cache(maxsize=1)
def _base(model: Path) -> Any:
    """The model, whose files no longer change."""
    return transformers.AutoModelForCausalLM.from_pretrained(model).eval()


def write_plain_adapter(
    folder: Path, tensors: dict[str, torch.Tensor] | None = None, **settings: Any
) -> Path:
    """An adapter's files without PEFT. ``tensors``: by module and kind, such as "q_proj.lora_A"."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "base_model_name_or_path": "some/base"}
    (folder / "adapter_config.json").write_text(json.dumps(config | settings))
    named = {f"base_model.model.{name}.weight": tensor for name, tensor in (tensors or {}).items()}
    save_file(named, folder / "adapter_model.safetensors")
    return folder
