"""Maps: any inputs, results in their order, a bounded number of runs at a time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import anyio
import anyio.from_thread
import anyio.lowlevel
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.fake_engine import TOKENIZER, FakeEngine
from support.faults import has_param
from support.observed_backends import Observed, Stepped, settle
from support.programs import agen, ask, echo

import agentflow as af
from agentflow.engine.simulator.fake_runner import FakeRunner
from agentflow.language.batch.map import READ_AHEAD
from agentflow.protocol import ops

pytestmark = pytest.mark.anyio


class Crowd:
    """A program that notes how many of its runs overlap, and how many inputs were read before each end."""

    def __init__(self) -> None:
        self.num_running = self.max_running = self.num_read = self.num_taken = self.max_ahead = 0

    async def __call__(self, s: af.State, num_turns: int) -> int:
        self.num_running += 1
        self.max_running = max(self.max_running, self.num_running)
        try:
            for _ in range(num_turns):
                await anyio.lowlevel.checkpoint()
        finally:
            self.num_running -= 1
        return num_turns

    def inputs(self, turns: list[int]) -> Iterator[int]:
        for num_turns in turns:
            self.num_read += 1
            self.max_ahead = max(self.max_ahead, self.num_read - self.num_taken)
            yield num_turns


# Inputs and results.


@pytest.mark.parametrize(
    "make",
    [list, tuple, iter, lambda items: (item for item in items), agen],
    ids=["list", "tuple", "iterator", "generator", "async generator"],
)
async def test_results_come_in_the_order_of_any_inputs(make):
    async with af.session(backend=af.Scripted(echo)) as flow:
        results = [result async for result in flow.map(ask, make(["a", "b", "c"]))]
        assert results == await flow.map(ask, make(["a", "b", "c"]), concurrency=1) == ["<a>", "<b>", "<c>"]


async def test_a_map_over_nothing(flow):
    assert await flow.map(ask, []) == []
    assert await flow.map(ask, agen([])) == []
    assert [result async for result in flow.map(ask, iter(()))] == []


class Named(NamedTuple):
    question: str
    mark: str


async def test_tuples_and_dicts_are_spread_over_the_arguments(flow):
    async def show(s: af.State, *args: object, **kwargs: object) -> tuple:
        return args, kwargs

    inputs = [("a", 1), {"b": 2}, ({"b": 2},), (("a", 1),), (), Named("a", "?"), ["a", 1], None]
    assert await flow.map(show, inputs) == [
        (("a", 1), {}),
        ((), {"b": 2}),
        (({"b": 2},), {}),
        ((("a", 1),), {}),
        ((), {}),
        ((Named("a", "?"),), {}),
        ((["a", 1],), {}),
        ((None,), {}),
    ]
    assert await flow.map(ask, [{"question": "a", "mark": "?"}, ("b",)]) == ["<a?>", "<b>"]


@pytest.mark.on_trio
async def test_awaiting_a_map_gives_the_remaining_results(flow):
    async with flow.map(ask, ["a", "b", "c", "d"], concurrency=1) as results:
        assert await anext(results) == "<a>"
        assert await results == ["<b>", "<c>", "<d>"]
        assert [result async for result in results] == []


@pytest.mark.on_trio
async def test_several_tasks_may_share_one_map(flow):
    results = flow.map(ask, (str(i) for i in range(50)), concurrency=3)
    received: list[str] = []

    async def read() -> None:
        async for result in results:
            received.append(result)

    async with anyio.create_task_group() as group:
        for _ in range(4):
            group.start_soon(read)
    assert received == [f"<{i}>" for i in range(50)]


async def test_maps_within_a_map(flow):
    async def outer(s: af.State, letters: str) -> list[str]:
        return await flow.map(ask, list(letters), concurrency=2)

    assert await flow.map(outer, ["ab", "", "cde"]) == [["<a>", "<b>"], [], ["<c>", "<d>", "<e>"]]


@pytest.mark.on_trio
async def test_nothing_runs_before_the_map_is_entered(flow):
    num_read = 0

    def inputs() -> Iterator[str]:
        nonlocal num_read
        num_read += 1
        yield "a"

    results = flow.map(ask, inputs())
    await settle()
    assert num_read == 0
    async with results:
        await settle()
        assert num_read == 1
    with pytest.raises(af.Cancelled, match="left or cancelled"):
        await results
    unused = flow.map(ask, inputs())
    await unused.aclose()
    with pytest.raises(af.Cancelled):
        await anext(unused)
    assert num_read == 1


# The number of concurrent runs.


@pytest.mark.on_trio
@given(
    turns=st.lists(st.integers(0, 6), max_size=40),
    concurrency=st.integers(1, 5),
    takes_slowly=st.booleans(),
)
async def test_no_more_run_and_are_read_ahead_than_allowed(turns, concurrency, takes_slowly):
    crowd = Crowd()
    async with af.session(backend=af.Scripted(echo)) as flow:
        results = []
        async for result in flow.map(crowd, crowd.inputs(turns), concurrency=concurrency):
            results.append(result)
            crowd.num_taken += 1
            if takes_slowly:
                await settle()
    assert results == turns
    assert crowd.max_running <= concurrency
    assert crowd.max_ahead <= READ_AHEAD * concurrency


@pytest.mark.on_trio
async def test_the_concurrency_is_used_fully(flow):
    crowd = Crowd()
    await flow.map(crowd, [20] * 20, concurrency=7)
    assert crowd.max_running == 7
    async with flow.map(crowd, crowd.inputs([0] * 100), concurrency=7):
        await settle()
        assert crowd.num_read == READ_AHEAD * 7  # and no more, while no result is taken


@pytest.mark.parametrize(("batch_size", "expected"), [(3, 3), (100, 64), (None, 64)])
async def test_f17a_by_default_as_many_run_at_once_as_the_backend_batches(batch_size, expected) -> None:
    backend = af.Scripted(echo)
    known = backend.generator.capabilities
    backend.generator.capabilities = msgspec.structs.replace(known, batch_size=batch_size)
    crowd = Crowd()
    async with af.session(backend=backend) as flow:
        await flow.map(crowd, crowd.inputs([150] * 70))
    assert crowd.max_running == expected


async def test_f17c_programs_that_have_begun_go_before_others_in_an_engine() -> None:
    """For any concurrency of a map. In turn, all of them would end at the end of the map."""
    num_inputs, num_gens = 32, 4
    ended: list[str] = []

    @af.program
    async def in_steps(s: af.State, number: int) -> None:
        for step in range(num_gens):
            s += f"{number} " + af.gen(f"x{step}", max_tokens=4)
            await s[f"x{step}"]
            ended.append("gen")
        ended.append("run")

    token = anyio.lowlevel.current_token()

    def let_programs_run(_: object) -> None:
        anyio.from_thread.run(settle, token=token)

    runner = FakeRunner(vocab_size=TOKENIZER.vocab_size, max_context=1024, on_step=let_programs_run)
    async with af.session(backend=FakeEngine(runner=runner, max_running=4, token_budget=64)) as flow:
        await flow.map(in_steps, range(num_inputs), concurrency=num_inputs)
    assert ended[: len(ended) // 2].count("run") > num_inputs // 3


@pytest.mark.on_trio
async def test_a_slow_first_run_does_not_block_later_ones():
    backend = Stepped({"slow": "word", "": ""})
    async with af.session(backend=backend) as flow, anyio.create_task_group() as group:
        ended = []

        async def quick(s: af.State, question: str) -> None:
            if question == "slow":
                await ask(s, question)
            ended.append(question)

        async def collect() -> None:
            assert await flow.map(quick, ["slow", *"abcdefghijkl"], concurrency=2) == [None] * 13

        group.start_soon(collect)
        await settle()
        assert ended == list("abcdefghijkl")
        await backend.allow(1)
    assert ended[-1] == "slow"


@pytest.mark.on_trio
async def test_reading_inputs_yields_to_the_event_loop(flow):
    turns = 0
    seen = []

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await anyio.lowlevel.checkpoint()

    async def nothing(s: af.State, i: int) -> None:
        seen.append(turns)

    async with anyio.create_task_group() as group:
        group.start_soon(count)
        await flow.map(nothing, range(300), concurrency=300)
        group.cancel_scope.cancel()
    assert len(set(seen)) > 100


# Seeds, tables, arguments.


async def test_the_seeds_of_a_map_do_not_depend_on_its_concurrency():
    async def seeds(concurrency: int) -> dict[str, int]:
        observed = Observed(af.Scripted(echo))
        async with af.session(backend=observed, seed=7) as flow:
            await flow.map(ask, map(str, range(20)), concurrency=concurrency)
        texts = {op.state: op.parts[0] for op in observed.of(ops.Text)}
        return {texts[op.state]: op.params.seed for op in observed.of(ops.Gen)}

    one, many = await seeds(1), await seeds(20)
    assert one == many
    assert len(set(one.values())) == 20


async def test_a_map_is_refused_outside_its_session():
    flow = af.session(backend=af.Scripted(echo))
    with pytest.raises(af.errors.StateClosed, match="was not opened"):
        flow.map(ask, [])
    async with flow:
        late = flow.map(ask, ["a"])
    with pytest.raises(af.errors.StateClosed):
        await late


@pytest.mark.parametrize(
    "options",
    [
        {"concurrency": 0},
        {"concurrency": True},
        {"concurrency": 2.0},
        {"on_error": "x"},
        {"program": "ask"},
        {"inputs": "abc"},
        {"inputs": b"abc"},
        {"inputs": {"question": "a"}},
        {"inputs": 5},
    ],
)
async def test_invalid_arguments_are_rejected(flow, options):
    with pytest.raises(af.errors.BadArgument, check=has_param(next(iter(options)))):
        flow.map(**{"program": ask, "inputs": ["a"]} | options)
