"""The server's handle on one engine process."""

from __future__ import annotations

from agentflow.server.child_process import ChildProcess
from agentflow.server.engine_frames import Start
from agentflow.server.engine_process import LAST_STEP_S

# How long an engine may take to end by itself: its last step, and then its memory.
END_S = LAST_STEP_S + 2.0


class EngineChild(ChildProcess):
    """One engine process, from ``start`` to ``end``."""

    @classmethod
    def start(cls, start: Start) -> EngineChild:
        """A process that begins to load."""
        return cls.run("agentflow.server.engine_process", start)
