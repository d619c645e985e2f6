"""Records the requests that a server serves as a workload for ``agentflow simulate``.

A line is written when its request ends, in a thread, so that neither the engine nor the event loop waits for
the disk. An error of the file ends the recording and does not affect serving. Token ids are recorded, which a
tokenizer can turn into text. Salts and tenants are replaced by numbers.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import BinaryIO

import anyio
import anyio.to_thread
import numpy as np
from anyio.streams.memory import MemoryObjectReceiveStream

from agentflow.engine.client import EngineClient
from agentflow.engine.messages import Failed, Finished, FromEngine, Progress
from agentflow.engine.request import Submit
from agentflow.engine.runner import RunnerInfo
from agentflow.engine.simulator.workload import Arrival
from agentflow.engine.simulator.workload_file import WorkloadWriter
from agentflow.runtime.task_group import open_task_group

logger = logging.getLogger(__name__)

# The most finished requests that are not written yet. With more, the disk is too slow, and recording ends.
MAX_UNWRITTEN = 10_000
SCORE = "score"


@dataclass(slots=True)
class _Pending:
    submit: Submit
    at_s: float
    output: list[int] = field(default_factory=list)


class _Aliases:
    """Replaces names, which may be secret, by short numbers; the empty name stays empty."""

    def __init__(self) -> None:
        self._of: dict[str, str] = {}

    def of(self, name: str) -> str:
        return self._of.setdefault(name, str(len(self._of) + 1)) if name else ""


class WorkloadRecorder:
    """A ``RequestObserver`` that records. It starts when the object is created. ``clock``: in seconds."""

    def __init__(self, info: RunnerInfo, clock: Callable[[], float] = time.monotonic) -> None:
        self._info = info
        self._clock = clock
        self._started_s = clock()
        self._pending: dict[int, _Pending] = {}
        self._tenants = _Aliases()
        self._salts = _Aliases()
        self._ended, self._to_write = anyio.create_memory_object_stream[Arrival](MAX_UNWRITTEN)
        self._is_over = False
        self._has_failed = False

    def sent(self, submit: Submit) -> None:
        """Records the arrival of a request."""
        if not self._is_over:
            self._pending[submit.request_id] = _Pending(submit, self._clock() - self._started_s)

    def received(self, messages: Sequence[FromEngine]) -> None:
        """Collects outputs, and queues finished requests for writing."""
        if self._is_over:
            return
        for message in messages:
            match message:
                case Progress():
                    pending = self._pending.get(message.request_id)
                    if pending is not None:
                        pending.output += message.token_ids
                case Finished():
                    pending = self._pending.pop(message.request_id, None)
                    if pending is not None:
                        self._write_later(self._arrival(pending, message))
                case Failed():
                    self._pending.pop(message.request_id, None)

    def end(self) -> None:
        """Stops recording. ``write_to`` returns once the queue is written."""
        self._is_over = True
        self._pending.clear()
        self._ended.close()

    async def write_to(self, sink: BinaryIO, name: str) -> None:
        """Writes until ``end``, even if cancelled, and closes ``sink``."""
        with anyio.CancelScope(shield=True), self._to_write:
            try:
                writer = WorkloadWriter(sink, name, self._info.num_slots)
                async for arrival in self._to_write:
                    await anyio.to_thread.run_sync(_write, writer, [arrival, *_waiting(self._to_write)])
                await anyio.to_thread.run_sync(sink.close)
            except Exception as error:
                self._give_up(str(error))
                with suppress(Exception):  # the same error again
                    await anyio.to_thread.run_sync(sink.close)

    def _write_later(self, arrival: Arrival) -> None:
        try:
            self._ended.send_nowait(arrival)
        except anyio.WouldBlock:
            self._give_up(f"the file is {MAX_UNWRITTEN} requests behind")

    def _give_up(self, why: str) -> None:
        if not self._has_failed:
            logger.error("recording the workload has stopped: %s", why)
        self._has_failed = True
        self.end()

    def _arrival(self, pending: _Pending, end: Finished) -> Arrival:
        submit, origin = pending.submit, pending.submit.origin
        params = None if submit.score_from else submit.params
        limit = 0
        if params is not None:
            if end.output_tokens > len(pending.output):  # the end token, which is not reported
                pending.output.append(_end_token(submit, end, self._info))
            limit = min(params.max_tokens, self._info.max_context, self._info.num_slots)
        return Arrival(
            np.array(submit.token_ids, dtype=np.int32),
            np.array(pending.output, dtype=np.int32),
            at_s=pending.at_s,
            max_new_tokens=limit,
            tenant=self._tenants.of(origin.tenant),
            salt=self._salts.of(origin.cache_salt),
            objective=origin.objective,
            task_group=_name(origin.task_group),
            state=_name(origin.state),
            label=SCORE if submit.score_from or submit.choices else "",
            is_extra=origin.is_extra,
        )


@asynccontextmanager
async def recording(
    client: EngineClient, sink: BinaryIO, *, name: str = "", clock: Callable[[], float] = time.monotonic
) -> AsyncIterator[None]:
    """Records the requests of ``client`` into ``sink`` within the context, then closes it."""
    recorder = WorkloadRecorder(client.info, clock)
    async with open_task_group() as group:
        group.start_soon(recorder.write_to, sink, name)
        client.observe(recorder)
        try:
            yield
        finally:
            recorder.end()


def _write(writer: WorkloadWriter, arrivals: Sequence[Arrival]) -> None:
    for arrival in arrivals:
        writer.write(arrival)
    writer.flush()


def _waiting(stream: MemoryObjectReceiveStream[Arrival]) -> list[Arrival]:
    """Returns all requests that are waiting to be written."""
    arrivals: list[Arrival] = []
    for _ in itertools.repeat(None, MAX_UNWRITTEN):
        try:
            arrivals.append(stream.receive_nowait())
        except (anyio.WouldBlock, anyio.EndOfStream):
            break
    return arrivals


def _end_token(submit: Submit, end: Finished, info: RunnerInfo) -> int:
    """Returns a token that may have ended the request. Any of several will do: it is never computed."""
    stops = submit.params.stop_token_ids if submit.params is not None else ()
    return next(iter(info.end_token_ids if end.finish_reason == "eos" else stops), 0)


def _name(number: int) -> str:
    return str(number) if number else ""
