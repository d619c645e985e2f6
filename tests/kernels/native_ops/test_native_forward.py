"""The native forward pass of a whole random model against the same model kernel by kernel on the reference;
and the team of threads that runs it."""

from __future__ import annotations

import functools
import math
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from kernel_cases import IN_ORDER, NATIVE_KERNELS, SAME_EXAMPLES, Shape, make_case
from support.examples import examples

from agentflow.engine.batch import SampledRows, ScoredTokens, TokenMasks
from agentflow.engine.models.forward.decoder import Decoder
from agentflow.engine.models.kv_pool import KvPool
from agentflow.engine.models.rope import RopeConfig, inverse_frequencies
from agentflow.engine.models.sampler import choice_rows, choose_tokens, empty_likelihoods, make_output
from agentflow.kernels.activations import Activation
from agentflow.kernels.decoder_weights import (
    DecoderWeights,
    Experts,
    LatentWeights,
    LayerWeights,
    Mlp,
    Norm,
    Rope,
    Routing,
)
from agentflow.kernels.inputs import AttentionBatch, ChoiceRows, ForwardInput, GivenRows, LinearWeight
from agentflow.kernels.native_ops.structures import array_address
from agentflow.kernels.platforms import NATIVE, REFERENCE, Kernels

CPU = torch.device("cpu")
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


@dataclass(frozen=True)
class Sizes:
    """The sizes of a random model, with the features of one or more families."""

    hidden: int
    inner: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    has_bias: bool = False
    qk_norm: Literal["", "head", "row", "each_head"] = ""
    norm: Literal["rms", "rms_less_one", "layer"] = "rms"
    norms: tuple[str, ...] = ("input_norm", "mlp_norm")
    windows: tuple[int, ...] = (0,)  # of the layers, over and over; so are the ropes
    ropes: tuple[int | None, ...] = (0,)
    rotated: tuple[float, ...] = (1.0,)  # the part of each head that each rope rotates
    amplitude: float = 1.0
    embedding_scale: float = 1.0
    num_positions: int = 0
    cap: float = 0.0  # of scores and logits
    logit_scale: float = 1.0
    has_sinks: bool = False
    activation: Activation = "silu"
    is_gated: bool = True
    is_parallel: bool = False
    routing: Routing | None = None
    num_experts: int = 0
    has_shared: bool = False
    # For latent attention: q_rank, kv_rank, plain_dim, value_dim. ``head_dim`` is the pool's.
    latent: tuple[int, int, int, int] | None = None


ALL_NORMS = ("input_norm", "attention_norm", "mlp_norm", "output_norm")
LLAMA = Sizes(64, 160, 4, 2, 16)
GEMMA = Sizes(
    *(64, 100, 4, 1, 64),
    qk_norm="head",
    norm="rms_less_one",
    norms=ALL_NORMS,
    windows=(20, 0),
    ropes=(1, 0),
    rotated=(1.0, 1.0),
    embedding_scale=4.0,
    cap=3.0,
    activation="gelu_tanh",
)
SIZES = (
    LLAMA,
    Sizes(96, 72, 3, 1, 32, has_bias=True),
    Sizes(40, 100, 2, 2, 24, qk_norm="head"),
    GEMMA,
    Sizes(48, 64, 4, 2, 16, qk_norm="row", norms=ALL_NORMS[1::2]),  # OLMo 2
    Sizes(
        *(64, 96, 2, 2, 32),
        has_bias=True,
        norm="layer",
        ropes=(None,),
        num_positions=1000,
        activation="gelu",
        is_gated=False,
    ),
    Sizes(  # GPT-NeoX
        *(64, 96, 4, 4, 24),
        has_bias=True,
        norm="layer",
        qk_norm="head",
        rotated=(0.25,),
        activation="gelu",
        is_gated=False,
        is_parallel=True,
    ),
    Sizes(  # Cohere
        *(64, 80, 4, 2, 16),
        norm="layer",
        qk_norm="each_head",
        windows=(20, 0),
        ropes=(0, None),
        logit_scale=0.3,
        is_parallel=True,
    ),
    Sizes(  # GPT-OSS
        *(64, 80, 4, 2, 16),
        has_bias=True,
        windows=(17, 0),
        rotated=(0.5,),
        amplitude=1.3,
        has_sinks=True,
        activation="clamped_swiglu",
        routing=Routing(2),
        num_experts=5,
    ),
    Sizes(  # the experts of DeepSeek-V2
        *(64, 48, 2, 1, 16),
        activation="relu",
        routing=Routing(3, normalises=False, scale=1.5, num_groups=3, num_used_groups=2),
        num_experts=12,
        has_shared=True,
    ),
    Sizes(64, 96, 4, 1, 40, latent=(0, 24, 20, 12)),
    Sizes(48, 96, 2, 1, 48, latent=(40, 32, 16, 8)),
)
VOCAB = 50
NUM_LAYERS = 3


class _Maker:
    """Makes random weights, the same for all kernels."""

    def __init__(self, sizes: Sizes, kernels: Kernels, dtype: torch.dtype, seed: int) -> None:
        self._sizes, self._kernels, self._dtype = sizes, kernels, dtype
        self._generator = torch.Generator().manual_seed(seed)

    def random(self, *shape: int, scale: float = 0.2) -> torch.Tensor:
        return (torch.randn(*shape, generator=self._generator) * scale).to(self._dtype)

    def norm(self, *size: int) -> Norm:
        kind = self._sizes.norm
        weight = self.random(*size) + (0 if kind == "rms_less_one" else 1)
        bias = self.random(*size) if kind == "layer" else None
        return Norm(weight, bias, 1e-5, is_less_one=kind == "rms_less_one")

    def linear(self, num_out: int, num_in: int, *, gated: bool = False) -> LinearWeight:
        weight = self.random(num_out, num_in)
        bias = self.random(num_out) if self._sizes.has_bias else None
        return self._kernels.linear.pack(weight, bias, gated=gated)

    def mlp(self, inner: int) -> Mlp:
        hidden, is_gated = self._sizes.hidden, self._sizes.is_gated
        gate_up = self.linear(2 * inner if is_gated else inner, hidden, gated=is_gated)
        return Mlp(gate_up, self.linear(hidden, inner))

    def latent(self, q_rank: int, kv_rank: int, plain_dim: int, value_dim: int) -> LatentWeights:
        sizes, hidden = self._sizes, self._sizes.hidden
        queries = sizes.num_heads * (plain_dim + sizes.head_dim - kv_rank)
        return LatentWeights(
            kv_rank,
            plain_dim,
            self.linear((q_rank or queries) + sizes.head_dim, hidden),
            1 + self.random(q_rank) if q_rank else None,
            self.linear(queries, q_rank) if q_rank else None,
            1 + self.random(kv_rank),
            self.random(sizes.num_heads, plain_dim, kv_rank),
            self.random(sizes.num_heads, kv_rank, value_dim),
        )

    def layer(self, index: int) -> LayerWeights:
        sizes = self._sizes
        queries, keys = sizes.num_heads * sizes.head_dim, sizes.num_kv_heads * sizes.head_dim
        dim, counts = sizes.head_dim, (sizes.num_heads, sizes.num_kv_heads)
        normed: dict[str, Any] = {"": (), "head": ((dim,), (dim,)), "row": ((queries,), (keys,))}
        normed["each_head"] = tuple((count, dim) for count in counts)
        mlp: Mlp | Experts = self.mlp(sizes.inner)
        if sizes.routing is not None:
            # In bfloat16, roundings change which experts are chosen, unless their scores are far apart.
            is_close = self._dtype == torch.float32
            router = self._kernels.linear.pack(
                self.random(sizes.num_experts, sizes.hidden, scale=0.2 if is_close else 0.02),
                None if is_close else torch.linspace(-3, 3, sizes.num_experts).to(self._dtype),
            )
            experts = [self.mlp(sizes.inner) for _ in range(sizes.num_experts)]
            mlp = Experts(router, sizes.routing, experts, mlp if sizes.has_shared else None)
        norms = {name: self.norm(sizes.hidden) if name in sizes.norms else None for name in ALL_NORMS}
        for name, size in zip(("q_norm", "k_norm"), normed[sizes.qk_norm], strict=False):
            norms[name] = self.norm(*size)
        return LayerWeights(
            qkv=self.latent(*sizes.latent) if sizes.latent else self.linear(queries + 2 * keys, sizes.hidden),
            sinks=self.random(sizes.num_heads, scale=1.0) if sizes.has_sinks else None,
            output=self.linear(sizes.hidden, sizes.num_heads * sizes.latent[-1] if sizes.latent else queries),
            mlp=mlp,
            window=sizes.windows[index % len(sizes.windows)],
            rope=sizes.ropes[index % len(sizes.ropes)],
            **norms,
        )


def rope_of(frequencies: torch.Tensor, sizes: Sizes) -> Rope:
    return Rope(frequencies, sizes.amplitude, torch.arange(len(frequencies)) % 3)


@functools.cache
def model_of(sizes: Sizes, kernels: Kernels, dtype: torch.dtype, seed: int = 0) -> Decoder:
    maker = _Maker(sizes, kernels, dtype, seed)
    embedding = maker.random(VOCAB, sizes.hidden, scale=1.0)
    head = kernels.linear.pack(embedding, None, exact_output=True)
    turned = sizes.head_dim - (sizes.latent[1] if sizes.latent else 0)
    ropes = [
        rope_of(inverse_frequencies(RopeConfig("default", theta, fraction=part), turned), sizes)
        for part, theta in zip(sizes.rotated, (10000.0, 1000.0), strict=False)
    ]
    has_positions = sizes.num_positions > 0
    weights = DecoderWeights(
        embedding=kernels.linear.pack_embedding(embedding, head),
        layers=[maker.layer(i) for i in range(NUM_LAYERS)],
        final_norm=maker.norm(sizes.hidden),
        ropes=ropes,
        num_heads=sizes.num_heads,
        num_kv_heads=sizes.num_kv_heads,
        head_dim=sizes.head_dim,
        embedding_scale=sizes.embedding_scale,
        positions=maker.random(sizes.num_positions, sizes.hidden) if has_positions else None,
        position_offset=2 if has_positions else 0,
        attention_scale=sizes.head_dim**-0.5,
        attention_cap=sizes.cap,
        logit_scale=sizes.logit_scale,
        logit_cap=sizes.cap,
        activation=sizes.activation,
        is_gated=sizes.is_gated,
        is_parallel=sizes.is_parallel,
    )
    return Decoder(kernels, weights, head)


@dataclass(frozen=True)
class Step:
    """A batch of a model whose pool is poisoned except for the batch's cached tokens."""

    token_ids: Any
    positions: Any
    write_slots: Any
    batch: AttentionBatch
    rows: Any
    kv: torch.Tensor
    given: GivenRows | None = None

    def run(self, model: Decoder, kernels: Kernels) -> tuple[torch.Tensor, torch.Tensor]:
        """The hidden states, and the pool after them."""
        pool = self.pool(model.weights)
        plan = kernels.attention.plan(self.batch, self.kv.dtype, CPU)
        hidden = model.forward(self.inputs(pool, plan))
        return hidden, torch.stack(pool.layers)

    def start(self, model: Decoder) -> Callable[[], torch.Tensor]:
        """Starts the forward pass of the native kernels. Returns a function that waits for its hidden
        states."""
        pool = self.pool(model.weights)
        assert model.whole_forward is not None
        plan = NATIVE.attention.plan(self.batch, self.kv.dtype, CPU)
        return model.whole_forward.start_hidden(self.inputs(pool, plan))

    def choose(self, model: Decoder, kernels: Kernels, choice: ChoiceRows) -> list[int]:
        """The tokens of the wanted rows."""
        pool, plan = self.pool(model.weights), kernels.attention.plan(self.batch, self.kv.dtype, CPU)
        given = self.inputs(pool, plan)
        if model.whole_forward is not None:
            return model.whole_forward.prepare_tokens(given, lambda: choice)()()[0].tolist()
        return kernels.sampler.choose(model.logits(model.forward(given)), choice).tolist()

    def pool(self, weights: DecoderWeights) -> KvPool:
        pool = KvPool(
            num_layers=NUM_LAYERS,
            num_slots=self.kv.shape[1],
            num_kv_heads=weights.num_kv_heads,
            head_dim=weights.head_dim,
            dtype=self.kv.dtype,
            device=CPU,
        )
        for layer, cached in zip(pool.layers, self.kv, strict=True):
            layer.copy_(cached)
        return pool

    def inputs(self, pool: KvPool, plan: Any) -> ForwardInput:
        arrays = self.token_ids, self.positions, self.write_slots
        return ForwardInput(*arrays, pool.layers, plan, self.rows, given_rows=self.given)


def step_of(
    sizes: Sizes, shapes: Iterable[Shape], sampled: Iterable[bool], dtype: torch.dtype, seed: int
) -> Step:
    """Returns a random step, the same object for the next kernels."""
    return _step_of(sizes, tuple(shapes), tuple(sampled), dtype, seed)


@functools.lru_cache(32)
def _step_of(
    sizes: Sizes, shapes: tuple[Shape, ...], sampled: tuple[bool, ...], dtype: torch.dtype, seed: int
) -> Step:
    rng = np.random.default_rng(seed)
    case = make_case(shapes, seed=seed, dtype=dtype, num_kv_heads=sizes.num_kv_heads, head_dim=sizes.head_dim)
    positions = [np.arange(s.cached, s.cached + s.query_len) for s in shapes]
    slots = [case.req_to_token[row, p] for row, p in zip(case.req_rows, positions, strict=True)]
    num_rows = sum(map(len, positions))
    wanted = np.flatnonzero([sampled[i % len(sampled)] for i in range(num_rows)])
    layers = [case.kv_layer * (1 + i) for i in range(NUM_LAYERS)]
    return Step(
        token_ids=rng.integers(0, VOCAB, num_rows),
        positions=np.concatenate(positions),
        write_slots=np.concatenate(slots).astype(np.int64),
        batch=AttentionBatch(case.req_to_token, case.req_rows, case.query_lens, case.kv_lens, None),
        rows=wanted,
        kv=torch.stack(layers),
    )


@dataclass(frozen=True)
class Drawn:
    """A random step: the model's sizes, how much of each request is cached and how many rows it has, which
    of the rows are wanted (over and over), and a seed for all numbers."""

    sizes: Sizes
    lengths: tuple[tuple[int, int], ...]
    sampled: tuple[bool, ...]
    seed: int

    def step(self, dtype: torch.dtype) -> Step:
        shapes = [Shape(-1, 0, cached, num_rows) for cached, num_rows in self.lengths]
        return step_of(self.sizes, shapes, self.sampled, dtype, self.seed)


def tuples_of(elements: st.SearchStrategy[Any], max_size: int) -> st.SearchStrategy[Any]:
    return st.lists(elements, min_size=1, max_size=max_size).map(tuple)


DRAWN = st.builds(
    Drawn,
    sizes=st.sampled_from(SIZES),
    lengths=tuples_of(st.tuples(st.integers(0, 200), st.integers(1, 40)), 5),
    sampled=tuples_of(st.booleans(), 4),
    seed=st.integers(0, 1000),
)


@functools.lru_cache(100)
def expected_of(drawn: Drawn, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """The hidden states and the pool, kernel by kernel on the reference."""
    return drawn.step(dtype).run(model_of(drawn.sizes, REFERENCE, dtype), REFERENCE)


@NATIVE_KERNELS
@DTYPES
@SAME_EXAMPLES
@given(DRAWN)
def test_a_whole_model_gives_what_the_reference_gives(
    kernels: Kernels, dtype: torch.dtype, drawn: Drawn
) -> None:
    step, sizes = drawn.step(dtype), drawn.sizes
    expected, expected_kv = expected_of(drawn, dtype)
    hidden, kv = step.run(model_of(sizes, kernels, dtype), kernels)
    assert hidden.shape == (len(step.rows), sizes.hidden)
    if dtype == torch.float32:
        torch.testing.assert_close(hidden, expected, rtol=2e-4, atol=2e-4)
        torch.testing.assert_close(kv, expected_kv, rtol=2e-4, atol=2e-4, equal_nan=True)
        return
    # Roundings of bfloat16 add up over three layers: as a whole, not number by number.
    bound = 0.03 if sizes.routing is None else 0.08  # the weights of experts depend on rounded scores
    assert (hidden.float() - expected.float()).norm() <= bound * expected.float().norm() + 1e-6
    written = torch.from_numpy(step.write_slots)
    ours, theirs = kv[:, written].float(), expected_kv[:, written].float()
    assert (ours - theirs).norm() <= bound * theirs.norm()
    others = torch.ones(kv.shape[1], dtype=torch.bool).index_fill_(0, written, False)
    assert torch.equal(kv[:, others].view(torch.int16), expected_kv[:, others].view(torch.int16))


@functools.lru_cache
def many_rows(sizes: Sizes) -> tuple[Step, torch.Tensor]:
    """A step of many rows, and its hidden states on the reference."""
    step = step_of(sizes, [Shape(-1, 0, 0, 300)], [True], torch.float32, 2)
    return step, step.run(model_of(sizes, REFERENCE, torch.float32), REFERENCE)[0]


@NATIVE_KERNELS
@pytest.mark.parametrize(
    "sizes", [each for each in SIZES if each.routing is not None], ids=lambda s: s.activation
)
def test_many_rows_use_experts(kernels: Kernels, sizes: Sizes) -> None:
    """More than are computed together, which is about 512 uses of experts."""
    step, expected = many_rows(sizes)
    hidden, _ = step.run(model_of(sizes, kernels, torch.float32), kernels)
    torch.testing.assert_close(hidden, expected, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("kernels", [pytest.param(REFERENCE, id="reference"), *NATIVE_KERNELS.args[1]])
@DTYPES
@pytest.mark.parametrize(
    "sizes", [each for each in SIZES if each.routing is not None], ids=lambda s: s.activation
)
def test_f37_a_row_with_a_score_of_an_expert_that_is_not_a_number(
    kernels: Kernels, dtype: torch.dtype, sizes: Sizes
) -> None:
    """For each expert, the row is not a number, as if the expert had been chosen."""
    step = step_of(sizes, [Shape(-1, 0, 20, 1), Shape(-1, 0, 0, 3)], [True], dtype, 3)
    model = model_of(sizes, kernels, dtype)
    first, *others = model.weights.layers
    assert isinstance(first.mlp, Experts)
    head = kernels.linear.pack(torch.zeros(VOCAB, sizes.hidden, dtype=dtype), None, exact_output=True)
    for expert in range(sizes.num_experts):
        scores = torch.linspace(-1, 1, sizes.num_experts).to(dtype)
        scores[expert] = math.nan
        router = kernels.linear.pack(torch.zeros(sizes.num_experts, sizes.hidden, dtype=dtype), scores)
        layers = [replace(first, mlp=replace(first.mlp, router=router)), *others]
        damaged = Decoder(kernels, replace(model.weights, layers=layers), head)
        assert step.run(damaged, kernels)[0].isnan().all()


def with_given_rows(step: Step, sizes: Sizes, num_deep: int, has_axes: bool, seed: int) -> Step:
    """The step with random embeddings for some rows. ``num_deep``: layers after which more is added to
    them."""
    rng, num_rows = np.random.default_rng(seed), len(step.token_ids)
    torch.manual_seed(seed)
    rows = np.flatnonzero(rng.random(num_rows) < 0.4)
    made = GivenRows(
        rows,
        torch.randn(len(rows), sizes.hidden).to(step.kv.dtype),
        torch.randn(num_deep, len(rows), sizes.hidden).to(step.kv.dtype) if num_deep else None,
        rng.integers(0, 500, (3, num_rows)) if has_axes else None,
    )
    return replace(step, given=made)


@functools.lru_cache(100)
def given_and_expected(
    drawn: Drawn, dtype: torch.dtype, num_deep: int, has_axes: bool
) -> tuple[Step, torch.Tensor, torch.Tensor]:
    """A step with given rows, and its hidden states and pool on the reference."""
    has_axes = has_axes and len(drawn.sizes.rotated) == 1
    step = with_given_rows(drawn.step(dtype), drawn.sizes, num_deep, has_axes, drawn.seed)
    return step, *step.run(model_of(drawn.sizes, REFERENCE, dtype), REFERENCE)


@NATIVE_KERNELS
@DTYPES
@SAME_EXAMPLES
@examples(80)
@given(DRAWN, st.integers(0, NUM_LAYERS - 1), st.booleans())
def test_rows_whose_embeddings_are_given(
    kernels: Kernels, dtype: torch.dtype, drawn: Drawn, num_deep: int, has_axes: bool
) -> None:
    step, expected, expected_kv = given_and_expected(drawn, dtype, num_deep, has_axes)
    hidden, kv = step.run(model_of(drawn.sizes, kernels, dtype), kernels)
    if dtype == torch.float32:
        torch.testing.assert_close(hidden, expected, rtol=2e-4, atol=2e-4)
        torch.testing.assert_close(kv, expected_kv, rtol=2e-4, atol=2e-4, equal_nan=True)
    else:
        assert (hidden.float() - expected.float()).norm() <= 0.03 * expected.float().norm() + 1e-6


@NATIVE_KERNELS
@DTYPES
@given(DRAWN)
def test_tokens_are_those_of_the_logits(kernels: Kernels, dtype: torch.dtype, drawn: Drawn) -> None:
    """Whether the forward chooses them itself, or gives hidden states first."""
    step = drawn.step(dtype)
    model, num = model_of(drawn.sizes, kernels, dtype), len(step.rows)
    rng = np.random.default_rng(drawn.seed)
    choice = ChoiceRows(
        targets=rng.choice([-1, -1, 7], num),
        temperatures=rng.choice([0.0, 0.7, 1.0], num).astype(np.float32),
        top_ks=rng.choice([0, 5], num),
        top_ps=rng.choice([1.0, 0.5], num).astype(np.float32),
        min_ps=np.zeros(num, dtype=np.float32),
        uniforms=rng.random(num),
    )
    hidden, _ = step.run(model, kernels)
    expected = kernels.sampler.choose(model.logits(hidden), choice).tolist() if num else []
    assert step.choose(model, kernels, choice) == expected


@NATIVE_KERNELS
@DTYPES
@given(DRAWN, st.booleans(), st.booleans())
def test_log_probabilities_are_those_of_the_logits(
    kernels: Kernels, dtype: torch.dtype, drawn: Drawn, is_broken: bool, has_top: bool
) -> None:
    """Ranks, the likeliest tokens and further scored tokens, too, to the bit; of rows with masks, and next to
    a row that is not finite. The choice is made while the pass runs."""
    step, model = drawn.step(dtype), model_of(drawn.sizes, kernels, dtype)
    num, rng = len(step.rows), np.random.default_rng(drawn.seed)
    assume(num)
    if is_broken:
        broken = torch.full((1, drawn.sizes.hidden), torch.nan, dtype=dtype)
        step = replace(step, given=GivenRows(step.rows[:1], broken))
    masked = np.flatnonzero(rng.random(num) < 0.5)
    words = rng.integers(0, 2**32, (len(masked), -(-VOCAB // 32)), dtype=np.uint32)
    made: list[bool] = []
    sampled = SampledRows(
        rows=step.rows,
        target_ids=rng.choice([-1, -1, 7], num),
        temperatures=rng.choice([0.0, 0.7], num).astype(np.float32),
        top_ps=rng.choice([1.0, 0.5], num).astype(np.float32),
        top_ks=np.zeros(num, dtype=np.int64),
        min_ps=np.zeros(num, dtype=np.float32),
        seeds=np.arange(num, dtype=np.uint64),
        positions=np.arange(num),
        needs_logprobs=True,
        masks=TokenMasks(masked, lambda: [made.append(True), words][1]),
        top_counts=rng.choice([0, 3], num) if has_top else None,
        scored=ScoredTokens(np.sort(rng.integers(0, num, 5)), rng.integers(0, VOCAB, 5)),
    )
    whole, pool = model.whole_forward, step.pool(model.weights)
    assert whole is not None
    given = step.inputs(pool, kernels.attention.plan(step.batch, dtype, CPU))
    start = whole.prepare_tokens(
        given, lambda: choice_rows(sampled), lambda: empty_likelihoods(sampled, VOCAB)
    )
    tokens = start()
    assert not made
    found = make_output(*tokens())
    expected = choose_tokens(model.logits(step.run(model, kernels)[0]), sampled, kernels.sampler)
    names = ["token_ids", "logprobs", "ranks", "top_ids", "top_logprobs", "scored_logprobs"]
    if drawn.sizes.cap:  # computed by another polynomial
        names = names[:2]
    rtol = 1e-4 if drawn.sizes.cap else 0
    for one, other in ((getattr(found, name), getattr(expected, name)) for name in names):
        assert (one is None) == (other is None)
        if one is not None:
            np.testing.assert_allclose(one, other, rtol=rtol)


@IN_ORDER
@DTYPES
@pytest.mark.parametrize("sizes", SIZES, ids=range(len(SIZES)))
def test_a_row_gives_the_same_whatever_else_is_in_the_batch(
    kernels: Kernels, dtype: torch.dtype, sizes: Sizes
) -> None:
    model = model_of(sizes, kernels, dtype)
    together = step_of(sizes, [Shape(-1, 0, 300 + i, 1) for i in range(30)], [True], dtype, 1)
    hidden, _ = together.run(model, kernels)
    for row in (0, 13, 29):
        alone = part_of(together, row, slice(row, row + 1), together.batch.kv_lens[row])
        assert torch.equal(alone.run(model, kernels)[0][0], hidden[row])


@IN_ORDER
@DTYPES
@given(
    st.sampled_from(SIZES),
    st.lists(st.integers(1, 150), min_size=1, max_size=4),
    st.integers(0, 200),
    st.integers(0, 99),
)
def test_f36c_a_prompt_in_chunks_gives_the_same_as_in_one(
    kernels: Kernels, dtype: torch.dtype, sizes: Sizes, chunks: list[int], cached: int, seed: int
) -> None:
    model = model_of(sizes, kernels, dtype)
    whole = step_of(sizes, [Shape(-1, 0, 20, 1), Shape(-1, 0, cached, sum(chunks))], [True], dtype, seed)
    expected, expected_kv = whole.run(model, kernels)
    kv, end = whole.kv, 0
    for length in chunks:
        rows = slice(1 + end, 1 + end + length)
        end += length
        chunk = replace(part_of(whole, 1, rows, cached + end), kv=kv)
        hidden, kv = chunk.run(model, kernels)
        assert torch.equal(hidden, expected[rows])
    written = torch.from_numpy(whole.write_slots[1:])
    assert torch.equal(kv[:, written], expected_kv[:, written])


def part_of(step: Step, request: int, rows: slice, kv_len: int) -> Step:
    """A step with some of a request's rows only."""
    num = rows.stop - rows.start
    return replace(
        step,
        token_ids=step.token_ids[rows].copy(),
        positions=step.positions[rows].copy(),
        write_slots=step.write_slots[rows].copy(),
        batch=replace(
            step.batch,
            req_rows=step.batch.req_rows[request : request + 1],
            query_lens=np.array([num]),
            kv_lens=np.array([kv_len]),
        ),
        rows=np.arange(num),
    )


@pytest.mark.parametrize("token_id", [-1, VOCAB, 2**40])
def test_a_token_that_does_not_exist_is_an_error(token_id: int) -> None:
    step = step_of(SIZES[0], [Shape(-1, 0, 3, 4)], [True], torch.float32, 0)
    token_ids = step.token_ids.copy()
    token_ids[2] = token_id
    with pytest.raises(IndexError, match=rf"token {token_id} .*\b2\b"):
        replace(step, token_ids=token_ids).run(model_of(SIZES[0], NATIVE, torch.float32), NATIVE)


@pytest.mark.parametrize("sizes", SIZES, ids=range(len(SIZES)))
def test_any_number_of_threads_gives_the_same(sizes: Sizes, monkeypatch: pytest.MonkeyPatch) -> None:
    step = step_of(sizes, [Shape(-1, 0, 500, 1), Shape(-1, 0, 30, 40)], [True], torch.float32, 2)
    model = model_of(sizes, NATIVE, torch.float32)
    results = []
    for num_threads in (1, 2, 3, 5, 8, 2):
        monkeypatch.setattr(torch, "get_num_threads", lambda num=num_threads: num)
        results.append(step.run(model, NATIVE)[0])
    assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize("shape", [(5,), (3, 4), (0,)])
@pytest.mark.parametrize("is_writable", [True, False])
def test_the_address_of_an_array(shape: tuple[int, ...], is_writable: bool) -> None:
    array = np.zeros(shape, dtype=np.int64)
    array.flags.writeable = is_writable
    assert array_address(array) == array.ctypes.data


@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_the_caller_works_during_the_forward_pass(num_threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also for long: the thread that computes alone then is joined late, or not at all."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: num_threads)
    step = step_of(SIZES[0], [Shape(-1, 0, 300, 1)] * 3, [True], torch.float32, 4)
    model = model_of(SIZES[0], NATIVE, torch.float32)
    expected = step.run(model, NATIVE)[0]
    for length in (0, 10, 1000, 100_000):
        hidden = step.start(model)
        assert sum(range(length)) == length * (length - 1) // 2
        assert torch.equal(hidden(), expected)


@pytest.mark.parametrize("num_threads", [1, 2])
def test_a_caller_that_fails_and_waits_leaves_the_threads_usable(
    num_threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: num_threads)
    step = step_of(SIZES[0], [Shape(-1, 0, 20, 2)], [True], torch.float32, 5)
    model = model_of(SIZES[0], NATIVE, torch.float32)
    expected = step.run(model, NATIVE)[0]

    def fail() -> None:
        hidden = step.start(model)
        try:
            raise ZeroDivisionError
        finally:
            assert torch.equal(hidden(), expected)

    def fail_to_choose() -> None:
        given = step.inputs(step.pool(model.weights), NATIVE.attention.plan(step.batch, step.kv.dtype, CPU))
        assert model.whole_forward is not None
        model.whole_forward.prepare_tokens(given, lambda: 1 // 0)()()

    for failing in (fail, fail_to_choose, fail):
        with pytest.raises(ZeroDivisionError):
            failing()
        assert torch.equal(step.run(model, NATIVE)[0], expected)


def test_the_threads_sleep_while_the_caller_is_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    step = step_of(SIZES[0], [Shape(-1, 0, 20, 2)], [True], torch.float32, 5)
    model = model_of(SIZES[0], NATIVE, torch.float32)
    zeros = np.zeros(len(step.rows), dtype=np.float32)
    none = np.zeros(len(step.rows), dtype=np.int64)
    choice = ChoiceRows(none - 1, zeros, none, zeros + 1, zeros, zeros.astype(np.float64))
    expected = step.choose(model, NATIVE, choice)
    pool = step.pool(model.weights)
    before = pool.layers[-1].clone()
    assert model.whole_forward is not None
    given = step.inputs(pool, NATIVE.attention.plan(step.batch, torch.float32, CPU))
    tokens = model.whole_forward.prepare_tokens(given, lambda: choice)()
    try:
        end = time.monotonic() + 20
        while torch.equal(pool.layers[-1], before):  # in its last layer, a job has no reason to sleep
            assert time.monotonic() < end
        while not all(map(_sleeps, Path("/proc/self/task").iterdir())):
            assert time.monotonic() < end
    finally:
        found = tokens()[0].tolist()
    assert found == expected


def _sleeps(thread: Path) -> bool:
    """Whether a thread of this process sleeps or is the caller's."""
    try:
        state = (thread / "stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):  # it has ended
        return True
    return state == "S" or int(thread.name) == threading.get_native_id()


def test_threads_of_python_take_turns() -> None:
    """Two models run by two threads at the same time, as two engines in one process do."""
    sizes = SIZES[0]
    step = step_of(sizes, [Shape(-1, 0, 100, 1)] * 4, [True], torch.float32, 3)
    models = [model_of(sizes, NATIVE, torch.float32, seed) for seed in range(2)]
    expected = [step.run(model, NATIVE)[0] for model in models]
    wrong: list[int] = []

    def run(index: int) -> None:
        for _ in range(50):
            if not torch.equal(step.run(models[index], NATIVE)[0], expected[index]):
                wrong.append(index)

    threads = [threading.Thread(target=run, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_process_has_a_team_of_its_own() -> None:
    """The child has none of its parent's threads. (It would wait for OpenMP's threads forever: nothing here
    is large enough for torch to use them.)"""
    from support.processes import run_in_fork  # failing_kernels.py has only this folder on its path

    weight = NATIVE.linear.pack(torch.randn(640, 32), None)
    x = torch.randn(4, 32)
    expected = NATIVE.linear.multiply(x, weight).tolist()
    assert run_in_fork(lambda: NATIVE.linear.multiply(x, weight).tolist() == expected) == 0
    assert NATIVE.linear.multiply(x, weight).tolist() == expected
