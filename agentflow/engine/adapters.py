"""The adapters (LoRA) of an engine, by their identities: read while its steps continue, and kept until no
request uses them.

The client knows which name stands for which identity. It unloads an adapter after the last request that uses
it, and the engine reads messages in order, so it always has the adapter of a request.
"""

from __future__ import annotations

import queue
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from agentflow.engine.messages import AdapterLoaded, LoadAdapter
from agentflow.engine.runner import AdapterRunner, ModelRunner, ReadAdapter
from agentflow.errors import BadArgument, BadModelFolder, UnknownModel


@dataclass(frozen=True, slots=True)
class AdapterRead:
    """The result of reading the adapter that ``message`` asked for. Exactly one of ``adapter`` and ``error``
    is set."""

    message: LoadAdapter
    adapter: ReadAdapter | None = None
    error: Exception | None = None


class Adapters:
    """Reads adapters one at a time, in a thread that starts with the first. The thread is a daemon, because a
    slow disk may block it. ``deliver`` is called in it; all methods belong to the engine's thread."""

    def __init__(self, runner: ModelRunner, deliver: Callable[[AdapterRead], None]) -> None:
        self._runner = runner if isinstance(runner, AdapterRunner) else None
        self._deliver = deliver
        self._to_read: queue.SimpleQueue[LoadAdapter | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._is_closed = False
        self._num_uses: Counter[str] = Counter()  # of each identity, by loads and requests

    def read(self, message: LoadAdapter) -> None:
        """Begins to load an adapter. When it is read, the result is delivered, to be installed."""
        if self._thread is None:
            thread = threading.Thread(target=self._run, name="agentflow-adapters", daemon=True)
            thread.start()  # fails if the process has reached its limit of threads
            self._thread = thread
        self._to_read.put(message)

    def install(self, read: AdapterRead) -> AdapterLoaded:
        """Ends a load. Raises the error of the reader, or ``BadModelFolder`` if it is not the adapter that
        the message wants; then nothing changes."""
        message, adapter = read.message, read.adapter
        if adapter is None:
            assert read.error is not None
            raise read.error
        if message.identity and adapter.identity != message.identity:
            raise BadModelFolder(f"the adapter {message.name!r} in {message.folder} has changed on disk")
        assert self._runner is not None
        info = self._runner.install_adapter(adapter)
        self._num_uses[info.identity] += 1
        return AdapterLoaded(message.ticket, message.name, message.folder, info.identity, info.nbytes)

    def unload(self, identity: str) -> None:
        """Reverses one load. Unknown identities are ignored."""
        if identity in self._num_uses:
            self.release(identity)

    def use(self, identity: str, name: str) -> None:
        """Counts a use by a request, which must ``release`` the adapter. ``UnknownModel``. ``name``: for the
        message."""
        if identity not in self._num_uses:
            raise UnknownModel(f"the adapter {name!r} is not loaded")
        self._num_uses[identity] += 1

    def release(self, identity: str) -> None:
        """Ends one use. Drops the adapter if no load and no request uses it any more."""
        self._num_uses[identity] -= 1
        if not self._num_uses[identity]:
            del self._num_uses[identity]
            assert self._runner is not None
            self._runner.drop_adapter(identity)

    def close(self) -> None:
        """Ends the thread once it has read its current adapter, which is not delivered."""
        self._is_closed = True
        self._to_read.put(None)

    def _run(self) -> None:
        while (message := self._to_read.get()) is not None:
            try:
                if self._runner is None:
                    raise BadArgument(
                        "this model has no adapters: they need a native architecture", param="model"
                    )
                read = AdapterRead(message, self._runner.read_adapter(Path(message.folder)))
            except Exception as error:
                read = AdapterRead(message, error=error)
            if not self._is_closed:
                self._deliver(read)
