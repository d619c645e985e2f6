"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): the keys and values of all heads are computed
from one small latent per token, and from a rotated key that all heads share.

The pool stores the latent and the rotated key, both as the key and as the value of a single KV head. The
matrices that would expand them are applied to the queries and to the output instead, so any attention kernel
works.
"""

from __future__ import annotations

import torch
from torch import Tensor

from agentflow.kernels.decoder_weights import LatentWeights
from agentflow.kernels.platforms import Kernels


def project(
    weights: LatentWeights, x: Tensor, kernels: Kernels, angles: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor]:
    """Projects ``x`` [T, hidden_size] to queries [T, heads, pool_dim] and entries of the pool
    [T, 2, 1, pool_dim]."""
    kv_rank, plain_dim, num_heads = weights.kv_rank, weights.plain_dim, len(weights.key_up)
    down, rotated_dim = kernels.linear.multiply(x, weights.down), angles[0].shape[-1]
    pool_dim = kv_rank + rotated_dim
    queries, latent, shared = torch.split(down, [down.shape[1] - pool_dim, kv_rank, rotated_dim], dim=1)
    if weights.q_norm is not None and weights.q_up is not None:
        normed = kernels.rows.rms_norm(queries, weights.q_norm, weights.eps)
        queries = kernels.linear.multiply(normed, weights.q_up)
    heads = queries.reshape(len(x), num_heads, -1)
    plain, rotated = heads[..., :plain_dim], heads[..., plain_dim:]
    in_latent = torch.bmm(plain.transpose(0, 1), weights.key_up).transpose(0, 1)
    entry = torch.cat(
        (
            kernels.rows.rms_norm(latent, weights.kv_norm, weights.eps),
            _rotate(shared.unsqueeze(1), *angles).squeeze(1),
        ),
        dim=1,
    )
    kv = entry.view(len(x), 1, 1, pool_dim).expand(-1, 2, -1, -1)
    return torch.cat((in_latent, _rotate(rotated, *angles)), dim=2), kv


def project_values(weights: LatentWeights, attended: Tensor) -> Tensor:
    """Expands attended latents [T, heads * pool_dim] to values [T, heads * value_dim]."""
    num_heads = len(weights.value_up)
    latents = attended.view(len(attended), num_heads, -1)[..., : weights.kv_rank].transpose(0, 1)
    return torch.bmm(latents, weights.value_up).transpose(0, 1).flatten(1)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates [T, heads, rotated_dim], whose adjacent dimensions rotate together. In the result they are
    ``rotated_dim / 2`` apart, which does not change the products of queries and keys."""
    x = x.reshape(*x.shape[:2], -1, 2).transpose(2, 3).flatten(2)
    return x * cos + x.roll(x.shape[2] // 2, -1) * sin
