"""Wired chains: the results of the chain, in one trip to the backend."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from operator import itemgetter
from typing import Any

import anyio
import pytest
from langchain_agentflow import Agentflow, ChatAgentflow, wired
from langchain_core.exceptions import OutputParserException
from langchain_core.messages import AIMessage, AIMessageChunk
from langchain_core.output_parsers import (
    CommaSeparatedListOutputParser,
    JsonOutputParser,
    StrOutputParser,
)
from langchain_core.prompts import ChatPromptTemplate, MessagesPlaceholder, PromptTemplate
from langchain_core.runnables import (
    Runnable,
    RunnableLambda,
    RunnableParallel,
    RunnablePassthrough,
    RunnablePick,
)
from settling import until

import agentflow as af
from agentflow.protocol import ops


def answer(prompt: str) -> str:
    """An answer that depends on all of the prompt."""
    text = str(prompt)
    if "as JSON" in text.rpartition("<user>")[2]:
        return '{"name": "Köln", "size": 3, "note": "a {x} \\"b\\""}'
    if "as a list" in text.rpartition("<user>")[2]:
        return "red, green,blue"
    return f"({len(text)} {sum(map(ord, text)) % 997})"


class Held:
    """A scripted backend that delivers nothing before the client has sent ``num_awaited`` gens."""

    def __init__(self, script: Any = answer) -> None:
        self._inner = af.Scripted(script)
        self.generator = self._inner.generator
        self.sent: list[ops.Op] = []
        self.num_awaited = 0
        self._held: list[Any] = []

    @property
    def num_gens(self) -> int:
        return sum(isinstance(op, ops.Gen) for op in self.sent)

    @property
    def num_refs(self) -> int:
        """The references in texts."""
        parts = [part for op in self.sent if isinstance(op, ops.Text) for part in op.parts]
        return sum(isinstance(part, ops.Ref) for part in parts)

    @property
    def programs(self) -> list[str]:
        return [op.program for op in self.sent if isinstance(op, ops.Open)]

    @asynccontextmanager
    async def connect(self, deliver: Any, lost: Any):
        def released() -> None:
            if self.num_gens >= self.num_awaited:
                held, self._held = self._held, []
                for events in held:
                    deliver(events)

        def received(events: Any) -> None:
            self._held.append(events)
            released()

        async with self._inner.connect(received, lost) as connection:
            send = connection.send

            def sent(batch: Any) -> None:
                self.sent += batch
                send(batch)
                released()

            connection.send = sent  # type: ignore[method-assign]
            yield connection


def ask(text: str) -> ChatPromptTemplate:
    return ChatPromptTemplate.from_messages([("system", "Be {mood}."), ("user", text)])


def three_steps(model: ChatAgentflow) -> Runnable[Any, Any]:
    """An outline, its text, and a title, each from the one before."""
    return (
        RunnablePassthrough.assign(outline=ask("Outline {topic}") | model | StrOutputParser())
        | RunnablePassthrough.assign(text=ask("Write {outline} on {topic}") | model | StrOutputParser())
        | ask("A title for {text}, after {outline}")
        | model
    )


def map_reduce(model: ChatAgentflow) -> Runnable[Any, Any]:
    sides = RunnableParallel(
        pro=ask("For {topic}") | model | StrOutputParser(),
        con=ask("Against {topic}") | model | StrOutputParser(),
        mood=itemgetter("mood"),
        all=RunnablePassthrough(),
    )
    return sides | RunnablePassthrough.assign(
        verdict=ask("Judge {pro} and {con}") | model | StrOutputParser()
    )


def texts(model: ChatAgentflow) -> Runnable[Any, Any]:
    return (
        ask("Outline {topic}")
        | model
        | StrOutputParser()
        | PromptTemplate.from_template("Shorten: {text}")
        | model.with_config(run_name="shorten")
        | StrOutputParser()
        | model
        | StrOutputParser()
    )


def history(model: ChatAgentflow) -> Runnable[Any, Any]:
    prompt = ChatPromptTemplate.from_messages(
        [MessagesPlaceholder("earlier"), ("ai", "I said {first}."), ("user", "More on {first}{{}}")]
    )
    return RunnablePassthrough.assign(first=ask("Say {topic}") | model | StrOutputParser()) | prompt | model


def structure(model: ChatAgentflow) -> Runnable[Any, Any]:
    schema = {
        "title": "City",
        "description": "A city.",
        "type": "object",
        "properties": {
            "name": {"type": "string"},
            "size": {"type": "integer"},
            "note": {"type": "string"},
        },
        "required": ["name", "size", "note"],
    }
    describe = ChatPromptTemplate.from_messages([("user", "Describe {name}: {note}")])
    return (
        ask("{topic} as JSON") | model.with_structured_output(schema) | describe | model | StrOutputParser()
    )


def last_list(model: ChatAgentflow) -> Runnable[Any, Any]:
    return (
        RunnablePassthrough.assign(x=ask("Say {topic}") | model | StrOutputParser())
        | ask("{x} as a list")
        | model
        | CommaSeparatedListOutputParser()
    )


def picked(model: ChatAgentflow) -> Runnable[Any, Any]:
    both = RunnableParallel(a=ask("a {topic}") | model, b=ask("b {topic}") | model | StrOutputParser())
    return both | RunnablePick(["a", "b", "c"])


WIRED = [three_steps, map_reduce, texts, history, structure, last_list, picked]
INPUT = {"topic": "rivers {x}", "mood": "kind", "earlier": [("user", "Hi"), ("ai", "Hello")]}


def plain(value: Any) -> Any:
    """A result without the names of runs."""
    if isinstance(value, dict):
        return {name: plain(one) for name, one in value.items()}
    if isinstance(value, AIMessageChunk):
        return plain(AIMessage(**value.model_dump(exclude={"type", "tool_call_chunks", "chunk_position"})))
    if isinstance(value, AIMessage):
        return value.model_copy(update={"id": None, "usage_metadata": None})
    return value


def on(backend: Any, **fields: Any) -> ChatAgentflow:
    return ChatAgentflow(backend=backend, **fields)


@pytest.mark.parametrize("make", WIRED)
async def test_a_wired_chain_gives_the_results_of_the_chain_in_one_trip(make):
    unwired_backend, backend = Held(), Held()
    unwired_model, model = on(unwired_backend), on(backend)
    expected = plain(make(unwired_model).invoke(INPUT))
    chain = wired(make(model))
    assert chain.unwired == ()
    backend.num_awaited = unwired_backend.num_gens
    assert plain(chain.invoke(INPUT)) == expected
    assert backend.num_gens == unwired_backend.num_gens
    assert unwired_backend.num_refs == 0
    assert backend.num_refs > 0 or make is picked
    backend.num_awaited *= 2
    assert plain(await chain.ainvoke(INPUT)) == expected
    assert [plain(one) for one in chain.batch([INPUT] * 3)] == [expected] * 3
    assert [plain(one) for one in await chain.abatch([INPUT] * 3)] == [expected] * 3
    assert plain(joined(list(chain.stream(INPUT)))) == expected
    assert plain(joined([piece async for piece in chain.astream(INPUT)])) == expected
    until(model, lambda: backend.generator.num_open == 0)


def joined(pieces: list[Any]) -> Any:
    assert pieces
    whole = pieces[0]
    for piece in pieces[1:]:
        whole = whole + piece
    return whole


def test_the_answer_of_the_last_model_streams():
    model = on(af.Scripted(lambda prompt: "one two three" if "title" in prompt else "text"))
    pieces = list(wired(three_steps(model) | StrOutputParser()).stream(INPUT))
    # Text that is there when it is read is one piece.
    assert 1 <= len(pieces) <= 5
    assert "".join(pieces) == "one two three"


def test_parts_that_cannot_be_wired_run_at_their_place():
    ran = []

    def shout(text: str) -> str:
        ran.append(text)
        return text.upper()

    def chain_of(model: ChatAgentflow) -> Runnable[Any, Any]:
        return (
            RunnablePassthrough.assign(
                x=ask("Say {topic}") | model | StrOutputParser() | RunnableLambda(shout)
            )
            | RunnablePassthrough.assign(y=ask("{x} as JSON") | model | JsonOutputParser())
            | RunnableParallel(z=ask("Write {x} {y}") | model | StrOutputParser(), y=RunnablePick("y"))
            | PromptTemplate.from_template("{{z}} {{y}}", template_format="mustache")
            | model
            | StrOutputParser()
        )

    backend = Held()
    chain = wired(chain_of(on(backend)))
    assert [type(part) for part, _ in chain.unwired] == [RunnableLambda, JsonOutputParser, PromptTemplate]
    assert all(reason for _, reason in chain.unwired)
    assert chain.invoke(INPUT) == chain_of(on(Held())).invoke(INPUT)
    assert ran[0] == ran[1]
    assert backend.num_gens == 4


async def test_branches_that_wait_run_beside_each_other():
    backend = Held()
    model = on(backend)
    branch = ask("Say {topic}") | model | StrOutputParser() | RunnableLambda(str.upper)
    chain = RunnableParallel(a=branch, b=ask("More {topic}") | model | StrOutputParser(), c=branch)
    assert wired(chain).invoke(INPUT) == await wired(chain).ainvoke(INPUT) == chain.invoke(INPUT)


def test_templates_that_change_a_value_get_the_value():
    for template in ("{x!r}", "{x:>20}"):
        chain = RunnableParallel(x=ask("Say {topic}") | on(Held()) | StrOutputParser()) | (
            PromptTemplate.from_template(template) | on(Held()) | StrOutputParser()
        )
        assert wired(chain).invoke(INPUT) == chain.invoke(INPUT)


def test_models_on_different_backends():
    chain = three_steps(on(Held())) | StrOutputParser() | on(Held()) | StrOutputParser()
    assert wired(chain).invoke(INPUT) == chain.invoke(INPUT)


def test_text_models():
    backend = Held()
    model = Agentflow(backend=backend)
    chain = (
        PromptTemplate.from_template("Say {topic}")
        | model
        | PromptTemplate.from_template("Again: {text}")
        | model
        | StrOutputParser()
    )
    assert wired(chain).unwired == ()
    assert wired(chain).invoke(INPUT) == "".join(wired(chain).stream(INPUT)) == chain.invoke(INPUT)
    backend.num_awaited = backend.num_gens + 2
    wired(chain).invoke(INPUT)
    assert backend.num_gens == backend.num_awaited


async def test_the_first_failure_is_the_runs():
    def script(prompt: str) -> str:
        if "Outline" in prompt:
            raise af.errors.BadArgument("no outlines today")
        return answer(prompt)

    backend = Held(script)
    model = on(backend, max_retries=0)
    for chain in (three_steps(model), wired(three_steps(model))):
        with pytest.raises(Exception, match="no outlines today") as failure:
            chain.invoke(INPUT)
        with pytest.raises(type(failure.value), match="no outlines today"):
            await chain.ainvoke(INPUT)
    with pytest.raises(type(failure.value), match="no outlines today"):
        list(wired(three_steps(model)).stream(INPUT))
    until(model, lambda: backend.generator.num_open == 0)


def test_a_transient_failure_is_retried():
    failures = [af.errors.EngineFailed("again")]

    def script(prompt: str) -> str:
        if failures:
            raise failures.pop()
        return answer(prompt)

    expected = three_steps(on(Held())).invoke(INPUT)
    assert plain(wired(three_steps(on(Held(script)))).invoke(INPUT)) == plain(expected)
    assert not failures


def test_a_value_that_no_one_can_parse_fails_the_run():
    model = on(af.Scripted(lambda _: "no JSON"))
    dropped = RunnableParallel(a=ask("{topic}") | model | JsonOutputParser(), b=RunnablePick("topic"))
    for chain in (dropped | RunnablePick("b"), wired(dropped | RunnablePick("b"))):
        with pytest.raises(OutputParserException):
            chain.invoke(INPUT)


def test_a_truncated_structure_fails_as_unwired():
    model = on(af.Scripted(lambda _: '{"name": "Köln am Rhein", "size": 3, "note": ""}'), max_tokens=2)
    for chain in (structure(model), wired(structure(model))):
        with pytest.raises(OutputParserException):
            chain.invoke(INPUT)


def test_all_calls_are_one_program():
    backend = Held()
    wired(three_steps(on(backend))).invoke(INPUT)
    assert len(backend.programs) == 3
    assert len(set(backend.programs)) == 1
    assert "" not in backend.programs
    wired(three_steps(on(backend))).batch([INPUT] * 2)
    assert len(backend.programs) == 9
    assert len(set(backend.programs)) == 2


def test_a_wired_chain_on_the_small_model():
    model = ChatAgentflow(max_tokens=12)
    chain = three_steps(model) | StrOutputParser()
    assert wired(chain).invoke(INPUT) == chain.invoke(INPUT)


async def test_f37_a_part_that_waited_for_a_cancelled_job_fails_the_chain() -> None:
    """Its result was None, next to the results of the other parts."""

    async def waits(text: str) -> str:
        job = asyncio.create_task(anyio.sleep_forever())  # noqa: TID251  # of the user
        await anyio.lowlevel.checkpoint()
        job.cancel()
        await job
        return text

    model = ChatAgentflow(backend=af.Scripted(answer))
    both = RunnableParallel(a=RunnableLambda(waits), b=RunnablePassthrough())
    with pytest.raises(af.errors.RunFailed):
        await wired(ask("Say {topic}") | model | StrOutputParser() | both).ainvoke(INPUT)
