"""The fronts that share a store: which ones are alive, and requests from one front to another.

Each front renews a key that expires, so a front that was killed is gone after ``LIFE_MS``. A front that
receives a request for something that runs elsewhere, such as a background response, forwards it to the front
that runs it. Requests and answers are messages in a list for each front, its inbox, so a large message does
not delay other fronts' connections. If the front that runs it disappears, the request fails so that clients
retry it. If the front that forwards it disappears, or its client disconnects, the work is cancelled.

A message can be lost with a connection: when Redis has removed it from an inbox, and the front does not get
it. So the front that forwards a request pings the other one at each beat. A front that does not run the
request that it is pinged for answers that it cannot, and a request that is no longer pinged for is cancelled.
"""

from __future__ import annotations

import logging
import secrets
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import TypeAlias

import anyio
import msgspec
from anyio.abc import TaskGroup

from agentflow.errors import EngineDown, Overloaded
from agentflow.protocol.unreadable import UNREADABLE
from agentflow.runtime.limits import tenant_part
from agentflow.runtime.task_group import open_task_group
from agentflow.server.stores.shared import SharedStore

logger = logging.getLogger(__name__)

LIFE_MS = 6_000
BEAT_S = 1.5
SILENT_S = 30.0
"""The time without a ping after which a forwarded request is cancelled."""
_INBOX_LIFE_MS = 60_000
_WAIT_S = 2
"""The longest time that one command waits for a message; less than Redis's time limit for answers."""
MAX_ASKED = 256
"""The limit of requests of other fronts that run concurrently; of one tenant, its part of them."""


class ForwardedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """An HTTP request that another front has authenticated."""

    method: str
    path: str
    query: bytes
    tenant: str
    headers: tuple[tuple[bytes, bytes], ...]
    body: bytes


class ForwardedAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to a ``ForwardedRequest``."""

    status: int
    headers: tuple[tuple[bytes, bytes], ...]
    body: bytes


class _Ask(msgspec.Struct, frozen=True, tag="ask"):
    number: str
    sender: str
    request: ForwardedRequest


class _Answer(msgspec.Struct, frozen=True, tag="answer"):
    number: str
    answer: ForwardedAnswer | None  # None: the front could not answer


class _Ping(msgspec.Struct, frozen=True, tag="ping"):
    """The sender waits for the answer to its request."""

    number: str
    sender: str


class _Drop(msgspec.Struct, frozen=True, tag="drop"):
    number: str


_Message: TypeAlias = _Ask | _Answer | _Ping | _Drop
AnswerRequest: TypeAlias = Callable[[ForwardedRequest], Awaitable[ForwardedAnswer]]


@dataclass(eq=False)
class _Pending:
    has_ended: anyio.Event = field(default_factory=anyio.Event)
    answer: ForwardedAnswer | None = None


@dataclass(eq=False)
class _Running:
    sender: str
    tenant: str
    heard_s: float  # when the last ping came, or the request
    scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)


class Fronts:
    """The fronts of a store. ``open_fronts`` creates it."""

    def __init__(self, store: SharedStore, tasks: TaskGroup, answer: AnswerRequest) -> None:
        self._store = store
        self._tasks = tasks
        self._answer = answer
        self._pending: dict[str, _Pending] = {}
        self._running: dict[str, _Running] = {}
        self._num_running_of: Counter[str] = Counter()  # by tenant
        self._messages: msgspec.msgpack.Decoder[_Message] = msgspec.msgpack.Decoder(_Message)

    @property
    def own(self) -> str:
        """The id of this front."""
        return self._store.front

    async def is_alive(self, front: str) -> bool:
        """Whether the front with this id is running. ``Overloaded`` if the store does not answer."""
        return front == self.own or await self._life(front) is not None

    async def _life(self, front: str) -> bytes | None:
        """The value of a front's key, which changes if the store loses the key. None: the front is gone."""
        key = self._store.key("front", front)
        found: bytes | None = await self._store.call(lambda client: client.get(key))
        return found

    async def ask(self, front: str, request: ForwardedRequest) -> ForwardedAnswer:
        """Forwards a request to another front and returns its answer. ``EngineDown`` if that front is gone,
        ``Overloaded`` if the store does not answer, the front is too busy, or a message is lost."""
        number = secrets.token_hex(8)
        pending = self._pending[number] = _Pending()
        try:
            life = await self._life(front)
            if life is None:
                raise gone(front)
            await self._send(front, _Ask(number, self.own, request))
            while not pending.has_ended.is_set():
                with anyio.move_on_after(BEAT_S) as scope:
                    await pending.has_ended.wait()
                if not scope.cancelled_caught:
                    break
                now = await self._life(front)
                if now is None:
                    raise gone(front)
                if now != life:  # the store lost data, perhaps the request or its answer
                    raise Overloaded("the server's shared store lost a request: try again in a moment")
                await self._send(front, _Ping(number, self.own))
        except BaseException:
            with anyio.move_on_after(1, shield=True), suppress(Overloaded):
                await self._send(front, _Drop(number))
            raise
        finally:
            del self._pending[number]
        if pending.answer is None:
            raise Overloaded(
                f"the server {front!r}, which runs this, could not answer: try again in a moment"
            )
        return pending.answer

    async def _send(self, front: str, message: _Message) -> None:
        key, data = self._store.key("inbox", front), msgspec.msgpack.encode(message)

        async def push(client: object) -> None:
            pipeline = client.pipeline(transaction=True)  # type: ignore[attr-defined]
            await pipeline.rpush(key, data).pexpire(key, _INBOX_LIFE_MS).execute()

        await self._store.call(push)

    async def beat(self) -> None:
        """Renews this front's key, until it is cancelled. Requests of fronts that are gone, or no longer wait
        for their answers, are cancelled."""
        while True:
            with suppress(Overloaded):
                await self.renew()
                self._cancel_silent()
                # Once for each front, so that many requests do not delay the next beat.
                for sender in {running.sender for running in self._running.values()}:
                    if not await self.is_alive(sender):
                        self._cancel_for(sender)
            await anyio.sleep(BEAT_S)  # noqa: TID251 - the time is the purpose

    async def renew(self) -> None:
        """Renews this front's key. If the store has lost the key, it gets a new value."""
        key, life = self._store.key("front", self.own), secrets.token_hex(8)
        if not await self._store.call(lambda client: client.pexpire(key, LIFE_MS)):
            await self._store.call(lambda client: client.set(key, life, px=LIFE_MS))

    def _cancel_silent(self) -> None:
        """Cancels requests without a waiting front: the message that drops them was lost."""
        until_s = anyio.current_time() - SILENT_S
        for running in self._running.values():
            if running.heard_s < until_s:
                running.scope.cancel()

    def _cancel_for(self, sender: str) -> None:
        for running in self._running.values():
            if running.sender == sender:
                running.scope.cancel()

    async def receive(self) -> None:
        """Receives messages, until it is cancelled."""
        key = self._store.key("inbox", self.own)
        while True:
            try:
                found = await self._store.call(lambda client: client.blpop([key], timeout=_WAIT_S))
            except Overloaded:
                await anyio.sleep(BEAT_S)  # noqa: TID251 - until the store may answer again
                continue
            if found is None:
                continue
            try:
                message = self._messages.decode(found[1])
            except UNREADABLE as error:
                self._store.ignore(key, error)
                continue
            self._take(message)

    def _take(self, message: _Message) -> None:
        match message:
            case _Ask() as ask if ask.number not in self._running:
                if self._is_full(ask.request.tenant):
                    self._tasks.start_soon(self._refuse, ask)
                    return
                one = _Running(ask.sender, ask.request.tenant, anyio.current_time())
                self._running[ask.number] = one
                self._num_running_of[one.tenant] += 1
                self._tasks.start_soon(self._run, ask, one)
            case _Answer():
                pending = self._pending.get(message.number)
                if pending is not None and not pending.has_ended.is_set():
                    pending.answer = message.answer
                    pending.has_ended.set()
            case _Ping():
                if (running := self._running.get(message.number)) is None:
                    # An answer that was sent is before this one in the inbox.
                    self._tasks.start_soon(self._refuse, message)
                else:
                    running.heard_s = anyio.current_time()
            case _Drop() if (running := self._running.get(message.number)) is not None:
                running.scope.cancel()
            case _:
                pass

    def _is_full(self, tenant: str) -> bool:
        """Whether no further request of the tenant may run now."""
        return len(self._running) >= MAX_ASKED or (
            self._num_running_of[tenant] >= tenant_part(MAX_ASKED, tenant)
        )

    async def _refuse(self, ask: _Ask | _Ping) -> None:
        """Answers that this front is busy, or has no such request. Refusals count in no limit, so that a
        flood of one tenant's requests takes no room of other tenants. If a refusal is lost, a ping asks for
        the next one."""
        with suppress(Overloaded):
            await self._send(ask.sender, _Answer(ask.number, None))

    async def _run(self, ask: _Ask, running: _Running) -> None:
        try:
            with running.scope:
                await self._deliver(ask.sender, _Answer(ask.number, await self._answered(ask)))
        finally:
            del self._running[ask.number]
            self._num_running_of[running.tenant] -= 1
            if not self._num_running_of[running.tenant]:
                del self._num_running_of[running.tenant]

    async def _answered(self, ask: _Ask) -> ForwardedAnswer | None:
        try:
            return await self._answer(ask.request)
        except Overloaded as error:
            logger.warning("a request of the server %s is not answered: %s", ask.sender, error)
        except Exception:
            logger.exception("a request of the server %s failed", ask.sender)
        return None

    async def _deliver(self, front: str, answer: _Answer) -> None:
        """Sends an answer until the store accepts it or no front waits for it. The other front
        ignores further copies."""
        while True:
            try:
                await self._send(front, answer)
            except Overloaded:
                await anyio.sleep(BEAT_S)  # noqa: TID251 - until the store may answer again
            else:
                return


def gone(front: str) -> EngineDown:
    """The error of a request for something that ran on a front that is gone."""
    return EngineDown(f"the server {front!r}, which ran this, is gone: start it again")


@asynccontextmanager
async def open_fronts(store: SharedStore, answer: AnswerRequest) -> AsyncIterator[Fronts]:
    """The scope in which this front is registered and answers requests of other fronts with ``answer``."""
    async with open_task_group() as group:
        fronts = Fronts(store, group, answer)
        key = store.key("front", store.front)
        await fronts.renew()
        group.start_soon(fronts.beat)
        group.start_soon(fronts.receive)
        try:
            yield fronts
        finally:
            group.cancel_scope.cancel()
            with anyio.move_on_after(1, shield=True), suppress(Overloaded):
                await store.call(lambda client: client.delete(key))
