"""One run of a chain: a walk through its parts that sends each model call without waiting for its answer."""

from __future__ import annotations

import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator, Iterator
from contextlib import aclosing, closing, contextmanager
from typing import Any
from uuid import uuid4

from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage, HumanMessage, SystemMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompt_values import PromptValue
from langchain_core.prompts import BasePromptTemplate
from langchain_core.runnables import (
    Runnable,
    RunnableParallel,
    RunnablePassthrough,
    RunnablePick,
    RunnableSequence,
)
from langchain_core.runnables.passthrough import RunnableAssign

import agentflow as af
from agentflow.integrations import (
    Answer,
    Appendable,
    Delta,
    ModelCall,
    ModelConnection,
    TextPiece,
    WiredProgram,
)
from langchain_agentflow.chains.driver import Driver
from langchain_agentflow.chains.parts import (
    WiredModel,
    bare,
    is_fillable,
    is_parser,
    item_getter,
    unwired_parts,
    wired_model,
)
from langchain_agentflow.chains.values import Filled, NotWired, Pending, Placeholder, SentCall, answer_texts
from langchain_agentflow.chat_model import ChatAgentflow
from langchain_agentflow.errors import langchain_errors
from langchain_agentflow.llm import Agentflow
from langchain_agentflow.messages import ChunkWriter, to_langchain
from langchain_agentflow.programs import program_of


@contextmanager
def running(driver: Driver, run_manager: Any) -> Generator[Walk, None, None]:
    walk = Walk(driver, run_manager)
    try:
        yield walk
    finally:
        walk.close()


class Walk:
    """One run of a chain."""

    def __init__(self, driver: Driver, run_manager: Any) -> None:
        self.has_run_here = False
        """Whether a part other than a template or a parser has run in this process."""
        self._driver = driver
        self._run_manager = run_manager
        self._programs: dict[int, WiredProgram] = {}
        self._connections: dict[int, ModelConnection] = {}
        self._sent: list[Pending] = []
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
        part = bare(part)
        key = item_getter(part)
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
            case BasePromptTemplate() if is_fillable(part):
                return await self._filled(part, value)
            case _ if isinstance(value, Pending) and is_parser(part):
                return self._parsed(part, value)
        model = wired_model(part)
        if model is not None:
            sent = await self._sent_call(model, value)
            if sent is not None:
                return sent
        self.has_run_here = True
        return await self._driver.invoke(part, await self._concrete(value))

    def pieces(self, last: Pending) -> Iterator[Any]:
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

    async def apieces(self, last: Pending) -> AsyncGenerator[Any, None]:
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
        """The values of branches. Calls that need no other value are sent before any other part runs."""
        waiting = [name for name, branch in branches.items() if any(unwired_parts(branch, is_last=True))]
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
        if isinstance(value, Pending) and value.is_reference and len(names) == 1:
            value = {names[0]: value}
        texts = {name: one for name, one in answer_texts(value).items() if name in names}
        if texts:
            known = [*names, *template.partial_variables, *getattr(template, "optional_variables", ())]  # type: ignore[attr-defined]
            given = value if isinstance(value, dict) else {}
            others = {name: one for name, one in given.items() if name in known and name not in texts}
            tokens = {name: f"\ue000{uuid4().hex}\ue001" for name in texts}
            placeholders = {name: Placeholder(token) for name, token in tokens.items()}
            try:
                prompt = template.format_prompt(**await self._concrete(others), **placeholders)  # type: ignore[attr-defined]
            except (NotWired, ValueError, KeyError):
                pass  # the template changes a text, takes it for messages, or misses another variable
            else:
                return Filled(template, value, prompt, {tokens[name]: one for name, one in texts.items()})
        return await self._driver.invoke(template, await self._concrete(value))

    def _parsed(self, parser: Runnable[Any, Any], value: Pending) -> Pending:
        if type(parser) is StrOutputParser and not value.parsers:
            return Pending(value.call, is_text=True)
        parsed = Pending(value.call, value.is_text, (*value.parsers, parser))
        self._sent.append(parsed)
        return parsed

    async def _sent_call(self, model: WiredModel, value: Any) -> Pending | None:
        """Sends a call. None if it cannot be wired with this value."""
        connection = model.connection
        calls = [text.call for text in value.texts.values()] if isinstance(value, Filled) else []
        calls += [value.call] if isinstance(value, Pending) else []
        is_wired = all(call.model.connection is connection for call in calls)
        if not is_wired or (isinstance(value, Pending) and not value.is_reference):
            value = await self._concrete(value)
        if not isinstance(value, Filled | Pending | str | PromptValue | list):
            return None  # which the model rejects
        try:
            with langchain_errors():
                prompt, call = _wired_call(model, value)
        except NotWired:
            value = await self._concrete(value)
            with langchain_errors():
                prompt, call = _wired_call(model, value)
        program = self._program(connection)
        variable = await self._driver.run_in_loop(
            connection, lambda: program.call(prompt, call.output, call.cache_salt)
        )
        pending = Pending(SentCall(model, program, variable), is_text=isinstance(model.model, Agentflow))
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
        if isinstance(value, Filled):
            return await self._driver.invoke(value.template, await self._concrete(value.value))
        if not isinstance(value, Pending):
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


def _message(call: SentCall) -> AIMessage:
    message = to_langchain(call.answers[0])
    message.id = f"lc_run--{uuid4()}"
    return message


def _wired_call(model: WiredModel, value: Any) -> tuple[list[Appendable], ModelCall]:
    """The items of the prompt, and the call. Raises ``NotWired`` for a prompt with references that the
    backend cannot divide into turns."""
    kwargs = dict(model.kwargs)
    stop = kwargs.pop("stop", None)
    if isinstance(model.model, Agentflow):
        text = value
        if isinstance(value, Filled | Pending):
            text = ""
        elif not isinstance(value, str):
            text = model.model._convert_input(value).to_string()
        _, [call] = model.model._calls([text], stop, kwargs)
        if isinstance(value, Filled):
            return value.parts(value.prompt.to_string()), call
        return [value.call.variable if isinstance(value, Pending) else text], call
    if not isinstance(value, Filled | Pending):
        call = model.model._call(model.model._convert_input(value).to_messages(), stop, kwargs)
        return [call.prompt], call
    if kwargs.get("tools"):
        raise NotWired
    call = model.model._call([HumanMessage("")], stop, kwargs)
    if isinstance(value, Pending):
        return [af.user(value.call.variable)], call
    messages = value.prompt.to_messages()
    if not messages or isinstance(messages[-1], AIMessage):
        raise NotWired  # it continues the last turn
    return [_turn(message, value) for message in messages], call


def _turn(message: BaseMessage, filled: Filled) -> Appendable:
    if not isinstance(message.content, str) or getattr(message, "tool_calls", None):
        raise NotWired
    parts = filled.parts(message.content)
    match message:
        case SystemMessage():
            return af.system(*parts)
        case HumanMessage():
            return af.user(*parts)
        case AIMessage():
            return af.assistant(*parts)
    raise NotWired


def _chunks_of(last: Pending) -> Callable[[Delta | Answer], list[Any]]:
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
