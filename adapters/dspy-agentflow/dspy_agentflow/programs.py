"""The program of a model call: the outermost call of a DSPy module around it.

``CallTree`` is a callback that records the root module of every call of a module, tool or LM. When the root
ends, its program ends. An evaluation or an optimizer runs many programs, with the objective ``throughput``.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import dspy
from dspy.utils.callback import ACTIVE_CALL_ID, BaseCallback

from agentflow.integrations import ModelConnection, Objective
from dspy_agentflow.call_notes import forget_prompt, remember_prompt

# Calls whose end is never reported are dropped, the oldest first.
MAX_CALLS: Final = 10_000


@dataclass(eq=False)
class _Program:
    name: str
    objective: Objective | None
    connections: set[ModelConnection] = field(default_factory=set)


_MANY_PROGRAMS: Final = _Program("", "throughput")


class CallTree(BaseCallback):
    """The program of each unfinished call."""

    def __init__(self) -> None:
        self._programs: OrderedDict[str, _Program] = OrderedDict()
        self._after_fork()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._after_fork)

    def _after_fork(self) -> None:
        self._lock = threading.Lock()  # in a forked process no thread releases the old one

    def __reduce__(self) -> tuple[Callable[[], CallTree], tuple[()]]:
        return _singleton, ()  # unpickled settings refer to the same object

    def program_of(self, connection: ModelConnection) -> tuple[str, Objective | None]:
        """Returns the name and the objective of the current program, which will end on this connection,
        too."""
        with self._lock:
            program = self._programs.get(ACTIVE_CALL_ID.get())
            if program is None or not program.name:
                return "", None if program is None else program.objective
            program.connections.add(connection)
            return program.name, program.objective

    def _begin(self, call_id: str, *, is_module: bool = False, has_many: bool = False) -> None:
        with self._lock:
            program = self._programs.get(ACTIVE_CALL_ID.get())
            if is_module and (program is None or not program.name):
                program = _Program(call_id, None if program is None else program.objective)
            elif has_many and program is None:
                program = _MANY_PROGRAMS
            if program is None:
                return
            self._programs[call_id] = program
            oldest = next(iter(self._programs)) if len(self._programs) > MAX_CALLS else None
        if oldest is not None:
            self.on_module_end(oldest)

    def on_module_start(self, call_id: str, instance: Any, inputs: dict[str, Any]) -> None:
        """Records the call of a module."""
        self._begin(call_id, is_module=not isinstance(instance, dspy.BaseLM))

    def on_lm_start(self, call_id: str, instance: Any, inputs: dict[str, Any]) -> None:
        """Records the call of an LM, or of a tool, which may call modules."""
        self._begin(call_id)

    on_tool_start = on_lm_start

    def on_evaluate_start(self, call_id: str, instance: Any, inputs: dict[str, Any]) -> None:
        """Records an evaluation or an optimizer, which calls a module many times."""
        self._begin(call_id, has_many=True)

    on_compile_start = on_evaluate_start

    def on_module_end(
        self, call_id: str, outputs: Any = None, exception: BaseException | None = None
    ) -> None:
        """Records the end of a call."""
        with self._lock:
            program = self._programs.pop(call_id, None)
        if program is not None and program.name == call_id:
            for connection in program.connections:
                connection.end_program(call_id)

    on_lm_end = on_tool_end = on_evaluate_end = on_compile_end = on_module_end

    def on_adapter_format_start(self, call_id: str, instance: Any, inputs: dict[str, Any]) -> None:
        """Records that an adapter formats a prompt for a signature."""
        remember_prompt(call_id, instance, inputs.get("signature"))

    def on_adapter_format_end(
        self, call_id: str, outputs: Any, exception: BaseException | None = None
    ) -> None:
        """Records the prompt."""
        forget_prompt() if exception is not None else remember_prompt(call_id, messages=outputs)


CALLS: Final = CallTree()


def _singleton() -> CallTree:
    return CALLS


def register_callback() -> None:
    """Registers ``CALLS`` with DSPy, unless it is registered. The user may have replaced the callbacks."""
    callbacks = dspy.settings.callbacks
    if not any(callback is CALLS for callback in callbacks):
        # In place: dspy.configure may be called from only one thread, and contexts have copies of the
        # settings.
        callbacks.append(CALLS)
