"""Cancelling in each phase of a request frees its slots within one engine step."""

import contextlib

import anyio
import pytest
from support.fake_engine import FakeEngine

import agentflow as af
from agentflow.protocol.text import transform

pytestmark = [pytest.mark.anyio, pytest.mark.on_trio]

LONG = "the answer to the question is " * 20


async def waiting(engine, flow, root):
    """In the queue: the only place in the batch is taken."""
    other = root.fork(1)[0]
    root += af.gen("first", max_tokens=400)
    other += "x"
    other += af.gen("second", max_tokens=400)
    return 3


async def in_prefill(engine, flow, root):
    """Half of the prompt is computed (the budget is 16 rows a step)."""
    root += LONG
    root += af.gen("answer", max_tokens=400)
    return 3


async def decoding(engine, flow, root):
    root += af.gen("answer", max_tokens=400)
    return 9


async def streaming(engine, flow, root):
    """A task reads the text while it is generated."""
    root += af.gen("answer", max_tokens=400)
    flow._link.start_soon(read_quietly, root["answer"])
    return 9


async def read_quietly(variable):
    try:
        async for _ in variable:
            pass
    except af.Cancelled:
        pass


async def forked(engine, flow, root):
    for branch in root.fork(3):
        branch += "y"
        branch += af.gen("answer", max_tokens=400)
    return 12


async def joined(engine, flow, root):
    """The parent waits for the texts that its branches generate."""
    async with root.fork(2) as branches:
        for branch in branches:
            branch += "z"
            branch += af.gen("part", max_tokens=400)
    for branch in branches:
        root += branch["part"]
    root += af.gen("whole", max_tokens=400)
    return 12


async def wired(engine, flow, root):
    """A branch waits for a variable of its parent that is being generated."""
    branch = root.fork(1)[0]
    root += af.gen("source", max_tokens=400)
    branch += "got: " + root["source"]
    branch += af.gen("sink", max_tokens=400)
    return 6


async def scored(engine, flow, root):
    root += LONG
    root += af.select("choice", ["yes", "no", "perhaps"])
    return 2


async def setting(engine, flow, root):
    """A text that the program sets waits for a branch's generation, and a read waits for the text."""
    branch = root.copy()
    branch += af.gen("source", max_tokens=400)
    root.set("note", f"<{branch['source'].upper()}>")
    root.text()
    root += root["note"] + af.gen("sink", max_tokens=400)
    return 6


async def mapped(engine, flow, root):
    """A function of the program waits for its value, and a state for the function."""
    root += af.gen("source", max_tokens=400)
    branch = root.copy()
    branch += root["source"].map(str.upper) + af.gen("sink", max_tokens=400)
    return 6


async def in_a_turn(engine, flow, root):
    """A turn is open, the state is limited and hinted at, and its forks inherit all of it."""
    root.limit(deadline_s=3600, output_tokens=1000)
    root.hint(objective="latency", forks=2)
    root += af.user("Why?")
    async with root.assistant():
        branch = root.copy()
        for state in (root, branch):
            state += af.gen("answer", max_tokens=400)
    return 9


class HeldPattern:
    """A pattern whose search begins when the engine's gate is opened, and is soon given up."""

    def __init__(self, pattern, gate):
        self._pattern, self._gate = pattern, gate

    def search(self, text, timeout):
        assert timeout == transform.REGEX_TIMEOUT_S
        self._gate.wait_until_open()
        return self._pattern.search(text, timeout=0.01)


async def searching(engine, flow, root):
    """A pattern is being searched for, in a thread."""
    branch = root.copy()
    victim = branch.set("victim", "a" * 80 + "b")
    branch += af.gen("answer", max_tokens=400)
    root += victim.regex("(a|aa)+$") + af.gen("sink", max_tokens=400)
    return 6


async def joining(engine, flow, root):
    """The branches' texts are awaited in the middle of a turn."""
    async with root.fork(2) as branches:
        for branch in branches:
            branch += af.user("Say it.") + af.assistant(af.gen("part", max_tokens=400))
    async with root.user():
        root.join(branches, separator=", ")
        root += af.gen("whole", max_tokens=400)
    return 12


async def gathering(engine, flow, root):
    """Tasks wait for values, texts and messages."""
    branches = root.fork(2)
    for branch in branches:
        branch += af.assistant(af.gen("part", max_tokens=400))
    text = branches[1].text()
    for wait in (lambda: branches.gather("part"), branches[0].messages, text.whole_text):
        flow._link.start_soon(wait_quietly, wait)
    return 6


async def wait_quietly(wait):
    with contextlib.suppress(af.Cancelled):
        await wait()


MORE = [setting, mapped, in_a_turn, searching, joining, gathering]
POINTS = [waiting, in_prefill, decoding, streaming, forked, joined, wired, scored, *MORE]


@pytest.fixture
def engine(monkeypatch):
    engine = FakeEngine(max_running=4, token_budget=16)
    compiled = transform.compiled
    monkeypatch.setattr(transform, "compiled", lambda source: HeldPattern(compiled(source), engine.gate))
    return engine


@pytest.mark.parametrize("point", POINTS)
async def test_state_cancel_frees_everything_within_a_step(engine, point):
    engine = FakeEngine(max_running=1, token_budget=16) if point is waiting else engine
    async with af.session(backend=engine) as flow, flow.state() as root:
        root += "begin "
        engine.gate.allow(0)
        engine.gate.allow(await point(engine, flow, root))
        await engine.gate.held()
        root.cancel()
        engine.gate.open()
        await engine.assert_idle()
        for variable in root.variables:
            with pytest.raises(af.Cancelled):
                await variable
        with pytest.raises(af.errors.StateClosed):
            root += "more"


@pytest.mark.parametrize("point", POINTS)
async def test_cancelling_a_run_frees_everything_within_a_step(engine, point):
    engine = FakeEngine(max_running=1, token_budget=16) if point is waiting else engine
    async with af.session(backend=engine) as flow:
        engine.gate.allow(0)

        @af.program
        async def program(root: af.State) -> None:
            root += "begin "
            engine.gate.allow(await point(engine, flow, root))
            await root

        async with anyio.create_task_group() as group:
            group.start_soon(flow.run, program)
            await engine.gate.held()
            group.cancel_scope.cancel()
        engine.gate.open()
        await engine.assert_idle()


@pytest.mark.parametrize("point", POINTS)
async def test_leaving_the_session_ends_everything(engine, point):
    engine = FakeEngine(max_running=1, token_budget=16) if point is waiting else engine

    async def leave_early() -> None:
        async with af.session(backend=engine) as flow:
            engine.gate.allow(0)
            async with flow.state() as root:
                root += "begin "
                engine.gate.allow(await point(engine, flow, root))
                await engine.gate.held()
                engine.gate.open()
                raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await leave_early()
    # The engine ended with the session: nothing is left that could still give slots back.
    assert engine.client.num_calls == 0
