"""A state, as a program sees it: an append-only stream of ops.

``State`` appends text, generations and turns, and finds the variables that they declare. ``Turn`` is an open
turn around a block, ``Branches`` the states of a fork. ``RootState`` is the state without a program that
``flow.state()`` returns. All of them act on a ``StateNode``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Generator, Mapping, Sequence
from types import TracebackType
from typing import (
    TYPE_CHECKING,
    Any,
    NoReturn,
    Self,
    SupportsIndex,
    TypeAlias,
    TypeVar,
    get_args,
    overload,
)

from agentflow.errors import BadArgument, Cancelled, ForeignState, UnknownVariable, error_param
from agentflow.language.display.html import as_html
from agentflow.language.display.terminal import as_text
from agentflow.language.expressions import (
    Appendable,
    Expression,
    MediumExpression,
    Sequence_,
)
from agentflow.language.failures.mistakes import AsyncOnly, explain, needs_async_for, unknown_variable
from agentflow.language.failures.stack_frames import ProgramLine, calling_line
from agentflow.language.gen import GenExpression, SelectExpression, check_variable_name
from agentflow.language.markers import MARKERS
from agentflow.language.media import check_is_text
from agentflow.language.op_log import Content, TurnContent
from agentflow.language.states.contest import Contest
from agentflow.language.states.event_stream import EventStream
from agentflow.language.states.live_display import in_notebook, show_state
from agentflow.language.states.outliner import outline_state
from agentflow.language.states.recorder import Recorder, append
from agentflow.language.states.reported import left_by, program_failure
from agentflow.language.states.run import StateNode, StatePath, VariableNode
from agentflow.language.states.variable import Reference, Variable, complete_text, find_target
from agentflow.language.typed.decisions import Answers, Decision, TypedQuestion, decisions_type
from agentflow.language.typed.replies import Message
from agentflow.language.typed.tools import ToolCall
from agentflow.language.typed.values import TEXT, ValueType
from agentflow.protocol import ops
from agentflow.protocol.images import placed_in
from agentflow.protocol.ops import Objective, ReadWhat, Role, check_branches
from agentflow.protocol.sampling import is_whole

ValueT = TypeVar("ValueT")
VariableName: TypeAlias = "str | GenExpression[Any] | SelectExpression"


class State:
    """A prompt that grows. A session makes the root state of each program, and ``fork`` makes branches.

    ``s += x`` appends text, a variable, ``gen``, ``select`` or a role, and never waits. ``s["x"]`` is the
    latest variable of that name. ``await s`` waits until everything appended is done. ``async for event in
    s`` yields the text of its variables as it is generated.

    >>> s += af.user("Is it about science?")
    >>> s += af.assistant(af.select("related", ["yes", "no"]))
    >>> await s["related"]
    'yes'
    """

    def __init__(self, node: StateNode) -> None:
        self._node = node

    def __repr__(self) -> str:
        names = ", ".join(map(repr, self._node.names)) or "no variables"
        return f"<State{MARKERS.repr_tag} {self._node.path} with {names}>"

    def __copy__(self) -> State:  # otherwise, copy.copy(s) would be another name of the same state
        return self.copy()

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a State belongs to its session, and cannot be pickled or copied deeply: fork it with s.copy(), "
            "or keep await s.messages()"
        )

    def __str__(self) -> str:
        return as_text(outline_state(self._node))

    def _repr_html_(self) -> str:
        """For notebooks."""
        return as_html(outline_state(self._node))

    def _ipython_display_(self) -> None:
        """For notebooks. IPython uses the other representations if this raises ``NotImplementedError``."""
        if not in_notebook():
            raise NotImplementedError
        show_state(self._node)

    @property
    def id(self) -> int:
        """The number of the state in its session, as in recordings.

        >>> branches[0].id > s.id
        True
        """
        return self._node.id

    @property
    def path(self) -> StatePath:
        """The place of the state in the fork tree: () is the root, (2,) its third branch, (2, 0) the first
        branch of (2,).

        >>> s.path, branches[1].path
        ((), (1,))
        """
        return self._node.path

    @property
    def variables(self) -> list[Variable[Any]]:
        """The variables declared here, in order, without the parent's variables.

        >>> [variable.name for variable in s.variables]
        ['answer']
        """
        return [node.front for node in self._node.shown]

    def __iadd__(self, item: Appendable) -> Self:
        return self.add(item)

    if not TYPE_CHECKING:  # type checkers reject it by its absence

        def __add__(self, item: object) -> NoReturn:
            raise BadArgument("s + x makes no new state: append with s += x, or s.add(x)")

        def __iter__(self) -> NoReturn:
            raise needs_async_for(self)

    def add(self, item: Appendable) -> Self:
        """The same as ``s += item``, for code in which Python would rebind ``s``. Returns the state.

        >>> def ask(question: str) -> None:
        ...     s.add(af.user(question)).add(af.assistant(af.gen("answer", max_tokens=32)))
        >>> ask("What do plants do?")
        """
        append(self._node, item)
        return self

    def end(self) -> None:
        """Closes a turn that is open without a block: of a fork inside a block, or after ``af.conversation``.
        ``BadArgument`` if no turn is open.

        >>> async with s.user():
        ...     s += "Plants live on "
        ...     branches = s.fork(2)
        >>> for branch, text in zip(branches, ["light.", "water."]):
        ...     branch += text
        ...     branch.end()
        """
        recorder = self._recorder()
        recorder.end()
        recorder.submit()

    def system(self) -> Turn:
        """A system turn around a block.

        >>> async with flow.state() as s, s.system():
        ...     s += "You are a strict judge of essays."
        """
        return Turn(self, "system")

    def user(self) -> Turn:
        """A user turn around a block.

        >>> async with s.user():
        ...     for line in essays:
        ...         s += f"- {line}\\n"
        """
        return Turn(self, "user")

    def assistant(self) -> Turn:
        """An assistant turn around a block, in which the program may await generated text.

        >>> async with s.assistant():
        ...     s += "The answer is " + af.gen("answer", stop=".")
        ...     print(await s["answer"])
        Plants turn light into sugar
        """
        return Turn(self, "assistant")

    def tool_result(self, call: ToolCall | None = None) -> Turn:
        """A turn around a block, with the result of a tool. ``call``: the call that it answers.

        >>> async with s.tool_result():
        ...     s += weather("Oslo")
        """
        return Turn(self, "tool", call)

    def set(self, name: str, value: str | Reference[Any] | Sequence_) -> Variable[str]:
        """A variable with a given text, which is not appended to the state. ``value`` may contain variables
        that are not complete.

        >>> question = s.set("question", f"What follows from {s['answer']}")
        >>> await question
        'What follows from Plants turn light into sugar.'
        """
        check_variable_name(name, "set")
        parts = value.parts if isinstance(value, Sequence_) else (value,)
        check_is_text(f"set({name!r})", parts)
        if not all(isinstance(part, str | Reference) for part in parts):
            raise BadArgument(
                f"set({name!r}, {value!r}): the value must be text, which may hold variables", param="value"
            )
        recorder = self._recorder()
        variable = recorder.set(name, [part for part in parts if isinstance(part, str | Reference)])
        recorder.submit()
        return variable

    def decide(
        self, questions: Mapping[str, TypedQuestion | Answers], *, name: str = "decisions"
    ) -> Variable[dict[str, Decision]]:
        """Answers questions about the content at this point, with the probability of each possible answer.
        Each question is answered independently, and nothing is appended to the state. The engine answers all
        of them in one pass.

        Args:
            questions: By name: a question of ``af.question``, or only its possible answers, as ``bool``,
                ``["calm", "angry"]`` or ``range(1, 6)``; then the name is the question.
            name: The name of the variable.

        Raises:
            BadArgument: A question or its answers are invalid.
            NotSupported: The model cannot score answers.

        >>> decisions = await s.decide({"related": bool, "tone": ["calm", "angry"]})
        >>> decisions["tone"].value, sum(decisions["tone"].probabilities.values())
        ('calm', 1.0)
        """
        check_variable_name(name, "decide")
        asked, value_type = decisions_type(questions)
        recorder = self._recorder()
        variable = recorder.decide(name, asked, value_type)
        recorder.submit()
        return variable

    def text(self) -> Variable[str]:
        """Everything that the state holds at this point, including the marks of the chat template. Works on a
        sealed branch until its run ends (``StateClosed`` if very many branches were sealed since).

        >>> async with flow.state() as s:
        ...     s += af.user("Hello")
        ...     print(await s.text())
        <user>Hello</user>
        """
        return self._read("text", TEXT)

    def token_ids(self) -> Variable[list[int]]:
        """The token ids that the state holds at this point; see ``text``. ``NotSupported`` if the backend has
        no token ids.

        >>> ids = await s.token_ids()
        >>> all(isinstance(token_id, int) for token_id in ids)
        True
        """
        return self._read("token_ids", ValueType("list of token ids", None, json.loads))

    async def messages(self) -> list[dict[str, Any]]:
        """The conversation so far in the format of chat APIs, ``{"role": ..., "content": ...}``, which
        ``af.conversation`` accepts. The tool calls of a reply are the ``tool_calls`` of its turn. Waits for
        unfinished text. Leaves out text outside turns. A turn with images has a list of parts as its content.

        >>> (await s.messages())[0]
        {'role': 'user', 'content': 'What do plants do?'}
        """
        return [(await _make_message(turn)).as_dict() for turn in self._node.transcript.turns()]

    def hint(
        self,
        *,
        objective: Objective | None = None,
        output_tokens: int | None = None,
        forks: int | None = None,
        deadline_s: float | None = None,
        speculate: bool | None = None,
    ) -> None:
        """Gives the backend information about the next ops.

        Args:
            objective: ``"latency"`` if a user waits for the next generations, ``"throughput"`` if only the
                total matters.
            output_tokens: The expected number of tokens of each generation.
            forks: The number of forks that come next, or 0; from 2 on, a long prefix is sent to OpenAI and
                Anthropic before the forks need it.
            deadline_s: The seconds in which the next generations should be done; earlier deadlines are
                scheduled first.
            speculate: Whether one call to an API serves several gens of a turn (``af.OpenAI``).

        >>> s.hint(objective="throughput", output_tokens=64)
        """
        if objective not in (None, *get_args(Objective)):
            raise BadArgument(
                f"hint: objective must be latency or throughput, not {objective!r}", param="objective"
            )
        if is_whole(forks, 0, 0):
            forks = None
        ops.check_hint(output_tokens, forks, deadline_s)
        recorder = self._recorder()
        recorder.put(ops.Hint(self._node.id, objective, output_tokens, forks, deadline_s, speculate))
        recorder.submit()

    def limit(self, *, deadline_s: float | None = None, output_tokens: int | None = None) -> None:
        """Limits this state and its forks, from now on, to ``deadline_s`` seconds and to ``output_tokens``
        generated tokens together. Beyond that they fail with ``DeadlineExceeded`` or ``BudgetExceeded``.
        Running generations end as soon as their tokens together exceed the limit.

        >>> s.limit(deadline_s=30, output_tokens=1000)
        """
        self._node.check_open()
        self._node.limit(deadline_s, output_tokens)

    @overload
    def __getitem__(self, name: GenExpression[ValueT]) -> Variable[ValueT]: ...
    @overload
    def __getitem__(self, name: SelectExpression) -> Variable[str]: ...
    @overload
    def __getitem__(self, name: str) -> Variable[Any]: ...
    def __getitem__(self, name: Any) -> Variable[Any]:
        wanted = name.name if isinstance(name, GenExpression | SelectExpression) else name
        names = self._node.names
        found = names.get(wanted) if isinstance(wanted, str) else None
        if found is None:
            raise unknown_variable(wanted, names, self._node.names_of_branches())
        if isinstance(name, GenExpression) and found.value_type is not name.value_type:
            raise UnknownVariable(
                f"the state's variable {wanted!r} is not of this gen: append the gen first, and look its "
                "variable up before another of that name",
                variable=wanted,
                known=names,
            )
        variable: Variable[Any] = found.front
        return variable

    def __contains__(self, name: object) -> bool:
        return name in self._node.names

    def fork(self, count: int, *, model: str | None = None) -> Branches:
        """``count`` states that continue from here independently and share the prefix. With ``async with
        s.fork(3) as branches`` they are a task group: see ``Branches``.

        Args:
            count: The number of branches; none for 0, as for an empty list of inputs.
            model: The name of the session's model on which they run; by default the state's. Another model
                gets the content of the state as text.

        Raises:
            BadArgument: ``count`` is no whole number from 0.
            UnknownModel: The session has no such model.
            NotSupported: Another model is to continue a conversation with tool calls.

        >>> for branch, dimension in zip(s.fork(2), ["clarity", "evidence"]):
        ...     branch += af.user(f"Judge its {dimension}.")
        ...     branch += af.assistant(af.gen("judgment", max_tokens=64))
        """
        self._node.check_appendable()
        if not is_whole(count, 0, math.inf):
            raise BadArgument(f"fork({count!r}): say how many branches, 0 or more", param="count")
        with error_param("count"):
            check_branches(count)
        if model is None or self._node.runs_on(model):
            return Branches(self, [State(node) for node in self._node.fork(count)])
        content = self._node.transcript
        Recorder(self._node).check_repeatable(content)
        children = self._node.fork(count, model)
        for child in children:
            Recorder(child).repeat(content)
        return Branches(self, [State(node) for node in children])

    def copy(self, *, model: str | None = None) -> State:
        """A state that continues from here independently: a fork of one. ``model``: as in ``fork``.

        >>> draft = s.copy()
        >>> draft += af.user("Try again.") + af.assistant(af.gen("answer", temperature=0.8))
        """
        return self.fork(1, model=model)[0]

    def join(self, branches: Branches, *, separator: str = "") -> State:
        """Appends the content of each branch of a fork of this state, in the order of the branches, with
        ``separator`` between them and without the marks of turns. Never waits: unfinished text is passed on
        by reference. A branch that failed or was cancelled fails this state, with its cause.

        >>> async with s.fork(3) as branches:
        ...     for branch in branches:
        ...         branch += af.user("A paragraph.") + af.gen("paragraph")
        >>> s.join(branches, separator="\\n")
        """
        if not isinstance(branches, Branches) or branches.parent is not self:
            raise ForeignState("join: the branches are not of this state: give what its fork returned")
        if not isinstance(separator, str):
            raise BadArgument(f"join: the separator must be a string, not {separator!r}", param="separator")
        self._node.check_appendable()
        contents = [branch._node.transcript.own_content() for branch in branches]
        # Before the ends of the branches are declared. Each image ends a text op.
        num_images = sum(isinstance(part, MediumExpression) for content in contents for part in content)
        self._node.in_flight.check_room(1 + 2 * num_images)
        parts: list[Appendable] = []
        for branch, content in zip(branches, contents, strict=True):
            parts += [separator, *content, branch._end_of_ops()]
        return self.add(Sequence_(tuple(parts[1:])))

    def cancel(self) -> None:
        """Cancels this state and its forks. Their unfinished variables raise ``Cancelled``. May be repeated.

        >>> branches[1].cancel()
        """
        self._check_loop()
        self._node.cancel(f"cancel() of state {self.path} was called{_at(calling_line())}")

    def seal(self) -> None:
        """Rejects further appends. Variables, ``text`` and ``token_ids`` stay readable.

        >>> branches[0].seal()
        >>> judgment = await branches[0]["judgment"]
        """
        self._check_loop()
        self._node.seal("was sealed")

    def __await__(self) -> Generator[object, None, None]:
        return self._wait().__await__()

    async def _wait(self) -> None:
        await self._node.settled()
        self._node.raise_failure()

    def show(self) -> None:
        """Shows the conversation so far, with its branches: on stdout, in colours if it is a terminal; in a
        notebook below the cell, redrawn while it is generated. Cached and generated text have different
        colours. ``print(s)`` writes the same without colours. Very long texts are shortened in the middle.

        >>> await s["answer"]
        'Plants turn light into sugar.'
        >>> s.show()
        [user]
        What do plants do?
        [assistant]
        Plants turn light into sugar.
        ...
        """
        show_state(self._node)

    async def settled(self) -> None:
        """Waits until everything appended is done or the state has failed. Raises nothing; ``await s`` raises
        the failure.

        >>> await s.settled()
        """
        await self._node.settled()

    def __aiter__(self) -> EventStream:
        self._node.link.needs_values("the events of a state are read")
        return self._node.run.watch_state(self._node)

    def _check_loop(self) -> None:
        """``ProgramError`` where the end of this state cannot be sent."""
        link = self._node.link
        if self._node.is_open and link.is_alive:
            link.check_loop()
            link.check_runs()

    def _recorder(self) -> Recorder:
        self._node.check_appendable()
        return Recorder(self._node)

    def _read(self, what: ReadWhat, value_type: ValueType) -> Variable[Any]:
        if not (self._node.is_sealed and self._node.is_open):
            self._node.check_appendable()
        self._node.link.check_alive()
        recorder = Recorder(self._node)
        variable = recorder.read(what, value_type)
        recorder.submit()
        return variable

    def _end_of_ops(self) -> Variable[str]:
        """An empty text that is complete when everything appended here is done."""
        state = self._node
        node = VariableNode(state, state.link.next_id(), f"the end of branch {state.path}", is_shown=False)
        state.declare(node)
        # Not appended through a recorder, so that a sealed state may have one.
        state.link.send([ops.Done(state.id, node.id, node.name)])
        return Variable(node)


def state_node(state: State) -> StateNode:
    """The ``StateNode`` behind a state."""
    return state._node


class RootState(AsyncOnly, State):
    """A state without a program. The end of its ``async with`` block, or ``close``, ends it."""

    def close(self) -> None:
        """Ends the state and its forks, and cancels unfinished ops.

        >>> s = flow.state()
        >>> s += af.user("What do plants do?") + af.assistant(af.gen("answer"))
        >>> s.close()
        """
        if self._node.run.is_unfinished:
            self._node.cancel(f"state {self.path} was closed{_at(calling_line())}")
        self._node.run.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            explain(error)
            self._node.cancel(f"its block was left {left_by(error)}", program_failure(error))
            self._node.run.record.fail(error)
        self.close()


class Turn(AsyncOnly):
    """Begins a turn on entering and ends it on leaving. An exception leaves the turn open, because the state
    is not a conversation any more."""

    def __init__(self, state: State, role: Role, call: ToolCall | None = None) -> None:
        self._state = state
        self._role: Role = role
        self._call = call

    async def __aenter__(self) -> State:
        recorder = self._state._recorder()
        recorder.begin(self._role, self._call)
        recorder.submit()
        return self._state

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self._state.end()


class Branches(AsyncOnly, list[State]):
    """The states of a fork, in order.

    ``async with s.fork(n) as branches`` makes them a task group: the failure of a branch cancels its siblings
    and is raised at the parent's next await. Leaving the block seals the branches without waiting for them,
    except branches that ``first`` or ``best`` chose in it; leaving it by an exception cancels them.

    There are three ways to join: ``await branches`` waits for all, ``await branches.gather("x")`` returns the
    values of ``x`` in the order of the branches, and ``s.join(branches)`` appends their texts. ``first``,
    ``best`` and ``vote`` choose between the branches and cancel the rest. Without branches, ``gather``
    returns an empty list, and a choice raises ``BadArgument``.

    >>> async with s.fork(2) as branches:
    ...     for branch, dimension in zip(branches, ["clarity", "evidence"]):
    ...         branch += af.user(f"Judge its {dimension}.")
    ...         branch += af.assistant(af.gen("judgment", max_tokens=64))
    >>> await branches
    """

    def __init__(self, parent: State, states: list[State]) -> None:
        super().__init__(states)
        self.parent = parent
        self._is_group = False

    @overload
    def __getitem__(self, index: SupportsIndex) -> State: ...
    @overload
    def __getitem__(self, index: slice) -> Branches: ...
    def __getitem__(self, index: SupportsIndex | slice) -> State | Branches:
        if isinstance(index, str | GenExpression | SelectExpression):
            raise BadArgument(
                f"branches[{index!r}]: branches are a list: `await branches.gather({index!r})` gives the "
                f"value of each, and branches[0][{index!r}] is a variable of the first",
                param="index",
            )
        found = super().__getitem__(index)
        if isinstance(found, State):
            return found
        part = Branches(self.parent, found)
        part._is_group = self._is_group
        return part

    def __iadd__(self, item: object) -> NoReturn:  # type: ignore[misc]
        raise BadArgument(
            "the branches of a fork are a list of states: append to each of them, as in "
            "`for branch in branches: branch += …`"
        )

    async def __aenter__(self) -> Branches:
        self.parent._node.couple([branch._node for branch in self])
        self._is_group = True
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for branch in self:
            if error is not None:
                branch._node.cancel(f"the block of its fork was left {left_by(error)}")
            elif not branch._node.is_chosen:
                branch._node.seal("was sealed when its fork's block was left")

    def __await__(self) -> Generator[object, None, None]:
        return self._wait().__await__()

    async def _wait(self) -> None:
        for branch in self:
            branch._node.ask()
        await _raise_cause([branch._node for branch in self])

    @overload
    def variables(self, name: GenExpression[ValueT]) -> list[Variable[ValueT]]: ...
    @overload
    def variables(self, name: SelectExpression) -> list[Variable[str]]: ...
    @overload
    def variables(self, name: str) -> list[Variable[Any]]: ...
    def variables(self, name: VariableName) -> list[Variable[Any]]:
        """Variable ``name`` of each branch, in order, to be passed on unawaited. ``UnknownVariable`` if a
        branch has no such variable. ``name``: as in ``s[name]``, here and in the other methods.

        >>> s += af.user("Two judges wrote:", *branches.variables("judgment"))
        """
        if not isinstance(name, str | GenExpression | SelectExpression):
            raise BadArgument(f"variables({name!r}): give the variables' name", param="name")
        return [branch[name] for branch in self]

    @overload
    async def gather(self, name: GenExpression[ValueT]) -> list[ValueT]: ...
    @overload
    async def gather(self, name: SelectExpression) -> list[str]: ...
    @overload
    async def gather(self, name: str) -> list[Any]: ...
    async def gather(self, name: VariableName) -> list[Any]:
        """The values of variable ``name``, in the order of the branches. Raises the first failure.

        >>> judgments = await branches.gather("judgment")
        """
        variables = self.variables(name)
        if not self.parent._node.link.is_tracing:
            for branch in self:
                branch._node.ask()
            await _raise_cause([find_target(variable).node for variable in variables])
        return [await variable for variable in variables]

    def as_completed(self, name: VariableName) -> Completed:
        """Yields each branch as soon as its variable ``name`` has ended. Branches without a value are
        included; awaiting their variable raises the failure. In ``async with s.fork(n)``, the failure of a
        branch is raised, as anywhere. Cancels nothing.

        >>> async for branch in branches.as_completed("judgment"):
        ...     print(await branch["judgment"])
        Plants turn light into sugar.
        Plants turn light into sugar.
        """
        return Completed(self, self._contest(name))

    async def first(self, name: VariableName) -> State:
        """The branch whose variable ``name`` is complete first. Cancels the others.

        A branch without a value, because it failed or its text is not valid, cannot win; if none has one, the
        first failure is raised. In ``async with s.fork(n)``, the failure of a branch is raised, as anywhere.

        >>> branch = await branches.first("judgment")
        >>> await branch["judgment"]
        'Plants turn light into sugar.'
        """
        return self[await self._contest(name).first()]

    @overload
    async def best(
        self,
        name: VariableName,
        *,
        key: Callable[[Any], Any] | None = ...,
        branch_key: Callable[[State], Any] | None = ...,
    ) -> State: ...
    @overload
    async def best(
        self,
        name: VariableName,
        *,
        n: int,
        key: Callable[[Any], Any] | None = ...,
        branch_key: Callable[[State], Any] | None = ...,
    ) -> list[State]: ...
    async def best(
        self,
        name: VariableName,
        *,
        n: int | None = None,
        key: Callable[[Any], Any] | None = None,
        branch_key: Callable[[State], Any] | None = None,
    ) -> State | list[State]:
        """The branch with the greatest value of variable ``name``. Waits for all values, then cancels the
        other branches. Failures are as in ``first``.

        Args:
            name: The variable, as in ``s[name]``.
            n: Gives the ``n`` best branches as a list, the best first; fewer if fewer have a value.
            key: A function of the value, whose results are compared; by default the value itself.
            branch_key: A function of the branch, whose results are compared.

        Returns:
            The branch, the first of equal ones; with ``n``, a list.

        Raises:
            BadArgument: ``key`` and ``branch_key`` are both given, or ``n`` is below 1.

        >>> branch = await branches.best("judgment", key=len)
        >>> drafts = s.fork(4)
        >>> for draft in drafts:
        ...     draft += af.user("Shorter!") + af.assistant(af.gen("text", temperature=0.8))
        >>> two = await drafts.best("text", n=2, branch_key=lambda draft: -draft["text"].usage.output_tokens)
        """
        if key is not None and branch_key is not None:
            raise BadArgument("best: give key, of a value, or branch_key, of a branch", param="branch_key")
        for function, param in ((key, "key"), (branch_key, "branch_key")):
            if function is not None and not callable(function):
                raise BadArgument(f"best: {param} must be a function, not {function!r}", param=param)

        def rank(index: int, value: Any) -> Any:
            if branch_key is not None:
                return branch_key(self[index])
            return value if key is None else key(value)

        chosen = await self._contest(name).best(rank, 1 if n is None else n)
        return self[chosen[0]] if n is None else [self[index] for index in chosen]

    @overload
    async def vote(self, name: GenExpression[ValueT], *, n: int | None = ...) -> ValueT | None: ...
    @overload
    async def vote(self, name: SelectExpression, *, n: int | None = ...) -> str | None: ...
    @overload
    async def vote(self, name: str, *, n: int | None = ...) -> Any: ...
    @overload
    async def vote(
        self, name: VariableName, *, n: int | None = ..., key: Callable[[Any], Any] | None
    ) -> Any: ...
    async def vote(
        self, name: VariableName, *, n: int | None = None, key: Callable[[Any], Any] | None = None
    ) -> Any:
        """The most frequent ``key(value)`` of variable ``name`` (by default the value itself). Returns as
        soon as no other answer can win, and cancels the branches that have not voted by then.

        Of equally frequent answers, the first to reach its number of votes wins. ``n``: a number of votes
        with which an answer wins immediately. None, and a branch without a value, abstain; the result is None
        if all values do. Failures are otherwise as in ``first``.

        >>> await branches.vote("judgment")
        'Plants turn light into sugar.'
        >>> await s.fork(2).vote("answer", n=1, key=str.upper)
        'PLANTS TURN LIGHT INTO SUGAR.'
        """
        return await self._contest(name).vote(key, n)

    def _contest(self, name: VariableName) -> Contest:
        entries = [
            (branch._node, find_target(variable).node, variable)
            for branch, variable in zip(self, self.variables(name), strict=True)
        ]
        return Contest(self.parent._node.run, entries, is_group=self._is_group)


class Completed:
    """The branches of a fork in the order in which their variables ended."""

    def __init__(self, branches: Branches, contest: Contest) -> None:
        self._branches = branches
        self._contest = contest

    def __aiter__(self) -> Completed:
        return self

    async def __anext__(self) -> State:
        index = await self._contest.ended()
        if index is None:
            raise StopAsyncIteration
        return self._branches[index]


async def _raise_cause(nodes: Sequence[StateNode | VariableNode]) -> None:
    """Waits for all. Raises the first failure, and a cancellation that followed from another failure only if
    none of these has it."""
    consequences = []
    for node in nodes:
        await node.settled()
        if node.error is not None and node.error.cause is not None and node.error.code == Cancelled.code:
            consequences.append(node)
        else:
            node.raise_failure()
    for node in consequences:
        node.raise_failure()


def _at(line: ProgramLine | None) -> str:
    return "" if line is None else f" at {line}"


async def _make_message(turn: TurnContent) -> Message:
    begin = turn.begin
    parts = [
        part.whole() if isinstance(part, MediumExpression) else await _read_text(part)
        for part in turn.content
    ]
    content, images = placed_in(parts)
    calls = [call for calls in turn.calls for call in await _tool_calls(calls.source)]
    return Message(begin.role, content, tuple(calls), begin.tool_call_id, begin.name, images)


async def _tool_calls(source: tuple[ToolCall, ...] | Expression) -> tuple[ToolCall, ...]:
    if isinstance(source, tuple):
        return source
    assert isinstance(source, Variable)
    await source.whole_text()
    return source.tool_calls


async def _read_text(part: Content) -> str:
    if isinstance(part, str):
        return part
    assert isinstance(part, Reference)
    return await complete_text(part)
