"""The benchmark of the families' decode steps, with small models."""

from __future__ import annotations

import pytest

from benchmarks.engine import families
from benchmarks.report import Report
from benchmarks.step import limits

SIZES = families._sizes(64, 96, 2, 4, 2, 1_024)


@pytest.mark.parametrize(
    ("architecture", "more"),
    [
        ("Gemma2ForCausalLM", {"sliding_window": 32, "attn_logit_softcapping": 50.0}),
        ("MixtralForCausalLM", {"num_local_experts": 4}),
    ],
)
def test_steps_are_compared_with_the_bytes_that_they_read(
    architecture: str, more: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(families.MODELS, "small", (architecture, SIZES | more))
    # The figures need not be good: no time to settle, and 16 MB instead of 1 GB are read.
    monkeypatch.setattr(families, "SETTLE_S", 0.0)
    monkeypatch.setattr(limits, "READ_BYTES", 1 << 24)
    report = Report("small")
    families.measure("small", report)
    assert [result.id for result in report.results] == [
        "models.decode_small_of_limit",
        "models.decode_small_gain",
    ]
    assert all(result.value > 0 for result in report.results)


@pytest.mark.timeout(120)
def test_a_token_reads_one_learned_position(monkeypatch: pytest.MonkeyPatch) -> None:
    num_bytes = []
    for num_positions in (256, 1_024):
        raw = {"n_embd": 64, "n_layer": 1, "n_head": 2, "n_positions": num_positions, "vocab_size": 512}
        monkeypatch.setitem(families.MODELS, "small", ("GPT2LMHeadModel", raw))
        _, model = families.random_model("small")
        num_bytes.append(families.read_bytes(model))
    assert num_bytes[0] == num_bytes[1]
