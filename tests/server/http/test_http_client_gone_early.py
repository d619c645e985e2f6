"""A client that closes its connection before the engine has its request: while the prompt is encoded in
a thread, and while the constraint is compiled. The engine never receives it."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support.api_server import ApiServer, api_server
from support.compile_loaders import LOADER
from support.fake_engine import TOKENIZER, FakeEngine
from support.holds import Hold
from support.server.apis import CHAT, MESSAGES, TEXT, Api
from support.server.disconnecting_clients import disconnect, post
from support.server.module_servers import module_server

from agentflow.engine.generator.requests import MAX_INLINE_CHARS
from agentflow.engine.grammar.compiler.compiler import ConstraintCompiler
from agentflow.engine.simulator.fake_runner import FakeRunner
from agentflow.engine.text.tokenizer import Tokenizer
from agentflow.protocol.constraint import Constraint
from agentflow.server.http.call import ApiCall
from agentflow.server.openai import models as openai_models

SHORT = "The quick brown fox"
LONG = SHORT * (MAX_INLINE_CHARS // len(SHORT) + 1)
EACH_API = pytest.mark.parametrize("api", [CHAT, TEXT, MESSAGES], ids=lambda api: api.name)


class HeldEncoding:
    """Long texts wait before they are encoded, each in its thread, until they are let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.has_begun, self.is_let_go = threading.Event(), threading.Event()
        self.has_gone = threading.Event()  # the client has disconnected, and its call was notified
        encode, until_gone = Tokenizer._encoding, ApiCall.until_gone

        def held(tokenizer: Tokenizer, whole: Any, text: str) -> Any:
            if len(text) >= len(LONG):
                self.has_begun.set()
                assert self.is_let_go.wait(20)
            return encode(tokenizer, whole, text)

        async def reported(call: ApiCall) -> None:
            await until_gone(call)
            self.has_gone.set()

        monkeypatch.setattr(Tokenizer, "_encoding", held)
        monkeypatch.setattr(ApiCall, "until_gone", reported)

    def check_gone(self, server: ApiServer, connection: socket.socket) -> None:
        """The client disconnects while its text is encoded, and the thread is returned."""
        assert self.has_begun.wait(20)
        assert server.generator.requests.threads.borrowed_tokens == 1
        connection.close()
        assert self.has_gone.wait(20)
        self.is_let_go.set()
        server.call(server.service.calls.until_none)
        assert server.generator.requests.threads.borrowed_tokens == 0


@pytest.fixture(scope="module")
def long_server() -> Iterator[ApiServer]:
    """Takes prompts that are encoded in a thread."""
    runner = FakeRunner(vocab_size=TOKENIZER.vocab_size, num_slots=16_384, max_context=8192)
    with api_server(FakeEngine(runner=runner), constraints=False) as running:
        yield running


@pytest.mark.parametrize("stream", [True, False])
@EACH_API
def test_a_client_that_goes_while_its_prompt_is_encoded(
    long_server: ApiServer, monkeypatch: pytest.MonkeyPatch, api: Api, stream: bool
) -> None:
    server, requests, encoding = long_server, long_server.observe_requests(), HeldEncoding(monkeypatch)
    text = f"{api.name} {stream}: {LONG}"  # the tokens of a text that came before are known
    connection = post(server, api.path, {**api.body(text), "stream": stream})
    encoding.check_gone(server, connection)
    server.assert_idle()
    assert len(requests.submits) == 0
    # A client that stays is answered.
    with post(server, api.path, api.body(text, max_tokens=1)) as stays:
        assert stays.recv(100).startswith(b"HTTP/1.1 200")
    server.call(server.service.calls.until_none)
    assert len(requests.submits) == 1


@pytest.mark.parametrize("path", ["/tokenize", "/v1/tokenize"])
def test_a_client_that_goes_while_its_prompt_is_tokenized(
    long_server: ApiServer, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    server, encoding, decoded = long_server, HeldEncoding(monkeypatch), []

    def texts(generator: object, token_ids: list[int]) -> list[str]:
        decoded.append(len(token_ids))
        return [""] * len(token_ids)

    monkeypatch.setattr(openai_models, "_texts", texts)
    # Enough tokens that their texts, too, are looked up in a thread.
    body: dict[str, Any] = {"prompt": LONG * 8, "return_token_strs": True}
    connection = post(server, path, body)
    encoding.check_gone(server, connection)
    assert decoded == []  # the second half of the work never began
    with post(server, path, body) as stays:
        assert stays.recv(100).startswith(b"HTTP/1.1 200")
    assert len(decoded) == 1


compiling_server = module_server(compile_loader=LOADER)
"""Its constraints say what happens to the process that compiles them."""


def held_at(api: Api, hold: Hold, stream: bool) -> dict[str, Any]:
    """A request with a constraint whose compilation stops at the hold."""
    schema = {"type": "object", "description": f"hold {hold.path}"}
    form = {"output_config": {"format": {"type": "json_schema", "schema": schema}}}
    extra = form if api is MESSAGES else {"regex": f"hold {hold.path}"}
    return {**api.body(SHORT, max_tokens=900, extra=extra), "stream": stream}


def compiler_of(server: ApiServer) -> ConstraintCompiler:
    compiler = server.generator._compiler
    assert compiler is not None
    return compiler


@pytest.mark.parametrize("stream", [True, False])
@EACH_API
def test_a_client_that_goes_while_its_constraint_is_compiled_or_waits(
    compiling_server: ApiServer, tmp_path: Path, api: Api, stream: bool
) -> None:
    server, requests = compiling_server, compiling_server.observe_requests()
    compiler = compiler_of(server)
    killed, hold, never = compiler.counts.killed, Hold(tmp_path / "hold"), Hold(tmp_path / "never")
    compiled = post(server, api.path, held_at(api, hold, stream))
    server.call(hold.reached)
    before = compiler.pid
    waiting = post(server, api.path, held_at(api, never, stream))
    server.wait_until(lambda: len(compiler._queue) == 1)
    waiting.close()
    server.wait_until(lambda: server.service.calls.num == 1)
    assert len(compiler._queue) == 0
    disconnect(server, compiled)
    # The stopped process is not waited for: the next one answers.
    answer = server.call(
        partial(compiler.compile, Constraint("regex", f"pid {api.name} {stream}"), tenant="ann")
    )
    hold.release()
    assert int(answer.payload) == compiler.pid != before
    assert compiler.counts.killed == killed + 1
    assert len(requests.submits) == 0
    assert server.stats().steps == 0
    server.assert_idle()
