"""The client's CPU time per call and per token, above a loop that reads the same streams without agentflow.

The loop is the minimum for a program with httpx2: it sends the request, splits the stream into events, and
decodes the necessary fields of each event with msgspec.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import httpx2
import msgspec

import agentflow as af
from benchmarks.apis.chat_server import chat_server
from benchmarks.report import Report

PROMPT = "Where does the river go?"
TOKENS_PER_S = 1000.0
"""Slow enough that each token is read separately, like the tokens of a model."""
_encode = msgspec.json.encode


class _Delta(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    delta: _Delta


class _Chunk(msgspec.Struct):
    choices: list[_Choice]


_decode = msgspec.json.Decoder(_Chunk).decode


@dataclass(frozen=True)
class Calls:
    """The calls of one run."""

    num: int
    num_tokens: int  # of each answer


async def bare_call(http: httpx2.AsyncClient, num_tokens: int) -> str:
    """Makes one call with httpx2 alone, and returns its text."""
    body = {
        "model": "words",
        "messages": [{"role": "user", "content": PROMPT}],
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": num_tokens,
    }
    headers = {"content-type": "application/json", "accept": "text/event-stream"}
    pieces: list[str] = []
    rest = b""
    async with http.stream("POST", "chat/completions", content=_encode(body), headers=headers) as response:
        async for part in response.aiter_raw():
            *events, rest = (rest + part).split(b"\n\n")
            for event in events:
                data = event.removeprefix(b"data: ")
                if data != b"[DONE]":
                    pieces.extend([choice.delta.content or "" for choice in _decode(data).choices])
    return "".join(pieces)


@af.program
async def answer(s: af.State, num_tokens: int) -> str:
    """The same call as a program, which reads the stream."""
    s += af.user(PROMPT) + af.assistant(af.gen("words", max_tokens=num_tokens))
    return "".join([delta async for delta in s["words"]])


async def compare(url: str, calls: Calls, rounds: int) -> tuple[list[float], list[float]]:
    """Returns the CPU seconds of the bare loop's rounds, and of agentflow's, measured in turns."""
    backend = af.OpenAICompatible(url, "words", flavour="generic")
    http = httpx2.AsyncClient(base_url=url, headers={"accept-encoding": "identity"}, timeout=None)
    bare: list[float] = []
    ours: list[float] = []
    async with http, af.session(backend=backend) as flow:
        assert await bare_call(http, calls.num_tokens) == await flow.run(answer, calls.num_tokens)
        for _ in range(rounds):
            bare.append(await _cpu_s(calls, lambda: bare_call(http, calls.num_tokens)))
            ours.append(await _cpu_s(calls, lambda: flow.run(answer, calls.num_tokens)))
    return bare, ours


async def _cpu_s(calls: Calls, call: Callable[[], Awaitable[str]]) -> float:
    gc.collect()
    start_s = time.process_time()
    for _ in range(calls.num):
        await call()
    return time.process_time() - start_s


async def measure_call_overhead(report: Report, calls: Calls, rounds: int) -> None:
    """Measures ``call_overhead_ms``, and the bare loop's ``bare_call_ms``."""
    with chat_server() as url:
        bare, ours = await compare(url, calls, rounds)
    bare_ms = [spent_s * 1e3 / calls.num for spent_s in bare]
    added_ms = [(our_s - bare_s) * 1e3 / calls.num for bare_s, our_s in zip(bare, ours, strict=True)]
    note = f"CPU time above a bare httpx2 loop, {calls.num} calls of {calls.num_tokens} token"
    report.median("apis.call_overhead_ms", added_ms, "ms", note=note, goal="< 1")
    report.median("apis.bare_call_ms", bare_ms, "ms", note="the bare httpx2 loop")


async def measure_token_overhead(report: Report, calls: Calls, rounds: int) -> None:
    """Measures ``token_overhead_us``, and the bare loop's ``bare_token_us``."""
    with chat_server(TOKENS_PER_S) as url:
        bare, ours = await compare(url, calls, rounds)
    num = calls.num * calls.num_tokens
    bare_us = [spent_s * 1e6 / num for spent_s in bare]
    added_us = [(our_s - bare_s) * 1e6 / num for bare_s, our_s in zip(bare, ours, strict=True)]
    note = f"CPU time above a bare httpx2 loop, one stream of {num} tokens, {TOKENS_PER_S:.0f} a second"
    report.median("apis.token_overhead_us", added_us, "us", note=note, goal="<= 60")
    report.median("apis.bare_token_us", bare_us, "us", note="the bare httpx2 loop")
