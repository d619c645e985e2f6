"""The forward pass of the Llama family (Llama, Mistral, Qwen2, Qwen3) over rows of many requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from agentflow.kernels.attention_parts import AttentionPlan
from agentflow.kernels.linear_weight import LinearWeight
from agentflow.kernels.ops import Kernels
from agentflow.server.model.config import LlamaConfig
from agentflow.server.model.kv_pool import KvPool
from agentflow.server.model.rope import inverse_frequencies, rope_angles


@dataclass(frozen=True, slots=True)
class Layer:
    """One decoder layer's weights. ``qkv``: queries, keys and values in one product; ``gate_up``:
    both halves of the gated MLP. ``q_norm`` and ``k_norm`` [head_dim]: Qwen3 only."""

    input_norm: Tensor
    qkv: LinearWeight
    q_norm: Tensor | None
    k_norm: Tensor | None
    output: LinearWeight
    mlp_norm: Tensor
    gate_up: LinearWeight
    down: LinearWeight

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for f in fields(self) if (part := getattr(self, f.name)) is not None)


class LlamaModel:
    """Weights and forward pass. It keeps no state between calls: the KV pool is passed in."""

    def __init__(
        self,
        config: LlamaConfig,
        kernels: Kernels,
        *,
        embedding: Tensor,
        layers: Sequence[Layer],
        final_norm: Tensor,
        head: LinearWeight,
    ) -> None:
        self.config = config
        self.is_tied = config.tie_word_embeddings
        self._kernels = kernels
        self._embedding = embedding
        self._layers = layers
        self._final_norm = final_norm
        self._head = head
        self._frequencies = inverse_frequencies(config.rope, config.head_dim).to(embedding.device)

    @property
    def nbytes(self) -> int:
        """Bytes of all weights as they are held."""
        nbytes = self._embedding.nbytes + self._final_norm.nbytes + self._head.nbytes
        head = self._head.transposed
        if head is not None and head.data_ptr() == self._embedding.data_ptr():
            nbytes -= self._embedding.nbytes  # one tensor, both
        return nbytes + sum(layer.nbytes for layer in self._layers)

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        write_slots: Tensor,
        kv_pool: KvPool,
        plan: AttentionPlan,
        rows: Tensor,
    ) -> Tensor:
        """Compute T rows, write their KV, and give the last hidden states, normed, of ``rows`` [S].

        ``token_ids``, ``positions``, ``write_slots`` [T] int64. The result is [S, hidden_size].
        """
        kernels, eps = self._kernels, self.config.rms_norm_eps
        residual = torch.nn.functional.embedding(token_ids, self._embedding)
        cos, sin = rope_angles(positions, self._frequencies, residual.dtype)
        normed = kernels.rms_norm(residual, self._layers[0].input_norm, eps)
        last = len(self._layers) - 1
        for i, layer in enumerate(self._layers):
            kv_layer = kv_pool.layers[i]
            queries = self._queries(layer, normed, cos, sin, kv_layer, write_slots)
            if i == last and not len(rows):
                return normed[:0]  # a chunk of a prompt: its KV was all that was wanted
            attended = kernels.attention(queries, kv_layer, plan, self.config.head_dim**-0.5)
            if i == last and len(rows) < len(token_ids):
                attended, residual = attended.index_select(0, rows), residual.index_select(0, rows)
            attended = kernels.linear(attended, layer.output)
            normed, residual = kernels.add_rms_norm(attended, residual, layer.mlp_norm, eps)
            mlp = kernels.linear(kernels.silu_mul(kernels.linear(normed, layer.gate_up)), layer.down)
            next_norm = self._final_norm if i == last else self._layers[i + 1].input_norm
            normed, residual = kernels.add_rms_norm(mlp, residual, next_norm, eps)
        return normed if len(rows) < len(token_ids) else normed.index_select(0, rows)

    def logits(self, hidden: Tensor) -> Tensor:
        """[S, hidden_size] to [S, vocab_size] in float32."""
        return self._kernels.exact_linear(hidden, self._head)

    def _queries(
        self, layer: Layer, x: Tensor, cos: Tensor, sin: Tensor, kv_layer: Tensor, write_slots: Tensor
    ) -> Tensor:
        """The rotated queries [T, heads, head_dim]; keys and values go to the pool."""
        config, kernels = self.config, self._kernels
        num_heads, num_kv_heads = config.num_heads, config.num_kv_heads
        qkv = kernels.linear(x, layer.qkv).view(-1, num_heads + 2 * num_kv_heads, config.head_dim)
        if layer.q_norm is not None and layer.k_norm is not None:
            for norm, first, end in (
                (layer.q_norm, 0, num_heads),
                (layer.k_norm, num_heads, num_heads + num_kv_heads),
            ):
                qkv[:, first:end] = kernels.rms_norm(qkv[:, first:end], norm, config.rms_norm_eps)
        return kernels.rope_and_write(qkv, cos, sin, kv_layer, write_slots)
