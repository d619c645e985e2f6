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

from benchmarks.soak.raw_http import BadAnswer, parse

WORDS = ["river", "stone", "light", "window", "paper", "garden", "seven", "morning", "bridge", "copper"]
DONE = b"data: [DONE]"
ENDED = b'"finish_reason":"stop"'
Message = dict[str, str]
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
    requests arrive at random times for ``duration_s``.

    With ``turns`` or ``branches``, a client sends several requests instead of each one: the turns of a
    chat, or a tree of calls. Later prompts contain the answers.
    """

    port: int
    streams: int = 1  # the clients
    requests: int = 1  # of each client: single ones, chats or trees
    rate_per_s: float = 0.0  # the mean arrival rate of an open loop
    duration_s: float = 0.0  # the limit of a closed loop; 0: none
    prompt_words: int = 40  # random words of each prompt
    max_tokens: int = 64  # to generate
    spread: int = 0  # the largest random change of ``max_tokens``
    seed: int = 0
    shared_words: int = 0  # words before the random ones, the same in all prompts
    schema: dict[str, Any] | None = None  # of the answers, whose number of tokens is then unknown
    turns: int = 1  # of a chat; each has its own random words
    branches: int = 0  # of a tree: they continue one answer at the same time, and a last call reads theirs
    model: str = "smollm2-135m"
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
            group.create_task(self._converse(rng))
            at_s += rng.expovariate(self.rate_per_s)

    async def _one_after_the_other(self, rng: random.Random, end_s: float) -> None:
        asked = 0
        while asked < self.requests or time.perf_counter() < end_s:
            await self._converse(rng)
            asked += 1

    async def _converse(self, rng: random.Random) -> None:
        """Sends a single request, the turns of a chat, or the calls of a tree."""
        messages: list[Message] = []
        for _ in range(self.turns):
            messages += await self._turn(rng, messages)
        if self.branches:
            async with asyncio.TaskGroup() as group:
                calls = [group.create_task(self._turn(rng, messages)) for _ in range(self.branches)]
            answers = "\n".join(call.result()[-1]["content"] for call in calls)
            await self._turn(rng, messages, quoted=answers)

    async def _turn(self, rng: random.Random, before: list[Message], *, quoted: str = "") -> list[Message]:
        """Sends the messages and one more, which begins with ``quoted``. Returns it and its answer."""
        outcome = Outcome(time.perf_counter())
        self.outcomes.append(outcome)
        max_tokens = self.max_tokens + rng.randint(-self.spread, self.spread)
        asked = {"role": "user", "content": self._content(rng, quoted, is_first=not before)}
        answer = ""
        try:
            async with asyncio.timeout(GIVE_UP_S):
                answer = await self._exchange(outcome, self._body([*before, asked], max_tokens), max_tokens)
        except TimeoutError:
            outcome.status = -1
        except (OSError, BadAnswer):
            outcome.status = 0
        outcome.took_s = time.perf_counter() - outcome.began_s
        return [asked, {"role": "assistant", "content": answer}]

    def _content(self, rng: random.Random, quoted: str, *, is_first: bool) -> str:
        shared = random.Random(self.seed)
        words = [shared.choice(WORDS) for _ in range(self.shared_words if is_first else 0)]
        words += [rng.choice(WORDS) for _ in range(self.prompt_words)]
        return "\n".join(filter(None, [quoted, " ".join(words)]))

    def _body(self, messages: list[Message], max_tokens: int) -> bytes:
        body = {
            "model": self.model,
            "messages": messages,
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

    async def _exchange(self, outcome: Outcome, body: bytes, max_tokens: int) -> str:
        """Sends a request and records the outcome. Returns the answer's text if later prompts need it."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1:{self.port}\r\n"
            head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
            head += "Connection: close\r\n\r\n"
            writer.write(head.encode() + body)
            first_line = await reader.readline()
            outcome.status = int(first_line.split()[1])
            tail, received = b"", [first_line]
            while data := await reader.read(65536):
                # The first delta has only the role.
                num_deltas = data.count(b'"content":"') - data.count(b'"content":""')
                if num_deltas and not outcome.ttft_s:
                    outcome.ttft_s = time.perf_counter() - outcome.began_s
                tail = (tail + data)[-2_000:]
                if self.turns > 1 or self.branches:
                    received.append(data)
            if outcome.status == 200 and DONE in tail:
                outcome.num_tokens = max_tokens if self.schema is None else 0
                outcome.ended = ENDED in tail
                return _text(b"".join(received)) if len(received) > 1 else ""
            return ""
        finally:
            writer.close()


def _text(received: bytes) -> str:
    """Returns the text of a streamed answer."""
    lines = parse(received).body.splitlines()
    events = [json.loads(line.removeprefix(b"data: ")) for line in lines if line.startswith(b"data: {")]
    choices = [choice for event in events for choice in event.get("choices", ())]
    return "".join(choice["delta"].get("content") or "" for choice in choices)


async def main() -> None:
    """Runs loads until standard input ends."""
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        put: Coroutine[Any, Any, dict[str, Any]] = Load(**json.loads(line)).put()
        print(json.dumps(await put), flush=True)


if __name__ == "__main__":
    asyncio.run(main())
