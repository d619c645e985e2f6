"""The text of an op whose parts refer to variables: it is complete when all of them are."""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable, Sequence

import anyio

from agentflow.errors import AgentflowError, PromptTooLong, RunFailed
from agentflow.protocol import ops
from agentflow.protocol.transform import apply_in_turn
from agentflow.runtime.limits import MemoryBudget, Reservation
from agentflow.runtime.state_tree import VariableRecord, drop_tracebacks, root_cause
from agentflow.runtime.turns import Turn

# A text that refers twice to the one before doubles with every op: thirty small ops could exhaust the memory.
MAX_OP_CHARS = 8 * 1024 * 1024


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
        on_wait: Callable[[], Awaitable[None]],
    ) -> None:
        """Calls ``append`` with the text of the parts, in pieces: before the wait for a variable, with all
        text that is known by then, and then ``on_wait``. ``sources``: the variables that the parts refer to,
        in their order. An error is raised when all of them have ended."""
        pieces: list[str] = []
        piece, num_chars = "", 0
        variables = iter(sources)
        reservation = Reservation(self._memory, 0)  # pieces are kept while a search waits for a thread
        turn = Turn()
        try:
            for part in parts:
                await turn.pause()
                if isinstance(part, str):
                    piece = part
                else:
                    variable = next(variables)
                    if pieces and not variable.has_ended:
                        reservation = Reservation(self._memory, 0)
                        append(_taken(pieces))
                    if not variable.has_ended:
                        await on_wait()
                    await _wait_for_value(variable)
                    piece = await apply_in_turn(variable.content, part.transforms, self._searching)
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
