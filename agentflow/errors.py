"""All errors of agentflow, as one tree. Programs import the ones they catch most from ``agentflow`` itself.

::

    AgentflowError
    ├── ProgramError            the program misuses the language
    │   ├── BadArgument         (also a ValueError)
    │   ├── UnknownVariable     (also a KeyError)
    │   ├── StateClosed         the state, or the session, has ended, or the branch is sealed
    │   ├── ForeignState        an op refers to another session, or a join to another fork
    │   ├── BacklogFull         too many unfinished ops in one state
    │   ├── DataDependent       a traced program depends on a generated value
    │   └── ConcurrentAppend    two tasks append to one state concurrently
    ├── RequestRefused          the backend rejects one request
    │   ├── NotSupported        the backend does not have the feature
    │   ├── PromptTooLong       prompt and output exceed the context length or the KV pool
    │   └── FrameTooLarge       one op exceeds the frame size limit
    ├── LimitExceeded
    │   ├── DeadlineExceeded    the session or the state exceeded its time limit
    │   └── BudgetExceeded      the session or the state used up its output tokens
    ├── RunFailed               a dependency failed; ``__cause__`` is its error
    │   ├── InvalidValue        the generated text is not a value of the requested type
    │   └── ScriptMismatch      the script has no valid answer for the prompt
    ├── Cancelled               the state was cancelled
    ├── RecordingError
    │   ├── BadRecording        the file is not a recording, or of another version
    │   └── ReplayDiffers       the program differs from the recording
    ├── ModelError
    │   ├── UnknownModel        no model has this name or path
    │   ├── BadModelFolder      the folder contains no usable model
    │   └── PullFailed          a download or its verification failed
    ├── ServerError
    │   ├── ServerUnreachable   no server answers at the URL
    │   ├── ServerLost          the connection was lost and could not be resumed
    │   ├── ProtocolError       an invalid frame
    │   ├── Overloaded          a limit of the server is reached; retry later
    │   │   └── RateLimited     the tenant exceeded its rate or its number of requests
    │   ├── NotAuthorized       the API key is missing, invalid, or not allowed to do this
    │   └── PortInUse           the server's address is in use
    └── EngineFailed            the engine failed, not because of the request
        └── EngineDown          it is restarting or has stopped; retry later

``BlockingWarning`` is a warning, which the filters of ``warnings`` show, drop or make an error.

Each class has a ``code``, its name on the wire; ``from_code`` makes the error again. ``incident`` logs an
internal error and makes one for the client that has only an id.

>>> from agentflow import errors
>>> errors.from_code("port_in_use", "127.0.0.1:8410 is in use")
PortInUse('127.0.0.1:8410 is in use')
"""

from __future__ import annotations

import logging
import reprlib
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, ClassVar, Literal

if TYPE_CHECKING:
    import ssl

MAX_MESSAGE_CHARS = 4_000
MAX_CAUSES = 16
"""The limit of causes of one error, on the wire too: a hostile peer could nest more."""


class AgentflowError(Exception):
    """Base of all errors of agentflow.

    >>> try:
    ...     grade = await flow.run(judge, essay)
    ... except af.AgentflowError as error:
    ...     print(error, error.__cause__, error.__notes__)
    """

    code: ClassVar[str] = "error"
    place: tuple[int, int] | None = None
    """The op that failed: the number of its state, and its own number in that state, from 1."""
    param: str | None = None
    """The name of the invalid argument, request field, file or key of a model; None without one."""

    def __init__(self, *args: object, param: str | None = None) -> None:
        super().__init__(*(shorten_message(arg) if isinstance(arg, str) else arg for arg in args))
        if param is not None:
            self.param = param


class ProgramError(AgentflowError):
    """The program misuses the language."""

    code = "program_error"


class BadArgument(ProgramError, ValueError):
    """An argument is invalid.

    >>> af.gen("answer", max_tokens=0)
    Traceback (most recent call last):
    BadArgument: gen: max_tokens must be a whole number from 1 to 2147483647, not 0
    """

    code = "bad_argument"


class UnknownVariable(ProgramError, KeyError):
    """``s["x"]`` when no op has declared ``x``.

    >>> s["question"]
    Traceback (most recent call last):
    UnknownVariable: this state has no variable 'question' (it has: 'answer'): append its gen first
    """

    code = "unknown_variable"
    variable: str | None = None
    """The name."""
    known: tuple[str, ...] = ()
    """The names of the state's variables."""

    def __init__(
        self,
        *args: object,
        variable: str | None = None,
        known: Iterable[str] = (),
        param: str | None = None,
    ) -> None:
        super().__init__(*args, param=param)
        self.variable, self.known = variable, tuple(known)

    def __str__(self) -> str:  # KeyError would show the repr
        return str(self.args[0]) if self.args else ""


ClosedReason = Literal["sealed", "cancelled", "ended"]


class StateClosed(ProgramError):
    """The state or the session has ended, or the branch is sealed.

    >>> async with s.fork(2) as branches:
    ...     pass
    >>> branches[0] += "more"
    Traceback (most recent call last):
    StateClosed: state (2,) was sealed when its fork's block was left: nothing can be appended to it; ...
    """

    code = "state_closed"
    reason: ClosedReason | None = None
    """``sealed``, ``cancelled``, or ``ended``, with its run or the session. None if the session was not
    opened, and for errors of servers of older versions."""

    def __init__(self, *args: object, reason: ClosedReason | None = None, param: str | None = None) -> None:
        super().__init__(*args, param=param)
        if reason is not None:
            self.reason = reason


class ForeignState(ProgramError):
    """A state or variable of another session, or of another fork.

    >>> s.join(s.copy().fork(2))  # raises ForeignState
    """

    code = "foreign_state"


class BacklogFull(ProgramError):
    """A state has too many unfinished ops. Await something before appending more.

    >>> for _ in range(20_000):  # raises BacklogFull
    ...     s += "more"
    """

    code = "backlog_full"


class DataDependent(ProgramError):
    """The program depends on a generated value, which does not exist in a trace.

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
    """Two tasks append to one state concurrently, so the order of the ops would be random.

    >>> async def write(state: af.State, line: str) -> None:
    ...     for _ in range(2):
    ...         state.add(line)
    ...         await anyio.lowlevel.checkpoint()
    >>> try:
    ...     async with anyio.create_task_group() as tasks:
    ...         tasks.start_soon(write, s, "one")
    ...         tasks.start_soon(write, s, "two")
    ... except* af.errors.ConcurrentAppend:
    ...     print("give each task a branch")
    give each task a branch
    """

    code = "concurrent_append"


class RequestRefused(AgentflowError):
    """The backend rejects one request. Others are not affected.

    >>> try:
    ...     grade = await flow.run(judge, essay)
    ... except af.PromptTooLong:
    ...     grade = await flow.run(judge, essay[:1000])
    """

    code = "request_refused"


class NotSupported(RequestRefused):
    """The backend does not have the requested feature.

    >>> s.token_ids()  # of a scripted answer
    Traceback (most recent call last):
    NotSupported: scripted does not report tokens
    """

    code = "not_supported"


class PromptTooLong(RequestRefused):
    """The prompt leaves no room for output in the model's context or the KV pool."""

    code = "prompt_too_long"


class FrameTooLarge(RequestRefused):
    """One op exceeds the server's frame size limit."""

    code = "frame_too_large"


class RunFailed(AgentflowError):
    """A dependency of this value or state failed. ``__cause__`` is the error of the dependency.

    >>> s += s["answer"].json("score")
    >>> await s
    Traceback (most recent call last):
    RunFailed: json('score'): the text is not JSON (...): 'Plants turn light into sugar.'
    """

    code = "run_failed"


class InvalidValue(RunFailed, ValueError):
    """The generated text is not a value of the requested type, for example because ``max_tokens`` truncated
    it.

    >>> report = af.gen("report", schema=Report)
    >>> s += af.user("What is the weather in Oslo?") + af.assistant(report)
    >>> await s[report]
    Traceback (most recent call last):
    InvalidValue: 'report' ended (eos) with a text that is not a valid Report: '[{...}]' by scripted (...)

    ``__cause__`` is the error of the type's library.
    """

    code = "invalid_value"
    text: str = ""
    """The whole text."""
    usage: Any = None
    """The ``af.Usage`` of an answer that the backend found invalid, which is in no variable's; else None."""
    errors: tuple[Mapping[str, Any], ...] = ()
    """The faults of the text, as pydantic lists them: ``loc`` (the keys that lead to the place), ``msg`` and
    more. Empty for a truncated text."""


class ScriptMismatch(RunFailed):
    """The script of ``af.Scripted`` has no answer for the prompt, or one that the op does not allow. Program
    and test do not match, so a retry fails too.

    >>> async with af.session(backend=af.Scripted(["maybe"])) as flow, flow.state() as s:
    ...     s += af.select("related", ["yes", "no"])
    ...     await s["related"]
    Traceback (most recent call last):
    ScriptMismatch: the script answers 'maybe' for 'related', which is none of the choices ['yes', 'no']
    """

    code = "script_mismatch"


class LimitExceeded(AgentflowError):
    """A limit that the program set was exceeded. All later ops of a state that exceeded its own limit, or its
    session's, fail with this error too."""

    code = "limit_exceeded"


class DeadlineExceeded(LimitExceeded):
    """The session or the state exceeded its time limit.

    >>> s.limit(deadline_s=0)
    >>> s += af.user("Why?") + af.gen("answer")
    >>> await s["answer"]  # raises DeadlineExceeded
    """

    code = "deadline_exceeded"


class BudgetExceeded(LimitExceeded):
    """The session or the state used up its output tokens, or the session its ``max_cost``. ``param``: the
    name of the limit, ``output_tokens`` or ``max_cost``.

    >>> await s
    >>> s.limit(output_tokens=2)
    >>> s += af.user("Why?") + af.gen("answer", max_tokens=64)
    >>> await s["answer"]  # raises BudgetExceeded
    """

    code = "budget_exceeded"
    usage: Any = None
    """The ``af.Usage`` of the answer that the limit cut, which is in no variable's; else None. Of an answer
    that several generations together cut, it has only the output tokens."""


class Cancelled(AgentflowError):
    """The state was cancelled before this value was complete. The message has the reason. ``path``: of the
    state, in the fork tree. ``variable``: the name of the variable that was awaited, None if it was the
    state.

    >>> s += af.user("Why?") + af.gen("answer")
    >>> s.cancel()
    >>> await s["answer"]
    Traceback (most recent call last):
    Cancelled: variable 'answer' of state () was cancelled: cancel() of state () was called at ...
    """

    code = "cancelled"
    path: tuple[int, ...] | None = None
    variable: str | None = None


class BlockingWarning(RuntimeWarning):
    """A line of the program blocks the event loop, so that no other program runs and no text arrives. Issued
    once for each line, after it has blocked for 100 ms. The environment variable ``AGENTFLOW_BLOCKING_MS``
    changes this time, and 0 turns the watch off. If warnings are errors, the session ends with a
    ``ProgramError``.

    >>> import warnings
    >>> warnings.filterwarnings("ignore", category=af.errors.BlockingWarning)
    """


class RecordingError(AgentflowError):
    """An error of a recording or of its replay."""

    code = "recording_error"


class BadRecording(RecordingError):
    """The file is not a recording, is damaged, or was written by another version.

    >>> af.Replay("chart.png")  # raises BadRecording
    """

    code = "bad_recording"


class ReplayDiffers(RecordingError):
    """The program differs from the recording. The message has the place and the difference.

    >>> async with af.session(record="run.jsonl") as flow:
    ...     grade = await flow.run(judge, essay)
    >>> async with af.session(backend=af.Replay("run.jsonl")) as flow:
    ...     grade = await flow.run(judge, "Another essay.")  # raises ReplayDiffers
    """

    code = "replay_differs"


class ModelError(AgentflowError):
    """A model is not available or not usable.

    >>> try:
    ...     async with af.session(model="smollm2-135m") as flow:
    ...         grade = await flow.run(judge, essay)
    ... except af.errors.ModelError as error:
    ...     print(f"no model here: {error}")
    """

    code = "model_error"


class UnknownModel(ModelError):
    """No model has this name, and no folder this path."""

    code = "unknown_model"


class BadModelFolder(ModelError):
    """The folder contains no usable model."""

    code = "bad_model_folder"


class PullFailed(ModelError):
    """The download of a model, or its verification, failed."""

    code = "pull_failed"


class ServerError(AgentflowError):
    """An error of the server or of the connection to it.

    >>> try:
    ...     async with af.session("ws://127.0.0.1:8410") as flow:
    ...         grade = await flow.run(judge, essay)
    ... except af.errors.ServerError as error:
    ...     print(f"no answer from there: {error}")
    """

    code = "server_error"


class ServerUnreachable(ServerError):
    """No server answers at the URL."""

    code = "server_unreachable"


class ServerLost(ServerError):
    """The connection was lost and could not be resumed. The session connects again, and later runs
    use the new connection."""

    code = "server_lost"


class ProtocolError(ServerError):
    """A frame is invalid."""

    code = "protocol_error"


class Overloaded(ServerError):
    """A limit of the server is reached. ``retry_after_s``: seconds until a retry makes sense, if known."""

    code = "overloaded"
    retry_after_s: float | None = None


class RateLimited(Overloaded):
    """The tenant exceeded its rate per minute, with ``retry_after_s`` set, or its number of unfinished
    requests, with ``retry_after_s`` unknown."""

    code = "rate_limited"


class NotAuthorized(ServerError):
    """The server requires an API key, or the key does not permit the request."""

    code = "not_authorized"


class PortInUse(ServerError):
    """The server's address is already in use."""

    code = "port_in_use"


class EngineFailed(AgentflowError):
    """The engine failed, not because of the request.

    >>> broken = af.Scripted([af.errors.EngineFailed("out of memory")])  # to test how a program handles it
    >>> async with af.session(backend=broken) as flow, flow.state() as s:
    ...     s += af.gen("answer")
    ...     await s["answer"]  # raises EngineFailed
    """

    code = "engine_failed"


class EngineDown(EngineFailed):
    """The engine has no process: it is restarting or has stopped. Retry later."""

    code = "engine_down"


@contextmanager
def error_param(param: str) -> Iterator[None]:
    """Sets ``param`` on errors that leave the block without one."""
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


def listed(names: Iterable[str], most: int = 10) -> str:
    """The first names, for a message that lists the available ones.

    >>> listed(["a", "b", "c"], most=2), listed([])
    ('a, b and 1 more', 'none')
    """
    every = [*names]
    more = f" and {len(every) - most:,} more" if len(every) > most else ""
    return (", ".join(every[:most]) or "none") + more


def untrusted_certificate(url: str, error: ssl.SSLCertVerificationError) -> str:
    """The message for a server whose certificate is not accepted."""
    return (
        f"the certificate of {url} is not accepted ({error.verify_message}): check the address, or set "
        "SSL_CERT_FILE to the certificate of its authority"
    )


def no_chat_template(model: str = "this model") -> NotSupported:
    """The error for turns, conversations and tools if the model has no chat template: it says what to do."""
    return NotSupported(
        f"{model} has no chat template, so it takes no turns and no tools: use plain text (over HTTP: "
        "/v1/completions), or give it a template where it is loaded (--chat-template FILE, or chat_template= "
        "of af.session and af.Embedded)"
    )


def from_code(code: str, message: str, param: str | None = None) -> AgentflowError:
    """The error of this code. An unknown code gives ``AgentflowError``."""
    return _BY_CODE.get(code, AgentflowError)(message, param=param)


def shorten_message(message: str) -> str:
    """``message`` without its middle if it exceeds ``MAX_MESSAGE_CHARS``: errors quote texts, and each
    other."""
    if len(message) <= MAX_MESSAGE_CHARS:
        return message
    half = MAX_MESSAGE_CHARS // 2
    return f"{message[:half]} … {message[-half:]}"


def incident(logger: logging.Logger, what: str, fault: BaseException) -> EngineFailed:
    """Logs the fault with its traceback and an id. Returns the error for the client, which has only the id.

    >>> raise incident(logger, "a websocket", fault)
    Traceback (most recent call last):
    agentflow.errors.EngineFailed: a websocket failed: the server's log explains it under incident 5f3a9c01
    """
    number = secrets.token_hex(4)
    logger.error("%s failed (incident %s)", what, number, exc_info=fault)
    return EngineFailed(f"{what} failed: the server's log explains it under incident {number}")


def shown_error(error: BaseException, show: Callable[[object], str] = repr) -> str:
    """The repr of an exception, or its ``str`` with ``show=str``; its class if that raises: exceptions of
    the user may have no text.

    >>> shown_error(OSError("no space")), shown_error(OSError("no space"), str)
    ("OSError('no space')", 'no space')
    """
    try:
        return show(error)
    except Exception:
        return type(error).__name__


def add_note(error: BaseException, note: str) -> None:
    """Adds a note to an exception, unless it is one of the user that cannot be changed.

    >>> error = OSError("no space")
    >>> add_note(error, "in map")
    >>> error.__notes__
    ['in map']
    """
    with suppress(Exception):
        error.add_note(note)


def causes(error: BaseException) -> Iterator[BaseException]:
    """Yields the error and its causes, at most ``MAX_CAUSES`` errors. Without a cause, the error that was
    being handled counts as one.

    >>> error = OSError("no space")
    >>> error.__context__ = KeyError("a")
    >>> list(causes(error))
    [OSError('no space'), KeyError('a')]
    """
    link: BaseException | None = error
    for _ in range(MAX_CAUSES):
        if link is None:
            return
        yield link
        link = link.__cause__ or link.__context__


def drop_tracebacks(error: BaseException) -> None:
    """Drops the tracebacks of an error and its causes, whose frames keep their locals alive. An exception of
    the user that cannot be changed keeps its own."""
    for link in causes(error):
        with suppress(Exception):
            link.__traceback__ = None


MAX_REPR = 120


def short_repr(item: object) -> str:
    """A repr of any object, shortened to ``MAX_REPR`` characters."""
    shortener = reprlib.Repr()
    shortener.maxstring = shortener.maxother = 60
    try:
        text = " ".join(shortener.repr(item).split())
    except Exception:  # an error message must not fail because of the object it describes
        text = f"a {type(item).__name__} without a repr"
    return text if len(text) <= MAX_REPR else f"{text[: MAX_REPR - 1]}…"
