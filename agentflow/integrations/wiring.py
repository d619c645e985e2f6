"""Model calls whose prompts contain the answers of earlier calls by reference.

The backend passes an answer to the calls that wait for it, so a chain of calls needs no round trips between
its steps. All methods must be called in the loop of the connection.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from agentflow.errors import AgentflowError, RunFailed
from agentflow.integrations.client import Answer, Delta, ModelConnection, watched
from agentflow.language.expressions import Appendable
from agentflow.language.gen import GenExpression
from agentflow.language.session import Session
from agentflow.language.states.state import RootState
from agentflow.language.states.variable import Reference, Variable, complete_text, find_target
from agentflow.protocol.ops import Objective


class WiredProgram:
    """Calls of one program. ``close`` ends their states."""

    def __init__(
        self, connection: ModelConnection, name: str = "", objective: Objective | None = None
    ) -> None:
        self._connection = connection
        self._name = name
        self._objective = objective
        self._flow: Session | None = None
        self._roots: dict[Variable[Any], RootState] = {}
        self._is_closed = False

    async def call(
        self,
        prompt: Sequence[Appendable],
        output: GenExpression[Any],
        cache_salt: str = "",
        deadline_s: float | None = None,
    ) -> Variable[Any]:
        """Sends a call without waiting for its answer.

        Args:
            prompt: The items to append to the state, which may contain variables of earlier calls.
            output: The ``af.gen`` or ``af.reply`` to generate after them.
            cache_salt: As in ``ModelCall``.
            deadline_s: As in ``ModelCall``.
        """
        if self._flow is None:
            self._flow = await self._connection.shared.opened()
        root = self._flow.state(cache_salt=cache_salt, objective=self._objective, program=self._name)
        try:
            if deadline_s is not None:
                root.limit(deadline_s=deadline_s)
            for item in prompt:
                root.add(item)
            variable: Variable[Any] = root.add(output)[output]
        except BaseException:
            root.close()
            raise
        self._roots[variable] = root
        if self._is_closed:  # while the session was opened
            root.close()
        return variable

    async def stream(self, variable: Variable[Any]) -> AsyncGenerator[Delta | Answer, None]:
        """Yields the answer piece by piece, from its start, and then complete. Raises the failure of the call
        that failed first."""
        assert self._flow is not None
        root, node = self._roots[variable], find_target(variable).node
        try:
            async with aclosing(watched(root, [node])) as events:
                async for event in events:
                    yield event
        except RunFailed as error:
            raise _first_failure(error) from None

    async def answer(self, variable: Variable[Any]) -> Answer:
        """Returns the complete answer. Errors as in ``stream``."""
        async with aclosing(self.stream(variable)) as events:
            [answer] = [event async for event in events if isinstance(event, Answer)]
        return answer

    async def text(self, reference: Reference[Any]) -> str:
        """Returns the text that a prompt with the reference contains. Errors as for an awaited reference."""
        return await complete_text(reference)

    def close(self) -> None:
        """Ends the calls; those without an answer are cancelled."""
        self._is_closed = True
        for root in self._roots.values():
            root.close()


def _first_failure(error: AgentflowError) -> AgentflowError:
    """The failure of the call that failed first and caused ``error``."""
    while isinstance(error.__cause__, AgentflowError):
        error = error.__cause__
    return error
