"""The cost of a turn of the Responses API: the cached share of the earlier tokens, and its time compared with
the same turn of the chat route."""

from __future__ import annotations

import json
import random
import statistics
import time
from typing import Any

import httpx2

from benchmarks.report import Report
from benchmarks.server.http_load import WORDS
from benchmarks.server.served import MODEL, served

TURNS = 6
FIRST_WORDS = 600
TURN_WORDS = 20
ANSWER_TOKENS = 24


def _words(rng: random.Random, number: int) -> str:
    return " ".join([rng.choice(WORDS) for _ in range(number)])


class _Dialogue:
    """One conversation on one route. The two routes get prompts of the same length that share nothing."""

    def __init__(self, client: httpx2.AsyncClient, rng: random.Random) -> None:
        self._client = client
        self._rng = rng
        self._num_turns = 0
        self.num_known = 0
        self.cached_shares: list[float] = []

    def question(self) -> str:
        """Returns the user's next text."""
        self._num_turns += 1
        return _words(self._rng, FIRST_WORDS if self._num_turns == 1 else TURN_WORDS)

    async def post(self, path: str, body: dict[str, Any]) -> tuple[float, dict[str, Any]]:
        """Sends a request. Returns its seconds and its answer."""
        data = json.dumps(body)
        began_s = time.perf_counter()
        answer = await self._client.post(path, content=data, headers={"content-type": "application/json"})
        took_s = time.perf_counter() - began_s
        assert answer.status_code == 200, answer.text
        return took_s, answer.json()

    def count(self, cached: int, total: int) -> None:
        """Records the share of the earlier tokens that were cached. The KV of the last token of an answer is
        computed by the next turn."""
        if self.num_known:
            self.cached_shares.append(min(1.0, cached / (self.num_known - 1)))
        self.num_known = total


class _Responses(_Dialogue):
    """Turns that continue each other by ``previous_response_id``."""

    _previous: str | None = None

    async def turn(self) -> float:
        """Runs the next turn, and returns its seconds."""
        took_s, answer = await self.post(
            "/v1/responses",
            {
                "model": MODEL,
                "input": self.question(),
                "previous_response_id": self._previous,
                "max_output_tokens": ANSWER_TOKENS,
                "temperature": 0,
            },
        )
        self._previous, usage = answer["id"], answer["usage"]
        self.count(usage["input_tokens_details"]["cached_tokens"], usage["total_tokens"])
        return took_s


class _Chat(_Dialogue):
    """Turns with the whole conversation in each request."""

    def __init__(self, client: httpx2.AsyncClient, rng: random.Random) -> None:
        super().__init__(client, rng)
        self._messages: list[dict[str, str]] = []

    async def turn(self) -> float:
        """Runs the next turn, and returns its seconds."""
        self._messages.append({"role": "user", "content": self.question()})
        took_s, answer = await self.post(
            "/v1/chat/completions",
            {
                "model": MODEL,
                "messages": self._messages,
                "max_tokens": ANSWER_TOKENS,
                "temperature": 0,
            },
        )
        self._messages.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"]})
        usage = answer["usage"]
        self.count(usage["prompt_tokens_details"]["cached_tokens"], usage["total_tokens"])
        return took_s


async def measure_responses(report: Report, _: object) -> None:
    """Measures ``responses_cached_share`` and ``responses_vs_chat``: pairs of dialogues, whose turns
    alternate between the routes."""
    rounds = 7 if report.scale == "full" else 2
    shares: list[float] = []
    ratios: list[float] = []
    async with (
        served(kv_tokens=20_000) as (server, _),
        httpx2.AsyncClient(base_url=server.http_url, timeout=120) as client,
    ):
        for number in range(-1, rounds):
            pair = (_Responses(client, random.Random(number)), _Chat(client, random.Random(number + 1_000)))
            times: tuple[list[float], list[float]] = ([], [])
            for turn in range(TURNS):
                for route in (0, 1) if turn % 2 else (1, 0):
                    took_s = await pair[route].turn()
                    if turn:  # the first one computes the whole prompt
                        times[route].append(took_s)
            if number >= 0:
                shares.append(min(pair[0].cached_shares))
                ratios.append(statistics.median(times[0]) / statistics.median(times[1]))
    note = f"the least of {TURNS - 1} turns that name the previous response"
    report.median("server.responses_cached_share", shares, "share", goal=">= 0.99", note=note)
    note = f"a turn with {ANSWER_TOKENS} tokens of output, against the same turn of /v1/chat/completions"
    report.median("server.responses_vs_chat", ratios, "ratio", goal="<= 1.05", note=note)
