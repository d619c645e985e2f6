"""The compiler's passes over the ops of a graph.

``folded`` and ``constants_first`` change no text of any state, and so no value:

- Constant variables become text, and consecutive texts of a state one op.
- The ops of a state run one after the other, but a ``Set`` does not touch the state's text. Where it waits
  for a variable, it moves behind the constant text and the role marks that follow, up to the op that needs
  it, so that the longest constant prefix of the state is computed first.

``moves`` finds changes of the text itself (SGLang, appendix D): in a turn, constant passages move before the
first passage with a variable, so that runs with other values share a longer prefix. Only a judge can say
whether the meaning stays.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Final, NamedTuple

import msgspec

from agentflow.errors import AgentflowError
from agentflow.protocol import ops
from agentflow.protocol.op_table import references
from agentflow.protocol.text.transform import apply_transforms

# A passage ends with its line, or with a sentence. A label such as ``Essay:`` belongs to the next passage.
_PASSAGE_END: Final = re.compile(r"\n+|(?<=[.!?])[ \t]+")
_IS_LABEL: Final = re.compile(r":\s*\Z")


def folded(sequence: Sequence[ops.Op], outputs: set[int]) -> list[ops.Op]:
    """The ops without constant variables: references to them become text. ``outputs`` stay."""
    constants: dict[int, str] = {}
    found: list[ops.Op] = []
    for op in sequence:
        if isinstance(op, ops.Text | ops.Set):
            op = msgspec.structs.replace(op, parts=_folded(op.parts, constants))
        if isinstance(op, ops.Set) and not references(op):
            constants[op.var] = "".join([part for part in op.parts if isinstance(part, str)])
        found.append(op)
    needed = outputs.union(*map(references, found))  # also where a transform fails, as it does in a run
    return [op for op in found if not (isinstance(op, ops.Set) and op.var in constants.keys() - needed)]


def _folded(parts: ops.Parts, constants: Mapping[int, str]) -> ops.Parts:
    found: list[str | ops.Ref] = []
    for part in parts:
        if isinstance(part, ops.Ref) and part.var in constants:
            with suppress(AgentflowError):
                part = apply_transforms(constants[part.var], part.transforms)
        if isinstance(part, str) and found and isinstance(found[-1], str):
            found[-1] += part
        elif part != "":
            found.append(part)
    return tuple(found)


def constants_first(sequence: Sequence[ops.Op]) -> list[ops.Op]:
    """The ops with each ``Set`` that refers to variables behind the constant text that follows in its
    state."""
    # The new order: an op's index, or for a moved op the index of the op that it follows.
    order: list[tuple[int, int, int]] = [(index, 0, index) for index in range(len(sequence))]
    later: dict[int, list[int]] = {}  # state → its later ops, the last one first
    users: dict[int, tuple[int, int, int]] = {}  # variable → the first op that needs it
    for index in range(len(sequence) - 1, -1, -1):
        op = sequence[index]
        state = getattr(op, "state", None)
        if isinstance(op, ops.Set) and references(op):
            limit = users.get(op.var)
            for after in reversed(later.get(op.state, [])):
                place = (after, 1, index)
                if not _is_constant(sequence[after]) or (limit is not None and place >= limit):
                    break
                order[index] = place
        elif state is not None:
            later.setdefault(state, []).append(index)
        for variable in references(op):
            users[variable] = min(order[index], users.get(variable, order[index]))
    return [sequence[place[2]] for place in sorted(order)]


def _is_constant(op: ops.Op) -> bool:
    return isinstance(op, ops.Begin | ops.End) or (isinstance(op, ops.Text) and not references(op))


def merge_texts(sequence: Sequence[ops.Op]) -> list[ops.Op]:
    """The ops with consecutive texts of a state merged into the first, unless the later one refers to a
    variable that is declared in between."""
    found: list[ops.Op] = []
    last_text: dict[int, int] = {}  # state → index of the text that its stream ends with
    declared_at: dict[int, int] = {}
    for op in sequence:
        state = getattr(op, "state", None)
        at = last_text.get(state) if state is not None else None
        if isinstance(op, ops.Text) and at is not None and all(declared_at[v] < at for v in references(op)):
            earlier = found[at]
            assert isinstance(earlier, ops.Text)
            found[at] = ops.Text(op.state, _folded((*earlier.parts, *op.parts), {}))
            continue
        if isinstance(op, ops.Text):
            last_text[op.state] = len(found)
        elif state is not None:
            last_text.pop(state, None)
        if isinstance(op, ops.Declaring):
            declared_at[op.var] = len(found)
        found.append(op)
    return found


class Move(NamedTuple):
    """A text op with its constant passages first. ``old`` and ``new``: its text, with the names of variables
    in braces."""

    at: int  # the place of the op in the graph
    op: ops.Text
    old: str
    new: str


def moves(sequence: Sequence[ops.Op], names: Mapping[int, str]) -> Iterator[Move]:
    """Yields the texts with passages to move, of turns of the system and the user, and outside of turns."""
    roles: dict[int, str] = {}
    for index, op in enumerate(sequence):
        match op:
            case ops.Begin():
                roles[op.state] = op.role
            case ops.End():
                roles.pop(op.state, None)
            case ops.Fork():
                roles |= {child: roles[op.state] for child in op.children if op.state in roles}
            case ops.Text() if roles.get(op.state, "user") in ("system", "user"):
                parts = _constants_before_variables(op.parts)
                if parts != op.parts:
                    moved = ops.Text(op.state, parts)
                    yield Move(index, moved, _shown(op.parts, names), _shown(parts, names))


def _shown(parts: ops.Parts, names: Mapping[int, str]) -> str:
    return "".join([part if isinstance(part, str) else f"{{{names[part.var]}}}" for part in parts])


def _constants_before_variables(parts: ops.Parts) -> ops.Parts:
    """The parts with constant passages before those with variables. The white space between passages stays in
    its place, as does a label at the end, which the model continues."""
    passages, ends = _passages(parts)
    last = passages.pop() if _is_label(passages[-1]) else None
    constant = [passage for passage in passages if not _has_variable(passage)]
    variable = [passage for passage in passages if _has_variable(passage)]
    ordered = [*constant, *variable, *([last] if last is not None else [])]
    return _folded(
        tuple([part for passage, end in zip(ordered, ends, strict=True) for part in (*passage, end)]), {}
    )


def _passages(parts: ops.Parts) -> tuple[list[list[str | ops.Ref]], list[str]]:
    """The passages, and the white space after each. A label and the passage after it are one."""
    passages: list[list[str | ops.Ref]] = [[]]
    ends: list[str] = []
    for part in parts:
        if isinstance(part, ops.Ref):
            passages[-1].append(part)
            continue
        start = 0
        for found in _PASSAGE_END.finditer(part):
            passages[-1].append(part[start : found.start()])
            start = found.end()
            if _is_label(passages[-1]) or not any(passages[-1]):
                passages[-1].append(found[0])
            else:
                ends.append(found[0])
                passages.append([])
        passages[-1].append(part[start:])
    if any(passages[-1]) or not ends:
        ends.append("")
    else:
        passages.pop()
    return passages, ends


def _is_label(passage: list[str | ops.Ref]) -> bool:
    last = next((part for part in reversed(passage) if part), "")
    return isinstance(last, str) and _IS_LABEL.search(last) is not None


def _has_variable(passage: list[str | ops.Ref]) -> bool:
    return any(isinstance(part, ops.Ref) for part in passage)
