"""The request router in Ray Serve: a deployment of two replicas that serves chats."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator

import pytest

pytest.importorskip("ray.serve", reason="needs the extra cluster")

import anyio
import ray
from ray import serve
from ray.serve.config import RequestRouterConfig
from support.ray_nodes import HEAD, NODE, SETTINGS

pytestmark = pytest.mark.full  # Serve takes ten seconds to start

ROUTER = "agentflow.cluster.ray.request_router.PrefixTreeRouter"
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
        for name, value in SETTINGS.items():
            patched.setenv(name, value)
        ray.init(**NODE, log_to_driver=False, _node_ip_address=HEAD)
        try:
            yield serve.run(Chats.bind(), route_prefix=None).options(stream=True)
        finally:
            serve.shutdown()
            ray.shutdown()


def ask(handle, text: str, **fields):
    """The answer to a chat: the process, and "end" when it ends."""
    messages = [{"role": "user", "content": text}]
    return handle.chat.remote({"messages": messages, **fields}, {"headers": {}})


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
