"""Routes rows to the experts of a mixture."""

from __future__ import annotations

import torch
from torch import Tensor

from agentflow.kernels.decoder_weights import Routing


def routed(scores: Tensor, routing: Routing) -> tuple[Tensor, Tensor]:
    """Returns the weights and the indices of each row's experts: [T, used] each. ``scores``: [T, experts]."""
    if routing.normalises:  # the softmax of the chosen scores equals the normalised softmax of all scores
        best = scores.topk(routing.num_used, dim=-1)
        return best.values.float().softmax(dim=-1), best.indices
    likely = scores.float().softmax(dim=-1)
    if routing.num_groups > 1:
        groups = likely.view(len(likely), routing.num_groups, -1)
        used = groups.amax(dim=-1).topk(routing.num_used_groups, dim=-1).indices
        is_used = torch.zeros_like(groups[..., 0]).scatter_(1, used, 1.0)
        likely = (groups * is_used.unsqueeze(-1)).flatten(1)
    best = likely.topk(routing.num_used, dim=-1)
    return best.values * routing.scale, best.indices
