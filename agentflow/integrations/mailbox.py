"""What a task in one thread's event loop gives to a reader in another place: all that is there, at once."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Generic, TypeVar

import anyio

from agentflow.runtime.loop_caller import loop_caller

ItemT = TypeVar("ItemT")


class Mailbox(Generic[ItemT]):
    """Items, and an end, which may be an error. One side puts, the other takes what is there. ``wake`` is
    called where there is something new, once until ``take``."""

    def __init__(self, wake: Callable[[], object]) -> None:
        self._wake = wake
        self._items: deque[ItemT] = deque()
        self._lock = threading.Lock()
        self._has_woken = False
        self._has_ended = False
        self._error: BaseException | None = None

    def put(self, item: ItemT) -> None:
        """One more."""
        self._items.append(item)
        self._tell()

    def end(self, error: BaseException | None = None) -> None:
        """Nothing more comes; ``error``: because of that."""
        self._error = error
        self._has_ended = True
        self._tell()

    def take(self) -> list[ItemT] | None:
        """All that is there: empty where nothing is yet, None after the last, the error where it ended so."""
        with self._lock:
            self._has_woken = False
        has_ended = self._has_ended  # before: what was put before the end is taken before it
        items = [self._items.popleft() for _ in range(len(self._items))]
        if items or not has_ended:
            return items
        if self._error is not None:
            raise self._error
        return None

    def _tell(self) -> None:
        with self._lock:
            if self._has_woken:
                return
            self._has_woken = True
        self._wake()


class Waiter:
    """Something for an event loop to wait on that any thread may set: to be made in that loop."""

    def __init__(self) -> None:
        self._call_in_loop = loop_caller()
        self._event = anyio.Event()

    def set(self) -> None:
        """Nothing happens where the loop has ended."""
        with suppress(RuntimeError):
            self._call_in_loop(self._set)

    async def wait(self) -> None:
        """Until it was set, since the last wait."""
        await self._event.wait()
        self._event = anyio.Event()

    def _set(self) -> None:
        self._event.set()
