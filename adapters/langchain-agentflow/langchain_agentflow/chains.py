"""``wired``: a chain that runs as one program of agentflow, whose model calls get each other's answers by
reference.

A run walks through the chain. A model call is sent to the backend without waiting for its answer; its value
is a ``_Pending``, which a prompt template puts into the next prompt as a reference. The walk waits only where
a part of the chain must run in this process, and at the end.

The walk is written once, as coroutines. Its driver runs them on the caller's event loop (``_Awaiting``) or
blocks in the caller's threads (``_Blocking``), in which case they never suspend.
"""

from __future__ import annotations

import re
import threading
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Generator,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import aclosing, closing, contextmanager
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any, Final, NamedTuple, NoReturn, Protocol, TypeVar
from uuid import uuid4

from langchain_core.exceptions import ModelAPIError, ModelConnectionError, ModelRateLimitError
from langchain_core.globals import get_llm_cache
from langchain_core.language_models import BaseLanguageModel
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage, HumanMessage, SystemMessage
from langchain_core.output_parsers import BaseOutputParser, StrOutputParser
from langchain_core.output_parsers.base import BaseGenerationOutputParser
from langchain_core.prompt_values import PromptValue
from langchain_core.prompts import (
    AIMessagePromptTemplate,
    BasePromptTemplate,
    ChatPromptTemplate,
    HumanMessagePromptTemplate,
    MessagesPlaceholder,
    PromptTemplate,
    SystemMessagePromptTemplate,
)
from langchain_core.runnables import (
    Runnable,
    RunnableBinding,
    RunnableConfig,
    RunnableGenerator,
    RunnableLambda,
    RunnableParallel,
    RunnablePassthrough,
    RunnablePick,
    RunnableSequence,
)
from langchain_core.runnables.config import get_config_list, get_executor_for_config, patch_config
from langchain_core.runnables.passthrough import RunnableAssign
from langchain_core.runnables.utils import AddableDict

import agentflow as af
from agentflow.integrations import (
    Answer,
    Appendable,
    Delta,
    ModelCall,
    ModelConnection,
    TextPiece,
    WiredProgram,
    open_task_group,
)
from langchain_agentflow.chat_model import ChatAgentflow
from langchain_agentflow.errors import langchain_errors
from langchain_agentflow.llm import Agentflow
from langchain_agentflow.messages import ChunkWriter, to_langchain
from langchain_agentflow.programs import one_batch, program_of
from langchain_agentflow.settings import MAX_THREADS
from langchain_agentflow.structured_output import JsonValue, reject_truncated

ResultT = TypeVar("ResultT")

# After these, the chain runs again, unwired: its models retry.
_TRANSIENT: Final = (ModelRateLimitError, ModelAPIError, ModelConnectionError)
_MESSAGE_TEMPLATES: Final = (HumanMessagePromptTemplate, AIMessagePromptTemplate, SystemMessagePromptTemplate)


class UnwiredPart(NamedTuple):
    """A part of a chain that runs in this process, and why."""

    part: Runnable[Any, Any]
    reason: str


def wired(chain: Runnable[Any, Any]) -> WiredChain:
    """Returns the chain as one program: the answers of its models pass to later prompts in the backend,
    without a round trip. Its results are the chain's.

    Sequences, ``RunnableParallel``, ``RunnablePassthrough`` and its ``assign``, ``RunnablePick``, prompt
    templates with f-strings, models of this package and ``StrOutputParser`` are wired. Any other part runs at
    its place in this process, on the values it needs; ``unwired`` lists these parts.

    >>> chain = wired(outline | model | StrOutputParser() | essay | model)
    >>> chain.unwired
    ()
    >>> chain.invoke({"topic": "rivers"})
    """
    return WiredChain(chain)


class WiredChain(Runnable[Any, Any]):
    """A chain that runs as one program; made by ``wired``.

    Callbacks get one run for all its wired parts. After a transient failure the chain runs again, unwired,
    unless a part has run in this process.
    """

    def __init__(self, chain: Runnable[Any, Any]) -> None:
        self.chain = chain
        self.name = f"wired {chain.get_name()}"
        self._unwired = tuple(_unwired(chain, is_last=True))

    @property
    def unwired(self) -> tuple[UnwiredPart, ...]:
        """The parts that run in this process, in the chain's order."""
        return self._unwired

    def invoke(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> Any:
        """Runs the chain."""

        def run(value: Any, run_manager: Any, config: RunnableConfig) -> Any:
            child = patch_config(config, callbacks=run_manager.get_child())
            with _run(_Blocking(child), run_manager) as walk:
                try:
                    return _driven(walk.result(self.chain, value))
                except _TRANSIENT:
                    if walk.has_run_here:
                        raise
            return self.chain.invoke(value, child)

        return self._call_with_config(run, input, config, **kwargs)

    async def ainvoke(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> Any:
        """Like ``invoke``, without blocking the event loop."""

        async def run(value: Any, run_manager: Any, config: RunnableConfig) -> Any:
            child = patch_config(config, callbacks=run_manager.get_child())
            with _run(_Awaiting(child), run_manager) as walk:
                try:
                    return await walk.result(self.chain, value)
                except _TRANSIENT:
                    if walk.has_run_here:
                        raise
            return await self.chain.ainvoke(value, child)

        return await self._acall_with_config(run, input, config, **kwargs)

    def stream(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> Iterator[Any]:
        """Yields the last answer piece by piece; a dict as a whole."""

        def run(inputs: Iterator[Any], run_manager: Any, config: RunnableConfig) -> Iterator[Any]:
            child = patch_config(config, callbacks=run_manager.get_child())
            for value in inputs:
                with _run(_Blocking(child), run_manager) as walk:
                    last = _driven(walk.value(self.chain, value))
                    if isinstance(last, _Pending):
                        yield from walk.pieces(last)
                    result = _driven(walk.finished(last))
                    if not isinstance(last, _Pending):
                        yield AddableDict(result) if isinstance(result, dict) else result

        yield from self._transform_stream_with_config(iter([input]), run, config, **kwargs)

    async def astream(
        self, input: Any, config: RunnableConfig | None = None, **kwargs: Any
    ) -> AsyncIterator[Any]:
        """Like ``stream``, without blocking the event loop."""

        async def run(
            inputs: AsyncIterator[Any], run_manager: Any, config: RunnableConfig
        ) -> AsyncIterator[Any]:
            child = patch_config(config, callbacks=run_manager.get_child())
            async for value in inputs:
                with _run(_Awaiting(child), run_manager) as walk:
                    last = await walk.value(self.chain, value)
                    if isinstance(last, _Pending):
                        async for piece in walk.apieces(last):
                            yield piece
                    result = await walk.finished(last)
                    if not isinstance(last, _Pending):
                        yield AddableDict(result) if isinstance(result, dict) else result

        async def given() -> AsyncIterator[Any]:
            yield input

        async for piece in self._atransform_stream_with_config(given(), run, config, **kwargs):
            yield piece

    def batch(
        self,
        inputs: list[Any],
        config: RunnableConfig | list[RunnableConfig] | None = None,
        *,
        return_exceptions: bool = False,
        **kwargs: Any,
    ) -> list[Any]:
        """Runs all inputs at once, as one program."""
        most = min(len(inputs), MAX_THREADS)
        configs: list[RunnableConfig] = [
            one if one.get("max_concurrency") is not None else {**one, "max_concurrency": most}
            for one in get_config_list(config, len(inputs))
        ]
        with one_batch(self._connections(), len(inputs)):
            return super().batch(inputs, configs, return_exceptions=return_exceptions, **kwargs)

    async def abatch(
        self,
        inputs: list[Any],
        config: RunnableConfig | list[RunnableConfig] | None = None,
        *,
        return_exceptions: bool = False,
        **kwargs: Any,
    ) -> list[Any]:
        """Runs all inputs at once, as one program."""
        with one_batch(self._connections(), len(inputs)):
            return await super().abatch(inputs, config, return_exceptions=return_exceptions, **kwargs)

    def _connections(self) -> list[ModelConnection]:
        return list({id(one): one for one in _connections_in(self.chain)}.values())


def _bare(part: Runnable[Any, Any]) -> Runnable[Any, Any]:
    """The part without a name and tags, which only its own run in the callbacks would have."""
    while (
        isinstance(part, RunnableBinding)
        and not part.kwargs
        and not part.config_factories
        and part.config.keys() <= {"run_name", "tags", "metadata"}
    ):
        part = part.bound
    return part


def _is_parser(part: Runnable[Any, Any]) -> bool:
    """Whether it reads one answer, and runs when its value is needed."""
    is_check = isinstance(part, RunnableGenerator) and getattr(part, "_transform", None) is reject_truncated
    return is_check or isinstance(part, BaseOutputParser | BaseGenerationOutputParser)


def _key_of(part: Runnable[Any, Any]) -> Callable[[Any], Any] | None:
    """The ``itemgetter`` of a function."""
    function = getattr(part, "func", None) if isinstance(part, RunnableLambda) else None
    return function if isinstance(function, itemgetter) else None


def _unwired(part: Runnable[Any, Any], *, is_last: bool) -> Iterator[UnwiredPart]:
    """The parts that run in this process. ``is_last``: whether the value is part of the chain's result."""
    part = _bare(part)
    match part:
        case RunnableSequence(steps=steps):
            wired_parsers = _structured(steps)
            for index, step in enumerate(steps):
                if index not in wired_parsers:
                    yield from _unwired(step, is_last=is_last and index == len(steps) - 1)
        case RunnableParallel(steps__=branches):
            for branch in branches.values():
                yield from _unwired(branch, is_last=is_last)
        case RunnableAssign(mapper=mapper):
            yield from _unwired(mapper, is_last=is_last)
        case RunnablePassthrough(func=None, afunc=None) | RunnablePick():
            pass
        case _ if type(part) is StrOutputParser or _model_of(part) is not None or _key_of(part) is not None:
            pass
        case _ if _is_parser(part):
            if not is_last:
                yield UnwiredPart(part, "later steps need its value, which is not a text")
        case BasePromptTemplate():
            if not _is_fillable(part):
                yield UnwiredPart(part, "only templates with f-strings, of a text or of messages, are wired")
        case BaseLanguageModel():
            yield UnwiredPart(part, "the model, or an option of it, is not one of agentflow's")
        case RunnablePassthrough():
            yield UnwiredPart(part, "its function runs in this process")
        case _:
            yield UnwiredPart(part, f"{type(part).__name__} has no counterpart in the backend")


def _structured(steps: Sequence[Runnable[Any, Any]]) -> set[int]:
    """The indices of parsers of structured answers of which the next step, a template, needs only texts."""
    found: set[int] = set()
    for index in range(1, len(steps) - 2):
        check, parser, template = map(_bare, steps[index : index + 3])
        model = _model_of(steps[index - 1])
        if (
            model is not None
            and _is_parser(check)
            and isinstance(parser, JsonValue)
            and _is_fillable(template)
            and set(template.input_variables) <= set(_text_properties(model))  # type: ignore[attr-defined]
        ):
            found |= {index, index + 1}
    return found


def _connections_in(part: Runnable[Any, Any]) -> Iterator[ModelConnection]:
    part = _bare(part)
    match part:
        case RunnableSequence(steps=steps):
            for step in steps:
                yield from _connections_in(step)
        case RunnableParallel(steps__=branches):
            for branch in branches.values():
                yield from _connections_in(branch)
        case RunnableAssign(mapper=mapper):
            yield from _connections_in(mapper)
        case _:
            model = _model_of(part)
            if model is not None:
                yield model.connection


class _Model(NamedTuple):
    """A model of the chain, with the arguments that are bound to it."""

    model: ChatAgentflow | Agentflow
    kwargs: Mapping[str, Any]

    @property
    def connection(self) -> ModelConnection:
        return self.model.connection(self.kwargs.get("model") or self.kwargs.get("model_name"))


def _model_of(part: Runnable[Any, Any]) -> _Model | None:
    """The model, if its calls can be wired."""
    model, kwargs = _bare(part), dict[str, Any]()
    while isinstance(model, RunnableBinding) and not model.config and not model.config_factories:
        kwargs = {**model.kwargs, **kwargs}
        model = _bare(model.bound)
    for name in ("ls_structured_output_format", "structured_output_format"):  # for tracers
        kwargs.pop(name, None)
    if type(model) not in (ChatAgentflow, Agentflow):
        return None
    assert isinstance(model, ChatAgentflow | Agentflow)
    is_cached = model.cache or (model.cache is None and get_llm_cache() is not None)
    is_plain = not (is_cached or model.callbacks or getattr(model, "rate_limiter", None))
    is_plain &= getattr(model, "output_version", None) in (None, "v0")
    return _Model(model, kwargs) if is_plain and (kwargs.get("n") or model.n) == 1 else None


def _is_fillable(template: Runnable[Any, Any]) -> bool:
    """Whether references can stand in the template's text."""
    if type(template) is PromptTemplate:
        return template.template_format == "f-string"
    return type(template) is ChatPromptTemplate and all(
        isinstance(message, BaseMessage | MessagesPlaceholder)
        or (type(message) in _MESSAGE_TEMPLATES and _is_fillable(message.prompt))  # type: ignore[union-attr]
        for message in template.messages
    )


# Values of a run


@dataclass(eq=False)
class _Pending:
    """The answer of a call, or a value that parsers read from it in this process."""

    call: _Call
    is_text: bool
    parsers: tuple[Runnable[Any, Any], ...] = ()
    results: list[Any] = field(default_factory=list)  # the value, once it was needed

    @property
    def is_reference(self) -> bool:
        """Whether a prompt can contain it: its text is the text of the variable."""
        return self.is_text and not self.parsers


@dataclass(eq=False)
class _Call:
    """A call that was sent."""

    model: _Model
    program: WiredProgram
    variable: Any
    answers: list[Answer] = field(default_factory=list)


class _Text(NamedTuple):
    """A text that a prompt can contain by reference."""

    call: _Call
    item: Appendable


def _texts_in(value: Any) -> dict[str, _Text]:
    """The variables of a template that are texts of answers."""
    if isinstance(value, dict):
        return {
            name: _Text(one.call, one.call.variable)
            for name, one in value.items()
            if isinstance(one, _Pending) and one.is_reference
        }
    if (
        not isinstance(value, _Pending)
        or len(value.parsers) != 2
        or not isinstance(value.parsers[1], JsonValue)
    ):
        return {}
    return {
        name: _Text(value.call, value.call.variable.json(name)) for name in _text_properties(value.call.model)
    }


def _text_properties(model: _Model) -> list[str]:
    """The properties of a structured answer that are always texts."""
    schema = model.kwargs.get("schema")
    if not isinstance(schema, dict) or schema.get("type") != "object":
        return []
    properties = schema.get("properties", {})
    return [
        name
        for name in schema.get("required", ())
        if "." not in name and name in properties and properties[name].get("type") == "string"
    ]


@dataclass(eq=False)
class _Filled:
    """A prompt with placeholders for references."""

    template: Runnable[Any, Any]
    value: Any
    prompt: PromptValue
    texts: dict[str, _Text]  # by placeholder

    def parts(self, text: str) -> list[Appendable]:
        """The text with references in place of their placeholders."""
        pieces = re.split(f"({'|'.join(self.texts)})", text)
        return [self.texts[piece].item if piece in self.texts else piece for piece in pieces if piece]


class _NotWired(Exception):
    """A template changes the text of a value, or the turns are not wired."""


class _Placeholder(str):
    """Stands for a reference in a template. Anything but the insertion of its text raises."""

    def __format__(self, spec: str) -> str:
        return self._changed() if spec else str.__str__(self)

    def _changed(self, *_: Any) -> NoReturn:
        raise _NotWired

    __repr__ = __getitem__ = _changed


# A run


class _Driver(Protocol):
    """Runs a walk's coroutines, and for them what waits."""

    config: RunnableConfig

    async def run_in_loop(
        self, connection: ModelConnection, function: Callable[[], Awaitable[ResultT]]
    ) -> ResultT:
        """Runs a function in the connection's loop."""

    async def invoke(self, part: Runnable[Any, Any], value: Any) -> Any:
        """Runs a part of the chain in this process."""

    async def gather(self, coroutines: Sequence[Coroutine[Any, Any, Any]]) -> list[Any]:
        """Runs coroutines beside each other."""


class _Awaiting:
    def __init__(self, config: RunnableConfig) -> None:
        self.config = config

    async def run_in_loop(
        self, connection: ModelConnection, function: Callable[[], Awaitable[ResultT]]
    ) -> ResultT:
        with langchain_errors():
            return await connection.shared.loop.arun(function)

    async def invoke(self, part: Runnable[Any, Any], value: Any) -> Any:
        return await part.ainvoke(value, self.config)

    async def gather(self, coroutines: Sequence[Coroutine[Any, Any, Any]]) -> list[Any]:
        results: list[Any] = [None] * len(coroutines)

        async def run(index: int, coroutine: Coroutine[Any, Any, Any]) -> None:
            results[index] = await coroutine

        async with open_task_group() as group:
            for index, coroutine in enumerate(coroutines):
                group.start_soon(run, index, coroutine)
        return results


class _Blocking:
    def __init__(self, config: RunnableConfig) -> None:
        self.config = config

    async def run_in_loop(
        self, connection: ModelConnection, function: Callable[[], Awaitable[ResultT]]
    ) -> ResultT:
        with langchain_errors():
            return connection.shared.loop.run(function)

    async def invoke(self, part: Runnable[Any, Any], value: Any) -> Any:
        return part.invoke(value, self.config)

    async def gather(self, coroutines: Sequence[Coroutine[Any, Any, Any]]) -> list[Any]:
        with get_executor_for_config(self.config) as threads:
            futures = [threads.submit(_driven, coroutine) for coroutine in coroutines]
            return [future.result() for future in futures]


def _driven(coroutine: Coroutine[Any, Any, ResultT]) -> ResultT:
    """The result of a coroutine that never suspends."""
    try:
        coroutine.send(None)
    except StopIteration as result:
        return result.value  # type: ignore[no-any-return]
    coroutine.close()
    raise RuntimeError("a blocking run was suspended")


@contextmanager
def _run(driver: _Driver, run_manager: Any) -> Generator[_Walk, None, None]:
    walk = _Walk(driver, run_manager)
    try:
        yield walk
    finally:
        walk.close()


class _Walk:
    """One run of a chain."""

    def __init__(self, driver: _Driver, run_manager: Any) -> None:
        self.has_run_here = False
        """Whether a part other than a template or a parser has run in this process."""
        self._driver = driver
        self._run_manager = run_manager
        self._programs: dict[int, WiredProgram] = {}
        self._connections: dict[int, ModelConnection] = {}
        self._sent: list[_Pending] = []
        self._lock = threading.Lock()

    async def result(self, chain: Runnable[Any, Any], value: Any) -> Any:
        """The chain's result."""
        return await self.finished(await self.value(chain, value))

    async def finished(self, value: Any) -> Any:
        """The value, after all calls: a failure of any part fails the run, as in the chain."""
        for pending in list(self._sent):
            await self._concrete(pending)
        return await self._concrete(value)

    async def value(self, part: Runnable[Any, Any], value: Any) -> Any:
        """The value of a part for a value, both of which may be pending."""
        part = _bare(part)
        key = _key_of(part)
        if isinstance(part, RunnableAssign | RunnablePick) or key is not None:
            value = value if isinstance(value, dict) else await self._concrete(value)
            if key is not None and isinstance(value, dict):
                found = key(value)
                return await self._concrete_items(found) if isinstance(found, tuple) else found
        match part:
            case RunnableSequence(steps=steps):
                for step in steps:
                    value = await self.value(step, value)
                return value
            case RunnableParallel(steps__=branches):
                return await self._branches(dict(branches), value)
            case RunnableAssign(mapper=mapper) if isinstance(value, dict):
                return {**value, **await self._branches(dict(mapper.steps__), value)}
            case RunnablePassthrough(func=None, afunc=None):
                return value
            case RunnablePick(keys=str() as name) if isinstance(value, dict):
                return value.get(name)
            case RunnablePick(keys=list() as keys) if isinstance(value, dict):
                picked = {key: value[key] for key in keys if key in value}
                return picked or None
            case BasePromptTemplate() if _is_fillable(part):
                return await self._filled(part, value)
            case _ if isinstance(value, _Pending) and _is_parser(part):
                return self._parsed(part, value)
        model = _model_of(part)
        if model is not None:
            sent = await self._sent_call(model, value)
            if sent is not None:
                return sent
        self.has_run_here = True
        return await self._driver.invoke(part, await self._concrete(value))

    def pieces(self, last: _Pending) -> Iterator[Any]:
        """Yields the last answer piece by piece; blocks between them."""
        call = last.call

        def chunks() -> Iterator[Any]:
            chunk_of = _chunks_of(last)
            source = call.model.connection.shared.loop.stream(lambda: call.program.stream(call.variable))
            with langchain_errors(), closing(source) as events:
                for event in events:
                    yield from chunk_of(event)

        found: Iterator[Any] = chunks()
        for parser in last.parsers:
            found = parser.transform(found, self._driver.config)
        yield from found

    async def apieces(self, last: _Pending) -> AsyncGenerator[Any, None]:
        """Like ``pieces``, without blocking."""
        call = last.call

        async def chunks() -> AsyncGenerator[Any, None]:
            chunk_of = _chunks_of(last)
            source = call.model.connection.shared.loop.astream(lambda: call.program.stream(call.variable))
            with langchain_errors():
                async with aclosing(source) as events:
                    async for event in events:
                        for chunk in chunk_of(event):
                            yield chunk

        found: AsyncIterator[Any] = chunks()
        for parser in last.parsers:
            found = parser.atransform(found, self._driver.config)
        async for piece in found:
            yield piece

    def close(self) -> None:
        """Ends the calls of the run."""
        for key, program in self._programs.items():
            self._connections[key].shared.loop.call_soon(program.close)

    async def _branches(self, branches: dict[str, Runnable[Any, Any]], value: Any) -> dict[str, Any]:
        """The values of branches. Those that wait for nothing are sent before any other runs."""
        waiting = [name for name, branch in branches.items() if any(_unwired(branch, is_last=True))]
        found = {
            name: await self.value(branch, value) for name, branch in branches.items() if name not in waiting
        }
        if len(waiting) > 1:
            values = await self._driver.gather([self.value(branches[name], value) for name in waiting])
            found |= dict(zip(waiting, values, strict=True))
        elif waiting:
            found[waiting[0]] = await self.value(branches[waiting[0]], value)
        return {name: found[name] for name in branches}

    async def _filled(self, template: Runnable[Any, Any], value: Any) -> Any:
        """The prompt, with placeholders for pending texts."""
        names = template.input_variables  # type: ignore[attr-defined]
        if isinstance(value, _Pending) and value.is_reference and len(names) == 1:
            value = {names[0]: value}
        texts = {name: one for name, one in _texts_in(value).items() if name in names}
        if texts:
            known = [*names, *template.partial_variables, *getattr(template, "optional_variables", ())]  # type: ignore[attr-defined]
            given = value if isinstance(value, dict) else {}
            others = {name: one for name, one in given.items() if name in known and name not in texts}
            tokens = {name: f"\ue000{uuid4().hex}\ue001" for name in texts}
            placeholders = {name: _Placeholder(token) for name, token in tokens.items()}
            try:
                prompt = template.format_prompt(**await self._concrete(others), **placeholders)  # type: ignore[attr-defined]
            except (_NotWired, ValueError, KeyError):
                pass  # the template changes a text, takes it for messages, or misses another variable
            else:
                return _Filled(template, value, prompt, {tokens[name]: one for name, one in texts.items()})
        return await self._driver.invoke(template, await self._concrete(value))

    def _parsed(self, parser: Runnable[Any, Any], value: _Pending) -> _Pending:
        if type(parser) is StrOutputParser and not value.parsers:
            return _Pending(value.call, is_text=True)
        parsed = _Pending(value.call, value.is_text, (*value.parsers, parser))
        self._sent.append(parsed)
        return parsed

    async def _sent_call(self, model: _Model, value: Any) -> _Pending | None:
        """Sends a call. None if it cannot be wired with this value."""
        connection = model.connection
        calls = [text.call for text in value.texts.values()] if isinstance(value, _Filled) else []
        calls += [value.call] if isinstance(value, _Pending) else []
        is_wired = all(call.model.connection is connection for call in calls)
        if not is_wired or (isinstance(value, _Pending) and not value.is_reference):
            value = await self._concrete(value)
        if not isinstance(value, _Filled | _Pending | str | PromptValue | list):
            return None  # which the model rejects
        try:
            with langchain_errors():
                prompt, call = _wired_call(model, value)
        except _NotWired:
            value = await self._concrete(value)
            with langchain_errors():
                prompt, call = _wired_call(model, value)
        program = self._program(connection)
        variable = await self._driver.run_in_loop(
            connection, lambda: program.call(prompt, call.output, call.cache_salt)
        )
        pending = _Pending(_Call(model, program, variable), is_text=isinstance(model.model, Agentflow))
        self._sent.append(pending)
        return pending

    def _program(self, connection: ModelConnection) -> WiredProgram:
        key = id(connection)
        with self._lock:  # branches of a blocking run have threads
            if key not in self._programs:
                self._connections[key] = connection
                self._programs[key] = WiredProgram(
                    connection, *program_of(_AsParent(self._run_manager), connection)
                )
            return self._programs[key]

    async def _concrete_items(self, values: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple([await self._concrete(one) for one in values])

    async def _concrete(self, value: Any) -> Any:
        """The value, without anything pending."""
        if isinstance(value, dict):
            return {name: await self._concrete(one) for name, one in value.items()}
        if isinstance(value, _Filled):
            return await self._driver.invoke(value.template, await self._concrete(value.value))
        if not isinstance(value, _Pending):
            return value
        if not value.results:
            call = value.call
            if not call.answers:
                answer = await self._driver.run_in_loop(
                    call.model.connection, lambda: call.program.answer(call.variable)
                )
                call.answers.append(answer)
            found: Any = (
                _message(call) if isinstance(call.model.model, ChatAgentflow) else call.answers[0].text
            )
            if value.is_text and isinstance(found, AIMessage):
                found = found.text
            for parser in value.parsers:
                found = await self._driver.invoke(parser, found)
            value.results.append(found)
        return value.results[0]


class _AsParent:
    """The run of a chain as the parent of a model call."""

    def __init__(self, run_manager: Any) -> None:
        self.parent_run_id = run_manager.run_id


def _message(call: _Call) -> AIMessage:
    message = to_langchain(call.answers[0])
    message.id = f"lc_run--{uuid4()}"
    return message


def _wired_call(model: _Model, value: Any) -> tuple[list[Appendable], ModelCall]:
    """The items of the prompt, and the call. Raises ``_NotWired`` for a prompt with references of which the
    backend cannot make turns."""
    kwargs = dict(model.kwargs)
    stop = kwargs.pop("stop", None)
    if isinstance(model.model, Agentflow):
        text = value
        if isinstance(value, _Filled | _Pending):
            text = ""
        elif not isinstance(value, str):
            text = model.model._convert_input(value).to_string()
        _, [call] = model.model._calls([text], stop, kwargs)
        if isinstance(value, _Filled):
            return value.parts(value.prompt.to_string()), call
        return [value.call.variable if isinstance(value, _Pending) else text], call
    if not isinstance(value, _Filled | _Pending):
        call = model.model._call(model.model._convert_input(value).to_messages(), stop, kwargs)
        return [call.prompt], call
    if kwargs.get("tools"):
        raise _NotWired
    call = model.model._call([HumanMessage("")], stop, kwargs)
    if isinstance(value, _Pending):
        return [af.user(value.call.variable)], call
    messages = value.prompt.to_messages()
    if not messages or isinstance(messages[-1], AIMessage):
        raise _NotWired  # it continues the last turn
    return [_turn(message, value) for message in messages], call


def _turn(message: BaseMessage, filled: _Filled) -> Appendable:
    if not isinstance(message.content, str) or getattr(message, "tool_calls", None):
        raise _NotWired
    parts = filled.parts(message.content)
    match message:
        case SystemMessage():
            return af.system(*parts)
        case HumanMessage():
            return af.user(*parts)
        case AIMessage():
            return af.assistant(*parts)
    raise _NotWired


def _chunks_of(last: _Pending) -> Callable[[Delta | Answer], list[Any]]:
    """A function that converts the events of an answer to chunks of the last value."""
    if isinstance(last.call.model.model, Agentflow):
        return _texts
    if last.is_text:
        return _texts
    writer, name = ChunkWriter(), f"lc_run--{uuid4()}"

    def chunks(event: Delta | Answer) -> list[Any]:
        is_last = isinstance(event, Answer)
        chunk: AIMessageChunk = writer.last(event) if is_last else writer.chunk(event.piece)  # type: ignore[union-attr, arg-type]
        chunk.id = name
        return [chunk]

    return chunks


def _texts(event: Delta | Answer) -> list[Any]:
    is_text = isinstance(event, Delta) and isinstance(event.piece, TextPiece)
    return [event.piece.text] if is_text else []  # type: ignore[union-attr]
