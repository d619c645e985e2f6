"""A variable that a state on another backend reads: its text crosses in parts while it grows."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.examples import examples
from support.fake_engine import FakeEngine
from support.observed_backends import settle
from support.session_peer import HangingGenerator
from support.tcp_proxy import Budget, proxied
from support.wire_server import ThreadServer, thread_server

import agentflow as af
from agentflow.backends import several
from agentflow.backends.local import interpreted
from agentflow.backends.remote import Remote
from agentflow.backends.scripted_generator import ScriptedContext, ScriptedGenerator
from agentflow.errors import EngineFailed, RunFailed, ServerLost
from agentflow.protocol import ops
from agentflow.protocol.backend import Backend, Connection, Deliver, Lost
from agentflow.protocol.chat import CallBegun, ReplyWriter, TextPiece
from agentflow.protocol.constraint import Constraint
from agentflow.protocol.events import Usage
from agentflow.protocol.sampling import GenParams
from agentflow.runtime.generator import Generated, OnText
from agentflow.runtime.interpreter import wired_text

pytestmark = [pytest.mark.anyio, pytest.mark.trio_in_full]


@pytest.fixture(scope="module", autouse=True)
def small_parts() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(several, "PART_CHARS", 2)
        patch.setattr(wired_text, "MIN_GROWN_CHARS", 2)
        yield


class FedGenerator(ScriptedGenerator):
    """Generates the pieces of text that the test feeds it, then None or an error."""

    def __init__(self) -> None:
        super().__init__("")
        self._fed: deque[str | Exception | None] = deque()
        self._has_more = anyio.Event()

    async def feed(self, *pieces: str | Exception | None) -> None:
        self._fed += pieces
        self._has_more.set()
        await settle()

    async def _next(self) -> str | Exception | None:
        while not self._fed:
            self._has_more = anyio.Event()
            await self._has_more.wait()
        return self._fed.popleft()

    async def generate(
        self,
        context: ScriptedContext,
        params: GenParams,
        on_text: OnText,
        constraint: Constraint | None = None,
        on_reasoning: OnText | None = None,
    ) -> Generated:
        written: list[str] = []
        while (piece := await self._next()) is not None:
            if isinstance(piece, Exception):
                raise piece
            written.append(piece)
            on_text(piece)
        return Generated("".join(written), "eos", Usage(0, 0, len(written)))

    reply = generate


class AheadGenerator(HangingGenerator):
    """Lists the contexts that it was asked to compute ahead, and answers with its prompt."""

    def __init__(self) -> None:
        super().__init__(lambda prompt: f"<{prompt}>")
        self.ahead: list[str] = []

    async def fill_ahead(self, context: ScriptedContext) -> None:
        self.ahead.append(context.text)


class WatchedBackend:
    """A backend on one generator, which a test can lose, and whose connection it can fill."""

    def __init__(self, generator: ScriptedGenerator) -> None:
        self.generator = generator
        self.lost: Lost | None = None
        self.has_room = True
        self.provided: list[ops.Provide] = []

    @asynccontextmanager
    async def connect(self, deliver: Deliver, lost: Lost) -> AsyncIterator[Connection]:
        self.lost = lost
        async with interpreted(self.generator, deliver) as connection:
            yield _WatchedConnection(self, connection)


class _WatchedConnection:
    is_connected = True

    def __init__(self, backend: WatchedBackend, connection: Connection) -> None:
        self.models = connection.models
        self._backend = backend
        self._connection = connection

    @property
    def has_room(self) -> bool:
        return self._backend.has_room

    def send(self, sent: Sequence[ops.Op]) -> None:
        self._backend.provided += [op for op in sent if isinstance(op, ops.Provide)]
        self._connection.send(sent)

    def end(self, error: BaseException | None) -> None:
        self._connection.end(error)


class Crossing:
    """A session with a writer, whose text the test feeds, and a reader on another backend."""

    def __init__(self, reader: Backend, **options: Any) -> None:
        self.fed = FedGenerator()
        self.writer = WatchedBackend(self.fed)
        self._models: dict[str, Backend] = {"writer": self.writer, "reader": reader}
        self._options = options

    @asynccontextmanager
    async def open(self) -> AsyncIterator[af.Session]:
        async with af.session(models=self._models, seed=1, **self._options) as flow:
            yield flow
        assert (self.fed.num_open, self.fed.num_running) == (0, 0)


@asynccontextmanager
async def crossing() -> AsyncIterator[tuple[af.Session, Crossing, AheadGenerator, WatchedBackend]]:
    generator = AheadGenerator()
    backend = WatchedBackend(generator)
    made = Crossing(backend)
    with anyio.fail_after(20):
        async with made.open() as flow:
            yield flow, made, generator, backend
    assert (generator.num_open, generator.num_running) == (0, 0)


def reading(flow: af.Session) -> tuple[af.State, af.State]:
    """A state of the writer, and one of the reader that refers to its text."""
    writer, reader = flow.state(), flow.state(model="reader")
    writer += af.user("Write.") + af.gen("text")
    reader += af.user(f"Read {writer['text']} now.") + af.gen("answer")
    return writer, reader


async def test_a_reader_on_another_backend_computes_the_text_while_it_grows() -> None:
    async with crossing() as (flow, made, generator, _):
        writer, reader = reading(flow)
        await made.fed.feed("one ")
        await made.fed.feed("two", " three")
        assert generator.ahead == ["<user>Read ", "<user>Read one ", "<user>Read one two three"]
        assert reader["answer"].text == ""  # the gen waits for the end
        await made.fed.feed("!", None)
        assert await reader["answer"] == "<<user>Read one two three! now.</user><assistant>>"
        assert await writer["text"] == "one two three!"


async def test_a_later_reader_begins_with_the_text_so_far() -> None:
    async with (
        crossing() as (flow, made, generator, backend),
        flow.state() as writer,
        flow.state(model="reader") as reader,
    ):
        writer += af.user("Write.") + af.gen("text")
        await made.fed.feed("one ", "two")
        reader += af.user("Read ", writer["text"])
        await settle()
        assert generator.ahead == ["<user>Read one two"]
        await made.fed.feed(" three", None)
        assert (await reader.text()).endswith("Read one two three</user>")
        first, *others = [op.text for op in backend.provided]
        assert (first, "".join(others)) == ("one two", " three")


async def test_the_prose_of_a_reply_crosses_and_its_calls_do_not() -> None:
    @af.tool
    def look() -> str:
        """Looks."""
        return "nothing"

    notation = ReplyWriter()
    pieces = [TextPiece("I look"), TextPiece(' "there".'), CallBegun("c1", "look")]
    written = [notation.push([piece]) for piece in pieces] + [notation.finish()]
    async with crossing() as (flow, made, generator, backend):
        async with flow.state() as writer, flow.state(model="reader") as reader:
            writer += af.conversation([{"role": "user", "content": "Look."}]) + af.reply("said", tools=[look])
            reader += af.user(f"Read {writer['said']}.")
            await settle()
            await made.fed.feed(*written[:1])
            assert generator.ahead[-1] == "<user>Read I look"
            await made.fed.feed(*written[1:], None)
            assert (await reader.text()).endswith('Read I look "there"..</user>')
        assert "".join([op.text for op in backend.provided]) == 'I look "there".'


async def test_nothing_waits_twice_for_a_slow_connection() -> None:
    async with crossing() as (flow, made, _, backend):
        _, reader = reading(flow)
        await made.fed.feed("one ")
        backend.has_room = False
        await made.fed.feed("two ", "three ")
        assert [op.text for op in backend.provided] == ["one "]
        backend.has_room = True
        await made.fed.feed("four ")
        assert [op.text for op in backend.provided] == ["one ", "two three four "]
        backend.has_room = False
        await made.fed.feed("five", None)
        assert "one two three four five now." in await reader["answer"]


@pytest.mark.parametrize("end", ["error", "cancel", "close", "lost"])
async def test_the_end_of_the_writer_in_mid_text_fails_the_reader_with_its_cause(end: str) -> None:
    async with crossing() as (flow, made, generator, _):
        writer, reader = reading(flow)
        await made.fed.feed("one ", "two ")
        assert generator.ahead[-1].endswith("one two ")
        cause: type[af.AgentflowError] = af.Cancelled
        if end == "error":
            cause = EngineFailed
            await made.fed.feed(EngineFailed("broken"))
        elif end == "cancel":
            writer.cancel()
        elif end == "close":
            writer.close()
        else:
            cause = ServerLost
            assert made.writer.lost is not None
            made.writer.lost(ServerLost("gone"))
        with pytest.raises(RunFailed) as raised:
            await reader["answer"]
        assert isinstance(raised.value.__cause__, cause)


async def test_a_reader_that_is_lost_gets_no_more_parts() -> None:
    async with crossing() as (flow, made, _, backend):
        writer, reader = reading(flow)
        await made.fed.feed("one ")
        assert backend.lost is not None
        backend.lost(ServerLost("gone"), is_final=False)
        await made.fed.feed("two ", "three ")
        assert [op.text for op in backend.provided] == ["one "]
        await made.fed.feed(None)
        assert await writer["text"] == "one two three "
        with pytest.raises(ServerLost):
            await reader["answer"]


async def test_an_engine_has_computed_the_text_when_it_ends() -> None:
    engine = FakeEngine()
    made = Crossing(engine)
    with anyio.fail_after(20):
        async with made.open() as flow:
            _, reader = reading(flow)
            for number in range(5):
                await made.fed.feed("word " * 20)
                assert engine.client is not None
                while (await engine.client.stats()).computed_tokens < 100 * number:
                    await settle()
            await made.fed.feed("word", None)
            await reader["answer"]
            usage = reader["answer"].usage
            assert usage.cached_tokens > 400
            assert usage.prompt_tokens > usage.cached_tokens + 10
        alone = FakeEngine()
        async with af.session(backend=alone, seed=1) as flow, flow.state() as s:
            s += af.user(f"Read {'word ' * 100}word now.") + af.gen("answer")
            await s["answer"]
            assert s["answer"].usage.prompt_tokens == usage.prompt_tokens


async def test_a_recording_of_text_that_crossed_in_parts_is_replayed(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    texts: list[str] = []

    async def program(flow: af.Session) -> list[str]:
        writer, reader = reading(flow)
        return [await writer["text"], "".join([delta async for delta in reader["answer"]])]

    made = Crossing(WatchedBackend(AheadGenerator()), record=path)
    with anyio.fail_after(20):
        async with made.open() as flow, anyio.create_task_group() as group:

            async def run() -> None:
                texts.extend(await program(flow))

            group.start_soon(run)
            await settle()
            await made.fed.feed("one ", "two ")
            await made.fed.feed("three", None)
        async with af.session(backend=af.Replay(path)) as flow:
            assert await program(flow) == texts
    assert texts[0] == "one two three"


# Over a websocket that breaks


@pytest.fixture(scope="module")
def server() -> Iterator[ThreadServer]:
    with thread_server() as running:
        running.generator.fill_ahead = _checkpoint  # type: ignore[attr-defined]
        yield running


async def _checkpoint(context: ScriptedContext) -> None:
    await anyio.lowlevel.checkpoint()


budgets = st.builds(Budget, st.none() | st.integers(0, 2000), st.none() | st.integers(0, 3000))
# Their last word is the answer of the server's script.
pieces = st.lists(st.text("abc é\n", min_size=1, max_size=20), max_size=12)


@examples(60)
@given(
    pieces=pieces,
    cuts=st.lists(budgets, max_size=3),
    end=st.sampled_from(["value", "value", "error", "cancel writer", "cancel reader"]),
)
async def test_a_connection_that_breaks_loses_and_repeats_no_text(
    server: ThreadServer, pieces: list[str], cuts: list[Budget], end: str
) -> None:
    with anyio.fail_after(30):
        async with proxied(server.port) as proxy:
            made = Crossing(Remote(proxy.url))
            async with made.open() as flow:
                proxy.budgets = list(cuts)
                if cuts:
                    proxy.current.up, proxy.current.down = cuts[0].up, cuts[0].down
                writer, reader = reading(flow)
                for piece in pieces:
                    await made.fed.feed(piece)
                match end:
                    case "value":
                        await made.fed.feed("end", None)
                        assert await reader["answer"] == "now.</user><assistant>"
                        text = "".join(pieces) + "end"
                        assert (await reader.text()).startswith(f"<user>Read {text} now.</user>")
                    case "error":
                        await made.fed.feed(EngineFailed("broken"))
                        with pytest.raises(RunFailed) as raised:
                            await reader["answer"]
                        assert isinstance(raised.value.__cause__, EngineFailed)
                    case "cancel writer":
                        writer.cancel()
                        with pytest.raises(RunFailed):
                            await reader["answer"]
                    case "cancel reader":
                        reader.cancel()
                        with pytest.raises(af.Cancelled):
                            await reader["answer"]
                        await made.fed.feed(None)
                # The Bye is to get through.
                proxy.current.up, proxy.current.down, proxy.budgets = None, None, []
                await flow.stats()
        await server.wait_until_idle()
