"""Loads the weights into the layout of the forward pass."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from agentflow.engine.models.config import DecoderConfig, read_folder
from agentflow.engine.models.families.family import ExpertNames, WeightNames
from agentflow.engine.models.families.registry import FAMILIES
from agentflow.engine.models.forward.decoder import Decoder
from agentflow.engine.models.rope import RopeConfig, inverse_frequencies
from agentflow.engine.models.weights.checkpoint import Checkpoint, GgufCheckpoint, TensorSource
from agentflow.engine.models.weights.cuts import check_divides, rank_config, rank_cuts, token_counts
from agentflow.engine.models.weights.packed_checkpoint import PackedCheckpoint
from agentflow.engine.models.weights.quantising import BLOCK_SIZE, quantised
from agentflow.engine.models.weights.row_order import pair_order, qkv_order
from agentflow.engine.store.gguf.file import find_gguf
from agentflow.engine.store.weight_scheme import read_scheme
from agentflow.errors import BadArgument
from agentflow.kernels.decoder_weights import (
    DecoderWeights,
    Experts,
    LatentWeights,
    LayerWeights,
    Mlp,
    Norm,
    RankPart,
    Rope,
    Routing,
)
from agentflow.kernels.inputs import BlockMatrix, LinearWeight
from agentflow.kernels.page_advice import blocks_of_large_pages
from agentflow.kernels.platforms import Kernels
from agentflow.kernels.ranks import Ranks

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """The format of matrices in memory. Blocks of a type that the kernels cannot multiply become "Q8_0". For
    kernels that multiply no blocks, all matrices become ``dtype``."""

    dtype: torch.dtype  # of activations, and of matrices that are not quantised
    keeps_blocks: bool = False  # keep matrices that the file stores in blocks of quantised values
    # Round other matrices to blocks of this type: "Q8_0", "Q4_1", or "F8_E4M3" if the kernels support it;
    # None: keep them dense.
    quantise: str | None = None


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model with its weights."""

    model: Decoder
    block_types: frozenset[str]  # the types of the matrices in blocks of quantised values
    origin: str  # where the values of these matrices come from, as shown to users


def load_model(
    path: Path,
    config: DecoderConfig,
    *,
    weights: WeightFormat,
    device: torch.device,
    kernels: Kernels,
    has_head: bool = True,
    ranks: Ranks | None = None,
) -> LoadedModel:
    """Loads the model of a folder or GGUF file. Packs each matrix as soon as it is read, so that the memory
    holds only one matrix in addition to the result.

    Args:
        path: the folder or file.
        config: the shape of the model.
        weights: the format of the matrices.
        device: where the weights are.
        kernels: the implementation that packs them.
        has_head: load the head, which computes logits; otherwise the head in the files is ignored.
        ranks: the processes over which the model is divided; only the part of this rank is loaded.

    Raises:
        BadModelFolder: tensors are missing, misshapen or left over, or a block of quantised values would be
            divided.
        BadArgument: ``weights.quantise`` is set and changes no matrix, or the model cannot be divided.
    """
    with (
        torch.inference_mode(),
        blocks_of_large_pages(),
        open_checkpoint(path, weights.dtype, device) as checkpoint,
    ):
        names = FAMILIES[config.architecture].names_among(checkpoint.names)
        if f"{names.embedding}.weight" not in checkpoint.names:
            if config.tie_word_embeddings and f"{names.head}.weight" in checkpoint.names:
                names = replace(names, embedding=names.head)  # safetensors' ``save_model`` keeps one of both
            else:
                names = names.without_head()  # saved without a head, like embedding models
        if not has_head:
            config = replace(config, tie_word_embeddings=True)
        elif config.tie_word_embeddings and _has_other_head(checkpoint, names):
            logger.warning(
                "%s: the config ties the head to the embedding, but the files have another head: it is used",
                path,
            )
            config = replace(config, tie_word_embeddings=False)
        part = None
        if ranks is not None:
            check_divides(config, names, ranks.size)
            checkpoint.cuts = rank_cuts(config, names, ranks.rank, ranks.size)
            counts = token_counts(config.vocab_size, ranks.size)
            part = RankPart(ranks, sum(counts[: ranks.rank]), counts)
            config = rank_config(config, ranks.rank, ranks.size)
        loader = _Loader(checkpoint, config, names, kernels, weights, device, part)
        model = loader.decoder()
        loader.check_quantising(path)
        checkpoint.refuse_leftovers(
            *names.ignored,
            *([f"{names.head}.weight"] if config.tie_word_embeddings else []),
            ignored_parts=names.ignored_parts,
        )
        as_stored = (
            "as in its file" if isinstance(checkpoint, GgufCheckpoint) else "from a quantised checkpoint"
        )
    origin = as_stored if loader.is_as_stored else "quantised while loading"
    return LoadedModel(model, frozenset(loader.block_types), origin)


def make_decoder(
    tensors: TensorSource,
    config: DecoderConfig,
    names: WeightNames,
    *,
    weights: WeightFormat,
    device: torch.device,
    kernels: Kernels,
) -> Decoder:
    """Returns a model whose tensors do not come from a folder. The arguments are as in ``load_model``."""
    return _Loader(tensors, config, names, kernels, weights, device).decoder()


def _has_other_head(checkpoint: TensorSource, names: WeightNames) -> bool:
    """Whether the files have a head that differs from the embedding, as some fine-tuned models have."""
    head, embedding = f"{names.head}.weight", f"{names.embedding}.weight"
    is_stored = head in checkpoint.names and embedding in checkpoint.names
    return is_stored and not checkpoint.are_equal(head, embedding)


def open_checkpoint(path: Path, dtype: torch.dtype, device: torch.device) -> Checkpoint | GgufCheckpoint:
    """Returns the tensors of a model folder or a GGUF file."""
    if (file := find_gguf(path)) is not None:
        return GgufCheckpoint(file, dtype, device)
    scheme = read_scheme(read_folder(path)[0])
    if scheme is None:
        return Checkpoint(path, dtype, device)
    return PackedCheckpoint(path, dtype, device, scheme)


class _Loader:
    def __init__(
        self,
        checkpoint: TensorSource,
        config: DecoderConfig,
        names: WeightNames,
        kernels: Kernels,
        weights: WeightFormat,
        device: torch.device,
        part: RankPart | None = None,
    ) -> None:
        self._part = part
        self._checkpoint = checkpoint
        self._config = config
        self._names = names
        self._kernels = kernels
        self._weights = weights
        self._device = device
        self.block_types: set[str] = set()
        self.is_as_stored = True
        self._num_kept = self._num_rounded = self._num_unfit = 0

    def check_quantising(self, path: Path) -> None:
        """Warns about matrices that ``quantise`` did not change. Raises ``BadArgument`` if it changed
        none."""
        kept, unfit = self._num_kept, self._num_unfit
        if not self._weights.quantise or not kept + unfit:
            return
        why = [f"{kept} are already quantised in its files, and stay unchanged"] if kept else []
        if unfit:
            why.append(f"{unfit} have rows whose length is not a multiple of {BLOCK_SIZE}, and stay dense")
        if not self._num_rounded:
            raise BadArgument(
                f"quantize has no effect on {path.name}: of its matrices, {'; '.join(why)}: leave it out"
                + (", or set dtype to bfloat16, which quantises them again" if kept else ""),
                param="quantize",
            )
        logger.warning(
            "%s: quantize rounds %d of %d matrices: of the others, %s",
            path.name,
            self._num_rounded,
            self._num_rounded + kept + unfit,
            "; ".join(why),
        )

    def _fits_blocks(self, num_inputs: int) -> bool:
        """Whether ``quantise`` can round a matrix with rows of this length. Counts both cases."""
        fits = num_inputs % BLOCK_SIZE == 0
        self._num_rounded += fits
        self._num_unfit += not fits
        return fits

    def decoder(self) -> Decoder:
        config, names = self._config, self._names
        embedding, head = self._embedding()
        positions = None
        if config.position_offset is not None:
            num_positions = config.max_context + config.position_offset
            positions = self._vector(f"{names.positions}.weight", num_positions, config.hidden_size)
        scale = torch.tensor(config.embedding_scale, dtype=self._weights.dtype)
        weights = DecoderWeights(
            embedding=embedding,
            layers=[self._layer(names.layers.format(i), i) for i in range(config.num_layers)],
            final_norm=self._norm(names.final_norm, config.hidden_size),
            ropes=[self._rope(config.rope), *([self._rope(config.local_rope)] if config.local_rope else [])],
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            embedding_scale=float(scale),
            positions=positions,
            position_offset=config.position_offset or 0,
            attention_scale=config.attention_scale or config.head_dim**-0.5,
            attention_cap=config.attention_cap,
            logit_scale=config.logit_scale,
            logit_cap=config.logit_cap,
            activation=config.activation,
            is_gated=config.is_gated,
            is_parallel=config.is_parallel,
            part=self._part,
        )
        return Decoder(self._kernels, weights, head)

    def _rope(self, rope: RopeConfig) -> Rope:
        frequencies = inverse_frequencies(rope, self._config.rotated_dim).to(self._device)
        axes = torch.tensor(self._config.rope_axes, device=self._device) if self._config.rope_axes else None
        return Rope(frequencies, rope.amplitude, axes)

    def _embedding(self) -> tuple[LinearWeight, LinearWeight]:
        """Returns the embedding and the head, which share memory if they are tied and the kernels allow
        it."""
        config, names, kernels = self._config, self._names, self._kernels
        shape = config.vocab_size, config.hidden_size
        embedding_name, is_tied = f"{names.embedding}.weight", config.tie_word_embeddings
        bias = self._checkpoint.take_if_there(f"{names.head}.bias", config.vocab_size)
        of_embedding = bias if is_tied else None
        if (embedding := self._quantised({embedding_name: shape[0]}, shape[1], of_embedding)) is not None:
            return embedding, embedding if is_tied else self._head(*shape, bias)
        weight = self._vector(embedding_name, *shape)
        head = kernels.linear.pack(weight, bias, exact_output=True) if is_tied else self._head(*shape, bias)
        return kernels.linear.pack_embedding(weight, head if is_tied else None), head

    def _head(self, vocab_size: int, hidden_size: int, bias: Tensor | None) -> LinearWeight:
        name = f"{self._names.head}.weight"
        if (head := self._quantised({name: vocab_size}, hidden_size, bias)) is not None:
            return head
        return self._kernels.linear.pack(self._vector(name, vocab_size, hidden_size), bias, exact_output=True)

    def _quantised(
        self,
        parts: Mapping[str, int],
        num_inputs: int,
        bias: Tensor | None,
        *,
        is_gated: bool = False,
        is_transposed: bool = False,
        order: Tensor | None = None,
    ) -> LinearWeight | None:
        """Returns a weight in blocks of quantised values, or None if it must be dense. ``parts``: the number
        of outputs of each tensor. ``order``: from ``qkv_order``."""
        if not self._kernels.linear.block_types:
            return None
        blocks: list[BlockMatrix] = []
        for name, size in parts.items():
            stored = (
                self._checkpoint.take_blocks(name, size, num_inputs) if self._weights.keeps_blocks else None
            )
            if stored is not None:
                self._num_kept += 1
            elif self._weights.quantise and self._fits_blocks(num_inputs):
                self.is_as_stored = False
                dense = self._dense({name: size}, num_inputs, is_transposed=is_transposed)
                stored = quantised(dense, self._weights.quantise)
            if stored is None:
                return None
            if order is not None:
                begin = sum(block.shape[0] for block in blocks)
                rows = stored.rows[(order[begin : begin + size] - begin).numpy()]
                stored = replace(stored, rows=rows, is_mapped=False)
            blocks.append(stored)
        packed = self._kernels.linear.pack_blocks(blocks, bias, gated=is_gated, device=self._device)
        if packed is None:  # several types, or a type that the kernels cannot multiply
            dense = self._dense(parts, num_inputs, is_transposed=is_transposed, order=order)
            self.is_as_stored = False
            blocks = [quantised(dense, "Q8_0")]
            packed = self._kernels.linear.pack_blocks(blocks, bias, gated=is_gated, device=self._device)
        self._checkpoint.release_blocks(parts)
        self.block_types.update(block.type for block in blocks)
        return packed

    def _layer(self, prefix: str, index: int) -> LayerWeights:
        config, names, shape = self._config, self._names, self._config.layer(index)
        hidden = config.hidden_size
        return LayerWeights(
            input_norm=self._norm_if_named(prefix, names.input_norm, hidden),
            qkv=self._latent(prefix) if config.latent else self._qkv(prefix),
            q_norm=self._qk_norm(f"{prefix}{names.q_norm}", config.num_heads),
            k_norm=self._qk_norm(f"{prefix}{names.k_norm}", config.num_kv_heads),
            sinks=self._vector(f"{prefix}{names.sinks}", config.num_heads) if config.has_sinks else None,
            output=self._output(prefix),
            attention_norm=self._norm_if_named(prefix, names.attention_norm, hidden, config.output_norm_eps),
            mlp_norm=self._norm_if_named(prefix, names.mlp_norm, hidden),
            mlp=self._experts(prefix) if shape.is_sparse else self._mlp(prefix),
            output_norm=self._norm_if_named(prefix, names.output_norm, hidden, config.output_norm_eps),
            window=shape.window,
            rope=None if shape.rope is None else ("global", "local").index(shape.rope),
        )

    def _qkv(self, prefix: str) -> LinearWeight:
        config = self._config
        queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        sizes = [queries, keys, keys] if len(self._names.qkv) == 3 else [queries + 2 * keys]
        parts = {f"{prefix}{name}": size for name, size in zip(self._names.qkv, sizes, strict=True)}
        return self._linear(parts, config.hidden_size, order=qkv_order(config, self._names))

    def _qk_norm(self, name: str, num_heads: int) -> Norm | None:
        """Returns the norm of queries or keys, or None if the model has none."""
        config, head_dim = self._config, self._config.head_dim
        if not config.qk_norm:
            return None
        if config.qk_norm == "each_head":
            weight = self._each_head(name, num_heads)
            norm = Norm(weight, torch.zeros_like(weight), config.norm_eps)
        else:
            norm = self._norm(name, head_dim if config.qk_norm == "head" else num_heads * head_dim)
        if not self._names.has_pairs:
            return norm
        order = pair_order(config).to(norm.weight.device)

        def in_order(values: Tensor) -> Tensor:
            return values.view(-1, head_dim).index_select(1, order).view_as(values)

        bias = None if norm.bias is None else in_order(norm.bias)
        return replace(norm, weight=in_order(norm.weight), bias=bias)

    def _each_head(self, name: str, num_heads: int) -> Tensor:
        """Returns the norm weights [heads, head_dim] from one tensor, or from one for each head."""
        head_dim = self._config.head_dim
        if "{}" not in name:
            return self._vector(f"{name}.weight", num_heads, head_dim)
        return torch.stack([self._vector(f"{name}.weight".format(i), head_dim) for i in range(num_heads)])

    def _latent(self, prefix: str) -> LatentWeights:
        config, shape, names = self._config, self._config.latent, self._names.latent
        assert shape is not None
        assert names is not None
        num_heads, q_size = config.num_heads, config.num_heads * (shape.plain_dim + shape.rotated_dim)
        q_norm, q_up, queries = None, None, {f"{prefix}{names.queries}": q_size}
        if shape.q_rank:
            queries = {f"{prefix}{names.q_down}": shape.q_rank}
            q_norm = self._vector(f"{prefix}{names.q_norm}.weight", shape.q_rank)
            q_up = self._linear({f"{prefix}{names.q_up}": q_size}, shape.q_rank)
        up_sizes = [shape.plain_dim, shape.value_dim]
        up = self._vector(f"{prefix}{names.kv_up}.weight", num_heads * sum(up_sizes), shape.kv_rank)
        key_up, value_up = torch.split(up.view(num_heads, -1, shape.kv_rank), up_sizes, dim=1)
        return LatentWeights(
            shape.kv_rank,
            shape.plain_dim,
            self._linear(queries | {f"{prefix}{names.kv_down}": shape.pool_dim}, config.hidden_size),
            q_norm,
            q_up,
            self._vector(f"{prefix}{names.kv_norm}.weight", shape.kv_rank),
            key_up.contiguous(),
            value_up.transpose(1, 2).contiguous(),
        )

    def _output(self, prefix: str) -> LinearWeight:
        config = self._config
        head_dim = config.latent.value_dim if config.latent else config.head_dim
        return self._linear(
            {f"{prefix}{self._names.output}": config.hidden_size}, config.num_heads * head_dim
        )

    def _mlp(self, prefix: str) -> Mlp:
        config, names = self._config, self._names
        hidden, inner = config.hidden_size, config.intermediate_size
        num_parts = 2 if config.is_gated else 1
        gate_up = _below(prefix, names.gate_up, inner * num_parts // len(names.gate_up))
        return Mlp(
            self._linear(gate_up, hidden, is_gated=config.is_gated),
            self._linear({f"{prefix}{names.down}": hidden}, inner),
        )

    def _experts(self, prefix: str) -> Experts:
        config, names = self._config, self._names.experts
        assert config.experts is not None
        assert names is not None
        shape = config.experts
        router = self._linear({f"{prefix}{names.router}": shape.num_experts}, config.hidden_size)
        routing = Routing(
            shape.num_used, shape.normalises, shape.scale, shape.num_groups, shape.num_used_groups
        )
        if names.is_stacked:
            return Experts(router, routing, self._stacked_experts(prefix, names))
        shared = None
        if shape.num_shared:
            shared = self._expert_mlp(prefix, names.shared, shape.intermediate_size * shape.num_shared)
        experts = [
            self._expert_mlp(
                prefix,
                [name.format(i) for name in (names.gate, names.up, names.down)],
                shape.intermediate_size,
            )
            for i in range(shape.num_experts)
        ]
        return Experts(router, routing, experts, shared)

    def _expert_mlp(self, prefix: str, names: Sequence[str], inner: int) -> Mlp:
        """``names``: gate, up and down."""
        hidden, (gate, up, down) = self._config.hidden_size, names
        return Mlp(
            self._linear(_below(prefix, (gate, up), inner), hidden, is_gated=True),
            self._linear({f"{prefix}{down}": hidden}, inner),
        )

    def _stacked_experts(self, prefix: str, names: ExpertNames) -> list[Mlp]:
        config = self._config
        assert config.experts is not None
        hidden, inner = config.hidden_size, config.experts.intermediate_size
        # The files interleave gate and up; the kernels need two halves.
        halves = torch.cat((torch.arange(0, 2 * inner, 2), torch.arange(1, 2 * inner, 2)))
        gate_ups = self._stack(f"{prefix}{names.gate_up}", 2 * inner, hidden, halves, is_gated=True)
        downs = self._stack(f"{prefix}{names.down}", hidden, inner, torch.arange(hidden))
        return [Mlp(*products) for products in zip(gate_ups, downs, strict=True)]

    def _stack(
        self, name: str, num_out: int, num_in: int, order: Tensor, *, is_gated: bool = False
    ) -> list[LinearWeight]:
        """Returns the weights of all experts, from a stack of matrices stored as inputs by outputs.
        ``order``: the stored place of each output."""
        experts, checkpoint = self._config.experts, self._checkpoint
        assert experts is not None
        count = experts.num_experts
        biases = checkpoint.take(f"{name}_bias", count, num_out)
        order = order.to(biases.device)
        blocks = None
        if self._weights.keeps_blocks and self._kernels.linear.block_types:
            blocks = checkpoint.take_stacked_blocks(name, count, num_in, num_out)
        quantise = self._weights.quantise
        if blocks is not None and blocks[0].type not in self._kernels.linear.block_types:
            blocks, quantise = None, "Q8_0"
        if blocks is not None:
            matrices: list[BlockMatrix | Tensor] = [
                BlockMatrix(block.type, block.rows[order.cpu().numpy()], block.shape) for block in blocks
            ]
        else:
            stack = checkpoint.take(name, count, num_in, num_out)
            matrices = [matrix.t().index_select(0, order) for matrix in stack]
        packed = [
            self._expert(matrix, bias.index_select(0, order), quantise, is_gated)
            for matrix, bias in zip(matrices, biases, strict=True)
        ]
        checkpoint.release_blocks([name])
        return packed

    def _expert(
        self, matrix: BlockMatrix | Tensor, bias: Tensor, quantise: str | None, is_gated: bool
    ) -> LinearWeight:
        kernels = self._kernels
        if isinstance(matrix, Tensor) and quantise and kernels.linear.block_types:
            self.is_as_stored = False
            matrix = quantised(matrix, quantise) if self._fits_blocks(matrix.shape[1]) else matrix
        elif isinstance(matrix, BlockMatrix):
            self._num_kept += 1
        if isinstance(matrix, Tensor):
            return kernels.linear.pack(matrix, bias, gated=is_gated)
        self.block_types.add(matrix.type)
        packed = kernels.linear.pack_blocks([matrix], bias, gated=is_gated, device=self._device)
        assert packed is not None  # kernels that accept blocks accept blocks of 5 and 8 bits
        return packed

    def _vector(self, name: str, *shape: int) -> Tensor:
        return self._checkpoint.take(name, *shape)

    def _norm_if_named(self, prefix: str, name: str, size: int, eps: float = 0.0) -> Norm | None:
        return self._norm(f"{prefix}{name}", size, eps) if name else None

    def _norm(self, name: str, size: int, eps: float = 0.0) -> Norm:
        kind = self._config.norm
        weight = self._vector(f"{name}.weight", size)
        bias = self._vector(f"{name}.bias", size) if kind == "layer" else None
        if kind == "layer_unbiased":
            bias = torch.zeros_like(weight)  # a bias makes it a layer norm
        return Norm(weight, bias, eps or self._config.norm_eps, kind == "rms_less_one")

    def _linear(
        self,
        parts: Mapping[str, int],
        num_inputs: int,
        *,
        is_gated: bool = False,
        order: Tensor | None = None,
    ) -> LinearWeight:
        """Returns one weight for several matrices with the same input. ``parts``: the number of outputs of
        each matrix. ``order``: from ``qkv_order``."""
        names, sizes = [f"{name}.weight" for name in parts], list(parts.values())
        bias = self._checkpoint.take_biases([f"{name}.bias" for name in parts], sizes)
        if bias is not None and order is not None:
            bias = bias.index_select(0, order.to(bias.device))
        outputs, is_transposed = dict(zip(names, sizes, strict=True)), self._names.is_transposed
        packed = self._quantised(
            outputs, num_inputs, bias, is_gated=is_gated, is_transposed=is_transposed, order=order
        )
        if packed is not None:
            return packed
        weight = self._dense(outputs, num_inputs, is_transposed=is_transposed, order=order)
        return self._kernels.linear.pack(weight, bias, gated=is_gated)

    def _dense(
        self, parts: Mapping[str, int], num_inputs: int, *, is_transposed: bool, order: Tensor | None = None
    ) -> Tensor:
        """Returns the matrices of ``parts``, stacked: [outputs, inputs]."""
        if not is_transposed or all(map(self._checkpoint.is_output_first, parts)):
            taken = self._checkpoint.take_rows(list(parts), list(parts.values()), num_inputs)
            return taken if order is None else taken.index_select(0, order.to(taken.device))
        [(name, size)] = parts.items()
        return self._checkpoint.take(name, num_inputs, size).t().contiguous()


def _below(prefix: str, names: Sequence[str], size: int) -> dict[str, int]:
    return {f"{prefix}{name}": size for name in names}
