"""Many concurrent fuzzed connections to the inside of a server, next to a neighbour that must not notice; and
the conditions that must hold when they are over."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from itertools import count
from random import Random
from typing import Any

import anyio
import anyio.lowlevel
from starlette.types import Message
from starlette.websockets import WebSocket
from support.asgi_peer import AsgiPeer, Bench
from support.fake_engine import TEMPLATE, TOKENIZER, FakeEngine
from support.server.fuzzed_frames import FRAME_BYTES, Conversation, conversation
from support.session_peer import Listener, gen

from agentflow.engine.grammar.compiler.compiler import constraint_compiler
from agentflow.engine.grammar.compiler.messages import CompileLimits
from agentflow.engine.simulator.fake_runner import FakeRunner
from agentflow.engine.tenant import ANONYMOUS
from agentflow.protocol import ops
from agentflow.protocol.constraint import Constraint
from agentflow.protocol.wire import VERSION, Bye, Events, Hello, Ops, Refused, Resume, Welcome, server_frames
from agentflow.runtime.task_group import open_task_group
from agentflow.server.config.limits import ServerLimits
from agentflow.server.models.models import EngineModel
from agentflow.server.websocket.connection import WsSession
from agentflow.server.websocket.sessions import open_sessions

CONVERSATIONS_AT_ONCE = 8
# A batch takes a fraction of a second; after this long it hangs.
STALL_S = 60.0
QUESTION = "say #3"
FOREVER_S = 1e6
# The neighbour's turns of the event loop between two questions: most of the time is for the fuzzed ones.
QUIET_TURNS = 200

MAX_CONTEXT = 512

CheckIdle = Callable[[], Awaitable[None]]
EmptyCaches = Callable[[], Awaitable[None]]


@asynccontextmanager
async def engine_target() -> AsyncIterator[tuple[Any, CheckIdle, EmptyCaches]]:
    """The whole engine, without a model, and the process that compiles constraints: a generator, the check
    that nothing is open, and a function that empties its caches."""
    runner = FakeRunner(vocab_size=TOKENIZER.vocab_size, num_slots=2 * MAX_CONTEXT, max_context=MAX_CONTEXT)
    engine = FakeEngine(runner=runner)
    # A cache that is soon full. The process has the lowest priority, and may take long.
    limits = CompileLimits(cache_bytes=20_000, wall_s=1000)
    async with engine.open_client() as client, constraint_compiler(limits) as compiler:
        await compiler.compile(Constraint("regex", "a"), tenant="")  # the process is loaded
        model = EngineModel("fake", client, TEMPLATE, compiler=compiler)
        numbers = count()

        async def check_idle() -> None:
            # This constraint is compiled after all abandoned ones.
            await compiler.compile(Constraint("regex", f"number {next(numbers)}"), tenant="last")
            await engine.assert_idle()

        async def empty_caches() -> None:
            # Older tokens leave the pool.
            for token in (1, 2):
                await client.compute([token] * (MAX_CONTEXT - 1))

        yield model.generator(ANONYMOUS), check_idle, empty_caches


class Fuzzer:
    """Runs batches of conversations on ``generator``. ``num_frames``: sent so far."""

    def __init__(self, generator: Any, check_idle: CheckIdle) -> None:
        self.num_frames = 0
        self._generator = generator
        self._check_idle = check_idle
        self._answer: str | None = None

    async def run_batch(self, seed: str) -> None:
        """Some concurrent conversations, on a separate server. When they are over nothing is left."""
        random = Random(seed)
        limits = ServerLimits(
            frame_bytes=FRAME_BYTES,
            hello_timeout_s=FOREVER_S,
            resume_grace_s=random.choice([0.0, FOREVER_S]),
        )
        num_tasks = len(anyio.get_running_tasks())
        with anyio.fail_after(STALL_S):
            async with open_sessions(limits) as sessions:
                bench = Bench(self._generator, sessions)
                async with open_task_group() as neighbours:
                    is_over = anyio.Event()
                    neighbours.start_soon(self._neighbour, bench, is_over)
                    async with open_task_group() as group:
                        for _ in range(CONVERSATIONS_AT_ONCE):
                            talk = conversation(random, has_logprobs=self._generator.capabilities.logprobs)
                            self.num_frames += len(talk.messages)
                            group.start_soon(_Client(bench, talk, random.random()).run)
                    is_over.set()
                await sessions.wait_until_empty()
                assert (len(sessions), sessions.num_connections) == (0, 0)
        await self._check_idle()
        with anyio.fail_after(STALL_S):
            while len(anyio.get_running_tasks()) > num_tasks:
                await anyio.lowlevel.checkpoint()

    async def _neighbour(self, bench: Bench, is_over: anyio.Event) -> None:
        """A session that sends the same request repeatedly, and receives the same result."""
        async with _served(bench) as peer:
            await peer.greet()
            listener, first_op = Listener(), 1
            for state in count(1):
                var = state
                asked = (ops.Open(state), ops.Text(state, (QUESTION,)), gen(state, var, 8), ops.Close(state))
                # Closed after the result arrived: closing forgets the variable.
                peer.put_ops(first_op, *asked[:3])
                while var not in listener.ends:
                    frame = await peer.frame()
                    assert isinstance(frame, Events), frame
                    listener.deliver(frame.events)
                peer.put_ops(first_op + 3, asked[3])
                first_op += 4
                self._answer = self._answer or listener.texts[var]
                assert listener.texts[var] == self._answer != ""
                if is_over.is_set():
                    break
                for _ in range(QUIET_TURNS):
                    await anyio.lowlevel.checkpoint()
            peer.bye()
            assert await peer.close_code() == 1000


@asynccontextmanager
async def _served(bench: Bench, *, binary: bool = True) -> AsyncIterator[AsgiPeer]:
    """A client's end of a websocket. Leaving waits until the server has let go of it."""
    peer = AsgiPeer(binary=binary)

    async def serve() -> None:
        scope = {"type": "websocket", "path": "/v1/session", "headers": []}
        await WsSession(WebSocket(scope, peer.receive, peer.send), bench.sessions, bench.find).run()
        peer.has_returned.set()

    try:
        async with open_task_group() as group:
            group.start_soon(serve)
            yield peer
    finally:
        peer.close_streams()


class _Client:
    """One conversation. ``chance``, from 0 to 1, decides the details of its end."""

    def __init__(self, bench: Bench, talk: Conversation, chance: float) -> None:
        self._bench = bench
        self._talk = talk
        self._chance = chance
        self._welcome: Welcome | None = None
        self._welcomed = anyio.Event()

    async def run(self) -> None:
        """Runs until the server has nothing to do with the conversation any more."""
        talk = self._talk
        async with _served(self._bench, binary=talk.binary) as peer, open_task_group() as group:
            group.start_soon(self._listen, peer)
            for message, pause in zip(talk.messages, talk.pauses, strict=True):
                for _ in range(pause):
                    await anyio.lowlevel.checkpoint()
                peer.put_message(message)
            await self._welcomed.wait()
            await self._end(peer)
            group.cancel_scope.cancel()

    async def _end(self, peer: AsgiPeer) -> None:
        ending = self._talk.ending
        if ending == "take over":
            await self._come_back()
        elif ending == "bye" and not self._talk.is_deaf:
            peer.bye()
        else:
            peer.hang_up(1009 if self._chance < 0.1 else 1006)
        await peer.has_returned.wait()
        if ending != "take over":  # also after a bye: the session may be gone, and then nothing happens
            await self._come_back()

    async def _come_back(self) -> None:
        """Another connection resumes the session, where there is one, and ends it."""
        if self._welcome is None:
            return
        cursors = {var: int(1000 * self._chance) - 100 for var in range(-1, 9)}
        resume = Resume(self._welcome.session, self._welcome.secret, cursors, cursors)
        async with _served(self._bench, binary=self._chance < 0.5) as peer:
            peer.put(Hello(VERSION, resume))
            peer.put(Ops(int(4 * self._chance), ()))  # sent again, or a gap
            peer.put(Bye())
            while (await peer.message())["type"] != "websocket.close":
                pass

    async def _listen(self, peer: AsgiPeer) -> None:
        """The server sends frames in the session's encoding, within the limit; the events of a correct client
        have no gap and no repetition."""
        decoder = server_frames()
        listener = Listener()
        try:
            while (message := await peer.message())["type"] != "websocket.close":
                if message["type"] == "websocket.accept":
                    continue
                data = _content(message)
                assert len(data) <= FRAME_BYTES
                frame = decoder.decode(data)
                if isinstance(frame, Events) and self._talk.is_sane:
                    listener.deliver(frame.events)
                if isinstance(frame, Welcome):
                    self._welcome = frame
                    self._welcomed.set()
                    if self._talk.is_deaf:
                        return
                assert not (isinstance(frame, Refused) and frame.error.code == "engine_failed"), frame
        except anyio.ClosedResourceError:
            pass  # hung up
        self._welcomed.set()


def _content(message: Message) -> Any:
    return message["bytes"] if message.get("bytes") is not None else message["text"]
