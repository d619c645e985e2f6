"""How adapters of other frameworks reach a model: from any thread and any event loop, one session for all,
and calls that belong together as one program."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import aclosing
from typing import Final
from weakref import WeakValueDictionary

from agentflow.backends.local import DEFAULT_MODEL
from agentflow.integrations.model_call import CalledProgram, Ended, ModelCall, Said
from agentflow.integrations.shared_session import SharedSession
from agentflow.language.session import Session
from agentflow.protocol.backend import Backend
from agentflow.protocol.ops import Objective

# Programs whose end nobody tells are dropped, the oldest first.
MOST_PROGRAMS: Final = 1000


class ModelConnection:
    """Opened with the first call. ``shared``: for what is no call."""

    def __init__(self, open_session: Callable[[], Session]) -> None:
        self.shared = SharedSession(open_session)
        self._programs: OrderedDict[str, CalledProgram] = OrderedDict()

    def ask(
        self, call: ModelCall, program: str = "", objective: Objective | None = None
    ) -> Generator[Said | Ended, None, None]:
        """What the model says, as it comes; blocks in between. ``program``: what the call belongs to, until
        ``end_program``."""
        return self.shared.stream(lambda flow: self._ask(flow, call, program, objective))

    def aask(
        self, call: ModelCall, program: str = "", objective: Objective | None = None
    ) -> AsyncGenerator[Said | Ended, None]:
        """The same for a reader in an event loop."""
        return self.shared.astream(lambda flow: self._ask(flow, call, program, objective))

    def end_program(self, name: str) -> None:
        """Nothing more is asked of it. From any thread; waits for nothing."""
        self.shared.call_soon(lambda: self._end_program(name))

    def close(self) -> None:
        """Ends the session; the next call opens another one."""
        self.shared.close()

    async def _ask(
        self, flow: Session, call: ModelCall, name: str, objective: Objective | None
    ) -> AsyncGenerator[Said | Ended, None]:
        program = self._program(flow, name, objective)
        async with aclosing(program.ask(call)) as events:
            async for event in events:
                yield event

    def _program(self, flow: Session, name: str, objective: Objective | None) -> CalledProgram:
        program = self._programs.get(name)
        if program is None or program.session is not flow:
            program = CalledProgram(flow, name, objective)
            if name:
                self._programs[name] = program
                while len(self._programs) > MOST_PROGRAMS:
                    self._programs.popitem(last=False)[1].close()
        return program

    def _end_program(self, name: str) -> None:
        program = self._programs.pop(name, None)
        if program is not None:
            program.close()


_connections: dict[tuple[str | None, ...], ModelConnection] = {}
# By the backend's ``id``, which nothing else has while its connection is there.
_backends: WeakValueDictionary[int, ModelConnection] = WeakValueDictionary()
_lock = threading.Lock()


def connection_to(
    url: str | None = None, model: str | None = None, api_key: str | None = None
) -> ModelConnection:
    """The process's one connection to this server, or to this model in this process: as ``af.session``, which
    it opens. Closed with the process, or with ``close``."""
    from agentflow.backends.open_session import session

    is_local = not (url or os.environ.get("AGENTFLOW_URL"))
    with _lock:
        key = (None, model or DEFAULT_MODEL, None) if is_local else (url, model, api_key)
        if key not in _connections:
            _connections[key] = ModelConnection(lambda: session(url, model=model, api_key=api_key))
        return _connections[key]


def connection_through(backend: Backend) -> ModelConnection:
    """The one through this backend, as long as somebody has it."""
    from agentflow.backends.open_session import session

    with _lock:
        connection = _backends.get(id(backend))
        if connection is None:
            connection = ModelConnection(lambda: session(backend=backend))
            _backends[id(backend)] = connection
        return connection
