"""The fields that a tenant's requests have in the engine, and their counts."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any

import anyio
import pytest
from support.clocks import ClockNs
from support.fake_engine import TEMPLATE, TOKENIZER, FakeEngine
from support.holds import until
from support.sent_requests import SentRequests
from support.session_peer import HangingGenerator

import agentflow as af
from agentflow.engine.generator.generator import EngineGenerator
from agentflow.engine.request import Origin
from agentflow.engine.tenant import Tenant
from agentflow.errors import NotAuthorized, Overloaded, PromptTooLong, RateLimited
from agentflow.protocol.chat import CalledTool, Message, ToolSpec
from agentflow.protocol.sampling import GenParams, SamplingParams
from agentflow.runtime.generator import SessionModels
from agentflow.runtime.task_group import open_task_group
from agentflow.server.completion.completion import completing
from agentflow.server.completion.request import CompletionRequest, TokenIds
from agentflow.server.config.limits import ServerLimits
from agentflow.server.models.models import EngineModel
from agentflow.server.tenants.rate_limit import MINUTE_NS, TenantGate
from agentflow.server.websocket.sessions import open_sessions

pytestmark = pytest.mark.anyio

TEXT = "a text of some length that is the same each time"
SHORT = GenParams(max_tokens=3, ignore_eos=True)


@asynccontextmanager
async def model_on(engine: FakeEngine, gate: TenantGate) -> AsyncIterator[EngineModel]:
    async with engine.open_client() as client:
        yield EngineModel("model", client, TEMPLATE, gate=gate)
        await engine.assert_idle()


@contextmanager
def filled(generator: EngineGenerator, text: str = TEXT) -> Iterator[Any]:
    """A context with this text."""
    context = generator.open("")
    generator.fill(context, text)
    yield context
    generator.free(context)


def left(gate: TenantGate, tenant: Tenant) -> int:
    """Tokens in the tenant's bucket."""
    return gate._accounts[tenant.name].tokens._level // MINUTE_NS


async def test_computed_and_generated_tokens_are_counted():
    tenant = Tenant("ann", tokens_per_minute=1000)
    gate = TenantGate(ClockNs())
    num_prompt = len(TOKENIZER.encode(TEXT))
    async with model_on(FakeEngine(), gate) as model:
        generator = model.generator(tenant)
        for cost in (num_prompt + 3, 3 + 1):  # the second time all but the last prompt token is cached
            with filled(generator) as context:
                before = (gate._accounts and left(gate, tenant)) or 1000
                await generator.generate(context, SHORT, lambda text: None)
                assert before - left(gate, tenant) == cost


async def test_a_select_is_counted_too():
    tenant = Tenant("ann", tokens_per_minute=1000)
    gate = TenantGate(ClockNs())
    async with model_on(FakeEngine(), gate) as model:
        generator = model.generator(tenant)
        with filled(generator) as context:
            await generator.score(context, ["yes", "no"], "token_length_normalized")
    assert 1000 - left(gate, tenant) >= len(TOKENIZER.encode(TEXT))


async def test_tokens_of_a_cancelled_generation_are_counted():
    tenant = Tenant("ann", tokens_per_minute=1000)
    gate = TenantGate(ClockNs())
    heard = anyio.Event()
    async with model_on(FakeEngine(), gate) as model:
        generator = model.generator(tenant)
        with filled(generator) as context:

            async def generate() -> None:
                await generator.complete(
                    context, SamplingParams(max_tokens=500), lambda progress: heard.set()
                )

            async with open_task_group() as group:
                group.start_soon(generate)
                await heard.wait()
                group.cancel_scope.cancel()
    assert 1000 - left(gate, tenant) > len(TOKENIZER.encode(TEXT))
    assert gate.num_unfinished(tenant) == 0


async def test_more_than_a_tenant_may_have_at_once_is_refused_and_others_are_not():
    one, other = Tenant("one", max_unfinished=2), Tenant("other", max_unfinished=2)
    engine, gate = FakeEngine(), TenantGate()
    async with model_on(engine, gate) as model:
        engine.gate.allow(0)
        request = CompletionRequest(TEXT, SHORT.resolved(), n=2)
        async with completing(model.generator(one), request) as first:
            await engine.gate.held()
            with pytest.raises(RateLimited, match=r"\b2\b"):
                model.check_admission(one)
            with pytest.raises(RateLimited):
                async with completing(model.generator(one), request):
                    pass
            model.check_admission(other)
            async with completing(model.generator(other), request) as third:
                engine.gate.open()
                assert len(await third.answers()) == 2
            assert len(await first.answers()) == 2
        model.check_admission(one)


async def test_a_tenant_that_is_gone_is_refused_in_sessions_that_go_on():
    tenants = {"ann": Tenant("ann")}

    def current(tenant: Tenant) -> Tenant:
        if tenant.name not in tenants:
            raise NotAuthorized("no such tenant any more")
        return tenants[tenant.name]

    gate = TenantGate(ClockNs(), current=current)
    async with model_on(FakeEngine(), gate) as model:
        generator = model.generator(tenants["ann"])
        with filled(generator) as context:
            await generator.generate(context, SHORT, lambda text: None)
            tenants["ann"] = Tenant("ann", requests_per_minute=1)
            await generator.generate(context, SHORT, lambda text: None)
            with pytest.raises(RateLimited, match=r"\b1\b"):
                await generator.generate(context, SHORT, lambda text: None)
            del tenants["ann"]
            with pytest.raises(NotAuthorized):
                await generator.generate(context, SHORT, lambda text: None)


async def test_share_and_priority_reach_the_engine():
    tenant = Tenant("ann", weight=2.5)
    async with model_on(FakeEngine(), TenantGate()) as model:
        requests = SentRequests()
        model.client.observe(requests)
        generator = model.generator(tenant)
        prompt = (Message("user", TEXT),)
        async with completing(
            generator, CompletionRequest(prompt, SHORT.resolved(), n=2, priority=3)
        ) as completion:
            await completion.answers()
    origins = [submit.origin for submit in requests.submits]
    assert [(origin.tenant, origin.weight, origin.priority) for origin in origins] == [("ann", 2.5, 3)] * 2


async def test_of_what_all_share_one_tenant_takes_half():
    engine, params = FakeEngine(), SamplingParams(max_tokens=2)
    one, other = Origin("one"), Origin("other")
    async with engine.open_client() as client, open_task_group() as group:
        client._max_unfinished = 4
        engine.gate.allow(0)

        async def generate(origin: Origin) -> None:
            await client.generate([5], params, seed=0, origin=origin)

        for origin in (one, one, other):
            group.start_soon(generate, origin)
        await engine.gate.held()
        with pytest.raises(Overloaded, match=r"\b2\b"):
            await generate(one)
        group.start_soon(generate, other)
        with anyio.fail_after(10):
            await until(lambda: client.num_calls == 4)
        with pytest.raises(Overloaded, match=r"\b4\b"):
            await generate(Origin("third"))
        engine.gate.open()
        await client.until_idle()
        await generate(one)
    assert not client._num_unfinished_of


async def test_of_the_sessions_too():
    generator = HangingGenerator()
    async with open_sessions(ServerLimits(max_sessions=4)) as sessions:
        for tenant in ("one", "one", "other"):
            await sessions.open(SessionModels(generator), anyio.CancelScope(), tenant=tenant)
        with pytest.raises(Overloaded, match=r"\b2\b"):
            await sessions.open(SessionModels(generator), anyio.CancelScope(), tenant="one")
        await sessions.open(SessionModels(generator), anyio.CancelScope(), tenant="other")
        with pytest.raises(Overloaded, match=r"\b4\b"):
            await sessions.open(SessionModels(generator), anyio.CancelScope(), tenant="third")
    async with open_sessions(ServerLimits(max_sessions=4)) as sessions:
        for _ in range(4):  # without keys there is only one tenant
            await sessions.open(SessionModels(generator), anyio.CancelScope())


@pytest.mark.parametrize(("tenant", "most"), [("one", 2), ("", 4)])
@pytest.mark.parametrize("turns_between", [0, 1, 2])
async def test_f29b_sessions_that_open_at_the_same_time_count_once(
    tenant: str, most: int, turns_between: int
):
    generator = HangingGenerator()
    opened: list[int] = []

    async def open_one(sessions: Any, number: int) -> None:
        for _ in range(number * turns_between):
            await anyio.lowlevel.checkpoint()
        with suppress(Overloaded):
            await sessions.open(SessionModels(generator), anyio.CancelScope(), tenant=tenant)
            opened.append(number)

    async with open_sessions(ServerLimits(max_sessions=4)) as sessions:
        async with anyio.create_task_group() as group:
            for number in range(10):
                group.start_soon(open_one, sessions, number)
        assert len(opened) == len(sessions) == most
        if turns_between:
            assert opened == list(range(most))


async def test_f37_sessions_that_end_or_never_begin_are_not_counted_any_more():
    models = SessionModels(HangingGenerator())
    async with open_sessions(ServerLimits(max_sessions=4)) as sessions:
        for _ in range(3):
            with anyio.CancelScope() as scope:
                scope.cancel()
                await sessions.open(models, anyio.CancelScope(), tenant="one")
            for session in [await sessions.open(models, anyio.CancelScope(), tenant="one") for _ in range(2)]:
                session.end()
            await sessions.wait_until_empty()
        assert not sessions._num_sessions_of


async def test_answers_are_let_in_together_or_not_at_all():
    tenant = Tenant("ann", requests_per_minute=5)
    gate = TenantGate(ClockNs())
    async with model_on(FakeEngine(), gate) as model:
        generator = model.generator(tenant)

        async def ask(n: int) -> int:
            async with completing(generator, CompletionRequest(TEXT, SHORT.resolved(), n=n)) as completion:
                return len(await completion.answers())

        assert await ask(2) == 2
        for _ in range(3):  # a refusal costs nothing
            with pytest.raises(RateLimited, match=r"\b5\b"):
                await ask(4)
        with pytest.raises(RateLimited, match=r"\b6\b"):
            await ask(6)
        assert await ask(3) == 3
    assert gate.num_unfinished(tenant) == 0


async def test_a_request_that_never_ran_is_not_counted():
    tenant = Tenant("ann", tokens_per_minute=1000)
    gate = TenantGate(ClockNs())
    async with model_on(FakeEngine(), gate) as model:
        generator = model.generator(tenant)
        model.client._max_unfinished = 0
        with filled(generator) as context:
            with pytest.raises(Overloaded):
                await generator.generate(context, SHORT, lambda text: None)
            with pytest.raises(Overloaded):
                await generator.score(context, ["yes", "no"], "token_length_normalized")
    assert left(gate, tenant) == 1000


async def test_limits_are_not_got_around_by_forks():
    """A prefix that is computed ahead of forks is no tenant's request; with limits the forks compute it."""
    limited, free = Tenant("limited", tokens_per_minute=1000), Tenant("free")
    gate = TenantGate(ClockNs())
    async with model_on(FakeEngine(), gate) as model:
        requests = SentRequests()
        model.client.observe(requests)
        for tenant in (limited, free):
            generator = model.generator(tenant)
            context = generator.open("")
            generator.fill(context, 3 * TEXT)
            for one in (context, *await generator.fork(context, 2)):
                generator.free(one)
    computed = [submit.origin.tenant for submit in requests.submits if submit.params is None]
    assert computed == ["free"]


async def test_a_prompt_of_ids_is_not_copied_for_each_answer_before_it_is_refused(monkeypatch):
    async with model_on(FakeEngine(), TenantGate()) as model:
        generator = model.generator(Tenant("ann"))
        request = CompletionRequest(TokenIds((5,) * 100_000), SHORT.resolved(), n=100)
        monkeypatch.setattr(generator, "fork", None)  # nothing may be copied
        monkeypatch.setattr(generator.limits, "check_ids", None)
        async with completing(generator, request) as completion:
            with pytest.raises(PromptTooLong, match=r"100,000.*1,024"):
                await completion.answers()


async def test_tools_and_calls_are_part_of_the_prompt():
    async with model_on(FakeEngine(), TenantGate()) as model:
        generator = model.generator(Tenant("ann"))
        tool = ToolSpec("look", "x" * 200_000, {"type": "object", "properties": {}})
        called = CalledTool("call_1", "look", '{"a": "' + "y" * 200_000 + '"}')
        call = Message("assistant", "", tool_calls=(called,))
        ask = Message("user", "Hi")
        for request in (
            CompletionRequest((ask,), SHORT.resolved(), tools=(tool,)),
            CompletionRequest((ask, call, Message("tool", "z", tool_call_id="call_1")), SHORT.resolved()),
        ):
            async with completing(generator, request) as completion:
                with pytest.raises(PromptTooLong, match="characters"):
                    await completion.answers()


async def test_a_state_does_not_take_what_nothing_could_be_generated_after():
    async with af.session(backend=FakeEngine()) as flow, flow.state() as s:
        for _ in range(100):
            s += "x" * 1000
        with pytest.raises(PromptTooLong, match="characters"):
            await s
