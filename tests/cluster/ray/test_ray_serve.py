"""Ray Serve: the request router of a deployment that serves chats, and the server as an application."""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx2
import pytest

pytest.importorskip("ray.serve", reason="needs the extra cluster")

import anyio
import ray
from ray import serve
from ray.serve.config import RequestRouterConfig
from ray.serve.context import _get_global_client
from ray.serve.schema import ServeDeploySchema
from support.engine.random_model import write_random_model
from support.ray_nodes import HEAD, NODE, SETTINGS

import agentflow as af
from agentflow.cli.operating.ray_serve import app, read_serve_config
from agentflow.errors import BadArgument

ROUTER = "agentflow.cluster.ray.request_router.PrefixTreeRouter"
PORT = 18_427
MEASURES_OFTEN = {
    f"RAY_SERVE_{measured}_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "0.2" for measured in ("REPLICA", "HANDLE")
}
LONG = "Once upon a time there was a router. " * 200


@serve.deployment(
    num_replicas=2,
    ray_actor_options={"num_cpus": 0.1},
    max_ongoing_requests=8,
    request_router_config=RequestRouterConfig(
        request_router_class=ROUTER, request_router_kwargs={"prompt_tokens_per_s": 1000.0}
    ),
)
class Chats:
    """Answers with its process, and ends a held answer when the next request asks for it."""

    def __init__(self) -> None:
        self.released = anyio.Event()

    async def chat(self, body: dict, raw_request_info: dict | None = None):
        yield os.getpid()
        if body.get("is_held"):
            await self.released.wait()
        if body.get("releases"):
            self.released.set()
        yield "end"


@pytest.fixture(scope="module")
def handle() -> Iterator[serve.handle.DeploymentHandle]:
    with pytest.MonkeyPatch.context() as patched:
        for name, value in {**SETTINGS, **MEASURES_OFTEN}.items():
            patched.setenv(name, value)
        ray.init(**{**NODE, "num_cpus": 4}, log_to_driver=False, _node_ip_address=HEAD)
        try:
            serve.start(http_options={"host": "127.0.0.1", "port": PORT})
            yield serve.run(Chats.bind(), name="chats", route_prefix=None).options(stream=True)
        finally:
            serve.shutdown()
            ray.shutdown()


def ask(handle, text: str, **fields):
    """The answer to a chat: the process, and "end" when it ends."""
    messages = [{"role": "user", "content": text}]
    return handle.chat.remote({"messages": messages, **fields}, {"headers": {}})


@pytest.mark.full  # Serve takes ten seconds to start
def test_requests_follow_their_prefix_and_spread(handle):
    [first, _] = ask(handle, LONG)
    for number in range(6):
        [process, _] = ask(handle, f"{LONG} {number}")
        assert process == first
    held = [ask(handle, f"{number} {LONG}", is_held=True) for number in range(4)]
    processes = [next(one) for one in held]
    assert sorted(Counter(processes).values()) == [2, 2]
    for number, process in enumerate(processes):
        # The prefix leads to the process that holds the answer.
        [followed, _] = ask(handle, f"{number} {LONG}", releases=True)
        assert followed == process
    assert [next(one) for one in held] == ["end"] * 4


@pytest.mark.full  # it loads torch
def test_the_server_is_an_application(handle, tmp_path):
    folder = write_random_model(tmp_path / "model")
    server = app({"model": f"m={folder}", "kv_tokens": 2048, "allow_anonymous": True})
    serve.run(server, name="agentflow", route_prefix="/")
    base = f"127.0.0.1:{PORT}"
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
    answer = httpx2.post(f"http://{base}/v1/chat/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] > 0

    async def session() -> str:
        async with af.session(f"ws://{base}") as flow:
            return await flow.run(greet)

    assert anyio.run(session)
    serve.delete("agentflow")


@pytest.mark.full  # it loads torch three times
def test_a_rolling_update_loses_no_request(handle, tmp_path):
    """The new version has another pool. An answer that was begun by the old one is whole."""
    folder = write_random_model(tmp_path / "model")
    url = f"http://127.0.0.1:{PORT}"
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": True}

    def deploy(kv_tokens: int) -> None:
        settings = {"model": f"m={folder}", "kv_tokens": kv_tokens, "allow_anonymous": True}
        serve.run(app(settings), name="agentflow", route_prefix="/")

    def pool() -> int:
        return httpx2.get(f"{url}/v1/replicas", timeout=60).json()["data"][0]["total_tokens"]

    def long() -> list[str]:
        asked = body | {"max_tokens": 1800, "ignore_eos": True}
        with httpx2.stream("POST", f"{url}/v1/chat/completions", json=asked, timeout=120) as answer:
            lines = []
            for line in answer.iter_lines():
                lines.append(line)
                if len(lines) > 4:
                    begun.set()
            return [line for line in lines if line]

    begun = threading.Event()
    deploy(4096)
    assert pool() == 4096
    with ThreadPoolExecutor() as threads:
        running = threads.submit(long)
        assert begun.wait(60)
        update = threads.submit(deploy, 2048)
        num_answers = 0
        while not (update.done() and pool() == 2048):
            answer = httpx2.post(f"{url}/v1/chat/completions", json=body | {"max_tokens": 2}, timeout=60)
            assert (answer.status_code, answer.text.strip().endswith("data: [DONE]")) == (200, True)
            num_answers += 1
        update.result()
        assert running.result(120)[-1] == "data: [DONE]"
    assert num_answers > 1
    serve.delete("agentflow")


@pytest.mark.full  # it loads torch twice
@pytest.mark.timeout(300)
def test_the_server_scales_with_its_load(handle, tmp_path):
    """Ray Serve deploys it from a file. Requests that wait for nothing else start another replica."""
    folder = write_random_model(tmp_path / "model")
    scaling = {"min_replicas": 1, "max_replicas": 2, "target_ongoing_requests": 1}
    soon = {"look_back_period_s": 11, "upscale_delay_s": 0, "downscale_delay_s": 0}
    application = {
        "name": "agentflow",
        "route_prefix": "/",
        "import_path": "agentflow.cli.operating.ray_serve:app",
        "args": {"model": f"m={folder}", "kv_tokens": 8192, "allow_anonymous": True},
        "deployments": [{"name": "agentflow", "autoscaling_config": scaling | soon}],
    }
    file = ServeDeploySchema.model_validate({"applications": [application]})
    _get_global_client().deploy_apps(file, _blocking=True)

    def num_running() -> int:
        [deployment] = serve.status().applications["agentflow"].deployments.values()
        return deployment.replica_states.get("RUNNING", 0)

    def answer(number: int) -> int:
        asked = {"model": "m", "prompt": f"{number}", "max_tokens": 400, "ignore_eos": True}
        return httpx2.post(f"http://127.0.0.1:{PORT}/v1/completions", json=asked, timeout=120).status_code

    assert num_running() == 1
    with ThreadPoolExecutor(4) as threads:
        while num_running() < 2:
            assert {*threads.map(answer, range(4))} == {200}
    while num_running() > 1:
        assert answer(0) == 200
    serve.delete("agentflow")


@af.program
async def greet(s: af.State) -> str:
    s += af.user("hello")
    s += af.assistant(af.gen("x", max_tokens=4))
    return await s["x"]


def test_settings_of_an_application(tmp_path):
    config = read_serve_config(
        {"model": ["a=/m/a", "b=/m/b"], "kv_tokens": 100, "cache": "false", "api_keys": ["k"], "ui": False}
    )
    assert [model.path for model in config.models] == ["/m/a", "/m/b"]
    assert [(model.kv_tokens, model.cache) for model in config.models] == [(100, False)] * 2
    assert (config.network.host, config.network.ui, config.access.api_keys) == ("0.0.0.0", False, ("k",))
    (tmp_path / "server.toml").write_text("[network]\nallow_anonymous = true\n")
    assert read_serve_config({"config": tmp_path / "server.toml"}).network.allow_anonymous
    with pytest.raises(BadArgument, match="no API keys"):
        app({})
    with pytest.raises(BadArgument, match="'no_such'"):
        app({"no_such": 1})
    with pytest.raises(BadArgument, match="kv-tokens"):
        app({"kv_tokens": 0, "allow_anonymous": True})
