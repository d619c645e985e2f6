"""Which program a model call belongs to: the outermost call of a DSPy module around it.

A callback hears of every module, tool and LM that is called, and remembers which module's call is at its
root. When that ends, so does the program. What an evaluation or an optimizer calls counts as many programs of
which the whole matters, not each by itself.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import dspy
from dspy.utils.callback import ACTIVE_CALL_ID, BaseCallback

from agentflow.integrations.client import ModelConnection
from agentflow.protocol.ops import Objective
from dspy_agentflow.call_notes import forget_prompt, remember_prompt

# Calls whose end nobody tells are forgotten, the oldest first.
MOST_CALLS: Final = 10_000


@dataclass(eq=False)
class _Program:
    name: str
    objective: Objective | None
    connections: set[ModelConnection] = field(default_factory=set)


_MANY_PROGRAMS: Final = _Program("", "throughput")


class CallTree(BaseCallback):
    """The program that each call belongs to that goes on."""

    def __init__(self) -> None:
        self._programs: OrderedDict[str, _Program] = OrderedDict()
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[Callable[[], CallTree], tuple[()]]:
        return _the_one, ()  # saved settings find it again

    def program_of(self, connection: ModelConnection) -> tuple[str, Objective | None]:
        """The name of the program that runs here, and what matters there. It ends on the connection, too."""
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
            oldest = next(iter(self._programs)) if len(self._programs) > MOST_CALLS else None
        if oldest is not None:
            self._end(oldest)

    def _end(self, call_id: str) -> None:
        with self._lock:
            program = self._programs.pop(call_id, None)
        if program is not None and program.name == call_id:
            for connection in program.connections:
                connection.end_program(call_id)

    def on_module_start(self, call_id: str, instance: Any, inputs: dict[str, Any]) -> None:
        """A module is called."""
        self._begin(call_id, is_module=not isinstance(instance, dspy.BaseLM))

    def on_module_end(self, call_id: str, outputs: Any, exception: BaseException | None = None) -> None:
        """It has ended, or failed."""
        self._end(call_id)

    def on_lm_start(self, call_id: str, instance: Any, inputs: dict[str, Any]) -> None:
        """An LM is called."""
        self._begin(call_id)

    def on_lm_end(self, call_id: str, outputs: Any, exception: BaseException | None = None) -> None:
        """It has answered, or failed."""
        self._end(call_id)

    def on_tool_start(self, call_id: str, instance: Any, inputs: dict[str, Any]) -> None:
        """A tool, in which modules may be called."""
        self._begin(call_id)

    def on_tool_end(self, call_id: str, outputs: Any, exception: BaseException | None = None) -> None:
        """It has ended, or failed."""
        self._end(call_id)

    def on_evaluate_start(self, call_id: str, instance: Any, inputs: dict[str, Any]) -> None:
        """An evaluation calls a module many times."""
        self._begin(call_id, has_many=True)

    def on_evaluate_end(self, call_id: str, outputs: Any, exception: BaseException | None = None) -> None:
        """It has ended, or failed."""
        self._end(call_id)

    def on_compile_start(self, call_id: str, instance: Any, inputs: dict[str, Any]) -> None:
        """An optimizer calls a module many times."""
        self._begin(call_id, has_many=True)

    def on_compile_end(self, call_id: str, outputs: Any, exception: BaseException | None = None) -> None:
        """It has ended, or failed."""
        self._end(call_id)

    def on_adapter_format_start(self, call_id: str, instance: Any, inputs: dict[str, Any]) -> None:
        """An adapter writes a prompt for a signature."""
        remember_prompt(call_id, instance, inputs.get("signature"))

    def on_adapter_format_end(
        self, call_id: str, outputs: Any, exception: BaseException | None = None
    ) -> None:
        """It has written it."""
        forget_prompt() if exception is not None else remember_prompt(call_id, messages=outputs)


CALLS: Final = CallTree()


def _the_one() -> CallTree:
    return CALLS


def listen() -> None:
    """From now on DSPy tells ``CALLS``; again where the user has set other callbacks meanwhile."""
    callbacks = dspy.settings.callbacks
    if not any(callback is CALLS for callback in callbacks):
        # In place: dspy.configure may be called from one thread only, and who is in a context has a copy.
        callbacks.append(CALLS)
