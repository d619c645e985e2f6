"""Places where a process can be held: named pipes, so that a test knows when a process stands there."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import anyio.lowlevel
import anyio.to_thread


def stand(path: str) -> None:
    """Stands at a hold, if it is still there, until it is released or the process is killed."""
    if os.path.exists(path):
        with open(path, "rb") as pipe:
            pipe.read()


class Hold:
    """A place at which the first process that comes by stands still."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        os.mkfifo(self.path)

    async def reached(self) -> None:
        """Waits for a process to stand here; no other will. ``release`` is to be called then."""
        self._pipe = await anyio.to_thread.run_sync(os.open, self.path, os.O_WRONLY)
        os.unlink(self.path)

    def release(self) -> None:
        """Lets the process go on, where it was not killed."""
        os.close(self._pipe)


async def until(is_so: Callable[[], bool]) -> None:
    """Waits until ``is_so()``, for what gives no event."""
    while not is_so():
        os.sched_yield()  # another process may need this processor to get there
        await anyio.lowlevel.checkpoint()
