"""Sessions: how they open, which tasks end with them, and the errors at their end."""

import anyio
import anyio.lowlevel
import numpy as np
import pytest
from support.fake_engine import FakeEngine
from support.faults import has_param
from support.observed_backends import Observed, Stepped, assert_idle, settle
from support.programs import ask, echo
from support.session_peer import HangingGenerator

import agentflow as af
from agentflow.backends.remote import Remote

pytestmark = [pytest.mark.anyio, pytest.mark.on_trio]


async def test_two_sessions_at_once():
    async with af.session(backend=af.Scripted(echo)) as one, af.session(backend=af.Scripted(["b"])) as two:
        assert await one.run(ask, "a") == "<a>"
        assert await two.run(ask, "a") == "b"


async def test_nothing_can_be_done_after_the_end():
    async with af.session(backend=af.Scripted(echo)) as flow, flow.state() as s:
        s += "a" + af.gen("x")
        await s
    assert not flow.is_alive
    for use in (
        lambda: s.add("x"),
        lambda: s.fork(1),
        lambda: flow.state(),
        lambda: flow.stream(ask, "a"),
        lambda: flow._link.start_soon(anyio.sleep_forever),
        lambda: flow.capabilities,
    ):
        with pytest.raises(af.errors.StateClosed, match="session has ended"):
            use()
    for wait in (flow.run(ask, "a"), flow.stats()):
        with pytest.raises(af.errors.StateClosed, match="session has ended"):
            await wait
    assert await s["x"] == "<a>"  # earlier values stay


async def test_a_session_is_entered_once():
    flow = af.session(backend=af.Scripted(echo))
    with pytest.raises(af.errors.StateClosed):
        flow.check_alive()
    with pytest.raises(af.errors.StateClosed, match="was not opened"):
        flow.state()
    async with flow:
        with pytest.raises(af.errors.BadArgument, match="entered once"):
            await flow.__aenter__()
        assert await flow.run(ask, "a") == "<a>"
    with pytest.raises(af.errors.BadArgument, match="entered once"):
        await flow.__aenter__()


async def test_nothing_outlives_the_session():
    backend = Stepped({"": "never"})
    ended = []

    async def background():
        try:
            await anyio.sleep_forever()
        finally:
            ended.append("background")

    async with af.session(backend=backend) as flow:
        flow._link.start_soon(background)
        stream = flow.stream(ask, "a")  # dropped, it would end its program
        s = flow.state()
        for branch in (s, *s.fork(3)):
            branch += af.gen("x")
        await settle()
        assert backend.generator.num_running == 5
    del stream
    assert ended == ["background"]
    assert_idle(backend)


async def test_tasks_that_wait_outside_the_block_fail_at_its_end():
    backend = Stepped({"": "never"})
    failed = []

    async def expect(error, wait, *args):
        with pytest.raises(error):
            await wait(*args)
        failed.append(wait.__name__)

    async with anyio.create_task_group() as group, af.session(backend=backend) as flow:
        s, t = flow.state(), flow.state()
        s += af.gen("x")
        t += s["x"]
        backend.generator.stats = anyio.sleep_forever
        group.start_soon(expect, af.Cancelled, s._wait)
        group.start_soon(expect, af.Cancelled, s["x"]._wait)
        group.start_soon(expect, af.Cancelled, t._wait)
        group.start_soon(expect, af.errors.StateClosed, flow.stats)
        await settle()
        assert failed == []
    assert sorted(failed) == ["_wait", "_wait", "_wait", "stats"]


async def test_a_lost_backend_fails_every_wait_and_use():
    observed = Observed(Stepped({"": "one two"}))
    async with af.session(backend=observed) as flow, flow.state() as s:
        s += af.gen("x")
        t = s.fork(1)[0]
        t += s["x"]
        observed.lose(af.ServerLost("gone"))
        for wait in (s, s["x"], t, flow.stats(), flow.run(ask, "a")):
            with pytest.raises(af.ServerLost, match="gone"):
                await wait
        for use in (lambda: s.add("x"), lambda: s.fork(1), lambda: flow.state()):
            with pytest.raises(af.ServerLost, match="gone"):
                use()
        s.cancel()
        assert not flow.is_alive


async def test_a_foreign_error_of_the_backend_is_server_lost():
    observed = Observed(af.Scripted(echo))
    async with af.session(backend=observed) as flow:
        observed.lose(OSError("cable"))
        with pytest.raises(af.ServerLost, match="OSError\\('cable'\\)"):
            await flow.run(ask, "a")


@pytest.mark.parametrize(
    "error",
    [KeyError("own"), KeyboardInterrupt(), af.errors.BadArgument("x"), ExceptionGroup("own", [KeyError()])],
    ids=repr,
)
async def test_an_error_of_the_block_is_raised_unchanged(error):
    backend = Stepped({"": "never"})

    async def block() -> None:
        async with af.session(backend=backend) as flow:
            flow._link.start_soon(anyio.sleep_forever)
            s = flow.state()
            s += af.gen("x")
            await settle()
            raise error

    with pytest.raises(type(error)) as failure:
        await block()
    assert failure.value is error
    assert_idle(backend)


async def test_an_error_of_a_background_task_ends_the_session_with_it():
    async def fails() -> None:
        raise KeyError("own")

    async def block() -> None:
        async with af.session(backend=backend) as flow:
            flow._link.start_soon(fails)
            await flow.run(ask, "a")

    backend = Stepped({"": "never"})
    with pytest.raises(KeyError, match="own"):
        await block()
    await anyio.lowlevel.checkpoint()  # the task that opened the session is not cancelled
    assert_idle(backend)


async def test_cancelling_a_session_from_outside():
    backend = Stepped({"": "never"})
    with anyio.CancelScope() as scope:
        async with af.session(backend=backend) as flow:
            flow._link.start_soon(flow.run, ask, "a")
            await settle()
            scope.cancel()
            await flow.run(ask, "b")
    assert scope.cancelled_caught
    assert_idle(backend)


async def test_an_error_while_connecting_is_raised_unchanged():
    class Unreachable:
        def connect(self, deliver, lost):
            raise af.errors.ServerUnreachable("no server")

    with pytest.raises(af.errors.ServerUnreachable, match="no server"):
        await af.session(backend=Unreachable()).__aenter__()


async def test_stats_come_from_the_backend():
    async with af.session(backend=af.Scripted(echo)) as flow:
        assert await flow.stats() == af.Stats(model="scripted")
        await flow.run(ask, "a")
        assert await flow.stats() == af.Stats("scripted", steps=1, prompt_tokens=1, generated_tokens=1)
        assert flow.capabilities.model == "scripted"
        results = []

        async def stats() -> None:
            results.append(await flow.stats())

        async with anyio.create_task_group() as group:
            for _ in range(5):
                group.start_soon(stats)
        assert results == [await flow.stats()] * 5
        assert flow._link._answers == {}


async def test_failing_stats_do_not_end_the_session():
    backend = af.Scripted(echo)
    backend.generator = HangingGenerator()
    async with af.session(backend=backend) as flow:
        backend.generator.stats_fault = af.errors.EngineFailed("the engine restarts")
        with pytest.raises(af.errors.EngineFailed, match="the engine restarts"):
            await flow.stats()
        assert await flow.run(ask, "a") == "a"
        backend.generator.stats_fault = None
        assert (await flow.stats()).steps == 1


async def test_f37_a_cancelled_or_failed_question_leaves_nothing():
    backend = af.Scripted(echo)
    backend.generator = HangingGenerator()
    async with af.session(backend=backend) as flow:
        backend.generator.stats_fault = af.errors.EngineFailed("the engine restarts")
        with pytest.raises(af.errors.EngineFailed):
            await flow.stats()
        backend.generator.stats = anyio.sleep_forever
        async with anyio.create_task_group() as group:
            group.start_soon(flow.stats)
            await settle()
            group.cancel_scope.cancel()
        assert flow._link._answers == {}


async def test_stats_of_an_engine_add_up():
    async with af.session(backend=FakeEngine()) as flow, flow.state() as s:
        s += "begin " + af.gen("x", max_tokens=8)
        await s
        stats = await flow.stats()
        assert stats.model == "fake"
        assert stats.generated_tokens == s["x"].usage.output_tokens == 8
        assert stats.prompt_tokens == s["x"].usage.prompt_tokens
        assert stats.steps == 8
        assert stats.free_slots + stats.cached_slots + stats.in_use_slots == stats.total_slots
        assert stats.peak_resident_bytes > 1_000_000
        assert stats.hit_rate == 0
        assert (stats.running, stats.waiting) == (0, 0)


def test_a_session_has_one_backend(monkeypatch):
    backend = af.Scripted(echo)
    for two in ({"url": "ws://x", "backend": backend}, {"model": "m", "backend": backend}):
        with pytest.raises(af.errors.BadArgument, check=has_param("backend")):
            af.session(**two)
    monkeypatch.setenv("AGENTFLOW_URL", "ws://elsewhere:1")
    monkeypatch.setenv("AGENTFLOW_API_KEY", "af-1")
    assert isinstance(af.session()._backend, Remote)
    assert af.session("ws://there:2")._backend.url == "ws://there:2/v1/session"
    assert af.session()._backend.headers == {"Authorization": "Bearer af-1"}
    assert af.session(model="m", api_key="af-2")._backend.headers == {"Authorization": "Bearer af-2"}
    assert af.session(model="m")._backend.model == "m"
    assert af.session(backend=backend)._backend is backend
    monkeypatch.delenv("AGENTFLOW_URL")
    assert isinstance(af.session()._backend, af.Embedded)
    assert isinstance(af.session(model="m")._backend, af.Embedded)


def test_f25c_options_of_the_engine_in_this_process(monkeypatch):
    monkeypatch.delenv("AGENTFLOW_URL", raising=False)
    options = {"quantize": "int8", "chat_template": "a.jinja", "device": "cpu", "kv_tokens": 4000}
    backend = af.session(model="m", **options)._backend
    assert isinstance(backend, af.Embedded)
    assert {name: backend._options[name] for name in options} == options
    for name, value in options.items():
        with pytest.raises(af.errors.BadArgument, check=has_param(name)):
            af.session("ws://there:2", **{name: value})
        with pytest.raises(af.errors.BadArgument, check=has_param("backend")):
            af.session(backend=af.Scripted([]), **{name: value})
    monkeypatch.setenv("AGENTFLOW_URL", "ws://elsewhere:1")
    with pytest.raises(af.errors.BadArgument, match="AGENTFLOW_URL"):
        af.session(kv_tokens=4000)


@pytest.mark.parametrize("seed", ["a", 1.5, object()])
def test_f37_a_seed_is_a_whole_number(seed):
    """A recording with another one could not be read again."""
    with pytest.raises(af.errors.BadArgument, check=has_param("seed")):
        af.session(backend=af.Scripted(""), seed=seed)


async def test_f37_a_seed_of_numpy_is_recorded_as_a_number(tmp_path):
    path = tmp_path / "run.jsonl"
    async with af.session(backend=af.Scripted(""), seed=np.int64(7), record=path) as flow:
        assert type(flow.seed) is int
    async with af.session(backend=af.Replay(path)) as flow:
        assert flow.seed == 7


def test_an_unknown_option_is_rejected_with_the_nearest():
    with pytest.raises(af.errors.BadArgument, match="'model'") as refused:
        af.session(modell="small")  # type: ignore[call-arg]
    assert refused.value.param == "modell"
