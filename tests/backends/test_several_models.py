"""Several models in one session: in one interpreter, on a server, and on separate backends."""

from __future__ import annotations

import gc
import zlib
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

import anyio
import msgspec
import pytest
from anyio.from_thread import start_blocking_portal
from hypothesis import given
from hypothesis import strategies as st
from support.faults import has_param
from support.observed_backends import Stepped, settle
from support.programs import words
from support.session_peer import HANG, HangingGenerator, gen
from support.session_peer import opened as opened_by

import agentflow as af
from agentflow.backends.local import interpreted
from agentflow.backends.scripted_generator import ScriptedGenerator
from agentflow.backends.several import Several
from agentflow.errors import (
    BudgetExceeded,
    DeadlineExceeded,
    EngineFailed,
    FrameTooLarge,
    NotSupported,
    RunFailed,
    ServerLost,
    UnknownModel,
)
from agentflow.protocol import ops
from agentflow.protocol.backend import Backend, Connection, Deliver, Lost
from agentflow.protocol.events import ErrorInfo, StateFailed
from agentflow.protocol.op_table import declared, numbers, opened
from agentflow.server.config.limits import ServerLimits
from agentflow.server.models.models import Models, OneGenerator
from agentflow.server.serve import running_server

pytestmark = pytest.mark.anyio

NAMES = ("small", "large")


def answer(model: str, prompt: str) -> str | Exception:
    """A model's text depends on the prompt alone."""
    if "fail" in prompt.rsplit("<user>", 1)[-1]:
        return EngineFailed(f"{model} failed")
    if HANG in prompt.rsplit("<user>", 1)[-1]:
        return HANG
    return f"{model} {zlib.crc32(prompt.encode()) % 1000}"


def generator_of(model: str, **capabilities: Any) -> ScriptedGenerator:
    generator = HangingGenerator(lambda call: answer(model, str(call)))
    changed = msgspec.structs.replace(generator.capabilities, model=model, **capabilities)
    generator.capabilities = changed
    return generator


class LosableBackend:
    """A backend on one generator, which a test can lose."""

    def __init__(self, generator: ScriptedGenerator) -> None:
        self.generator = generator
        self.lost: Lost | None = None

    @asynccontextmanager
    async def connect(self, deliver: Deliver, lost: Lost) -> AsyncIterator[Connection]:
        self.lost = lost
        async with interpreted(self.generator, deliver) as connection:
            yield connection


class OneInterpreter:
    """One interpreter for all models."""

    @asynccontextmanager
    async def connect(self, deliver: Deliver, lost: Lost) -> AsyncIterator[Connection]:
        small, large = map(generator_of, NAMES)
        async with interpreted(small, deliver, models={"large": large}) as connection:
            yield connection


@asynccontextmanager
async def several() -> AsyncIterator[af.Session]:
    models: dict[str, Backend] = {name: LosableBackend(generator_of(name)) for name in NAMES}
    async with af.session(models=models, seed=1) as flow:
        yield flow
    for backend in models.values():
        assert backend.generator.num_open == backend.generator.num_running == 0


@asynccontextmanager
async def in_one_interpreter() -> AsyncIterator[af.Session]:
    async with af.session(backend=OneInterpreter(), seed=1) as flow:
        yield flow


@asynccontextmanager
async def open_models() -> AsyncIterator[Models]:
    yield Models([OneGenerator(generator_of(name)) for name in NAMES])


@pytest.fixture(scope="module")
def server_url() -> Iterator[str]:
    """A server with all models."""
    with start_blocking_portal("asyncio") as portal:
        running = portal.call(lambda: running_server(open_models))
        with portal.wrap_async_context_manager(running) as server:
            yield server.url


@pytest.fixture(params=["several", "one interpreter", "server"])
async def flow(request: pytest.FixtureRequest, server_url: str) -> AsyncIterator[af.Session]:
    opening = {
        "several": several,
        "one interpreter": in_one_interpreter,
        "server": lambda: af.session(server_url, seed=1),
    }
    async with opening[request.param]() as opened:
        yield opened


def said(model: str, prompt: str) -> str:
    text = answer(model, prompt)
    assert isinstance(text, str)
    return text


async def test_the_models_of_a_session_have_names_and_the_first_is_the_default(flow: af.Session) -> None:
    assert {name: one.model for name, one in flow.models.items()} == {"small": "small", "large": "large"}
    assert flow.capabilities.model == next(iter(flow.models)) == "small"


async def test_a_state_runs_on_the_model_that_it_names(flow: af.Session) -> None:
    prompt = "<user>Hello</user><assistant>"
    for model in (None, *NAMES):
        async with flow.state(model=model) as s:
            s += af.user("Hello") + af.gen("x")
            assert await s["x"] == said(model or "small", prompt)


@pytest.mark.parametrize("is_awaited", [False, True], ids=["wired", "awaited"])
async def test_a_variable_is_wired_to_a_state_on_another_model(flow: af.Session, is_awaited: bool) -> None:
    async with flow.state() as draft, flow.state(model="large") as judge:
        draft += af.user("Write.") + af.gen("text")
        if is_awaited:
            await draft["text"]
        text = draft["text"]
        judge += af.user(f"Judge {text}.") + af.user("Also ", text.upper()) + af.gen("verdict")
        written = said("small", "<user>Write.</user><assistant>")
        prompt = f"<user>Judge {written}.</user><user>Also {written.upper()}</user><assistant>"
        assert await judge["verdict"] == said("large", prompt)


async def test_a_fork_onto_another_model_continues_with_the_same_content(flow: af.Session) -> None:
    async with flow.state() as s:
        s += af.system("Be brief.") + af.user("Write.")
        s += af.assistant("So: ", af.gen("text"))
        s.set("note", "kept")
        branches = s.fork(2, model="large")
        again = s.copy(model="small")
        for branch in (*branches, again):
            branch += af.user("Judge it.") + af.gen("verdict")
        text = said("small", "<system>Be brief.</system><user>Write.</user><assistant>So: ")
        before = f"<system>Be brief.</system><user>Write.</user><assistant>So: {text}</assistant>"
        prompt = before + "<user>Judge it.</user><assistant>"
        assert await branches.gather("verdict") == [said("large", prompt)] * 2
        assert await again["verdict"] == said("small", prompt)
        assert await branches[0]["text"] == text
        assert await branches[1].text() == prompt + said("large", prompt) + "</assistant>"
        assert (await branches[0].messages())[:3] == (await s.messages())


async def test_a_fork_in_an_open_turn_continues_the_turn_on_another_model(flow: af.Session) -> None:
    async with flow.state() as s, s.user():
        s += "Once"
        branch = s.copy(model="large")
        branch += " more"
        branch.end()
        branch += af.gen("x")
        assert await branch["x"] == said("large", "<user>Once more</user><assistant>")


@pytest.mark.parametrize("use", ["state", "fork", "copy"])
async def test_a_model_that_the_session_does_not_have_is_refused_in_the_program(
    flow: af.Session, use: str
) -> None:
    async with flow.state() as s:
        with pytest.raises(UnknownModel) as raised:
            {
                "state": lambda: flow.state(model="huge"),
                "fork": lambda: s.fork(2, model="huge"),
                "copy": lambda: s.copy(model="huge"),
            }[use]()
        assert raised.value.param == "model"
        s += af.user("Hello") + af.gen("x")  # nothing was sent
        assert await s["x"] == said("small", "<user>Hello</user><assistant>")


async def test_a_conversation_with_tool_calls_stays_on_its_model(flow: af.Session) -> None:
    @af.tool
    def look() -> str:
        """Looks."""
        return "nothing"

    async with flow.state() as s:
        s += af.conversation([{"role": "user", "content": "Look."}]) + af.reply("said", tools=[look])
        await s["said"]
        with pytest.raises(NotSupported):
            s.fork(2, model="large")


async def test_content_that_is_gone_is_missed_before_the_fork(flow: af.Session) -> None:
    source = flow.state()
    source += af.user(HANG) + af.gen("x")
    async with flow.state() as s:
        s += af.user("Read ", source["x"])
        source.close()
        with pytest.raises(af.AgentflowError):
            s.fork(2, model="large")
        assert s._node.children == []


async def test_a_failed_prefix_fails_the_branches_on_another_model(flow: af.Session) -> None:
    async with flow.state() as s:
        s += af.user("fail") + af.gen("x")
        branch = s.copy(model="large")
        branch += af.user("Go on.") + af.gen("y")
        with pytest.raises((RunFailed, EngineFailed)):
            await branch["y"]
        with pytest.raises(EngineFailed):
            await s["x"]


async def test_a_failed_source_fails_its_reader_on_another_model(flow: af.Session) -> None:
    async with flow.state() as s, flow.state(model="large") as reader:
        s += af.user("fail") + af.gen("x")
        reader += af.user("Read ", s["x"]) + af.gen("y")
        with pytest.raises(RunFailed) as raised:
            await reader["y"]
        assert isinstance(raised.value.__cause__, EngineFailed)
        with pytest.raises(EngineFailed):
            await s["x"]


async def test_cancelling_a_state_cancels_its_forks_on_other_models(flow: af.Session) -> None:
    async with flow.state() as s:
        s += af.user("Hello") + af.gen("x")
        branch = s.copy(model="large").copy().copy(model="small")
        branch += af.user(HANG) + af.gen("y")
        await s["x"]
        s.cancel()
        with pytest.raises(af.Cancelled):
            await branch["y"]


async def test_a_task_group_on_several_models_fails_as_one(flow: af.Session) -> None:
    async with flow.state() as s:
        s += af.user("Hello") + af.gen("x")
        async with s.fork(2, model="large") as branches:
            branches[0] += af.user(HANG) + af.gen("y")
            branches[1] += af.user("fail") + af.gen("y")
        with pytest.raises(EngineFailed):
            await branches
        await s.settled()
        with pytest.raises(RunFailed):
            await s
        with pytest.raises(af.Cancelled):
            await branches[0]["y"]


async def test_a_branch_that_has_failed_fails_its_task_group(flow: af.Session) -> None:
    async with flow.state() as s:
        s += af.user("Hello")
        branches = s.fork(2, model="large")
        branches[0] += af.user(HANG) + af.gen("y")
        branches[1] += af.user("fail") + af.gen("y")
        with pytest.raises(EngineFailed):
            await branches[1]["y"]
        async with branches:
            pass
        with pytest.raises(af.Cancelled):
            await branches[0]["y"]
        with pytest.raises(RunFailed):
            await s


async def test_a_failed_task_group_fails_the_group_around_it(flow: af.Session) -> None:
    async with flow.state() as s:
        s += af.user("Hello")
        async with s.fork(2, model="large") as outer:
            async with outer[0].fork(2, model="small") as inner:
                inner[0] += af.user("fail") + af.gen("y")
                inner[1] += af.user(HANG) + af.gen("y")
            outer[1] += af.user(HANG) + af.gen("y")
        for branch in (inner[1], outer[1]):
            with pytest.raises(af.Cancelled):
                await branch["y"]
        for state in (outer[0], s):
            with pytest.raises(RunFailed):
                await state


async def test_the_cause_of_a_failed_task_group_has_the_place_of_its_op(flow: af.Session) -> None:
    async with flow.state() as s:
        s += af.user("Hello")
        async with s.fork(2, model="large") as branches:
            branches[1] += af.user("fail")
            branches[1] += af.gen("y")
        with pytest.raises(EngineFailed) as failed:
            await branches[1]["y"]
        with pytest.raises(RunFailed) as raised:
            await s
        cause = raised.value.__cause__
        assert isinstance(cause, EngineFailed)
        assert cause.place == failed.value.place is not None


async def test_f37_an_error_with_many_causes_fails_only_its_state() -> None:
    """A hostile server can nest more causes than Python's stack has frames left."""
    deliveries: list[Deliver] = []

    class Hostile(LosableBackend):
        def connect(self, deliver: Deliver, lost: Lost) -> Any:
            deliveries.append(deliver)
            return super().connect(deliver, lost)

    error = ErrorInfo(RunFailed.code, "the end")
    for level in range(2_000):
        error = ErrorInfo(EngineFailed.code, f"level {level}", error)
    backends = {name: Hostile(generator_of(name)) for name in NAMES}
    async with af.session(models=backends) as flow, flow.state() as s, flow.state() as other:
        deliveries[0]([StateFailed(s.id, error)])
        with pytest.raises(EngineFailed, match="level 1999"):
            await s
        other += af.gen("said")
        await other["said"]


@pytest.mark.parametrize("when", ["before", "after"])
async def test_limits_hold_on_all_models(flow: af.Session, when: str) -> None:
    async with flow.state() as s:
        if when == "before":
            s.limit(deadline_s=0)
        branch = s.copy(model="large")
        if when == "after":
            s.limit(deadline_s=0)
        branch += af.user("Hello") + af.gen("x")
        with pytest.raises(DeadlineExceeded):
            await branch["x"]


async def test_the_tokens_of_a_limit_are_shared_by_all_models(flow: af.Session) -> None:
    async with flow.state() as s:
        s.limit(output_tokens=4)  # each answer has two words
        s += af.user("Hello") + af.gen("x")
        branch = s.copy(model="large")
        branch += af.user("Hello") + af.gen("x")
        await branch["x"]
        later = branch.copy(model="small")
        for state in (branch, later, s.copy()):
            state += af.user("Again") + af.gen("y")
            with pytest.raises(BudgetExceeded):
                await state["y"]


@pytest.mark.parametrize("is_of_session", [True, False])
async def test_f37_tokens_of_one_model_leave_fewer_to_states_of_another(
    flow: af.Session, is_of_session: bool
) -> None:
    async with flow.state() as s:
        branch = s.copy(model="large")
        limited = flow if is_of_session else s
        limited.limit(output_tokens=3)  # each answer has two words
        s += af.user("Hello") + af.gen("x")
        assert len((await s["x"]).split()) == 2
        branch += af.user("Hello") + af.gen("x")
        with pytest.raises(BudgetExceeded, check=has_param("output_tokens")):  # the rest is no limit
            await branch["x"]


async def test_f37_tokens_of_an_answer_that_is_cut_are_not_left_to_other_models(
    flow: af.Session,
) -> None:
    async with flow.state() as s, flow.state(model="large") as t:
        flow.limit(output_tokens=1)  # each answer has two words
        for state in (s, t):
            state += af.user("Hello") + af.gen("x")
            with pytest.raises(BudgetExceeded) as caught:
                await state["x"]
            assert len(state["x"].text.split()) == (1 if state is s else 0)
            assert (caught.value.usage is not None) == (state is s)


async def test_f37_a_failure_that_is_passed_on_is_charged_once() -> None:
    models = {"small": af.Scripted('{"a": 1, "b": 2}'), "large": af.Scripted(lambda call: "two words")}
    async with af.session(models=models) as flow, flow.state() as s, flow.state(model="large") as t:
        flow.limit(output_tokens=5)
        s.limit(output_tokens=1)
        s += af.user("Hello") + af.gen("x", schema=dict[str, int], on_invalid="retry")
        with pytest.raises(BudgetExceeded):
            await s["x"]
        for name in "xy":
            t += af.user("Hello") + af.gen(name)
        assert await t["y"] == "two words"


async def test_a_model_refuses_what_another_one_of_the_session_can() -> None:
    backends = {
        "able": LosableBackend(generator_of("able")),
        "plain": LosableBackend(generator_of("plain", sampling=("stop",))),
    }
    async with (
        af.session(models=backends) as flow,
        flow.state() as able,
        flow.state(model="plain") as plain,
    ):
        able += af.user("Hello") + af.gen("x", temperature=0.5)
        with pytest.raises(NotSupported) as raised:
            plain += af.user("Hello") + af.gen("x", temperature=0.5)
        assert raised.value.param == "temperature"
        plain += af.user("Hello") + af.gen("x", stop="z", seed=3)
        assert await plain["x"] == said("plain", "<user>Hello</user><assistant>")
        assert await able["x"] == said("able", "<user>Hello</user><assistant>")


async def test_a_model_without_seeds_gets_none() -> None:
    backend = LosableBackend(generator_of("plain", seeds=False))
    async with af.session(models={"plain": backend}) as flow, flow.state() as s:
        s += af.user("Hello") + af.gen("x")
        await s["x"]
        with pytest.raises(NotSupported) as raised:
            s += af.user("Hello") + af.gen("y", seed=3)
        assert raised.value.param == "seed"
    (call,) = backend.generator.calls.values()
    assert call.params.seed is None


async def test_a_backend_that_is_lost_takes_only_its_states_with_it() -> None:
    backends = {name: LosableBackend(generator_of(name)) for name in NAMES}
    async with (
        af.session(models=backends) as flow,
        flow.state() as small,
        flow.state(model="large") as large,
        flow.state() as reader,
    ):
        large += af.user(HANG) + af.gen("x")
        reader += af.user("Read ", large["x"]) + af.gen("y")
        await anyio.lowlevel.checkpoint()
        assert backends["large"].lost is not None
        backends["large"].lost(ServerLost("gone"))
        for variable in (large["x"],):
            with pytest.raises(ServerLost):
                await variable
        with pytest.raises(RunFailed):
            await reader["y"]
        with pytest.raises(ServerLost):
            large += af.user("Hello") + af.gen("y")
        with pytest.raises(ServerLost):
            flow.state(model="large")
        small += af.user("Hello") + af.gen("x")
        assert await small["x"] == said("small", "<user>Hello</user><assistant>")
        assert flow.is_alive


class SilentStats(ScriptedGenerator):
    """Never answers a request for counters."""

    async def stats(self) -> af.Stats:
        await anyio.sleep_forever()
        raise AssertionError


class SilentBackend(LosableBackend):
    def __init__(self) -> None:
        super().__init__(SilentStats(""))

    async def lose(self) -> None:
        assert self.lost is not None
        self.lost(ServerLost("gone"))


@pytest.mark.parametrize("when", ["before", "after"])
async def test_counters_of_a_backend_that_is_lost_are_an_error(when: str) -> None:
    lost, other = SilentBackend(), LosableBackend(generator_of("large"))
    async with (
        af.session(models={"small": lost, "large": other}) as flow,
        anyio.create_task_group() as tasks,
    ):
        if when == "before":
            await lost.lose()
        else:
            tasks.start_soon(lost.lose)
        with pytest.raises(ServerLost):
            await flow.stats()


async def test_counters_are_those_of_all_backends() -> None:
    async with several() as flow:
        for model in NAMES:
            s = flow.state(model=model)
            s += af.user("Hello") + af.gen("x")
            await s["x"]
            stats = await flow.stats()
        assert stats.generated_tokens == sum(run.usage.output_tokens for run in flow.runs)
        assert stats.prompt_tokens == sum(run.usage.prompt_tokens for run in flow.runs)


async def test_counters_of_another_backend_that_is_lost_are_left_out() -> None:
    default, lost = LosableBackend(generator_of("small")), SilentBackend()
    async with af.session(models={"small": default, "large": lost}) as flow:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(lost.lose)
            assert await flow.stats() == await default.generator.stats()
        assert await flow.stats() == await default.generator.stats()


async def test_nothing_of_a_graph_is_kept_after_its_end() -> None:
    @af.program
    def program(s: af.State) -> Any:
        s += af.user("Hello")
        branches = s.fork(3)
        for branch in branches:
            branch += af.user("Go on.") + af.gen("x")
        return branches[2]["x"]

    def num_kept() -> int:
        gc.collect()
        return sum(type(kept).__module__ == "agentflow.backends.several" for kept in gc.get_objects())

    backends = {name: LosableBackend(generator_of(name)) for name in NAMES}
    async with af.session(models=backends) as flow:
        graph = program.trace()
        await flow.submit(graph)
        num_before = num_kept()
        for _ in range(3):
            await flow.submit(graph)
        assert num_kept() == num_before


class Follower:
    """A connection of a server, which knows the states and variables that were sent to it since the server
    began."""

    is_connected = True
    has_room = True

    def __init__(self, connection: Connection) -> None:
        self.models = connection.models
        self.connection = connection
        self.sent: list[ops.Op] = []

    def send(self, sent: Sequence[ops.Op]) -> None:
        self.sent += sent
        self.connection.send(sent)

    def end(self, error: BaseException | None) -> None:
        self.connection.end(error)

    def unknown(self) -> list[ops.Op]:
        """The ops that name a state or a variable that the server does not know. It ignores their values."""
        known: set[int] = set()
        found: list[ops.Op] = []
        for op in self.sent:
            known |= {*opened(op), *[number for number, _ in declared(op)]}
            if not isinstance(op, ops.Provide | ops.Limit) and not known.issuperset(numbers(op)):
                found.append(op)
        return found


class FollowedBackend(LosableBackend):
    """A backend that records the ops that are sent."""

    follower: Follower

    @asynccontextmanager
    async def connect(self, deliver: Deliver, lost: Lost) -> AsyncIterator[Connection]:
        async with super().connect(deliver, lost) as connection:
            self.follower = Follower(connection)
            yield self.follower


async def test_f37_backends_learn_the_rest_of_a_limit_once_for_answers_that_come_together() -> None:
    large = FollowedBackend(generator_of("large"))
    backends = {"small": LosableBackend(generator_of("small")), "large": large}
    async with af.session(models=backends) as flow, flow.state() as s:
        s.limit(output_tokens=1_000)
        branches = [s.copy(model="large") for _ in range(40)]
        for branch in branches:
            branch += af.user("Hello") + af.gen("x")
        for branch in branches:
            await branch["x"]
        limits = [op for op in large.follower.sent if isinstance(op, ops.Limit)]
        assert min(op.output_tokens or 0 for op in limits) == 920  # each answer has two words
        assert len(limits) < 10 * len(branches)


async def test_a_server_that_has_begun_again_gets_nothing_of_before() -> None:
    backend = FollowedBackend(generator_of("large"))
    async with af.session(models={"small": LosableBackend(generator_of("small")), "large": backend}) as flow:
        flow.limit(output_tokens=6)
        async with flow.state() as s, flow.state(model="large") as before:
            before += af.user("Hello") + af.gen("x")
            text = await before["x"]
            await s.copy(model="large")
            assert backend.follower.unknown() == []
            assert backend.lost is not None
            backend.follower.sent.clear()
            backend.lost(ServerLost("gone"), is_final=False)
            (limit,) = [op for op in backend.follower.sent if isinstance(op, ops.Limit)]
            assert (limit.state, limit.output_tokens) == (0, 4)  # each answer has two words
            s.cancel()
            async with flow.state(model="large") as after:
                after += af.user("See ", before["x"]) + af.gen("x")
                assert await after["x"] == said("large", f"<user>See {text}</user><assistant>")
            assert backend.follower.unknown() == []


@pytest.mark.parametrize(
    "options",
    [
        {"models": {}},
        {"models": {"a": 3}},
        {"models": {"": "x"}},
        {"models": ["a"]},
        {"models": {"a": af.Scripted("x")}, "model": "b"},
        {"models": {"a": af.Scripted("x")}, "backend": af.Scripted("x")},
        {"models": {"a": af.Scripted("x")}, "url": "ws://127.0.0.1:1"},
        {"models": {"a": "ws://127.0.0.1:1", "b": "http://127.0.0.1:2/v1"}, "api_key": "k"},
        {"models": {"a": "openai:gpt-4o", "b": "ws://127.0.0.1:1"}, "api_key": "k"},
    ],
)
def test_models_that_make_no_session_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(af.errors.BadArgument):
        af.session(**options)


def test_models_of_one_server_share_a_key() -> None:
    models: dict[str, Any] = {"a": "openai:gpt-4o", "b": "openai:gpt-4.1", "c": af.Scripted("x")}
    af.session(models=models, api_key="k")


async def test_a_recording_of_several_models_is_replayed(tmp_path: Any) -> None:
    path = tmp_path / "run.jsonl"

    @af.program
    async def program(s: af.State) -> str:
        s += af.user("Write.") + af.gen("text")
        judge = s.copy(model="large")
        judge += af.user("Judge ", s["text"]) + af.gen("verdict")
        return await judge["verdict"]

    backends = {name: LosableBackend(generator_of(name)) for name in NAMES}
    async with af.session(models=backends, record=path) as flow:
        verdict = await flow.run(program)
    async with af.session(backend=af.Replay(path)) as flow:
        assert list(flow.models) == list(NAMES)
        assert await flow.run(program) == verdict


# Random programs


class Step(msgspec.Struct):
    """One step of a random program on one of its states: appends text or a gen, forks, or refers to the
    variable of another state."""

    state: int
    kind: str
    model: str
    other: int


STEPS = st.lists(
    st.builds(
        Step,
        state=st.integers(0, 5),
        kind=st.sampled_from(["text", "gen", "fork", "ref", "fail"]),
        model=st.sampled_from(NAMES),
        other=st.integers(0, 5),
    ),
    max_size=14,
)


async def outcome(flow: af.Session, steps: list[Step]) -> list[str]:
    """The values and failures of all variables."""
    states: list[af.State] = [flow.state()]
    variables: list[Any] = []
    for number, step in enumerate(steps):
        state = states[step.state % len(states)]
        match step.kind:
            case "text":
                state += af.user(f"Text {number}.")
            case "gen":
                state += af.user(f"Answer {number}.") + af.gen(f"v{number}")
                variables.append(state[f"v{number}"])
            case "fail":
                state += af.user("fail") + af.gen(f"v{number}")
                variables.append(state[f"v{number}"])
            case "fork":
                states += state.fork(1, model=step.model)
            case "ref" if variables:
                state += af.user("See ", variables[step.other % len(variables)])
    found: list[str] = []
    for variable in variables:
        try:
            found.append(await variable)
        except af.AgentflowError as error:
            cause = error
            while isinstance(cause.__cause__, af.AgentflowError):
                cause = cause.__cause__
            found.append(f"{cause.code}: {cause}")
    return found


@given(steps=STEPS)
async def test_backends_change_nothing_in_a_program(steps: list[Step]) -> None:
    async with in_one_interpreter() as flow:
        expected = await outcome(flow, steps)
    async with several() as flow:
        assert await outcome(flow, steps) == expected


async def test_f37_an_append_that_a_server_refuses_changes_nothing() -> None:
    limits = ServerLimits(frame_bytes=4_096)
    with anyio.fail_after(60), start_blocking_portal("asyncio") as portal:
        running = portal.call(lambda: running_server(open_models, limits=limits))
        with portal.wrap_async_context_manager(running) as server:
            models: dict[str, Backend] = {"near": LosableBackend(generator_of("near"))}
            models["far"] = af.Remote(server.url)
            async with af.session(models=models, seed=1) as flow, flow.state() as near:
                near += af.user("?") + af.gen("x")
                async with flow.state(model="far") as far:
                    for _ in range(2):
                        with pytest.raises(FrameTooLarge):
                            far += f"{near['x']}" + "y" * 5_000
                    far += f"[{near['x']}]"
                    assert await far.text() == f"[{await near['x']}]"


class Refusing:
    """A backend that refuses all ops while ``refuses`` is set."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self.refuses = False

    @asynccontextmanager
    async def connect(self, deliver: Deliver, lost: Lost) -> AsyncIterator[Connection]:
        async with self._backend.connect(deliver, lost) as connection:
            send = connection.send

            def send_or_refuse(sent: Sequence[ops.Op]) -> None:
                if self.refuses:
                    raise FrameTooLarge("too large")
                send(sent)

            connection.send = send_or_refuse  # type: ignore[method-assign]
            yield connection


@pytest.mark.parametrize(
    "sent",
    [
        [ops.Text(2, (ops.Ref(3),)), ops.Set(2, 7, "y", (ops.Ref(3), ops.Ref(4)))],
        [ops.Text(2, (ops.Ref(4),)), gen(2, 7)],
        [ops.Expect(2, 7, "y"), ops.Provide(7, "text")],
        [ops.Fork(2, (7, 8))],
        [ops.Fork(1, (7, 8), "far")],
        [ops.Open(7, model="far"), gen(7, 8)],
        [ops.SubmitGraph(7, (ops.Open(1, model="far"), ops.Fork(1, (2,)), gen(2, 3)), outputs=(3,))],
    ],
    ids=lambda sent: f"{type(sent[0]).__name__} {sent[-1]}"[:40],
)
async def test_f37_refused_ops_leave_nothing_behind(sent: list[ops.Op]) -> None:
    def noted() -> Any:
        return (
            {number: _noted(state) for number, state in connection._states.items()},
            {number: len(variable.imports) for number, variable in connection._variables.items()},
        )

    far = Refusing(LosableBackend(generator_of("far")))
    near = LosableBackend(generator_of("near"))
    with anyio.fail_after(30):
        async with opened_by(Several({"near": near, "far": far})) as (connection, listener):
            connection.send([ops.Open(1), ops.Open(2, model="far"), gen(1, 3)])
            await listener.text(3)
            connection.send([ops.Expect(1, 4, "w")])  # has no value yet
            before = noted()
            far.refuses = True
            with pytest.raises(FrameTooLarge):
                connection.send([ops.Text(1, ("of another backend",)), *sent])
            after = noted()
            far.refuses = False
            assert after == before
            connection.send([*sent, ops.Provide(4, "w"), ops.Text(2, (ops.Ref(3),)), gen(2, 9)])
            assert await listener.text(9)


def _noted(state: Any) -> Any:
    numbers = [child.number for child in state.children], list(state.variables)
    return numbers, dict(state.imports), len(state.graph)


async def test_f37_what_other_models_used_leaves_less_to_a_running_generation() -> None:
    slow = Stepped([words(10)])
    models = {"slow": slow, "quick": af.Scripted([words(5)])}
    async with af.session(models=models) as flow, flow.state() as s, flow.state(model="quick") as other:
        flow.limit(output_tokens=8)
        s += af.gen("x")
        await slow.allow(2)
        other += af.gen("y")
        await other
        await settle()
        await slow.allow(5)
        with pytest.raises(af.BudgetExceeded):
            await s["x"]
        assert s["x"].text == words(4)  # the fourth exceeds it


@pytest.mark.parametrize("how", ["cancel", "leave", "deadline", "fault"])
async def test_f37_tokens_of_generations_that_end_without_a_value_are_not_left_to_other_models(
    monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    slow = Stepped([words(10)])
    models = {"slow": slow, "quick": af.Scripted(lambda prompt: words(8))}
    async with af.session(models=models) as flow, flow.state(model="quick") as other:
        flow.limit(output_tokens=8)
        with suppress(af.AgentflowError, ZeroDivisionError):
            async with flow.state() as s:
                s += af.gen("x")
                await slow.allow(4)
                match how:
                    case "cancel":
                        s.cancel()
                    case "leave":
                        raise ZeroDivisionError
                    case "deadline":
                        s.limit(deadline_s=0)
                    case "fault":
                        allowance = slow.generator._allowance
                        monkeypatch.setattr(slow.generator, "_allowance", None)
                        allowance.release()
                await s.settled()
        await settle()
        other += af.gen("y")
        with pytest.raises(af.BudgetExceeded):
            await other["y"]
        assert other["y"].text == words(3 if how == "fault" else 4)


async def test_f37_tokens_of_a_graph_are_not_left_to_other_models_whatever_it_reports() -> None:
    @af.program
    async def thoughtful(s: af.State) -> str:
        s += "Think: " + af.gen("thoughts") + " Answer: " + af.gen("answer")
        return await s["answer"]

    models = {"small": af.Scripted(lambda call: words(3)), "large": af.Scripted(lambda call: words(8))}
    async with af.session(models=models) as flow, flow.state(model="large") as other:
        flow.limit(output_tokens=8)
        assert await flow.submit(thoughtful.trace()) == words(3)
        other += af.gen("y")
        with pytest.raises(af.BudgetExceeded):
            await other["y"]
        assert other["y"].text == words(2)


async def test_f37_tokens_of_generations_that_a_limit_ends_are_not_left_to_other_models() -> None:
    models = {"slow": af.Scripted(lambda prompt: words(6)), "quick": af.Scripted(lambda prompt: words(8))}
    async with af.session(models=models) as flow, flow.state() as s, flow.state(model="quick") as other:
        flow.limit(output_tokens=8)
        branches = s.fork(2)
        for branch in branches:
            branch += af.gen("x")
        for branch in branches:
            await branch.settled()
        other += af.gen("y")
        with pytest.raises(af.BudgetExceeded):
            await other["y"]
        assert other["y"].text == ""
