"""Rotary position embeddings (Su et al. 2021, arXiv 2104.09864): the frequencies of a config and the angles
of a batch.

The scaled kinds divide frequencies to extend the context beyond training: "linear" (Chen et al. 2023, arXiv
2306.15595) divides all of them, "llama3" (Llama 3.1) and "yarn" (Peng et al. 2023, arXiv 2309.00071) the low
ones, with a ramp in between, and "longrope" (Ding et al. 2024, arXiv 2402.13753) each by a separate factor.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from agentflow.errors import BadModelFolder

KINDS = ("default", "linear", "llama3", "yarn", "longrope")


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """The rotary embeddings of a model."""

    kind: str  # one of ``KINDS``
    theta: float  # the base of the frequencies
    factor: float = 1.0  # the extension of the context
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 1.0  # llama3
    original_context: int = 0  # the training context before the extension, in tokens
    fraction: float = 1.0  # the part of each head that rotates, from its first dimension on
    amplitude: float = 1.0  # the factor of cosines and sines
    beta_fast: float = 32.0  # yarn: the start of the ramp, in rotations over the original context
    beta_slow: float = 1.0  # yarn: the end of the ramp
    truncates: bool = True  # yarn: the bounds of the ramp are rounded
    factors: tuple[float, ...] = ()  # longrope: one for each frequency
    longest: int = 0  # longrope: the tokens for which the factors are; 0: any text

    def num_rotated(self, head_dim: int) -> int:
        """Returns the number of dimensions of a head that rotate."""
        return int(head_dim * self.fraction)


def read_rope(raw: Mapping[str, Any]) -> RopeConfig:
    """Reads ``rope_parameters`` (transformers 5) or ``rope_theta`` and ``rope_scaling`` (before)."""
    return make_rope(raw, rope_parameters(raw))


def rope_parameters(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Returns ``rope_scaling`` or else ``rope_parameters``."""
    return dict(raw.get("rope_scaling") or raw.get("rope_parameters") or {})


def make_rope(raw: Mapping[str, Any], parameters: Mapping[str, Any]) -> RopeConfig:
    """Returns the rope of ``parameters``; missing ones are read from ``raw``."""
    theta = float(parameters.get("rope_theta", raw.get("rope_theta") or 10000.0))
    kind = str(parameters.get("rope_type", parameters.get("type", "default")))
    fraction = float(parameters.get("partial_rotary_factor", raw.get("partial_rotary_factor") or 1.0))
    if not 0 < fraction <= 1:
        raise BadModelFolder(
            f"partial_rotary_factor is {fraction}: it must be above 0 and at most 1",
            param="partial_rotary_factor",
        )
    match kind:
        case "default" | "dynamic":  # dynamic changes frequencies only beyond max_position_embeddings
            return RopeConfig("default", theta, fraction=fraction)
        case "linear":
            return RopeConfig(kind, theta, float(parameters["factor"]), fraction=fraction)
        case "llama3":
            return RopeConfig(
                kind,
                theta,
                float(parameters["factor"]),
                float(parameters["low_freq_factor"]),
                float(parameters["high_freq_factor"]),
                _original_context(raw, parameters),
                fraction,
            )
        case "yarn":
            return _read_yarn(raw, parameters, theta, fraction)
        case "longrope":
            return _read_longrope(raw, parameters, theta, fraction)
    raise BadModelFolder(
        f"the rope type {kind!r} is not supported, only {', '.join(KINDS)}", param="rope_type"
    )


def _original_context(raw: Mapping[str, Any], parameters: Mapping[str, Any]) -> int:
    name = "original_max_position_embeddings"
    return int(parameters.get(name) or raw.get(name) or raw["max_position_embeddings"])


def _read_yarn(
    raw: Mapping[str, Any], parameters: Mapping[str, Any], theta: float, fraction: float
) -> RopeConfig:
    original = _original_context(raw, parameters)
    factor = float(parameters.get("factor") or raw["max_position_embeddings"] / original)
    amplitude = parameters.get("attention_factor")
    if amplitude is None:
        mscale, mscale_all = parameters.get("mscale"), parameters.get("mscale_all_dim")
        if mscale and mscale_all:
            amplitude = yarn_amplitude(factor, float(mscale)) / yarn_amplitude(factor, float(mscale_all))
        else:
            amplitude = yarn_amplitude(factor, 1.0)
    return RopeConfig(
        "yarn",
        theta,
        factor,
        original_context=original,
        fraction=fraction,
        amplitude=float(amplitude),
        beta_fast=float(parameters.get("beta_fast") or 32),
        beta_slow=float(parameters.get("beta_slow") or 1),
        truncates=bool(parameters.get("truncate", True)),
    )


def yarn_amplitude(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1


def _read_longrope(
    raw: Mapping[str, Any], parameters: Mapping[str, Any], theta: float, fraction: float
) -> RopeConfig:
    """Uses the factors for texts within the original context: cached keys cannot change when a text grows
    beyond it."""
    original = _original_context(raw, parameters)
    factor = float(parameters.get("factor") or raw["max_position_embeddings"] / original)
    amplitude = parameters.get("attention_factor")
    if amplitude is None:
        amplitude = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    factors = tuple(float(value) for value in parameters["short_factor"])
    is_equal = list(factors) == list(parameters.get("long_factor") or ())
    return RopeConfig(
        "longrope",
        theta,
        factor,
        original_context=original,
        fraction=fraction,
        amplitude=float(amplitude),
        factors=factors,
        longest=0 if is_equal else original,  # equal in GGUF files, which have Llama 3's scaling as factors
    )


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """Returns the radians per position of each pair of dimensions: [rotated dimensions / 2] float32."""
    num_rotated = rope.num_rotated(head_dim)
    exponents = torch.arange(0, num_rotated, 2, dtype=torch.int64).float() / num_rotated
    periods = rope.theta**exponents
    match rope.kind:
        case "linear":
            return 1.0 / periods / rope.factor
        case "llama3":
            return _llama3_frequencies(rope, 1.0 / periods)
        case "yarn":
            return _yarn_frequencies(rope, periods, num_rotated)
        case "longrope":
            if len(rope.factors) != len(periods):
                raise BadModelFolder(
                    f"rope has {len(rope.factors)} factors for {len(periods)} frequencies",
                    param="short_factor",
                )
            return 1.0 / (torch.tensor(rope.factors, dtype=torch.float32) * periods)
    return 1.0 / periods


def _llama3_frequencies(rope: RopeConfig, plain: Tensor) -> Tensor:
    # Wavelengths much shorter than the original context are unchanged, long ones are stretched by the factor,
    # and between the two bounds the frequencies are interpolated.
    waves_in_context = rope.original_context * plain / (2 * math.pi)
    blend = (waves_in_context - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blend = blend.clamp(0.0, 1.0)
    return (1 - blend) * plain / rope.factor + blend * plain


def _yarn_frequencies(rope: RopeConfig, periods: Tensor, num_rotated: int) -> Tensor:
    def find_dimension(rotations: float) -> float:
        """Returns the dimension with this number of rotations over the original context."""
        return (
            num_rotated
            * math.log(rope.original_context / (rotations * 2 * math.pi))
            / (2 * math.log(rope.theta))
        )

    low, high = find_dimension(rope.beta_fast), find_dimension(rope.beta_slow)
    if rope.truncates:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, num_rotated - 1)
    if low == high:
        high += 0.001  # as in the reference implementation: no division by zero
    stretched = ((torch.arange(num_rotated // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return stretched / (rope.factor * periods) + (1 - stretched) / periods


def rope_angles(
    positions: Tensor, frequencies: Tensor, dtype: torch.dtype, amplitude: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Returns cos and sin [T, 1, 2 * frequencies] of positions [T], or of [T, frequencies] if the frequencies
    have different positions. In the kernels' layout the two halves of a head rotate together: each angle
    occurs twice, with its sine negated in the first half."""
    angles = (positions if positions.ndim == 2 else positions.unsqueeze(-1)).float() * frequencies
    cos, sin = angles.cos(), angles.sin()
    if amplitude != 1.0:
        cos, sin = cos * amplitude, sin * amplitude
    cos = torch.cat((cos, cos), dim=-1).to(dtype).unsqueeze(1)
    sin = torch.cat((-sin, sin), dim=-1).to(dtype).unsqueeze(1)
    return cos, sin
