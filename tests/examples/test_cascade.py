"""The cascade: the large model is asked only where the small one is not sure."""

from __future__ import annotations

import argparse
import io
from collections.abc import Sequence

import cascade
import msgspec
import pytest
from cascade import LABELS, REVIEWS, chosen_models, judge
from rich.console import Console
from scripted_example import Asked, shown

import agentflow as af
from agentflow.backends.scripted_generator import ScriptedContext, ScriptedGenerator
from agentflow.runtime.generator import Scored

pytestmark = pytest.mark.anyio

UNSURE = REVIEWS[2]


class Doubtful(ScriptedGenerator):
    """Gives both labels nearly the same score for one review."""

    async def score(self, context: ScriptedContext, choices: Sequence[str], method: str) -> Scored:
        is_unsure = UNSURE in context.text
        scored = await super().score(context, choices, method)
        return msgspec.structs.replace(scored, scores=(-0.7, -0.7)) if is_unsure else scored


def model(label: str) -> tuple[af.Scripted, Asked]:
    asked = Asked(lambda prompt: f"It is {label}." if "Why?" in prompt else label)
    backend = af.Scripted(asked)
    backend.generator = Doubtful(asked)
    return backend, asked


async def test_the_large_model_is_asked_where_the_small_one_is_not_sure():
    (small, asked_small), (large, asked_large) = model("positive"), model("negative")
    async with af.session(models={"small": small, "large": large}) as flow:
        sure = await flow.run(judge, REVIEWS[0], ("small", "large"))
        assert (sure.label, sure.reason, sure.model) == ("positive", "It is positive.", "small")
        assert sure.probability > 0.99
        assert asked_large.prompts == []
        unsure = await flow.run(judge, UNSURE, ("small", "large"))
        assert (unsure.label, unsure.reason, unsure.model) == ("negative", "It is negative.", "large")
        assert unsure.probability == pytest.approx(0.5)
    questions = [prompt for prompt in (*asked_small.prompts, *asked_large.prompts) if UNSURE in prompt]
    assert len(questions) == 3  # two labels, and the reason of the large model
    assert len({prompt for prompt in questions if "Why?" not in prompt}) == 1


async def test_any_probability_can_be_enough():
    (small, _), (large, asked) = model("positive"), model("negative")
    async with af.session(models={"small": small, "large": large}) as flow:
        verdict = await flow.run(judge, UNSURE, ("small", "large"), threshold=0.0)
    assert (verdict.model, asked.prompts) == ("small", [])


async def test_one_model_plays_both_parts():
    backend, _ = model("positive")
    page = await shown(cascade.main, backend)
    assert page.count("100%") == len(REVIEWS) - 1
    assert page.count("50%") == 1


async def test_the_labels_of_the_large_model_are_counted():
    (small, _), (large, _) = model(LABELS[0]), model(LABELS[1])
    printed = io.StringIO()
    async with af.session(models={"small": small, "large": large}) as flow:
        await cascade.main(flow, Console(file=printed, width=160))
    assert f"1 of {len(REVIEWS)}" in printed.getvalue()


@pytest.mark.parametrize(
    ("url", "large", "expected"),
    [
        (None, None, None),
        ("ws://there", None, None),
        (None, "openai:gpt-4.1-mini", {"small": cascade.SMALL, "large": "openai:gpt-4.1-mini"}),
        ("ws://there", "qwen3-0.6b", {"small": "ws://there", "large": "qwen3-0.6b"}),
    ],
)
def test_the_command_line_chooses_the_models(url, large, expected):
    assert chosen_models(argparse.Namespace(url=url, large=large)) == expected
