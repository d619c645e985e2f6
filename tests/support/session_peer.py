"""Both ends of a session: a generator that can hang, and a listener that checks the events."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Any

import anyio

from agentflow.backends.remote import Remote
from agentflow.backends.scripted_generator import Script, ScriptedContext, ScriptedGenerator
from agentflow.errors import AgentflowError
from agentflow.protocol import ops
from agentflow.protocol.backend import Connection
from agentflow.protocol.events import Delta, Event, Reached, StateFailed, Stats, StatsReply, Value, VarFailed
from agentflow.protocol.sampling import GenParams
from agentflow.runtime.generator import Generated, OnText

# A prompt that ends in this, or in a user's turn that does, is never answered.
HANG = "…hang"


def count_words(prompt: str) -> str:
    """The script: a prompt that ends in ``#n`` is answered with n words; any other with its last word."""
    head, mark, number = prompt.rpartition("#")
    if mark and number.isdecimal():
        return " ".join(f"{len(head)}.{index}é" for index in range(int(number)))
    return prompt.split()[-1]


class HangingGenerator(ScriptedGenerator):
    """Answers by ``script``, hangs at ``HANG``, and fails with the faults that a test sets."""

    def __init__(self, script: Script = count_words) -> None:
        super().__init__(script)
        self.stats_fault: Exception | None = None
        self.generate_fault: Exception | None = None
        self.has_hung = anyio.Event()
        self.num_begun = 0

    async def generate(
        self, context: ScriptedContext, params: GenParams, on_text: OnText, *rest: Any, **options: Any
    ) -> Generated:
        self.num_begun += 1
        if self.generate_fault is not None:
            raise self.generate_fault
        if not context.text.removesuffix("</user><assistant>").endswith(HANG):
            return await super().generate(context, params, on_text, *rest, **options)
        self.num_running += 1
        self.has_hung.set()
        try:
            on_text("begun")
            await anyio.sleep_forever()
        finally:
            self.num_running -= 1
        raise AssertionError("unreachable")

    async def stats(self) -> Stats:
        if self.stats_fault is not None:
            raise self.stats_fault
        return await super().stats()


def gen(state: int, var: int, max_tokens: int = 100_000) -> ops.Gen:
    """A gen whose length depends on the prompt."""
    return ops.Gen(state, var, f"v{var}", GenParams(max_tokens=max_tokens))


class Listener:
    """Collects the events of a connection. Lost, repeated or reordered text fails the test."""

    def __init__(self) -> None:
        self.texts: dict[int, str] = {}
        self.reasoning: dict[int, str] = {}
        self.ends: dict[int, Value | VarFailed] = {}
        self.reached: dict[int, int] = {}
        self.failed: dict[int, StateFailed] = {}
        self.stats: dict[int, Stats] = {}
        self.lost_with: Exception | None = None
        self.is_over = False
        self.num_deliveries = 0
        self._changed = anyio.Event()

    def deliver(self, events: Iterable[Event]) -> None:
        self.num_deliveries += 1
        for event in events:
            self._receive(event)
        self._change()

    def lost(self, error: Exception, *, is_final: bool = True) -> None:
        assert not self.is_over, "lost was called after the end"
        self.lost_with = error
        self.is_over = is_final
        self._change()

    async def wait_for(self, holds: Callable[[Listener], bool]) -> None:
        """Waits until the condition holds after an event. Raises the error that ended the connection."""
        while not holds(self):
            if self.lost_with is not None:
                raise self.lost_with
            await self._changed.wait()

    async def wait_until_lost(self) -> AgentflowError:
        """Waits for the error that ends the connection."""
        while self.lost_with is None:
            await self._changed.wait()
        assert isinstance(self.lost_with, AgentflowError)
        return self.lost_with

    async def text(self, var: int) -> str:
        """Waits for a variable's whole text."""
        await self.wait_for(lambda _: var in self.ends)
        assert isinstance(self.ends[var], Value), self.ends[var]
        return self.texts[var]

    def _receive(self, event: Event) -> None:
        match event:
            case Delta() | Value():
                so_far = self.texts.get(event.var, "")
                assert event.at == len(so_far), f"{event!r} after {len(so_far)} characters"
                assert event.var not in self.ends, f"{event!r} after the end"
                self.texts[event.var] = so_far + event.text
                if isinstance(event, Value):
                    self.ends[event.var] = event
                    self.reasoning[event.var] = event.reasoning or ""
                else:
                    assert event.text or event.reasoning, "an empty delta"
                    known = self.reasoning.get(event.var, "")
                    assert event.reasoning_at <= len(known)
                    self.reasoning[event.var] = known[: event.reasoning_at] + event.reasoning
            case VarFailed():
                assert event.var not in self.ends, f"{event!r} after the end"
                self.ends[event.var] = event
            case Reached():
                assert event.ticket > self.reached.get(event.state, 0), f"{event!r} again"
                self.reached[event.state] = event.ticket
            case StateFailed():
                assert event.state not in self.failed, f"{event!r} again"
                self.failed[event.state] = event
            case StatsReply():
                assert event.ticket not in self.stats, f"{event!r} again"
                assert event.stats is not None, event
                self.stats[event.ticket] = event.stats

    def _change(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()


@asynccontextmanager
async def opened(remote: Remote) -> AsyncIterator[tuple[Connection, Listener]]:
    """A connection to a server, and its listener."""
    listener = Listener()
    async with remote.connect(listener.deliver, listener.lost) as connection:
        yield connection, listener
