"""Builds grammars in a separate thread, so that the engine's steps continue meanwhile.

The largest grammars take up to about a second, in native code that does not hold Python's lock.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from agentflow.engine.grammar.compiler.messages import CompiledConstraint
from agentflow.engine.grammar.grammar import Grammar


@dataclass(frozen=True, slots=True)
class BuiltGrammar:
    """The result of a build. Exactly one of ``grammar`` and ``error`` is set."""

    key: str  # of the constraint
    grammar: Grammar | None = None
    error: Exception | None = None


class GrammarBuilder:
    """Builds one grammar at a time; tenants take turns. ``make`` and ``deliver`` are called in the thread,
    which starts with the first build and is a daemon, because native code cannot be interrupted."""

    def __init__(
        self, make: Callable[[CompiledConstraint], Grammar], deliver: Callable[[BuiltGrammar], None]
    ) -> None:
        self._make = make
        self._deliver = deliver
        # By tenant and key. The tenant with the next turn comes first.
        self._queues: OrderedDict[str, OrderedDict[str, CompiledConstraint]] = OrderedDict()
        self._tenants: dict[str, str] = {}  # of the queued builds, by key
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._is_closed = False

    def build(self, constraint: CompiledConstraint, tenant: str) -> None:
        """Queues a build of a key that is not queued. ``deliver`` is called with its result."""
        with self._changed:
            self._queues.setdefault(tenant, OrderedDict())[constraint.key] = constraint
            self._tenants[constraint.key] = tenant
            self._changed.notify()
        if self._thread is not None:
            return
        thread = threading.Thread(target=self._run, name="agentflow-grammars", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # the process has reached its limit of threads
            self.cancel(constraint.key)
            self._deliver(BuiltGrammar(constraint.key, error=error))
            return
        self._thread = thread

    def cancel(self, key: str) -> None:
        """Drops a build, unless it has begun."""
        with self._changed:
            tenant = self._tenants.pop(key, None)
            if tenant is not None:
                del self._queues[tenant][key]
                if not self._queues[tenant]:
                    del self._queues[tenant]

    def close(self) -> None:
        """Ends the thread after the current build, whose result is not delivered."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()

    def _run(self) -> None:
        while (constraint := self._next()) is not None:
            try:
                built = BuiltGrammar(constraint.key, self._make(constraint))
            except Exception as error:
                built = BuiltGrammar(constraint.key, error=error)
            if not self._is_closed:
                self._deliver(built)

    def _next(self) -> CompiledConstraint | None:
        with self._changed:
            self._changed.wait_for(lambda: self._queues or self._is_closed)
            if self._is_closed:
                return None
            tenant, queue = next(iter(self._queues.items()))
            key, constraint = queue.popitem(last=False)
            del self._tenants[key]
            if queue:
                self._queues.move_to_end(tenant)
            else:
                del self._queues[tenant]
            return constraint
