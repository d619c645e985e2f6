"""The text of an op whose parts refer to variables: it is complete when all variables are."""

from __future__ import annotations

import math
import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import anyio

from agentflow.errors import AgentflowError, PromptTooLong, RunFailed, drop_tracebacks
from agentflow.protocol import ops
from agentflow.protocol.text.transform import apply_in_turn
from agentflow.runtime.interpreter.state_tree import StateRecord, root_cause
from agentflow.runtime.interpreter.variables import VariableRecord
from agentflow.runtime.limits import MemoryBudget, MemoryReservation
from agentflow.runtime.loop_turns import LoopTurn

# A text that refers twice to the one before doubles with every op: thirty small ops could exhaust the memory.
MAX_OP_CHARS = 8 * 1024 * 1024
MIN_GROWN_CHARS = 512
"""The minimum number of characters of a provided text that a waiting state computes in advance."""


@dataclass(frozen=True, slots=True)
class FillAhead:
    """``fill`` lets the generator compute the context of a state that waits."""

    fill: Callable[[], Awaitable[None]]
    state: StateRecord[Any]

    @property
    def num_more_chars(self) -> int:
        """The number of further characters of a provided text before the next ``fill``, which may encode the
        whole text of the context again."""
        return max(MIN_GROWN_CHARS, self.state.num_chars // 8)


class WiredTexts:
    """Resolves the texts of one session.

    Args:
        memory: Counts their pieces.
    """

    def __init__(self, memory: MemoryBudget) -> None:
        self._memory = memory
        # A session uses one of the shared threads at a time.
        self._searching = anyio.CapacityLimiter(1)

    async def resolve(
        self,
        parts: ops.Parts,
        sources: Sequence[VariableRecord],
        append: Callable[[str], None],
        ahead: FillAhead | None = None,
    ) -> None:
        """Calls ``append`` with the text of the parts, in pieces: before waiting for a variable, with all
        text that is known by then. ``sources``: the variables that the parts refer to, in their order. An
        error is raised when all of them have ended. ``ahead``: computes the known text during the waits;
        ``append`` then also gets the text of a provided variable in pieces, while it grows."""
        pieces: list[str] = []
        piece, num_chars = "", 0
        variables = iter(sources)
        reservation = MemoryReservation(self._memory, 0)  # pieces are kept while a search waits for a thread
        turn = LoopTurn()
        try:
            for part in parts:
                await turn.pause()
                if isinstance(part, str):
                    piece = part
                else:
                    variable = next(variables)
                    num_appended = 0  # characters of the variable
                    growing = ahead if variable.is_expected and not part.transforms else None
                    while not variable.has_ended:
                        if growing is not None and (piece := variable.text_from(num_appended)):
                            num_appended += len(piece)
                            num_chars += len(piece)
                            check_length(num_chars)
                            pieces.append(piece)
                        if pieces:
                            reservation, piece = MemoryReservation(self._memory, 0), ""
                            append(_taken(pieces))
                        if ahead is not None:
                            await ahead.fill()
                        next_fill = math.inf if growing is None else num_appended + growing.num_more_chars
                        await variable.wait(next_fill)
                    await _wait_for_value(variable)
                    piece = await apply_in_turn(variable.content, part.transforms, self._searching)
                    piece = piece[num_appended:]
                    reservation.add(sys.getsizeof(piece))
                num_chars += len(piece)
                check_length(num_chars)
                pieces.append(piece)
        except AgentflowError as error:
            drop_tracebacks(error)
            pieces, piece = [], ""  # no memory is held in the wait
            del reservation
            for source in sources:  # a variable without a value is the cause that counts
                await _wait_for_value(source)
            raise
        del reservation
        append("".join(pieces))


def check_length(num_chars: int) -> None:
    """``PromptTooLong`` for the text of one op with more than ``MAX_OP_CHARS``."""
    if num_chars > MAX_OP_CHARS:
        raise PromptTooLong(f"with its variables, this text has more than {MAX_OP_CHARS:,} characters")


def _taken(pieces: list[str]) -> str:
    """The text of the pieces, which the caller no longer holds."""
    text = "".join(pieces)
    pieces.clear()
    return text


async def _wait_for_value(variable: VariableRecord) -> None:
    """Waits for the end of a variable that a text refers to. ``RunFailed`` if it has no value."""
    await variable.wait()
    if variable.error is not None:
        cause = root_cause(variable.error)
        raise RunFailed(f"the text needs {variable.name!r}, which has no value: {cause}") from cause
