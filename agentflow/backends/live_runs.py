"""The runs of a program under replay, and which recorded run each of them is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from agentflow.protocol import ops
from agentflow.recording.places import Content, Node, Path
from agentflow.recording.runs import RecordedRun, RecordedState


class LiveState(Node):
    """A state of the program that runs now. ``recorded``: which one it is; None where it is not known yet,
    and below an op that was not recorded."""

    def __init__(self, run: int, path: Path, parent: LiveState | None) -> None:
        super().__init__(run, path, parent)
        self.above = parent
        self.id = 0
        self.recorded: RecordedState | None = None
        self.num_ops = 0  # compared
        self.num_kept = 0  # until its run was known
        self.groups: set[Content] = set()
        self.has_failed = False

    @property
    def is_loose(self) -> bool:
        """Whether a failure or a cancellation decides how much it gets."""
        recorded = self.recorded
        return self.is_cancelled or (recorded is not None and recorded.is_loose)

    def place(self, position: int | None = None) -> str:
        """Where it is, for messages; with the number of one of its ops."""
        recorded = self.recorded
        is_other = recorded is not None and recorded.run != self.run
        run = f"run {self.run}{f' (recorded as run {recorded.run})' if recorded and is_other else ''}"
        return f"{run}, state {self.path}" + ("" if position is None else f", op {position}")


@dataclass(frozen=True, slots=True)
class KeptOp:
    """An op of content that waits until its run is known."""

    state: LiveState
    op: ops.Op
    content: Content
    children: list[LiveState]


@dataclass(slots=True)
class LiveRun:
    """``recorded``: which one it is, once that is known; until then ``kept`` is what was sent."""

    root: LiveState
    recorded: RecordedRun | None = None
    kept: list[KeptOp] = field(default_factory=list)


class LiveRuns:
    """Pairs runs with recorded ones: by what they were sent, and where several fit, by their number."""

    def __init__(self, recorded: list[RecordedRun]) -> None:
        self.unused = {run.index: run for run in recorded}
        self._runs: list[LiveRun] = []

    def __len__(self) -> int:
        return len(self._runs)

    def __getitem__(self, index: int) -> LiveRun:
        return self._runs[index]

    def add(self, root: LiveState) -> None:
        """A new run."""
        self._runs.append(LiveRun(root))

    def recorded_index(self, index: int) -> int:
        """The number of the recorded run; of one that is not known, a number that none has."""
        recorded = self._runs[index].recorded
        return recorded.index if recorded is not None else -1 - index

    def likely(self, run: LiveRun) -> RecordedRun | None:
        """The recorded run of the same number, if it is still to be had."""
        return self.unused.get(run.root.run)

    def identify(
        self,
        run: LiveRun,
        latest: Sequence[tuple[Path, Content]],
        is_likelier: Callable[[RecordedRun, int], bool],
    ) -> bool:
        """Pairs ``run``, of which ``latest`` was sent after what it keeps. ``is_likelier`` chooses among
        those that fit, given how much was sent. Where none fits, it is paired with one all the same, so
        that the difference can be named. False: all are taken."""
        likely = self.likely(run)
        candidates = [likely] if likely is not None else []
        candidates += [other for other in self.unused.values() if other is not likely]
        if not candidates:
            return False
        sent = [(kept.state.path, kept.content) for kept in run.kept] + [*latest]
        fitting = [other for other in candidates if _fits(other, sent)] or candidates
        run.recorded = next((other for other in fitting if is_likelier(other, len(sent))), fitting[0])
        del self.unused[run.recorded.index]
        run.root.recorded = run.recorded.root
        return True


def _fits(run: RecordedRun, sent: list[tuple[Path, Content]]) -> bool:
    """Whether the recorded run began with these ops."""
    num_ops: dict[Path, int] = {}
    for path, content in sent:
        position = num_ops.get(path, 0)
        num_ops[path] = position + 1
        state = run.states.get(path)
        if state is None:  # forked by an op that was not recorded: that one must fit
            continue
        if position >= len(state.ops):
            if not state.is_loose:
                return False
        elif state.ops[position].content != content:
            return False
    return True
