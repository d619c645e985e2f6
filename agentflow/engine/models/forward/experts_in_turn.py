"""Computes the experts of a mixture one after the other, for kernels that cannot group them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from agentflow.kernels.decoder_weights import Experts, Mlp
from agentflow.kernels.linear.routing import routed


def experts_in_turn(
    x: Tensor, scores: Tensor, experts: Experts, shared: Tensor | None, dense: Callable[[Mlp, Tensor], Tensor]
) -> Tensor:
    """Computes a mixture, as ``Mixture`` does. Waits for the device, to divide the rows among the experts.

    Args:
        x: the rows, [T, hidden_size].
        scores: the router's scores, [T, experts].
        experts: the mixture.
        shared: the output of the shared experts, which is added to the result and overwritten; or None.
        dense: computes an MLP.

    Returns:
        [T, hidden_size].
    """
    weights, chosen = routed(scores, experts.routing)
    out = torch.zeros_like(x) if shared is None else shared
    # Sorted by expert, so that each expert computes all of its rows in one product.
    order = chosen.flatten().argsort(stable=True)
    counts = torch.bincount(chosen.flatten(), minlength=len(experts.experts)).tolist()
    places = torch.split(order, counts)
    for expert, place in zip(experts.experts, places, strict=True):
        if len(place):
            rows = place // chosen.shape[1]
            part = dense(expert, x.index_select(0, rows))
            part = part * weights.flatten().index_select(0, place).unsqueeze(1).to(part.dtype)
            out.index_add_(0, rows, part.to(out.dtype))
    return out
