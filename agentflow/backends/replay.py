"""A backend that answers from a recording, without a model, as long as the program does what it did.

**What is compared.** Each op of content (text, turns, gens with all their parameters, selects, forks)
with the one that was recorded at the same place: the run, the path in its fork tree, the ordinal in the
state's stream. Numbers of states and variables are not compared: they follow from how branches happened
to interleave. References are compared by what they refer to. When a state is closed, all that was
recorded for it must have come; when the session is left, all runs.

**What is not.** Awaits change nothing, and are answered wherever they stand. ``Cancel`` and ``Seal`` act
at once, so when they come is a matter of timing. Task groups are compared as a set for each state. What
a branch was sent before a failure elsewhere, or a cancellation, reached it may differ, too: such a
state may get fewer ops than were recorded, and more.

**Which run is which.** Runs that go side by side may begin in another order (trio shuffles its tasks).
A run is taken for a recorded one when it first asks for an answer, by what it was sent until then; of
several that fit, for the one that began at the same point. So runs side by side that differ only after
their first answer must begin in the recorded order. Seeds that follow from the session's seed and the
place are equal for equal places.

**What the client cannot see again.** A variable whose state the program cancelled gets no more answers
than it had at that time, so a program that cancels after some seconds waits for them once more. Two
tasks that append to the same state must do so in the recorded order. A variable of a run that has
ended is text where it is appended, and a reference before that.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from os import PathLike

from agentflow.backends.agenda import Agenda
from agentflow.backends.replay_connection import ReplayConnection
from agentflow.errors import BadArgument
from agentflow.protocol.backend import Backend, Connection, Deliver, Lost
from agentflow.recording.file import read_recording
from agentflow.recording.runs import RecordedRuns
from agentflow.runtime.task_group import open_task_group


class Replay:
    """A backend that gives the answers of a recording, as long as the program does what it did.

    Raises ``BadRecording`` for a file that is none. At the first difference the session ends with
    ``ReplayDiffers``, which says where it is, what was recorded and what came. May be used for several
    sessions.

    >>> async with af.session(record="run.jsonl") as flow:
    ...     first = await flow.run(judge, essay)
    >>> replay = af.Replay("run.jsonl")
    >>> async with af.session(backend=replay) as flow:
    ...     print(flow.seed == replay.seed, await flow.run(judge, essay) == first)
    True True
    """

    def __init__(self, path: str | PathLike[str]) -> None:
        self._recording = read_recording(path)
        self._runs = RecordedRuns(self._recording)

    @property
    def seed(self) -> int:
        """The seed of the session that was recorded."""
        return self._recording.header.seed

    @asynccontextmanager
    async def connect(self, deliver: Deliver, lost: Lost) -> AsyncIterator[Connection]:
        """Opens it. For the session."""
        agenda = Agenda(self._runs.expected, self._runs.batches)
        connection = ReplayConnection(self._recording, self._runs, agenda, deliver, lost)
        async with open_task_group() as group:
            group.start_soon(agenda.run, connection.flush)
            try:
                yield connection
                if connection.is_complete:
                    connection.finish()
            finally:
                group.cancel_scope.cancel()


def replayed_seed(backend: Backend, seed: int | None) -> int | None:
    """The seed of a session on ``backend``: of a replay, the recorded one. ``BadArgument`` where another
    is asked for."""
    if not isinstance(backend, Replay) or seed == backend.seed:
        return seed
    if seed is not None:
        raise BadArgument(
            f"session: the recording was made with seed {backend.seed}, and its replay uses that one: "
            f"leave out seed={seed}"
        )
    return backend.seed
