"""The forward pass of every architecture in ``families``, composed of blocks: norms, attention, and a dense
or sparse MLP. Llama-shaped models have a faster forward pass (``llama``)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from agentflow.engine.models.config import DecoderConfig, ExpertsShape, LayerShape
from agentflow.engine.models.families.gpt_oss import ALPHA, LIMIT
from agentflow.engine.models.forward.adapted_products import Products
from agentflow.engine.models.forward.decode_graphs import DecodeGraphs, DeviceInput, arrays_of, on_device
from agentflow.engine.models.forward.latent_attention import LatentAttention
from agentflow.engine.models.rope import RopeConfig, inverse_frequencies, rope_angles
from agentflow.kernels.device_stream import DeviceStream
from agentflow.kernels.inputs import ForwardInput, LinearWeight
from agentflow.kernels.masked_attention import AttentionRule, MaskedPlans, masked_attention
from agentflow.kernels.ops import Kernels


@dataclass(frozen=True, slots=True)
class Norm:
    """RMS norm, or layer norm if there is a bias."""

    weight: Tensor
    bias: Tensor | None
    eps: float
    is_less_one: bool = False  # the weight is stored minus 1

    def __call__(self, x: Tensor, kernels: Kernels) -> Tensor:
        if self.bias is not None:
            return torch.nn.functional.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)
        if not self.is_less_one:
            return kernels.rms_norm(x, self.weight, self.eps)
        wide = x.float()
        normed = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + self.eps)
        return (normed * (1.0 + self.weight.float())).to(x.dtype)


@dataclass(frozen=True, slots=True)
class Mlp:
    """A dense MLP."""

    gate_up: LinearWeight  # both halves, or only the first if the MLP has no gate
    down: LinearWeight
    is_fused: bool  # ``gate_up`` is packed for ``Kernels.gated_linear``


@dataclass(frozen=True, slots=True)
class Experts:
    """A mixture of experts."""

    router: LinearWeight  # computes the scores of the experts
    experts: Sequence[Mlp]
    shared: Mlp | None = None  # computes every token


@dataclass(frozen=True, slots=True)
class Layer:
    """The weights of a layer. Norms are None where the family has none."""

    input_norm: Norm | None
    qkv: LinearWeight | LatentAttention
    q_norm: Norm | None
    k_norm: Norm | None
    sinks: Tensor | None
    output: LinearWeight
    attention_norm: Norm | None  # of the attention's output
    mlp_norm: Norm | None
    mlp: Mlp | Experts
    output_norm: Norm | None  # of the MLP's output


class _Batch:
    """The data that all layers of one forward pass use: tensors of its rows, angles, and attention plans.
    ``is_captured``: in a graph, which is replayed for texts of any length."""

    def __init__(self, given: DeviceInput, kernels: Kernels, *, is_captured: bool = False) -> None:
        self.given, self.rows = given, given.rows
        self.token_ids, self.positions, self.write_slots = given.arrays
        self.angles: dict[str | None, tuple[Tensor, Tensor]] = {}
        self._is_captured = is_captured
        self._longest = max(
            [*given.plan.kv_lens.tolist(), *(_tree_lens(given.plan.trees) if given.plan.trees else [])]
        )
        self.plans = MaskedPlans(given.plan, self.rows.device)
        self.products = Products(kernels, given.adapters, self.rows.device)

    def window(self, layer: LayerShape) -> int:
        """Returns the layer's window, or 0 if all texts of the batch fit into it."""
        return layer.window if self._is_captured or self._longest > layer.window else 0


def _tree_lens(trees: object) -> list[int]:
    prefix_lens, path_lens = trees.prefix_lens, trees.path_lens  # type: ignore[attr-defined]
    return [int(prefix_lens.max()) + int(path_lens.max())]


class Decoder:
    """Weights and forward pass. Keeps no state between calls: the KV pool is an argument.

    Args:
        config: the shape.
        kernels: the implementation that packed the weights.
        embedding: [vocab_size, hidden_size].
        positions: the table of learned positions, or None.
        layers: the weights of all layers.
        final_norm: the norm after the last layer.
        head: computes the logits.
        nbytes: the memory of all weights, in bytes.
    """

    def __init__(
        self,
        config: DecoderConfig,
        kernels: Kernels,
        *,
        embedding: LinearWeight,
        positions: Tensor | None,
        layers: Sequence[Layer],
        final_norm: Norm,
        head: LinearWeight,
        nbytes: int,
    ) -> None:
        self.config = config
        self.nbytes = nbytes
        self._kernels = kernels
        self._embedding = embedding
        self._positions = positions
        self._layers = layers
        self._final_norm = final_norm
        self._head = head
        self._is_queued = kernels.ruled_attention is not None and not config.latent and not config.experts
        self._graphs: DecodeGraphs | None = None
        if final_norm.weight.device.type == "cuda" and self._is_queued:
            self._graphs = self.graphs()
        scale = torch.tensor(config.embedding_scale, dtype=final_norm.weight.dtype)
        self._embedding_scale = float(scale)
        self._axes = torch.tensor(config.rope_axes, dtype=torch.int64, device=final_norm.weight.device)
        self._ropes: dict[str, RopeConfig] = {"global": config.rope}
        if config.local_rope is not None:
            self._ropes["local"] = config.local_rope
        self._frequencies = {
            name: inverse_frequencies(rope, config.rotated_dim).to(final_norm.weight.device)
            for name, rope in self._ropes.items()
        }

    @property
    def queues_work(self) -> bool:
        """Whether ``launch`` never waits for the device. It does for experts, to divide the rows among
        them."""
        return self._kernels.QUEUES_WORK and self._is_queued

    def graphs(self) -> DecodeGraphs:
        """Returns graphs of decode steps, without any captured."""
        config = self.config
        windows = {config.layer(i).window for i in range(len(self._layers))}
        return DecodeGraphs(
            lambda given: self._forward(_Batch(given, self._kernels, is_captured=True)),
            self._kernels,
            config.num_heads,
            config.num_kv_heads,
            sorted(windows),
        )

    def prepare(self, kv_layers: tuple[Tensor, ...]) -> None:
        """Captures the graphs of decode steps, on a GPU."""
        if self._graphs is not None:
            self._graphs.prepare(kv_layers)

    def forward(self, given: ForwardInput) -> Tensor:
        """Computes T tokens and writes their KV. Returns the normed last hidden states of the rows in
        ``given.rows``: [S, hidden_size]."""
        stream = DeviceStream(self._final_norm.weight.device)
        return self.launch(on_device(given, stream.upload(arrays_of(given))))

    def launch(self, given: DeviceInput) -> Tensor:
        """The same kernel by kernel, with the arrays on the device. The result is overwritten by the next
        call."""
        hidden = None if self._graphs is None else self._graphs.run(given)
        return self._forward(_Batch(given, self._kernels)) if hidden is None else hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """[S, hidden_size] to [S, vocab_size] in float32."""
        logits = self._kernels.exact_linear(hidden, self._head)
        cap = self.config.logit_cap
        return logits.div_(cap).tanh_().mul_(cap) if cap else logits

    def _forward(self, batch: _Batch) -> Tensor:
        config, kernels = self.config, self._kernels
        hidden = kernels.embed(batch.token_ids, self._embedding, self._final_norm.weight.dtype)
        if config.embedding_scale != 1.0:
            hidden = hidden * self._embedding_scale
        given = batch.given.given
        positions = batch.positions
        if given is not None:
            hidden = hidden.index_copy(0, given.rows, given.values)
            if given.axis_positions is not None:
                positions = given.axis_positions[self._axes].t()
        if self._positions is not None:
            assert config.position_offset is not None
            places = batch.positions + config.position_offset
            hidden = hidden + torch.nn.functional.embedding(places, self._positions)
        for name, frequencies in self._frequencies.items():
            amplitude = self._ropes[name].amplitude
            batch.angles[name] = rope_angles(positions, frequencies, hidden.dtype, amplitude)
        last = len(self._layers) - 1
        for i, layer in enumerate(self._layers):
            shape = config.layer(i)
            normed = hidden if layer.input_norm is None else layer.input_norm(hidden, kernels)
            queries = self._queries(layer, shape, normed, batch, i)
            if i == last and not len(batch.rows):
                return hidden[:0]  # a chunk of a prompt: only its KV is needed
            attended = self._attended(layer, shape, queries, batch, batch.given.kv_layers[i])
            if i == last and len(batch.rows) < len(hidden):
                attended, hidden = attended.index_select(0, batch.rows), hidden.index_select(0, batch.rows)
                batch.products.keep_sampled()
            if isinstance(layer.qkv, LatentAttention):
                attended = layer.qkv.values(attended)
            attended = batch.products.linear(attended, layer.output, i, "output")
            if layer.attention_norm is not None:
                attended = layer.attention_norm(attended, kernels)
            hidden = hidden + attended
            normed = hidden if layer.mlp_norm is None else layer.mlp_norm(hidden, kernels)
            out = self._mlp(layer.mlp, normed, batch.products, i)
            if layer.output_norm is not None:
                out = layer.output_norm(out, kernels)
            hidden = hidden + out
            if given is not None:
                hidden = given.add_deep(hidden, i)
        if len(hidden) == len(batch.token_ids):
            hidden = hidden.index_select(0, batch.rows)
        return self._final_norm(hidden, kernels)

    def _queries(self, layer: Layer, shape: LayerShape, x: Tensor, batch: _Batch, index: int) -> Tensor:
        """Returns the rotated queries [T, heads, head_dim], and writes keys and values to the pool."""
        config, kernels, kv_layer = self.config, self._kernels, batch.given.kv_layers[index]
        num_heads, num_kv_heads, head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        if isinstance(layer.qkv, LatentAttention):
            queries, kv = layer.qkv.project(x, kernels, batch.angles["global"])
            kv_layer.index_copy_(0, batch.write_slots, kv)
            return queries
        qkv = batch.products.linear(x, layer.qkv, index, "qkv")
        qkv = qkv.view(-1, num_heads + 2 * num_kv_heads, head_dim)
        if layer.q_norm is not None and layer.k_norm is not None:
            for norm, first, end in (
                (layer.q_norm, 0, num_heads),
                (layer.k_norm, num_heads, num_heads + num_kv_heads),
            ):
                part = qkv[:, first:end]
                rows = part.flatten(1) if config.qk_norm == "row" else part
                qkv[:, first:end] = norm(rows, kernels).view_as(part)
        rope = shape.rope
        if rope is not None and (batch.angles[rope][0].shape[-1] < head_dim or not self._is_queued):
            cos, sin = batch.angles[rope]
            rotated = qkv[:, : num_heads + num_kv_heads, : cos.shape[-1]]
            swapped = rotated.roll(cos.shape[-1] // 2, -1) * sin
            rotated.copy_(rotated * cos + swapped)
            rope = None
        if self._is_queued:  # only the kernel can skip padding rows of graphs, which have no slot
            if rope is None and None not in batch.angles:
                unturned = torch.ones_like(qkv[:, :1])
                batch.angles[None] = unturned, torch.zeros_like(unturned)
            return kernels.rope_and_write(qkv, *batch.angles[rope], kv_layer, batch.write_slots)
        kv_layer.index_copy_(0, batch.write_slots, qkv[:, num_heads:].reshape(-1, 2, num_kv_heads, head_dim))
        return qkv[:, :num_heads]

    def _attended(
        self, layer: Layer, shape: LayerShape, queries: Tensor, batch: _Batch, kv_layer: Tensor
    ) -> Tensor:
        config, window = self.config, batch.window(shape)
        scale = config.attention_scale or config.head_dim**-0.5
        if not window and not config.attention_cap and layer.sinks is None:
            return self._kernels.attention(queries, kv_layer, batch.given.plan, scale)
        rule = AttentionRule(scale, window, config.attention_cap)
        if self._kernels.ruled_attention is not None:
            return self._kernels.ruled_attention(queries, kv_layer, batch.given.plan, rule, layer.sinks)
        return masked_attention(queries, kv_layer, batch.plans.of(window), rule, layer.sinks)

    def _mlp(self, mlp: Mlp | Experts, x: Tensor, products: Products, layer: int) -> Tensor:
        if isinstance(mlp, Mlp):
            return self._dense(mlp, x, products, layer)
        assert self.config.experts is not None
        weights, chosen = _routed(self._kernels.linear(x, mlp.router), self.config.experts)
        unchanged = Products(self._kernels, (), x.device)
        out = torch.zeros_like(x) if mlp.shared is None else self._dense(mlp.shared, x, unchanged, layer)
        # The rows of each expert become adjacent: one product for all of them.
        order = chosen.flatten().argsort(stable=True)
        counts = torch.bincount(chosen.flatten(), minlength=len(mlp.experts)).tolist()
        places = torch.split(order, counts)
        for expert, place in zip(mlp.experts, places, strict=True):
            if len(place):
                rows = place // chosen.shape[1]
                part = self._dense(expert, x.index_select(0, rows), unchanged, layer)
                part = part * weights.flatten().index_select(0, place).unsqueeze(1).to(part.dtype)
                out.index_add_(0, rows, part.to(out.dtype))
        return out

    def _dense(self, mlp: Mlp, x: Tensor, products: Products, layer: int) -> Tensor:
        if mlp.is_fused:
            inner = products.gated_linear(x, mlp.gate_up, layer, "gate_up")
        else:
            inner = self._activated(products.linear(x, mlp.gate_up, layer, "gate_up"))
        return products.linear(inner, mlp.down, layer, "down")

    def _activated(self, inner: Tensor) -> Tensor:
        config = self.config
        if not config.is_gated:
            return _ACTIVATIONS[config.activation](inner)
        gate, up = inner.chunk(2, dim=-1)
        if config.activation == "clamped_swiglu":
            return clamped_swiglu(gate, up)
        return _ACTIVATIONS[config.activation](gate) * up


_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": torch.nn.functional.silu,
    "gelu": torch.nn.functional.gelu,
    "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    "relu": torch.relu,
}


def clamped_swiglu(gate: Tensor, up: Tensor, limit: float = LIMIT, alpha: float = ALPHA) -> Tensor:
    """The activation of GPT-OSS."""
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (up + 1) * (gate * torch.sigmoid(gate * alpha))


def _routed(scores: Tensor, shape: ExpertsShape) -> tuple[Tensor, Tensor]:
    """Returns the weights and the numbers of each row's experts: [T, used] each."""
    if shape.normalises:  # the softmax of the chosen scores equals the normalised softmax of all scores
        best = scores.topk(shape.num_used, dim=-1)
        return best.values.float().softmax(dim=-1), best.indices
    likely = scores.float().softmax(dim=-1)
    if shape.num_groups > 1:
        groups = likely.view(len(likely), shape.num_groups, -1)
        used = groups.amax(dim=-1).topk(shape.num_used_groups, dim=-1).indices
        is_used = torch.zeros_like(groups[..., 0]).scatter_(1, used, 1.0)
        likely = (groups * is_used.unsqueeze(-1)).flatten(1)
    best = likely.topk(shape.num_used, dim=-1)
    return best.values * shape.scale, best.indices
