"""Loads the weights into the layout of the forward pass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from agentflow.engine.models.checkpoint import TensorSource, open_checkpoint
from agentflow.engine.models.config import DecoderConfig
from agentflow.engine.models.decoder import Decoder, Experts, Layer, Mlp, Norm
from agentflow.engine.models.families.family import ExpertNames, WeightNames
from agentflow.engine.models.families.registry import FAMILIES
from agentflow.engine.models.llama import LlamaModel
from agentflow.engine.models.rope import inverse_frequencies
from agentflow.kernels.inputs import DecoderWeights, LayerWeights, LinearWeight
from agentflow.kernels.ops import Kernels

CausalModel = LlamaModel | Decoder


def load_model(
    path: Path, config: DecoderConfig, *, dtype: torch.dtype, device: torch.device, kernels: Kernels
) -> CausalModel:
    """The model of a folder or GGUF file, with weights of any stored type cast to ``dtype``. Each matrix is
    packed as soon as it is read, so that only one is in memory beside the result. ``BadModelFolder`` if
    tensors are missing, misshapen or left over."""
    names = FAMILIES[config.architecture].names
    with torch.inference_mode(), open_checkpoint(path, dtype, device) as checkpoint:
        loader = _Loader(checkpoint, config, names, kernels)
        model = loader.llama() if config.is_llama_shaped and names == WeightNames() else loader.decoder()
        checkpoint.refuse_leftovers(
            *names.ignored, *([f"{names.head}.weight"] if config.tie_word_embeddings else [])
        )
    return model


class _Loader:
    def __init__(
        self, checkpoint: TensorSource, config: DecoderConfig, names: WeightNames, kernels: Kernels
    ) -> None:
        self._checkpoint = checkpoint
        self._config = config
        self._names = names
        self._kernels = kernels

    def llama(self) -> LlamaModel:
        config, names = self._config, self._names
        embedding, head = self._embedding()
        decoder = DecoderWeights(
            embedding=embedding,
            layers=[self._llama_layer(names.layers.format(i)) for i in range(config.num_layers)],
            final_norm=self._vector(f"{names.final_norm}.weight", config.hidden_size),
            frequencies=inverse_frequencies(config.rope, config.head_dim).to(embedding.device),
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            norm_eps=config.norm_eps,
        )
        packed_head = self._kernels.pack_linear(head, None, exact_output=True)
        return LlamaModel(config, self._kernels, decoder, packed_head)

    def decoder(self) -> Decoder:
        config, names = self._config, self._names
        embedding, head = self._embedding()
        positions = None
        if config.position_offset is not None:
            num_positions = config.max_context + config.position_offset
            positions = self._vector(f"{names.positions}.weight", num_positions, config.hidden_size)
        layers = [self._layer(names.layers.format(i), i) for i in range(config.num_layers)]
        final_norm = self._norm(names.final_norm, config.hidden_size)
        packed_head = self._kernels.pack_linear(head, None, exact_output=True)
        nbytes = embedding.nbytes + packed_head.nbytes + sum(map(_layer_bytes, layers))
        nbytes += positions.nbytes if positions is not None else 0
        shared = packed_head.transposed
        if shared is not None and shared.data_ptr() == embedding.data_ptr():
            nbytes -= embedding.nbytes  # tied: one tensor
        return Decoder(
            config,
            self._kernels,
            embedding=embedding,
            positions=positions,
            layers=layers,
            final_norm=final_norm,
            head=packed_head,
            nbytes=nbytes,
        )

    def _embedding(self) -> tuple[Tensor, Tensor]:
        """The embedding, and the matrix of the head."""
        config, names = self._config, self._names
        shape = config.vocab_size, config.hidden_size
        embedding = self._vector(f"{names.embedding}.weight", *shape)
        if config.tie_word_embeddings:
            return embedding, embedding
        return embedding, self._vector(f"{names.head}.weight", *shape)

    def _llama_layer(self, prefix: str) -> LayerWeights:
        config, names = self._config, self._names
        hidden, inner = config.hidden_size, config.intermediate_size
        has_qk_norm = config.qk_norm == "head"
        return LayerWeights(
            input_norm=self._vector(f"{prefix}{names.input_norm}.weight", hidden),
            qkv=self._qkv(prefix),
            q_norm=self._vector(f"{prefix}{names.q_norm}.weight", config.head_dim) if has_qk_norm else None,
            k_norm=self._vector(f"{prefix}{names.k_norm}.weight", config.head_dim) if has_qk_norm else None,
            output=self._output(prefix),
            mlp_norm=self._vector(f"{prefix}{names.mlp_norm}.weight", hidden),
            gate_up=self._linear(_below(prefix, names.gate_up, inner), hidden, is_gated=True),
            down=self._linear({f"{prefix}{names.down}": hidden}, inner),
        )

    def _layer(self, prefix: str, index: int) -> Layer:
        config, names = self._config, self._names
        hidden, head_dim = config.hidden_size, config.head_dim
        has_rows = config.qk_norm == "row"
        q_size = config.num_heads * head_dim if has_rows else head_dim
        k_size = config.num_kv_heads * head_dim if has_rows else head_dim
        is_sparse = config.layer(index).is_sparse
        return Layer(
            input_norm=self._norm_if_named(prefix, names.input_norm, hidden),
            qkv=self._qkv(prefix),
            q_norm=self._norm(f"{prefix}{names.q_norm}", q_size) if config.qk_norm else None,
            k_norm=self._norm(f"{prefix}{names.k_norm}", k_size) if config.qk_norm else None,
            sinks=self._vector(f"{prefix}{names.sinks}", config.num_heads) if config.has_sinks else None,
            output=self._output(prefix),
            attention_norm=self._norm_if_named(prefix, names.attention_norm, hidden),
            mlp_norm=self._norm_if_named(prefix, names.mlp_norm, hidden),
            mlp=self._experts(prefix) if is_sparse else self._mlp(prefix),
            output_norm=self._norm_if_named(prefix, names.output_norm, hidden),
        )

    def _qkv(self, prefix: str) -> LinearWeight:
        config = self._config
        queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        sizes = [queries, keys, keys] if len(self._names.qkv) == 3 else [queries + 2 * keys]
        parts = {f"{prefix}{name}": size for name, size in zip(self._names.qkv, sizes, strict=True)}
        return self._linear(parts, config.hidden_size)

    def _output(self, prefix: str) -> LinearWeight:
        config = self._config
        return self._linear(
            {f"{prefix}{self._names.output}": config.hidden_size}, config.num_heads * config.head_dim
        )

    def _mlp(self, prefix: str) -> Mlp:
        config, names = self._config, self._names
        hidden, inner = config.hidden_size, config.intermediate_size
        num_parts = 2 if config.is_gated else 1
        gate_up = _below(prefix, names.gate_up, inner * num_parts // len(names.gate_up))
        is_fused = config.is_gated and config.activation == "silu"
        return Mlp(
            self._linear(gate_up, hidden, is_gated=is_fused),
            self._linear({f"{prefix}{names.down}": hidden}, inner),
            is_fused,
        )

    def _experts(self, prefix: str) -> Experts:
        config, names = self._config, self._names.experts
        assert config.experts is not None
        assert names is not None
        router = self._linear({f"{prefix}{names.router}": config.experts.num_experts}, config.hidden_size)
        numbers = range(config.experts.num_experts)
        if names.is_stacked:
            return Experts(router, self._stacked_experts(prefix, names))
        hidden, inner = config.hidden_size, config.experts.intermediate_size
        is_fused = config.activation == "silu"
        experts = [
            Mlp(
                self._linear(
                    _below(prefix, (names.gate.format(i), names.up.format(i)), inner),
                    hidden,
                    is_gated=is_fused,
                ),
                self._linear({f"{prefix}{names.down.format(i)}": hidden}, inner),
                is_fused,
            )
            for i in numbers
        ]
        return Experts(router, experts)

    def _stacked_experts(self, prefix: str, names: ExpertNames) -> list[Mlp]:
        config, take, kernels = self._config, self._checkpoint.take, self._kernels
        assert config.experts is not None
        count, hidden, inner = (
            config.experts.num_experts,
            config.hidden_size,
            config.experts.intermediate_size,
        )
        gate_up = take(f"{prefix}{names.gate_up}", count, hidden, 2 * inner)
        gate_up_bias = take(f"{prefix}{names.gate_up}_bias", count, 2 * inner)
        down = take(f"{prefix}{names.down}", count, inner, hidden)
        down_bias = take(f"{prefix}{names.down}_bias", count, hidden)
        # Gate and up in turn become two halves.
        halves = torch.cat((torch.arange(0, 2 * inner, 2), torch.arange(1, 2 * inner, 2))).to(gate_up.device)
        return [
            Mlp(
                kernels.pack_linear(
                    gate_up[i].t().index_select(0, halves), gate_up_bias[i].index_select(0, halves)
                ),
                kernels.pack_linear(down[i].t().contiguous(), down_bias[i].clone()),
                is_fused=False,
            )
            for i in range(count)
        ]

    def _vector(self, name: str, *shape: int) -> Tensor:
        return self._checkpoint.take(name, *shape)

    def _norm_if_named(self, prefix: str, name: str, size: int) -> Norm | None:
        return self._norm(f"{prefix}{name}", size) if name else None

    def _norm(self, name: str, size: int) -> Norm:
        kind = self._config.norm
        bias = self._vector(f"{name}.bias", size) if kind == "layer" else None
        weight = self._vector(f"{name}.weight", size)
        return Norm(weight, bias, self._config.norm_eps, kind == "rms_less_one")

    def _linear(self, parts: Mapping[str, int], num_inputs: int, *, is_gated: bool = False) -> LinearWeight:
        """One product for several matrices with the same input. ``parts``: name to number of outputs."""
        names, sizes = [f"{name}.weight" for name in parts], list(parts.values())
        if self._names.is_transposed:
            (name,) = names
            weight = self._checkpoint.take(name, num_inputs, sizes[0]).t().contiguous()
        else:
            weight = self._checkpoint.take_rows(names, sizes, num_inputs)
        biases = [self._checkpoint.take_if_there(f"{name}.bias", size) for name, size in parts.items()]
        bias = None
        if any(b is not None for b in biases):
            bias = weight.new_zeros(len(weight))
            for part, read in zip(torch.split(bias, sizes), biases, strict=True):
                if read is not None:
                    part.copy_(read)
        return self._kernels.pack_linear(weight, bias, gated=is_gated)


def _below(prefix: str, names: Sequence[str], size: int) -> dict[str, int]:
    return {f"{prefix}{name}": size for name in names}


def _layer_bytes(layer: Layer) -> int:
    mlps = [layer.mlp] if isinstance(layer.mlp, Mlp) else layer.mlp.experts
    products = [layer.qkv, layer.output, *(part for mlp in mlps for part in (mlp.gate_up, mlp.down))]
    return sum(product.nbytes for product in products)
