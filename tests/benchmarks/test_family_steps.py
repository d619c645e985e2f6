"""The benchmark of the families' decode steps, with small models."""

from __future__ import annotations

import pytest

from benchmarks.engine import families
from benchmarks.report import Report

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
    report = Report("small")
    families.measure("small", report)
    assert [result.id for result in report.results] == [
        "models.decode_small_of_limit",
        "models.decode_small_gain",
    ]
    assert all(result.value > 0 for result in report.results)
