"""Model calls for other frameworks: their events, their programs on the backend, retries, and lost
sessions."""

from __future__ import annotations

import copy
import gc
from collections.abc import Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import anyio
import pytest
from support.apis import openai_answers
from support.apis.fake_server import fake_server
from support.faults import has_param
from support.holds import until
from support.processes import run_in_fork
from support.spans import recording_spans

import agentflow as af
from agentflow.backends.open_session import substituted
from agentflow.errors import ServerLost, ServerUnreachable
from agentflow.integrations import client
from agentflow.integrations.client import (
    MAX_KEPT,
    Answer,
    Delta,
    EmbedCall,
    ModelCall,
    ModelConnection,
    cache_key,
    connection_through,
    connection_to,
    embedding_connection_to,
)
from agentflow.language.batch import retries
from agentflow.protocol.chat import Arguments, CallBegun, TextPiece

ASKED = af.conversation([{"role": "user", "content": "Is it cold?"}])
CALL = af.ToolCall("weather", {"city": "Oslo"}, "c1")


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


def wait_until(connection: ModelConnection, holds: Any) -> None:
    async def wait(flow: af.Session) -> None:
        with anyio.fail_after(10):
            await until(holds)

    connection.shared.run(wait)


def test_a_reply_comes_in_pieces_and_ends(connection):
    *deltas, end = connection.stream(ModelCall(ASKED, af.reply("answer")))
    assert [delta.piece for delta in deltas] == [
        TextPiece("It"),
        TextPiece(" is."),
        CallBegun("c1", "weather"),
        Arguments(CALL.text),
    ]
    assert isinstance(end, Answer)
    assert (end.index, end.model, end.finish_reason, end.usage.output_tokens) == (0, "scripted", "eos", 2)


@pytest.mark.anyio
async def test_a_text_has_n_continuations(connection):
    call = ModelCall("Well", af.gen("answer"), n=3)
    events = [event async for event in connection.astream(call)]
    texts = ["", "", ""]
    for event in events:
        if isinstance(event, Delta):
            texts[event.index] += event.piece.text
    assert texts == ["fine then"] * 3
    assert sorted(event.index for event in events if isinstance(event, Answer)) == [0, 1, 2]


@pytest.mark.anyio
async def test_f37_an_answer_has_the_name_of_the_model_that_answered():
    async with fake_server([openai_answers.text_stream("Hello")]) as server:
        urls = {"first": "http://127.0.0.1:9/v1", "second": f"{server.url}/v1"}  # no server is at the first
        models = [af.OpenAI(name, base_url=url, api_key="k") for name, url in urls.items()]
        connection = connection_through(af.Fallback(*models))
        try:
            [answer] = await connection.acomplete(ModelCall(ASKED, af.gen("answer")))
        finally:
            connection.close()
    assert (answer.model, answer.text) == ("second", "Hello")


def test_the_cause_of_a_failure_is_raised_as_itself(connection):
    call = ModelCall(af.conversation([af.Message("user", "cold")]), af.reply("answer", regex="yes"))
    with pytest.raises(af.errors.RunFailed, match="the script answers 'It is"):
        list(connection.stream(call))
    for n in (1, 2):
        broken = ModelCall(ASKED, af.gen("answer", logprobs=True), n=n)
        with pytest.raises(af.errors.NotSupported, check=has_param("logprobs")):
            list(connection.stream(broken))


@pytest.mark.anyio
async def test_complete_answers_come_by_index(connection):
    call = ModelCall(ASKED, af.reply("answer"), n=3)
    for answers in (await connection.acomplete(call), connection.complete(call)):
        assert [answer.index for answer in answers] == [0, 1, 2]
        assert {answer.finish_reason for answer in answers} == {"eos"}


def scripted(*answers: Any) -> ModelConnection:
    left = iter(answers)
    return ModelConnection(lambda: af.session(backend=af.Scripted(lambda _: next(left))))


def test_transient_failures_are_retried_and_others_are_not(monkeypatch):
    monkeypatch.setattr(retries, "FIRST_PAUSE_S", 0.0)
    call = ModelCall("Well", af.gen("answer"))
    connection = scripted(
        af.errors.EngineFailed("a"), af.Overloaded("b"), "Here.", af.errors.NotAuthorized("c"), "Here."
    )
    assert connection.complete(call, max_retries=2)[0].text == "Here."
    with pytest.raises(af.errors.NotAuthorized):
        connection.complete(call, max_retries=2)
    assert list(connection.stream(call, max_retries=2))[-1].text == "Here."
    connection.close()
    connection = scripted(*[af.errors.EngineFailed("a")] * 3, "Here.")
    with pytest.raises(af.errors.EngineFailed):
        connection.complete(call, max_retries=2)
    assert list(connection.stream(call))[-1].text == "Here."
    connection.close()


@pytest.mark.anyio
async def test_embeddings_are_retried_and_keep_their_order(connection, backend, monkeypatch):
    monkeypatch.setattr(retries, "FIRST_PAUSE_S", 0.0)
    faults, embed = [af.Overloaded("a"), af.Overloaded("b")], backend.generator.embed

    async def embed_later(texts, options):
        if faults:
            raise faults.pop()
        return await embed(texts, options)

    monkeypatch.setattr(backend.generator, "embed", embed_later)
    call = EmbedCall(["one", "two"], dimensions=3)
    vectors = await connection.aembed(call, max_retries=2)
    assert [len(vector) for vector in vectors] == [3, 3]
    assert connection.embed(EmbedCall(["two"], dimensions=3)) == vectors[1:]
    faults.append(af.errors.NotAuthorized("c"))
    with pytest.raises(af.errors.NotAuthorized):
        connection.embed(call, max_retries=2)


def test_answers_of_several_are_retried_together_and_a_stream_only_before_its_first_event(monkeypatch):
    monkeypatch.setattr(retries, "FIRST_PAUSE_S", 0.0)
    call = ModelCall("Well", af.gen("answer"), n=2)
    connection = scripted("One.", af.errors.EngineFailed("a"), "Two.", "Three.")
    assert {answer.text for answer in connection.complete(call, max_retries=1)} == {"Two.", "Three."}
    connection.close()
    connection = scripted("One.", af.errors.EngineFailed("a"), "Two.", "Three.")
    events = connection.stream(call, max_retries=1)
    assert isinstance(next(events), Delta)
    with pytest.raises(af.errors.EngineFailed):
        list(events)
    connection.close()


def test_calls_without_a_program_keep_nothing_open(connection, backend):
    list(connection.stream(ModelCall(ASKED, af.reply("answer"))))
    left = connection.stream(ModelCall(ASKED, af.reply("answer"), n=2))
    next(left)
    left.close()
    wait_until(connection, lambda: (backend.generator.num_open, backend.generator.num_running) == (0, 0))


def test_a_program_keeps_its_last_calls_until_it_ends(connection, backend):
    for number in range(1, MAX_KEPT + 3):
        list(connection.stream(ModelCall(ASKED, af.reply("answer")), program="p"))
        wait_until(connection, lambda number=number: backend.generator.num_open == min(number, MAX_KEPT))
    connection.end_program("p")
    wait_until(connection, lambda: backend.generator.num_open == 0)
    connection.end_program("p")  # may be repeated


def test_a_program_that_ends_during_a_call_keeps_nothing_after_it(connection, backend):
    asking = connection.stream(ModelCall(ASKED, af.reply("answer")), program="p")
    next(asking)
    connection.end_program("p")
    list(asking)
    wait_until(connection, lambda: backend.generator.num_open == 0)


def test_a_lost_session_is_opened_again(connection, backend):
    call = ModelCall("Well", af.gen("answer"))
    for _ in range(2):
        assert len(list(connection.stream(call, program="p"))) == 3
    assert backend.num_connected == 1
    connection.shared.loop.call_soon(lambda: backend.lose(ServerLost("gone")))
    assert connection.shared.run(_text) == "fine then"
    assert len(list(connection.stream(call, program="p"))) == 3
    assert backend.num_connected == 2


async def _text(flow: af.Session) -> str:
    async with flow.state() as s:
        s += "Well" + af.gen("answer")
        return await s["answer"]


def test_a_call_fails_when_the_session_fails_to_open_and_the_next_one_opens_it():
    tries = iter([af.Remote("ws://127.0.0.1:1"), af.Scripted(["Here."])])
    connection = ModelConnection(lambda: af.session(backend=next(tries)))
    call = ModelCall("Well", af.gen("answer"))
    with pytest.raises(af.errors.ServerUnreachable):
        list(connection.stream(call))
    assert len(list(connection.stream(call))) == 2
    connection.close()


def test_each_place_has_one_connection():
    assert connection_to(model="a") is connection_to(model="a")
    assert connection_to(model="a") is not connection_to(model="b")
    assert connection_to("ws://127.0.0.1:1", None, "key") is not connection_to("ws://127.0.0.1:1")


def test_each_model_has_one_connection_under_all_its_names(monkeypatch):
    monkeypatch.delenv("AGENTFLOW_URL", raising=False)
    assert connection_to() is connection_to(model="smollm2-135m") is connection_to(api_key="k")
    assert connection_to() is not connection_to("ws://127.0.0.1:1")
    assert connection_to("ws://127.0.0.1:1") is not connection_to("ws://127.0.0.1:1", "smollm2-135m")
    assert connection_to("ws://127.0.0.1:1") is not connection_to("ws://127.0.0.1:1", api_key="k")


def test_a_connection_for_embeddings_has_a_model_of_its_own(monkeypatch):
    monkeypatch.delenv("AGENTFLOW_URL", raising=False)
    with pytest.raises(af.errors.BadArgument, check=has_param("model")):
        embedding_connection_to()
    assert embedding_connection_to(model="a") is embedding_connection_to(model="a", api_key="k")
    assert embedding_connection_to(model="smollm2-135m") is not connection_to()
    assert embedding_connection_to("ws://127.0.0.1:1") is not connection_to("ws://127.0.0.1:1")


def test_after_a_fork_of_the_process_there_is_another_session(connection):
    call = ModelCall("Well", af.gen("answer"))
    list(connection.stream(call))

    def is_answered() -> bool:
        return [event.text for event in connection.stream(call) if isinstance(event, Answer)] == ["fine then"]

    assert run_in_fork(is_answered) == 0
    assert list(connection.stream(call))


def test_f21m_spans_of_calls_are_in_the_traces_of_their_callers(connection):
    call = ModelCall("Well", af.gen("answer"))
    with recording_spans() as recorded:
        for name in ("first", "second"):
            with recorded.provider.get_tracer("test").start_as_current_span(name):
                connection.complete(call)
        connection.close()
        roots = {tree[0]: tree[1] for tree in recorded.tree() if not isinstance(tree, str)}
        assert "agentflow session" not in roots
        assert "chat" in str(roots["first"]) or "text_completion" in str(roots["first"])
        assert roots["first"] == roots["second"]


def test_f21n_a_dropped_connection_ends_its_thread(backend):
    connection = connection_through(backend)
    list(connection.stream(ModelCall("Well", af.gen("answer"))))
    loop = connection.shared.loop
    assert loop.is_running
    del connection
    gc.collect()
    assert not loop.is_running


def test_f21o_connections_are_bounded(monkeypatch):
    monkeypatch.setattr(client, "MAX_CONNECTIONS", 2)
    kept = connection_to("ws://127.0.0.1:1", api_key="a")
    dropped = connection_to("ws://127.0.0.1:1", api_key="b")
    assert connection_to("ws://127.0.0.1:1", api_key="a") is kept
    connection_to("ws://127.0.0.1:1", api_key="c")
    assert connection_to("ws://127.0.0.1:1", api_key="a") is kept
    assert connection_to("ws://127.0.0.1:1", api_key="b") is not dropped


def test_f37_a_shared_session_follows_the_substitute_of_sessions(monkeypatch):
    monkeypatch.setenv("AGENTFLOW_URL", "ws://127.0.0.1:1")  # a session that reaches for it fails
    first, second = (Backend(lambda prompt, name=name: f"from {name}") for name in "AB")
    connection, own = connection_to("ws://substituted:1"), connection_through(first)

    def answer(connection: ModelConnection) -> str:
        [answer] = connection.complete(ModelCall("Is it cold?", af.gen("answer")))
        return answer.text

    try:
        with substituted(lambda choose: (first, None)):
            assert [answer(connection) for _ in range(2)] == ["from A"] * 2
            assert first.num_connected == 1
            with substituted(lambda choose: (second, None)):
                assert [answer(connection) for _ in range(2)] == ["from B"] * 2
                assert answer(own) == "from A"
            assert answer(connection) == "from A"
        with pytest.raises(ServerUnreachable):
            answer(connection)
        assert answer(own) == "from A"
        assert (first.num_connected, second.num_connected) == (3, 1)  # the own one is not opened again
    finally:
        connection.close()
        own.close()


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (af.Embedded("m", embed_model="e1"), af.Embedded("m", embed_model="e2")),
        (af.Embedded("m"), af.Embedded("m", task="embed")),
        (af.Embedded("m"), af.Embedded("m", quantize="int8")),
        (af.OpenAI("m", api_key="k", embed_model="e1"), af.OpenAI("m", api_key="k", embed_model="e2")),
        (af.OpenAI("m", api_key="k"), af.OpenAI("n", api_key="k")),
        (af.Remote("ws://a", embed_model="e1"), af.Remote("ws://a", embed_model="e2")),
        (af.OpenAICompatible("http://a/v1", "m"), af.OpenAICompatible("http://b/v1", "m")),
    ],
)
def test_f37_backends_with_other_answers_have_other_keys(one, other) -> None:
    assert cache_key(one) != cache_key(other)
    assert cache_key(one) == cache_key(copy.copy(one))


def test_f37_each_backend_without_a_source_has_its_key() -> None:
    @dataclass
    class Equal:
        pass

    one, other = Equal(), Equal()
    assert one == other
    assert cache_key(one) == cache_key(one) != cache_key(other)
    del one
    assert cache_key(Equal()) != cache_key(other)
