"""``async with s.user():`` a turn that stays open for a block."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING

from agentflow.protocol.ops import Role

if TYPE_CHECKING:
    from agentflow.language.appending import Appending


class Turn:
    """Begins a turn of ``role`` on entering and ends it on leaving. Where the block fails, the turn stays
    open: what the state holds then is not a conversation any more."""

    def __init__(self, state: Appending, role: Role) -> None:
        self._state = state
        self._role = role

    async def __aenter__(self) -> Appending:
        self._state.begin(self._role)
        return self._state

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self._state.end()
