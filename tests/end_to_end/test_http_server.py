"""The HTTP APIs of a whole server: its end in the middle of a stream, and an engine that dies in one."""

from __future__ import annotations

import contextlib
import http.client
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psutil
import pytest
from support.commands import served

from agentflow.engine.process.child import NICENESS
from agentflow.server.metrics.metrics import SCRAPE_TIMEOUT_S
from agentflow.server.serve import SHUTDOWN_S

pytestmark = pytest.mark.model

MODEL = "smollm2-135m"


class Stream:
    """One streamed chat completion."""

    def __init__(self, response: http.client.HTTPResponse) -> None:
        self.response = response

    def next(self) -> dict[str, Any] | None:
        """The next event; None at the end."""
        for line in self.response:
            data = line.strip().removeprefix(b"data: ")
            if data == b"[DONE]":
                return None
            if data:
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


def engine_of(server: subprocess.Popen[str]) -> psutil.Process:
    """Its engine's process: that of the largest memory."""
    return max(psutil.Process(server.pid).children(), key=lambda child: child.memory_info().rss)


def first_text(stream: Stream) -> str:
    """The text of the first event that has any."""
    while True:
        event = stream.next()
        assert event is not None
        for choice in event["choices"]:
            if text := choice["delta"].get("content"):
                return str(text)


def test_after_sigterm_streams_are_finished_and_requests_rejected():
    with served("--kv-tokens", "2000", "--drain-s", "60") as (url, server):
        status, answer = ask(url, 40)
        assert status == 200
        with streamed(url, 40) as stream:
            text = first_text(stream)
            engine = engine_of(server)
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


def test_what_runs_on_after_the_drain_is_cut_off():
    with (
        served("--kv-tokens", "8000", "--drain-s", "0.2") as (url, server),
        streamed(url, 7900) as stream,
    ):
        first_text(stream)
        server.send_signal(signal.SIGTERM)
        with pytest.raises((AssertionError, OSError, http.client.HTTPException)):
            stream.text()
        output, _ = server.communicate(timeout=30)
        assert server.returncode == 0
        assert "requests still run after 0.2 s" in output


def test_a_second_signal_ends_it_at_once():
    with served("--kv-tokens", "2000") as (url, server), streamed(url, 1900) as stream:
        first_text(stream)
        server.send_signal(signal.SIGTERM)
        while ask(url, 1)[0] == 200:
            pass
        server.send_signal(signal.SIGTERM)
        assert server.wait(30) == 0
        with pytest.raises((AssertionError, OSError, http.client.HTTPException)):
            stream.text()


def gives_way(server: subprocess.Popen[str]) -> None:
    """To its engine, which has the priority that the server was started with."""
    if sys.platform == "linux":
        assert engine_of(server).nice() == psutil.Process().nice()
        assert psutil.Process(server.pid).nice() == min(19, psutil.Process().nice() + NICENESS)


def test_a_stream_goes_on_when_its_engine_dies():
    """In float32: what was generated is computed anew as a prompt, which rounds otherwise than one by one."""
    with served("--kv-tokens", "2000", "--dtype", "float32") as (url, server):
        _, answer = ask(url, 40)
        with streamed(url, 40) as stream:
            text = first_text(stream)
            gives_way(server)
            engine_of(server).kill()
            assert text + stream.text() == answer["choices"][0]["message"]["content"]
        gives_way(server)
