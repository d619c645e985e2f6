"""Named pipes at which a process stops, so that a test knows that it is there."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import anyio
import anyio.to_thread


def stand(path: str) -> None:
    """Stops at a hold, if it still exists, until it is released or the process is killed."""
    if os.path.exists(path):
        with open(path, "rb") as pipe:
            pipe.read()


class Hold:
    """The first process that reaches it stops there."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        os.mkfifo(self.path)

    async def reached(self) -> None:
        """Waits until a process has stopped here; no other will. Call ``release`` then."""
        # Left behind where no process comes, so that the test ends.
        self._pipe = await anyio.to_thread.run_sync(os.open, self.path, os.O_WRONLY, abandon_on_cancel=True)
        os.unlink(self.path)

    def release(self) -> None:
        """Lets the process continue, unless it was killed."""
        os.close(self._pipe)


async def until(is_so: Callable[[], bool]) -> None:
    """Waits for a condition that has no event, and leaves the processor to other processes meanwhile."""
    while not is_so():  # noqa: ASYNC110 - there is no event
        await anyio.sleep(0.002)  # noqa: TID251 - another process may need this processor to get there
