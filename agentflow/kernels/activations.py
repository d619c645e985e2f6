"""The activations of MLPs, in torch operations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Literal, get_args

import torch
from torch import Tensor

Activation = Literal["silu", "gelu_tanh", "gelu", "relu", "clamped_swiglu", "quick_gelu"]
PlainActivation = Literal["silu", "gelu_tanh", "gelu", "relu", "quick_gelu"]
"""The activations that are functions of one value."""
ACTIVATIONS: Final[tuple[Activation, ...]] = get_args(Activation)
"""In the order of ``native/activation.h``."""

CLAMP_LIMIT, CLAMP_ALPHA = 7.0, 1.702
"""The parameters of "clamped_swiglu"."""

_FUNCTIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "silu": torch.nn.functional.silu,
    "gelu": torch.nn.functional.gelu,
    "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    "relu": torch.relu,
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
}


def activated(product: Tensor, activation: Activation, *, is_gated: bool) -> Tensor:
    """Returns the activation of rows, or if ``is_gated``, of the first half of each row times the second
    half. "clamped_swiglu" is from GPT-OSS (arXiv 2508.10925) and needs a gate. May overwrite ``product``."""
    if not is_gated:
        return _FUNCTIONS[activation](product)
    gate, up = product.chunk(2, dim=-1)
    if activation == "clamped_swiglu":
        gate, up = gate.clamp(max=CLAMP_LIMIT), up.clamp(-CLAMP_LIMIT, CLAMP_LIMIT)
        return (up + 1) * (gate * torch.sigmoid(gate * CLAMP_ALPHA))
    return _FUNCTIONS[activation](gate).mul_(up)
