"""The parts of tensors that each rank of a divided model reads."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from support.engine.family_models import save_model
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from agentflow.engine.models.config import DecoderConfig
from agentflow.engine.models.families.registry import FAMILIES, read_config
from agentflow.engine.models.rope import RopeConfig
from agentflow.engine.models.weights.cuts import Cut, rank_config, rank_cuts, token_counts
from agentflow.engine.models.weights.loader import WeightFormat, load_model
from agentflow.engine.models.weights.quantising import BLOCK_SIZE, quantised
from agentflow.engine.models.weights.row_order import qkv_order
from agentflow.engine.store.gguf.tensors import dequantise
from agentflow.errors import BadModelFolder
from agentflow.kernels.platforms import kernels_for

LLAMA, PHI = FAMILIES["LlamaForCausalLM"].names, FAMILIES["Phi3ForCausalLM"].names
FALCON = FAMILIES["FalconForCausalLM"].names


@st.composite
def shapes(draw: st.DrawFn) -> tuple[DecoderConfig, int]:
    """A shape of the Llama family and a number of ranks that divides it."""
    size = draw(st.sampled_from([1, 2, 3, 4, 6]))
    kv_heads = draw(st.sampled_from([1, size, 2 * size, *([2] if size % 2 == 0 else [])]))
    config = DecoderConfig(
        architecture="LlamaForCausalLM",
        vocab_size=draw(st.integers(size, 50)),
        hidden_size=draw(st.integers(1, 8)),
        intermediate_size=size * draw(st.integers(1, 5)),
        num_layers=2,
        num_heads=math.lcm(size, kv_heads) * draw(st.integers(1, 3)),
        num_kv_heads=kv_heads,
        head_dim=draw(st.sampled_from([2, 4])),
        norm_eps=1e-6,
        max_context=10,
        tie_word_embeddings=False,
        rope=RopeConfig("default", 10_000.0),
    )
    return config, size


def numbered(shape: Sequence[int]) -> Tensor:
    return torch.arange(math.prod(shape)).view(*shape)


@given(shapes())
def test_the_parts_of_all_ranks_are_the_tensor(shape: tuple[DecoderConfig, int]) -> None:
    """In the order of the ranks. Of fewer KV heads than ranks, consecutive ranks have the same one."""
    config, size = shape
    ranks = [rank_cuts(config, LLAMA, rank, size) for rank in range(size)]
    for name in ranks[0].by_name:
        cuts = [cuts.by_name[name] for cuts in ranks]
        whole, copies = numbered(cuts[0].whole), 1
        if "k_proj" in name or "v_proj" in name:
            copies = max(1, size // config.num_kv_heads)
        parts = [cut.part(whole) for cut in cuts]
        assert torch.equal(torch.cat(parts[::copies], cuts[0].axis), whole), name
        for rank, part in enumerate(parts):
            assert part.shape == cuts[rank].shape
            assert torch.equal(part, parts[rank - rank % copies])


@given(shapes())
def test_a_fused_tensor_is_cut_like_its_tensors(shape: tuple[DecoderConfig, int]) -> None:
    config, size = shape
    below = LLAMA.layers.format(1)
    for fused, separate in ((PHI.qkv, LLAMA.qkv), (PHI.gate_up, LLAMA.gate_up)):
        for rank in range(size):
            cuts = [rank_cuts(config, LLAMA, rank, size).by_name[f"{below}{one}.weight"] for one in separate]
            cut = rank_cuts(config, PHI, rank, size).by_name[f"{below}{fused[0]}.weight"]
            whole = numbered(cut.whole)
            tensors = torch.split(whole, [one.whole[0] for one in cuts])
            parts = [one.part(tensor) for one, tensor in zip(cuts, tensors, strict=True)]
            assert torch.equal(cut.part(whole), torch.cat(parts))


@given(shapes())
def test_a_tensor_fused_by_head_is_cut_like_one_in_order(shape: tuple[DecoderConfig, int]) -> None:
    config, size = shape
    for rank in range(size):
        cuts = rank_cuts(config, FALCON, rank, size).by_name
        cut = cuts[f"{FALCON.layers.format(1)}{FALCON.qkv[0]}.weight"]
        in_order = rank_cuts(config, PHI, rank, size).by_name[f"{PHI.layers.format(1)}{PHI.qkv[0]}.weight"]
        whole = numbered(cut.whole)
        part = cut.part(whole)[qkv_order(rank_config(config, rank, size), FALCON)]
        assert torch.equal(part, in_order.part(whole[qkv_order(config, FALCON)]))


@given(shapes())
def test_the_shape_of_a_rank_fits_its_parts(shape: tuple[DecoderConfig, int]) -> None:
    config, size = shape
    for rank in range(size):
        part = rank_config(config, rank, size)
        assert part.num_heads % part.num_kv_heads == 0
        embedding = rank_cuts(config, LLAMA, rank, size).by_name[f"{LLAMA.embedding}.weight"]
        assert embedding.shape == (part.vocab_size, part.hidden_size)
    assert sum(token_counts(config.vocab_size, size)) == config.vocab_size


@given(st.integers(1, 4), st.integers(1, 4), st.sampled_from([0, 1]), st.data())
def test_blocks_are_cut_like_their_values(
    num_out: int, num_blocks: int, axis: int, data: st.DataObject
) -> None:
    matrix = quantised(torch.randn(num_out, BLOCK_SIZE * num_blocks), "Q4_1")
    unit, most = (1, num_out) if axis == 0 else (BLOCK_SIZE, num_blocks)
    first = data.draw(st.integers(0, most - 1))
    end = data.draw(st.integers(first + 1, most))
    cut = Cut(matrix.shape, axis, ((unit * first, unit * end),))
    values = torch.from_numpy(dequantise(matrix.rows, "Q4_1").copy())
    part = cut.blocks(matrix, "w")
    assert part.shape == cut.shape
    assert np.array_equal(dequantise(np.ascontiguousarray(part.rows), "Q4_1"), cut.part(values).numpy())


def test_no_block_is_divided() -> None:
    matrix = quantised(torch.randn(2, BLOCK_SIZE), "Q8_0")
    with pytest.raises(BadModelFolder) as refused:
        Cut(matrix.shape, 1, ((0, BLOCK_SIZE // 2),)).blocks(matrix, "w")
    assert refused.value.param == "tensor_parallel"


class LoneRank:
    """``Ranks`` without the others, for loading."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def add(self, values: Tensor) -> Tensor:
        raise NotImplementedError

    def gather(self, part: Tensor, widths: Sequence[int]) -> Tensor | None:
        raise NotImplementedError

    def native_sum(self) -> tuple[int, int]:
        return 0, 0

    def abort(self) -> None: ...

    def close(self) -> None: ...


class CopiedBytes(TorchDispatchMode):
    """Counts the bytes that torch copies from one tensor to another, and the most in one copy."""

    total = most = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.overloadpacket is torch.ops.aten.copy_:
            self.total += args[1].nbytes
            self.most = max(self.most, args[1].nbytes)
        return function(*args, **(kwargs or {}))


@contextmanager
def counted() -> Iterator[CopiedBytes]:
    with CopiedBytes() as copied:
        yield copied


@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_no_rank_reads_the_whole_model(name: str, tmp_path: Path) -> None:
    save_model(name, tmp_path, hidden_size=64, num_attention_heads=4, num_key_value_heads=4)
    config, kernels = read_config(tmp_path), kernels_for(torch.device("cpu"))
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        sizes = {key: file.get_tensor(key).nbytes for key in file.keys()}  # noqa: SIM118
    whole = {key: size for key, size in sizes.items() if "norm" in key or "gate.weight" in key}
    shared = sum(size for key, size in whole.items() if not key.endswith("gate_proj.weight"))
    format_ = WeightFormat(torch.float32)
    for rank in range(4):
        with counted() as copied:
            loaded = load_model(
                tmp_path,
                config,
                weights=format_,
                device=torch.device("cpu"),
                kernels=kernels,
                ranks=LoneRank(rank, 4),
            )
        assert copied.total == (sum(sizes.values()) - shared) // 4 + shared
        assert copied.most <= max(sizes.values()) // 4
        assert loaded.model.weights.part is not None
