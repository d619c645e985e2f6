"""The fifteen typical mistakes: each message contains the fault, its place, and a correction."""

from __future__ import annotations

import json
import threading
import traceback
import warnings
from contextlib import asynccontextmanager
from dataclasses import dataclass

import anyio
import anyio.lowlevel
import msgspec
import pytest
from pydantic import TypeAdapter
from support.fake_engine import FakeEngine
from support.programs import echo
from support.session_peer import HangingGenerator

import agentflow as af
from agentflow.server.app import Access
from agentflow.server.models.models import one_model
from agentflow.server.serve import running_server
from agentflow.server.tenants.keys import Tenants

pytestmark = pytest.mark.anyio

FILE = "test_typical_mistakes.py"


def shown(error: BaseException) -> str:
    """The output of Python: the lines of the program, the message and the notes."""
    return "".join(traceback.format_exception(error))


def says(error: BaseException, *words: str) -> None:
    text = str(error) + "".join(getattr(error, "__notes__", []))
    for word in words:
        assert word in text


def last_line(error: BaseException) -> str:
    """The innermost line of this file in the traceback: where the error surfaces."""
    lines = [step for step in traceback.extract_tb(error.__traceback__) if step.filename == __file__]
    return lines[-1].line or ""


def opened() -> af.Session:
    return af.session(backend=af.Scripted(echo))


async def test_wrong_name():
    async def program(s: af.State) -> str:
        s += af.gen("answer")
        return await s["anwser"]

    async with opened() as flow:
        with pytest.raises(af.errors.UnknownVariable) as failure:
            await flow.run(program)
        says(failure.value, "'anwser'", "did you mean 'answer'?")
        assert last_line(failure.value) == 'return await s["anwser"]'


async def test_the_name_of_a_branch_on_its_parent():
    async with opened() as flow, flow.state() as s:
        async with s.fork(2) as branches:
            branches[1] += af.gen("idea")
        with pytest.raises(af.errors.UnknownVariable, match=r"branches\[1\]\['idea'\]"):
            s["idea"]


USES = {
    "slice": lambda x: x[:5],  # and the others of VALUE_USES in test_misuse.py
    "attribute": lambda x: x.split(),
    "json": json.dumps,
    "join": lambda x: ", ".join([x]),
    "f37_validation": TypeAdapter(str).validate_python,
    "f37_conversion": lambda x: msgspec.convert(x, str),
    "f37_search": [""].index,
}


@pytest.mark.parametrize("use", USES)
async def test_missing_await(use):
    async def program(s: af.State) -> object:
        s += af.gen("answer")
        return USES[use](s["answer"])

    async with opened() as flow:
        with pytest.raises((af.errors.BadArgument, AttributeError, TypeError, ValueError)) as failure:
            await flow.run(program)
        says(failure.value, "await it first")
        assert "USES[use]" in shown(failure.value)


async def test_f37_an_error_about_a_variable_of_another_kind_has_no_note():
    async def program(s: af.State) -> object:
        raise ValueError("Variable 'rate' must be positive")

    async with opened() as flow:
        with pytest.raises(ValueError, match="rate") as failure:
            await flow.run(program)
        assert "await it first" not in shown(failure.value)


async def test_reused_state():
    async def program(s: af.State) -> af.State:
        s += af.gen("answer")
        return s

    async with opened() as flow:
        s = await flow.run(program)
        with pytest.raises(af.errors.StateClosed) as failure:
            s += "more"
        says(failure.value, "has ended with its run", "return values", "flow.state()")


async def test_foreign_variable():
    async with opened() as flow, opened() as other, flow.state() as s, other.state() as t:
        s += af.gen("answer")
        with pytest.raises(af.errors.ForeignState) as failure:
            t += f"It said {s['answer']}"
        says(failure.value, "'answer'", "another session", "await it and append its value")


async def test_name_collision():
    """A name may be declared again, and arguments may have any name, including this package's names."""

    @af.program
    async def program(s: af.State, state: str, program: str, self: str, name: str) -> list[str]:
        s += state + af.gen("x")
        first = s["x"]
        s += program + self + name + af.gen("x")
        return [await first, await s["x"]]

    named = {"state": "a", "program": "b", "self": "c", "name": "d"}
    async with opened() as flow:
        assert await flow.run(program, **named) == ["<a>", "<a<a>bcd>"]
        assert await flow.map(program, [named]) == [["<a>", "<a<a>bcd>"]]
        assert await flow.submit(program.trace(), named) == ["<a>", "<a<a>bcd>"]
        with pytest.raises(
            af.errors.BadArgument
        ) as failure:  # two gens of one name: the type says which is meant
            await typed_twice(flow)
        says(failure.value, "'x'", "is not of this gen", "before another of that name")


async def typed_twice(flow: af.Session) -> None:
    async with flow.state() as s:
        first, second = af.gen("x", type=int), af.gen("x", type=bool)
        s += first + second
        try:
            s[first]
        except af.errors.UnknownVariable as error:
            raise af.errors.BadArgument(str(error)) from None


def test_an_argument_that_is_named_as_the_session():
    async def program(s: af.State, session: str) -> str:
        return session

    with pytest.raises(af.errors.BadArgument, match="by position"):
        af.run(program, session="morning")
    assert af.run(program, "morning", session=opened()) == "morning"


async def test_blocking_call(monkeypatch):
    monkeypatch.setenv("AGENTFLOW_BLOCKING_MS", "20")
    warned = threading.Event()
    found: list[str] = []

    def show(message, category, filename, lineno, file=None, line=None) -> None:
        found.append(str(message))
        warned.set()

    def look_up(text: str) -> str:
        warned.wait(timeout=60)
        return text

    with warnings.catch_warnings():
        warnings.simplefilter("default", af.errors.BlockingWarning)
        monkeypatch.setattr(warnings, "showwarning", show)
        async with opened() as flow, flow.state() as s:
            s += "a" + af.gen("answer")
            assert await s["answer"].map(look_up) == "<a>"
    (message,) = found
    line = look_up.__code__.co_firstlineno + 1
    for word in (f"{FILE}:{line}, in look_up", "blocked the event loop", "anyio.to_thread.run_sync"):
        assert word in message


class Report:
    grade: str


@dataclass
class Graded:
    grade: int


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        (Report, ["Report cannot be expressed as JSON", "a pydantic model, a dataclass"]),
        (Graded(8), ["give the type Graded, not an instance"]),
        (["A", "B"], ["['A', 'B']", "such as list[str]"]),
        ("int", ["the type itself", "'int'"]),
        ({"tpye": "object"}, ["no keyword", "did you mean 'type'?"]),
        ({"name": "str", "age": "int"}, ["no keyword", '"properties"']),
        ({"type": "int"}, ["'int'", "integer"]),
    ],
)
async def test_schema_slip(schema, words):
    with pytest.raises(af.errors.BadArgument) as failure:
        af.gen("report", schema=schema)
    says(failure.value, *words)
    assert last_line(failure.value) == 'af.gen("report", schema=schema)'


async def test_too_long_prompt():
    async with af.session(backend=FakeEngine()) as flow, flow.state() as s:
        s += "word " * 2000 + af.gen("answer")
        appended = traceback.extract_stack()[-1].lineno - 1
        with pytest.raises(af.PromptTooLong) as failure:
            await s["answer"]
        says(failure.value, "10,000 tokens", "1,024", "shorten it", f"{FILE}:{appended}")


async def test_no_server(free_tcp_port):
    with pytest.raises(af.errors.ServerUnreachable) as failure:
        async with af.session(f"ws://127.0.0.1:{free_tcp_port}"):
            pass
    says(failure.value, f"127.0.0.1:{free_tcp_port}", "agentflow serve", "check the address")
    assert len(shown(failure.value).splitlines()) < 10  # no frames of the connection


@pytest.mark.parametrize("name", ["smollm2-135m", "models/gemma.gguf", "openai/gpt-4.1-mini"])
async def test_a_model_in_place_of_an_address(name):
    with pytest.raises(af.errors.BadArgument) as failure:
        async with af.session(name):
            pass
    says(failure.value, f"model={name!r}", "openai:MODEL")


@pytest.mark.parametrize("address", ["openai:gpt-4.1-mini", "anthropic:claude", "http://127.0.0.1:8410/v1"])
async def test_f37_an_address_in_place_of_a_model(address, monkeypatch):
    monkeypatch.delenv("AGENTFLOW_URL", raising=False)
    with pytest.raises(af.errors.BadArgument) as failure:
        async with af.session(model=address):
            pass
    assert failure.value.param == "model"
    says(failure.value, f"af.session({address!r})")


async def test_no_model(tmp_path, monkeypatch):
    monkeypatch.setenv("AGENTFLOW_CACHE", str(tmp_path))
    monkeypatch.delenv("AGENTFLOW_URL", raising=False)
    with pytest.raises(af.errors.UnknownModel) as failure:
        async with af.session():
            pass
    says(failure.value, "agentflow pull smollm2-135m")
    assert len(shown(failure.value).splitlines()) < 10


@pytest.mark.parametrize("anyio_backend", ["asyncio"])  # the server's
@pytest.mark.parametrize("api_key", [None, "af-wrong"])
async def test_wrong_key(api_key):
    access = Access(Tenants(["af-right"]))

    @asynccontextmanager
    async def opening():
        yield HangingGenerator()

    async with running_server(one_model(opening), access=access) as server:
        with pytest.raises(af.errors.NotAuthorized) as failure:
            async with af.session(server.url, api_key=api_key):
                pass
    says(failure.value, server.url.partition("/")[2].strip("/"), "API key", "api_key=")


async def test_closed_session():
    async with opened() as flow:
        pass
    with pytest.raises(af.errors.StateClosed) as failure:
        flow.state()
    says(failure.value, "the session has ended", "async with")


async def test_session_that_was_not_opened():
    flow = opened()
    for use in (flow.state, flow.check_alive, lambda: flow.capabilities):
        with pytest.raises(af.errors.StateClosed) as failure:
            use()
        says(failure.value, "was not opened", "async with af.session(...) as flow:")


async def in_tasks(write, s: af.State) -> None:
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(write, s)
        tasks.start_soon(write, s)


async def test_two_writers():
    async def write(s: af.State) -> None:
        for _ in range(2):
            s.add("line")
            await anyio.lowlevel.checkpoint()

    line = write.__code__.co_firstlineno + 2
    async with opened() as flow, flow.state() as s:
        with pytest.raises(BaseExceptionGroup) as failure:
            await in_tasks(write, s)
    (error,) = failure.value.exceptions
    assert isinstance(error, af.errors.ConcurrentAppend)
    says(error, "two tasks", f"{FILE}:{line}, in write", "give each task a branch")


async def test_tuple_input():
    async def program(s: af.State, pair: tuple[str, str]) -> str:
        return " and ".join(pair)

    async with opened() as flow:
        with pytest.raises(TypeError) as failure:
            await flow.map(program, [("a", "b")])
        says(failure.value, "input 0 was ('a', 'b')", "positional arguments", "[(item,) for item in inputs]")
        assert await flow.map(program, [(("a", "b"),)]) == ["a and b"]


async def test_sync_in_async():
    async def program(s: af.State) -> None:
        pass

    with pytest.raises(af.errors.ProgramError) as failure:
        af.run(program)
    says(failure.value, "event loop", "await flow.run(...)")


def nothing() -> None:
    pass


async def test_a_function_that_is_not_async():
    def program(s: af.State) -> str:
        return "done"

    async with opened() as flow:
        with pytest.raises(af.errors.BadArgument) as failure:
            await flow.run(program)
        line = program.__code__.co_firstlineno
        says(failure.value, f"{FILE}:{line}, in program", "'done'", "async def")
        with pytest.raises(af.errors.BadArgument, match="an async function"):
            await flow.run(af.program(program))
        with pytest.raises(af.errors.BadArgument, match="an async function"):
            af.program(program).trace()


async def test_f37_a_generator_in_place_of_a_program():
    async def program(s: af.State):
        s += af.gen("answer")
        yield s["answer"]

    async with opened() as flow:
        with pytest.raises(af.errors.BadArgument) as failure:
            await flow.run(program)
        says(failure.value, f"{FILE}:{program.__code__.co_firstlineno}, in program", "flow.stream")
        assert "async def" not in str(failure.value)


async def test_with_and_for_instead_of_async():
    async with opened() as flow, flow.state() as s:
        for item in (opened(), s, s.fork(1), s.user(), flow.map(nothing, [])):
            with pytest.raises(af.errors.BadArgument, match="`async with`"), item:
                pass
        for item in (s, flow.map(nothing, [])):
            with pytest.raises(af.errors.BadArgument, match="`async for`"):
                list(item)


def untyped(city):
    """The weather."""


async def test_bad_tool():
    with pytest.raises(af.errors.BadArgument) as failure:
        af.reply("calls", tools=[untyped])
    line = untyped.__code__.co_firstlineno
    says(failure.value, "tool 'untyped'", "'city'", "city: str", f"{FILE}:{line}, in untyped")
    with pytest.raises(af.errors.BadArgument, match=r"a tool is a function or a schema.*'weather'"):
        af.reply("calls", tools=["weather"])


async def test_a_function_of_map_that_raises():
    def shout(text: str) -> str:
        return text.upper() + 1  # type: ignore[operator]

    line = shout.__code__.co_firstlineno + 1
    async with opened() as flow, flow.state() as s:
        s += af.gen("answer")
        s += af.user(s["answer"].map(shout))
        s += af.gen("next")
        with pytest.raises(af.errors.RunFailed) as failure:
            await s["next"]
        says(failure.value, "TypeError", f"{FILE}:{line}, in shout")
        root: BaseException = failure.value
        while root.__cause__ is not None:
            root = root.__cause__
        assert isinstance(root, TypeError)
        assert [step.name for step in traceback.extract_tb(root.__traceback__)] == ["shout"]


def test_an_error_of_a_script_shows_the_program_alone():
    async def program(s: af.State) -> str:
        s += af.gen("answer")
        return await s["anwser"]

    with pytest.raises(af.errors.UnknownVariable) as failure:
        af.run(program, session=opened())
    names = [step.name for step in traceback.extract_tb(failure.value.__traceback__)]
    assert names[-1] == "program"
    assert len(names) == 4  # this test, af.run, the raise, the program


def test_an_error_of_python_shows_the_program_and_what_it_called():
    async def program(s: af.State) -> object:
        s += af.gen("answer")
        try:
            return json.loads(s["answer"])
        except TypeError:
            return json.loads("{")

    with pytest.raises(json.JSONDecodeError) as failure:
        af.run(program, session=opened())
    names = [step.name for step in traceback.extract_tb(failure.value.__traceback__)]
    assert names[3:5] == ["program", "loads"]  # after this test, af.run, the raise
    assert isinstance(failure.value.__context__, TypeError)
    assert not failure.value.__suppress_context__


def test_f37_a_method_is_no_program_but_runs_as_it_is():
    class Agent:
        async def ask(self, s: af.State, question: str) -> str:
            s += af.user(question) + af.gen("answer")
            return await s["answer"]

    with pytest.raises(af.errors.BadArgument, match=r"Agent\.ask is a method.*leave out @af\.program"):
        af.program(Agent.ask)
    bound = af.program(Agent().ask)
    assert repr(bound) == "<Program ask>"
    assert af.run(bound, "a", session=opened()) == af.run(Agent().ask, "a", session=opened())


async def test_f37_an_unused_stream_says_what_to_write_and_logs_nothing(caplog):
    async def program(s: af.State) -> None:
        s += af.gen("answer")

    async with opened() as flow:
        with pytest.raises(af.errors.BadArgument, match=r"needs `async for`: `await flow\.run"):
            await flow.stream(program)
    assert not caplog.records


async def test_f37_an_unawaited_value_is_named_as_it_is_written():
    async with opened() as flow, flow.state() as s:
        s += af.gen("answer")
        for value, written in (
            (s["answer"].json("a").lower(), "await s['answer'].json('a').lower()"),
            (s.text(), "await s.text()"),
            (s["answer"].map(str.upper), "await variable"),
        ):
            with pytest.raises(af.errors.BadArgument) as failure:
                len(value)
            says(failure.value, f"`value = {written}`")


async def test_f37_an_unawaited_result_of_a_map_with_a_file(tmp_path):
    async def program(s: af.State, question: str) -> str:
        s += af.user(question) + af.gen("answer")
        return s["answer"]

    async with opened() as flow:
        with pytest.raises(af.errors.BadArgument) as failure:
            await flow.map(program, ["a"], resume=tmp_path / "answers.jsonl")
        says(failure.value, "a Variable has no form in JSON: await it first")
