"""A state as the engine's generator has it."""

from __future__ import annotations

import time
from dataclasses import dataclass

import msgspec

from agentflow.engine.process.ipc import Origin
from agentflow.engine.text.token_state import TokenState
from agentflow.engine.text.tools import ToolUse

# What laying out a turn costs, beside its text.
CHARS_PER_TURN = 32


@dataclass(eq=False)
class EngineContext:
    """One state in the engine: its tokens, and where its requests come from. ``num_computed``: so many
    of its tokens the engine has had to compute already. ``has_run``: the engine knows the state.
    ``computing_ahead``: the request that computes a prefix before its forks ask for it. ``deadline``:
    when the program wants it to be done (``time.monotonic``). ``tools``: of the conversation that it began
    with. ``conversation``: the key of that one, where the model's answer comes next."""

    tokens: TokenState
    origin: Origin
    num_unencoded_chars: int = 0
    num_unencoded_turns: int = 0
    num_turns: int = 0
    num_computed: int = 0
    has_run: bool = False
    computing_ahead: int | None = None
    deadline: float | None = None
    tools: ToolUse | None = None
    conversation: bytes | None = None

    @property
    def num_to_encode(self) -> int:
        """What there is to lay out and to encode, in characters."""
        return self.num_unencoded_chars + CHARS_PER_TURN * self.num_unencoded_turns

    def was_encoded(self) -> None:
        """All that was appended."""
        self.num_unencoded_chars = self.num_unencoded_turns = 0

    def origin_now(self) -> Origin:
        """Where a request that is made now comes from: with the time that is left until the deadline."""
        if self.deadline is None:
            return self.origin
        left_s = max(0.0, self.deadline - time.monotonic())
        return msgspec.structs.replace(self.origin, deadline_s=left_s)
