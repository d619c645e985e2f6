"""The weights with which tokens are drawn: integers, so that their sums do not depend on the order."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from agentflow.kernels.inputs import FloatArray

WEIGHT_BITS = 35
"""The likeliest token has the weight 2 to this power."""
EXP2 = (1.3264726e-3, 9.671513e-3, 5.5507336e-2, 2.4022242e-1, 6.93147e-1, 1.0)
"""The float32 coefficients of a polynomial for 2^x on [-1/2, 1/2], highest power first. Its relative error is
below 2e-7."""
LOG2_E = 1.4426950408889634
LEAST_EXPONENT = -64.0
"""Weights below 2 to this power, relative to the likeliest token, are 0."""


def scale_factors(temperatures: FloatArray) -> FloatArray:
    """Returns log2(e) / temperature, limited to the largest float32."""
    factors = np.minimum(LOG2_E / temperatures.astype(np.float64), np.finfo(np.float32).max)
    return factors.astype(np.float32)


def whole_weights(logits: Tensor, factors: Tensor) -> Tensor:
    """Returns the weights of tokens as ``Sampler.choose`` defines them: integers, as float32.

    Sums of at most 2^18 weights are exact in float64 and in int64, in any order, and each operation here is
    rounded separately. So all implementations compute the same weights, and choose the same tokens.

    Args:
        logits: [S, vocabulary], relative to the highest logit of the row; overwritten.
        factors: [S, 1], from ``scale_factors``.
    """
    exponents = logits.mul_(factors).clamp_(min=LEAST_EXPONENT)
    whole = (exponents + 0.5).floor_()
    rest = exponents.sub_(whole)
    power = torch.full_like(rest, EXP2[0])
    for coefficient in EXP2[1:]:
        power.mul_(rest).add_(coefficient)
    power.view(torch.int32).add_((whole.int() + WEIGHT_BITS) << 23)  # times 2^(whole + WEIGHT_BITS)
    return power.floor_()
