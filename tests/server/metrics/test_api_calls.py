"""The metrics of a model behind an API: the metrics of its calls, and none of an engine."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import anyio
import httpx2
import pytest
from prometheus_client.parser import text_string_to_metric_families
from support.apis.fake_server import Hold
from support.apis.openai_answers import BROKEN, ending, stream, text_chunks, text_stream, usage
from support.server.api_models import SECRET, Served, served_apis
from support.server.apis import CHAT
from support.server.http_clients import only_asyncio

from agentflow.cli.operating.top import figures, parse_metrics
from agentflow.protocol.events import Usage
from agentflow.server.metrics.api_calls import ApiCallTimes
from agentflow.server.metrics.request_times import MAX_TENANTS, OTHER_TENANTS

DASHBOARD = Path(__file__).parents[3] / "deploy/grafana/dashboards/agentflow.json"

pytestmark = pytest.mark.anyio
anyio_backend = pytest.fixture(only_asyncio)


async def ask(served: Served) -> int:
    """The status of a request."""
    async with httpx2.AsyncClient(timeout=30) as client:
        body = {**CHAT.body("Hi"), "model": "gpt"}
        return (await client.post(f"{served.url}{CHAT.path}", json=body)).status_code


async def scraped(served: Served) -> tuple[str, dict[tuple[str, ...], float]]:
    """The metrics as text, and the values by name and the sorted values of the labels."""
    async with httpx2.AsyncClient() as client:
        text = (await client.get(f"{served.url}/metrics")).text
    found = {
        (sample.name, *sorted(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    return text, found


async def test_tokens_costs_and_errors_of_the_calls_are_counted() -> None:
    answers = [text_stream("a", usage=usage(100, 10, cached=40)), text_stream("b"), BROKEN]
    async with served_apis(answers) as served:
        assert [await ask(served) for _ in range(3)] == [200, 200, 500]
        text, found = await scraped(served)
    assert found["agentflow_prompt_tokens_total", "gpt", "prompt_cache"] == 40
    assert found["agentflow_prompt_tokens_total", "computed", "gpt"] == 69
    assert found["agentflow_generated_tokens_total", "gpt"] == 13
    assert found["agentflow_tenant_tokens_total", "cached_prompt", "default", "gpt"] == 40
    assert found["agentflow_api_errors_total", "engine_failed", "gpt"] == 1
    # 69 computed tokens, 40 cached ones, and an output of 13, at the prices of the fixture.
    cost = found["agentflow_tenant_cost_dollars_total", "default", "gpt"]
    assert cost == pytest.approx((69 * 1 + 40 * 0.1 + 13 * 10) / 1e6)
    assert found["agentflow_ttft_seconds_count", "gpt"] == 2
    assert found["agentflow_tpot_seconds_count", "gpt"] == 2
    assert SECRET not in text


async def test_a_call_that_was_left_is_counted() -> None:
    hold = Hold()
    async with served_apis([stream(text_chunks("word " * 100), hold)]) as served:
        async with anyio.create_task_group() as group:
            group.start_soon(ask, served)
            with anyio.fail_after(20):
                await hold.reached.wait()
            group.cancel_scope.cancel()
        await served.vendor.wait_until_gone()
        await served.server.service.models.until_idle()
        _, found = await scraped(served)
    assert found["agentflow_api_errors_total", "cancelled", "gpt"] == 1
    assert found["agentflow_generated_tokens_total", "gpt"] == 125
    assert found["agentflow_tenant_cost_dollars_total", "default", "gpt"] > 0


async def test_figures_of_engines_are_absent() -> None:
    async with served_apis([text_stream("a")]) as served:
        assert await ask(served) == 200
        _, found = await scraped(served)
    of_model = {name for name, *labels in found if "gpt" in labels}
    for name in (
        "agentflow_engine_up",
        "agentflow_waiting_requests",
        "agentflow_kv_tokens",
        "agentflow_steps_total",
        "agentflow_queue_wait_seconds_count",
        "agentflow_engine_restarts_total",
    ):
        assert name not in of_model


async def test_f37_the_dashboard_lists_models_behind_apis() -> None:
    dashboard = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    [variable] = [one for one in dashboard["templating"]["list"] if one["name"] == "model"]
    listing = re.match(r"label_values\((\w+){", variable["query"]["query"])
    assert listing is not None
    async with served_apis([]) as served:
        _, found = await scraped(served)
    assert (listing[1], "gpt") in found


async def test_a_running_call_is_seen() -> None:
    hold = Hold()
    async with (
        served_apis([stream(text_chunks("a"), hold, ending())]) as served,
        anyio.create_task_group() as group,
    ):
        group.start_soon(ask, served)
        with anyio.fail_after(20):
            await hold.reached.wait()
        _, found = await scraped(served)
        assert found["agentflow_running_requests", "gpt"] == 1
        hold.go_on()


async def test_top_shows_a_model_without_an_engine() -> None:
    async with served_apis([text_stream("a")]) as served:
        before, _ = await scraped(served)
        assert await ask(served) == 200
        now, _ = await scraped(served)
    [model] = figures(parse_metrics(before.encode(), "", 0), parse_metrics(now.encode(), "", 1)).models
    assert (model.name, model.is_up, model.waiting, model.kv_free) == ("gpt", None, None, None)
    assert (model.running, model.output_per_s) == (0, 3)


def test_many_tenants_share_a_label() -> None:
    calls = ApiCallTimes()
    for number in range(MAX_TENANTS + 5):
        calls.call_begun(number, f"tenant {number}")
        calls.call_ended(number, Usage(1))
    assert len(calls.tokens) == MAX_TENANTS + 1
    assert calls.tokens[OTHER_TENANTS].prompt == 5


def test_an_end_without_a_begin_counts_nothing() -> None:
    calls, nothing = ApiCallTimes(), dict[str, Any]()
    calls.call_ended(1, Usage(1))
    calls.call_failed(1, "cancelled")
    assert (calls.tokens, calls.errors) == (nothing, nothing)
