"""A backend that answers from a script, to test programs without a model.

The frontend and the interpreter are the real ones; only the generator is a fake. The interpreter passes no
names of variables to a generator, so ``_ScriptedConnection`` reads them from the ops that the session sends
and queues them for the contexts of their states.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from agentflow.backends.local import interpreted
from agentflow.backends.scripted_answers import for_name
from agentflow.backends.scripted_generator import GenQueue, Script, ScriptedCall, ScriptedGenerator
from agentflow.errors import ScriptMismatch
from agentflow.protocol import ops
from agentflow.protocol.backend import Backend, Connection, Deliver, Lost
from agentflow.protocol.batches import BatchNotes
from agentflow.protocol.op_table import expanded


class _ScriptedConnection:
    """A connection that tells the generator which gens the program appends, before they run."""

    is_connected = True
    has_room = True

    def __init__(self, connection: Connection, generator: ScriptedGenerator) -> None:
        self.models = connection.models
        self.is_complete = False
        self._connection = connection
        self._generator = generator
        self._queues: dict[int, GenQueue] = {}

    def send(self, sent: Sequence[ops.Op]) -> None:
        for op in sent:
            self._read(op)
            self._connection.send([op])

    def end(self, error: BaseException | None) -> None:
        self.is_complete = error is None
        self._connection.end(error)

    def _read(self, op: ops.Op) -> None:
        match op:
            case ops.Open():
                queue = self._queues[op.state] = deque()
                self._generator.will_open(queue)
            case ops.Fork():
                branches: list[GenQueue] = [deque() for _ in op.children]
                self._queues |= zip(op.children, branches, strict=True)
                self._queues[op.state].append(branches)
            case ops.Gen() | ops.Select() | ops.Decide():
                self._queues[op.state].append(self._generator.sent_gen(op.name))
            case ops.SubmitGraph():
                for part in expanded(op):
                    self._read(part)
            case ops.Close():
                self._queues.pop(op.state, None)
            case _:
                pass


class Scripted:
    """A backend to test programs without a model: it answers from a script.

    An answer is a text; or a value (a dataclass, a pydantic model, a dict, a number), which is written as
    JSON; or for ``af.reply`` an ``af.Reply``, an ``af.ToolCall`` or a tuple of these; or an exception, which
    is raised. (For a variable, a value that is a list stands in another list.) The answer to a decide is a
    mapping of its questions to their answers, or to a mapping of all answers to their probabilities. An
    answer that violates the choices, the ``regex`` or the ``tags`` of its op raises ``ScriptMismatch``. With
    a ``schema``, it must be JSON; the type of the schema checks the value when it is read, so that a script
    can test invalid values. A ``grammar`` is not checked.

    Args:
        script: Answers by the name of the variable; or a list of answers in the order in which the program
            appends its gens and selects; or one text, which is a list of one answer; or a function of the
            ``ScriptedCall``. For a variable, a list has
            its answers in order, a function is called, and any other answer is given every time.
        strict: A session that ends without an exception raises ``ScriptMismatch`` if an answer is left.

    >>> backend = af.Scripted({"judgment": ["It is clear.", "It has no sources."], "grade": "B"})
    >>> async with af.session(backend=backend) as flow:
    ...     print(await flow.run(judge, essay))
    B
    >>> "It has no sources." in backend.prompts[-1]
    True
    """

    def __init__(self, script: Script, *, strict: bool = False) -> None:
        self.generator = ScriptedGenerator(script)
        self._is_strict = strict

    @property
    def calls(self) -> list[ScriptedCall]:
        """The generations that have begun, in the order in which the program appended them: the latest
        10,000.

        >>> backend = af.Scripted({"judgment": "It is clear.", "grade": "B"})
        >>> async with af.session(backend=backend) as flow:
        ...     grade = await flow.run(judge, essay)
        >>> [(call.name, call.answer) for call in backend.calls]
        [('judgment', 'It is clear.'), ('judgment', 'It is clear.'), ('grade', 'B')]
        """
        return [call for _, call in sorted(self.generator.calls.items())]

    @property
    def prompts(self) -> list[str]:
        """The texts of the calls' prompts, with turns as ``<user>…</user>``.

        >>> backend = af.Scripted("Light, water and air.")
        >>> async with af.session(backend=backend) as flow, flow.state() as s:
        ...     s += af.user("What do plants live on?") + af.assistant(af.gen("answer"))
        ...     await s
        >>> backend.prompts
        ['<user>What do plants live on?</user><assistant>']
        """
        return [str(call) for call in self.calls]

    def check_used(self) -> None:
        """Raises ``ScriptMismatch`` if the script has answers that no generation has used.

        >>> af.Scripted({"grade": "B"}).check_used()
        Traceback (most recent call last):
        ScriptMismatch: the script has unused answers: 1 for 'grade'
        """
        left = self.generator.unused()
        if left:
            listed = ", ".join(f"{count}{for_name(name)}" for name, count in left.items())
            raise ScriptMismatch(f"the script has unused answers: {listed}")

    def batches(self, notes: BatchNotes) -> Backend:
        """Answers the calls of a map in batches like all others. For the session."""
        return _ScriptedBatches(self.generator)

    @asynccontextmanager
    async def connect(self, deliver: Deliver, lost: Lost) -> AsyncIterator[Connection]:
        """Opens the backend. For the session."""
        async with interpreted(self.generator, deliver) as connection:
            scripted = _ScriptedConnection(connection, self.generator)
            yield scripted
            if self._is_strict and scripted.is_complete:
                self.check_used()


class _ScriptedBatches:
    """The backend of one map in batches. The session checks whether the script was used."""

    def __init__(self, generator: ScriptedGenerator) -> None:
        self._generator = generator

    @asynccontextmanager
    async def connect(self, deliver: Deliver, lost: Lost) -> AsyncIterator[Connection]:
        async with interpreted(self._generator, deliver) as connection:
            yield _ScriptedConnection(connection, self._generator)
