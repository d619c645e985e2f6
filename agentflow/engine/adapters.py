"""The adapters (LoRA) of an engine, by name, each kept until no request uses it."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from agentflow.engine.process.ipc import AdapterLoaded, LoadAdapter
from agentflow.engine.runner import ModelRunner
from agentflow.errors import BadModelFolder, UnknownModel, listed


class Adapters:
    """Loads into and drops from ``runner``. Several names may have the same adapter."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._identities: dict[str, str] = {}  # by name
        self._num_uses: Counter[str] = Counter()  # of each identity, by names and requests

    def load(self, message: LoadAdapter) -> AdapterLoaded:
        """``BadModelFolder`` or ``BadArgument`` if the model cannot have it; then nothing changes."""
        info = self._runner.load_adapter(Path(message.folder))
        self._num_uses[info.identity] += 1
        if message.identity and info.identity != message.identity:
            self._drop(info.identity)
            raise BadModelFolder(f"the adapter {message.name!r} in {message.folder} has changed on disk")
        self.unload(message.name)
        self._identities[message.name] = info.identity
        return AdapterLoaded(message.ticket, message.name, message.folder, info.identity, info.nbytes)

    def unload(self, name: str) -> None:
        """Drops the name. Unknown ones are ignored."""
        identity = self._identities.pop(name, None)
        if identity is not None:
            self._drop(identity)

    def use(self, name: str) -> str:
        """The identity of the adapter of that name, for a request that must ``leave`` it. ``UnknownModel``.
        An empty name is the model itself."""
        if not name:
            return ""
        identity = self._identities.get(name)
        if identity is None:
            known = listed(sorted(self._identities))
            raise UnknownModel(f"the adapter {name!r} is not loaded (there are: {known})")
        self._num_uses[identity] += 1
        return identity

    def leave(self, identity: str) -> None:
        """A request no longer uses it."""
        if identity:
            self._drop(identity)

    def _drop(self, identity: str) -> None:
        self._num_uses[identity] -= 1
        if not self._num_uses[identity]:
            del self._num_uses[identity]
            self._runner.drop_adapter(identity)
