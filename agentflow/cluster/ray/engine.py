"""The main module of an engine process on a node of a Ray cluster.

``python -m agentflow.cluster.ray.engine FD LIFELINE``: the engine's worker on the socket FD, which ends as
soon as the pipe LIFELINE closes. Its host, a Ray actor, holds the other end: without the actor, Ray would
give the engine's processors and GPUs to others.
"""

from __future__ import annotations

import os
import sys
import threading

from agentflow.engine.process import worker


def _end_with(lifeline: int) -> None:
    os.read(lifeline, 1)
    os._exit(1)


def main() -> int:
    """Runs the engine."""
    lifeline = int(sys.argv[2])
    os.set_inheritable(lifeline, False)
    threading.Thread(target=_end_with, args=(lifeline,), name="lifeline", daemon=True).start()
    return worker.main()


if __name__ == "__main__":
    sys.exit(main())
