"""Shows a state in a notebook, and redraws it while something in it is generated."""

from __future__ import annotations

import logging
import sys
from contextlib import suppress
from importlib import import_module
from typing import Any, Final

import anyio

from agentflow.language.display.html import as_html
from agentflow.language.display.terminal import as_text, show
from agentflow.language.states.event_stream import EventStream, StreamedVariable
from agentflow.language.states.outliner import outline_state
from agentflow.language.states.run import StateNode, VariableNode

logger = logging.getLogger(__name__)

S_BETWEEN_DRAWINGS: Final = 0.1


def in_notebook() -> bool:
    """Whether the code runs in a Jupyter kernel, whose displays can be updated."""
    ipython = sys.modules.get("IPython")  # imported wherever a kernel runs
    shell = ipython.get_ipython() if ipython is not None else None
    return shell is not None and getattr(shell, "kernel", None) is not None


def show_state(node: StateNode) -> None:
    """Shows the state on stdout; in a notebook below the cell, redrawn while it is generated."""
    if not in_notebook():
        show(outline_state(node))
        return
    cell = import_module("IPython.display").display(_bundle(node), raw=True, display_id=True)
    if is_running(node) and node.link.is_alive:
        node.link.start_soon(_follow, node, cell)


def is_running(node: StateNode) -> bool:
    """Whether something in the state, its branches or its parents is being generated."""
    return any(not variable.is_done for variable in _variables(node))


def _variables(node: StateNode) -> list[VariableNode]:
    found: list[VariableNode] = []
    parent = node.parent
    while parent is not None:
        found += parent.own
        parent = parent.parent
    pending = [node]
    while pending:
        state = pending.pop()
        found += state.own
        pending += state.children
    return found


def _bundle(node: StateNode) -> dict[str, str]:
    outline = outline_state(node)
    return {"text/html": as_html(outline), "text/plain": as_text(outline)}


class _Changes(EventStream):
    """Wakes its reader whenever a variable changes; it does not say which one."""

    def touch(self, variable: StreamedVariable) -> None:
        self.wake()


async def _follow(node: StateNode, cell: Any) -> None:
    """Redraws the state until everything in it is done, or the session ends."""
    changes = _Changes(lambda: False)
    node.run.streams.add(changes)
    try:
        while is_running(node):
            await changes.change()
            await anyio.sleep(S_BETWEEN_DRAWINGS)  # noqa: TID251  # a longer pause than between tokens
            if is_running(node):
                cell.update(_bundle(node), raw=True)
    except Exception:
        logger.exception("a state could not be drawn")
    finally:
        with suppress(Exception):
            cell.update(_bundle(node), raw=True)
