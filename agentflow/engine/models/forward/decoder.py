"""The forward pass of every architecture in ``families``: one call if the kernels have a whole forward pass,
else norms, attention, and a dense or sparse MLP. Both use the same ``DecoderWeights``."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from agentflow.engine.models.forward.adapted_products import Products
from agentflow.engine.models.forward.decode_graphs import DecodeGraphs, DeviceInput, list_arrays, on_device
from agentflow.engine.models.forward.experts_in_turn import experts_in_turn
from agentflow.engine.models.forward.latent_attention import project, project_values
from agentflow.engine.models.rope import rope_angles
from agentflow.kernels.attention.backend import AttentionRule
from agentflow.kernels.decoder_weights import (
    DecoderWeights,
    Experts,
    LatentWeights,
    LayerWeights,
    Mlp,
    Norm,
    Rope,
)
from agentflow.kernels.device_stream import DeviceStream
from agentflow.kernels.inputs import ForwardInput, LinearWeight, TreeAttention
from agentflow.kernels.platforms import Kernels


class _Pass:
    """The data that all layers of one forward pass share: tensors of its rows, angles, and products.
    ``is_captured``: the pass is captured in a graph, which is replayed for texts of any length."""

    def __init__(self, given: DeviceInput, kernels: Kernels, *, is_captured: bool = False) -> None:
        self.given, self.rows = given, given.rows
        self.token_ids, self.positions, self.write_slots = given.arrays
        self.angles: dict[int | None, tuple[Tensor, Tensor]] = {}  # by the index of the rope
        self._is_captured = is_captured
        self._longest = max([*given.plan.kv_lens.tolist(), _longest_path(given.plan.trees)])
        self.products = Products(kernels.linear, given.adapters, self.rows.device, given.grouped)

    def make_positions(self, rope: Rope) -> Tensor:
        """Returns the positions of the rows: [T], or [T, frequencies] if they differ between the rope's
        axes."""
        given_rows, positions = self.given.given_rows, self.positions
        if given_rows is not None and given_rows.axis_positions is not None and rope.axes is not None:
            positions = given_rows.axis_positions[rope.axes].t()
        found: Tensor = positions
        return found

    def window(self, layer: LayerWeights) -> int:
        """Returns the layer's window, or 0 if all texts of the batch fit into it."""
        return layer.window if self._is_captured or self._longest > layer.window else 0


def _longest_path(trees: TreeAttention | None) -> int:
    """Returns a bound of the tokens from the start of a text to a node of its tree; 0 without trees."""
    return 0 if trees is None else int(trees.prefix_lens.max()) + int(trees.path_lens.max())


def apply_norm(x: Tensor, norm: Norm, kernels: Kernels) -> Tensor:
    """Applies a norm to rows."""
    if norm.bias is not None:
        return kernels.rows.layer_norm(x, norm.weight, norm.bias, norm.eps)
    if not norm.is_less_one:
        return kernels.rows.rms_norm(x, norm.weight, norm.eps)
    wide = x.float()
    result = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + norm.eps)
    return (result * (1.0 + norm.weight.float())).to(x.dtype)


class Decoder:
    """The weights and the forward pass of a model. Keeps no KV between calls: the KV pool is an argument.

    Args:
        kernels: the implementation that packed the weights.
        weights: all weights and parameters except the head.
        head: computes the logits.
    """

    def __init__(self, kernels: Kernels, weights: DecoderWeights, head: LinearWeight) -> None:
        self.weights = weights
        self._kernels = kernels
        self._head = head
        self._device = weights.final_norm.weight.device
        make = kernels.whole_forward
        self.whole_forward = None if make is None else make(weights, head)
        layers = weights.layers
        self._part = weights.part
        linear, dtype = kernels.linear, weights.final_norm.weight.dtype
        self._mixtures = [
            linear.group_experts(layer.mlp, weights.activation) if isinstance(layer.mlp, Experts) else None
            for layer in layers
        ]
        self._adapter_table = linear.adapter_table(len(layers), dtype, self._device)
        has_rules = any(layer.window or layer.sinks is not None for layer in layers) or weights.attention_cap
        # Sums over ranks are not captured in graphs.
        self._is_queued = (
            weights.part is None
            and (kernels.queues_work or not has_rules)
            and not any(
                isinstance(layer.qkv, LatentWeights) or (isinstance(layer.mlp, Experts) and mixture is None)
                for layer, mixture in zip(layers, self._mixtures, strict=True)
            )
        )
        self._graphs: DecodeGraphs | None = None
        if self._device.type == "cuda" and self._is_queued:
            self._graphs = self.graphs()

    @property
    def nbytes(self) -> int:
        """The memory of all weights, in bytes. A tied embedding and head may share theirs."""
        embedding, head = self.weights.embedding, self._head
        is_shared = embedding is head or (
            embedding.transposed is not None
            and head.transposed is not None
            and embedding.transposed.data_ptr() == head.transposed.data_ptr()
        )
        nbytes = self.weights.nbytes + head.nbytes - (embedding.nbytes if is_shared else 0)
        return nbytes + (0 if self.whole_forward is None else self.whole_forward.nbytes)

    @property
    def keeps_order(self) -> bool:
        """Whether a row's sums have the same order regardless of the rest of its batch. Only a whole forward
        pass in one call can guarantee it."""
        return self.whole_forward is not None and self.whole_forward.keeps_order

    @property
    def queues_work(self) -> bool:
        """Whether ``launch`` never waits for the device, if the kernels queue their work. It waits to divide
        the rows among experts that are computed one after the other."""
        return self._is_queued

    def graphs(self) -> DecodeGraphs:
        """Returns the graphs of decode steps. None is captured yet."""
        weights = self.weights
        return DecodeGraphs(
            lambda given: self._forward(_Pass(given, self._kernels, is_captured=True)),
            self._kernels.attention,
            weights.num_heads,
            weights.num_kv_heads,
            sorted({layer.window for layer in weights.layers}),
        )

    def prepare(self, kv_layers: tuple[Tensor, ...], table: Tensor) -> None:
        """Captures the graphs of decode steps, on a GPU. ``table``: as in ``DecodeGraphs``."""
        if self._graphs is not None:
            self._graphs.prepare(kv_layers, table)

    def forward(self, given: ForwardInput) -> Tensor:
        """Computes T tokens and writes their KV. Returns the normed last hidden states of the rows in
        ``given.rows``: [S, hidden_size]."""
        if self.whole_forward is not None:
            return self.whole_forward.start_hidden(given)()
        return self.launch(on_device(given, DeviceStream(self._device).upload(list_arrays(given))))

    def launch(self, given: DeviceInput) -> Tensor:
        """Launches the kernels of ``forward`` with the arrays on the device, and does not wait for them if
        ``queues_work``. The next call overwrites the result."""
        if given.adapters and self._adapter_table is not None:
            num_rows = given.arrays.shape[1]
            given = replace(given, grouped=self._adapter_table.grouped(given.adapters, num_rows))
        hidden = None if self._graphs is None else self._graphs.run(given)
        return self._forward(_Pass(given, self._kernels)) if hidden is None else hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """Computes logits [S, vocab_size] in float32 from hidden states [S, hidden_size]. Ranks other than
        rank 0 return an empty tensor."""
        logits = self._kernels.linear.multiply_exactly(hidden, self._head)
        if self._part is not None:
            gathered = self._part.ranks.gather(logits, self._part.token_counts)
            if gathered is None:
                return logits[:0]
            logits = gathered
        scale, cap = self.weights.logit_scale, self.weights.logit_cap
        logits = logits if scale == 1.0 else logits.mul_(scale)
        return logits.div_(cap).tanh_().mul_(cap) if cap else logits

    def _forward(self, batch: _Pass) -> Tensor:
        weights, layers, products = self.weights, self.weights.layers, batch.products
        given_rows = batch.given.given_rows
        residual = self._embedded(batch)
        for place, rope in enumerate(weights.ropes):
            positions = batch.make_positions(rope)
            batch.angles[place] = rope_angles(positions, rope.frequencies, residual.dtype, rope.amplitude)
        normed, last = self._normed(residual, layers[0].input_norm), len(layers) - 1
        for i, layer in enumerate(layers):
            queries = self._queries(layer, normed, batch, i)
            if i == last and not len(batch.rows):
                return normed[:0]  # no row is sampled, only KV is needed
            attended = self._attended(layer, queries, batch, batch.given.kv_layers[i])
            if i == last and len(batch.rows) < len(batch.token_ids):
                attended, residual = (
                    attended.index_select(0, batch.rows),
                    residual.index_select(0, batch.rows),
                )
                products.keep_sampled(batch.rows)
            if isinstance(layer.qkv, LatentWeights):
                attended = project_values(layer.qkv, attended)
            attended = self._summed(products.multiply(attended, layer.output, i, "output"))
            attended = self._normed(attended, layer.attention_norm)
            if weights.is_parallel:
                normed, residual = self._normed(residual, layer.mlp_norm), residual + attended
            else:
                normed, residual = self._added(attended, residual, layer.mlp_norm)
            out = self._normed(self._summed(self._mlp(layer.mlp, normed, batch, i)), layer.output_norm)
            next_norm = weights.final_norm if i == last else layers[i + 1].input_norm
            if given_rows is not None and given_rows.is_deep(i):
                residual = given_rows.add_deep(residual + out, i)
                normed = self._normed(residual, next_norm)
            else:
                normed, residual = self._added(out, residual, next_norm)
        is_whole = len(normed) == len(batch.token_ids)
        return normed.index_select(0, batch.rows) if is_whole else normed

    def _embedded(self, batch: _Pass) -> Tensor:
        weights, dtype, part = self.weights, self.weights.final_norm.weight.dtype, self._part
        if part is None:
            hidden = self._kernels.linear.embed(batch.token_ids, weights.embedding, dtype)
        else:
            places = batch.token_ids - part.first_token
            is_here = (places >= 0) & (places < weights.embedding.shape[0])
            hidden = self._kernels.linear.embed(torch.where(is_here, places, 0), weights.embedding, dtype)
            hidden = self._summed(hidden.masked_fill(~is_here.unsqueeze(1), 0))
        if weights.embedding_scale != 1.0:
            hidden = hidden * weights.embedding_scale
        if weights.positions is not None:
            places = batch.positions + weights.position_offset
            hidden = hidden + torch.nn.functional.embedding(places, weights.positions)
        if batch.given.given_rows is not None:
            hidden = hidden.index_copy(0, batch.given.given_rows.rows, batch.given.given_rows.values)
        return hidden

    def _summed(self, x: Tensor) -> Tensor:
        """Returns the sum over all ranks of the model. May overwrite ``x``."""
        return x if self._part is None else self._part.ranks.add(x.contiguous())

    def _normed(self, x: Tensor, norm: Norm | None) -> Tensor:
        return x if norm is None else apply_norm(x, norm, self._kernels)

    def _normed_heads(self, heads: Tensor, norm: Norm) -> Tensor:
        """Applies a norm to each head [T, heads, head_dim], or to all heads of a row together if the norm has
        their size."""
        if norm.weight.ndim == 1:
            rows = heads if len(norm.weight) == heads.shape[2] else heads.flatten(1)
            return self._normed(rows, norm).view_as(heads)
        biases = [None] * len(norm.weight) if norm.bias is None else norm.bias
        norms = [replace(norm, weight=w, bias=b) for w, b in zip(norm.weight, biases, strict=True)]
        return torch.stack([self._normed(heads[:, i], norm) for i, norm in enumerate(norms)], dim=1)

    def _added(self, x: Tensor, residual: Tensor, norm: Norm | None) -> tuple[Tensor, Tensor]:
        """Returns the norm of the sum, and the sum. Overwrites ``residual``."""
        if norm is not None and norm.bias is None and not norm.is_less_one:
            return self._kernels.rows.add_rms_norm(x, residual, norm.weight, norm.eps)
        residual = residual + x
        return self._normed(residual, norm), residual

    def _queries(self, layer: LayerWeights, x: Tensor, batch: _Pass, index: int) -> Tensor:
        """Returns the rotated queries [T, heads, head_dim], and writes keys and values to the pool."""
        kv_layer, head_dim = batch.given.kv_layers[index], self.weights.head_dim
        num_heads, num_kv_heads = self.weights.num_heads, self.weights.num_kv_heads
        if isinstance(layer.qkv, LatentWeights):
            queries, kv = project(layer.qkv, x, self._kernels, batch.angles[0])
            kv_layer.index_copy_(0, batch.write_slots, kv)
            return queries
        qkv = batch.products.multiply(x, layer.qkv, index, "qkv")
        qkv = qkv.view(-1, num_heads + 2 * num_kv_heads, head_dim)
        for norm, first, end in (
            (layer.q_norm, 0, num_heads),
            (layer.k_norm, num_heads, num_heads + num_kv_heads),
        ):
            if norm is not None:
                qkv[:, first:end] = self._normed_heads(qkv[:, first:end], norm)
        rope = layer.rope
        if rope is not None and (num_rotated := batch.angles[rope][0].shape[-1]) < head_dim:
            cos, sin = batch.angles[rope]
            rotated = qkv[:, : num_heads + num_kv_heads, :num_rotated]
            rotated.copy_(rotated * cos + rotated.roll(num_rotated // 2, -1) * sin)
            rope = None
        if rope is None and None not in batch.angles:
            unturned = torch.ones_like(qkv[:, :1])
            batch.angles[None] = unturned, torch.zeros_like(unturned)
        return self._kernels.rows.rope_and_write(qkv, *batch.angles[rope], kv_layer, batch.write_slots)

    def _attended(self, layer: LayerWeights, queries: Tensor, batch: _Pass, kv_layer: Tensor) -> Tensor:
        weights, attention = self.weights, self._kernels.attention
        rule = AttentionRule(weights.attention_scale, batch.window(layer), weights.attention_cap)
        return attention.attend(queries, kv_layer, batch.given.plan, rule, layer.sinks)

    def _mlp(self, mlp: Mlp | Experts, x: Tensor, batch: _Pass, layer: int) -> Tensor:
        if isinstance(mlp, Mlp):
            return self._dense(mlp, x, batch.products, layer)
        linear, mixture = self._kernels.linear, self._mixtures[layer]
        unchanged = Products(linear, (), x.device)
        scores = linear.multiply(x, mlp.router)
        shared = None if mlp.shared is None else self._dense(mlp.shared, x, unchanged, layer)
        if mixture is None:
            return experts_in_turn(
                x, scores, mlp, shared, lambda expert, rows: self._dense(expert, rows, unchanged, layer)
            )
        is_whole = len(x) == len(batch.write_slots)
        return mixture(x, scores, shared, batch.write_slots if is_whole else None)

    def _dense(self, mlp: Mlp, x: Tensor, products: Products, layer: int) -> Tensor:
        inner = products.multiply(x, mlp.gate_up, layer, "gate_up", self.weights.activation)
        return products.multiply(inner, mlp.down, layer, "down")
