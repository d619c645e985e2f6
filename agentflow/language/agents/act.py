"""The loop of an agent: the model calls tools, gets their results, and goes on until it answers.

``act`` runs the loop on a state. Each round is one reply of the model. Its tool calls run in one task group,
and their results are appended in the order of the calls. A program awaits an ``Act`` for the result, or
iterates over it for the events of the loop (``ActStream``).

A result is sent as the text of a variable, as in ``Variable.map``. Recordings therefore contain it, and
replays use it: neither the tools nor the approval hook run again. ``tool_content`` has results with images.
"""

from __future__ import annotations

import copy
import logging
import warnings
import weakref
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeAlias, TypeVar, Unpack, get_args, overload

import anyio
import msgspec

from agentflow.errors import (
    AgentflowError,
    BadArgument,
    DeadlineExceeded,
    InvalidValue,
    LimitExceeded,
)
from agentflow.language.agents.tool_content import ToolContent, content_of_result, read_content
from agentflow.language.expressions import RoleExpression, Sequence_, user
from agentflow.language.failures import user_code
from agentflow.language.failures.stack_frames import STARTED_AT, calling_line
from agentflow.language.failures.user_code import UserCode
from agentflow.language.gen import (
    GenExpression,
    JsonOptions,
    check_reply_options,
    checked_retries,
    reply,
)
from agentflow.language.observing.spans import StateSpan
from agentflow.language.program import StreamWork
from agentflow.language.states.event_stream import TextDelta
from agentflow.language.states.readers import complete_answer
from agentflow.language.states.state import State, state_node
from agentflow.language.states.validation import correction
from agentflow.language.states.variable import Variable, find_target
from agentflow.language.typed.json_form import JsonRecord, json_text
from agentflow.language.typed.replies import Reply
from agentflow.language.typed.tools import (
    DescribedTool,
    Tool,
    Toolbox,
    ToolCall,
    check_max_calls,
    check_timeout,
    shown_for_model,
)
from agentflow.language.typed.values import ValueType, value_type
from agentflow.protocol import ops
from agentflow.protocol.chat import ToolChoice
from agentflow.protocol.events import Capabilities
from agentflow.protocol.sampling import is_whole
from agentflow.runtime.task_group import open_task_group

if TYPE_CHECKING:  # of every type, such as ``Report | None``, which type[...] does not include
    from typing_extensions import TypeForm

logger = logging.getLogger(__name__)

ResultT = TypeVar("ResultT")
ValueT = TypeVar("ValueT")

Verdict: TypeAlias = bool | str | Mapping[str, Any]
Approve: TypeAlias = Callable[[ToolCall], Verdict | Awaitable[Verdict]]
"""Whether a call may run: True, False, the reason for denying it (for the model), or other arguments for
it."""

OnInvalidResult = Literal["raise", "reask"]

MAX_THREADS = 16
"""The maximum number of plain functions that one ``act`` runs concurrently."""
ERROR = "error: "
"""The beginning of the text of a failed call."""


class RoundStarted(JsonRecord, msgspec.Struct, frozen=True):
    """The model begins reply ``number`` of this ``af.act``, from 1.

    >>> async for event in af.act(s, tools=[weather]):
    ...     if isinstance(event, af.RoundStarted):
    ...         print(event.number)
    1
    """

    number: int


class ToolStarted(JsonRecord, msgspec.Struct, frozen=True):
    """A tool call was approved, or rejected, and starts.

    >>> async for event in af.act(s, tools=[weather]):
    ...     if isinstance(event, af.ToolStarted):
    ...         print(event.call.name, event.call.arguments)
    """

    call: ToolCall


class ToolDone(JsonRecord, msgspec.Struct, frozen=True):
    """A tool call has ended. ``text``: the result for the model, in which ``[image]`` stands for an image.
    ``failed``: it is an error.

    >>> async for event in af.act(s, tools=[weather]):
    ...     if isinstance(event, af.ToolDone) and event.failed:
    ...         print(event.call.name, event.text)
    """

    call: ToolCall
    text: str
    failed: bool = False


class ActDone(JsonRecord, msgspec.Struct, frozen=True):
    """The loop has ended with ``result``. The last event.

    >>> async for event in af.act(s, tools=[weather]):
    ...     if isinstance(event, af.ActDone):
    ...         print(event.result)
    Plants turn light into sugar.
    """

    result: Any


ActEvent = RoundStarted | TextDelta | ToolStarted | ToolDone | ActDone
Emit: TypeAlias = Callable[[ActEvent], None]


@overload
def act(
    state: State,
    *,
    tools: Sequence[Tool],
    schema: type[ValueT],
    max_rounds: int = ...,
    max_calls: int | None = ...,
    call_timeout_s: float | None = ...,
    approve: Approve | None = ...,
    name: str = ...,
    choice: str | ToolChoice = ...,
    parallel: bool = ...,
    on_invalid: OnInvalidResult = ...,
    max_retries: int = ...,
    **options: Unpack[JsonOptions],
) -> Act[ValueT]: ...
@overload
def act(
    state: State,
    *,
    tools: Sequence[Tool],
    schema: TypeForm[ValueT],
    max_rounds: int = ...,
    max_calls: int | None = ...,
    call_timeout_s: float | None = ...,
    approve: Approve | None = ...,
    name: str = ...,
    choice: str | ToolChoice = ...,
    parallel: bool = ...,
    on_invalid: OnInvalidResult = ...,
    max_retries: int = ...,
    **options: Unpack[JsonOptions],
) -> Act[ValueT]: ...
@overload
def act(
    state: State,
    *,
    tools: Sequence[Tool],
    schema: None = ...,
    max_rounds: int = ...,
    max_calls: int | None = ...,
    call_timeout_s: float | None = ...,
    approve: Approve | None = ...,
    name: str = ...,
    choice: str | ToolChoice = ...,
    parallel: bool = ...,
    on_invalid: OnInvalidResult = ...,
    max_retries: int = ...,
    **options: Unpack[JsonOptions],
) -> Act[str]: ...
@overload
def act(
    state: State,
    *,
    tools: Sequence[Tool],
    schema: Any,
    max_rounds: int = ...,
    max_calls: int | None = ...,
    call_timeout_s: float | None = ...,
    approve: Approve | None = ...,
    name: str = ...,
    choice: str | ToolChoice = ...,
    parallel: bool = ...,
    on_invalid: OnInvalidResult = ...,
    max_retries: int = ...,
    **options: Unpack[JsonOptions],
) -> Act[Any]: ...
def act(
    state: State,
    *,
    tools: Sequence[Tool],
    schema: Any = None,
    max_rounds: int = 8,
    max_calls: int | None = None,
    call_timeout_s: float | None = None,
    approve: Approve | None = None,
    name: str = "answer",
    choice: str | ToolChoice = "auto",
    parallel: bool = True,
    on_invalid: OnInvalidResult = "raise",
    max_retries: int = 2,
    **options: Unpack[JsonOptions],
) -> Act[Any]:
    """Lets the model call tools until it answers. Await it for the answer, or iterate over its events.

    Each round, the model writes a reply (``af.reply``). Its tool calls run at the same time; their results
    are appended in the order of the calls, and the next round begins. A reply without calls ends the loop:
    its text is the result. A failed call does not end the loop: an exception, invalid arguments, an unknown
    tool, and a call that is denied or above a limit are results that the model gets.

    If the loop ends early, by an error or a cancellation, unfinished calls are cancelled, and a result in the
    state tells the model so. The state stays a valid conversation, and the program may continue it.

    Args:
        state: The state on which the loop runs.
        tools: Functions with annotated parameters, plain or async, tools made by ``af.tool``, or the tools of
            ``af.mcp``. Arguments have the types of the parameters. A result is a text, an image (``af.image``
            or Pillow's), a list with images and texts, or another value, which is sent as JSON. Plain
            functions run in threads, and continue there if their call is cancelled. Without tools, the first
            reply is the result.
        schema: The type of the result, as in ``gen``; by default the result is text.
        max_rounds: The maximum number of replies.
        max_calls: The maximum number of calls in all rounds together.
        call_timeout_s: The time limit of one call, in seconds.
        approve: A function of the ``ToolCall``, plain or async, called before each call, for one call at a
            time. It returns True, False, the reason for denying the call, or a dict of other arguments.
        name: The name of the variable that holds each reply.
        choice: Whether the first reply calls tools, as in ``af.reply``. Later replies are free to do so.
        parallel: Whether one reply may call several tools.
        on_invalid: ``"reask"`` appends a turn that tells the model about the fault of an answer that is no
            valid ``schema``, and begins another round. The state keeps both. A text that the backend itself
            finds invalid fails the state.
        max_retries: The maximum number of these turns.
        options: The other options of ``gen``.

    Raises:
        DeadlineExceeded: The deadline of the state or its session has passed, also while tools run.
        InvalidValue: The answer is no valid ``schema``.
        LimitExceeded: Reply ``max_rounds`` still calls tools. These calls do not run. ``param`` is
            ``max_rounds``.

    >>> s += af.user("What do plants do?")
    >>> await af.act(s, tools=[weather], max_rounds=4)
    'Plants turn light into sugar.'
    """
    if not isinstance(state, State):
        raise BadArgument(f"act: the first argument is a state, not {state!r:.80}", param="state")
    if not is_whole(max_rounds, 1, 1_000_000):
        raise BadArgument(f"act: max_rounds must be 1 or more, not {max_rounds!r}", param="max_rounds")
    check_reply_options("act", options)
    check_max_calls("act", max_calls)
    check_timeout("act", call_timeout_s, "call_timeout_s")
    if approve is not None and not callable(approve):
        raise BadArgument(f"act: approve must be a function of a call, not {approve!r}", param="approve")
    toolbox = Toolbox(tools)
    for tool in toolbox:
        if tool.function is None:
            raise BadArgument(
                f"act: tool {tool.name!r} is only a schema: give the function that runs it, as in "
                f"af.tool(function, name={tool.name!r}, parameters={{…}})",
                param="tools",
            )
    specs = [tool.spec for tool in toolbox]
    kind = None if schema is None else value_type(schema=schema)
    num_retries = checked_retries("act", on_invalid, max_retries, get_args(OnInvalidResult))
    if num_retries and kind is None:
        raise BadArgument("act: on_invalid applies to a value: give a schema", param="on_invalid")
    first, later = [
        reply(name, tools=specs, choice=mode, parallel=parallel, schema=schema, **options)
        for mode in (choice, "auto")
    ]
    calls = _Calls(toolbox, max_calls, call_timeout_s, approve)
    return Act(_Loop(state, first, later, max_rounds, kind, calls, num_retries))


class Act(Generic[ResultT]):
    """The return value of ``af.act``: await it for the result, or iterate over its events. It runs once.

    >>> async with af.act(s, tools=[weather]) as events:  # leaving the block cancels the loop
    ...     async for event in events:
    ...         if isinstance(event, af.TextDelta):
    ...             print(event.text, end="")
    Plants turn light into sugar.
    """

    def __init__(self, loop: _Loop) -> None:
        self._loop: _Loop | None = loop
        self._stream: ActStream | None = None

    def __del__(self) -> None:
        if getattr(self, "_loop", None) is not None:
            warnings.warn("af.act(...) was never awaited", RuntimeWarning, stacklevel=2)

    def _started(self) -> _Loop:
        loop, self._loop = self._loop, None
        if loop is None:
            raise BadArgument("this af.act(...) has run: call it again for another loop")
        return loop

    def __await__(self) -> Generator[object, None, ResultT]:
        return self._started().run(None).__await__()

    def __aiter__(self) -> ActStream:
        return ActStream(self._started())

    async def __aenter__(self) -> ActStream:
        self._stream = ActStream(self._started())
        return self._stream

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._stream is not None
        await self._stream.aclose()


class ActStream:
    """The events of a running ``af.act``. The last is ``ActDone``; if the loop fails, the iteration raises
    its error. Dropping it cancels the loop."""

    def __init__(self, loop: _Loop) -> None:
        self._events = events = _Events()
        link = state_node(loop.state).link
        line = calling_line()

        async def run() -> Any:
            STARTED_AT.set(line)
            return await loop.run(events.emit)

        self._work = StreamWork(link, events.wake, run)
        weakref.finalize(self, self._work.abandon).atexit = False

    def __aiter__(self) -> ActStream:
        return self

    async def __anext__(self) -> ActEvent:
        work, events = self._work, self._events
        try:
            while not events.waiting:
                if work.ended.is_set():
                    failure, work.failure = work.failure, None
                    if failure is not None:
                        raise failure from failure.__cause__
                    raise StopAsyncIteration
                await events.change()
            return events.waiting.popleft()
        finally:
            # A stored traceback keeps this frame, which would keep a dropped stream alive.
            del self

    async def aclose(self) -> None:
        """Cancels the loop if it still runs, and waits for its end. May be repeated."""
        await self._work.stop()


class _Events:
    """Events that were not read yet. Adjacent texts are merged, so a slow reader gets fewer events."""

    def __init__(self) -> None:
        self.waiting: deque[ActEvent] = deque()
        self._changed = anyio.Event()

    def emit(self, event: ActEvent) -> None:
        last = self.waiting[-1] if self.waiting else None
        if isinstance(event, TextDelta) and isinstance(last, TextDelta):
            self.waiting[-1] = TextDelta(event.path, event.name, last.text + event.text)
        else:
            self.waiting.append(event)
        self.wake()

    def wake(self) -> None:
        self._changed.set()

    async def change(self) -> None:
        """Waits for an event, or the end."""
        self._changed = anyio.Event()
        await self._changed.wait()


class _Loop:
    """One ``act``. ``kind``: the type of the result; None: the text is the result. ``num_retries``: the most
    turns that ask again after an invalid result."""

    def __init__(
        self,
        state: State,
        first: GenExpression[Reply],
        later: GenExpression[Reply],
        max_rounds: int,
        kind: ValueType | None,
        calls: _Calls,
        num_retries: int,
    ) -> None:
        self.state = state
        self._replies = (first, later)
        self._max_rounds = max_rounds
        self._kind = kind
        self._calls = calls
        self._num_retries = num_retries

    async def run(self, emit: Emit | None) -> Any:
        """Runs the rounds and returns the result. ``emit`` gets the events."""
        for number in range(1, self._max_rounds + 1):
            if emit is not None:
                emit(RoundStarted(number))
            expression = self._replies[number > 1]
            variable = self.state.add(expression)[expression]
            if emit is not None:
                async for text in variable:
                    emit(TextDelta(variable.path, variable.name, text))
            answer = await variable
            if not answer.tool_calls:
                try:
                    result = self._result(variable, answer)
                except InvalidValue as error:
                    if not self._num_retries or number == self._max_rounds:
                        raise
                    self._num_retries -= 1
                    assert self._kind is not None
                    self.state.add(user(correction(error, self._kind.shown)))
                    continue
                if emit is not None:
                    emit(ActDone(result))
                return result
            results = _Results(self.state, answer.tool_calls)
            try:
                if number < self._max_rounds:
                    await self._calls.run(results, emit or _ignore)
                else:
                    results.fill(f"{ERROR}not run: the limit of rounds is reached")
            except BaseException:
                with suppress(AgentflowError):  # the state or the session may have ended
                    results.fill(f"{ERROR}the call was cancelled")
                    results.append()
                raise
            results.append()
        raise LimitExceeded(
            f"act: the model still calls tools after {self._max_rounds} rounds: raise max_rounds, or catch "
            "this and continue the state",
            param="max_rounds",
        )

    def _result(self, variable: Variable[Reply], answer: Reply) -> Any:
        if self._kind is None:
            return answer.text
        return complete_answer(find_target(variable).node, answer.text, self._kind)


def _ignore(event: ActEvent) -> None:
    pass


class _Results:
    """The results of one reply's calls: a variable for each, whose text is sent when it is known."""

    def __init__(self, state: State, calls: Sequence[ToolCall]) -> None:
        self.calls = calls
        self._state = state
        self._node = node = state_node(state)
        self._nodes = [node.expect_text(f"the result of {call.name}") for call in calls]
        self._variables = [Variable[str](one) for one in self._nodes]
        for one in self._nodes:
            node.run.touch(one)
        self._is_given = [False] * len(calls)
        self._contents: list[ToolContent | None] = [None] * len(calls)  # those that are no plain texts

    @property
    def span(self) -> StateSpan | None:
        """The parent span of the calls' spans, if the state has one."""
        return self._node.span

    @property
    def is_replay(self) -> bool:
        """Whether the results come from a recording."""
        return self._node.link.is_replay

    @property
    def deadline(self) -> float:
        """When the limits of the state end it."""
        return self._node.deadline

    def deadline_passed(self) -> DeadlineExceeded:
        """The error of the deadline, which is raised in the program now."""
        return self._node.deadline_passed()

    @property
    def model(self) -> Capabilities:
        """The capabilities of the state's model."""
        return self._node.capabilities

    async def recorded(self, index: int) -> str:
        """The text of the result in the recording. Raises the failure of the recorded state."""
        self._is_given[index] = True
        content = read_content(await self._variables[index], self._node.link.recorded_file)
        self._contents[index] = None if content.is_text else content
        return content.text

    def give(self, index: int, content: ToolContent) -> ToolContent:
        """Sends the result of a call, or, if the backend does not accept it, why. Returns the one that was
        sent."""
        try:
            self._send(index, content)
        except AgentflowError as error:
            content = ToolContent([f"{ERROR}{shown_for_model(error)}"])
            self._send(index, content)
        self._contents[index] = None if content.is_text else content
        self._is_given[index] = True
        return content

    def _send(self, index: int, content: ToolContent) -> None:
        self._node.link.send([ops.Provide(self._nodes[index].id, content.value)], quiet=True)

    def fill(self, text: str) -> None:
        """Sends this as the result of each call that has none."""
        for index, is_given in enumerate(self._is_given):
            if not is_given:
                self.give(index, ToolContent([text]))

    def append(self) -> None:
        """Appends a turn for each result, in the order of the calls."""
        turns = [
            RoleExpression("tool", (variable,) if content is None else content.parts, call)
            for variable, content, call in zip(self._variables, self._contents, self.calls, strict=True)
        ]
        self._state.add(Sequence_(tuple(turns)))

    async def failure(self) -> None:
        """Returns when the state has failed, or was cancelled. Returns also when all results are there."""
        for node in self._nodes:
            await node.settled()
            if node.error is not None:
                return

    def raise_failure(self) -> None:
        """Raises the failure of the state."""
        for node in self._nodes:
            node.raise_failure()


class _Calls:
    """Runs tool calls within the limits."""

    def __init__(
        self, toolbox: Toolbox, max_calls: int | None, timeout_s: float | None, approve: Approve | None
    ) -> None:
        self._toolbox = toolbox
        self._max_calls = max_calls
        self._timeout_s = timeout_s
        self._approve = approve
        self._num_runs: Counter[str] = Counter()
        self._threads: anyio.CapacityLimiter | None = None

    async def run(self, results: _Results, emit: Emit) -> None:
        """Runs the calls of one reply. Raises if its state fails meanwhile."""
        if results.is_replay:
            for index, call in enumerate(results.calls):
                emit(ToolStarted(call))
                text = await results.recorded(index)
                emit(ToolDone(call, text, text.startswith(ERROR)))
            return
        with anyio.CancelScope(deadline=results.deadline) as limited:
            async with open_task_group() as watching:
                watching.start_soon(_cancel_after, results.failure, watching.cancel_scope)
                async with open_task_group() as group:
                    for index, received in enumerate(results.calls):
                        call, tool, fault = await self._checked(received)
                        emit(ToolStarted(call))
                        end = partial(_end, results, index, call, emit)
                        if tool is None:
                            end(ToolContent([f"{ERROR}{fault}"]))
                        else:
                            group.start_soon(self._run_one, tool, call, results, end)
                watching.cancel_scope.cancel()
        results.raise_failure()
        if limited.cancelled_caught:
            raise results.deadline_passed()

    async def _checked(self, received: ToolCall) -> tuple[ToolCall, DescribedTool | None, str]:
        """The call with typed arguments, and its tool; or why it does not run."""
        try:
            tool = self._toolbox[received.name]
        except ValueError as error:
            return received, None, str(error)
        call = tool.call(received.text, received.id)
        if call.fault:
            return received, None, call.fault
        if self._max_calls is not None and self._num_runs.total() >= self._max_calls:
            return call, None, f"not run: the limit of {self._max_calls} calls is reached"
        if tool.max_calls is not None and self._num_runs[tool.name] >= tool.max_calls:
            return call, None, f"not run: the limit of {tool.max_calls} calls of {tool.name!r} is reached"
        if self._approve is not None:
            asked = _Asked(call, tool)
            verdict = await self._called("approve", self._approve, asked.shown)
            if not isinstance(verdict, bool | str | Mapping):
                raise BadArgument(
                    f"act: approve returned {verdict!r:.80}: return True, False, why the call is denied, or "
                    "a dict of the arguments with which it runs",
                    param="approve",
                )
            if verdict is False or isinstance(verdict, str):
                return call, None, f"the call was denied: {verdict}" if verdict else "the call was denied"
            call = asked.approved(asked.shown.arguments if verdict is True else verdict)
        self._num_runs[tool.name] += 1
        return call, tool, ""

    async def _run_one(
        self, tool: DescribedTool, call: ToolCall, results: _Results, end: Callable[[ToolContent], None]
    ) -> None:
        timeout_s = self._timeout_s if tool.timeout_s is None else tool.timeout_s
        failure: Exception | None = TimeoutError(f"the call took longer than {timeout_s} s")
        content = ToolContent([f"{ERROR}{failure}"])
        outer = results.span
        span = None if outer is None else outer.tool(call.name, call.id, tool.description, call.text)
        with span or nullcontext():
            with anyio.move_on_after(timeout_s):
                try:
                    assert tool.function is not None
                    result = await self._called(f"tool {tool.name!r}", tool.function, **call.arguments)
                    with UserCode(f"the result of tool {tool.name!r}"):
                        content = content_of_result(result).for_model(results.model)
                    failure = None
                except Exception as error:
                    logger.info("tool %r failed", tool.name, exc_info=True)
                    content, failure = ToolContent([f"{ERROR}{shown_for_model(error)}"]), error
            if span is not None:
                span.complete(content.text, failure)
        end(content)

    async def _called(self, what: str, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        if self._threads is None:
            self._threads = anyio.CapacityLimiter(MAX_THREADS)
        return await user_code.call(what, self._threads, function, *args, **kwargs)


class _Asked:
    """A call about which the hook is asked. ``shown``: the hook's copy, whose arguments it may edit."""

    def __init__(self, call: ToolCall, tool: DescribedTool) -> None:
        self._call = call
        self._tool = tool
        try:
            arguments = copy.deepcopy(call.arguments)
        except Exception:  # a type may have no copies
            arguments = tool.call(call.text, call.id).arguments
        self.shown = replace(call, arguments=arguments)
        self._given = dict(arguments)
        self._texts = {name: _text_or_none(value) for name, value in arguments.items()}

    def approved(self, arguments: Mapping[str, Any]) -> ToolCall:
        """The call with these arguments, validated like the model's. Values that the hook kept are unchanged,
        in the text too. ``BadArgument`` if the arguments are invalid."""
        call, kept = self._call, {name for name in arguments if self._is_kept(name, arguments[name])}
        if kept == arguments.keys() == call.arguments.keys():
            return call
        written = msgspec.json.decode(call.text, type=dict[str, msgspec.Raw])
        try:
            whole = {
                name: written[name] if name in kept else msgspec.Raw(json_text(value).encode())
                for name, value in arguments.items()
                if name in written or name not in kept  # the others are defaults
            }
            changed = self._tool.call(msgspec.json.encode(whole).decode(), call.id)
        except ValueError as error:
            raise BadArgument(f"act: approve returned {arguments!r:.80}: {error}", param="approve") from error
        if changed.fault:
            raise BadArgument(f"act: the arguments that approve returned: {changed.fault}", param="approve")
        # A default may differ each time that it is made: the tool gets the values that the hook approved.
        own = {name: call.arguments[name] if name in kept else changed.arguments[name] for name in arguments}
        return replace(changed, arguments=changed.arguments | own)

    def _is_kept(self, name: str, value: Any) -> bool:
        """Whether it is the argument that the hook was given, and was not edited. Equal JSON is read as an
        equal value. ``==`` would take 1 for True, and compares types without it by identity."""
        if name not in self._given:
            return False
        if (text := self._texts[name]) is not None:
            return text == _text_or_none(value)
        kind: Any = type(value)
        if kind.__eq__ is object.__eq__:
            return value is self._given[name]
        return kind is type(self._given[name]) and bool(value == self._call.arguments[name])


def _text_or_none(value: Any) -> str | None:
    """The value as JSON; None if it has no form that its type reads again."""
    try:
        return json_text(value)
    except ValueError:
        return None


async def _cancel_after(wait: Callable[[], Awaitable[None]], scope: anyio.CancelScope) -> None:
    await wait()
    scope.cancel()


def _end(results: _Results, index: int, call: ToolCall, emit: Emit, content: ToolContent) -> None:
    content = results.give(index, content)
    emit(ToolDone(call, content.text, content.text.startswith(ERROR)))
