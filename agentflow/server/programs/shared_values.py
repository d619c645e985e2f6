"""The values of programs, which survive the front that ran them.

A program runs on the front that opened it. That front stores each finished value, so that other fronts can
show it when the front is gone. A value is kept for as long as a program may be idle.
"""

from __future__ import annotations

import logging
from contextlib import ExitStack
from typing import TypeVar

import anyio
import msgspec

from agentflow.errors import Overloaded
from agentflow.protocol.events import ErrorInfo, Value, VarFailed
from agentflow.server.programs.program import ProgramVariable, ServedProgram
from agentflow.server.stores.entries import SharedEntries

logger = logging.getLogger(__name__)

T = TypeVar("T")
FORGET_S = 2.0
"""The time limit for deleting a closed program's values. The server's shutdown waits for it, too."""


class KeptUsage(msgspec.Struct, frozen=True, array_like=True):
    """The token counts of a value."""

    prompt_tokens: int
    cached_tokens: int
    output_tokens: int


class KeptValue(msgspec.Struct, frozen=True):
    """A variable that has ended: its value, or the error of the first variable of ``path``, the cause."""

    text: str = ""
    finish_reason: str = ""
    usage: KeptUsage = KeptUsage(0, 0, 0)
    error: ErrorInfo | None = None
    path: tuple[str, ...] = ()


class _KeptProgram(msgspec.Struct, frozen=True):
    front: str


class SharedValues:
    """The values of all fronts' programs."""

    def __init__(self, entries: SharedEntries) -> None:
        self._entries = entries

    async def follow(self, program: ServedProgram) -> None:
        """Writes the program's values until it is cancelled."""
        front = msgspec.msgpack.encode(_KeptProgram(self._entries.store.front))
        await self._write(program, "", front)
        cursor = program.followed()
        waiting: dict[int, tuple[ProgramVariable, ExitStack]] = {}
        with ExitStack() as readers:
            while True:
                for variable in program.take_added():
                    stack = readers.enter_context(ExitStack())
                    try:
                        stack.enter_context(variable.record.reading(cursor, "end"))
                    except Overloaded as error:
                        logger.warning("a value of the program %s is not shared: %s", program.id, error)
                        continue
                    waiting[variable.record.id] = variable, stack
                await cursor.wait()
                for event in cursor.drain():
                    if isinstance(event, Value | VarFailed):
                        variable, stack = waiting.pop(event.var)
                        stack.close()
                        await self._write(program, variable.id, await _kept(program, variable))

    async def _write(self, program: ServedProgram, variable_id: str, data: bytes) -> None:
        entry = _entry(program.id, variable_id)
        try:
            await self._entries.add(program.tenant, entry, data)
        except Overloaded as error:
            logger.warning("a value of the program %s is not shared: %s", program.id, error)

    async def forget(self, program: ServedProgram) -> None:
        """Drops the values of a program that was closed."""
        with anyio.move_on_after(FORGET_S, shield=True) as scope:
            try:
                for variable_id in ("", *program.variable_ids):
                    await self._entries.delete(program.tenant, _entry(program.id, variable_id))
            except Overloaded as error:
                logger.warning("the values of the program %s expire later: %s", program.id, error)
        if scope.cancelled_caught:
            logger.warning("the values of the program %s expire later: the store is slow", program.id)

    async def close(self, tenant: str, program_id: str) -> None:
        """Closes a program whose front is gone. Its values expire."""
        await self._entries.delete(tenant, _entry(program_id, ""))

    async def find_front(self, tenant: str, program_id: str) -> str | None:
        """The front that runs the tenant's program, or did; None if there is no such program."""
        found = await self._find(tenant, program_id, "", _KeptProgram)
        return None if found is None else found.front

    async def find(self, tenant: str, program_id: str, variable_id: str) -> KeptValue | None:
        """The stored variable; None if it has not ended, or does not exist."""
        return await self._find(tenant, program_id, variable_id, KeptValue)

    async def _find(self, tenant: str, program_id: str, variable_id: str, kind: type[T]) -> T | None:
        entry = _entry(program_id, variable_id)
        found = await self._entries.find(tenant, entry)
        if found is None:
            return None
        return self._entries.store.decoded(self._entries.key("kept", tenant, entry), found.data, kind)


def _entry(program_id: str, variable_id: str) -> str:
    return f"{program_id}/{variable_id}"


async def _kept(program: ServedProgram, variable: ProgramVariable) -> bytes:
    value = variable.record.value
    if value is not None:
        usage = KeptUsage(value.usage.prompt_tokens, value.usage.cached_tokens, value.usage.output_tokens)
        return msgspec.msgpack.encode(KeptValue(variable.record.text, value.finish_reason, usage))
    failed = await program.path_of_failure(variable)
    error = failed[0].record.error
    assert error is not None
    return msgspec.msgpack.encode(
        KeptValue(error=ErrorInfo.of(error), path=tuple([one.id for one in failed]))
    )
