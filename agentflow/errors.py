"""Every error agentflow raises, as one tree.

::

    AgentflowError
    ├── ProgramError            the program used the language wrongly
    │   ├── BadArgument         (also a ValueError)
    │   ├── UnknownVariable     (also a KeyError)
    │   ├── StateClosed         an op on a state after its scope, or on a sealed branch
    │   ├── ForeignState        objects of two sessions in one op
    │   ├── BacklogFull         too many ops wait on one state
    │   ├── DataDependent       a trace cannot know what the program asks there
    │   └── ConcurrentAppend    two tasks append to one state at the same time
    ├── RequestRefused          the backend refuses one request
    │   ├── NotSupported        the backend cannot do what was asked
    │   ├── PromptTooLong       prompt + output do not fit the context or the KV pool
    │   └── FrameTooLarge       one op is larger than a frame may be
    ├── LimitExceeded
    │   ├── DeadlineExceeded    the time that the session, the state or the gen had is over
    │   └── BudgetExceeded      the tokens that the session or the state had are used up
    ├── RunFailed               something a value depends on failed; the cause says what
    │   ├── InvalidValue        the text is there, and is no value of the type asked for
    │   └── ScriptMismatch      the script of a scripted backend has no fitting answer
    ├── Cancelled               the value's state was cancelled
    ├── RecordingError
    │   ├── BadRecording        a file that is no recording, or of another version
    │   └── ReplayDiffers       the program does something else than what was recorded
    ├── ModelError
    │   ├── UnknownModel        no such name or folder
    │   ├── BadModelFolder      a folder that holds no usable model
    │   └── PullFailed          a model could not be fetched or verified
    ├── ServerError
    │   ├── ServerUnreachable   nobody answers at the url
    │   ├── ServerLost          the connection is gone and could not be resumed
    │   ├── ProtocolError       a frame the other side does not understand
    │   ├── Overloaded          a limit of the server is reached; try later
    │   │   └── RateLimited     the tenant has used what it may use, in a minute or at once
    │   ├── NotAuthorized       no key, a wrong one, or one that does not allow this
    │   └── PortInUse           the address to serve on is taken
    └── EngineFailed            the engine itself broke; not the request's fault
        └── EngineDown          it is being restarted, or has stopped; try later

Each class has a ``code``: the name that goes over the wire. ``from_code`` finds the class again.

Faults of the library's own: the log explains one, and an error that goes to a client has only its id.
"""

from __future__ import annotations

import logging
import reprlib
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar

MAX_MESSAGE_CHARS = 4_000


class AgentflowError(Exception):
    """Root of the tree.

    >>> try:
    ...     grade = await flow.run(judge, essay)
    ... except af.AgentflowError as error:
    ...     print(error, error.__cause__, error.__notes__)
    """

    code: ClassVar[str] = "error"
    place: tuple[int, int] | None = None
    """Of the op that failed: its state's number, and the op's own number there, from 1. For the session."""
    param: str | None = None
    """The argument, or the field of a request, that is wrong, where it is one."""

    def __init__(self, *args: object, param: str | None = None) -> None:
        super().__init__(*(shortened(arg) if isinstance(arg, str) else arg for arg in args))
        if param is not None:
            self.param = param


class ProgramError(AgentflowError):
    """The program used the language wrongly."""

    code = "program_error"


class BadArgument(ProgramError, ValueError):
    """An argument's value makes no sense.

    >>> af.gen("answer", max_tokens=0)
    Traceback (most recent call last):
    BadArgument: gen: max_tokens must be a whole number, at least 1, not 0
    """

    code = "bad_argument"


class UnknownVariable(ProgramError, KeyError):
    """``s["x"]`` before any op declared ``x``.

    >>> s["nobody"]
    Traceback (most recent call last):
    UnknownVariable: this state has no variable 'nobody' (it has: 'answer'): append its gen first
    """

    code = "unknown_variable"

    def __str__(self) -> str:  # KeyError would show the repr
        return str(self.args[0]) if self.args else ""


class StateClosed(ProgramError):
    """An op on a state after its scope, or on a sealed branch.

    >>> async with s.fork(2) as branches:
    ...     pass
    >>> branches[0] += "more"
    Traceback (most recent call last):
    StateClosed: state (2,) was sealed when its fork's block was left: nothing can be appended to it
    """

    code = "state_closed"


class ForeignState(ProgramError):
    """A state or variable of another session, or of another fork.

    >>> s.join(s.copy().fork(2))  # raises ForeignState
    """

    code = "foreign_state"


class BacklogFull(ProgramError):
    """Too many ops wait on one state: await something first.

    >>> for _ in range(20_000):  # raises BacklogFull
    ...     s += "more"
    """

    code = "backlog_full"


class DataDependent(ProgramError):
    """The program's course follows from a value, and a trace has none.

    >>> @af.program
    ... async def brief(s: af.State) -> str:
    ...     s += af.gen("answer")
    ...     return (await s["answer"])[:20]
    >>> brief.trace()
    Traceback (most recent call last):
    DataDependent: ...: the value of 'answer' is indexed, and the program's next ops may depend on it: ...
    """

    code = "data_dependent"


class ConcurrentAppend(ProgramError):
    """Two tasks append to one state at the same time: the order would be chance.

    >>> async def write(state: af.State, line: str) -> None:
    ...     for _ in range(2):
    ...         state.add(line)
    ...         await anyio.lowlevel.checkpoint()
    >>> try:
    ...     async with anyio.create_task_group() as tasks:
    ...         tasks.start_soon(write, s, "one")
    ...         tasks.start_soon(write, s, "two")
    ... except* af.ConcurrentAppend:
    ...     print("give each task a branch")
    give each task a branch
    """

    code = "concurrent_append"


class RequestRefused(AgentflowError):
    """The backend refuses one request; nothing else is affected.

    >>> try:
    ...     grade = await flow.run(judge, essay)
    ... except af.PromptTooLong:
    ...     grade = await flow.run(judge, essay[:1000])
    """

    code = "request_refused"


class NotSupported(RequestRefused):
    """The backend cannot do what was asked, and does not pretend to.

    >>> s.token_ids()  # of a scripted answer
    Traceback (most recent call last):
    NotSupported: scripted does not tell its token ids
    """

    code = "not_supported"


class PromptTooLong(RequestRefused):
    """Prompt and output do not fit the model's context or the KV pool."""

    code = "prompt_too_long"


class FrameTooLarge(RequestRefused):
    """One op is larger than the server's frame limit."""

    code = "frame_too_large"


class RunFailed(AgentflowError):
    """Something that this value or state depends on failed; ``__cause__`` says what.

    >>> s += s["answer"].json("score")
    >>> await s
    Traceback (most recent call last):
    RunFailed: json('score'): the text is no JSON (...): 'Plants turn light into sugar.'
    """

    code = "run_failed"


class InvalidValue(RunFailed, ValueError):
    """The text is there, and is no value of the type that was asked for: cut by ``max_tokens``, say.

    >>> report = af.gen("report", schema=Report)
    >>> s += af.user("What is the weather in Oslo?") + af.assistant(report)
    >>> await s[report]
    Traceback (most recent call last):
    InvalidValue: 'report' ended (eos) with a text that is no Report: '[{"name": "weather", ...}]'
    """

    code = "invalid_value"


class ScriptMismatch(RunFailed):
    """The script of ``af.Scripted`` has no answer, or none that what was asked for allows. The program and
    its test disagree: the same call fails again.

    >>> async with af.session(backend=af.Scripted(["maybe"])) as flow, flow.state() as s:
    ...     s += af.select("related", ["yes", "no"])
    ...     await s["related"]
    Traceback (most recent call last):
    ScriptMismatch: the script answers 'maybe', which is none of the choices ['yes', 'no']
    """

    code = "script_mismatch"


class LimitExceeded(AgentflowError):
    """More was used than the program allowed."""

    code = "limit_exceeded"


class DeadlineExceeded(LimitExceeded):
    """The time that the session, the state or the gen had is over.

    >>> s += af.gen("answer", timeout_s=1e-9)
    >>> await s["answer"]  # raises DeadlineExceeded
    """

    code = "deadline_exceeded"


class BudgetExceeded(LimitExceeded):
    """The tokens that the session or the state had are used up.

    >>> await s
    >>> s.limit(output_tokens=2)
    >>> s += af.gen("answer", max_tokens=64)
    >>> await s["answer"]  # raises BudgetExceeded
    """

    code = "budget_exceeded"


class Cancelled(AgentflowError):
    """The state was cancelled before this value was there.

    >>> s += af.gen("answer")
    >>> s.cancel()
    >>> await s["answer"]  # raises Cancelled
    """

    code = "cancelled"


class RecordingError(AgentflowError):
    """The recording of a run, or its replay."""

    code = "recording_error"


class BadRecording(RecordingError):
    """The file is no recording, is damaged, or was written by another version.

    >>> af.Replay("chart.png")  # raises BadRecording
    """

    code = "bad_recording"


class ReplayDiffers(RecordingError):
    """The program does something else than what was recorded; the message says where and what.

    >>> async with af.session(record="run.jsonl") as flow:
    ...     grade = await flow.run(judge, essay)
    >>> async with af.session(backend=af.Replay("run.jsonl")) as flow:
    ...     grade = await flow.run(judge, "Another essay.")  # raises ReplayDiffers
    """

    code = "replay_differs"


class ModelError(AgentflowError):
    """A model cannot be had or used.

    >>> try:
    ...     async with af.session(model="smollm2-135m") as flow:
    ...         grade = await flow.run(judge, essay)
    ... except af.ModelError as error:
    ...     print(f"no model here: {error}")
    """

    code = "model_error"


class UnknownModel(ModelError):
    """No model of that name and no folder of that path."""

    code = "unknown_model"


class BadModelFolder(ModelError):
    """The folder holds no usable model."""

    code = "bad_model_folder"


class PullFailed(ModelError):
    """A model could not be fetched or verified."""

    code = "pull_failed"


class ServerError(AgentflowError):
    """The way to the server, or the server itself.

    >>> try:
    ...     async with af.session("ws://127.0.0.1:8410") as flow:
    ...         grade = await flow.run(judge, essay)
    ... except af.ServerError as error:
    ...     print(f"no answer from there: {error}")
    """

    code = "server_error"


class ServerUnreachable(ServerError):
    """Nobody answers at the url."""

    code = "server_unreachable"


class ServerLost(ServerError):
    """The connection is gone and could not be resumed."""

    code = "server_lost"


class ProtocolError(ServerError):
    """A frame that the receiver does not understand."""

    code = "protocol_error"


class Overloaded(ServerError):
    """A limit of the server is reached; try again later. ``retry_after_s``: when, where that is known."""

    code = "overloaded"
    retry_after_s: float | None = None


class RateLimited(Overloaded):
    """The tenant has used what it may use in a minute, and ``retry_after_s`` says when there is room again;
    or it has as many unfinished requests as it may have, and nobody knows when one ends."""

    code = "rate_limited"


class NotAuthorized(ServerError):
    """The server wants an API key, or this key does not allow what was asked."""

    code = "not_authorized"


class PortInUse(ServerError):
    """The address to serve on is taken."""

    code = "port_in_use"


class EngineFailed(AgentflowError):
    """The engine itself broke; not the request's fault.

    >>> broken = af.Scripted([af.EngineFailed("out of memory")])  # how to test what a program does then
    >>> async with af.session(backend=broken) as flow, flow.state() as s:
    ...     s += af.gen("answer")
    ...     await s["answer"]  # raises EngineFailed
    """

    code = "engine_failed"


class EngineDown(EngineFailed):
    """The engine has no process now: it is being restarted, or has stopped. Try again later."""

    code = "engine_down"


@contextmanager
def faults_of(param: str) -> Iterator[None]:
    """Around what deals with one argument or field: errors that name none are of this one."""
    try:
        yield
    except AgentflowError as error:
        error.param = error.param or param
        raise


def _tree(root: type[AgentflowError]) -> dict[str, type[AgentflowError]]:
    found = {root.code: root}
    for child in root.__subclasses__():
        found |= _tree(child)
    return found


_BY_CODE = _tree(AgentflowError)


def from_code(code: str, message: str) -> AgentflowError:
    """The error that travelled as ``code`` and ``message``; an unknown code gives the root class."""
    return _BY_CODE.get(code, AgentflowError)(message)


def shortened(message: str) -> str:
    """``message`` without its middle where it is very long: errors quote what failed, and each other."""
    if len(message) <= MAX_MESSAGE_CHARS:
        return message
    half = MAX_MESSAGE_CHARS // 2
    return f"{message[:half]} … {message[-half:]}"


def incident(logger: logging.Logger, what: str, fault: BaseException) -> EngineFailed:
    """Logs the fault with its traceback; the error that says ``what`` failed, and where to read why.

    >>> raise incident(logger, "a websocket", fault)
    Traceback (most recent call last):
    agentflow.errors.EngineFailed: a websocket failed: the server's log explains it under incident 5f3a9c01
    """
    number = secrets.token_hex(4)
    logger.error("%s failed (incident %s)", what, number, exc_info=fault)
    return EngineFailed(f"{what} failed: the server's log explains it under incident {number}")


MAX_REPR = 120


def short_repr(item: object) -> str:
    """A repr that fits a line, of any object."""
    shortened = reprlib.Repr()
    shortened.maxstring = shortened.maxother = 60
    try:
        text = " ".join(shortened.repr(item).split())
    except Exception:  # an error message must not fail for what it tells of
        text = f"a {type(item).__name__} without a repr"
    return text if len(text) <= MAX_REPR else f"{text[: MAX_REPR - 1]}…"
