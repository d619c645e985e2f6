"""Which program a call belongs to, and when that ends: told by hand, as DSPy tells it."""

from __future__ import annotations

import pickle
from typing import Any

from dspy.utils.callback import ACTIVE_CALL_ID
from dspy_agentflow.programs import CALLS, MAX_CALLS, CallTree


class Answer:
    """A connection that keeps which programs have ended."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def end_program(self, name: str) -> None:
        self.names.append(name)


def begin(tree: CallTree, kind: str, call_id: str, parent: str | None) -> None:
    ACTIVE_CALL_ID.set(parent)
    getattr(tree, f"on_{kind}_start")(call_id, None, {})
    ACTIVE_CALL_ID.set(call_id)


def program_in(tree: CallTree, call_id: str | None, connection: Any) -> Any:
    ACTIVE_CALL_ID.set(call_id)
    return tree.program_of(connection)


def test_the_outermost_module_names_it_and_ends_it() -> None:
    tree, connection = CallTree(), Answer()
    begin(tree, "module", "outer", None)
    begin(tree, "module", "inner", "outer")
    begin(tree, "tool", "tool", "inner")
    begin(tree, "module", "in tool", "tool")
    begin(tree, "lm", "lm", "in tool")
    assert program_in(tree, "lm", connection) == ("outer", None)
    for kind, call_id in (("lm", "lm"), ("module", "in tool"), ("tool", "tool"), ("module", "inner")):
        getattr(tree, f"on_{kind}_end")(call_id, None)
    assert connection.names == []
    tree.on_module_end("outer", None)
    assert connection.names == ["outer"]
    assert program_in(tree, "outer", connection) == ("", None)


def test_calls_outside_of_any_module_are_no_program() -> None:
    tree = CallTree()
    begin(tree, "lm", "lm", None)
    assert program_in(tree, "lm", Answer()) == ("", None)
    begin(tree, "tool", "tool", None)
    begin(tree, "lm", "lm in tool", "tool")
    assert program_in(tree, "lm in tool", Answer()) == ("", None)


def test_what_evaluations_and_optimizers_call_are_many_programs() -> None:
    tree, connection = CallTree(), Answer()
    begin(tree, "compile", "compile", None)
    begin(tree, "evaluate", "evaluate", "compile")
    for call_id in ("first", "second"):
        begin(tree, "module", call_id, "evaluate")
        assert program_in(tree, call_id, connection) == (call_id, "throughput")
        tree.on_module_end(call_id, None)
    tree.on_evaluate_end("evaluate", None)
    tree.on_compile_end("compile", None)
    assert connection.names == ["first", "second"]
    begin(tree, "module", "after", None)
    assert program_in(tree, "after", connection) == ("after", None)


def test_calls_whose_end_nobody_tells_are_forgotten() -> None:
    tree, connection = CallTree(), Answer()
    begin(tree, "module", "first", None)
    program_in(tree, "first", connection)
    for number in range(MAX_CALLS):
        begin(tree, "module", str(number), None)
    assert connection.names == ["first"]


def test_saved_settings_find_it_again() -> None:
    assert pickle.loads(pickle.dumps(CALLS)) is CALLS
    ACTIVE_CALL_ID.set(None)
