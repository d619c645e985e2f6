"""Events of a running program: every branch's text in order, larger deltas for a slow reader, the end."""

import gc
from collections.abc import AsyncIterable
from contextlib import suppress

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.fake_engine import FakeEngine
from support.observed_backends import Observed, Stepped, assert_idle, settle

import agentflow as af
from agentflow.protocol import ops

pytestmark = [pytest.mark.anyio, pytest.mark.on_trio]


def echo(prompt: str) -> str | Exception:
    """Answers with the prompt; a prompt that ends in ``!`` fails."""
    return (
        af.errors.EngineFailed(f"cannot answer {prompt}") if prompt.endswith("!") else f"say {prompt} again"
    )


@af.program
async def tree(s: af.State, letters: str) -> dict[str, str]:
    """A branch for each letter, and a gen and a select in the state."""
    s += "p" + af.gen("x")
    async with s.fork(len(letters)) as branches:
        for letter, branch in zip(letters, branches, strict=True):
            branch += letter + af.gen("x") + af.gen("y")
    for branch in branches:
        s += branch["y"]
    s += af.gen("x")
    return {"root": await s["x"]} | {b.path[0]: await b["y"] for b in branches}


async def events_of(stream: AsyncIterable[af.ProgramEvent]) -> list[af.ProgramEvent]:
    return [event async for event in stream]


async def collect(stream: AsyncIterable[af.ProgramEvent], received: list[af.ProgramEvent]) -> None:
    """Collects the events, including the events before a failure."""
    async for event in stream:
        received.append(event)


@given(letters=st.text("abc", min_size=1, max_size=4))
async def test_deltas_add_up_to_the_values_of_every_variable(letters):
    async with af.session(backend=af.Scripted(echo)) as flow:
        *events, last = await events_of(flow.stream(tree, letters))
        assert last == af.RunDone(await flow.run(tree, letters))
    received: dict[tuple, str] = {}
    done: list[tuple] = []
    for event in events:
        key = (event.path, event.name)
        if isinstance(event, af.TextDelta):
            assert event.text
            received[key] = received.get(key, "") + event.text
        else:
            assert received.pop(key) == event.value  # after its last delta
            assert event.usage.output_tokens == len(event.value.split())
            assert event.finish_reason == "eos"
            done.append(key)
    branches = [((i,), name) for i in range(len(letters)) for name in "xy"]
    assert sorted(done) == sorted([((), "x"), ((), "x"), *branches])
    assert received == {}


async def test_events_of_branches_alternate():
    backend = Stepped({"": "a b c d e f g h"})

    @af.program
    async def program(s: af.State) -> None:
        for branch in s.fork(2):
            branch += af.gen("x")

    async with af.session(backend=backend) as flow, flow.stream(program) as stream:
        paths = []
        for _ in range(6):
            await backend.allow(2)  # a word of each
            paths.append((await anext(stream)).path)
        assert paths in ([(0,), (1,)] * 3, [(1,), (0,)] * 3)


async def all_runs_ended(flow: af.Session) -> None:
    with anyio.fail_after(10):
        while flow._link.states:
            await anyio.lowlevel.checkpoint()


async def test_a_slow_reader_gets_larger_deltas_and_does_not_delay_the_run():
    engine = FakeEngine()

    @af.program
    async def program(s: af.State) -> str:
        s += "begin " + af.gen("x", max_tokens=60)
        return await s["x"]

    async with af.session(backend=engine) as flow:
        stream = flow.stream(program)
        engine.gate.allow(5)
        first = await anext(stream)
        engine.gate.open()
        await all_runs_ended(flow)  # while the stream is not read
        second, end, last = [event async for event in stream]
        assert isinstance(first, af.TextDelta)
        assert isinstance(second, af.TextDelta)
        assert first.text + second.text == end.value == last.result
        assert len(second.text) > len(first.text)


async def test_a_failure_of_the_program_is_raised_after_what_came_before():
    @af.program
    async def program(s: af.State) -> None:
        s += "a" + af.gen("x")
        s += "!" + af.gen("y")
        await s

    async with af.session(backend=af.Scripted(echo)) as flow:
        stream = flow.stream(program)
        received: list[af.ProgramEvent] = []
        with pytest.raises(af.errors.EngineFailed, match="cannot answer"):
            await collect(stream, received)
        assert received[-1] == af.VariableDone((), "x", "say a again", "eos", af.Usage(1, 0, 3))
        assert await events_of(stream) == []  # it was raised once


async def test_an_exception_of_the_program_is_raised_unchanged_and_does_not_end_the_session():
    error = KeyError("own")

    @af.program
    async def program(s: af.State) -> None:
        raise error

    async with af.session(backend=af.Scripted(echo)) as flow:
        with pytest.raises(KeyError) as failure:
            await events_of(flow.stream(program))
        assert failure.value is error
        assert len(await events_of(flow.stream(tree, "a"))) > 1


async def test_an_unawaited_failure_is_raised_at_the_end():
    @af.program
    async def program(s: af.State) -> None:
        s.fork(1)[0].add("!").add(af.gen("x"))

    async with af.session(backend=af.Scripted(echo)) as flow:
        with pytest.raises(af.errors.EngineFailed):
            await events_of(flow.stream(program))


@af.program
async def endless(s: af.State, log: list[str]) -> None:
    s += af.gen("x")
    try:
        await s["x"]
    finally:
        log.append("ended")


async def test_leaving_the_block_of_a_stream_ends_its_program_at_once():
    backend = Stepped({"": "one two"})
    async with af.session(backend=backend) as flow:
        log: list[str] = []
        async with flow.stream(endless, log) as stream:
            await backend.allow(1)
            async for event in stream:
                assert event == af.TextDelta((), "x", "one")
                break
        assert log == ["ended"]
        await stream.aclose()  # may be repeated
        assert await events_of(stream) == []
        await settle()
        assert_idle(backend)


async def read_one_and_break(stream: af.ProgramStream) -> None:
    async for _ in stream:
        break


async def read_one_and_raise(stream: af.ProgramStream) -> None:
    async for _ in stream:
        raise ZeroDivisionError


async def time_out(stream: af.ProgramStream) -> None:
    with anyio.move_on_after(0.01):
        async for _ in stream:
            pass


@pytest.mark.parametrize("leave", [read_one_and_break, read_one_and_raise, time_out])
async def test_f44c_leaving_the_loop_of_a_referenced_stream_ends_its_program(leave):
    backend = Stepped({"": "one two"})
    log: list[str] = []
    async with af.session(backend=backend) as flow:
        stream = flow.stream(endless, log)
        await backend.allow(1)
        with suppress(ZeroDivisionError):
            await leave(stream)
        await settle()
        assert log == ["ended"]
        assert_idle(backend)
        with pytest.raises(af.Cancelled, match="async with"):
            await events_of(stream)


async def test_f44c_inside_of_its_block_a_stream_is_read_by_several_loops():
    backend = Stepped({"": "one two"})
    async with af.session(backend=backend) as flow, flow.stream(tree, "a") as stream:
        await backend.allow(1)
        await read_one_and_break(stream)
        await settle()
        await backend.allow(100)
        assert isinstance((await events_of(stream))[-1], af.RunDone)


async def test_f44c_a_loop_that_ends_does_not_cancel_another():
    backend = Stepped({"": "one two"})
    async with af.session(backend=backend) as flow, anyio.create_task_group() as group:
        stream = flow.stream(tree, "a")
        received: list[af.ProgramEvent] = []
        group.start_soon(read_one_and_break, stream)
        group.start_soon(collect, stream, received)
        await settle()
        await backend.allow(100)
    assert isinstance(received[-1], af.RunDone)


async def test_an_unread_stream_runs_to_its_end():
    async with af.session(backend=af.Scripted(echo)) as flow:
        stream = flow.stream(tree, "ab")
        await all_runs_ended(flow)
        await stream.aclose()
        assert isinstance((await events_of(stream))[-1], af.RunDone)


async def test_a_stream_fails_when_its_session_ends():
    backend = Stepped({"": "one two"})
    received: list[af.ProgramEvent] = []

    async def read(stream: af.ProgramStream) -> None:
        with pytest.raises(af.Cancelled, match="session ended"):
            await collect(stream, received)

    async with anyio.create_task_group() as group, af.session(backend=backend) as flow:
        group.start_soon(read, flow.stream(endless, []))
        await backend.allow(1)
    assert received == [af.TextDelta((), "x", "one")]


async def test_two_streams_at_once():
    async with af.session(backend=af.Scripted(echo)) as flow, anyio.create_task_group() as group:
        results = []

        async def run(letters: str) -> None:
            results.append((await events_of(flow.stream(tree, letters)))[-1])

        for letters in ("a", "bc"):
            group.start_soon(run, letters)
    assert len(results) == 2
    assert {len(done.result) for done in results} == {2, 3}


async def test_events_of_a_state_are_those_of_its_own_variables():
    async with af.session(backend=af.Scripted(echo)) as flow, flow.state() as s:
        s += "a" + af.gen("x")
        branch = s.fork(1)[0]
        branch += af.gen("not mine")
        s += af.gen("y")
        events = [event async for event in s]
        assert {event.path for event in events} == {()}
        values = {event.name: event.value for event in events if isinstance(event, af.VariableDone)}
        assert values == {"x": await s["x"], "y": await s["y"]}
        again = [event async for event in s]  # replayed, in larger deltas
        assert [type(event) for event in again] == [af.TextDelta, af.VariableDone] * 2
        assert [event async for event in s.fork(1)[0]] == []


async def test_events_of_a_state_that_fails_end_with_the_failure():
    async with af.session(backend=af.Scripted(echo)) as flow, flow.state() as s:
        s += "a" + af.gen("x") + "!" + af.gen("y")
        stream = aiter(s)
        received: list[af.ProgramEvent] = []
        with pytest.raises(af.errors.EngineFailed):
            await collect(stream, received)
        assert [event.name for event in received if isinstance(event, af.VariableDone)] == ["x"]
        assert [event async for event in stream] == []


async def test_several_tasks_may_share_one_stream():
    async with af.session(backend=af.Scripted(echo)) as flow, anyio.create_task_group() as group:
        stream = flow.stream(tree, "abc")
        received = []

        async def read() -> None:
            received.extend([event async for event in stream])

        for _ in range(3):
            group.start_soon(read)
    assert sum(isinstance(event, af.RunDone) for event in received) == 1
    assert sum(isinstance(event, af.VariableDone) for event in received) == 8


async def test_a_stream_sends_no_awaits():
    observed = Observed(af.Scripted(echo))
    async with af.session(backend=observed) as flow:
        await events_of(flow.stream(tree, "ab"))
    assert observed.of(ops.Await) == []


# Where an event comes from.

TREES = st.recursive(st.just([]), lambda children: st.lists(children, max_size=3), max_leaves=12)
"""A fork tree as nested lists: each state has as many forks as its list is long."""


def paths_of(shape: list, path: tuple[int, ...] = ()) -> dict[tuple[int, ...], str]:
    """The reference: each state's path, and its text, which a gen there repeats."""
    found = {path: "".join(f"/{index}" for index in path)}
    for index, child in enumerate(shape):
        found |= paths_of(child, (*path, index))
    return found


@given(shape=TREES, coupled=st.booleans(), at_once=st.booleans())
async def test_every_event_carries_the_path_of_its_branch(shape, coupled, at_once):
    async def grow(s: af.State, shape: list) -> None:
        groups = [shape] if at_once else [[child] for child in shape]  # paths go on from fork to fork
        for group in filter(None, groups):
            branches = s.fork(len(group))
            if coupled:
                async with branches:
                    await plant(branches, group)
            else:
                await plant(branches, group)
        s += af.gen("x")

    async def plant(branches: list[af.State], group: list) -> None:
        for branch, child in zip(branches, group, strict=True):
            branch += f"/{branch.path[-1]}"
            await grow(branch, child)

    async with af.session(backend=af.Scripted(lambda prompt: f"I am {prompt}")) as flow:
        *events, last = await events_of(flow.stream(grow, shape))
    assert isinstance(last, af.RunDone)
    received: dict[tuple[int, ...], str] = {}
    for event in events:
        if isinstance(event, af.TextDelta):
            received[event.path] = received.get(event.path, "") + event.text
    done = {event.path: event.value for event in events if isinstance(event, af.VariableDone)}
    assert done == received == {path: f"I am {says}" for path, says in paths_of(shape).items()}


async def test_events_of_a_nested_program_have_the_paths_of_its_state():
    @af.program
    async def inner(s: af.State) -> None:
        for branch in s.fork(2):
            branch += af.gen("leaf")

    @af.program
    async def outer(s: af.State) -> None:
        for branch in s.fork(2):
            await inner(branch)
        await inner(s)

    async with af.session(backend=af.Scripted(echo)) as flow:
        events = await events_of(flow.stream(outer))
    done = [event.path for event in events if isinstance(event, af.VariableDone)]
    assert sorted(done) == [(0, 0), (0, 1), (1, 0), (1, 1), (2,), (3,)]


async def test_a_dropped_stream_ends_its_program():
    backend = Stepped({"": "one two"})
    log: list[str] = []
    async with af.session(backend=backend) as flow:
        stream = flow.stream(endless, log)
        await backend.allow(1)
        await anext(stream)
        del stream
        gc.collect()
        await settle()
        assert log == ["ended"]
        assert_idle(backend)  # before the session ends


@pytest.mark.parametrize("is_cancelled", [False, True])
async def test_the_failure_of_a_dropped_stream_is_logged(caplog, is_cancelled):
    @af.program
    async def failing(s: af.State) -> None:
        s += "a" + af.gen("x")
        await s["x"]
        try:
            if is_cancelled:
                await anyio.sleep_forever()
        finally:
            raise ValueError("lost without this")

    async with af.session(backend=af.Scripted(lambda _: "word")) as flow:
        stream = flow.stream(failing)
        await anext(stream)
        await settle()
        del stream
        gc.collect()
        await settle()
    assert "lost without this" in caplog.text


async def test_f37_a_failure_of_an_open_session_is_logged_though_the_stream_is_dropped_later(caplog):
    async with af.session(backend=af.Scripted(lambda _: af.errors.EngineFailed("lost without this"))) as flow:
        stream = flow.stream(tree, "a")
        await stream._work.ended.wait()
    del stream
    gc.collect()
    await settle()
    assert "lost without this" in caplog.text
