"""How to get something called in the event loop from a place that is not in it: another thread, or the
garbage collector."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable

CallInLoop = Callable[[Callable[[], object]], object]


def loop_caller() -> CallInLoop:
    """A function that other threads may call to have something called in this event loop."""
    trio = sys.modules.get("trio")  # where trio runs, somebody has imported it
    if trio is not None:
        try:
            call_soon: CallInLoop = trio.lowlevel.current_trio_token().run_sync_soon
        except RuntimeError:
            pass  # another loop runs
        else:
            return call_soon
    return asyncio.get_running_loop().call_soon_threadsafe
