"""Two `agentflow serve` processes with one Redis, one of which is killed in the middle of its work."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import httpx2
import pytest
from support.process_template import start_python
from support.redis_server import redis_server
from support.server.http_clients import only_asyncio
from websockets.asyncio.client import connect
from websockets.typing import Subprotocol

from agentflow.server.tenants.keys import hashed_key

pytestmark = pytest.mark.anyio
anyio_backend = pytest.fixture(only_asyncio)
KEY = "af-ann"


# `agentflow serve` on the deterministic engine, which makes no more steps after a line is read.
CHILD = """
import sys
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
import anyio
from support.fake_engine import TEMPLATE, FakeEngine
from agentflow.cli.main import main
from agentflow.server.models import open_models as module
from agentflow.server.models.models import EngineModel, Models
from agentflow.server.stores import fronts

@asynccontextmanager
async def open_models(models, *, gate, **options):
    engine = FakeEngine()

    async def pause_when_told():
        await anyio.to_thread.run_sync(sys.stdin.readline, abandon_on_cancel=True)
        engine.gate.allow(0)
        print("paused", flush=True)

    async with engine.open_client() as client, anyio.create_task_group() as group:
        group.start_soon(pause_when_told)
        yield Models([EngineModel("fake", client, TEMPLATE, gate=gate)], gate=gate)
        group.cancel_scope.cancel()

module.open_models = open_models
fronts.LIFE_MS, fronts.BEAT_S = 3_000, 0.5
sys.exit(main(["serve", "--port", "0", "--model", "fake=openai:none", *sys.argv[1:]]))
"""


@dataclass
class Served:
    """A server. ``url``: of its websockets."""

    process: subprocess.Popen[str]
    url: str = ""

    def read_until(self, text: str) -> str:
        assert self.process.stdout is not None
        seen = ""
        while text not in seen:
            line = self.process.stdout.readline()
            assert line, seen
            seen += line
        return seen

    def pause(self) -> None:
        """The engine makes no more steps."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        self.read_until("paused")


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[tuple[Served, Served]]:
    keys = tmp_path / "keys.toml"
    keys.write_text(f'[tenants.ann]\nkeys = ["{hashed_key(KEY)}"]\nrequests_per_minute = 14\n')
    variables = {name: value for name, value in os.environ.items() if not name.startswith("AGENTFLOW_")}
    variables |= {"OPENAI_API_KEY": "unused"}
    streams: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with ExitStack() as stack:
        redis = stack.enter_context(redis_server(tmp_path))
        command = ["-c", CHILD, "--keys-file", keys, "--redis-url", redis.url, "--front-name"]
        found: list[Served] = []
        for name in "ab":  # both load at the same time
            process = stack.enter_context(start_python(*command, name, env=variables, text=True, **streams))
            stack.callback(process.kill)
            found.append(Served(process))
        for server in found:
            ready = server.read_until("Anthropic's at")
            server.url = "ws://" + ready.partition("ws://")[2].split()[0]
        yield found[0], found[1]


def client_of(url: str) -> httpx2.AsyncClient:
    http_url, headers = url.replace("ws", "http", 1), {"Authorization": f"Bearer {KEY}"}
    return httpx2.AsyncClient(base_url=http_url, headers=headers, timeout=30)


async def test_stored_objects_survive_a_killed_server(servers: tuple[Served, Served]) -> None:
    first, second = servers
    asked = {"model": "fake", "input": "What do plants make?", "max_output_tokens": 4}
    async with client_of(first.url) as here, client_of(second.url) as there:
        began_s = anyio.current_time()
        talk = (await here.post("/v1/conversations", json={})).json()["id"]
        kept = (await here.post("/v1/responses", json=asked | {"conversation": talk})).json()
        program = (await here.post("/v1/programs", json={})).json()["id"]
        for output in ("done", "pending"):
            placeholder = {"name": "o", "in_out": "out", "semantic_var_id": output}
            body: dict[str, Any] = {"prompt": "Say {{o}}", "placeholders": [placeholder]}
            assert (await here.post(f"/v1/programs/{program}/submit", json=body)).status_code == 200
            if output == "done":
                value = (await here.get(f"/v1/programs/{program}/variables/done")).json()["value"]
                first.pause()
        running = (await here.post("/v1/responses", json=asked | {"background": True})).json()
        assert (await there.get(f"/v1/responses/{running['id']}")).json()["status"] == "queued"
        ticket = (await here.post("/v1/session-ticket")).json()["ticket"]
        first.process.kill()
        first.process.wait()

        assert (await there.get(f"/v1/responses/{kept['id']}")).json() == kept
        assert len((await there.get(f"/v1/conversations/{talk}/items")).json()["data"]) == 2
        protocols = [Subprotocol("agentflow.v2"), Subprotocol(f"agentflow.ticket.{ticket}")]
        async with connect(f"{second.url}/v1/session", subprotocols=protocols):
            pass
        later = asked | {"previous_response_id": kept["id"], "input": "Why?"}
        assert (await there.post("/v1/responses", json=later)).status_code == 200
        with anyio.fail_after(20):
            while True:  # until the key of the killed server expires, it does not answer
                lost = await there.get(f"/v1/responses/{running['id']}")
                if lost.status_code == 200 and lost.json()["status"] == "failed":
                    break
                assert lost.status_code in (200, 503)
                await anyio.sleep(0.05)  # noqa: TID251 - another process has no event
        assert lost.json()["error"]["type"] == "engine_down"
        assert (await there.get(f"/v1/programs/{program}/variables/done")).json()["value"] == value
        pending = await there.get(f"/v1/programs/{program}/variables/pending")
        assert (pending.status_code, pending.json()["error"]["code"]) == (503, "engine_down")
        # Both servers have admitted requests within one limit.
        num_admitted = 0
        while (admitted := await there.post("/v1/responses", json=asked)).status_code == 200:
            num_admitted += 1
        assert admitted.status_code == 429
        returned = 14 * (anyio.current_time() - began_s) / 60  # more of it, the busier the machine
        assert 0 < num_admitted < 10 + returned
