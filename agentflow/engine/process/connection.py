"""The messages to and from one engine process, from its start to its end.

Sending never waits: messages and images have separate queues, and an image is written in parts, between which
other messages are written. The socket of a process that died closes, which ends ``run``. ``deadlines`` detect
a process that hangs; nothing is measured while the process owes no answer.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from functools import partial

import anyio
from msgspec.structs import replace

from agentflow.engine.machine.child_process import to_frame
from agentflow.engine.media_run import PreparedMedium
from agentflow.engine.messages import (
    DropMedium,
    FromEngine,
    Loaded,
    LoadFailed,
    Logged,
    StepBegins,
    ToEngine,
    answer_decoder,
    from_engine_decoder,
)
from agentflow.engine.process.child import Child
from agentflow.engine.process.deadlines import Deadlines, StepPace
from agentflow.engine.process.medium_parts import medium_parts
from agentflow.engine.request import Submit
from agentflow.runtime.task_group import open_task_group

# The most keys of sent constraints to remember. At this number, all are dropped.
MAX_SENT_KEYS = 10_000


class Unusable(Exception):
    """A running process must be replaced. The message completes the sentence "the engine …"."""


class Hung(Unusable):
    """The process was silent for longer than its deadline."""


class ProcessConnection:
    """The messages of one process, in its scope.

    Args:
        child: the process.
        deadlines: its time limits.
        is_owed: whether the process owes an answer.
    """

    def __init__(self, child: Child, deadlines: Deadlines, is_owed: Callable[[], bool]) -> None:
        self._child = child
        self._deadlines = deadlines
        self._is_owed = is_owed
        self._outgoing, self._to_write = anyio.create_memory_object_stream[bytes | PreparedMedium](math.inf)
        self._media_outgoing, self._media = anyio.create_memory_object_stream[PreparedMedium](math.inf)
        self._turn = anyio.Lock()  # to write a frame
        self._scope = anyio.CancelScope()  # for ``run``
        self._pace = StepPace(deadlines)
        self._num_frames = 0  # received
        self._has_sent = anyio.Event()
        self._media_sent: set[str] = set()  # the images that were sent or are queued
        self.sent_keys: set[str] = set()
        """The keys of the constraints that were sent."""

    def __enter__(self) -> ProcessConnection:
        return self

    def __exit__(self, *_: object) -> None:
        for stream in (self._outgoing, self._to_write, self._media_outgoing, self._media):
            stream.close()

    def post(self, message: ToEngine) -> None:
        """Sends a message. Raises ``ValueError`` or ``OverflowError`` for text or numbers that cannot be
        encoded."""
        self._outgoing.send_nowait(to_frame(message))
        self._has_sent.set()

    def submit(self, submit: Submit) -> None:
        """Sends a request. Omits the payload of a constraint that was sent before: it may have megabytes. If
        the process has dropped the constraint, it answers ``NeedPayload``."""
        constraint = submit.constraint
        if constraint is not None:
            if constraint.key in self.sent_keys:
                submit = replace(submit, constraint=replace(constraint, payload=b""))
            elif len(self.sent_keys) >= MAX_SENT_KEYS:
                self.sent_keys.clear()
            self.sent_keys.add(constraint.key)
        self.post(submit)

    def send_medium(self, medium: PreparedMedium) -> None:
        """Queues an image to be sent after all messages so far, unless it was sent before."""
        if medium.identity not in self._media_sent:
            self._media_sent.add(medium.identity)
            self._outgoing.send_nowait(medium)

    def drop_medium(self, identity: str) -> None:
        """Makes the process drop an image: no further request has it."""
        self._media_sent.discard(identity)
        self.post(DropMedium(identity))

    def close(self) -> None:
        """Ends ``run``."""
        self._scope.cancel()

    async def load(self) -> Loaded | LoadFailed:
        """Waits until the process is ready, or has failed to load. Raises ``Hung`` if it hangs, and
        ``EOFError`` if it dies."""
        answer: Loaded | LoadFailed | None = None
        async with open_task_group() as group:
            group.start_soon(self._expire, group.cancel_scope)
            while answer is None:
                for frame in await self._child.receive():
                    received = answer_decoder.decode(frame)
                    if isinstance(received, list):
                        _log(received)
                    else:
                        answer = received
            group.cancel_scope.cancel()
        if answer is None:
            raise Hung(f"hung: it had not loaded its model after {self._deadlines.load_s:g} s")
        return answer

    async def run(
        self, on_messages: Callable[[list[FromEngine]], None], on_medium: Callable[[str], None]
    ) -> None:
        """Exchanges messages with a process that has loaded, until ``close``.

        Args:
            on_messages: called with the messages of a step.
            on_medium: called with the identity of an image that has been sent.

        Raises:
            EOFError: the process died.
            Hung: the process hangs.
        """
        has_hung = False

        async def watch() -> None:
            nonlocal has_hung
            await self._silence()
            has_hung = True
            self._scope.cancel()

        with self._scope:
            async with open_task_group() as group:
                group.start_soon(self._write)
                group.start_soon(self._write_media, on_medium)
                group.start_soon(watch)
                while True:
                    for frame in await self._child.receive():
                        messages = from_engine_decoder.decode(frame)
                        if messages and isinstance(messages[0], Logged):
                            _log(messages)  # does not count as progress of the engine
                            continue
                        self._num_frames += 1
                        last = messages[-1] if messages else None
                        num_tokens = last.num_tokens if isinstance(last, StepBegins) else None
                        self._pace.received(anyio.current_time(), num_tokens)
                        on_messages(messages)
        if has_hung:
            raise Hung(f"hung: it was silent for {self._pace.limit_s:g} s with unfinished requests")

    async def _expire(self, scope: anyio.CancelScope) -> None:
        await self._deadlines.passes(self._deadlines.load_s, lambda: False)
        scope.cancel()

    async def _silence(self) -> None:
        """Returns once the process has owed an answer and been silent for longer than its deadline."""
        while True:
            if not self._is_owed():
                self._has_sent = anyio.Event()
                await self._has_sent.wait()
                continue
            has_answered = partial(self._has_answered, self._num_frames)
            if await self._deadlines.passes(self._pace.limit_s, has_answered):
                return

    def _has_answered(self, num_frames: int) -> bool:
        """Whether more frames have arrived, or the process owes no answer."""
        return self._num_frames != num_frames or not self._is_owed()

    async def _write(self) -> None:
        try:
            async for frame in self._to_write:
                if isinstance(frame, PreparedMedium):  # its parts take turns with later frames
                    self._media_outgoing.send_nowait(frame)
                    continue
                async with self._turn:
                    await self._child.send(frame)
        except OSError:
            pass  # the process died; the reader handles it

    async def _write_media(self, on_medium: Callable[[str], None]) -> None:
        try:
            async for medium in self._media:
                for part in medium_parts(medium):
                    async with self._turn:
                        await self._child.send(to_frame(part))
                on_medium(medium.identity)
        except OSError:
            pass  # the process died; the reader handles it


def _log(lines: Sequence[object]) -> None:
    """Logs the messages that the process has logged."""
    for line in lines:
        if isinstance(line, Logged):
            logging.getLogger(line.logger).log(line.level, "%s", line.text)
