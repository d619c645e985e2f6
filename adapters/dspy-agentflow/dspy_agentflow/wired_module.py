"""``wired``: a DSPy program whose predictors get each other's outputs by reference.

A run calls the program unchanged, with an adapter around the configured one. The adapter starts each
predictor's call in a background loop. If the code only passes the outputs on (``call_sites``), the call
returns ``_Pending`` values without waiting. In the prompt of a later predictor, DSPy's adapter formats a
placeholder for such a value, and in ``answers`` a ``WiredCall`` sends the prompt with references instead.
The texts of the references are then compared with the outputs that DSPy parsed. If they differ, the
later call is repeated with DSPy's outputs.
"""

from __future__ import annotations

import asyncio
import contextvars
import re
from collections.abc import AsyncGenerator, Generator, Iterable, Iterator
from concurrent.futures import Future, InvalidStateError
from contextlib import contextmanager, suppress
from dataclasses import fields, is_dataclass, replace
from functools import partial
from typing import Any, Final, Literal, get_args, get_origin
from uuid import uuid4

import anyio
import dspy
from dspy.utils.callback import ACTIVE_CALL_ID

import agentflow as af
from agentflow.integrations import (
    Answer,
    Appendable,
    BackgroundLoop,
    ModelConnection,
    Objective,
    WiredProgram,
    open_task_group,
)
from dspy_agentflow.answers import Asked
from dspy_agentflow.call_notes import WIRED_CALL
from dspy_agentflow.call_sites import UnwiredPart, pending_use, unwired_calls
from dspy_agentflow.lm import BaseAgentflowLM
from dspy_agentflow.programs import register_callback

_LOOP: Final = BackgroundLoop("agentflow wired DSPy programs")
# The text of a field as ``dspy.ChatAdapter`` reads it: from its header to the next one.
_SECTION: Final = r"(?s)(?:\A|\n)[^\S\n]*\[\[ ## %s ## \]\]\s*(.*?)\s*(?:\n[^\S\n]*\[\[ ## \w+ ## \]\]|\Z)"
_TURNS: Final = {"system": af.system, "user": af.user, "assistant": af.assistant}


def wired(module: dspy.Module) -> WiredModule:
    """Returns a program with the same results, whose predictors' outputs are passed to later prompts in the
    backend, without a round trip.

    ``dspy.Predict`` and ``dspy.ChainOfThought`` are wired if the code only passes their outputs to other
    predictors and returns them. The program waits for other calls, as in DSPy; ``unwired`` lists them.
    ``BadArgument`` for anything but a module.

    >>> program = wired(Essay())  # its forward: outline = self.outline(topic=topic), self.write(outline=…)
    >>> program.unwired
    ()
    >>> program(topic="rivers").essay
    """
    if not isinstance(module, dspy.Module):
        raise af.errors.BadArgument(f"wired: give a dspy.Module, not {module!r:.80}", param="module")
    return WiredModule(module.module if isinstance(module, WiredModule) else module)


class WiredModule(dspy.Module):
    """A program that runs wired; made by ``wired``. ``module``: the program."""

    def __init__(self, module: dspy.Module) -> None:
        super().__init__()
        self.module = module
        register_callback()

    @property
    def unwired(self) -> tuple[UnwiredPart, ...]:
        """The calls that the program waits for, in the order of its code, with the current settings."""
        reason = _unwired_adapter(dspy.settings.adapter or dspy.ChatAdapter())
        if reason:
            return (UnwiredPart("adapter", reason),)
        models = [
            UnwiredPart(name.removeprefix("module."), "its LM is not one of agentflow's")
            for name, predictor in self.named_predictors()
            if not isinstance(predictor.lm or dspy.settings.lm, BaseAgentflowLM | None)
        ]
        return (*models, *unwired_calls(self.module, _ROOTS))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the program."""
        with _run() as run:
            result = self.module(*args, **kwargs)
            run.wait()
            return _settled(result)

    async def aforward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the program, without blocking the event loop."""
        with _run() as run:
            result = await self.module.acall(*args, **kwargs)
            await run.await_all()
            return _settled(result)


_ROOTS: Final = (WiredModule.forward.__code__, WiredModule.aforward.__code__)


@contextmanager
def _run() -> Generator[_Run, None, None]:
    adapter = dspy.settings.adapter or dspy.ChatAdapter()
    if isinstance(adapter, _WiredAdapter):  # a wired program in a wired one
        adapter = adapter.inner
    run = _Run()
    try:
        with dspy.settings.context(adapter=_WiredAdapter(run, adapter)):
            yield run
    finally:
        run.close()


class _Run:
    """One run of a program."""

    def __init__(self) -> None:
        self.is_open = True
        self.num_calls = 0
        self.call_id = ACTIVE_CALL_ID.get()
        self._pending: list[WiredCall] = []
        self._programs: dict[int, tuple[ModelConnection, WiredProgram]] = {}
        self._tasks = _LOOP.stream(self._serve)
        next(self._tasks)

    async def _serve(self) -> AsyncGenerator[None, None]:
        async with open_task_group() as self._group:
            yield None
            await anyio.sleep_forever()

    def start(self, call: WiredCall, *, is_pending: bool) -> None:
        """Starts a call in the background. ``is_pending``: the program does not wait for it."""
        if is_pending:
            self._pending.append(call)
        context = contextvars.copy_context()

        async def perform() -> None:
            for variable, value in context.items():
                variable.set(value)
            # The module that makes the call may end before the call does.
            ACTIVE_CALL_ID.set(self.call_id)
            await call.perform()

        def begin() -> None:
            call.begin()
            self._group.start_soon(perform)

        _LOOP.call_soon(begin)

    def program(self, connection: ModelConnection, name: str, objective: Objective | None) -> WiredProgram:
        """The program of the run's calls on a connection. Only called in the background."""
        if id(connection) not in self._programs:
            self._programs[id(connection)] = (connection, WiredProgram(connection, name, objective))
        return self._programs[id(connection)][1]

    def wait(self) -> None:
        """Waits for all calls. Raises the first failure, in the program's order."""
        for call in self._pending:
            call.outputs.result()
        self._settle_trace()

    async def await_all(self) -> None:
        """Like ``wait``, without blocking the event loop."""
        for call in self._pending:
            await asyncio.wrap_future(call.outputs)
        self._settle_trace()

    def close(self) -> None:
        """Cancels the calls that have not ended."""
        self.is_open = False
        self._tasks.close()
        for call in self._pending:
            call.outputs.cancel()
        for connection, program in list(self._programs.values()):
            connection.shared.loop.call_soon(program.close)

    def _settle_trace(self) -> None:
        """Fills in the values of the entries that the run added to DSPy's trace."""
        trace = dspy.settings.trace or []
        for _, inputs, prediction in trace[max(0, len(trace) - self.num_calls) :]:
            _settled(inputs)
            _settled(prediction)


class _WiredAdapter:
    """The adapter ``inner``, whose calls become calls of the run."""

    def __init__(self, run: _Run, inner: Any) -> None:
        self._run = run
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def __call__(self, lm: Any, lm_kwargs: Any, signature: Any, demos: Any, inputs: Any) -> Any:
        call = self._started(lm, lm_kwargs, signature, demos, inputs)
        if call is None:
            return self.inner(lm, lm_kwargs, signature, demos, _settled(inputs))
        return call.values() if call.is_pending else call.outputs.result()

    async def acall(self, lm: Any, lm_kwargs: Any, signature: Any, demos: Any, inputs: Any) -> Any:
        call = self._started(lm, lm_kwargs, signature, demos, inputs)
        if call is None:
            for pending in _pending_in(inputs):
                await asyncio.wrap_future(pending.call.outputs)
            return await self.inner.acall(lm, lm_kwargs, signature, demos, _settled(inputs))
        return call.values() if call.is_pending else await asyncio.wrap_future(call.outputs)

    def _started(
        self, lm: Any, lm_kwargs: dict[str, Any], signature: Any, demos: Any, inputs: dict[str, Any]
    ) -> WiredCall | None:
        """The call, started in the background; None if DSPy makes it."""
        self._run.num_calls += 1
        options = {**getattr(lm, "kwargs", {}), **lm_kwargs}
        if (
            not self._run.is_open
            or not isinstance(lm, BaseAgentflowLM)
            or _unwired_adapter(self.inner)
            or dspy.settings.send_stream is not None
            or (options.get("n") or 1) > 1
            or options.get("logprobs")
        ):
            return None
        use = pending_use(_ROOTS, 2)
        outputs = signature.output_fields
        needed = [name for name in outputs if use.fields is None or name in use.fields]
        is_pending = not use.reason and all(is_plain(outputs[name].annotation) for name in needed)
        if not is_pending and not any(True for _ in _pending_in(inputs)):
            return None
        call = WiredCall(self._run, self.inner, lm, lm_kwargs, signature, demos, inputs, is_pending)
        self._run.start(call, is_pending=is_pending)
        return call


class WiredCall:
    """One call of a predictor. ``outputs``: the result of the adapter."""

    def __init__(
        self,
        run: _Run,
        adapter: Any,
        lm: Any,
        lm_kwargs: dict[str, Any],
        signature: Any,
        demos: Any,
        inputs: dict[str, Any],
        is_pending: bool,
    ) -> None:
        self.outputs: Future[list[dict[str, Any]]] = Future()
        self.is_pending = is_pending
        self.signature = signature
        self._run = run
        self._adapter = adapter
        self._lm = lm
        self._lm_kwargs = lm_kwargs
        self._demos = demos
        self._inputs = inputs
        self._tokens: dict[str, _Pending] = {}  # placeholder → the output that it stands for
        self._has_asked = False
        self._connection: ModelConnection | None = None
        self._program: WiredProgram | None = None
        self._variable: Any = None

    def values(self) -> list[dict[str, Any]]:
        """The outputs, pending."""
        outputs = self.signature.output_fields
        return [{name: _Pending(self, name, field.annotation) for name, field in outputs.items()}]

    def begin(self) -> None:
        """Begins the call, in the background loop."""
        self._sent = anyio.Event()  # or has ended
        self._has_ended = anyio.Event()

    async def perform(self) -> None:
        """Makes the call, in the background loop."""
        try:
            inputs = {name: await self._given(value) for name, value in self._inputs.items()}
            # The placeholders are new in each run.
            lm_kwargs = {**self._lm_kwargs, "cache": False} if self._tokens else self._lm_kwargs
            token = WIRED_CALL.set(self)
            try:
                outputs = await self._adapter.acall(self._lm, lm_kwargs, self.signature, self._demos, inputs)
            finally:
                WIRED_CALL.reset(token)
        except Exception as error:
            with suppress(InvalidStateError):  # the run was closed
                self.outputs.set_exception(error)
        else:
            with suppress(InvalidStateError):
                self.outputs.set_result(outputs)
        finally:
            self.outputs.cancel()  # unless it has ended
            self._has_ended.set()
            self._sent.set()

    async def answers(
        self, connection: ModelConnection, asked: Asked, name: str, objective: Objective | None
    ) -> list[Answer] | None:
        """Returns the answer, generated with references in the prompt. None if the call must be made with
        ``filled`` messages: it is not the first attempt, an earlier call was retried, or its text differs
        from DSPy's."""
        is_first, self._has_asked = not self._has_asked, True
        sources = [pending.call for pending in self._tokens.values()]
        if not is_first or asked.n != 1 or any(source._connection is not connection for source in sources):
            return None
        if self._tokens and (asked.tools or asked.messages[-1].role not in ("system", "user")):
            return None
        self._connection = connection
        self._program = program = self._run.program(connection, name, objective)

        async def send() -> Any:
            call = asked.call()
            prompt = self._turns(asked.messages) if self._tokens else [call.prompt]
            return await program.call(prompt, call.output, call.cache_salt, call.deadline_s)

        loop = connection.shared.loop
        try:
            self._variable = variable = await loop.arun(send)
            self._sent.set()
            answer = await loop.arun(lambda: program.answer(variable))
            for pending in self._tokens.values():
                reference = pending.call.reference(pending.field)
                if await loop.arun(partial(program.text, reference)) != await pending.text():
                    return None
        except af.errors.AgentflowError:
            if not self._tokens and not asked.max_retries:
                raise
            return None
        return [answer]

    async def filled(self, asked: Asked) -> Asked:
        """Returns the call with texts in place of the placeholders. Waits for them."""
        if not self._tokens:
            return asked
        texts = {token: await pending.text() for token, pending in self._tokens.items()}
        messages = [replace(one, content=_filled(one.content, texts)) for one in asked.messages]
        return replace(asked, messages=messages)

    def shown(self, entry: Any) -> Any:
        """Returns an entry of DSPy's history with texts in place of the placeholders."""
        if not self._tokens:
            return entry
        ended = {token: one for token, one in self._tokens.items() if one.call.outputs.done()}
        return _filled(entry, {token: str(one.value()) for token, one in ended.items()})

    def reference(self, field: str) -> Any:
        """The text of an output in the backend; None if the call was not sent, or the text differs."""
        annotation = self.signature.output_fields[field].annotation
        if self._variable is None or not is_plain(annotation):
            return None
        if type(self._adapter) is dspy.JSONAdapter:
            return None if annotation is bool else self._variable.json(field)
        return self._variable.regex(_SECTION % field)

    async def _given(self, value: Any) -> Any:
        """An input: a placeholder where the prompt can refer to the value."""
        if type(value) is list:
            for pending in _pending_in({"": value}):
                await pending.call._has_ended.wait()
            return [one.value() if type(one) is _Pending else one for one in value]
        if type(value) is not _Pending:
            return value
        source = value.call
        await source._sent.wait()
        if source.outputs.done() or source.reference(value.field) is None:
            await source._has_ended.wait()
            return value.value()
        token = f"\ue000{uuid4().hex}\ue001"
        self._tokens[token] = value
        return token

    def _turns(self, messages: Iterable[af.Message]) -> list[Appendable]:
        items: dict[str, Any] = {
            token: pending.call.reference(pending.field) for token, pending in self._tokens.items()
        }
        turns: list[Appendable] = []
        for message in messages:
            pieces: list[Any] = re.split(f"({'|'.join(items)})", message.content)
            turns.append(_TURNS[message.role](*[items.get(piece, piece) for piece in pieces if piece]))
        return turns


class _Pending:
    """An output of a call that may not have ended. Code that uses it, such as a callback, waits."""

    def __init__(self, call: WiredCall, field: str, annotation: Any) -> None:
        self.call = call
        self.field = field
        self._annotation = annotation

    def value(self) -> Any:
        """The value; blocks until it is known."""
        return self.call.outputs.result()[0][self.field]

    async def text(self) -> str:
        """The text in a prompt, in the background loop."""
        await self.call._has_ended.wait()
        return str(self.value())

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        """The class of the value, for DSPy's check of an input's type."""
        annotation = self._annotation
        return annotation if annotation in (str, int, bool) else str

    def __getattr__(self, name: str) -> Any:
        return getattr(self.value(), name)

    def __hash__(self) -> int:
        return hash(self.value())

    def __eq__(self, other: object) -> bool:
        return bool(self.value() == other)

    def __str__(self) -> str:
        return str(self.value())

    def __repr__(self) -> str:
        return repr(self.value())

    def __format__(self, spec: str) -> str:
        return format(self.value(), spec)


def is_plain(annotation: Any) -> bool:
    """Whether values of the type have the same text in answers and in prompts."""
    if get_origin(annotation) is Literal:
        return all(isinstance(value, str) for value in get_args(annotation))
    return annotation in (str, int, bool)


def _pending_in(inputs: dict[str, Any]) -> Iterator[_Pending]:
    """The pending outputs among a predictor's inputs, and in lists of them."""
    for value in inputs.values():
        for one in value if type(value) is list else [value]:
            if type(one) is _Pending:
                yield one


def _unwired_adapter(adapter: Any) -> str:
    """The reason why calls with the adapter are not wired; empty if they are."""
    if type(adapter) in (dspy.ChatAdapter, dspy.JSONAdapter):
        return ""
    return f"only ChatAdapter and JSONAdapter are wired, not {type(adapter).__name__}"


def _settled(value: Any) -> Any:
    """The value with pending outputs replaced by their values. Predictions, dicts and lists are changed in
    place."""
    if type(value) is _Pending:
        return value.value()
    if isinstance(value, dspy.Prediction):
        _settled(value._store)
        if value._completions is not None:
            _settled(value._completions._completions)
    elif isinstance(value, dict):
        for name, one in value.items():
            value[name] = _settled(one)
    elif isinstance(value, list):
        value[:] = [_settled(one) for one in value]
    elif type(value) is tuple:
        return tuple([_settled(one) for one in value])
    return value


def _filled(value: Any, texts: dict[str, str]) -> Any:
    """The value with texts in place of the placeholders."""
    if isinstance(value, str):
        for token, text in texts.items():
            value = value.replace(token, text)
        return value
    if isinstance(value, dict):
        return {name: _filled(one, texts) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return type(value)([_filled(one, texts) for one in value])
    if is_dataclass(value) and not isinstance(value, type):
        parts = {one.name: getattr(value, one.name) for one in fields(value) if one.init}
        return replace(value, **{name: _filled(one, texts) for name, one in parts.items()})
    return value
