"""The statistics of a tenant count each cost of a request to an API once, whichever value shows it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest
from anyio.lowlevel import checkpoint
from support.apis.fake_server import FakeServer, Hold, Script, fake_server
from support.apis.openai_answers import ending, stream, text_chunks, text_stream, usage
from support.server.api_models import PRICE, backend_of

from agentflow.backends.apis.prices import cost
from agentflow.backends.local import open_backend_generator
from agentflow.engine.tenant import ANONYMOUS
from agentflow.protocol.events import Usage
from agentflow.protocol.sampling import GenParams
from agentflow.runtime.generator import Generated, Generator, StateHint, UpcomingGen
from agentflow.server.metrics.api_calls import ApiCallTimes
from agentflow.server.models.api_model import ApiModel, TenantGenerator

pytestmark = pytest.mark.anyio

COST = cost(PRICE, Usage(2_000, 0, 10))
LINE = GenParams(temperature=0.0, stop=("\n",))


class Tenant:
    """A tenant's generator, with the counters that see its calls."""

    def __init__(self, inner: Generator[Any], vendor: FakeServer) -> None:
        self.inner = inner
        self.vendor = vendor
        model = ApiModel("gpt", inner)
        self.calls = ApiCallTimes()
        model.observe(self.calls)
        self.generator: TenantGenerator = model.generator(ANONYMOUS)

    def turn(self, text: str = "Who?") -> Any:
        """A context in which the model answers."""
        context = self.generator.open("")
        self.user(context, text)
        self.generator.begin_role(context, "assistant")
        return context

    def user(self, context: Any, text: str) -> None:
        self.generator.begin_role(context, "user")
        self.generator.fill(context, text)
        self.generator.end_role(context)

    def line(self, context: Any) -> Any:
        """The arguments of a gen whose call goes on with another one."""
        self.generator.expect(context, ["Job: ", UpcomingGen(LINE)])
        return context, LINE, lambda text: None

    async def paid(self) -> float:
        """The costs in the statistics when no request runs; they equal the metrics."""
        with anyio.fail_after(20):
            while (await self.inner.stats()).running:
                await checkpoint()
        found = (await self.generator.stats()).cost
        assert sum(self.calls.cost.values()) == pytest.approx(found)
        return found


@asynccontextmanager
async def serving(script: Script) -> AsyncIterator[Tenant]:
    async with (
        fake_server(script) as vendor,
        open_backend_generator(backend_of(vendor, "openai:gpt-4.1-mini", "error")) as inner,
    ):
        yield Tenant(inner, vendor)


def two_lines(hold: Hold) -> Any:
    """An answer that waits after its first line."""
    return stream(text_chunks("Ada\n", "J"), hold, text_chunks("ob: x"), ending(usage=usage(2_000, 10)))


async def test_a_call_that_goes_on_after_its_value_is_paid_though_nothing_takes_more() -> None:
    hold = Hold()
    async with serving([two_lines(hold)]) as tenant:
        context = tenant.turn()
        generated: Generated = await tenant.generator.generate(*tenant.line(context))
        assert generated.text == "Ada"
        hold.go_on()
        assert await tenant.paid() == pytest.approx(COST)
        tenant.generator.free(context)
        assert await tenant.paid() == pytest.approx(COST)


async def test_a_call_that_is_left_after_its_value_is_paid() -> None:
    hold = Hold()
    async with serving([two_lines(hold)]) as tenant:
        context = tenant.turn()
        await tenant.generator.generate(*tenant.line(context))
        assert (await tenant.generator.stats()).cost == 0
        tenant.generator.free(context)
        assert 0 < await tenant.paid() < COST


async def test_a_call_that_is_cancelled_while_a_fork_shares_it_is_paid_once() -> None:
    hold = Hold()
    whole = stream(text_chunks("A"), hold, text_chunks("da\nJob: x"), ending(usage=usage(2_000, 10)))
    async with serving([whole]) as tenant:
        context = tenant.turn()
        async with anyio.create_task_group() as group:
            group.start_soon(tenant.generator.generate, *tenant.line(context))
            with anyio.fail_after(20):
                await hold.reached.wait()
            [fork] = await tenant.generator.fork(context, 1)
            group.cancel_scope.cancel()
        tenant.generator.free(context)
        hold.go_on()
        await tenant.paid()
        generated = await tenant.generator.generate(*tenant.line(fork))
        assert (generated.text, generated.usage.cost) == ("Ada", pytest.approx(COST))
        assert await tenant.paid() == pytest.approx(COST)
        assert len(tenant.vendor.received) == 1


async def test_a_request_that_warms_a_prefix_is_paid_once() -> None:
    answer = text_stream("a", usage=usage(2_000, 10))
    async with serving([answer, answer]) as tenant:
        context = tenant.generator.open("")
        tenant.user(context, "Plants live on light. " * 400)
        tenant.generator.hint(context, StateHint(forks=2))
        await tenant.vendor.wait_for_requests(1)
        assert await tenant.paid() == pytest.approx(COST)
        [fork] = await tenant.generator.fork(context, 1)
        tenant.generator.begin_role(fork, "assistant")
        generated = await tenant.generator.generate(fork, GenParams(), lambda text: None)
        assert generated.usage.cost > COST
        assert await tenant.paid() == pytest.approx(2 * COST)
