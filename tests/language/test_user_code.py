"""Code of the user that ends oddly: its call fails with a defined error, and nothing else does."""

from __future__ import annotations

import asyncio
import functools
import signal
import subprocess
import tempfile
import textwrap
import threading
import types
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Iterator
from contextlib import nullcontext
from typing import Annotated, Any

import anyio
import pytest
from pydantic import AfterValidator
from support.commands import run_python
from support.process_template import start_python

import agentflow as af
from agentflow.language.failures.user_code import UserCode
from agentflow.runtime.task_group import open_task_group

pytestmark = [pytest.mark.anyio, pytest.mark.on_trio]


class Unshowable(Exception):
    """An exception that has no text."""

    def __str__(self) -> str:
        raise OSError("no text")

    __repr__ = __str__


class UnshowableValue(ValueError):
    """Like ``Unshowable``, of the kind that validators raise."""

    __str__ = __repr__ = Unshowable.__str__


class Unwritable(Exception):
    """An exception that takes no notes."""

    def __setattr__(self, name: str, value: object) -> None:
        if name != "__traceback__":  # which contextlib sets
            raise AttributeError("it cannot be changed")


ENDINGS: list[Callable[[], BaseException]] = [
    asyncio.CancelledError,
    functools.partial(SystemExit, 3),
    KeyboardInterrupt,
    GeneratorExit,
    StopIteration,
    StopAsyncIteration,
    Unshowable,
    UnshowableValue,
    functools.partial(BaseExceptionGroup, "two", [asyncio.CancelledError(), SystemExit(1)]),
    functools.partial(ExceptionGroup, "one", [ValueError("x")]),
    Unwritable,
]


# Python makes a RuntimeError of a StopIteration that leaves a coroutine. pydantic asks for the text of an
# exception of a validator, which raises OSError.
DEFINED = (af.AgentflowError, Unshowable, Unwritable, ValueError, ExceptionGroup, RuntimeError, OSError)


def ends(make: Callable[[], BaseException], *args: Any) -> Any:
    raise make()


async def ends_later(make: Callable[[], BaseException], *args: Any) -> Any:
    await anyio.lowlevel.checkpoint()
    raise make()


def validator(make: Callable[[], BaseException]) -> AfterValidator:
    def check(value: int) -> int:
        raise make()

    return AfterValidator(check)


def tools_of(make: Callable[[], BaseException], *, is_async: bool) -> Any:
    async def later() -> str:
        return await ends_later(make)

    def soon() -> str:
        return ends(make)

    return af.tool(later if is_async else soon, name="odd")


async def in_tool(flow: af.Session, make: Any, *, is_async: bool) -> None:
    async with flow.state() as s:
        s += af.user("?")
        assert await af.act(s, tools=[tools_of(make, is_async=is_async)], name="calls") == "done"
        [result] = [m["content"] for m in await s.messages() if m["role"] == "tool"]
        assert result.startswith("error: ")


async def in_approve(flow: af.Session, make: Any, *, is_async: bool) -> None:
    async with flow.state() as s:
        s += af.user("?")
        hook = functools.partial(ends_later if is_async else ends, make)
        await af.act(s, tools=[af.tool(lambda: "", name="odd")], name="calls", approve=hook)


async def in_contender(flow: af.Session, make: Any, *, is_async: bool) -> None:
    async with flow.state() as s:
        s += af.gen("answer")
        assert await af.race(ends_later(make), s["answer"]) == "done"
    await af.race(ends_later(make), ends_later(make))


async def in_run(flow: af.Session, make: Any, *, is_async: bool) -> None:
    await flow.run(functools.partial(ends_later, make))


async def in_stream(flow: af.Session, make: Any, *, is_async: bool) -> None:
    async for _ in flow.stream(functools.partial(ends_later, make)):
        pass
    pytest.fail("the stream ends without an error")


async def in_map(flow: af.Session, make: Any, *, is_async: bool) -> None:
    async def program(s: af.State, number: int) -> int:
        return await ends_later(make) if number == 1 else number

    results = await flow.map(program, range(3), on_error="return")
    assert (results[0], results[2]) == (0, 2)
    raise results[1]


async def in_mapped_variable(flow: af.Session, make: Any, *, is_async: bool) -> None:
    async with flow.state() as s:
        s += af.gen("answer")
        await s["answer"].map(functools.partial(ends, make))


async def in_key(flow: af.Session, make: Any, *, is_async: bool) -> None:
    async with flow.state() as s:
        branches = s.fork(2)
        for branch in branches:
            branch += af.gen("answer")
        key = functools.partial(ends, make)
        await (branches.best("answer", key=key) if is_async else branches.vote("answer", key=key))


class Ends:
    """Inputs whose reading ends oddly, with a close that does, too."""

    def __init__(self, make: Callable[[], BaseException]) -> None:
        self.make = make
        self.num_left = 2

    def __iter__(self) -> Ends:
        return self

    def __next__(self) -> int:
        self.num_left -= 1
        if self.num_left:
            return self.num_left
        raise self.make()

    async def later(self) -> AsyncIterator[int]:
        try:
            yield 1
            raise self.make()
        finally:
            raise self.make()


async def in_inputs(flow: af.Session, make: Any, *, is_async: bool) -> None:
    async def program(s: af.State, number: int) -> int:
        return number

    inputs = Ends(make).later() if is_async else Ends(make)
    await flow.map(program, inputs, on_error="return")
    if isinstance(make(), StopIteration) and not is_async:
        raise RuntimeError  # which ends every iterator


async def in_close_of_inputs(flow: af.Session, make: Any, *, is_async: bool) -> None:
    async def program(s: af.State, number: int) -> int:
        raise ValueError("the first failure")

    def soon() -> Iterator[int]:
        try:
            yield from range(99)
        finally:
            raise make()

    with pytest.raises(ValueError, match="the first failure"):
        await flow.map(program, soon(), concurrency=1)
    raise RuntimeError


async def in_key_of_inputs(flow: af.Session, make: Any, *, is_async: bool) -> None:
    async def program(s: af.State, number: int) -> int:
        return number

    key = functools.partial(ends, make)
    with tempfile.TemporaryDirectory() as folder:
        await flow.map(program, range(2), resume=f"{folder}/x", key=key, on_error="return")


async def in_kept_result(flow: af.Session, make: Any, *, is_async: bool) -> None:
    async def program(s: af.State, number: int) -> Any:
        return number

    program.__annotations__["return"] = Annotated[int, validator(make)]
    with tempfile.TemporaryDirectory() as folder:
        await flow.map(program, range(2), resume=f"{folder}/x", on_error="return")


async def in_validator(flow: af.Session, make: Any, *, is_async: bool) -> None:
    async with flow.state() as s:
        kind = Annotated[int, validator(make)]
        s += af.gen("number", schema=kind, on_invalid="retry" if is_async else "raise")
        await s["number"]


async def in_script(flow: af.Session, make: Any, *, is_async: bool) -> None:
    async with flow.state() as s:
        s += af.gen("scripted")
        await s["scripted"]


async def in_judge(flow: af.Session, make: Any, *, is_async: bool) -> None:
    @af.program
    async def two(s: af.State, name: str) -> None:
        s += af.user("One: ", name, "\nBe brief.") + af.user("Two: ", name, "\nBe kind.")

    judge = functools.partial(ends_later if is_async else ends, make)
    await two.trace().optimised(reorder=True, judge=judge)


async def in_trace(flow: af.Session, make: Any, *, is_async: bool) -> None:
    async def program(s: af.State) -> None:
        raise make()

    af.program(program).trace()


PLACES: list[Callable[..., Awaitable[None]]] = [
    in_tool, in_approve, in_contender, in_run, in_stream, in_map, in_mapped_variable, in_key, in_validator,
    in_inputs, in_close_of_inputs, in_key_of_inputs, in_kept_result, in_script, in_judge, in_trace,
]  # fmt: skip
ASYNCHRONOUS = [in_tool, in_approve, in_key, in_validator, in_inputs, in_judge]
"""Places that differ between the two kinds of functions."""


@pytest.mark.parametrize(
    ("place", "is_async"), [*((one, False) for one in PLACES), *((one, True) for one in ASYNCHRONOUS)]
)
async def test_f12a_code_that_ends_oddly_fails_its_call_alone(place, is_async, anyio_backend_name):
    for make in ENDINGS:
        is_unshowable = make in (Unshowable, UnshowableValue)
        if place in (in_approve, in_judge) and is_unshowable and anyio_backend_name == "trio":
            continue  # trio shows the exceptions of its nurseries
        num_made = 0

        def made(make: Callable[[], BaseException] = make) -> BaseException:
            nonlocal num_made
            num_made += 1
            return make()

        script = {"calls": [[af.ToolCall("odd", {})], "done"], "answer": "done", "number": ["1"] * 9}
        script["scripted"] = functools.partial(ends, made)
        async with af.session(backend=af.Scripted(script), seed=1) as flow:
            with nullcontext() if place is in_tool else pytest.raises(DEFINED), anyio.fail_after(10):
                await place(flow, made, is_async=is_async)
            assert num_made, make
            async with flow.state() as s:
                s += af.gen("answer")
                assert await s["answer"] == "done", make


async def test_f12b_a_cancellation_of_the_own_task_passes():
    with anyio.CancelScope() as scope:
        with UserCode("the block"):
            scope.cancel()
            await anyio.sleep_forever()
        pytest.fail("the cancellation was lost")
    assert scope.cancelled_caught

    with anyio.CancelScope() as scope:
        scope.cancel()
        with UserCode("the block"):
            await anyio.lowlevel.checkpoint()
        pytest.fail("the cancellation was lost")


async def test_f37_a_cancelled_program_that_exits_is_cancelled():
    """A nursery of trio ends like this if one of its tasks exits when it is cancelled."""

    async def exits(s: af.State) -> None:
        try:
            await anyio.sleep_forever()
        except anyio.get_cancelled_exc_class() as error:
            raise BaseExceptionGroup("two", [error, SystemExit(3), ValueError("x")]) from None

    async with af.session(backend=af.Scripted({"answer": "done"})) as flow:
        with anyio.CancelScope() as scope:
            async with anyio.create_task_group() as group:
                group.start_soon(flow.run, exits)
                await anyio.wait_all_tasks_blocked()
                scope.cancel()
        assert scope.cancelled_caught
        async with flow.state() as s:
            s += af.gen("answer")
            assert await s["answer"] == "done"


@pytest.mark.parametrize("order", [1, -1])
async def test_f37_an_interrupt_in_a_group_with_a_cancellation_passes(order: int) -> None:
    async def interrupted() -> None:
        with anyio.CancelScope() as scope, UserCode("the program"):
            scope.cancel()
            try:
                await anyio.sleep_forever()
            except anyio.get_cancelled_exc_class() as cancelled:
                try:
                    signal.raise_signal(signal.SIGINT)
                except KeyboardInterrupt as interrupt:
                    odd = [cancelled, interrupt, SystemExit(3)]
                    raise BaseExceptionGroup("all", odd[::order]) from None

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            await interrupted()
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_f12b_a_cancellation_by_asyncio_passes(anyio_backend):
    async def cancelled() -> None:
        with UserCode("the block"):
            await asyncio.sleep(60)  # noqa: TID251  # of the user

    task = asyncio.create_task(cancelled())  # noqa: TID251  # of the user
    await anyio.lowlevel.checkpoint()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task

    job = asyncio.create_task(anyio.sleep_forever())  # noqa: TID251  # of the user
    await anyio.lowlevel.checkpoint()
    job.cancel()
    with pytest.raises(af.errors.RunFailed) as caught, UserCode("the block"):
        await job
    assert isinstance(caught.value.__cause__, asyncio.CancelledError)


async def test_f12b_a_coroutine_that_is_closed_ends_as_one():
    @types.coroutine
    def suspended() -> Generator[None, None, None]:
        yield

    async def running() -> None:
        with UserCode("the block"):
            await suspended()

    coroutine = running()
    coroutine.send(None)
    async with anyio.create_task_group() as group:

        async def close() -> None:
            coroutine.close()  # raises unless the coroutine ends with GeneratorExit

        group.start_soon(close)


SCRIPT = """
    import signal, sys, threading, time
    import agentflow as af

    def stuck() -> str:
        print("begun", flush=True)
        threading.Event().wait()

    async def main(s: af.State) -> None:
        s += af.user("?")
        await af.act(s, tools=[stuck])

    backend = af.Scripted([[af.ToolCall("stuck", {})], "done"])
    af.run(main, session=af.session(backend=backend))
"""


def test_f12c_ctrl_c_does_not_wait_for_the_thread_of_a_tool():
    import signal

    pipe = subprocess.PIPE
    with start_python("-c", textwrap.dedent(SCRIPT), stdout=pipe, stderr=pipe) as child:
        try:
            assert child.stdout is not None
            assert child.stdout.readline() == b"begun\n"
            child.send_signal(signal.SIGINT)
            _, stderr = child.communicate(timeout=30)
        finally:
            child.kill()
    assert b"KeyboardInterrupt" in stderr


INTERRUPTED = """
    import os, signal, sys
    import anyio
    import agentflow as af

    class Stop({base}):
        pass

    def handle(number, frame):
        raise Stop

    signal.signal(signal.SIGINT, handle)

    async def interrupts() -> str:
        os.kill(os.getpid(), signal.SIGINT)
        return "not interrupted"

    async def waits() -> str:
        try:
            await anyio.sleep_forever()
        finally:
            print("tool left", flush=True)

    async def by_tool(s: af.State) -> None:
        try:
            s += af.user("?")
            await af.act(s, tools=[waits, interrupts])
        finally:
            print("program left", flush=True)

    async def by_itself(s: af.State) -> None:
        try:
            await interrupts()
        finally:
            print("program left", flush=True)

    async def by_input(s: af.State, number: int) -> None:
        await (by_itself(s) if number == 1 else waits())

    class Backend(af.Scripted):
        from contextlib import asynccontextmanager

        @asynccontextmanager
        async def connect(self, *args):
            try:
                async with super().connect(*args) as connection:
                    yield connection
            finally:
                print("session left", flush=True)

    backend = Backend([[af.ToolCall("waits", {{}}), af.ToolCall("interrupts", {{}})], "done"])
    session = af.session(backend=backend)
    {call}
"""


@pytest.mark.parametrize("base", ["KeyboardInterrupt", "SystemExit"])
@pytest.mark.parametrize(
    ("call", "left"),
    [
        ("af.run(by_itself, session=session)", ["program left", "session left"]),
        ("af.run(by_tool, session=session)", ["tool left", "program left", "session left"]),
        ("af.map(by_input, range(2), session=session)", ["tool left", "program left", "session left"]),
        ("anyio.run(lambda: main())", ["program left", "session left"]),
    ],
)
def test_f12d_an_exception_of_a_signal_handler_on_the_loop_ends_everything(base, call, left):
    """It is raised wherever the loop is, here within code of the user, and every block is left."""
    if "main" in call:
        call = MAIN + "    " + call
    script = textwrap.dedent(INTERRUPTED.format(base=base, call=call))
    ended = run_python("-c", script)
    assert sorted(ended.stdout.splitlines()) == sorted(left), ended.stderr
    assert ended.returncode != 0 or base == "SystemExit"
    if base == "KeyboardInterrupt":
        raised = [line.endswith(("Stop", "KeyboardInterrupt")) for line in ended.stderr.splitlines()]
        assert any(raised), ended.stderr  # warnings of asyncio may follow
    for trouble in ("never retrieved", "Exception ignored", "RunFailed"):
        assert trouble not in ended.stderr


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt()])
async def test_f12d_such_an_exception_of_a_block_leaves_it_as_itself(error):
    async def block() -> None:
        async with open_task_group() as group:
            group.start_soon(anyio.sleep_forever)
            await anyio.lowlevel.checkpoint()
            raise error

    with pytest.raises(type(error)):
        await block()


MAIN = """async def main():
        async with session as flow:
            await flow.run(by_itself)

"""


async def test_f12c_a_plain_tool_may_call_back_into_the_loop():
    def asks() -> str:
        assert threading.current_thread() is not threading.main_thread()
        return anyio.from_thread.run(later)

    async def later() -> str:
        await anyio.lowlevel.checkpoint()
        return "from the loop"

    backend = af.Scripted({"answer": [[af.ToolCall("asks", {})], "done"]})
    async with af.session(backend=backend) as flow, flow.state() as s:
        s += af.user("?")
        await af.act(s, tools=[asks])
        assert (await s.messages())[2]["content"] == "from the loop"
