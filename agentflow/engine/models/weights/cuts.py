"""Divides a model over ranks (tensor parallelism: Shoeybi et al. 2019, Megatron-LM, arXiv 1909.08053).

A rank has some of the heads and some of the inner dimensions of each MLP: a part of the outputs of ``qkv``
and ``gate_up`` and of the inputs of ``output`` and ``down``, so that only the results of the last two are
summed over the ranks. It has a range of the vocabulary, in the embedding and in the head. Norms, routers and
learned positions are on all ranks. ``Cut`` describes the values of a tensor that a rank reads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from agentflow.engine.models.config import DecoderConfig
from agentflow.engine.models.families.family import WeightNames
from agentflow.engine.store.gguf.container import TYPES
from agentflow.errors import BadArgument, BadModelFolder
from agentflow.kernels.inputs import BlockMatrix

_BLOCKS = {name: (values, num_bytes) for name, values, num_bytes in TYPES.values()}


@dataclass(frozen=True, slots=True)
class Cut:
    """A part of a tensor: the concatenated ``ranges`` of one axis. The axes of a matrix are outputs and
    inputs, even if the files store inputs by outputs."""

    whole: tuple[int, ...]  # the shape of the tensor
    axis: int
    ranges: tuple[tuple[int, int], ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the part."""
        length = sum(end - first for first, end in self.ranges)
        return (*self.whole[: self.axis], length, *self.whole[self.axis + 1 :])

    @property
    def transposed(self) -> Cut:
        """This cut of the transposed matrix."""
        return Cut(self.whole[::-1], len(self.whole) - 1 - self.axis, self.ranges)

    def part(self, tensor: Tensor) -> Tensor:
        """Returns the part of a tensor; a view if there is one range. The other axes may have any length."""
        parts = [tensor.narrow(self.axis, first, end - first) for first, end in self.ranges]
        return parts[0] if len(parts) == 1 else torch.cat(parts, self.axis)

    def blocks(self, matrix: BlockMatrix, name: str) -> BlockMatrix:
        """Returns the part of a matrix in blocks. Raises ``BadModelFolder`` if a block would be divided."""
        assert matrix.shape == self.whole
        if self.axis == 0:
            parts = [matrix.rows[first:end] for first, end in self.ranges]
            rows = parts[0] if len(parts) == 1 else np.concatenate(parts)
        else:
            values, num_bytes = _BLOCKS[matrix.type]
            if any(bound % values for ends in self.ranges for bound in ends):
                raise BadModelFolder(
                    f"{name} has {self.whole[1]} inputs in blocks of {values} values ({matrix.type}), which "
                    "cannot be divided: take fewer ranks for tensor_parallel, or another format of the "
                    "weights",
                    param="tensor_parallel",
                )
            [(first, end)] = self.ranges
            rows = matrix.rows[:, first // values * num_bytes : end // values * num_bytes]
        return replace(matrix, rows=rows, shape=(self.shape[0], self.shape[1]))


@dataclass(frozen=True, slots=True)
class Cuts:
    """The parts of a rank. Tensors without a ``Cut`` are whole on each rank, except biases in ``absent``,
    which only the first rank adds."""

    by_name: Mapping[str, Cut]
    absent: frozenset[str] = frozenset()
    is_transposed: bool = False  # the files store matrices as inputs by outputs, except ``untransposed``
    untransposed: tuple[str, ...] = ()  # the first parts of the names of the embedding and the head


WHOLE = Cuts({})


def check_divides(config: DecoderConfig, names: WeightNames, size: int) -> None:
    """Raises ``BadArgument`` if the model cannot be divided over ``size`` ranks."""
    for is_so, feature in (
        (config.latent is not None, "latent attention"),
        (names.experts is not None and names.experts.is_stacked, "experts in one tensor"),
        (config.qk_norm == "row", "norms over all heads"),
        (config.qk_norm == "each_head" and "{}" in names.q_norm, "a tensor for the norm of each head"),
    ):
        if is_so:
            raise BadArgument(
                f"{config.architecture} has {feature}, and such models cannot be divided: leave out "
                "tensor_parallel",
                param="tensor_parallel",
            )
    heads, kv_heads = config.num_heads, config.num_kv_heads
    for number, noun in (
        (heads, "heads"),
        (kv_heads if kv_heads >= size or size % kv_heads else size, "KV heads"),
        (config.intermediate_size, "inner dimensions of an MLP"),
        (config.experts.intermediate_size if config.experts else size, "inner dimensions of an expert"),
    ):
        if number % size:
            raise BadArgument(
                f"tensor_parallel is {size}, which does not divide the model's {number} {noun}: "
                f"take {' or '.join(map(str, _fitting_sizes(config))) or 'one process'}",
                param="tensor_parallel",
            )


def _fitting_sizes(config: DecoderConfig) -> list[int]:
    numbers = [config.num_heads, config.intermediate_size]
    numbers += [config.experts.intermediate_size] if config.experts else []
    kv_heads = config.num_kv_heads
    return [
        size
        for size in (2, 3, 4, 6, 8, 16)
        if not any(number % size for number in numbers) and (not kv_heads % size or not size % kv_heads)
    ]


def token_counts(vocab_size: int, size: int) -> tuple[int, ...]:
    """Returns the number of tokens of the vocabulary on each rank."""
    bounds = [vocab_size * rank // size for rank in range(size + 1)]
    return tuple(end - first for first, end in pairwise(bounds))


def rank_config(config: DecoderConfig, rank: int, size: int) -> DecoderConfig:
    """Returns the shape of the part of a rank."""
    experts = config.experts
    if experts is not None:
        experts = replace(experts, intermediate_size=experts.intermediate_size // size)
    return replace(
        config,
        vocab_size=token_counts(config.vocab_size, size)[rank],
        num_heads=config.num_heads // size,
        num_kv_heads=max(1, config.num_kv_heads // size),
        intermediate_size=config.intermediate_size // size,
        experts=experts,
    )


def rank_cuts(config: DecoderConfig, names: WeightNames, rank: int, size: int) -> Cuts:
    """Returns the parts that a rank reads. ``config``: the shape of the whole model. If there are fewer KV
    heads than ranks, several ranks read the same KV head."""
    hidden, inner, dim = config.hidden_size, config.intermediate_size, config.head_dim
    counts = token_counts(config.vocab_size, size)
    first_token = sum(counts[:rank])
    vocabulary = Cut((config.vocab_size, hidden), 0, ((first_token, first_token + counts[rank]),))
    cuts = {f"{names.embedding}.weight": vocabulary, f"{names.head}.weight": vocabulary}
    cuts[f"{names.head}.bias"] = Cut((config.vocab_size,), 0, vocabulary.ranges)
    absent: set[str] = set()
    queries = _share(config.num_heads * dim, rank, size)
    keys = _share(config.num_kv_heads * dim, rank, size)
    if config.num_kv_heads < size:
        first = config.num_kv_heads * rank // size * dim
        keys = (first, first + dim)

    # One tensor has the queries, the key and the value of the first KV head, then of the second, and so on.
    total = (config.num_heads + 2 * config.num_kv_heads) * dim
    by_head = [(total, _share(total, rank, size))]
    if config.num_kv_heads < size:
        group = config.num_kv_heads * rank // size  # the rank's KV head
        skipped = group * 2 * dim
        end = (group + 1) * config.num_heads // config.num_kv_heads * dim + skipped  # of the group's queries
        own_queries = queries[0] + skipped, queries[1] + skipped
        by_head = [(end, own_queries), (total - end, (0, 2 * dim))]

    def outputs(name: str, num_inputs: int, *parts: tuple[int, tuple[int, int]]) -> None:
        """``parts``: the length and the rank's range of each part of the outputs."""
        begins = np.cumsum([0, *(length for length, _ in parts)]).tolist()
        ranges = tuple(
            (begin + first, begin + end) for begin, (_, (first, end)) in zip(begins[:-1], parts, strict=True)
        )
        cuts[f"{name}.weight"] = Cut((begins[-1], num_inputs), 0, ranges)
        cuts[f"{name}.bias"] = Cut((begins[-1],), 0, ranges)

    def inputs(name: str, length: int, part: tuple[int, int]) -> None:
        cuts[f"{name}.weight"] = Cut((hidden, length), 1, (part,))
        if rank:
            absent.add(f"{name}.bias")

    def mlp(gate_up: tuple[str, ...], down: str, length: int) -> None:
        part = length, _share(length, rank, size)
        for name in gate_up:
            outputs(name, hidden, *[part] * (2 if config.is_gated and len(gate_up) == 1 else 1))
        inputs(down, *part)

    for i in range(config.num_layers):
        prefix = names.layers.format(i)
        sizes = [config.num_heads * dim, config.num_kv_heads * dim, config.num_kv_heads * dim]
        parts = list(zip(sizes, (queries, keys, keys), strict=True))
        if config.qk_norm == "each_head":
            for name, (length, (first, end)) in zip((names.q_norm, names.k_norm), parts[:2], strict=True):
                cuts[f"{prefix}{name}.weight"] = Cut((length // dim, dim), 0, ((first // dim, end // dim),))
        if names.is_fused_by_head:
            outputs(prefix + names.qkv[0], hidden, *by_head)
        elif len(names.qkv) == 1:
            outputs(prefix + names.qkv[0], hidden, *parts)
        else:
            for name, part in zip(names.qkv, parts, strict=True):
                outputs(prefix + name, hidden, part)
        inputs(prefix + names.output, config.num_heads * dim, queries)
        if not config.layer(i).is_sparse:
            mlp(tuple(prefix + name for name in names.gate_up), prefix + names.down, inner)
            continue
        assert names.experts is not None
        assert config.experts is not None
        below, each = names.experts, config.experts.intermediate_size
        for number in range(config.experts.num_experts):
            gate, up, down = (prefix + one.format(number) for one in (below.gate, below.up, below.down))
            mlp((gate, up), down, each)
        if below.shared and config.experts.num_shared:
            gate, up, down = (prefix + one for one in below.shared)
            mlp((gate, up), down, each * config.experts.num_shared)
    return Cuts(cuts, frozenset(absent), names.is_transposed, (names.embedding, names.head))


def _share(length: int, rank: int, size: int) -> tuple[int, int]:
    return length * rank // size, length * (rank + 1) // size
