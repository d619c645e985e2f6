"""What was appended to a state, as the client knows it: for ``messages()`` and for joins.

Texts, variables, images, tool calls, and the beginnings and ends of turns, in order. A fork's transcript goes
on from where its parent's was, without a copy.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple, Union

from agentflow.language.expressions import ImageExpression
from agentflow.protocol.chat import CalledTool

if TYPE_CHECKING:
    from agentflow.language.reference import Reference
    from agentflow.language.variable import Variable


class TurnBegins(NamedTuple):
    """A turn of this role begins. ``tool_call_id`` and ``name``: as ``af.Message`` has them."""

    role: str
    tool_call_id: str | None = None
    name: str | None = None


class TurnEnds(NamedTuple):
    """The turn ends."""


class ToolCalls(NamedTuple):
    """The turn calls tools: these, or those of a reply that is a part of it."""

    source: tuple[CalledTool, ...] | Variable[Any]


Content = Union["str", "Reference[Any]", ImageExpression]
Entry = Content | TurnBegins | TurnEnds | ToolCalls


class TurnContent(NamedTuple):
    """A turn, its content not resolved yet."""

    begin: TurnBegins
    content: list[Content]
    calls: list[ToolCalls]


class Transcript:
    """Append-only. ``open_role``: of the turn that is not closed yet."""

    def __init__(self, parent: Transcript | None = None) -> None:
        self._parent = parent
        self._num_inherited = len(parent._entries) if parent is not None else 0
        self._entries: list[Entry] = []
        self.open_role: str | None = parent.open_role if parent is not None else None

    def extend(self, entries: Sequence[Entry], open_role: str | None) -> None:
        """These were appended, and this turn is open after them."""
        self._entries += entries
        self.open_role = open_role

    @property
    def is_empty(self) -> bool:
        """Whether nothing was appended, here or before a fork."""
        return next(self._all(), None) is None

    def own_content(self) -> list[Content]:
        """What was appended since the fork, without the marks of turns."""
        marks = TurnBegins | TurnEnds | ToolCalls
        return [entry for entry in self._entries if not isinstance(entry, marks)]

    def turns(self) -> list[TurnContent]:
        """The turns so far, the open one included. Text outside turns belongs to none."""
        found: list[TurnContent] = []
        is_open = False
        for entry in self._all():
            if isinstance(entry, TurnBegins):
                found.append(TurnContent(entry, [], []))
                is_open = True
            elif isinstance(entry, TurnEnds):
                is_open = False
            elif isinstance(entry, ToolCalls):
                found[-1].calls.append(entry)
            elif is_open:
                found[-1].content.append(entry)
        return found

    def _all(self) -> Iterator[Entry]:
        chain: list[tuple[Transcript, int]] = [(self, len(self._entries))]
        while (parent := chain[-1][0]._parent) is not None:
            chain.append((parent, chain[-1][0]._num_inherited))
        for transcript, length in reversed(chain):
            yield from islice(transcript._entries, length)
