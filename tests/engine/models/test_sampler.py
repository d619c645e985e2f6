"""The sampler against a plain loop over one row, and against the distribution it should draw from."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.engine import runner_driver
from support.plain_sampler import MASK, plain_choice, plain_uniform

from agentflow.engine.batch import SampledRows, ScoredTokens, TokenMasks
from agentflow.engine.models.sampler import choose_tokens, uniforms
from agentflow.kernels.inputs import ChoiceRows
from agentflow.kernels.platforms import NATIVE, TORCH
from agentflow.kernels.sampling import torch_sampler
from agentflow.kernels.sampling.no_choice import NO_TOKEN, NOT_FINITE
from agentflow.kernels.sampling.sampler import Sampler
from agentflow.kernels.sampling.token_weights import whole_weights

Row = tuple[float, int, float, float, int, int]
BOTH = TORCH.sampler, NATIVE.sampler
SAMPLERS = pytest.mark.parametrize("sampler", BOTH, ids=["torch", "native"])
ROW = st.tuples(
    st.sampled_from([0.0, 1e-30, 0.3, 1.0, 1.7, 50.0]),
    st.sampled_from([0, 0, 1, 2, 7, 40, 1000]),
    st.sampled_from([1.0, 1.0, 0.95, 0.5, 0.01]),
    st.sampled_from([0.0, 0.0, 0.02, 0.3, 1.0]),
    st.integers(0, MASK),
    st.integers(0, 10_000),
)


def sampled_rows(rows: list[Row], **changed: object) -> SampledRows:
    temperatures, top_ks, top_ps, min_ps, seeds, positions = zip(*rows, strict=True)
    arrays = {
        "temperatures": np.array(temperatures, dtype=np.float32),
        "top_ks": np.array(top_ks, dtype=np.int64),
        "top_ps": np.array(top_ps, dtype=np.float32),
        "min_ps": np.array(min_ps, dtype=np.float32),
        "seeds": np.array(seeds, dtype=np.uint64),
        "positions": np.array(positions, dtype=np.int64),
    }
    return runner_driver.sampled_rows(range(len(rows)), **arrays, **changed)


def random_logits(num_rows: int, vocab_size: int, seed: int, spread: float = 3.0) -> torch.Tensor:
    return torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * spread


@SAMPLERS
@pytest.mark.parametrize("head_size", [4, 1024])
@given(st.lists(ROW, min_size=1, max_size=6), st.sampled_from([3, 50, 200]), st.integers(0, 1000))
def test_a_batch_equals_the_loop_over_its_rows(
    sampler: Sampler,
    head_size: int,
    rows: list[Row],
    vocab_size: int,
    seed: int,
) -> None:
    logits = random_logits(len(rows), vocab_size, seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_sampler, "_HEAD_SIZE", head_size)
        output = choose_tokens(logits, sampled_rows(rows), sampler)
    sampled = sampled_rows(rows)  # the parameters as float32, as the sampler sees them
    for i, row in enumerate(logits.double().tolist()):
        assert output.token_ids[i] == plain_choice(
            row,
            float(sampled.temperatures[i]),
            rows[i][1],
            float(sampled.top_ps[i]),
            float(sampled.min_ps[i]),
            rows[i][4],
            rows[i][5],
        )
    assert output.logprobs is None


@SAMPLERS
@given(
    st.lists(ROW, min_size=1, max_size=5),
    st.sampled_from([3, 32, 50, 200]),
    st.integers(0, 1000),
    st.data(),
)
def test_only_what_a_mask_allows_is_chosen(
    sampler: Sampler,
    rows: list[Row],
    vocab_size: int,
    seed: int,
    data: st.DataObject,
) -> None:
    logits = random_logits(len(rows), vocab_size, seed)
    before = logits.clone()
    masked = sorted(data.draw(st.sets(st.integers(0, len(rows) - 1), min_size=1)))
    allowed = {row: data.draw(st.sets(st.integers(0, vocab_size - 1), min_size=1)) for row in masked}
    bits = np.zeros((len(masked), -(-vocab_size // 32) * 32), dtype=np.uint8)
    for place, row in enumerate(masked):
        bits[place, list(allowed[row])] = 1
    words = np.packbits(bits, axis=1, bitorder="little").view(np.uint32)
    masks = TokenMasks(np.array(masked, dtype=np.int64), words)
    output = choose_tokens(logits, sampled_rows(rows, masks=masks, needs_logprobs=True), sampler)
    sampled = sampled_rows(rows)
    for i, row in enumerate(before.double().tolist()):
        plain = [x if i not in allowed or token in allowed[i] else -math.inf for token, x in enumerate(row)]
        assert output.token_ids[i] == plain_choice(
            plain,
            float(sampled.temperatures[i]),
            rows[i][1],
            float(sampled.top_ps[i]),
            float(sampled.min_ps[i]),
            rows[i][4],
            rows[i][5],
        )
        logprob = before[i].log_softmax(dim=0)[output.token_ids[i]]  # of the logits without the mask
        assert output.logprobs is not None
        assert output.logprobs[i] == pytest.approx(float(logprob), abs=1e-4)
    assert torch.equal(logits, before)


@SAMPLERS
@pytest.mark.parametrize("head_size", [4, 1024])
@given(
    st.sampled_from([0, 3, 20]),
    st.floats(0.0625, 1.0, width=32),
    st.sampled_from([0, 0.1]),
    st.integers(0, 99),
)
def test_no_token_too_many_or_too_few_is_kept(
    sampler: Sampler, head_size: int, top_k: int, top_p: float, min_p: float, seed: int
) -> None:
    """With the likeliest tokens first, a number just below 1 draws the last token that is kept."""
    logits = random_logits(1, 50, seed, spread=1.0).sort(descending=True).values
    weights = logits[0].exp().tolist()
    kept = weights[:top_k] if top_k else weights
    while len(kept) > 1 and sum(kept[:-1]) >= top_p * sum(weights[:top_k] if top_k else weights):
        kept = kept[:-1]
    kept = [weight for weight in kept if weight >= min_p * weights[0]]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_sampler, "_HEAD_SIZE", head_size)
        rows = ChoiceRows(
            targets=np.array([-1]),
            temperatures=np.ones(1, dtype=np.float32),
            top_ks=np.array([top_k]),
            top_ps=np.array([top_p], dtype=np.float32),
            min_ps=np.array([min_p], dtype=np.float32),
            uniforms=np.array([1 - 1e-6]),
        )
        tokens = sampler.choose(logits, sampler.stage(rows, logits.device))
    assert tokens.tolist() == [len(kept) - 1]


@SAMPLERS
@pytest.mark.parametrize("spread", [0.0, 0.01, 1.0, 4.0])
@pytest.mark.parametrize(("top_k", "top_p"), [(0, 0.9), (20_000, 1.0), (20_000, 0.5), (0, 0.9999)])
def test_a_cut_among_many_tokens_falls_where_sorting_puts_it(
    sampler: Sampler, spread: float, top_k: int, top_p: float
) -> None:
    logits = random_logits(1, 49_000, 5, spread).sort(descending=True).values
    weights = logits[0].double().softmax(dim=0)[: top_k or None]
    num_kept = int((weights.cumsum(0) < top_p * weights.sum() * (1 - 1e-12)).sum()) + 1
    if spread == 0:
        num_kept = 49_000  # all are as likely as the last one that is kept
    rows = ChoiceRows(
        targets=np.array([-1]),
        temperatures=np.ones(1, dtype=np.float32),
        top_ks=np.array([top_k]),
        top_ps=np.array([top_p], dtype=np.float32),
        min_ps=np.zeros(1, dtype=np.float32),
        uniforms=np.array([1 - 1e-9]),
    )
    chosen = sampler.choose(logits, sampler.stage(rows, logits.device))
    assert int(chosen[0]) == pytest.approx(num_kept - 1, rel=2e-3)


@settings(max_examples=12)
@given(
    st.lists(ROW, min_size=1, max_size=4),
    st.sampled_from([1, 17, 4_000, 33_000]),
    st.sampled_from([0.0, 0.3, 3.0, 20.0]),
    st.integers(0, 1000),
    st.booleans(),
)
def test_all_kernels_choose_the_same_token(
    rows: list[Row], vocab_size: int, spread: float, seed: int, has_ties: bool
) -> None:
    """The draws are equal for any logits, because sums of integer weights are exact in any order."""
    logits = random_logits(len(rows), vocab_size, seed, spread)
    if has_ties:
        logits = logits.bfloat16().float()
    chosen = [choose_tokens(logits, sampled_rows(rows), each).token_ids for each in BOTH]
    assert chosen[0].tolist() == chosen[1].tolist()


def test_weights_are_integers_and_close_to_the_exponential() -> None:
    below = torch.linspace(-30, 0, 10_001).unsqueeze(0)
    weights = whole_weights(below.clone(), torch.tensor([[1 / math.log(2)]])).double()
    assert torch.equal(weights, weights.floor())
    assert weights[0, -1] == 2**35
    exact = 2.0**35 * below.double().exp()
    # One unit, and the rounding of the exponent and of the polynomial.
    assert ((weights - exact).abs() <= 1 + exact * (3e-7 - below * 1e-7)).all()


@SAMPLERS
@given(
    st.integers(1, 5),
    st.sampled_from([1, 16, 17, 300, 5_003]),
    st.sampled_from([0.0, 0.3, 3.0, 20.0]),
    st.integers(0, 1000),
    st.booleans(),
)
def test_log_sums_and_the_likeliest_tokens(
    sampler: Sampler, num_rows: int, vocab_size: int, spread: float, seed: int, has_ties: bool
) -> None:
    logits = random_logits(num_rows, vocab_size, seed, spread)
    if has_ties:
        logits = logits.bfloat16().float()
    logits[:, 1::3] = -math.inf
    sums, num = sampler.log_sums(logits), min(20, vocab_size)
    torch.testing.assert_close(sums.double(), logits.double().logsumexp(dim=-1), rtol=1e-6, atol=2e-6)
    values, tokens = sampler.likeliest(logits, num)
    assert torch.equal(values, logits.sort(descending=True).values[:, :num])
    assert torch.equal(logits.gather(1, tokens), values)
    assert all(len(set(row)) == num for row in tokens.tolist())


@SAMPLERS
@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
def test_log_sums_of_rows_that_are_not_finite(sampler: Sampler, wrong: float) -> None:
    logits = random_logits(3, 50, 0)
    logits[1, :] = wrong if wrong < 0 else logits[1, :]
    logits[1, 40] = wrong
    assert sampler.log_sums(logits).isfinite().tolist() == [True, False, True]


@given(st.integers(0, MASK), st.integers(0, 2**40))
def test_uniforms_equal_the_plain_generator(seed: int, position: int) -> None:
    drawn = uniforms(np.array([seed], dtype=np.uint64), np.array([position]))
    assert drawn[0] == plain_uniform(seed, position)


def test_uniforms_are_uniform_over_positions_and_over_seeds() -> None:
    numbers = np.arange(20_000)
    fixed = np.full(20_000, 3)
    for drawn in (uniforms(fixed.astype(np.uint64), numbers), uniforms(numbers.astype(np.uint64), fixed)):
        counts, _ = np.histogram(drawn, bins=50, range=(0, 1))
        # Chi-squared of 49 degrees of freedom: 85.4 is the 99.9th percentile.
        assert ((counts - 400) ** 2 / 400).sum() < 85.4
        assert abs(np.corrcoef(drawn[:-1], drawn[1:])[0, 1]) < 0.03


@SAMPLERS
def test_samples_follow_the_softmax(sampler: Sampler) -> None:
    logits = torch.tensor([[1.0, 0.0, -1.0, 2.5, 0.3, -4.0, 1.1, 0.0]])
    n = 20_000
    rows = [(0.8, 0, 1.0, 0.0, 11, position) for position in range(n)]
    tokens = choose_tokens(logits.expand(n, -1), sampled_rows(rows), sampler).token_ids
    expected = n * torch.softmax(logits[0].double() / 0.8, -1).numpy()
    counts = np.bincount(tokens, minlength=8)
    # Chi-squared of 7 degrees of freedom: 24.3 is the 99.9th percentile.
    assert ((counts - expected) ** 2 / expected).sum() < 24.3


@SAMPLERS
def test_equally_likely_tokens_are_kept_or_cut_together(sampler: Sampler) -> None:
    logits = torch.tensor([[2.0, 1.0, 1.0, 1.0, -9.0]])
    rows = [(1.0, 2, 1.0, 0.0, 5, position) for position in range(200)]
    tokens = choose_tokens(logits.expand(200, -1), sampled_rows(rows), sampler).token_ids
    assert set(tokens.tolist()) == {0, 1, 2, 3}


@SAMPLERS
def test_targets_are_kept_and_logprobs_are_of_the_unmodified_logits(sampler: Sampler) -> None:
    logits = random_logits(3, 100, 0)
    rows = [(0.0, 0, 1.0, 0.0, 0, 0), (0.0, 0, 1.0, 0.0, 0, 1), (0.5, 3, 0.9, 0.1, 0, 2)]
    output = choose_tokens(
        logits, sampled_rows(rows, target_ids=np.array([17, -1, -1]), needs_logprobs=True), sampler
    )
    tokens, logprobs = output.token_ids, output.logprobs
    assert tokens[0] == 17
    assert tokens[1] == logits[1].argmax()
    exact = torch.log_softmax(logits.double(), -1)[torch.arange(3), torch.from_numpy(tokens)]
    assert logprobs is not None
    assert logprobs.dtype == np.float32
    np.testing.assert_allclose(logprobs, exact, rtol=1e-5)


@SAMPLERS
def test_greedy_takes_the_first_of_equals(sampler: Sampler) -> None:
    tokens = choose_tokens(
        torch.tensor([[0.0, 3.0, 3.0]]), sampled_rows([(0.0, 0, 1.0, 0.0, 0, 0)]), sampler
    ).token_ids
    assert tokens.tolist() == [1]


@SAMPLERS
def test_the_caller_keeps_its_logits_and_targets(sampler: Sampler) -> None:
    logits, targets = random_logits(2, 50, 0), np.array([-1, 3])
    before = logits.clone()
    choose_tokens(logits, sampled_rows([(1.0, 5, 0.9, 0.1, 1, 2)] * 2, target_ids=targets), sampler)
    assert torch.equal(logits, before)
    assert targets.tolist() == [-1, 3]


NUMBERS = st.floats(-30, 30, width=32) | st.just(-math.inf)
ODD = st.sampled_from([math.nan, math.inf])


@SAMPLERS
@given(st.data(), st.sampled_from([3, 16, 50, 200]), st.booleans(), st.booleans())
def test_f38b_a_row_that_is_not_finite_has_no_token_and_harms_no_other(
    sampler: Sampler, data: st.DataObject, vocab_size: int, is_random: bool, wants_logprobs: bool
) -> None:
    """One row of random logits, in which some are NaN, infinite or excluded, next to an ordinary row."""
    own = data.draw(st.lists(NUMBERS, min_size=vocab_size, max_size=vocab_size))
    allowed = data.draw(st.lists(st.booleans(), min_size=vocab_size, max_size=vocab_size))
    for place in data.draw(st.lists(st.integers(0, vocab_size - 1), max_size=3)):
        own[place] = data.draw(ODD)
    logits = torch.stack((torch.tensor(own), random_logits(1, vocab_size, 0)[0]))
    row = (0.7 if is_random else 0.0, 3, 0.9, 0.0, 1, 2)
    alone = choose_tokens(logits[1:].clone(), sampled_rows([row]), sampler).token_ids
    words = np.packbits(np.array(allowed), bitorder="little")
    words = np.pad(words, (0, -len(words) % 4)).view(np.uint32)[None]
    masks = TokenMasks(np.array([0]), words)
    chosen = choose_tokens(
        logits, sampled_rows([row] * 2, masks=masks, needs_logprobs=wants_logprobs), sampler
    ).token_ids
    left = [own[token] for token in range(vocab_size) if allowed[token]]
    read = own if wants_logprobs else left
    if any(math.isnan(value) or value == math.inf for value in read):
        assert chosen[0] == NOT_FINITE
    elif all(value == -math.inf for value in left):
        assert chosen[0] in ((NO_TOKEN, NOT_FINITE) if wants_logprobs else (NO_TOKEN,))
    else:
        assert allowed[chosen[0]]
        assert own[chosen[0]] > -math.inf
    assert chosen[1] == alone[0]


@SAMPLERS
def test_f38b_a_target_after_a_row_that_is_not_finite(sampler: Sampler) -> None:
    logits = random_logits(3, 50, 0)
    logits[0, 7], logits[1, 9] = math.nan, math.inf
    rows = sampled_rows([(0.0, 0, 1.0, 0.0, 1, 2)] * 3, target_ids=np.array([4] * 3), needs_logprobs=True)
    assert choose_tokens(logits, rows, sampler).token_ids.tolist() == [NOT_FINITE, NOT_FINITE, 4]


@SAMPLERS
@given(
    st.lists(st.tuples(st.integers(0, 4), st.integers(0, 49)), max_size=40).map(sorted),
    st.integers(0, 4),
    st.integers(0, 1000),
)
def test_any_number_of_tokens_after_a_row_is_scored(
    sampler: Sampler, pairs: list[tuple[int, int]], cut: int, seed: int
) -> None:
    """Together or in parts, and next to rows that sample."""
    logits = random_logits(5, 50, seed)
    logits[0, 7] = 1e4  # all of the probability
    rows = np.array([row for row, _ in pairs], dtype=np.int64)
    tokens = np.array([token for _, token in pairs], dtype=np.int64)
    targets = np.array([3, -1, 4, -1, 5])
    greedy = [(0.0, 0, 1.0, 0.0, 0, 0)] * 5
    sampled = sampled_rows(greedy, target_ids=targets, needs_logprobs=True, scored=ScoredTokens(rows, tokens))
    expected = [float(logits[row].double().log_softmax(-1)[token]) for row, token in pairs]
    output = choose_tokens(logits, sampled, sampler)
    assert output.scored_logprobs == pytest.approx(expected, abs=1e-5)
    assert all(
        value == 0.0 for value, pair in zip(output.scored_logprobs, pairs, strict=True) if pair == (0, 7)
    )
    parts = [
        choose_tokens(logits[first:end], sampled.slice(first, end), sampler).scored_logprobs
        for first, end in ((0, cut), (cut, 5))
        if first < end
    ]
    assert np.concatenate(parts).tolist() == output.scored_logprobs.tolist()
    assert output.token_ids.tolist() == np.where(targets < 0, logits.argmax(-1).numpy(), targets).tolist()


def test_ranks_are_those_of_targets_outside_trees() -> None:
    logits = random_logits(2, 50, seed=1)
    rows, targets = [(0.0, 0, 1.0, 0.0, 0, 0)] * 2, np.array([3, 5])
    of_tree = ScoredTokens(np.array([0, 0, 1]), np.array([3, 4, 5]))
    all_of_tree = sampled_rows(rows, target_ids=targets, needs_logprobs=True, scored=of_tree)
    assert choose_tokens(logits, all_of_tree, TORCH.sampler).ranks is None
    one_of_prompt = replace(all_of_tree, scored=ScoredTokens(np.array([0]), np.array([3])))
    ranks = choose_tokens(logits, one_of_prompt, TORCH.sampler).ranks
    assert ranks is not None
    assert ranks[1] == int((logits[1] >= logits[1, 5]).sum())
