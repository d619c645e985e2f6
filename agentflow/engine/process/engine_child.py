"""The server's handle on one engine process."""

from __future__ import annotations

from agentflow.engine.process.child import ChildProcess
from agentflow.engine.process.engine_frames import Start
from agentflow.engine.process.worker import LAST_STEP_S

# How long an engine may take to end by itself: its last step, and then its memory.
END_S = LAST_STEP_S + 2.0


class EngineChild(ChildProcess):
    """One engine process, from ``start`` to ``end``."""

    @classmethod
    def start(cls, start: Start) -> EngineChild:
        """A process that begins to load."""
        return cls.run("agentflow.engine.process.worker", start)
