"""The forward pass of the Llama family (Llama, Mistral, Qwen2, Qwen3) over tokens of many requests."""

from __future__ import annotations

import torch
from torch import Tensor

from agentflow.engine.models.config import DecoderConfig
from agentflow.engine.models.forward.adapted_products import Products
from agentflow.engine.models.forward.decode_graphs import DecodeGraphs, DeviceInput, arrays_of, on_device
from agentflow.engine.models.rope import rope_angles
from agentflow.kernels.device_stream import DeviceStream
from agentflow.kernels.inputs import (
    DecoderWeights,
    ForwardInput,
    LayerWeights,
    LinearWeight,
)
from agentflow.kernels.ops import Kernels


def embedding_and_head_bytes(embedding: LinearWeight, head: LinearWeight) -> int:
    """Returns the memory of both, in bytes; if they are tied, they may share it."""
    is_shared = embedding is head or (
        embedding.transposed is not None
        and head.transposed is not None
        and embedding.transposed.data_ptr() == head.transposed.data_ptr()
    )
    return head.nbytes if is_shared else embedding.nbytes + head.nbytes


class LlamaModel:
    """Weights and forward pass. Keeps no state between calls: the KV pool is an argument."""

    def __init__(
        self, config: DecoderConfig, kernels: Kernels, decoder: DecoderWeights, head: LinearWeight
    ) -> None:
        self.config = config
        self._kernels = kernels
        self._decoder = decoder
        self._head = head
        self._axes = torch.tensor(config.rope_axes, dtype=torch.int64, device=decoder.final_norm.device)
        self.whole_forward = kernels.whole_forward(decoder, head)
        self._graphs: DecodeGraphs | None = None
        if decoder.final_norm.device.type == "cuda":
            self._graphs = DecodeGraphs(self._forward, kernels, config.num_heads, config.num_kv_heads)

    @property
    def nbytes(self) -> int:
        """The size of all weights."""
        decoder = self._decoder
        nbytes = embedding_and_head_bytes(decoder.embedding, self._head) + decoder.final_norm.nbytes
        return nbytes + sum(layer.nbytes for layer in decoder.layers)

    @property
    def keeps_order(self) -> bool:
        """Whether a row's sums have the same order regardless of the rest of its batch. Only a whole forward
        pass in one call can guarantee it."""
        return self.whole_forward is not None and self.whole_forward.keeps_order

    def prepare(self, kv_layers: tuple[Tensor, ...]) -> None:
        """Captures the graphs of decode steps, on a GPU."""
        if self._graphs is not None:
            self._graphs.prepare(kv_layers)

    def forward(self, given: ForwardInput) -> Tensor:
        """Computes T tokens and writes their KV. Returns the normed last hidden states of the rows in
        ``given.rows``: [S, hidden_size]."""
        if self.whole_forward is not None:
            return self.whole_forward.start_hidden(given)()
        stream = DeviceStream(self._decoder.final_norm.device)
        return self.launch(on_device(given, stream.upload(arrays_of(given))))

    def launch(self, given: DeviceInput) -> Tensor:
        """The same kernel by kernel, with the arrays on the device: launches kernels and does not wait for
        them. The result is overwritten by the next call."""
        hidden = None if self._graphs is None else self._graphs.run(given)
        return self._forward(given) if hidden is None else hidden

    def _forward(self, given: DeviceInput) -> Tensor:
        """The forward pass, kernel by kernel."""
        token_ids, positions, write_slots = given.arrays
        rows = given.rows
        kernels, decoder, eps = self._kernels, self._decoder, self.config.norm_eps
        products = Products(kernels, given.adapters, token_ids.device)
        residual = kernels.embed(token_ids, decoder.embedding, decoder.final_norm.dtype)
        given_rows = given.given
        if given_rows is not None:
            residual = residual.index_copy(0, given_rows.rows, given_rows.values)
            if given_rows.axis_positions is not None:
                positions = given_rows.axis_positions[self._axes].t()
        cos, sin = rope_angles(positions, decoder.frequencies, residual.dtype)
        normed = kernels.rms_norm(residual, decoder.layers[0].input_norm, eps)
        last = len(decoder.layers) - 1
        for i, layer in enumerate(decoder.layers):
            kv_layer = given.kv_layers[i]
            qkv = products.linear(normed, layer.qkv, i, "qkv")
            queries = self._queries(layer, qkv, cos, sin, kv_layer, write_slots)
            if i == last and not len(rows):
                return normed[:0]  # a chunk of a prompt: only its KV is needed
            attended = kernels.attention(queries, kv_layer, given.plan, self.config.head_dim**-0.5)
            if i == last and len(rows) < len(token_ids):
                attended, residual = attended.index_select(0, rows), residual.index_select(0, rows)
                products.keep_sampled()
            attended = products.linear(attended, layer.output, i, "output")
            normed, residual = kernels.add_rms_norm(attended, residual, layer.mlp_norm, eps)
            gated = products.gated_linear(normed, layer.gate_up, i, "gate_up")
            mlp = products.linear(gated, layer.down, i, "down")
            next_norm = decoder.final_norm if i == last else decoder.layers[i + 1].input_norm
            if given_rows is not None and given_rows.is_deep(i):
                residual = given_rows.add_deep(residual + mlp, i)
                normed = kernels.rms_norm(residual, next_norm, eps)
            else:
                normed, residual = kernels.add_rms_norm(mlp, residual, next_norm, eps)
        return normed if len(rows) < len(token_ids) else normed.index_select(0, rows)

    def logits(self, hidden: Tensor) -> Tensor:
        """[S, hidden_size] to [S, vocab_size] in float32."""
        return self._kernels.exact_linear(hidden, self._head)

    def _queries(
        self,
        layer: LayerWeights,
        qkv: Tensor,
        cos: Tensor,
        sin: Tensor,
        kv_layer: Tensor,
        write_slots: Tensor,
    ) -> Tensor:
        """Returns the rotated queries [T, heads, head_dim], and writes keys and values to the pool."""
        config, kernels = self.config, self._kernels
        num_heads, num_kv_heads = config.num_heads, config.num_kv_heads
        qkv = qkv.view(-1, num_heads + 2 * num_kv_heads, config.head_dim)
        if layer.q_norm is not None and layer.k_norm is not None:
            for norm, first, end in (
                (layer.q_norm, 0, num_heads),
                (layer.k_norm, num_heads, num_heads + num_kv_heads),
            ):
                qkv[:, first:end] = kernels.rms_norm(qkv[:, first:end], norm, config.norm_eps)
        return kernels.rope_and_write(qkv, cos, sin, kv_layer, write_slots)
