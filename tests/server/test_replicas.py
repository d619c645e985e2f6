"""Replicas over HTTP: who may see and drain them, and the answers."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx2
import pytest
from support.fake_engine import TEMPLATE
from support.fake_replicas import Replicas
from support.plain_model import plain_model_engine

from agentflow.server.app import Access, create_app
from agentflow.server.models.models import EngineModel, Models
from agentflow.server.tenants.keys import Tenants, new_key

pytestmark = pytest.mark.anyio

RIGHTS = {
    "operator": "sees_metrics = true\nmanages_adapters = true",
    "watcher": "sees_metrics = true",
    "user": "",
}


@asynccontextmanager
async def serving(replicas: Replicas, access: Access | None = None) -> AsyncIterator[httpx2.AsyncClient]:
    @asynccontextmanager
    async def open_models() -> AsyncIterator[Models]:
        async with replicas.open() as client, plain_model_engine() as single:
            yield Models([EngineModel("many", client, TEMPLATE), EngineModel("one", single, TEMPLATE)])

    app = create_app(open_models, access=access)
    async with app.router.lifespan_context(app):
        transport = httpx2.ASGITransport(app)
        async with httpx2.AsyncClient(transport=transport, base_url="http://127.0.0.1") as http:
            yield http


async def test_replicas_are_listed_and_drained() -> None:
    replicas = Replicas(2)
    async with serving(replicas) as http:
        listed = (await http.get("/v1/replicas")).json()["data"]
        assert [one["total_tokens"] for one in listed] == [600, 600]
        assert [(one["model"], one["number"], one["state"]) for one in listed] == [
            ("many", 0, "serving"),
            ("many", 1, "serving"),
        ]
        answer = await http.post("/v1/replicas/1/drain?model=many&patience_s=0")
        assert answer.status_code == 202
        await replicas.until(lambda: replicas.num_started == 3)
        await replicas.settle()
        listed = (await http.get("/v1/replicas")).json()["data"]
        assert [one["restarts"] for one in listed] == [0, 1]
        assert [one["cached_tokens"] > 0 for one in listed] == [True, False]  # 0 was measured
        for path in ("7", "-1", "x", "1" * 30):
            assert (await http.post(f"/v1/replicas/{path}/drain")).status_code == 400
        for query, status in (
            ("model=one", 400),
            ("model=none", 404),
            ("patience_s=x", 400),
            ("patience_s=inf", 400),
        ):
            assert (await http.post(f"/v1/replicas/0/drain?{query}")).status_code == status


@pytest.mark.parametrize(
    ("key", "sees", "drains"), [("operator", 200, 202), ("watcher", 200, 403), ("user", 403, 403)]
)
async def test_only_some_tenants_may_see_and_drain(tmp_path: Path, key: str, sees: int, drains: int) -> None:
    file = tmp_path / "keys.toml"
    secret, hashed = new_key()
    file.write_text(f'[tenants.{key}]\nkeys = ["{hashed}"]\n{RIGHTS[key]}\n')
    async with serving(Replicas(2), Access(Tenants(file=file))) as http:
        headers = {"authorization": f"Bearer {secret}"}
        listed = await http.get("/v1/replicas", headers=headers)
        assert listed.status_code == sees
        if sees == 200:
            assert listed.json()["may_drain"] is (drains == 202)
        assert (await http.post("/v1/replicas/0/drain", headers=headers)).status_code == drains


async def test_counters_of_a_model_count_each_process_once() -> None:
    """A replaced process begins at 0, and the other one does not."""
    replicas = Replicas(2)

    async def generated(http: httpx2.AsyncClient) -> float:
        lines = (await http.get("/metrics")).text.splitlines()
        assert 'agentflow_replica_up{model="many",replica="1"} 1.0' in lines
        assert 'agentflow_kernels{kernels="fake",model="many"} 1.0' in lines
        assert 'agentflow_replica_requests{model="many",replica="1"} 0.0' in lines
        [line] = [one for one in lines if one.startswith('agentflow_generated_tokens_total{model="many"}')]
        return float(line.split()[-1])

    async with serving(replicas) as http:
        before = await generated(http)
        assert before > 0  # the measurement of the first replica
        await http.post("/v1/replicas/1/drain?patience_s=0")
        await replicas.until(lambda: replicas.num_started == 3)
        await replicas.settle()
        assert await generated(http) == before
        await http.post("/v1/replicas/0/drain?patience_s=0")
        await replicas.until(lambda: replicas.num_started == 4)
        await replicas.settle()
        assert await generated(http) == before


async def test_a_hung_replica_hides_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentflow.cluster.replicas.replica_set.STATS_S", 0.3)
    replicas = Replicas(2)
    async with serving(replicas) as http:
        replicas.children[1].hangs = True
        replicas.is_automatic = True
        listed = (await http.get("/v1/replicas")).json()["data"]
        assert [one["state"] for one in listed] == ["serving", "serving"]
        assert listed[0]["running"] == 0
        lines = (await http.get("/metrics")).text.splitlines()
        assert 'agentflow_engine_up{model="many"} 1.0' in lines
        replicas.children[0].die()
        await replicas.until(lambda: replicas.num_started == 3)
        replicas.children[0].hangs = True  # now both
        lines = (await http.get("/metrics")).text.splitlines()
        assert 'agentflow_engine_up{model="many"} 0.0' in lines
        assert 'agentflow_engine_restarts_total{model="many"} 1.0' in lines
        for child in replicas.children.values():
            child.hangs = False
            child.wake()
