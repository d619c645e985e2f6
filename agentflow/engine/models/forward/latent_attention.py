"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): keys and values of all heads are computed from
one small latent for each token, and from a rotated key that all heads share.

The pool holds latent and rotated key, both as the key and as the value of a single KV head. The matrices that
would expand them are applied to the queries and to the output instead, so that any attention kernel can be
used.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from agentflow.engine.models.config import LatentShape
from agentflow.kernels.inputs import LinearWeight
from agentflow.kernels.ops import Kernels

_EPS = 1e-6  # of both norms; the config's value applies to the other norms only


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """The weights of latent attention."""

    shape: LatentShape
    # Computes the latents of the queries, or the queries themselves if they have no latents; the latent of
    # keys and values; and the shared key.
    down: LinearWeight
    q_norm: Tensor | None  # of the queries' latents
    q_up: LinearWeight | None  # from the queries' latents
    kv_norm: Tensor  # of the latent of keys and values
    key_up: Tensor  # [heads, plain_dim, kv_rank]
    value_up: Tensor  # [heads, kv_rank, value_dim]

    @property
    def nbytes(self) -> int:
        products = [part.nbytes for part in (self.down, self.q_up) if part is not None]
        return sum(products) + self.key_up.nbytes + self.value_up.nbytes

    def project(self, x: Tensor, kernels: Kernels, angles: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Projects ``x`` [T, hidden_size] to queries [T, heads, pool_dim] and to the pool's entries
        [T, 2, 1, pool_dim]."""
        shape, num_heads = self.shape, len(self.key_up)
        down = kernels.linear(x, self.down)
        queries, latent, shared = torch.split(
            down, [down.shape[1] - shape.pool_dim, shape.kv_rank, shape.rotated_dim], dim=1
        )
        if self.q_norm is not None and self.q_up is not None:
            queries = kernels.linear(kernels.rms_norm(queries, self.q_norm, _EPS), self.q_up)
        heads = queries.reshape(len(x), num_heads, -1)
        plain, rotated = heads[..., : shape.plain_dim], heads[..., shape.plain_dim :]
        in_latent = torch.bmm(plain.transpose(0, 1), self.key_up).transpose(0, 1)
        entry = torch.cat(
            (kernels.rms_norm(latent, self.kv_norm, _EPS), _rotate(shared.unsqueeze(1), *angles).squeeze(1)),
            dim=1,
        )
        kv = entry.view(len(x), 1, 1, shape.pool_dim).expand(-1, 2, -1, -1)
        return torch.cat((in_latent, _rotate(rotated, *angles)), dim=2), kv

    def values(self, attended: Tensor) -> Tensor:
        """``attended`` [T, heads * pool_dim] to [T, heads * value_dim]."""
        num_heads = len(self.value_up)
        latents = attended.view(len(attended), num_heads, -1)[..., : self.shape.kv_rank].transpose(0, 1)
        return torch.bmm(latents, self.value_up).transpose(0, 1).flatten(1)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates [T, heads, rotated_dim], whose adjacent dimensions rotate together. In the result, these are
    half of ``rotated_dim`` apart, which does not change the products of queries and keys."""
    x = x.reshape(*x.shape[:2], -1, 2).transpose(2, 3).flatten(2)
    return x * cos + x.roll(x.shape[2] // 2, -1) * sin
