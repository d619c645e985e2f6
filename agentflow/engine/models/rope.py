"""Rotary position embeddings (Su et al. 2021, arXiv 2104.09864): the frequencies of a config and the angles
of a batch.

The scaled kinds stretch the frequencies to extend the context beyond training: "linear" (Chen et al. 2023,
arXiv 2306.15595) divides all of them, "llama3" (Llama 3.1) only the low ones.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from agentflow.errors import BadModelFolder


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """``kind``: default, linear or llama3. ``factor``: the factor by which the context is extended. The other
    three apply to llama3; ``original_context`` is in tokens."""

    kind: str
    theta: float
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    original_context: int = 0


def read_rope(raw: Mapping[str, Any]) -> RopeConfig:
    """From ``rope_parameters`` (transformers 5) or ``rope_theta`` and ``rope_scaling`` (before)."""
    parameters = dict(raw.get("rope_scaling") or {}) | dict(raw.get("rope_parameters") or {})
    theta = float(parameters.get("rope_theta", raw.get("rope_theta", 10000.0)))
    kind = str(parameters.get("rope_type", parameters.get("type", "default")))
    partial = parameters.get("partial_rotary_factor", raw.get("partial_rotary_factor", 1.0))
    if float(partial) != 1.0:
        raise BadModelFolder(
            f"partial rotary embeddings (factor {partial}) are not supported", param="partial_rotary_factor"
        )
    if kind == "default":
        return RopeConfig(kind, theta)
    if kind == "linear":
        return RopeConfig(kind, theta, float(parameters["factor"]))
    if kind == "llama3":
        return RopeConfig(
            kind,
            theta,
            float(parameters["factor"]),
            float(parameters["low_freq_factor"]),
            float(parameters["high_freq_factor"]),
            int(parameters["original_max_position_embeddings"]),
        )
    raise BadModelFolder(
        f"the rope type {kind!r} is not supported, only default, linear and llama3", param="rope_type"
    )


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """[head_dim / 2] float32: radians per position of each pair of dimensions."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    plain = 1.0 / (rope.theta**exponents)
    if rope.kind == "default":
        return plain
    if rope.kind == "linear":
        return plain / rope.factor
    # llama3: wavelengths much shorter than the original context stay, long ones are stretched by the factor,
    # and between the two bounds the frequencies are interpolated.
    waves_in_context = rope.original_context * plain / (2 * math.pi)
    blend = (waves_in_context - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blend = blend.clamp(0.0, 1.0)
    return (1 - blend) * plain / rope.factor + blend * plain


def rope_angles(positions: Tensor, frequencies: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin [T, 1, head_dim] of positions [T], as kernels take them: the halves of a head rotate
    together, so each angle occurs twice, with its sine negated in the first half."""
    angles = positions.float().unsqueeze(-1) * frequencies
    cos, sin = angles.cos(), angles.sin()
    cos = torch.cat((cos, cos), dim=-1).to(dtype).unsqueeze(1)
    sin = torch.cat((-sin, sin), dim=-1).to(dtype).unsqueeze(1)
    return cos, sin
