"""Random programs as ops, and their reference model: every variable's text by plain recursion."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field

from hypothesis import strategies as st

from agentflow.errors import EngineFailed, RunFailed
from agentflow.protocol import ops
from agentflow.protocol.events import ErrorInfo
from agentflow.protocol.sampling import GenParams
from agentflow.protocol.text.transform import Transform, apply_transforms

TRANSFORMS = (
    (),
    (Transform("upper"),),
    (Transform("regex", "([a-z]+) is"), Transform("strip")),
    (Transform("json", "a"),),
    (Transform("number"),),
    (Transform("items", "comma.0"), Transform("upper")),
)
ANSWERS = ("yes", "no", "perhaps, who knows", "it depends on what is asked", " so")


def answer(prompt: str) -> str | Exception:
    """The script: answers that depend on the prompt's text alone. Some prompts fail."""
    number = zlib.crc32(prompt.encode())
    return EngineFailed(f"failure {number}") if number % 11 == 0 else ANSWERS[number % len(ANSWERS)]


@dataclass(frozen=True)
class Pause:
    """Lets the loop run for ``num_turns`` turns between two ops."""

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
    is_sealed: bool = False
    is_cancelled: bool = False  # or held to a deadline: it may end at any point
    open_role: ops.Role | None = None

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
    """A program under construction: the ops of a client, in order, and the data of the reference model."""

    def __init__(self) -> None:
        self.script: list[ops.Op | Pause] = []
        self.states: list[PlannedState] = []
        self.variables: dict[int, tuple[PlannedState, int]] = {}  # id → state, and ops before the gen
        self.groups: list[tuple[PlannedState, list[PlannedState]]] = []
        self.provided: dict[int, str | Failure] = {}  # values that the client gives, now or at the end
        self._to_provide: list[int] = []
        self._num_provided: dict[int, int] = {}  # characters that were given in parts
        self._known: dict[tuple[int, int], str | Failure] = {}
        self._next_id = 1
        self._next_ticket = 1

    def new_id(self) -> int:
        self._next_id += 1
        return self._next_id - 1

    def add(self, kind: str, a: int, b: int) -> None:
        """One step; ``a`` and ``b`` choose among the existing states and variables."""
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
                one.is_open = one.is_sealed = False
                one.is_cancelled = True
            self.script.append(ops.Cancel(state.id))
        elif kind == "deadline":
            for one in state.family():
                one.is_cancelled = True
            self.script.append(ops.Limit(state.id, deadline_s=0.0))
        elif kind == "limit":
            self.script.append(ops.Limit(state.id, deadline_s=1e6, output_tokens=1_000_000))
        elif kind == "provide" and self._to_provide:
            self.provide(self._to_provide.pop(b % len(self._to_provide)))
        elif kind == "part" and self._to_provide:
            self._provide_part(self._to_provide[b % len(self._to_provide)], a)
        elif kind == "grow" and self._to_provide:  # in turns, so that a state may wait for the text
            self.script.append(Pause(4))
            self._provide_part(self._to_provide[b % len(self._to_provide)], 3)
            self.script.append(Pause(4))
        elif state.is_open or (state.is_sealed and kind in ("set", "read", "done")):
            self._append(kind, state, b)

    def provide(self, var: int) -> None:
        """The client gives the value of an expected variable, or its failure."""
        given = self.provided[var]
        error = ErrorInfo(EngineFailed.code, given.origin) if isinstance(given, Failure) else None
        rest = "" if isinstance(given, Failure) else given[self._num_provided.get(var, 0) :]
        self.script.append(ops.Provide(var, rest, error))

    def _provide_part(self, var: int, num_chars: int) -> None:
        """The client gives more of the text."""
        given, at = self.provided[var], self._num_provided.get(var, 0)
        text = "in vain" if isinstance(given, Failure) else given
        self.script.append(ops.Provide(var, text[at : at + num_chars], more=True))
        self._num_provided[var] = at + num_chars

    def provide_all(self) -> None:
        """Provides the rest of the expected texts."""
        while self._to_provide:
            self.provide(self._to_provide.pop())

    def _append(self, kind: str, state: PlannedState, b: int) -> None:
        op: ops.Op = ops.Text(state.id, (f"t{b} ",))
        if kind == "reference" and self.variables:
            op = ops.Text(state.id, ("r:", self._ref(b), " "))
        elif kind == "wait" and self._to_provide:
            op = ops.Text(state.id, ("w:", ops.Ref(self._to_provide[b % len(self._to_provide)]), " "))
        elif kind in ("set", "read", "done", "expect"):
            op = self._variable_op(kind, state, b)
        elif kind == "turn":
            state.open_role = ("user", "assistant", "tool")[b % 3] if state.open_role is None else None
            op = ops.Begin(state.id, state.open_role) if state.open_role else ops.End(state.id)
        elif kind == "image":
            op = ops.Image(state.id, "https://example.com/a.png")
        elif kind == "hint":
            op = ops.Hint(state.id, "latency", b + 1, 2)
        elif kind in ("gen", "select"):
            var = self.new_id()
            self.variables[var] = (state, len(state.stream))
            op = (
                ops.Gen(state.id, var, f"v{var}", GenParams())
                if kind == "gen"
                else ops.Select(state.id, var, f"v{var}", ANSWERS)
            )
        elif kind == "fork":
            children = [
                PlannedState(
                    self.new_id(),
                    state,
                    len(state.stream) + 1,
                    open_role=state.open_role,
                    is_cancelled=state.is_cancelled,
                )
                for _ in range(1 + b % 3)
            ]
            state.children += children
            self.states += children
            op = ops.Fork(state.id, tuple(child.id for child in children))
        elif kind == "await":
            op = ops.Await(state.id, self._next_ticket)
            self._next_ticket += 1
        elif kind == "seal":
            state.is_open, state.is_sealed = False, True
            op = ops.Seal(state.id)
        state.stream.append(op)
        self.script.append(op)

    def _ref(self, b: int) -> ops.Ref:
        return ops.Ref(list(self.variables)[b % len(self.variables)], TRANSFORMS[b % 7 % len(TRANSFORMS)])

    def _variable_op(self, kind: str, state: PlannedState, b: int) -> ops.Op:
        """Variables that no model writes."""
        parts = ("set:", self._ref(b), " again ", self._ref(b + 1)) if self.variables else ("nothing",)
        var = self.new_id()
        self.variables[var] = (state, len(state.stream))
        if kind == "set":
            return ops.Set(state.id, var, f"v{var}", parts)
        if kind == "done":
            return ops.Done(state.id, var, f"v{var}")
        if kind == "read":
            return ops.Read(state.id, var, f"v{var}", "text")
        self.provided[var] = Failure("not to be had", is_own=True) if b == 0 else f"given {b}"
        self._to_provide.append(var)
        return ops.Expect(state.id, var, f"v{var}")

    # The reference model.

    def outcome(self, var: int) -> str | Failure:
        """The variable's text, or why it has none, where nothing is cancelled."""
        if var in self.provided:
            return self.provided[var]
        state, num_before = self.variables[var]
        prompt = self._text(state, num_before)
        if isinstance(prompt, Failure):
            return Failure(prompt.origin)
        op = state.stream[num_before]
        if isinstance(op, ops.Set):
            return self._joined(op.parts)
        if isinstance(op, ops.Read):
            return prompt
        if isinstance(op, ops.Done):
            return ""
        answered = answer(prompt)
        return Failure(str(answered), is_own=True) if isinstance(answered, Exception) else answered

    def _joined(self, parts: ops.Parts) -> str | Failure:
        """The text of the parts. A missing value fails before a transform does."""
        text = ""
        pieces = [part if isinstance(part, str) else self.outcome(part.var) for part in parts]
        for piece in pieces:
            if isinstance(piece, Failure):
                return Failure(piece.origin)
        for part, piece in zip(parts, pieces, strict=True):
            assert isinstance(piece, str)
            try:
                text += piece if isinstance(part, str) else apply_transforms(piece, part.transforms)
            except RunFailed as failure:
                return Failure(str(failure))
        return text

    def _text(self, state: PlannedState, num_ops: int) -> str | Failure:
        """The state's text after its first ``num_ops`` ops."""
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
            value = self.outcome(op.var)
            return value if isinstance(value, Failure) else before + value
        if isinstance(op, ops.Text | ops.Set):
            piece = self._joined(op.parts)
            if isinstance(piece, Failure):
                return piece
            return before + piece if isinstance(op, ops.Text) else before
        return before + self._mark(state, num_ops)

    def _mark(self, state: PlannedState, num_ops: int) -> str:
        """The scripted generator's text for turns and images."""
        match state.stream[num_ops - 1]:
            case ops.Begin(role=role):
                return f"<{role}>"
            case ops.End():
                return f"</{self._open_role(state, num_ops - 1)}>"
            case ops.Image():
                return "<image>"
            case _:
                return ""

    def _open_role(self, state: PlannedState, num_ops: int) -> str:
        """The role of the turn that is open after ``num_ops`` ops."""
        for op in reversed(state.stream[:num_ops]):
            if isinstance(op, ops.Begin):
                return op.role
        assert state.parent is not None
        return self._open_role(state.parent, state.forked_after)

    def make_failure(self, state: PlannedState) -> Failure | None:
        """The failure of the state's stream, if nothing is cancelled."""
        end = self._text(state, len(state.stream))
        return end if isinstance(end, Failure) else None

    def _fails(self, var: int) -> bool:
        return self.make_failure(self.variables[var][0]) is not None

    def uncertain_states(self) -> set[int]:
        """States that a cancellation, or the failure of a task group, may end at any point."""
        found = {state.id for state in self.states if state.is_cancelled}
        # A value that a failed state still expects is there if the client was faster.
        found |= {self.variables[var][0].id for var in self.provided if self._fails(var)}
        while True:
            more = set(found)
            for state in self.states:
                if state.parent is not None and state.parent.id in more:
                    more.add(state.id)
                for op in state.stream:
                    if isinstance(op, ops.Text | ops.Set) and any(
                        isinstance(part, ops.Ref) and self.variables[part.var][0].id in more
                        for part in op.parts
                    ):
                        more.add(state.id)
            for parent, members in self.groups:
                if any(member.id in more or self.make_failure(member) for member in members):
                    more |= {parent.id, *(state.id for member in members for state in member.family())}
            if more == found:
                return found
            found = more


CERTAIN = [
    *["open", "text", "text", "reference", "reference", "gen", "gen", "select", "fork", "await", "pause"],
    *["set", "read", "turn", "image", "hint"],
]
ALL = [
    *CERTAIN,
    *["await"] * 3,
    "done",
    "seal",
    "cancel",
    "couple",
    "limit",
    "deadline",
    *["expect", "wait", "grow"] * 2,
    *["part", "provide"],
]


@st.composite
def op_programs(draw: st.DrawFn, kinds: list[str] = ALL, size: int = 40) -> OpProgram:
    """Programs of at least ``size`` steps, with one or more root states. Few shorter ones generate."""
    program = OpProgram()
    step = st.tuples(st.sampled_from(kinds), st.integers(0, 9), st.integers(0, 9))
    for kind, a, b in draw(st.lists(step, min_size=size, max_size=size + 20)):
        program.add(kind, a, b)
    program.provide_all()
    return program
