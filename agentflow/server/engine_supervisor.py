"""Keeps an engine process alive: starts it, starts it again when it dies, and gives up in the end.

To its client it is one engine that never forgets a request: what a dead process had not finished, the
next one runs on from the ids that were generated already.
"""

from __future__ import annotations

import logging
import math
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import anyio
import anyio.to_thread
from anyio.abc import TaskStatus
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
from msgspec.structs import replace

from agentflow.errors import EngineFailed, from_code
from agentflow.server.engine_child import END_S, EngineChild
from agentflow.server.engine_client import EngineClient
from agentflow.server.engine_frames import (
    LoadFailed,
    Start,
    answer_decoder,
    from_engine_decoder,
)
from agentflow.server.engine_ledger import EngineLedger, aborted
from agentflow.server.engine_messages import (
    Abort,
    CloseState,
    EngineStats,
    Failed,
    Finished,
    FromEngine,
    Progress,
    Report,
    Submit,
    ToEngine,
    Wanted,
)
from agentflow.server.message_frames import to_frame
from agentflow.server.tokenizer import Tokenizer
from agentflow.task_group import open_task_group

logger = logging.getLogger(__name__)

# Deaths in a row, while loading or with work to do, and without a completed step or so much peace between
# them, after which the engine is given up.
MAX_DEATHS_IN_A_ROW = 3
PEACE_S = 60.0
# Before a start after no death, one, two: whatever killed the engine may need a moment to pass.
RESTART_DELAYS_S = (0.0, 0.0, 1.0)
# How long a process whose socket has ended may take to say how it ended.
LAST_WORDS_S = 1.0

# Constraints that the process was sent, remembered by their keys.
MAX_SENT_KEYS = 10_000

RESTARTING = "the engine is restarting: it answers again in a few seconds"


@asynccontextmanager
async def supervised_engine(
    start: Start, load_tokenizer: Callable[[], Tokenizer], *, max_unfinished: int | None = None
) -> AsyncIterator[EngineClient]:
    """An engine in a process of its own for as long as the scope lasts. What ``start`` loads fails to
    load with is raised here, as the same error where it is one of agentflow's."""
    supervisor = EngineSupervisor(start, load_tokenizer, max_unfinished)
    async with open_task_group() as group:
        client: EngineClient = await group.start(supervisor.run)
        try:
            yield client
        finally:
            group.cancel_scope.cancel()


class _LoadError(Exception):
    """The process says why it cannot load its engine."""

    def __init__(self, answer: LoadFailed) -> None:
        super().__init__(answer.message)
        self.answer = answer

    def as_itself(self) -> Exception:
        if self.answer.missing_package is not None:
            return ModuleNotFoundError(self.answer.message, name=self.answer.missing_package)
        return from_code(self.answer.code, self.answer.message)


class EngineSupervisor:
    """An ``EngineLink`` to one process after the other. Use ``supervised_engine`` to make one; all of it
    belongs to the event loop's thread. What waits to be written is bounded by what is unfinished."""

    def __init__(
        self, start: Start, load_tokenizer: Callable[[], Tokenizer], max_unfinished: int | None
    ) -> None:
        self._start = start
        self._load_tokenizer = load_tokenizer
        self._max_unfinished = max_unfinished
        self._client: EngineClient | None = None
        self._child: EngineChild | None = None
        self._outgoing: MemoryObjectSendStream[bytes] | None = None
        self._ledger = EngineLedger()
        self._reports: set[int] = set()
        self._sent_keys: set[str] = set()  # of the constraints that this process has been sent
        self._deaths = 0  # in a row, of unknown cause
        self._convictions = 0  # in a row
        self._loaded_at = math.inf
        self.restarts = 0

    @property
    def pid(self) -> int | None:
        """Of the process there is now, loading or loaded; None between two."""
        return None if self._child is None else self._child.pid

    def send(self, message: ToEngine) -> None:
        """Takes a message, whether there is a process now or not. EngineFailed for a Report if not."""
        match message:
            case Submit():
                self._ledger.add(message)
                self._forward()
            case Abort():
                if self._ledger.abort(message.request_id) and self._outgoing is not None:
                    self._post(message)
                else:
                    self._hand_over([aborted(message.request_id)])
                    self._forward()  # it may have been the one that others waited for
            case CloseState():
                if self._outgoing is not None:
                    self._post(message)  # a new process keeps nothing for any state
            case Report() if self._outgoing is None:
                raise EngineFailed(RESTARTING)
            case Report():
                self._reports.add(message.ticket)
                self._post(message)

    async def run(self, *, task_status: TaskStatus[EngineClient]) -> None:
        """Until cancelled or given up; started with the client once the first process has loaded."""
        try:
            how = ""
            while max(self._deaths, self._convictions) < MAX_DEATHS_IN_A_ROW:
                await anyio.sleep(RESTART_DELAYS_S[self._deaths])  # noqa: TID251  the back-off
                how = await self._live(task_status)
            why = f"the engine {how}; it died again and again and is not started any more: see its log"
            if self._client is None:
                raise EngineFailed(why)
            logger.error("%s", why)
            self._client.end_all(why)
        finally:
            if self._client is not None:
                self._client.end_all("the engine has stopped")

    async def _live(self, task_status: TaskStatus[EngineClient]) -> str:
        """One process, from its start until it dies. Returns how it died."""
        self._loaded_at = math.inf
        self._child = EngineChild.start(self._start)
        grace_s = END_S  # where this is cancelled: the process may finish its step
        refusal: _LoadError | None = None
        try:
            await self._load(self._child, task_status)
            await self._converse(self._child)
        except (EOFError, _LoadError) as error:
            grace_s = LAST_WORDS_S
            refusal = error if isinstance(error, _LoadError) else None
            self._bury()
        finally:
            how = await self._child.end(grace_s)
            self._child = None
        if refusal is not None:
            if self._client is None:
                raise refusal.as_itself()
            how = f"cannot be loaded again ({refusal})"
        logger.error("the engine %s; %d unfinished requests wait for the next one", how, len(self._ledger))
        self.restarts += 1
        return how

    async def _load(self, child: EngineChild, task_status: TaskStatus[EngineClient]) -> None:
        tokenizer: Tokenizer | None = None
        if self._client is None:  # while the process loads the model
            tokenizer = await anyio.to_thread.run_sync(self._load_tokenizer)
        frames: list[bytes] = []
        while not frames:
            frames = await child.receive()
        answer = answer_decoder.decode(frames[0])
        if isinstance(answer, LoadFailed):
            raise _LoadError(answer)
        self._loaded_at = anyio.current_time()
        if tokenizer is not None:
            self._client = EngineClient(self, answer.info, tokenizer, max_unfinished=self._max_unfinished)
            task_status.started(self._client)

    async def _converse(self, child: EngineChild) -> None:
        self._sent_keys.clear()
        outgoing, to_write = anyio.create_memory_object_stream[bytes](math.inf)
        self._outgoing = outgoing
        try:
            with outgoing, to_write:
                self._forward()
                async with open_task_group() as group:
                    group.start_soon(_write, child, to_write)
                    while True:
                        for frame in await child.receive():
                            self._hear(from_engine_decoder.decode(frame))
        finally:
            self._outgoing = None

    def _hear(self, messages: list[FromEngine]) -> None:
        for position, message in enumerate(messages):
            match message:
                case EngineStats():
                    self._reports.discard(message.ticket)
                    messages[position] = replace(message, restarts=self.restarts)
                    continue
                case Progress() | Finished():
                    self._deaths = self._convictions = 0
                case Wanted():
                    self._send_whole(message.request_id)
            self._ledger.hear(message)
        self._hand_over(messages)
        self._forward()

    def _send_whole(self, request_id: int) -> None:
        """Once more, with the payload of its constraint."""
        submit = self._ledger.again(request_id)
        if submit is None:
            self._hand_over([aborted(request_id)])
        elif self._outgoing is not None:
            self._post(submit)

    def _bury(self) -> None:
        """The process is dead: whoever waits for no more than it hears so, the others wait for the next."""
        if anyio.current_time() - self._loaded_at >= PEACE_S:
            self._deaths = self._convictions = 0
        was_idle = self._loaded_at < math.inf and not self._ledger
        ended, is_convicted = self._ledger.bury()
        if is_convicted:
            self._convictions += 1
        elif not was_idle:
            self._deaths += 1
        ended += [Failed(ticket, EngineFailed.code, RESTARTING) for ticket in self._reports]
        self._reports.clear()
        self._hand_over(ended)

    def _forward(self) -> None:
        if self._outgoing is not None:
            for submit in self._ledger.release():
                self._post(self._with_news_only(submit))

    def _with_news_only(self, submit: Submit) -> Submit:
        """Without the payload of a constraint that this process was sent already: it may be megabytes. If it
        has it no longer, it says so."""
        constraint = submit.constraint
        if constraint is None:
            return submit
        if constraint.key in self._sent_keys:
            return replace(submit, constraint=replace(constraint, payload=b""))
        if len(self._sent_keys) >= MAX_SENT_KEYS:
            self._sent_keys.clear()
        self._sent_keys.add(constraint.key)
        return submit

    def _post(self, message: ToEngine) -> None:
        assert self._outgoing is not None
        self._outgoing.send_nowait(to_frame(message))

    def _hand_over(self, messages: Sequence[FromEngine]) -> None:
        if self._client is not None:
            self._client.receive(messages)


async def _write(child: EngineChild, to_write: MemoryObjectReceiveStream[bytes]) -> None:
    try:
        async for frame in to_write:
            await child.send(frame)
    except OSError:
        pass  # it died, which the reader hears too
