"""Questions about one text in one request to ``/v1/decisions``, against one request for each question."""

from __future__ import annotations

import random
import time
from typing import Any

import anyio
import httpx2

from benchmarks.report import Report
from benchmarks.server.http_load import WORDS
from benchmarks.serving import serving_model

MODEL = "smollm2-135m"
CONCURRENCY = 16
ASPECTS = ("a river", "a city", "a machine", "the sea", "a person", "an animal", "the weather", "money")


def questions(count: int) -> list[dict[str, Any]]:
    """Returns predicates, choices and scores in turn."""
    made: list[dict[str, Any]] = []
    for number in range(count):
        asked = f"In part {number}, the text speaks of {ASPECTS[number % len(ASPECTS)]}."
        options: dict[str, Any] = {}
        kind = ("predicate", "choice", "score")[number % 3]
        if kind == "choice":
            options["choices"] = [
                {"value": "in one sentence"},
                {"value": "in passing"},
                {"value": "not at all"},
            ]
        elif kind == "score":
            options["levels"] = [{"label": "never"}, {"label": "once"}, {"label": "often"}]
        made.append({"type": kind, "instructions": asked, **options})
    return made


async def measure_decisions(report: Report, num_questions: int, num_words: int, rounds: int) -> None:
    """Measures ``decisions_gain`` without a cache, with a sample of the single requests, and
    ``decisions_gain_cached`` with the text in the cache."""
    rng = random.Random(11)
    uncached: list[float] = []
    cached: list[float] = []
    computed: list[float] = []
    times: list[tuple[float, float, float]] = []
    with serving_model(kv_tokens=60_000) as (url, _):
        async with httpx2.AsyncClient(base_url=url.replace("ws", "http", 1), timeout=900.0) as client:

            async def decide(text: str, asked: list[dict[str, Any]], salt: str) -> dict[str, Any]:
                body = {"model": MODEL, "input": text, "questions": asked, "cache_salt": salt}
                answer = await client.post("/v1/decisions", json=body)
                answer.raise_for_status()
                found: dict[str, Any] = answer.json()
                return found

            async def each_s(text: str, asked: list[dict[str, Any]], salts: list[str]) -> float:
                limiter = anyio.CapacityLimiter(CONCURRENCY)

                async def one(question: dict[str, Any], salt: str) -> None:
                    async with limiter:
                        await decide(text, [question], salt)

                start_s = time.perf_counter()
                async with anyio.create_task_group() as group:
                    for question, salt in zip(asked, salts, strict=True):
                        group.start_soon(one, question, salt)
                return time.perf_counter() - start_s

            asked = questions(num_questions)
            await decide("a text", asked[:3], "")
            for number in range(rounds):
                text = " ".join([rng.choice(WORDS) for _ in range(num_words)])
                start_s = time.perf_counter()
                usage = (await decide(text, asked, f"{number}"))["usage"]
                cold_s = time.perf_counter() - start_s
                computed.append(usage["input_tokens"])
                start_s = time.perf_counter()
                await decide(text, asked, f"{number}")
                warm_s = time.perf_counter() - start_s
                alone_s = await each_s(text, asked, [f"{number}"] * num_questions)
                sample = asked[:CONCURRENCY]
                salts = [f"{number}/{place}" for place in range(len(sample))]
                sampled_s = await each_s(text, sample, salts) * num_questions / len(sample)
                uncached.append(sampled_s / cold_s)
                cached.append(alone_s / warm_s)
                times.append((cold_s, warm_s, alone_s))
    cold_s, warm_s, alone_s = sorted(times)[len(times) // 2]
    size = f"{num_questions} questions, {computed[0]:.0f} tokens with the text"
    report.median(
        "apis.decisions_gain",
        uncached,
        "ratio",
        note=f"{size}; {cold_s:.1f} s in one request; the single requests from a sample of {CONCURRENCY}",
        goal=">= 20",
    )
    report.median(
        "apis.decisions_gain_cached",
        cached,
        "ratio",
        note=f"{warm_s:.1f} s against {alone_s:.1f} s at concurrency {CONCURRENCY}",
        goal=">= 1.3",
    )
