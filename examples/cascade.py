"""A cascade: a small model answers first, and a large one only where the small one is not sure.

The small model selects a label, whose scores give its probability. Below a threshold, the same question goes
to the large model: a copy of the state continues there. Without ``--large``, one model plays both parts; on a
server, the first and the last of its models do. ``--large`` is a model's name or an address, such as
``openai:gpt-4.1-mini``. A model behind an API without log-probabilities writes its choice and gives it the
probability 1, so it suits the large model.

    python examples/cascade.py [--url ws://127.0.0.1:8410] [--large MODEL]
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from example_session import example_parser, run_example
from rich.console import Console
from rich.markup import escape
from rich.table import Table

import agentflow as af

SMALL = "smollm2-135m"
LABELS = ("positive", "negative")
THRESHOLD = 0.75
REVIEWS = [
    "A wonderful book. I read it twice in one week.",
    "The battery died after two days, and nobody answered my letters.",
    "It does what it says, if one does not expect much.",
    "Great, another update that removes the one button I used.",
    "My children love it, and so do I.",
    "I wanted to like it.",
]


@dataclass(frozen=True)
class Verdict:
    """``probability``: of the label, according to ``model``, which gave it."""

    label: str
    probability: float
    reason: str
    model: str


@af.program
async def judge(s: af.State, review: str, models: tuple[str, str], threshold: float = THRESHOLD) -> Verdict:
    """Labels a review. ``models``: the names of the small and the large model."""
    s += af.user(f"Review: {review}\nIs this review {LABELS[0]} or {LABELS[1]}?")
    small, large = models
    answer = s.copy(model=small)
    answer += af.assistant(af.select("label", LABELS))
    probability, model = await probability_of(answer["label"]), small
    if probability < threshold:
        answer, model = s.copy(model=large), large  # it does not see the answer of the small model
        answer += af.assistant(af.select("label", LABELS))
        probability = await probability_of(answer["label"])
    answer += af.user("Why? Answer in one sentence.")
    answer += af.assistant(af.gen("reason", max_tokens=32, stop="\n"))
    return Verdict(await answer["label"], probability, await answer["reason"], model)


async def probability_of(label: af.Variable[str]) -> float:
    """The probability of the selected label among all labels."""
    chosen = await label
    weights = {choice: math.exp(score) for choice, score in (label.choices or {}).items()}
    return weights[chosen] / sum(weights.values())


async def main(flow: af.Session, console: Console) -> None:
    """Labels all reviews, and prints which model gave each label."""
    names = list(flow.models)
    verdicts = await flow.map(judge, [(review, (names[0], names[-1])) for review in REVIEWS])
    table = Table("review", "label", "probability", "model", "reason", title="The labels")
    for review, verdict in zip(REVIEWS, verdicts, strict=True):
        shown = (review, verdict.label, f"{verdict.probability:.0%}", verdict.model, verdict.reason.strip())
        table.add_row(*map(escape, shown))
    console.print(table)
    if len(names) > 1:
        num_large = sum(verdict.model == names[-1] for verdict in verdicts)
        console.print(f"Labels of the large model: {num_large} of {len(REVIEWS)}", style="bold")


def chosen_models(options: argparse.Namespace) -> Mapping[str, str] | None:
    """The models of the session; None: the models of the address."""
    return None if options.large is None else {"small": options.url or SMALL, "large": options.large}


if __name__ == "__main__":
    parser = example_parser(__doc__)
    parser.add_argument("--large", metavar="MODEL", help="a model's name or an address (default: one model)")
    options = parser.parse_args()
    sys.exit(run_example(main, options, chosen_models(options)))
