"""Graphs mapped over inputs and streamed: the same results as the program gives."""

from __future__ import annotations

import pickle
from collections import Counter, OrderedDict, deque
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, NamedTuple

import msgspec
import pytest
from pydantic import BaseModel
from support.fake_engine import FakeEngine
from support.observed_backends import Observed, assert_idle

import agentflow as af
from agentflow.engine.request import Submit
from agentflow.protocol import ops

pytestmark = [pytest.mark.anyio, pytest.mark.on_trio]


@af.program
async def ask(s: af.State, topic: str, tone: str) -> list[str]:
    s += f"{topic} in a {tone} tone: " + af.gen("first")
    async with s.fork(2) as branches:
        for number, branch in enumerate(branches):
            branch += f"branch {number}: " + af.gen("inner", temperature=1.0)
    s += branches[0]["inner"] + af.gen("last")
    return [await s["first"], await branches[1]["inner"], await s["last"]]


@af.program
async def quiet(s: af.State, topic: str) -> None:
    s += topic + af.gen("first")


def answer(prompt: str) -> str:
    return f"<{len(prompt)} {prompt[:3]}>"


async def test_a_mapped_graph_gives_what_the_program_gives() -> None:
    inputs = [("tea", "dry"), {"tone": "warm", "topic": "rain"}, ("ink", "flat")]
    backend = Observed(af.Scripted(answer))
    async with af.session(backend=backend, seed=1) as flow:
        graph = ask.trace()
        results = await flow.map(graph, inputs)
        assert [op.ops[0].objective for op in backend.of(ops.SubmitGraph)] == ["throughput"] * 3
    async with af.session(backend=af.Scripted(answer), seed=1) as flow:
        assert results == await flow.map(ask, inputs)


@pytest.mark.parametrize("bad", [("tea",), ("a", "b", "c"), {"topic": "a"}, {"topic": "a", "tone": 5}])
async def test_invalid_arguments_fail_only_their_input(bad) -> None:
    async with af.session(backend=af.Scripted(answer)) as flow:
        found = await flow.map(ask.trace(), [bad, ("tea", "dry")], on_error="return")
        assert isinstance(found[0], af.errors.BadArgument)
        assert isinstance(found[1], list)


async def test_a_streamed_graph_has_the_values_of_the_program_and_its_result() -> None:
    async def events_of(stream: af.ProgramStream) -> tuple[set, set, object]:
        texts: dict[tuple, str] = {}
        done = set()
        result: object = None
        async for event in stream:
            if isinstance(event, af.TextDelta):
                texts[event.path, event.name] = texts.get((event.path, event.name), "") + event.text
            elif isinstance(event, af.VariableDone):
                done.add((event.path, event.name, event.value))
            else:
                result = event.result
        return {(path, name, text) for (path, name), text in texts.items()}, done, result

    async with af.session(backend=af.Scripted(answer), seed=1) as flow:
        of_graph = await events_of(flow.stream(ask.trace(), "tea", tone="dry"))
        of_program = await events_of(flow.stream(ask, "tea", "dry"))
    assert of_graph == of_program
    assert {path for path, _, _ in of_graph[1]} == {(), (0,), (1,)}


FORMS: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
    (("tea", "dry"), {}),
    (("tea",), {"tone": "dry"}),
    ((), {"topic": "tea", "tone": "dry"}),
    (({"topic": "tea", "tone": "dry"},), {}),
]


@pytest.mark.parametrize(("args", "kwargs"), FORMS)
async def test_f47a_submit_and_stream_take_the_same_arguments(args, kwargs) -> None:
    async with af.session(backend=af.Scripted(answer), seed=1) as flow:
        wanted = await flow.run(ask, "tea", "dry")
        assert await flow.submit(ask.trace(), *args, **kwargs) == wanted
        [*_, last] = [event async for event in flow.stream(ask.trace(), *args, **kwargs)]
        assert last.result == wanted


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        (({"topic": "tea", "tone": "dry"},), {"tone": "dry"}),
        (({"topic": "tea"}, "dry"), {}),
        (("tea", "dry", "long"), {}),
        (({"topic": "tea"},), {}),
        ((), {"inputs": {"topic": "tea", "tone": "dry"}}),
    ],
)
async def test_f47b_wrong_arguments_of_a_graph_are_rejected_by_both(args, kwargs) -> None:
    async with af.session(backend=af.Scripted(answer)) as flow:
        with pytest.raises(af.errors.BadArgument):
            await flow.submit(ask.trace(), *args, **kwargs)
        with pytest.raises(af.errors.BadArgument):
            flow.stream(ask.trace(), *args, **kwargs)


async def test_leaving_a_streamed_graph_cancels_it() -> None:
    backend = af.Scripted(answer)
    async with af.session(backend=backend) as flow, flow.stream(ask.trace(), "tea", "dry") as events:
        async for _ in events:
            break
    assert_idle(backend)


async def test_a_graph_without_a_result_runs_to_its_end() -> None:
    async with af.session(backend=af.Scripted(answer)) as flow:
        assert await flow.submit(quiet.trace(), {"topic": "tea"}) is None
        assert (await flow.stats()).generated_tokens > 0


class Origins:
    """Where the requests of an engine come from."""

    def __init__(self) -> None:
        self.task_groups: list[object] = []

    def sent(self, submit: Submit) -> None:
        if submit.params is not None:
            self.task_groups.append(submit.origin.task_group)

    def received(self, messages: object) -> None:
        pass


PREFIX = "It is the same in every run of the graph. " * 12


@af.program
async def judged(s: af.State, subject: str) -> list[str]:
    s += PREFIX + subject
    async with s.fork(3) as branches:
        for branch in branches:
            branch += "?" + af.gen("x", max_tokens=2, ignore_eos=True)
    return [await branch["x"] for branch in branches]


async def test_a_constant_prefix_is_computed_once_for_graphs_that_run_side_by_side() -> None:
    subjects = ["plants", "stones", "clouds", "rivers"]
    engine = FakeEngine(token_budget=64)
    async with af.session(backend=engine) as flow:
        await flow.map(judged.trace(), subjects)
        computed = (await flow.stats()).computed_tokens
        async with flow.state() as s:
            s += PREFIX
            alone = len(await s.token_ids())
    assert alone > 100
    # Each subject once, each branch its end and the first of its two tokens.
    assert alone < computed <= alone + sum(map(len, subjects)) + len(subjects) * 3 * 2


async def test_the_branches_of_a_graphs_fork_are_one_task_group_to_the_scheduler() -> None:
    engine, origins = FakeEngine(), Origins()
    async with af.session(backend=engine) as flow:
        assert engine.client is not None
        engine.client.observe(origins)
        await flow.map(judged.trace(), ["plants", "stones"])
    assert len(origins.task_groups) == 6
    assert sorted(Counter(origins.task_groups).values()) == [3, 3]
    assert 0 not in origins.task_groups


class Named(NamedTuple):
    text: str
    topic: str = ""


@dataclass(frozen=True, slots=True)
class Frozen:
    text: str
    inner: Any = None


@dataclass
class Counted:
    text: str
    length: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self.length += 1  # not again for the values


class Struct(msgspec.Struct, frozen=True):
    text: str
    others: list[Any] = []


class Model(BaseModel, extra="allow"):
    text: str
    other: Any = None


SHAPES: dict[str, Any] = {
    "a text with a value": lambda s, v, q, n: f"Answer: {v}!",
    "a text with an argument": lambda s, v, q, n: f"<{q}>",
    "a text with a variable": lambda s, v, q, n: f"{s['x']} {s['x'].upper()}",
    "a text with a number": lambda s, v, q, n: f"{n} points",
    "a sum": lambda s, v, q, n: "A: " + v + f" ({q}) " + q,
    "a text with a sum": lambda s, v, q, n: f"<{'A: ' + v}{q + q}>",
    "a changed value": lambda s, v, q, n: [v.strip(), f"{v.strip().upper()}", "A: " + v.lower()],
    "a named tuple": lambda s, v, q, n: Named(v, f"on {q}"),
    "a frozen dataclass": lambda s, v, q, n: Frozen(v, [Frozen(q), {"n": n}]),
    "a dataclass": lambda s, v, q, n: Counted(v),
    "a struct": lambda s, v, q, n: Struct(v, [f"{q}", {"v": (v, n)}]),
    "a model": lambda s, v, q, n: Model(text=f"<{v}>", other=[v], more=q),
    "an ordered dict": lambda s, v, q, n: OrderedDict(b=v, a=q),
    "a key": lambda s, v, q, n: {f"<{v}>": 1, ("a", f"{q}"): 2},
    "a set": lambda s, v, q, n: {f"<{v}>", "constant"},
    "a frozen set": lambda s, v, q, n: frozenset([f"<{q}>"]),
    "constants": lambda s, v, q, n: [
        Named("a"),
        Counter("aab"),
        OrderedDict(b=1),
        deque([1]),
        Frozen("a"),
        {1},
    ],
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
async def test_f37_a_traced_program_returns_what_the_program_returns(shape) -> None:
    @af.program
    async def shaped(s: af.State, q: str) -> Any:
        s += q + af.gen("x") + af.gen("n", schema=int)
        return shape(s, await s["x"], q, await s["n"])

    async with af.session(backend=af.Scripted({"x": " Hello\n", "n": "12"})) as flow:
        wanted = await flow.run(shaped, "the topic")
        graph = shaped.trace()
        for traced in (graph, graph.optimised(), pickle.loads(pickle.dumps(shaped.trace("the topic")))):
            found = await flow.submit(traced, *["the topic"][: len(traced.parameters)])
            assert type(found) is type(wanted)
            assert found == wanted


@pytest.mark.parametrize(
    "text",
    [
        lambda v, q: v,
        lambda v, q: q,
        lambda v, q: f"<{q}>",
        lambda v, q: f"{v} and {q}",
        lambda v, q: "A: " + v,
        lambda v, q: v.strip(),
        lambda v, q: "A: " + v.upper() + f" and {q}" + q,
    ],
)
async def test_f37_values_and_arguments_are_set(text) -> None:
    @af.program
    async def sets(s: af.State, q: str) -> list[str]:
        s += q + af.gen("x")
        note = s.set("note", text(await s["x"], q))
        s += note + af.gen("y")
        return [await note, await s["y"]]

    async with af.session(backend=af.Scripted(answer)) as flow:
        wanted = await flow.run(sets, " the topic ")
        assert await flow.submit(sets.trace(), " the topic ") == wanted


async def test_f37_a_vote_over_values_is_refused_in_a_trace() -> None:
    """The majority of three branches was the first of them."""

    @af.program
    async def vote(s: af.State) -> str:
        async with s.fork(3) as branches:
            for branch in branches:
                branch += af.gen("x")
        answers = [await branch["x"] for branch in branches]
        return Counter(answers).most_common(1)[0][0]

    with pytest.raises(af.errors.DataDependent, match="hashed"):
        vote.trace()


class Plain:
    def __init__(self, text: str) -> None:
        self.text = text


@pytest.mark.parametrize(
    "refused",
    [
        lambda v, q: Plain(v),
        lambda v, q: [SimpleNamespace(text=f"<{q}>")],
        lambda v, q: deque([v]),
        lambda v, q: ValueError(v),
        lambda v, q: {Frozen(f"<{v}>")},
        lambda v, q: f"{v} and {q}"[3:],
        lambda v, q: f"{v}".upper(),
        lambda v, q: f"{[v]}",
    ],
)
async def test_f37_a_value_where_no_graph_can_put_it_is_refused(refused) -> None:
    @af.program
    async def shaped(s: af.State, q: str) -> Any:
        s += q + af.gen("x")
        return refused(await s["x"], q)

    with pytest.raises(af.errors.DataDependent, match="shaped returns"):
        shaped.trace()


@pytest.mark.parametrize(
    "refused", [lambda s: "A: " + s["x"] + af.gen("y"), lambda s: [s["x"]], lambda s: f"{af.gen('y')}"]
)
async def test_f37_a_program_that_returns_what_is_no_value_is_refused(refused) -> None:
    @af.program
    async def shaped(s: af.State) -> Any:
        s += af.gen("x")
        return refused(s)

    with pytest.raises(af.errors.BadArgument, match="shaped returns"):
        shaped.trace()


async def test_f37_an_image_that_a_trace_does_not_have_is_not_returned() -> None:
    @af.program
    async def shaped(s: af.State, picture: af.Image) -> Any:
        return [picture]

    with pytest.raises(af.errors.DataDependent, match="picture"):
        shaped.trace()
