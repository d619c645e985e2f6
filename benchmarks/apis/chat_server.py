"""``python -m benchmarks.apis.chat_server [TOKENS_PER_S]``: a server of the API for chat completions.

Two models are functions of their prompts: ``words`` writes ``max_tokens`` words, and ``forms`` fills in the
form of the page in the prompt, also from the middle of a turn. Each stream has the given rate, or no limit.
``GET /counters`` reports the calls and tokens. The first line printed
is the address. The server runs until standard input ends.
"""

from __future__ import annotations

import asyncio
import sys
from asyncio import StreamReader, StreamWriter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import anyio.to_thread
import httpx2
import msgspec

from benchmarks.apis.forms import form_of, person_on, tokens_of
from benchmarks.serving import serving

STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
)
WORDS = (" a", " river", " turns", " under", " the", " old", " stone", " bridge")
MODELS = b'{"object": "list", "data": [{"id": "words"}, {"id": "forms"}]}'
TURN_TOKENS = 4
"""The tokens around a turn."""


@dataclass
class Counters:
    """The calls so far, with the tokens of their prompts and answers."""

    calls: int = 0
    input_tokens: int = 0
    output_tokens: int = 0


@dataclass(frozen=True)
class Written:
    """The answer of a model."""

    tokens: list[str]
    finish_reason: str
    num_stop_tokens: int = 0  # generated, and not shown


def written(request: dict[str, Any]) -> Written:
    """Returns the answer to a request."""
    last = request["messages"][-1]
    limit = request.get("max_tokens") or request.get("max_completion_tokens") or 10**6
    if request["model"] == "words":
        return Written([WORDS[index % len(WORDS)] for index in range(limit)], "length")
    form = form_of(person_on(request["messages"][0]["content"]))
    begun = last["content"] if last["role"] == "assistant" else ""
    rest = tokens_of(form[len(begun) :] if form.startswith(begun) else "?")
    for index, token in enumerate(rest[:limit]):
        if any(stop in token for stop in request.get("stop") or ()):
            return Written(rest[:index], "stop", 1)
    return Written(rest, "stop", 1) if len(rest) < limit else Written(rest[:limit], "length")


class ChatServer:
    """Answers requests.

    Args:
        tokens_per_s: The rate of each stream; 0: no limit.
    """

    def __init__(self, tokens_per_s: float) -> None:
        self._pause_s = 1 / tokens_per_s if tokens_per_s else 0.0
        self._counters = Counters()

    async def serve(self, reader: StreamReader, writer: StreamWriter) -> None:
        """Answers the requests of one connection."""
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                if head.startswith(b"GET "):
                    is_list = head.startswith(b"GET /v1/models ")
                    body = MODELS if is_list else msgspec.json.encode(asdict(self._counters))
                    writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n")
                    writer.write(b"content-length: %d\r\n\r\n%b" % (len(body), body))
                    continue
                fields = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:-2])
                await self._stream(
                    msgspec.json.decode(await reader.readexactly(int(fields[b"content-length"]))), writer
                )
        except (asyncio.IncompleteReadError, ConnectionError):  # the client has left
            pass
        finally:
            writer.close()

    async def _stream(self, request: dict[str, Any], writer: StreamWriter) -> None:
        answer = written(request)
        prompt = sum([len(tokens_of(turn["content"])) + TURN_TOKENS for turn in request["messages"]])
        self._counters.calls += 1
        self._counters.input_tokens += prompt
        events = _events(request["model"], answer, prompt)
        writer.write(STREAM_HEAD + next(events))
        loop = asyncio.get_running_loop()
        due_s = loop.time()
        for _ in answer.tokens:
            due_s = max(due_s + self._pause_s, loop.time())  # a late token does not make the next one early
            if (wait_s := due_s - loop.time()) > 0:
                await asyncio.sleep(wait_s)  # noqa: TID251 - the rate of the stream
            writer.write(next(events))
            await writer.drain()
            self._counters.output_tokens += 1
        self._counters.output_tokens += answer.num_stop_tokens
        for event in events:
            writer.write(event)
        await writer.drain()


def _events(model: str, answer: Written, prompt_tokens: int) -> Iterator[bytes]:
    """Each event of a stream as a chunk of HTTP: the beginning, the tokens, the end and the usage."""
    yield _event(model, {"role": "assistant", "content": ""})
    for token in answer.tokens:
        yield _event(model, {"content": token})
    output_tokens = len(answer.tokens) + answer.num_stop_tokens
    usage = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": output_tokens,
        "total_tokens": prompt_tokens + output_tokens,
    }
    yield _event(model, {}, answer.finish_reason)
    yield _event(model, None, usage=usage)
    yield _chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"


def _event(
    model: str, delta: dict[str, str] | None, reason: str | None = None, usage: dict[str, int] | None = None
) -> bytes:
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}
    fields = {
        "id": "chatcmpl-8d4c2f1e9b7a4c6d8e0f",
        "object": "chat.completion.chunk",
        "created": 1_790_000_000,
        "model": model,
        "choices": [] if delta is None else [choice],
        "usage": usage,
    }
    return _chunk(b"data: %b\n\n" % msgspec.json.encode(fields))


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


@contextmanager
def chat_server(tokens_per_s: float = 0.0) -> Iterator[str]:
    """Runs a server whose streams have this rate (0: no limit). Yields the address of its API."""
    with serving("benchmarks.apis.chat_server", f"{tokens_per_s}") as (url, _):
        yield url


async def counters(url: str) -> Counters:
    """Returns the calls and tokens that the server has counted so far."""
    async with httpx2.AsyncClient() as http:
        return msgspec.json.decode((await http.get(f"{url}/counters")).content, type=Counters)


async def main(tokens_per_s: float) -> None:
    """Serves until standard input ends."""
    server = await asyncio.start_server(ChatServer(tokens_per_s).serve, "127.0.0.1", 0, backlog=4096)
    host, port = server.sockets[0].getsockname()
    print(f"http://{host}:{port}/v1", flush=True)
    await anyio.to_thread.run_sync(sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(main(float(sys.argv[1]) if len(sys.argv) > 1 else 0.0))
