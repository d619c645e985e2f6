"""Calls of a model from outside of any program: what they give, what they are to the backend, and what they
leave behind."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest

import agentflow as af
from agentflow.errors import ServerLost
from agentflow.integrations.client import MOST_KEPT, Ended, ModelCall, ModelConnection, Said, connection_to
from agentflow.protocol.chat import Arguments, CallBegun, TextPiece

ASKED = af.conversation([{"role": "user", "content": "Is it cold?"}])
CALL = af.CalledTool("c1", "weather", '{"city": "Oslo"}')


class Backend:
    """A scripted one that can be lost, and counts how often it was connected."""

    def __init__(self, script: Any) -> None:
        self._inner = af.Scripted(script)
        self.generator = self._inner.generator
        self.num_connected = 0
        self.lose: Any = None

    @asynccontextmanager
    async def connect(self, deliver: Any, lost: Any):
        self.num_connected += 1
        self.lose = lost
        async with self._inner.connect(deliver, lost) as connection:
            yield connection


@pytest.fixture
def backend() -> Backend:
    return Backend(lambda prompt: af.Reply("It is.", (CALL,)) if "cold" in prompt else "fine then")


@pytest.fixture
def connection(backend: Backend) -> Iterator[ModelConnection]:
    connection = ModelConnection(lambda: af.session(backend=backend))
    yield connection
    connection.close()


def until(connection: ModelConnection, holds: Any) -> None:
    async def wait(flow: af.Session) -> None:
        with anyio.fail_after(10):
            while not holds():
                await anyio.lowlevel.checkpoint()

    connection.shared.run(wait)


def test_a_reply_comes_in_pieces_and_ends(connection):
    *said, end = connection.ask(ModelCall(ASKED, af.reply("answer")))
    assert [one.piece for one in said] == [
        TextPiece("It"),
        TextPiece(" is."),
        CallBegun("c1", "weather"),
        Arguments(CALL.arguments),
    ]
    assert isinstance(end, Ended)
    assert (end.index, end.model, end.finish_reason, end.usage.output_tokens) == (0, "scripted", "eos", 2)


@pytest.mark.anyio
async def test_a_text_goes_on_as_often_as_asked(connection):
    call = ModelCall("Well", af.gen("answer"), n=3)
    events = [event async for event in connection.aask(call)]
    texts = ["", "", ""]
    for event in events:
        if isinstance(event, Said):
            texts[event.index] += event.piece.text
    assert texts == ["fine then"] * 3
    assert sorted(event.index for event in events if isinstance(event, Ended)) == [0, 1, 2]


def test_why_it_failed_is_told_as_itself(connection):
    call = ModelCall(af.conversation([af.Message("user", "cold")]), af.reply("answer", choices=["yes"]))
    with pytest.raises(af.RunFailed, match="the script answers 'It is"):
        list(connection.ask(call))
    for n in (1, 2):
        broken = ModelCall(ASKED, af.gen("answer", logprobs=True), n=n)
        with pytest.raises(af.NotSupported, match="no log-probabilities"):
            list(connection.ask(broken))


def test_nothing_is_left_of_calls_that_stand_alone(connection, backend):
    list(connection.ask(ModelCall(ASKED, af.reply("answer"))))
    left = connection.ask(ModelCall(ASKED, af.reply("answer"), n=2))
    next(left)
    left.close()
    until(connection, lambda: (backend.generator.num_open, backend.generator.num_running) == (0, 0))


def test_a_program_holds_its_last_calls_until_it_ends(connection, backend):
    for number in range(1, MOST_KEPT + 3):
        list(connection.ask(ModelCall(ASKED, af.reply("answer")), program="p"))
        until(connection, lambda number=number: backend.generator.num_open == min(number, MOST_KEPT))
    connection.end_program("p")
    until(connection, lambda: backend.generator.num_open == 0)
    connection.end_program("p")  # may be repeated


def test_a_program_that_ends_while_it_asks_holds_nothing_after_that(connection, backend):
    asking = connection.ask(ModelCall(ASKED, af.reply("answer")), program="p")
    next(asking)
    connection.end_program("p")
    list(asking)
    until(connection, lambda: backend.generator.num_open == 0)


def test_a_session_that_was_lost_is_opened_again(connection, backend):
    call = ModelCall("Well", af.gen("answer"))
    for _ in range(2):
        assert len(list(connection.ask(call, program="p"))) == 3
    assert backend.num_connected == 1
    connection.shared.call_soon(lambda: backend.lose(ServerLost("gone")))
    until_lost = connection.shared
    assert until_lost.run(_text) == "fine then"
    assert len(list(connection.ask(call, program="p"))) == 3
    assert backend.num_connected == 2


async def _text(flow: af.Session) -> str:
    async with flow.state() as s:
        s += "Well" + af.gen("answer")
        return await s["answer"]


def test_what_fails_to_open_fails_who_asked_and_is_tried_again():
    tries = iter([af.Remote("ws://127.0.0.1:1"), af.Scripted(["Here."])])
    connection = ModelConnection(lambda: af.session(backend=next(tries)))
    call = ModelCall("Well", af.gen("answer"))
    with pytest.raises(af.ServerUnreachable):
        list(connection.ask(call))
    assert len(list(connection.ask(call))) == 2
    connection.close()


def test_one_connection_to_one_place():
    assert connection_to(model="a") is connection_to(model="a")
    assert connection_to(model="a") is not connection_to(model="b")
    assert connection_to("ws://127.0.0.1:1", None, "key") is not connection_to("ws://127.0.0.1:1")


def test_one_connection_for_a_model_whatever_it_is_called(monkeypatch):
    monkeypatch.delenv("AGENTFLOW_URL", raising=False)
    assert connection_to() is connection_to(model="smollm2-135m") is connection_to(api_key="k")
    assert connection_to() is not connection_to("ws://127.0.0.1:1")
    assert connection_to("ws://127.0.0.1:1") is not connection_to("ws://127.0.0.1:1", "smollm2-135m")
    assert connection_to("ws://127.0.0.1:1") is not connection_to("ws://127.0.0.1:1", api_key="k")


def test_after_a_fork_of_the_process_there_is_another_session(connection):
    call = ModelCall("Well", af.gen("answer"))
    list(connection.ask(call))
    child = os.fork()
    if child == 0:
        texts = [event.text for event in connection.ask(call) if isinstance(event, Ended)]
        os._exit(0 if texts == ["fine then"] else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert list(connection.ask(call))
