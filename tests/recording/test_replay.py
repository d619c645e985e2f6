"""Replays: the same program gets the same answers without a model, with any timing of its branches."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import anyio
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.language.random_recorded_programs import Branch, Clumsy, ClumsyBackend, branches, play
from support.observed_backends import Observed, Stepped
from support.programs import measure
from support.session_peer import HANG, HangingGenerator
from support.wire_server import thread_server

import agentflow as af
from agentflow.backends.local import interpreted
from agentflow.backends.scripted_generator import ScriptedGenerator
from agentflow.protocol import ops
from agentflow.protocol.events import Delta, Usage
from agentflow.recording.file import read_recording
from agentflow.runtime.generator import Generated

pytestmark = pytest.mark.anyio

ResultT = TypeVar("ResultT")


class Detailed:
    """A scripted backend with log-probabilities and cached tokens, so that a replay has them to lose."""

    def connect(self, deliver, lost):
        return interpreted(DetailedGenerator(measure), deliver)


class DetailedGenerator(ScriptedGenerator):
    def __init__(self, script) -> None:
        super().__init__(script)
        self.capabilities = msgspec.structs.replace(self.capabilities, logprobs=True)

    async def generate(self, context, params, on_text, constraint=None) -> Generated:
        params = msgspec.structs.replace(params, logprobs=False)
        end = await super().generate(context, params, on_text, constraint)
        return Generated(end.text, end.finish_reason, Usage(end.usage.prompt_tokens, 1, 2), (-0.5, None))


async def assert_replayed(
    path: Path, backend: Any, use: Callable[[af.OpenSession], Awaitable[ResultT]], num_replays: int = 1
) -> ResultT:
    """``use`` has the same result on a replay of its recording. Returns the result."""
    async with af.session(backend=backend, record=path) as flow:
        first = await use(flow)
    replay = af.Replay(path)
    for _ in range(num_replays):
        with anyio.fail_after(30):
            async with af.session(backend=replay) as flow:
                assert flow.seed == replay.seed
                assert await use(flow) == first
    return first


@pytest.mark.parametrize("fails", [True, False])
async def test_f37_a_replay_may_await_a_state_before_the_op_that_failed(tmp_path: Path, fails: bool):
    async def ask(s: af.State, awaits: bool, goes_on: bool) -> str:
        branch = s.copy()
        branch += "Why?"
        if awaits:
            await branch
        if goes_on:
            branch += af.gen("why")
            s += branch["why"]
        return await branch["why"] if goes_on else "nothing"

    path = tmp_path / "run.jsonl"
    error = af.errors.EngineFailed("broken")
    async with af.session(backend=af.Scripted({"why": error if fails else "So."}), record=path) as flow:
        with suppress(af.errors.EngineFailed):
            await flow.run(ask, False, True)
    ends = {True: "EngineFailed", False: "nothing"} if fails else {True: "So.", False: "ReplayDiffers"}
    for goes_on, expected in ends.items():  # a state that was cancelled after a failure may have fewer ops
        end = ""
        try:
            async with af.session(backend=af.Replay(path)) as flow:
                end = await flow.run(ask, True, goes_on)
        except af.AgentflowError as raised:
            end = type(raised).__name__
        assert end == expected


async def test_f37_a_replay_tells_that_it_has_no_answer_for_a_state_of_a_program_that_raised(tmp_path: Path):
    async def ask(s: af.State, awaits: bool) -> None:
        s += "Why?" + af.gen("why")
        if awaits:
            await s
        raise ZeroDivisionError

    path = tmp_path / "run.jsonl"
    with pytest.raises(ZeroDivisionError):
        async with af.session(backend=af.Scripted(HANG), record=path) as flow:
            await flow.run(ask, False)
    for awaits, expected in ((False, ZeroDivisionError), (True, af.errors.ReplayDiffers)):
        with anyio.fail_after(30), pytest.raises(expected):
            async with af.session(backend=af.Replay(path)) as flow:
                await flow.run(ask, awaits)


async def test_f37_a_replay_answers_for_its_live_graph(tmp_path: Path):
    async def look(flow: af.Session) -> tuple[int, int, str]:
        first = await flow.graph()
        async with flow.state() as s:
            s += "Why?" + af.gen("why")
            graphs = await anext(aiter(flow.watch()))
            return len(first.states), len(graphs), await s["why"]

    assert await assert_replayed(tmp_path / "run.jsonl", af.Scripted("So."), look) == (0, 1, "So.")


@af.program
async def small(s: af.State, subject: str) -> list[str]:
    s += subject + af.gen("x", temperature=1.0)
    branch = s.copy()
    branch += af.gen("y")
    return [await s["x"], await branch["y"]]


compiled = small.trace()


async def everything(s: af.State, flow: af.Session) -> list[Any]:
    """A program of every primitive; all that it can see."""
    seen: list[Any] = []
    s += "some text, " + af.system("strict") + af.user("an essay ")
    s += af.assistant("yes or no? ", af.select("related", ["yes", "no"]))
    seen += [await s["related"], s["related"].choices, s["related"].usage]
    s += af.assistant("so ", af.gen("first", max_tokens=3, temperature=0.7, stop="x", logprobs=True))
    seen.append("".join([text async for text in s["first"]]))
    seen += [s["first"].finish_reason, s["first"].usage, s["first"].logprobs]
    async with s.fork(2) as group:
        for branch, what in zip(group, ["clarity", "evidence"], strict=True):
            branch += af.user(what, f" after {s['first']}") + af.assistant(af.gen("judgment"))
    s += af.user(*[branch["judgment"] for branch in group]) + af.gen("report")
    s.hint(objective="throughput", forks=3)
    s.limit(output_tokens=10_000)
    s.set("both", "<" + s["first"].strip() + f"|{s['report'].upper()}>")
    s += s["both"].regex("[0-9a-z]+") + s["report"].map(lambda text: f"{len(text)} ")
    seen.append(await s.messages())
    async with s.user():
        s += af.image("https://example.org/x.png") + af.gen("seen")
    seen += [await s["both"], await s.text()]
    seen.append(await flow.submit(compiled, {"subject": "stars"}))
    plain = s.fork(3)
    plain[0] += af.assistant("left ", af.gen("x"))
    plain[1] += af.assistant("broken!", af.gen("x"))
    plain[2] += af.assistant("idle ", af.gen("x"))
    plain[2].cancel()
    for branch in plain:
        try:
            seen.append(await branch["x"])
        except af.AgentflowError as error:
            seen.append(repr(error))
    await s
    try:
        async with s.fork(2) as failing:
            failing[0] += af.assistant("bad!", af.gen("x"))
            failing[1] += af.assistant("good ", af.gen("x"))
        s += failing[0]["x"]
        await s
    except af.AgentflowError as error:
        seen.append(repr(error))
    seen.append((await flow.stats()).steps > 0)
    return seen


async def test_every_primitive_is_replayed(path):
    async def use(flow: af.OpenSession) -> list[Any]:
        assert flow.capabilities.model == "scripted"
        return await flow.run(everything, flow)

    await assert_replayed(path, Detailed(), use, num_replays=2)


async def test_the_stream_of_events_is_replayed(path):
    @af.program
    async def talk(s: af.State) -> str:
        s += "a question" + af.gen("x", max_tokens=9) + af.gen("y")
        return await s["y"]

    def script(prompt: str) -> str:
        return "many words in one answer"

    async def events(flow: af.Session) -> list[af.ProgramEvent]:
        """The events with adjacent deltas joined: how text is split into deltas is not recorded."""
        received: list[af.ProgramEvent] = []
        async for event in flow.stream(talk):
            last = received[-1] if received else None
            if isinstance(last, af.TextDelta) and isinstance(event, af.TextDelta) and last.name == event.name:
                event = af.TextDelta(event.path, event.name, received.pop().text + event.text)
            received.append(event)
        return received

    first = await assert_replayed(path, af.Scripted(script), events)
    assert [type(event) for event in first] == [af.TextDelta, af.VariableDone] * 2 + [af.RunDone]
    deltas = [entry.received for entry in read_recording(path).entries if isinstance(entry.received, Delta)]
    assert len(deltas) > 2


async def test_a_recording_of_a_server_is_replayed_without_it(path):
    async def ask(s: af.State) -> list[str]:
        s += af.user("count #12") + af.gen("x")
        async with s.fork(2) as group:
            for branch in group:
                branch += af.assistant("again #4", af.gen("x"))
        return [await s["x"], *[await branch["x"] for branch in group]]

    with thread_server() as server:
        async with af.session(server.url, record=path) as flow:
            first = await flow.run(ask)
            with anyio.CancelScope() as scope:
                async with flow.state() as s:
                    s += HANG + af.gen("x")
                    scope.cancel()
                    await s["x"]
        await server.wait_until_idle()
    async with af.session(backend=af.Replay(path)) as flow:
        assert await flow.run(ask) == first
        with anyio.CancelScope() as scope:
            async with flow.state() as s:
                s += HANG + af.gen("x")
                scope.cancel()
                await s["x"]


async def test_a_replay_can_be_recorded(path, tmp_path):
    async def use(flow: af.OpenSession) -> list[Any]:
        return await flow.run(everything, flow)

    again = tmp_path / "again.jsonl"
    first = await assert_replayed(path, Detailed(), use)
    assert await assert_replayed(again, af.Replay(path), use) == first
    assert read_recording(again).header.seed == read_recording(path).header.seed


# Timing.


async def side_by_side(programs: Sequence[Branch], timing: int, session: af.Session) -> dict[int, list]:
    """Runs all programs concurrently, each with its pauses."""
    outcomes: dict[int, list] = {}
    async with session as flow:

        async def run(index: int, branch: Branch) -> None:
            pause = Clumsy(timing * 31 + index)
            await pause()
            outcomes[index] = await play(flow, branch, pause)

        async with anyio.create_task_group() as group:
            for index, branch in enumerate(programs):
                group.start_soon(run, index, Branch([("text", 100 + index), *branch.steps]))
    return outcomes


def record_and_replay(path: Path, programs, timings, loops, *, fails: bool) -> None:
    """The outcomes are equal."""

    async def replay() -> dict[int, list]:
        with anyio.fail_after(20):
            return await side_by_side(programs, timings[1], af.session(backend=af.Replay(path)))

    session = af.session(backend=ClumsyBackend(timings[0], fails=fails), record=path)
    first = anyio.run(side_by_side, programs, timings[0], session, backend=loops[0])
    again = anyio.run(replay, backend=loops[1])
    assert again == first


PROGRAMS = st.lists(branches(), min_size=1, max_size=2)
TIMINGS = st.tuples(st.integers(0, 10**6), st.integers(0, 10**6))


@given(programs=PROGRAMS, timings=TIMINGS)
def test_programs_are_replayed_with_any_timing(tmp_path_factory, programs, timings):
    """With failures, on asyncio: on trio, whether a branch learns of its sibling's failure before or after
    something else that came at nearly the same time is drawn again in each run."""
    path = tmp_path_factory.mktemp("replay") / "run.jsonl"
    record_and_replay(path, programs, timings, ("asyncio", "asyncio"), fails=True)


@given(
    programs=PROGRAMS,
    timings=TIMINGS,
    loops=st.sampled_from([("trio", "trio"), ("trio", "asyncio"), ("asyncio", "trio")]),
)
def test_programs_are_replayed_on_either_loop(tmp_path_factory, programs, timings, loops):
    path = tmp_path_factory.mktemp("replay") / "run.jsonl"
    record_and_replay(path, programs, timings, loops, fails=False)


@pytest.mark.parametrize("anyio_backend", ["asyncio"])  # trio draws who runs between two answers
@pytest.mark.parametrize("timing", range(8))
async def test_the_same_branch_is_first(path, timing):
    async def race(s: af.State) -> list[int]:
        runners = s.fork(3)
        for number, runner in enumerate(runners):
            runner += f"runner {number} " + af.gen("x")

        async def watch(runner: af.State, scope: anyio.CancelScope) -> None:
            await runner["x"]
            scope.cancel()

        async with anyio.create_task_group() as group:
            for runner in runners:
                group.start_soon(watch, runner, group.cancel_scope)
        winners = [number for number, runner in enumerate(runners) if runner["x"].is_done]
        for runner in runners:
            runner.cancel()
        return winners

    await assert_replayed(path, ClumsyBackend(timing), lambda flow: flow.run(race))


async def ask(s: af.State, question: str) -> str:
    s += af.system("same") + af.user(question) + af.gen("x", temperature=1.0)
    return await s["x"]


async def test_runs_side_by_side_may_begin_in_another_order(path):
    questions = [f"question {'x' * number} " for number in range(6)]

    async def ask_all(flow: af.Session, order: Sequence[int]) -> dict[int, str]:
        answers: dict[int, str] = {}

        async def one(number: int) -> None:
            answers[number] = await flow.run(ask, questions[number])

        for number in order[:2]:
            await one(number)
        async with anyio.create_task_group() as group:
            for number in order[2:]:
                group.start_soon(one, number)
        return answers

    async with af.session(backend=af.Scripted(measure), record=path) as flow:
        first = await ask_all(flow, range(6))
    for order in ([5, 4, 3, 2, 1, 0], [3, 1, 4, 5, 2, 0]):
        async with af.session(backend=af.Replay(path)) as flow:
            assert await ask_all(flow, order) == first


# Recordings of sessions that ended badly.


async def test_a_truncated_recording_is_replayed_up_to_its_end(path):
    async def talk(s: af.State, received: list[str]) -> None:
        for number in range(4):
            s += f"question {number} " + af.gen("x")
            received.append(await s["x"])

    async with af.session(backend=af.Scripted(measure), record=path) as flow:
        await flow.run(talk, whole := [])
    lines = path.read_bytes().splitlines(keepends=True)
    lengths = set()
    for num_lines in range(1, len(lines)):
        path.write_bytes(b"".join(lines[:num_lines]) + lines[num_lines][:9])
        received: list[str] = []
        with anyio.fail_after(20):
            async with af.session(backend=af.Replay(path)) as flow:
                try:
                    await flow.run(talk, received)
                except af.errors.ReplayDiffers as error:
                    assert "the recording ends" in str(error)  # noqa: PT017 - only the last cuts are whole
        assert received == whole[: len(received)]
        lengths.add(len(received))
    assert lengths == {0, 1, 2, 3, 4}


async def test_f37_a_replay_of_a_changed_recording_ends(path):
    """Without one of its lines, or with one of them twice, the result is the same or an error."""

    async def talk(s: af.State) -> list[str]:
        s += "one " + af.gen("x")
        said = [await s["x"]]
        async with s.fork(2) as forks:
            for number, fork in enumerate(forks):
                fork += f"two {number} " + af.gen("y")
        said += await forks.gather("y")
        s += forks[0]["y"] + af.gen("z")
        await s
        return [*said, await s["z"]]

    async with af.session(backend=af.Scripted(measure), record=path) as flow:
        first = await flow.run(talk)
    lines = path.read_bytes().splitlines(keepends=True)
    changed = [lines[:place] + lines[place + 1 :] for place in range(1, len(lines))]
    changed += [lines[:place] + lines[place - 1 :] for place in range(2, len(lines) + 1)]
    for number, some in enumerate(changed):
        path.write_bytes(b"".join(some))
        with anyio.fail_after(30), suppress(af.errors.BadRecording, af.errors.ReplayDiffers):
            async with af.session(backend=af.Replay(path)) as flow:
                assert await flow.run(talk) == first, number


async def test_a_replay_fails_where_the_recorded_session_was_cancelled(path):
    async def wait(flow: af.Session, stop: Callable[[], None]) -> None:
        async with flow.state() as s:
            s += "first " + af.gen("x")
            await s["x"]
            s += "second " + af.gen("y")
            stop()
            await s

    backend = Stepped({"first ": "one", "second ": "never said"})
    with anyio.CancelScope() as scope:
        async with af.session(backend=backend, record=path) as flow, anyio.create_task_group() as group:
            group.start_soon(wait, flow, scope.cancel)
            await backend.allow(1)
    async with af.session(backend=af.Replay(path)) as flow:
        with (
            anyio.fail_after(10),
            pytest.raises(af.errors.ReplayDiffers, match="the recording ends"),
        ):
            await wait(flow, lambda: None)


async def test_a_lost_backend_is_lost_again(path):
    backend = Observed(Stepped({"": "one two"}))

    async def use(flow: af.Session, lose: Callable[[], None]) -> str:
        async with flow.state() as s:
            s += "x" + af.gen("x")
            lose()
            with pytest.raises(af.ServerLost) as caught:
                await s["x"]
        return str(caught.value)

    async with af.session(backend=backend, record=path) as flow:
        first = await use(flow, lambda: backend.lose(af.ServerLost("it is gone")))
    async with af.session(backend=af.Replay(path)) as flow:
        with anyio.fail_after(10):
            assert await use(flow, lambda: None) == first


async def test_failing_stats_fail_again(path):
    async def use(flow: af.OpenSession) -> None:
        with pytest.raises(af.errors.EngineFailed, match="it restarts"):
            await flow.stats()

    backend = af.Scripted([])
    backend.generator = HangingGenerator()
    backend.generator.stats_fault = af.errors.EngineFailed("it restarts")
    await assert_replayed(path, backend, use)


class Picky:
    """A scripted backend that refuses ops with long text."""

    @asynccontextmanager
    async def connect(self, deliver, lost):
        async with af.Scripted(measure).connect(deliver, lost) as connection:
            self.models = connection.models
            self._connection = connection
            yield self

    def send(self, submitted: Sequence[ops.Op]) -> None:
        if any(len(str(op)) > 500 for op in submitted):
            raise af.errors.FrameTooLarge("too long")
        self._connection.send(submitted)

    def end(self, error: BaseException | None) -> None:
        self._connection.end(error)


async def test_rejected_ops_are_rejected_again(path):
    async def use(s: af.State) -> str:
        with pytest.raises(af.errors.FrameTooLarge, match="too long"):
            s += af.user("long " * 200) + af.gen("x")
        s += "short " + af.gen("x")
        fork = s.fork(1)[0]
        fork += s["x"] + af.gen("x")
        return await fork["x"]

    await assert_replayed(path, Picky(), lambda flow: flow.run(use))


@pytest.mark.parametrize("version", [1, 2])
async def test_a_recording_of_version_1_has_the_defaults_of_parameters(tmp_path, version):
    """Gens had all parameters then, and the line had none with its default."""
    path = tmp_path / "run.jsonl"

    def asking(**params):
        async def program(s: af.State) -> str:
            s += af.user("Hello") + af.gen("x", **params)
            return await s["x"]

        return program

    async with af.session(backend=af.Scripted("Hi"), record=path) as flow:
        await flow.run(asking())
    header, *lines = path.read_bytes().splitlines(keepends=True)
    fields = json.loads(header)
    if version == 1:
        fields |= {"recording": 1, "capabilities": fields.pop("models")[fields.pop("model")]}
    path.write_bytes(json.dumps(fields).encode() + b"\n" + b"".join(lines))
    async with af.session(backend=af.Replay(path)) as flow:
        assert flow.capabilities.model == "scripted"
        if version == 1:
            assert await flow.run(asking(temperature=0.0, max_tokens=256)) == "Hi"
        else:
            with pytest.raises(af.errors.ReplayDiffers):
                await flow.run(asking(temperature=0.0, max_tokens=256))
