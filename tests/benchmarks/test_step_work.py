"""The work of steps, against which the step benchmark holds their times."""

from __future__ import annotations

import numpy as np
import pytest
from support.engine.scheduler_harness import check_shared

from agentflow.engine.models.config import DecoderConfig
from agentflow.engine.models.rope import RopeConfig
from benchmarks.step.growth import LEVEL, tree_batch
from benchmarks.step.growth_plot import Curve, plot
from benchmarks.step.work import Shape, Work, batch_of, work_of, work_of_parts

SMOLLM2 = DecoderConfig(
    architecture="LlamaForCausalLM",
    vocab_size=49152,
    hidden_size=576,
    intermediate_size=1536,
    num_layers=30,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    norm_eps=1e-5,
    max_context=8192,
    tie_word_embeddings=True,
    rope=RopeConfig("default", 100_000.0),
    end_token_ids=(2,),
)


def test_the_work_of_a_step_is_what_the_model_has() -> None:
    """134,515,008 parameters of which the norms are not counted; 23,040 bytes of KV for each token."""
    parts = work_of_parts(Shape(1, 99), SMOLLM2)
    attention = parts.pop("attention")
    num_norms = 61 * 576
    assert sum(part.num_bytes for part in parts.values()) == 2 * (134_515_008 - num_norms)
    assert all(part.flops == part.num_bytes for part in parts.values())
    assert attention == Work(100 * 23_040, 100 * 4 * 30 * 576)
    assert work_of(Shape(1, 99), SMOLLM2) == sum(parts.values(), attention)


def test_a_shared_prefix_is_read_once() -> None:
    apart, together = work_of(Shape(32, 1_600), SMOLLM2), work_of(Shape(32, 1_600, shared=1_500), SMOLLM2)
    assert apart.num_bytes - together.num_bytes == 31 * 1_500 * 23_040
    assert apart.flops == together.flops


def test_requests_share_the_slots_that_they_should() -> None:
    batch = batch_of(Shape(4, 50, shared=30), 1_000, 200)
    assert (batch.req_to_token[:, :30] == np.arange(30)).all()
    own = batch.req_to_token[:, 30:51]
    assert len(np.unique(own)) == own.size
    assert own.min() >= 30
    assert batch.write_slots.tolist() == own[:, -1].tolist()
    check_shared(batch)
    check_shared(batch_of(Shape(4, 50), 1_000, 200))


def test_a_tree_of_requests_shares_more_the_nearer_they_are() -> None:
    batch = tree_batch(8, 5_000, 1_000)
    check_shared(batch)
    table = batch.req_to_token
    common = [int((table[0, : 4 * LEVEL] == table[leaf, : 4 * LEVEL]).sum()) for leaf in (1, 2, 4)]
    assert common == [3 * LEVEL, 2 * LEVEL, LEVEL]


def test_a_curve_tells_its_exponent() -> None:
    curve = Curve("x", "n", "ms", [1, 10, 100], [3.0, 30.0, 300.0])
    assert curve.exponent == pytest.approx(1.0)
    assert "growing with exponent 1.00" in plot([curve])
