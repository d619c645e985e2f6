"""Sessions on a server whose models are behind APIs: programs run as on any model, with the server's key."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import httpx2
import pytest
from support.apis.anthropic_answers import text_stream as anthropic_text
from support.apis.fake_server import Answer, AnyAnswer, Hold, RawAnswer, Received, fake_server
from support.apis.openai_answers import (
    BROKEN,
    NO_MODEL,
    WRONG_KEY,
    call_stream,
    ending,
    rate_limited,
    stream,
    text_chunks,
    text_stream,
    usage,
)
from support.fake_engine import TEMPLATE, FakeEngine
from support.server.api_models import SECRET, Served, backend_of, served_apis
from support.server.http_clients import only_asyncio
from websockets.asyncio.client import connect

import agentflow as af
from agentflow.backends.local import open_backend_generator
from agentflow.errors import EngineDown, EngineFailed, NotSupported, Overloaded, RateLimited, UnknownModel
from agentflow.protocol import ops
from agentflow.protocol.events import Event, StatsReply, Watched
from agentflow.protocol.wire import VERSION, Events, Hello, Ops, encode, server_frames
from agentflow.server.models.api_model import ApiModel
from agentflow.server.models.models import EngineModel, Models
from agentflow.server.serve import running_server
from agentflow.server.tenants.keys import Tenants, hashed_key

pytestmark = pytest.mark.anyio
anyio_backend = pytest.fixture(only_asyncio)
BOTH = {"gpt": "openai:gpt-4.1-mini", "claude": "anthropic:claude-opus-5-5"}


def last_words(request: Received) -> Any:
    """An answer that repeats the last message."""
    content = request.json["messages"][-1]["content"]
    said = content if isinstance(content, str) else content[0]["text"]
    if request.path.endswith("/messages"):
        return anthropic_text(f"<{said}>")
    return text_stream(f"<{said}>")


@af.program
async def judged(s: af.State) -> list[str]:
    s += af.system("Be a judge.")
    async with s.fork(2) as branches:
        for number, branch in enumerate(branches):
            branch += af.user(f"part {number}") + af.assistant(af.gen("judgment"))
    s += af.user(branches[0]["judgment"], " and ", branches[1]["judgment"])
    s += af.assistant(af.gen("report"))
    return [await s["report"], *[await branch["judgment"] for branch in branches]]


async def test_a_program_with_forks_and_wiring_runs_on_the_vendors_model() -> None:
    async with served_apis(last_words) as served, af.session(served.ws_url) as flow:
        assert await flow.run(judged) == ["<<part 0> and <part 1>>", "<part 0>", "<part 1>"]
    assert {one.headers["authorization"] for one in served.vendor.received} == {f"Bearer {SECRET}"}
    assert {one.json["model"] for one in served.vendor.received} == {"gpt-4.1-mini"}


async def test_a_server_has_no_batches() -> None:
    async with served_apis([]) as served, af.session(served.ws_url) as flow:
        with pytest.raises(NotSupported) as raised:
            flow.map(judged, [()], batch=True)
    assert raised.value.param == "batch"
    assert served.vendor.received == []


async def test_the_fields_of_a_turn_take_one_call_at_the_vendor() -> None:
    """The server's interpreter tells the generator the rest of the turn (speculation)."""
    answers = [text_stream("Name: Ada\nJob: engineer\nEnd")]
    async with served_apis(answers) as served, af.session(served.ws_url) as flow:
        s = flow.state()
        s += af.user("Who?")
        s += af.assistant("Name: ", af.gen("name", stop="\n"), "\nJob: ", af.gen("job", stop="\n"))
        assert [await s["name"], await s["job"]] == ["Ada", "engineer"]
        assert s["job"].usage.saved_calls == 1
    assert len(served.vendor.received) == 1


async def test_a_program_uses_an_engine_and_a_vendor() -> None:
    engine = FakeEngine()
    async with fake_server(last_words) as vendor, AsyncExitStack() as stack:
        backend = backend_of(vendor, "openai:gpt-4.1-mini", "error")
        gpt = ApiModel("gpt", await stack.enter_async_context(open_backend_generator(backend)))

        @asynccontextmanager
        async def opening() -> AsyncIterator[Models]:
            async with engine.open_client() as client:
                yield Models([EngineModel("own", client, TEMPLATE), gpt])

        server = await stack.enter_async_context(running_server(opening))
        async with af.session(server.url) as flow:
            s = flow.state()
            s += af.user("hello") + af.assistant(af.gen("draft", max_tokens=4))
            other = flow.state(model="gpt")
            other += af.user(s["draft"]) + af.assistant(af.gen("review"))
            s += af.user(other["review"]) + af.assistant(af.gen("final", max_tokens=4))
            assert await other["review"] == f"<{await s['draft']}>"
            assert await s["final"]
            assert [message["content"] for message in vendor.last.json["messages"]] == [await s["draft"]]


async def test_a_session_has_the_models_under_their_served_names() -> None:
    async with served_apis(last_words, BOTH) as served, af.session(served.ws_url) as flow:
        for model, path in (("gpt", "/v1/chat/completions"), ("claude", "/v1/messages")):
            s = flow.state(model=model)
            s += af.user("hello") + af.assistant(af.gen("word"))
            assert await s["word"] == "<hello>"
            assert served.vendor.last.path == path
        with pytest.raises(UnknownModel):
            flow.state(model="gpt-4.1-mini")


async def test_an_alias_is_the_same_model() -> None:
    async with (
        served_apis(last_words, aliases={"gpt": ["default"]}) as served,
        af.session(served.ws_url, model="default") as flow,
    ):
        s = flow.state()
        s += af.user("hello") + af.assistant(af.gen("word"))
        assert await s["word"] == "<hello>"


async def test_parameters_that_the_model_lacks_are_refused_before_anything_is_sent() -> None:
    async with served_apis(last_words) as served, af.session(served.ws_url) as flow:
        s = flow.state()
        with pytest.raises(NotSupported) as refused:
            s += af.user("hello") + af.assistant(af.gen("word", min_tokens=3))
        assert refused.value.param == "min_tokens"
    assert served.vendor.received == []


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (WRONG_KEY, EngineFailed),
        (NO_MODEL, EngineFailed),
        (BROKEN, EngineFailed),
        (rate_limited(s=3), Overloaded),
        (Answer(b"{}", 503), Overloaded),
        (Answer(b"{}", 409), Overloaded),
    ],
)
async def test_faults_between_server_and_vendor_are_not_the_clients(answer: Any, kind: Any) -> None:
    async with served_apis([answer]) as served, af.session(served.ws_url) as flow:
        s = flow.state()
        s += af.user("hello") + af.assistant(af.gen("word"))
        with pytest.raises(kind) as failed:
            await s["word"]
        assert not isinstance(failed.value, RateLimited)
        assert SECRET not in str(failed.value)
        assert served.vendor.url not in str(failed.value)


async def test_a_vendor_that_is_gone_is_an_engine_that_is_down() -> None:
    async with served_apis([RawAnswer([])]) as served, af.session(served.ws_url) as flow:
        s = flow.state()
        s += af.user("hello") + af.assistant(af.gen("word"))
        with pytest.raises(EngineDown):
            await s["word"]


async def test_a_cancelled_state_cancels_the_call_at_the_vendor() -> None:
    hold = Hold()
    async with (
        served_apis([stream(text_chunks("one"), hold)]) as served,
        af.session(served.ws_url) as flow,
    ):
        (await begun(flow, hold)).cancel()
        await served.vendor.wait_until_gone()


async def begun(flow: af.Session, hold: Hold) -> af.State:
    """A state whose gen has begun at the vendor."""
    s = flow.state()
    s += af.user("hello") + af.assistant(af.gen("word"))
    with anyio.fail_after(20):
        await hold.reached.wait()
    return s


def keys_file(folder: Path, **limits: Any) -> Path:
    """Two tenants, of which the first has limits."""
    lines = ["[tenants.ann]", f'keys = ["{hashed_key("af-ann")}"]']
    lines += [f"{name} = {value}" for name, value in limits.items()]
    lines += ["[tenants.bob]", f'keys = ["{hashed_key("af-bob")}"]']
    path = folder / "keys.toml"
    path.write_text("\n".join(lines))
    return path


async def ask(url: str, key: str, text: str = "hello") -> af.Usage:
    """The usage of a gen."""
    async with af.session(url, api_key=key) as flow:
        s = flow.state()
        s += af.user(text) + af.assistant(af.gen("word"))
        await s["word"]
        return s["word"].usage


async def test_tokens_of_a_vendor_count_towards_the_tenants_limit(tmp_path: Path) -> None:
    tenants = Tenants(file=keys_file(tmp_path, tokens_per_minute=20))
    answers = [text_stream("a", usage=usage(30, 5)), text_stream("b")]
    async with served_apis(answers, tenants=tenants) as served:
        assert (await ask(served.ws_url, "af-ann")).prompt_tokens == 30
        with pytest.raises(RateLimited) as refused:
            await ask(served.ws_url, "af-ann")
        assert refused.value.retry_after_s is not None
        await ask(served.ws_url, "af-bob")
    assert len(served.vendor.received) == 2


async def test_a_tenant_gets_only_its_models(tmp_path: Path) -> None:
    tenants = Tenants(file=keys_file(tmp_path, models=["claude"]))
    async with served_apis(last_words, BOTH, tenants=tenants) as served:
        async with af.session(served.ws_url, api_key="af-ann") as flow:
            with pytest.raises(UnknownModel):
                flow.state(model="gpt")
        with pytest.raises(UnknownModel):
            async with af.session(served.ws_url, api_key="af-ann", model="gpt"):
                pass


async def test_stats_are_of_the_tenant_alone(tmp_path: Path) -> None:
    tenants = Tenants(file=keys_file(tmp_path))
    answers = [text_stream("a", usage=usage(30, 5)), text_stream("b", usage=usage(7, 2))]
    async with served_apis(answers, tenants=tenants) as served:
        await ask(served.ws_url, "af-ann")
        await ask(served.ws_url, "af-bob")
        async with af.session(served.ws_url, api_key="af-bob") as flow:
            stats = await flow.stats()
    assert (stats.model, stats.prompt_tokens, stats.generated_tokens) == ("gpt", 7, 2)
    assert (stats.running, stats.total_slots, stats.steps) == (None, None, None)
    assert (stats.failed_speculations, stats.hedged_calls) == (None, None)
    assert stats.cost > 0


async def test_tokens_that_no_value_took_are_counted() -> None:
    """The call goes on for a gen whose place in the turn the model does not reach."""
    words = ("Name: Ada\n", "Work: ")
    async with (
        served_apis([stream(text_chunks(*words), Hold())]) as served,
        af.session(served.ws_url) as flow,
    ):
        async with flow.state() as s:
            s += af.user("Who?")
            s += af.assistant("Name: ", af.gen("name", stop="\n"), "\nJob: ", af.gen("job", stop="\n"))
            assert await s["name"] == "Ada"
            with pytest.raises(NotSupported):
                await s["job"]
        await served.vendor.wait_until_gone()
        await served.server.service.models.until_idle()
        stats = await flow.stats()
    assert stats.generated_tokens == len(words)
    assert stats.prompt_tokens > 0


async def test_stats_are_the_sums_of_the_sessions_models() -> None:
    async with served_apis(last_words, BOTH) as served, af.session(served.ws_url, model="claude") as flow:
        usages = []
        for model in BOTH:
            s = flow.state(model=model)
            s += af.user("hello") + af.assistant(af.gen("word"))
            await s
            usages.append(s["word"].usage)
        stats = await flow.stats()
    total = usages[0] + usages[1]
    assert (stats.model, stats.prompt_tokens) == ("claude", total.prompt_tokens)
    assert (stats.generated_tokens, stats.cost) == (total.output_tokens, pytest.approx(total.cost))
    assert min([usage.output_tokens for usage in usages]) > 0


async def test_tenants_have_different_salts_where_servers_take_some(tmp_path: Path) -> None:
    tenants = Tenants(file=keys_file(tmp_path))
    async with served_apis(last_words, {"own": "compatible:m"}, tenants=tenants) as served:
        for key in ("af-ann", "af-bob", "af-ann"):
            await ask(served.ws_url, key)
    salts = [one.json["cache_salt"] for one in served.vendor.received]
    assert salts[0] == salts[2] != salts[1]
    assert "ann" not in salts[0]


async def test_running_requests_count_towards_the_tenants_limit(tmp_path: Path) -> None:
    tenants = Tenants(file=keys_file(tmp_path, max_unfinished=1))
    hold = Hold()
    answers = [stream(text_chunks("one"), hold, ending()), text_stream("two")]
    async with served_apis(answers, tenants=tenants) as served, anyio.create_task_group() as group:
        group.start_soon(ask, served.ws_url, "af-ann")
        with anyio.fail_after(20):
            await hold.reached.wait()
        with pytest.raises(RateLimited):
            await ask(served.ws_url, "af-ann")
        await ask(served.ws_url, "af-bob")
        hold.go_on()


async def test_a_call_that_was_left_is_charged_by_estimate(tmp_path: Path) -> None:
    tenants = Tenants(file=keys_file(tmp_path, tokens_per_minute=40))
    hold = Hold()
    async with served_apis([stream(text_chunks("word " * 100), hold)], tenants=tenants) as served:
        async with af.session(served.ws_url, api_key="af-ann") as flow:
            await begun(flow, hold)
        await served.vendor.wait_until_gone()
        await served.server.service.models.until_idle()
        with pytest.raises(RateLimited):
            await ask(served.ws_url, "af-ann")


async def test_a_call_that_was_left_is_in_the_statistics(tmp_path: Path) -> None:
    tenants = Tenants(file=keys_file(tmp_path))
    hold = Hold()
    async with served_apis([stream(text_chunks("word " * 100), hold)], tenants=tenants) as served:
        async with af.session(served.ws_url, api_key="af-ann") as flow:
            (await begun(flow, hold)).cancel()
            await served.vendor.wait_until_gone()
            await served.server.service.models.until_idle()
            stats = await flow.stats()
        async with af.session(served.ws_url, api_key="af-bob") as flow:
            others = await flow.stats()
    assert stats.generated_tokens == 125
    assert stats.prompt_tokens > 0
    assert stats.cost > 0
    assert (others.generated_tokens, others.cost) == (0, 0)


async def ask_over_http(url: str, key: str, max_tokens: int = 10) -> httpx2.Response:
    """The answer to a request."""
    body = {"model": "gpt", "messages": [{"role": "user", "content": "hello"}], "max_tokens": max_tokens}
    async with httpx2.AsyncClient(timeout=30) as client:
        headers = {"authorization": f"Bearer {key}"}
        return await client.post(f"{url}/v1/chat/completions", json=body, headers=headers)


async def stats_of(served: Served, key: str) -> af.Stats:
    """The statistics of a key's tenant."""
    async with af.session(served.ws_url, api_key=key) as flow:
        return await flow.stats()


async def test_a_tenant_has_a_limit_of_costs(tmp_path: Path) -> None:
    """An output token costs 10 microdollars: 100 of them are nearly all of the limit."""
    tenants = Tenants(file=keys_file(tmp_path, max_cost_per_day=0.0015))
    answers = [
        text_stream(word, usage=usage(30, output)) for word, output in (("a", 100), ("b", 5), ("c", 5))
    ]
    async with served_apis(answers, tenants=tenants) as served:
        first = await ask_over_http(served.url, "af-ann", 100)
        assert (first.status_code, first.headers["x-ratelimit-limit-cost"]) == (200, "0.001500")
        assert float(first.headers["x-ratelimit-remaining-cost"]) == pytest.approx(0.00047, abs=1e-5)
        refused = await ask_over_http(served.url, "af-ann", 60)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")
        assert refused.json()["error"]["param"] == "max_cost_per_day"
        assert float(refused.headers["retry-after"]) > 0
        assert len(served.vendor.received) == 1
        # A call that may cost less, and another tenant.
        assert (await ask_over_http(served.url, "af-ann", 1)).status_code == 200
        assert (await ask_over_http(served.url, "af-bob", 1000)).status_code == 200


@pytest.mark.parametrize(
    "broken",
    [
        stream(text_chunks("a", "b"), done=False),
        call_stream(("c1", "look_up", ["{}"]), text=["a", "b"]),
        call_stream(("c1", "look_up", ["{}"])),
    ],
    ids=["lost", "called", "called-first"],
)
async def test_an_answer_that_breaks_is_charged_by_estimate(tmp_path: Path, broken: AnyAnswer) -> None:
    """The tenant's limit and statistics have the same costs."""
    tenants = Tenants(file=keys_file(tmp_path, max_cost_per_day=0.0015))
    answers = [broken, text_stream("c", usage=usage(30, 5))]
    async with served_apis(answers, tenants=tenants) as served:
        assert (await ask_over_http(served.url, "af-ann", 100)).status_code >= 500
        stats = await stats_of(served, "af-ann")
        assert 0 < stats.cost < 0.0005
        last = await ask_over_http(served.url, "af-ann", 100)
        assert last.status_code == 200
        stats = await stats_of(served, "af-ann")
        left = float(last.headers["x-ratelimit-remaining-cost"])
        assert left == pytest.approx(0.0015 - stats.cost, abs=1e-5)


async def test_a_call_that_costs_more_than_the_limit_is_never_sent(tmp_path: Path) -> None:
    tenants = Tenants(file=keys_file(tmp_path, max_cost_per_day=0.001))
    async with served_apis([], tenants=tenants) as served:
        with pytest.raises(RateLimited) as refused:
            await ask(served.ws_url, "af-ann")
        assert (refused.value.param, refused.value.retry_after_s) == ("max_cost_per_day", None)
    assert served.vendor.received == []


async def test_calls_that_run_have_reserved_their_highest_costs(tmp_path: Path) -> None:
    tenants = Tenants(file=keys_file(tmp_path, max_cost_per_day=0.0015))
    hold = Hold()
    answers = [stream(text_chunks("one"), hold, ending()), text_stream("two")]
    async with served_apis(answers, tenants=tenants) as served, anyio.create_task_group() as group:
        group.start_soon(ask_over_http, served.url, "af-ann", 100)
        with anyio.fail_after(20):
            await hold.reached.wait()
        assert (await ask_over_http(served.url, "af-ann", 100)).status_code == 429
        hold.go_on()
        await served.server.service.models.until_idle()
        assert (await ask_over_http(served.url, "af-ann", 100)).status_code == 200


async def test_a_limit_of_costs_refuses_models_of_unknown_price(tmp_path: Path) -> None:
    tenants = Tenants(file=keys_file(tmp_path, max_cost_per_day=5))
    async with served_apis([text_stream("a")], tenants=tenants, prices={}) as served:
        refused = await ask_over_http(served.url, "af-ann")
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "model")
        assert served.vendor.received == []
        assert (await ask_over_http(served.url, "af-bob")).status_code == 200


async def test_a_revoked_tenants_call_is_cancelled(tmp_path: Path) -> None:
    path = keys_file(tmp_path)
    hold = Hold()
    async with (
        served_apis([stream(text_chunks("one"), hold)], tenants=Tenants(file=path)) as served,
        af.session(served.ws_url, api_key="af-ann") as flow,
    ):
        s = await begun(flow, hold)
        path.write_text(f'[tenants.bob]\nkeys = ["{hashed_key("af-bob")}"]\n')
        await served.server.service.reload_tenants()
        await served.vendor.wait_until_gone()
        with pytest.raises(af.AgentflowError):
            await s["word"]


async def test_the_page_learns_that_an_api_has_no_scheduler_to_watch() -> None:
    events: list[Event] = []
    async with served_apis([]) as served, connect(f"{served.ws_url}/v1/session") as socket:
        await socket.send(encode(Hello(VERSION), binary=True))
        await socket.send(encode(Ops(1, (ops.Watch(1), ops.GetStats(2))), binary=True))
        read = server_frames().decode
        with anyio.fail_after(20):
            while len(events) < 2:
                frame = read(await socket.recv())
                events += frame.events if isinstance(frame, Events) else ()
    watched = next(event for event in events if isinstance(event, Watched))
    assert watched.error is not None
    assert watched.error.code == "not_supported"
    assert any(isinstance(event, StatsReply) for event in events)
