"""Makes the outline of a state, without waiting: its turns, its branches, and which text was cached.

The backend reports how many tokens of each prompt were cached, not which characters.
``OutlinePiece.cached_chars`` is therefore an estimate: of the text that is new in a prompt, its first part is
cached, in proportion."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from typing import Final

from agentflow.errors import AgentflowError
from agentflow.language.display.outline import (
    ForkOutline,
    LeftOut,
    OutlinePart,
    OutlinePiece,
    StateOutline,
    TurnOutline,
    shorten_items,
)
from agentflow.language.expressions import Expression, MediumExpression, VideoExpression
from agentflow.language.op_log import Content, ToolCalls, TurnBegins, TurnEnds
from agentflow.language.states.run import StateNode
from agentflow.language.states.variable import Reference, find_target
from agentflow.protocol.events import Usage
from agentflow.protocol.text.transform import apply_transforms

MAX_STATES: Final = 64
MAX_BRANCHES: Final = 12
MAX_PICTURE_BYTES: Final = 64_000
"""Larger images are shown by a word only."""


def outline_state(node: StateNode) -> StateOutline:
    """The outline of a state, from the beginning of its root, with its branches."""
    return _Outliner().whole(node)


def known_text(content: Content) -> str:
    """The text so far, or the kind of an image or a video in brackets. Empty if a transform of it fails."""
    if isinstance(content, str):
        return content
    if isinstance(content, MediumExpression):
        return "[video]" if isinstance(content, VideoExpression) else "[image]"
    assert isinstance(content, Reference)
    node, transforms, _ = find_target(content)
    if not transforms:
        return node.text
    try:
        return apply_transforms(node.text, transforms) if node.has_value else ""
    except AgentflowError:
        return ""


class _CacheEstimate:
    """Distributes the cached tokens of a prompt over its new pieces. ``num_tokens``: the tokens of the text
    before these pieces."""

    def __init__(self, num_tokens: int = 0, pieces: Sequence[OutlinePiece] = ()) -> None:
        self.num_tokens = num_tokens
        self.pieces = list(pieces)

    def copy(self) -> _CacheEstimate:
        return _CacheEstimate(self.num_tokens, self.pieces)

    def generated(self, usage: Usage) -> None:
        """The prompt so far had this usage."""
        new = usage.prompt_tokens - self.num_tokens
        cached = max(0, usage.cached_tokens - self.num_tokens)
        num_chars = sum(len(piece.text) for piece in self.pieces)
        left = num_chars if cached >= new else round(num_chars * cached / new)
        for piece in self.pieces:
            piece.cached_chars = max(piece.cached_chars, min(left, len(piece.text)))
            left -= min(left, len(piece.text))
        self.num_tokens = usage.prompt_tokens + usage.output_tokens
        self.pieces = []


class _Outliner:
    def __init__(self) -> None:
        self._num_states_left = MAX_STATES

    def whole(self, node: StateNode) -> StateOutline:
        """The state with its branches, after the content of its parents before their forks."""
        chain = [node]
        while (parent := chain[-1].parent) is not None:
            chain.append(parent)
        estimate = _CacheEstimate()
        parts: list[OutlinePart] = []
        role = ""
        for state, following in zip(chain[:0:-1], chain[-2::-1], strict=True):
            walk = _Walk(state, estimate, role, following.transcript.num_inherited)
            for _ in walk.fork_points(()):
                pass
            _join(parts, walk.parts)
            role = walk.role
        outline = self._state(node, estimate, role)
        _join(parts, outline.parts)
        return StateOutline(node.path, shorten_items(parts), outline.error)

    def _state(self, node: StateNode, estimate: _CacheEstimate, role: str) -> StateOutline:
        forks: dict[int, list[StateNode]] = {}
        for child in node.children:
            if child.is_hidden:
                continue
            forks.setdefault(child.transcript.num_inherited, []).append(child)
        walk = _Walk(node, estimate, role)
        for index in walk.fork_points(forks):
            walk.parts.append(self._fork(forks[index], estimate, walk.role))
        error = node.error.message if node.error is not None else ""
        return StateOutline(node.path, shorten_items(walk.parts), error)

    def _fork(self, children: list[StateNode], estimate: _CacheEstimate, role: str) -> ForkOutline:
        # The branches of this fork are counted before the forks inside of its first branch.
        shown = shorten_items(children, min(MAX_BRANCHES, self._num_states_left))
        self._num_states_left -= sum(isinstance(child, StateNode) for child in shown)
        return ForkOutline(
            [
                child if isinstance(child, LeftOut) else self._state(child, estimate.copy(), role)
                for child in shown
            ]
        )


class _Walk:
    """Walks over the entries of one state. ``role``: the role of the open turn."""

    def __init__(
        self, node: StateNode, estimate: _CacheEstimate, role: str, num_entries: int | None = None
    ) -> None:
        self.parts: list[OutlinePart] = []
        self.role = role
        self._node = node
        self._estimate = estimate
        self._entries = node.transcript.own[:num_entries]
        self._turn = TurnOutline(role, continues=node.parent is not None)
        self._generated: set[int] = set()

    def fork_points(self, points: Container[int]) -> Iterator[int]:
        """Adds the turns to ``parts``, and stops at each index that is among the points."""
        for index, entry in enumerate(self._entries):
            if index in points:
                self._end_turn(self.role)
                yield index
            match entry:
                case TurnBegins(role=role):
                    self._end_turn(role)
                case TurnEnds():
                    self._end_turn("")
                case ToolCalls(source=tuple() as calls):
                    self._turn.calls += calls
                case ToolCalls(source=Reference() as reply):
                    self._turn.calls += find_target(reply).node.tool_calls
                case str() | Expression():
                    self._add(entry)
        self._end_turn(self.role)
        if len(self._entries) in points:
            yield len(self._entries)

    def _end_turn(self, next_role: str) -> None:
        turn = self._turn
        if turn.pieces or turn.calls:
            turn.pieces = shorten_items(turn.pieces)
            self.parts.append(turn)
        self.role = next_role
        self._turn = TurnOutline(next_role)

    def _add(self, content: Content) -> None:
        piece = self._piece(content)
        self._turn.pieces.append(piece)
        if piece.kind != "generated":
            self._estimate.pieces.append(piece)
        elif piece.usage is not None:
            self._estimate.generated(piece.usage)

    def _piece(self, content: Content) -> OutlinePiece:
        text = known_text(content)
        if isinstance(content, MediumExpression):
            shows = text == "[image]" and 0 < len(content.file.data) <= MAX_PICTURE_BYTES
            return OutlinePiece("image", text, picture=content.file.url if shows else "")
        if not isinstance(content, Reference):
            return OutlinePiece("text", text)
        variable, transforms, _ = find_target(content)
        is_own = variable.state is self._node and variable.is_generated
        piece = OutlinePiece("inserted", text, variable.name)
        if is_own and not transforms and variable.id not in self._generated:
            self._generated.add(variable.id)
            piece.kind = "generated"
        piece.is_running = not variable.is_done
        piece.error = variable.error.message if variable.error is not None else ""
        if variable.has_value:
            piece.usage, piece.finish_reason = variable.end.usage, variable.end.finish_reason
        return piece


def _join(parts: list[OutlinePart], more: list[OutlinePart]) -> None:
    """Adds the parts of a state to its parent's parts. A turn that continues is one part."""
    if parts and more:
        before, after = parts[-1], more[0]
        if isinstance(before, TurnOutline) and isinstance(after, TurnOutline) and after.continues:
            pieces = shorten_items([*before.pieces, *after.pieces])
            parts[-1] = TurnOutline(before.role, pieces, before.calls + after.calls, before.continues)
            more = more[1:]
    parts += more
