"""The choice of tokens in Triton against torch's: compiled on a GPU, elsewhere under Triton's interpreter."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import fields, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.engine import runner_driver

from agentflow.engine.batch import LogitEdits, SampledRows, ScoredTokens, TokenMasks
from agentflow.engine.models.sampler import choose_tensors, choose_tokens, stage
from agentflow.kernels.inputs import ChoiceRows
from agentflow.kernels.platforms import TORCH, triton_kernels
from agentflow.kernels.sampling.no_choice import NO_TOKEN, NOT_FINITE
from agentflow.kernels.uploads import upload

pytest.importorskip("triton", reason="triton is for x86-64 and Linux")

from agentflow.kernels.triton_ops import triton_sampler

TRITON = triton_kernels()
pytestmark = pytest.mark.gpu
HAS_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if HAS_GPU else "cpu")


@pytest.fixture(scope="module", autouse=True)
def _small_tiles() -> Iterator[None]:
    """Tiles and chunks small enough for short rows to have several."""
    with pytest.MonkeyPatch.context() as patch:
        tile = 256 if HAS_GPU else 64  # at least as many as the threads of a program
        patch.setattr(triton_sampler, "TILE", tile)
        patch.setattr(triton_sampler, "LIST_TILE", 64)
        patch.setattr(triton_sampler, "PROGRAMS_PER_PROCESSOR", 6)
        yield


def random_logits(num_rows: int, vocab_size: int, spread: float, seed: int) -> torch.Tensor:
    return torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * spread


def random_choice(num_rows: int, vocab_size: int, seed: int, *, has_masks: bool = True) -> ChoiceRows:
    """Rows of all kinds: with targets, greedy, with each filter and with several."""
    rng = np.random.default_rng(seed)
    masked = np.flatnonzero(rng.random(num_rows) < 0.5) if has_masks else np.zeros(0, dtype=np.int64)
    shape = len(masked), -(-vocab_size // 32)
    words = rng.integers(0, 2**32, shape, dtype=np.uint32) & rng.integers(0, 2**32, shape, dtype=np.uint32)
    return ChoiceRows(
        targets=np.where(rng.random(num_rows) < 0.1, rng.integers(0, vocab_size, num_rows), -1),
        temperatures=rng.choice([0, 1e-30, 0.3, 0.7, 1.0, 1.7, 50], num_rows).astype(np.float32),
        top_ks=rng.choice([0, 0, 1, 7, 50, vocab_size // 2, 100_000], num_rows),
        top_ps=rng.choice([1, 1, 0.9, 0.5, 0.999, 0.01], num_rows).astype(np.float32),
        min_ps=rng.choice([0, 0, 0.02, 0.3, 1], num_rows).astype(np.float32),
        uniforms=rng.choice([0.0, 1 - 2**-53, *rng.random(4)], num_rows),
        masked_rows=masked if len(masked) else None,
        mask_words=words if len(masked) else None,
    )


def chosen(logits: torch.Tensor, rows: ChoiceRows) -> list[int]:
    sampler = TRITON.sampler
    return sampler.choose(logits.to(DEVICE), sampler.stage(rows, DEVICE)).tolist()


def chosen_on_the_cpu(logits: torch.Tensor, rows: ChoiceRows) -> list[int]:
    return TORCH.sampler.choose(logits, rows).tolist()


@settings(max_examples=10)
@given(
    st.integers(1, 3),
    st.sampled_from([3, 40, 300]),
    st.sampled_from([0.0, 0.5, 2.0, 8.0]),
    st.integers(0, 10_000),
    st.booleans(),
)
def test_f42s_the_tokens_equal_the_cpus(
    num_rows: int, vocab_size: int, spread: float, seed: int, has_ties: bool
) -> None:
    """Which do not depend on tiles, chunks or other rows."""
    logits = random_logits(num_rows, vocab_size, spread, seed)
    if has_ties:
        logits = logits.bfloat16().float()
    rows = random_choice(num_rows, vocab_size, seed)
    assert chosen(logits, rows) == chosen_on_the_cpu(logits, rows)


@pytest.mark.parametrize("has_temperature", [False, True])
def test_f42s_rows_that_are_not_finite(has_temperature: bool) -> None:
    """Harm no other row, and are read only where the mask allows it."""
    logits = random_logits(6, 200, 1.0, 0)
    logits[0, 3], logits[1, 190], logits[2] = math.nan, math.inf, -math.inf
    logits[3, 64], logits[4, 0] = math.nan, -math.inf
    words = np.full((1, 7), 2**32 - 1, dtype=np.uint32)
    words[0, 2] -= 1  # token 64
    rows = replace(
        random_choice(6, 200, 0, has_masks=False),
        targets=np.array([-1, -1, -1, -1, -1, 8]),
        temperatures=np.full(6, 0.8 * has_temperature, dtype=np.float32),
        masked_rows=np.array([3]),
        mask_words=words,
    )
    tokens = chosen(logits, rows)
    assert tokens[:3] == [NOT_FINITE, NOT_FINITE, NO_TOKEN]
    assert tokens[5] == 8
    assert tokens == chosen_on_the_cpu(logits, rows)


@pytest.mark.parametrize("num_words", [1, 3])
def test_f42s_tokens_past_the_mask_are_excluded(num_words: int) -> None:
    logits = torch.arange(200.0).expand(2, -1).contiguous()
    words = np.full((2, num_words), 2**32 - 1, dtype=np.uint32)
    words[1] = 0
    rows = replace(
        random_choice(2, 200, 0),
        targets=np.full(2, -1),
        temperatures=np.zeros(2, dtype=np.float32),
        masked_rows=np.arange(2),
        mask_words=words,
    )
    assert chosen(logits, rows) == [32 * num_words - 1, NO_TOKEN]


def all_kinds(num_rows: int, vocab_size: int, seed: int) -> SampledRows:
    """Rows with edits, masks, targets and every kind of result."""
    rng = np.random.default_rng(seed)
    rows = random_choice(num_rows, vocab_size, seed)
    # Each pair of a row and a token is in a list once.
    places = [rng.choice(num_rows * vocab_size, 3 * num_rows, replace=False) for _ in range(3)]
    (p_rows, p_ids), (b_rows, b_ids), (f_rows, f_ids) = (divmod(place, vocab_size) for place in places)
    num = len(p_rows)
    edits = LogitEdits(
        penalized_rows=p_rows,
        penalized_ids=p_ids,
        penalized_counts=rng.integers(0, 3, num).astype(np.float32),
        repetitions=rng.uniform(0.5, 2, num).astype(np.float32),
        frequencies=rng.uniform(-1, 1, num).astype(np.float32),
        presences=rng.uniform(-1, 1, num).astype(np.float32),
        biased_rows=b_rows,
        biased_ids=b_ids,
        biases=rng.uniform(-5, 5, num).astype(np.float32),
        forbidden_rows=f_rows,
        forbidden_ids=f_ids,
    )
    masks = None
    if rows.masked_rows is not None and rows.mask_words is not None:
        masks = TokenMasks(rows.masked_rows, rows.mask_words)
    return runner_driver.sampled_rows(
        range(num_rows),
        target_ids=rows.targets,
        temperatures=rows.temperatures,
        top_ks=rows.top_ks,
        top_ps=rows.top_ps,
        min_ps=rows.min_ps,
        seeds=rng.integers(0, 2**63, num_rows).astype(np.uint64),
        needs_logprobs=True,
        edits=edits,
        masks=masks,
        top_counts=rng.integers(0, 3, num_rows),
        scored=ScoredTokens(np.sort(rng.integers(0, num_rows, 5)), rng.integers(0, vocab_size, 5)),
    )


def test_f42s_an_upload_is_a_copy_of_all_arrays() -> None:
    arrays = [
        np.arange(3, dtype=np.uint8),
        np.zeros((0, 4)),
        np.arange(6.0).reshape(2, 3).T,
        np.arange(2) > 0,
    ]
    uploaded = upload(arrays, DEVICE)
    expected = [array.copy() for array in arrays]
    for array in arrays:
        array[:] = 0
    for tensor, array in zip(uploaded, expected, strict=True):
        assert tensor.device.type == DEVICE.type
        np.testing.assert_array_equal(tensor.cpu().numpy(), array)
        assert tensor.cpu().numpy().dtype == array.dtype


@settings(max_examples=3)
@given(st.integers(1, 3), st.integers(0, 1000))
def test_f42s_all_results_equal_the_cpus(num_rows: int, seed: int) -> None:
    logits, sampled = random_logits(num_rows, 90, 2.0, seed), all_kinds(num_rows, 90, seed)
    there = logits.to(DEVICE)
    made = choose_tensors(there, stage(sampled, TRITON.sampler, DEVICE), TRITON.sampler)
    host = made.packed.cpu()
    ours = made.output(host)
    host.zero_()  # it belongs to the caller again
    expected = choose_tokens(logits.clone(), sampled, TORCH.sampler)
    assert torch.equal(there.cpu(), logits)
    for field in fields(expected):
        value = getattr(expected, field.name)
        if value is None or value.dtype.kind == "i":
            np.testing.assert_array_equal(getattr(ours, field.name), value)
        else:
            np.testing.assert_allclose(getattr(ours, field.name), value, rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(not HAS_GPU, reason="there is no GPU here")
def test_f42s_on_a_gpu_nothing_waits_and_all_tokens_equal_the_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """1,000 rows in batches from 1 to 256, with the tiles of real runs."""
    for name, value in (("TILE", 2048), ("LIST_TILE", 1024), ("PROGRAMS_PER_PROCESSOR", 8)):
        monkeypatch.setattr(triton_sampler, name, value)
    vocab_size, first = 32_003, 0
    for number, num_rows in enumerate((1, 2, 5, 16, 64, 150, 250, 256, 256)):
        first += num_rows
        spread = (0.0, 0.5, 2.0, 8.0)[number % 4]
        logits, sampled = (
            random_logits(num_rows, vocab_size, spread, number),
            all_kinds(num_rows, vocab_size, number),
        )
        there = logits.to(DEVICE)
        choose_tokens(there, sampled, TRITON.sampler)  # compiles
        torch.cuda.set_sync_debug_mode("error")
        try:
            made = choose_tensors(there, stage(sampled, TRITON.sampler, DEVICE), TRITON.sampler)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        expected = choose_tokens(logits, sampled, TORCH.sampler)
        assert made.output(made.packed.cpu()).token_ids.tolist() == expected.token_ids.tolist()
    assert first == 1000
