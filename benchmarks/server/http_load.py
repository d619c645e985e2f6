"""``python -m benchmarks.server.http_load``: clients of the OpenAI API in a separate process.

Reads loads as JSON from standard input, one per line, runs each, and writes its outcomes as one line. The
clients do little work, because they use the server's cores.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from collections.abc import Coroutine
from dataclasses import asdict, dataclass, field
from typing import Any

WORDS = ["river", "stone", "light", "window", "paper", "garden", "seven", "morning", "bridge", "copper"]
DONE = b"data: [DONE]"
ENDED = b'"finish_reason":"stop"'
# Clients time out after this; a request without an answer by then counts as hanging.
GIVE_UP_S = 120.0


@dataclass
class Outcome:
    """The outcome of one request."""

    began_s: float  # on ``time.perf_counter``
    status: int = 0  # 0: the connection broke; -1: no answer within ``GIVE_UP_S``
    ttft_s: float = 0.0
    took_s: float = 0.0
    num_tokens: int = 0
    ended: bool = False  # the model ended its answer, not the limit of tokens


@dataclass
class Load:
    """A closed loop of clients that send requests in sequence. Or, with ``rate_per_s``, an open loop:
    requests arrive at random times for ``duration_s``."""

    port: int
    streams: int = 1  # the clients
    requests: int = 1  # of each client
    rate_per_s: float = 0.0  # the mean arrival rate of an open loop
    duration_s: float = 0.0  # the limit of a closed loop; 0: none
    prompt_words: int = 40  # random words of each prompt
    max_tokens: int = 64  # to generate
    spread: int = 0  # the largest random change of ``max_tokens``
    seed: int = 0
    shared_words: int = 0  # words before the random ones, the same in all prompts
    schema: dict[str, Any] | None = None  # of the answers, whose number of tokens is then unknown
    outcomes: list[Outcome] = field(default_factory=list)

    async def put(self) -> dict[str, Any]:
        """Runs the load. In the result, ``wall_s`` is the time from the first request to the last answer."""
        rng = random.Random(self.seed)
        began_s = time.perf_counter()
        end_s = began_s + self.duration_s
        async with asyncio.TaskGroup() as group:
            if self.rate_per_s:
                await self._arrive(group, rng, end_s)
            else:
                for _ in range(self.streams):
                    group.create_task(self._one_after_the_other(random.Random(rng.random()), end_s))
        return {
            "wall_s": time.perf_counter() - began_s,
            "outcomes": [asdict(outcome) for outcome in self.outcomes],
        }

    async def _arrive(self, group: asyncio.TaskGroup, rng: random.Random, end_s: float) -> None:
        at_s = time.perf_counter()
        while at_s < end_s:
            await asyncio.sleep(max(0.0, at_s - time.perf_counter()))  # noqa: TID251  the next arrival
            group.create_task(self._ask(rng))
            at_s += rng.expovariate(self.rate_per_s)

    async def _one_after_the_other(self, rng: random.Random, end_s: float) -> None:
        asked = 0
        while asked < self.requests or time.perf_counter() < end_s:
            await self._ask(rng)
            asked += 1

    async def _ask(self, rng: random.Random) -> None:
        outcome = Outcome(time.perf_counter())
        self.outcomes.append(outcome)
        try:
            async with asyncio.timeout(GIVE_UP_S):
                max_tokens = self.max_tokens + rng.randint(-self.spread, self.spread)
                await self._exchange(outcome, self._body(rng, max_tokens), max_tokens)
        except TimeoutError:
            outcome.status = -1
        except OSError:
            outcome.status = 0
        outcome.took_s = time.perf_counter() - outcome.began_s

    def _body(self, rng: random.Random, max_tokens: int) -> bytes:
        shared = random.Random(self.seed)
        words = [shared.choice(WORDS) for _ in range(self.shared_words)]
        words += [rng.choice(WORDS) for _ in range(self.prompt_words)]
        body = {
            "model": "smollm2-135m",
            "messages": [{"role": "user", "content": " ".join(words)}],
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": True,
        }
        if self.schema is None:
            body["ignore_eos"] = True
        else:
            form = {"name": "record", "strict": True, "schema": self.schema}
            body["response_format"] = {"type": "json_schema", "json_schema": form}
        return json.dumps(body).encode()

    async def _exchange(self, outcome: Outcome, body: bytes, max_tokens: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1:{self.port}\r\n"
            head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
            head += "Connection: close\r\n\r\n"
            writer.write(head.encode() + body)
            outcome.status = int((await reader.readline()).split()[1])
            tail = b""
            while data := await reader.read(65536):
                # The first delta has only the role.
                num_deltas = data.count(b'"content":"') - data.count(b'"content":""')
                if num_deltas and not outcome.ttft_s:
                    outcome.ttft_s = time.perf_counter() - outcome.began_s
                tail = (tail + data)[-2_000:]
            if outcome.status == 200 and DONE in tail:
                outcome.num_tokens = max_tokens if self.schema is None else 0
                outcome.ended = ENDED in tail
        finally:
            writer.close()


async def main() -> None:
    """Runs loads until standard input ends."""
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        put: Coroutine[Any, Any, dict[str, Any]] = Load(**json.loads(line)).put()
        print(json.dumps(await put), flush=True)


if __name__ == "__main__":
    asyncio.run(main())
