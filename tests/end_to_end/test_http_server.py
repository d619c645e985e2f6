"""The HTTP APIs of a whole server: its end in the middle of a stream."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from support import commands
from support.commands import engine_of

from agentflow.server.metrics.metrics import SCRAPE_TIMEOUT_S
from agentflow.server.serve import SHUTDOWN_S

MODEL = "tiny"
NUM_TOKENS = 600  # they take long enough for the engine to be stopped before the last one
FAR_TOO_MANY_TOKENS = 7900


@contextmanager
def served(tiny: Path, *options: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """A server on the small model. In float32, cached and recomputed prefixes give the same tokens."""
    common = ("--model", f"{MODEL}={tiny}", "--kv-tokens", "8000", "--dtype", "float32")
    with commands.served(*common, *options) as server:
        yield server


class Stream:
    """One streamed chat completion."""

    def __init__(self, response: http.client.HTTPResponse) -> None:
        self.response = response

    def next(self) -> dict[str, Any] | None:
        """The next event; None at the end."""
        for line in self.response:
            if not line.startswith(b"data: "):  # an empty line, or a comment that keeps the connection alive
                continue
            data = line.strip().removeprefix(b"data: ")
            if data == b"[DONE]":
                return None
            event = json.loads(data)
            assert "error" not in event
            return event
        raise AssertionError("the stream broke off")

    def text(self) -> str:
        """All text up to the end."""
        parts: list[str] = []
        while (event := self.next()) is not None:
            parts += [choice["delta"].get("content") or "" for choice in event["choices"]]
        return "".join(parts)


@contextmanager
def streamed(url: str, num_tokens: int) -> Iterator[Stream]:
    connection = http.client.HTTPConnection(url.removeprefix("ws://"), timeout=60)
    connection.request("POST", "/v1/chat/completions", body=body(num_tokens, stream=True))
    with contextlib.closing(connection), connection.getresponse() as response:
        yield Stream(response)


def body(num_tokens: int, **fields: Any) -> str:
    messages = [{"role": "user", "content": "What do plants do?"}]
    common = {"model": MODEL, "messages": messages, "max_tokens": num_tokens, "temperature": 0}
    return json.dumps({**common, "ignore_eos": True, **fields})


def ask(url: str, num_tokens: int) -> tuple[int, dict[str, Any]]:
    connection = http.client.HTTPConnection(url.removeprefix("ws://"), timeout=60)
    try:
        connection.request("POST", "/v1/chat/completions", body=body(num_tokens))
        response = connection.getresponse()
        return response.status, json.loads(response.read())
    finally:
        connection.close()


def http_status(url: str, path: str) -> int:
    connection = http.client.HTTPConnection(url.removeprefix("ws://"), timeout=60)
    with contextlib.closing(connection):
        connection.request("GET", path)
        return connection.getresponse().status


def running_engine_of(server: subprocess.Popen[str]) -> psutil.Process:
    engine = engine_of(server)
    assert engine is not None
    return engine


def next_text(stream: Stream) -> str:
    """The text of the next event that has any."""
    while True:
        event = stream.next()
        assert event is not None
        for choice in event["choices"]:
            if text := choice["delta"].get("content"):
                return str(text)


def test_after_sigterm_streams_are_finished_and_requests_rejected(tiny):
    with served(tiny, "--drain-s", "60") as (url, server):
        status, answer = ask(url, NUM_TOKENS)
        assert status == 200
        engine = running_engine_of(server)
        with streamed(url, NUM_TOKENS) as stream:
            text = next_text(stream)
            engine.suspend()
            try:
                server.send_signal(signal.SIGTERM)
                while http_status(url, "/v1/models") == 200:
                    pass
                status, rejected = ask(url, 1)
                assert (status, rejected["error"]["code"]) == (503, "unready")
                # The metrics wait for the engine: longer than connections may take to close without a drain.
                assert SCRAPE_TIMEOUT_S > SHUTDOWN_S
                assert http_status(url, "/metrics") == 200
            finally:
                engine.resume()
            assert text + stream.text() == answer["choices"][0]["message"]["content"]
        output, _ = server.communicate(timeout=30)
        assert server.returncode == 0
        assert "still run after" not in output


def test_f44a_a_stream_that_outlasts_the_drain_ends_with_an_error(tiny):
    with (
        served(tiny, "--drain-s", "0.2") as (url, server),
        streamed(url, FAR_TOO_MANY_TOKENS) as stream,
    ):
        next_text(stream)
        server.send_signal(signal.SIGTERM)
        rest = stream.response.read()  # fails if the chunked body is incomplete
        last = rest.strip().split(b"\n\n")[-1]
        assert json.loads(last.removeprefix(b"data: "))["error"]["code"] == "unready"
        output, _ = server.communicate(timeout=30)
        assert server.returncode == 0
        assert "requests still run after 0.2 s" in output
        assert "Traceback" not in output
        assert "client_gone" not in output
        [line] = [line for line in output.splitlines() if " error=unready" in line]
        found = re.search(r" in=(\d+) cached=\d+ out=(\d+) ", line)
        assert found is not None
        assert min(map(int, found.groups())) > 0


def test_a_second_signal_ends_it_at_once(tiny):
    with served(tiny) as (url, server), streamed(url, FAR_TOO_MANY_TOKENS) as stream:
        next_text(stream)
        server.send_signal(signal.SIGTERM)
        while ask(url, 1)[0] == 200:
            pass
        server.send_signal(signal.SIGTERM)
        assert server.wait(30) == 0
        with pytest.raises((AssertionError, OSError, http.client.HTTPException)):
            stream.text()
