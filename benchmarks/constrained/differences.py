"""The differences between greedy generations with jump-forward and with plain masked decoding, by cause."""

from __future__ import annotations

import asyncio
from collections import Counter

from agentflow.engine.client import EngineClient
from agentflow.engine.grammar.compiler.compile import compile_constraint
from agentflow.engine.messages import Finished
from agentflow.engine.text.tokenizer import Tokenizer
from agentflow.protocol.constraint import Constraint
from agentflow.protocol.sampling import SamplingParams
from benchmarks.constrained.decoding import RECORD, THINGS
from benchmarks.engine.foundation import engine
from benchmarks.report import Report

PATTERNS = {
    "a record": RECORD,
    "one line": r'\{"name": "[A-Za-z ]{1,20}", "price": [0-9]{1,3}\.[0-9]{2}, "used": (?:true|false)\}',
    "a sentence": r"It is (?:a very|quite a|not a) (?:good|bad|common) thing, because [a-z ]{5,40}\.",
    "a list": r"(?:[1-3]\. [A-Z][a-z ]{3,20}\n){3}",
}
QUESTIONS = ("Describe", "What do you know about", "Sell", "Review", "Who would want", "Tell me of")
SAME_IDS = "the same tokens"
SAME_TEXT = "the same text, partly tokenised differently"
OTHER_TOKENS = "different text, after text that is tokenised differently"
ROUNDING = "different text after a near tie (the shape of a batch changes the rounding)"
UNEXPLAINED = "unexplained"
# Two tokens are nearly tied if their log-probabilities differ by less; bfloat16 moves them by about 0.1.
NEAR = 0.3


async def measure_differences(report: Report) -> None:
    """Runs 500 cases at full scale: every prompt under every pattern, both ways."""
    num_prompts = 125 if report.scale == "full" else 8
    counts: Counter[str] = Counter()
    async with engine(kv_tokens=40_000) as client:
        for pattern in PATTERNS.values():
            jumped, masked = await _both(client, pattern, num_prompts)
            counts.update(explained(client.tokenizer, a, b) for a, b in zip(jumped, masked, strict=True))
    total = counts.total()
    note = "; ".join(f"{count} {reason}" for reason, count in counts.most_common())
    same = counts[SAME_IDS] + counts[SAME_TEXT]
    report.add("constrained.jump_same_text", round(same / total, 3), "share", [], f"of {total}: {note}")


async def _both(client: EngineClient, pattern: str, num_prompts: int) -> list[list[Finished]]:
    compiled = compile_constraint(Constraint("regex", pattern))
    encode = client.tokenizer.encode
    prompts = [
        encode(f"{QUESTIONS[n % len(QUESTIONS)]} {THINGS[n % 7 % len(THINGS)]}, number {n}.\n")
        for n in range(num_prompts)
    ]
    found: list[list[Finished]] = []
    for jump_forward in (True, False):
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(
                    client.generate(
                        prompt,
                        SamplingParams(max_tokens=400, logprobs=True),
                        seed=0,
                        on_text=lambda _: None,
                        constraint=compiled,
                        jump_forward=jump_forward,
                    )
                )
                for prompt in prompts
            ]
        found.append([task.result() for task in tasks])
    return found


def explained(tokenizer: Tokenizer, jumped: Finished, masked: Finished) -> str:
    """Returns the class of the first difference between two generations."""
    if jumped.token_ids == masked.token_ids:
        return SAME_IDS
    if jumped.text == masked.text:
        return SAME_TEXT
    shorter = min(len(jumped.token_ids), len(masked.token_ids))
    first = next((n for n in range(shorter) if jumped.token_ids[n] != masked.token_ids[n]), shorter)
    ours = tokenizer.decode(jumped.token_ids[first : first + 1], continues=True)
    theirs = tokenizer.decode(masked.token_ids[first : first + 1], continues=True)
    if ours.startswith(theirs) or theirs.startswith(ours):
        return OTHER_TOKENS
    # After the same tokens both could be chosen: forced text would be a prefix of both.
    gap = abs((jumped.logprobs[first] or 0.0) - (masked.logprobs[first] or 0.0))
    return ROUNDING if gap <= NEAR else UNEXPLAINED
