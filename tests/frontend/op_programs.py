"""Random programs as ops, and their twin: every variable's text by plain recursion, one after the other."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field

from hypothesis import strategies as st

from agentflow import ops
from agentflow.errors import EngineFailed
from agentflow.sampling import SamplingParams

ANSWERS = ("yes", "no", "perhaps, who knows", "it depends on what is asked", " so")


def answer(prompt: str) -> str | Exception:
    """The script: what follows from the prompt's text alone. Some prompts fail."""
    number = zlib.crc32(prompt.encode())
    return EngineFailed(f"failure {number}") if number % 11 == 0 else ANSWERS[number % len(ANSWERS)]


@dataclass(frozen=True)
class Pause:
    """Lets the loop run for so many turns between two ops."""

    num_turns: int


@dataclass
class PlannedState:
    """One state as its client sees it: the ops of its stream, and where it was forked."""

    id: int
    parent: PlannedState | None = None
    forked_after: int = 0  # ops of the parent
    stream: list[ops.Op] = field(default_factory=list)
    children: list[PlannedState] = field(default_factory=list)
    is_open: bool = True
    is_cancelled: bool = False

    def family(self) -> list[PlannedState]:
        """Itself and everything that was forked from it."""
        return [self, *(state for child in self.children for state in child.family())]


@dataclass
class Failure:
    """Why a variable has no value: ``origin`` is the message of the first failure; ``is_own``: it is
    this variable's."""

    origin: str
    is_own: bool = False


class OpProgram:
    """A program under construction: what a client submits, in order, and what the twin needs."""

    def __init__(self) -> None:
        self.script: list[ops.Op | Pause] = []
        self.states: list[PlannedState] = []
        self.variables: dict[int, tuple[PlannedState, int]] = {}  # id → state, and ops before the gen
        self.groups: list[tuple[PlannedState, list[PlannedState]]] = []
        self._known: dict[tuple[int, int], str | Failure] = {}
        self._next_id = 1
        self._next_ticket = 1

    def new_id(self) -> int:
        self._next_id += 1
        return self._next_id - 1

    def add(self, kind: str, a: int, b: int) -> None:
        """One step; ``a`` and ``b`` choose among what there is."""
        if kind == "open" or not self.states:
            self.states.append(PlannedState(self.new_id()))
            self.script.append(ops.Open(self.states[-1].id))
            return
        state = self.states[a % len(self.states)]
        if kind == "pause":
            self.script.append(Pause(b % 5))
        elif kind == "couple" and len(state.children) > 1:
            self.groups.append((state, list(state.children)))
            self.script.append(ops.TaskGroup(state.id, tuple(child.id for child in state.children)))
        elif kind == "cancel":
            for one in state.family():
                one.is_open, one.is_cancelled = False, True
            self.script.append(ops.Cancel(state.id))
        elif state.is_open:
            self._append(kind, state, b)

    def _append(self, kind: str, state: PlannedState, b: int) -> None:
        op: ops.Op = ops.Text(state.id, (f"t{b} ",))
        if kind == "reference" and self.variables:
            var = list(self.variables)[b % len(self.variables)]
            op = ops.Text(state.id, ("r:", ops.Ref(var), " "))
        elif kind in ("gen", "select"):
            var = self.new_id()
            self.variables[var] = (state, len(state.stream))
            op = (
                ops.Gen(state.id, var, f"v{var}", SamplingParams())
                if kind == "gen"
                else ops.Select(state.id, var, f"v{var}", ANSWERS)
            )
        elif kind == "fork":
            children = [PlannedState(self.new_id(), state, len(state.stream) + 1) for _ in range(1 + b % 3)]
            state.children += children
            self.states += children
            op = ops.Fork(state.id, tuple(child.id for child in children))
        elif kind == "await":
            op = ops.Await(state.id, self._next_ticket)
            self._next_ticket += 1
        elif kind == "seal":
            state.is_open = False
            op = ops.Seal(state.id)
        state.stream.append(op)
        self.script.append(op)

    # The twin.

    def outcome(self, var: int) -> str | Failure:
        """The variable's text, or why it has none, where nothing is cancelled."""
        state, num_before = self.variables[var]
        prompt = self._text(state, num_before)
        if isinstance(prompt, Failure):
            return Failure(prompt.origin)
        said = answer(prompt)
        return Failure(str(said), is_own=True) if isinstance(said, Exception) else said

    def _text(self, state: PlannedState, num_ops: int) -> str | Failure:
        """The state's text after so many of its ops."""
        key = (state.id, num_ops)
        if key not in self._known:
            self._known[key] = self._compute_text(state, num_ops)
        return self._known[key]

    def _compute_text(self, state: PlannedState, num_ops: int) -> str | Failure:
        if num_ops == 0:
            return "" if state.parent is None else self._text(state.parent, state.forked_after)
        before = self._text(state, num_ops - 1)
        op = state.stream[num_ops - 1]
        if isinstance(before, Failure):
            return before
        if isinstance(op, ops.Gen | ops.Select):
            said = self.outcome(op.var)
            return said if isinstance(said, Failure) else before + said
        if isinstance(op, ops.Text):
            for part in op.parts:
                piece = part if isinstance(part, str) else self.outcome(part.var)
                if isinstance(piece, Failure):
                    return Failure(piece.origin)
                before += piece
        return before

    def failure_of(self, state: PlannedState) -> Failure | None:
        """What the state's stream fails with, where nothing is cancelled."""
        end = self._text(state, len(state.stream))
        return end if isinstance(end, Failure) else None

    def uncertain_states(self) -> set[int]:
        """States that a cancellation, or the failure of a task group, may end at any point."""
        found = {state.id for state in self.states if state.is_cancelled}
        while True:
            more = set(found)
            for state in self.states:
                if state.parent is not None and state.parent.id in more:
                    more.add(state.id)
                for op in state.stream:
                    if isinstance(op, ops.Text) and any(
                        isinstance(part, ops.Ref) and self.variables[part.var][0].id in more
                        for part in op.parts
                    ):
                        more.add(state.id)
            for parent, members in self.groups:
                if any(member.id in more or self.failure_of(member) for member in members):
                    more |= {parent.id, *(state.id for member in members for state in member.family())}
            if more == found:
                return found
            found = more


CERTAIN = ["open", "text", "text", "reference", "reference", "gen", "gen", "select", "fork", "await", "pause"]
ALL = [*CERTAIN, "seal", "cancel", "couple"]


@st.composite
def op_programs(draw: st.DrawFn, kinds: list[str] = ALL, max_size: int = 40) -> OpProgram:
    """Programs of one or more root states."""
    program = OpProgram()
    step = st.tuples(st.sampled_from(kinds), st.integers(0, 9), st.integers(0, 9))
    for kind, a, b in draw(st.lists(step, min_size=10, max_size=max_size)):
        program.add(kind, a, b)
    return program
