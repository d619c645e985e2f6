"""How the models of a server share its memory.

The rule: of the memory that is free when the server starts, ``memory_share`` is for all its models
together; a GPU's is for those that run on it, the machine's for the others (``free_memory``). What their
weights and processes take comes off first, then the KV pools whose size was given. The rest is divided among
the other pools in equal parts; a pool takes ``WANTED_KV_TOKENS`` at most, and what it leaves goes to the
others. What does not fit is refused before anything is loaded.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentflow.errors import BadArgument, BadModelFolder

WANTED_KV_TOKENS = 65_536
MIN_KV_TOKENS = 1_024
# What a process needs beside weights and KV: torch, the tokenizer, activations.
PROCESS_BYTES = 500_000_000


@dataclass(frozen=True, slots=True)
class MemoryNeed:
    """Of one model. ``kv_tokens``: the size of its pool where it was given."""

    name: str
    weight_bytes: int
    kv_bytes_per_token: int
    kv_tokens: int | None = None


def share_memory(needs: Sequence[MemoryNeed], budget_bytes: int) -> dict[str, int]:
    """Of each model the tokens that its KV pool holds. ``BadArgument`` where they do not all fit.

    >>> two = [MemoryNeed("a", 0, 1_000), MemoryNeed("b", 0, 4_000)]
    >>> share_memory(two, 1_200_000_000)
    {'a': 65536, 'b': 33616}
    """
    left = budget_bytes - sum(need.weight_bytes + PROCESS_BYTES for need in needs)
    shares = {need.name: need.kv_tokens for need in needs if need.kv_tokens is not None}
    left -= sum(shares[need.name] * need.kv_bytes_per_token for need in needs if need.name in shares)
    open_needs = [need for need in needs if need.kv_tokens is None]
    # Those that want the least first: what they leave is for the others.
    open_needs.sort(key=lambda need: need.kv_bytes_per_token)
    if left < sum(MIN_KV_TOKENS * need.kv_bytes_per_token for need in open_needs):
        raise _does_not_fit(needs, budget_bytes)
    for number, need in enumerate(open_needs):
        part = left // (len(open_needs) - number)
        shares[need.name] = max(MIN_KV_TOKENS, min(WANTED_KV_TOKENS, part // need.kv_bytes_per_token))
        left -= shares[need.name] * need.kv_bytes_per_token
    return {need.name: shares[need.name] for need in needs}


def memory_need(name: str, folder: Path, dtype: str, kv_tokens: int | None) -> MemoryNeed:
    """What the model in this folder needs. ``BadModelFolder``."""
    item_bytes = 4 if dtype == "float32" else 2
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return MemoryNeed(
        name, _num_parameters(folder) * item_bytes, kv_bytes_per_token(config, item_bytes), kv_tokens
    )


def kv_bytes_per_token(config: Mapping[str, Any], item_bytes: int) -> int:
    """Keys and values of one token in all layers. ``config``: of the model."""
    heads: int = config.get("num_key_value_heads") or config.get("num_attention_heads", 1)
    head_size: int = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    layers: int = config["num_hidden_layers"]
    return 2 * layers * heads * head_size * item_bytes


def _num_parameters(folder: Path) -> int:
    """Counted in the headers of its safetensors files: 8 bytes of length, and JSON."""
    total = 0
    for file in folder.glob("*.safetensors"):
        with file.open("rb") as stream:
            try:
                (length,) = struct.unpack("<Q", stream.read(8))
                header: dict[str, Any] = json.loads(stream.read(length))
            except (struct.error, ValueError) as error:
                raise BadModelFolder(f"{file} is no safetensors file: {error}") from None
        total += sum(math.prod(entry["shape"]) for name, entry in header.items() if name != "__metadata__")
    return total


def _does_not_fit(needs: Sequence[MemoryNeed], budget_bytes: int) -> BadArgument:
    lines = [
        f"{need.name} {need.weight_bytes / 1e9:.2f} GB of weights and "
        f"{(need.kv_tokens or MIN_KV_TOKENS) * need.kv_bytes_per_token / 1e9:.2f} GB for "
        f"{need.kv_tokens or MIN_KV_TOKENS:,} tokens"
        for need in needs
    ]
    return BadArgument(
        f"the models do not fit into {budget_bytes / 1e9:.2f} GB: {'; '.join(lines)}; and "
        f"{PROCESS_BYTES / 1e9:.2f} GB each for its process. Serve fewer, give smaller --kv-tokens, or a "
        "larger --memory-share"
    )
