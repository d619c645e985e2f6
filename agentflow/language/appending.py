"""What a state takes: text, generations, turns, and what else goes into its stream of ops."""

from __future__ import annotations

import json
from abc import abstractmethod
from typing import TYPE_CHECKING, Any, Self, TypeVar, get_args, overload

from agentflow.errors import BadArgument, NotSupported, StateClosed, UnknownVariable
from agentflow.language.appenders import Appenders
from agentflow.language.backlog import Backlog
from agentflow.language.expressions import Appendable, GenExpression, ImageExpression, Sequence_
from agentflow.language.program_line import LineTable, ProgramLine, calling_line
from agentflow.language.recorder import Recorder
from agentflow.language.reference import Reference
from agentflow.language.transcript import Content, Transcript, TurnContent
from agentflow.language.turn import Turn
from agentflow.language.values import TEXT, ValueType
from agentflow.language.variable import Variable
from agentflow.protocol import ops
from agentflow.protocol.chat import CalledTool, Message
from agentflow.protocol.ops import Objective, ReadWhat, Role
from agentflow.protocol.seeds import place_of
from agentflow.protocol.transform import apply_in_turn
from agentflow.runtime.limits import limit_op

if TYPE_CHECKING:
    from agentflow.language.run import Run
    from agentflow.language.session import Session
    from agentflow.language.state import State

ValueT = TypeVar("ValueT")

FIRST_MAPPED = 2**52
"""A variable's number beyond this stands for its ``map`` where a failure names its op."""

Path = tuple[int, ...]
"""Where a state stands in its fork tree: () is the root, (2,) its third branch, (2, 0) a branch of that."""


class Appending:
    """The part of ``State`` that puts ops into its stream, and finds the variables that they declare."""

    def __init__(self, run: Run, state_id: int, path: Path, parent: State | None) -> None:
        self.session: Session = run.session
        self.path = path
        self.transcript: Transcript = Transcript(parent.transcript if parent is not None else None)
        self._run = run
        self._id = state_id
        self._names: dict[str, Variable[Any]] = dict(parent._names) if parent is not None else {}
        self._own: list[Variable[Any]] = []
        self._closed: str | None = None
        self._is_sealed = False
        self._num_gens = 0
        self._backlog = Backlog()
        self._lines = LineTable()
        self._mapped_lines: dict[int, ProgramLine | None] = {}  # variable of a map → where
        self._appenders = Appenders()

    @property
    def id(self) -> int:
        """Its number in the session. For the session."""
        return self._id

    @property
    def run(self) -> Run:
        """The run it belongs to. For the session."""
        return self._run

    def __iadd__(self, item: Appendable) -> Self:
        return self.add(item)

    def add(self, item: Appendable) -> Self:
        """``s += item``, for where Python's rebinding gets in the way. Gives the state.

        >>> def ask(question: str) -> None:
        ...     s.add(af.user(question)).add(af.assistant(af.gen("answer", max_tokens=32)))
        >>> ask("What do plants do?")
        """
        recorder = self._recorder()
        recorder.add(item)
        self._take(recorder)
        return self

    def begin(self, role: Role) -> None:
        """Opens a turn; what is appended from now on is in it, until ``end``. ``BadArgument`` for a role
        that there is not, or inside another turn.

        >>> s.begin("user")
        >>> s += "What do plants do?"
        >>> s.end()
        """
        if role not in get_args(Role):
            raise BadArgument(f"begin({role!r}): a turn is one of {', '.join(get_args(Role))}")
        recorder = self._recorder()
        recorder.begin(role)
        self._take(recorder)

    def end(self) -> None:
        """Closes the open turn, which ``begin`` has opened.

        >>> s.begin("assistant")
        >>> s += af.gen("answer")
        >>> s.end()
        """
        recorder = self._recorder()
        recorder.end()
        self._take(recorder)

    def system(self) -> Turn:
        """A system turn around what the block appends.

        >>> async with flow.state() as s, s.system():
        ...     s += "You are a strict judge of essays."
        """
        return Turn(self, "system")

    def user(self) -> Turn:
        """A user turn around what the block appends.

        >>> async with s.user():
        ...     for line in essays:
        ...         s += f"- {line}\\n"
        """
        return Turn(self, "user")

    def assistant(self) -> Turn:
        """An assistant turn around what the block appends, in which the program may wait.

        >>> async with s.assistant():
        ...     s += "The answer is " + af.gen("answer", stop=".")
        ...     print(await s["answer"])
        Plants turn light into sugar
        """
        return Turn(self, "assistant")

    def tool(self) -> Turn:
        """A tool's turn around what the block appends.

        >>> async with s.tool():
        ...     s += weather("Oslo")
        """
        return Turn(self, "tool")

    def set(self, name: str, value: str | Reference[Any] | Sequence_) -> Variable[str]:
        """A variable with a text of the program's own; the state's text stays as it is. ``value`` may hold
        variables, which need not be there yet.

        >>> question = s.set("question", f"What follows from {s['answer']}")
        >>> await question
        'What follows from Plants turn light into sugar.'
        """
        if not isinstance(name, str) or not name:
            raise BadArgument(f"set({name!r}, …): give the variable a name")
        parts = value.parts if isinstance(value, Sequence_) else (value,)
        if not all(isinstance(part, str | Reference) for part in parts):
            raise BadArgument(f"set({name!r}, {value!r}): the value must be text, which may hold variables")
        recorder = self._recorder()
        recorder.set(name, [part for part in parts if isinstance(part, str | Reference)])
        self._take(recorder)
        return self._names[name]

    def text(self) -> Variable[str]:
        """All that the state holds here, once that is there: the template's marks included. Of a sealed
        branch too, until its run ends (``StateClosed`` where very many have been sealed since).

        >>> async with flow.state() as s:
        ...     s += af.user("Hello")
        ...     print(await s.text())
        <user>Hello</user>
        """
        return self._read("text", TEXT)

    def token_ids(self) -> Variable[list[int]]:
        """The token ids that the state holds here, as ``text``; ``NotSupported`` where the backend has none.

        >>> ids = await s.token_ids()
        >>> all(isinstance(token_id, int) for token_id in ids)
        True
        """
        return self._read("token_ids", ValueType("list of token ids", None, json.loads))

    def _read(self, what: ReadWhat, value_type: ValueType) -> Variable[Any]:
        if not (self._is_sealed and self.session.state_of(self._id) is not None):
            self._check_appendable()
        self.session.check_alive()
        recorder = Recorder(self)
        variable = recorder.read(what, value_type)
        self._take(recorder)
        return variable

    async def messages(self) -> list[dict[str, Any]]:
        """The conversation so far as chat APIs have it, ``{"role": …, "content": …}``, and as
        ``af.conversation`` takes it: what a reply calls is its turn's ``tool_calls``. Waits for what is being
        generated. Text outside turns is in none of them. ``NotSupported`` where a turn holds an image.

        >>> (await s.messages())[0]
        {'role': 'user', 'content': 'What do plants do?'}
        """
        turns = self.transcript.turns()
        if any(isinstance(part, ImageExpression) for turn in turns for part in turn.content):
            raise NotSupported("messages() gives texts, and this conversation holds an image")
        return [(await _message_of(turn)).as_dict() for turn in turns]

    def hint(
        self,
        *,
        objective: Objective | None = None,
        output_tokens: int | None = None,
        forks: int | None = None,
        deadline_s: float | None = None,
    ) -> None:
        """What the program knows and the backend cannot: whether somebody waits for the next generations
        (``objective="latency"``) or only the sum of all counts (``"throughput"``), how many tokens they
        will have, how many ``forks`` come next, in how many seconds from now they should be done
        (``deadline_s``; the first deadline goes first). Changes no result.

        >>> s.hint(objective="throughput", output_tokens=64)
        """
        if objective not in (None, *get_args(Objective)):
            raise BadArgument(f"hint: objective must be latency or throughput, not {objective!r}")
        ops.check_hint(output_tokens, forks, deadline_s)
        recorder = self._recorder()
        recorder.ops.append(ops.Hint(self._id, objective, output_tokens, forks, deadline_s))
        self._take(recorder)

    def limit(self, *, deadline_s: float | None = None, output_tokens: int | None = None) -> None:
        """From now on this state and its forks may take so many seconds, and generate so many tokens
        together. What goes on after that fails with ``DeadlineExceeded`` or ``BudgetExceeded``.

        >>> s.limit(deadline_s=30, output_tokens=1000)
        """
        self._check_open()
        self.session.send([limit_op(self._id, deadline_s, output_tokens)])

    @overload
    def __getitem__(self, name: GenExpression[ValueT]) -> Variable[ValueT]: ...
    @overload
    def __getitem__(self, name: str) -> Variable[Any]: ...
    def __getitem__(self, name: Any) -> Variable[Any]:
        wanted = name.name if isinstance(name, GenExpression) else name
        found = self._names.get(wanted) if isinstance(wanted, str) else None
        if found is None:
            known = ", ".join(repr(known) for known in self._names) or "none yet"
            raise UnknownVariable(
                f"this state has no variable {wanted!r} (it has: {known}): append its gen first"
            )
        if isinstance(name, GenExpression) and found.value_type is not name.value_type:
            raise UnknownVariable(
                f"the state's variable {wanted!r} is not of this gen: append the gen first, and look its "
                "variable up before another of that name"
            )
        return found

    def __contains__(self, name: object) -> bool:
        return name in self._names

    @abstractmethod
    def new_variable(self, name: str, value_type: ValueType, *, is_shown: bool) -> Variable[Any]:
        """A variable of this state, not declared yet. For the recorder."""

    def seed_place(self, ordinal: int) -> str:
        """Where a gen stands: the path in the fork tree, and the gen's number here. For its seed."""
        return place_of(self.path, self._num_gens + ordinal)

    def line_of(self, number: int) -> ProgramLine | None:
        """The program's line that appended op ``number``, or mapped a variable. For its run."""
        if number > FIRST_MAPPED:
            return self._mapped_lines.get(number - FIRST_MAPPED)
        return self._lines.line_of(number)

    def _recorder(self) -> Recorder:
        self._check_appendable()
        return Recorder(self)

    def _take(self, recorder: Recorder) -> None:
        """Submits what was recorded, all of it or (where that raises) nothing."""
        recorder.flush()
        num_before = self._backlog.num_submitted
        self._submit(recorder.ops)
        self.transcript.extend(recorder.entries, recorder.open_role)
        for variable, expression, num_ops in recorder.declared:
            self._num_gens += isinstance(expression, GenExpression)
            variable.line = self._lines.line_of(num_before + num_ops)
            self._own.append(variable)
            if variable.is_shown:
                self._names[variable.name] = variable
            self._backlog.expect(variable.id, num_before + num_ops)
            self.session.expect(variable)
            self._run.touch(variable)

    def _submit(self, recorded: list[ops.Op]) -> None:
        self._backlog.check_room(len(recorded))
        self.session.send(recorded)
        self._backlog.num_submitted += len(recorded)
        self._lines.add(self._backlog.num_submitted, calling_line())

    def _check_appendable(self) -> None:
        self._check_open()
        if not self.session.is_tracing:
            self._appenders.check()

    def _check_open(self) -> None:
        self.session.check_alive()
        if self._closed is not None:
            raise StateClosed(f"state {self.path} {self._closed}: nothing can be appended to it")


async def _message_of(turn: TurnContent) -> Message:
    begin, content = turn.begin, "".join([await _text_of(part) for part in turn.content])
    calls = [call for calls in turn.calls for call in await _called(calls.source)]
    return Message(
        begin.role, content, tool_calls=tuple(calls), tool_call_id=begin.tool_call_id, name=begin.name
    )


async def _called(source: tuple[CalledTool, ...] | Variable[Any]) -> tuple[CalledTool, ...]:
    if isinstance(source, tuple):
        return source
    await source.settled()
    source.raise_failure()
    return source.tool_calls


async def _text_of(part: Content) -> str:
    assert not isinstance(part, ImageExpression)
    if isinstance(part, str):
        return part
    return await apply_in_turn(await part.source.whole_text(), part.transforms)
