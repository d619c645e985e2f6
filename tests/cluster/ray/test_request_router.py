"""The request router without a Ray cluster: its choices, and that its books end empty."""

from __future__ import annotations

import ast
import asyncio
import gc
import inspect
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import anyio
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.holds import until
from support.server.http_clients import only_asyncio

pytest.importorskip("ray.serve", reason="needs the extra cluster")

import ray
from ray.serve._private.common import DeploymentHandleSource, DeploymentID, ReplicaID, RequestMetadata
from ray.serve.request_router import PendingRequest, RequestRouter

from agentflow.cluster.ray.request_router import (
    EVENT_LOST_S,
    MAX_DEPTH,
    PrefixTreeRouter,
    find_program,
    output_limit,
    prompt_run,
)
from agentflow.cluster.routing.load import RoutedRequest
from agentflow.cluster.routing.text_router import MAX_RUN_BYTES

pytestmark = pytest.mark.anyio
anyio_backend = pytest.fixture(only_asyncio)

DEPLOYMENT = DeploymentID("chats", "app")
LONG = "Once upon a time there was a router. " * 200


class Replica:
    """Like Ray's ``RunningReplica``, whose actor is not asked for anything here."""

    node_id, availability_zone = "node", None

    def __init__(self, name: str, *models: str, max_ongoing_requests: int = 100, queue_len: int = 0) -> None:
        self.queue_len = queue_len
        self.replica_id = ReplicaID(name, DEPLOYMENT)
        self.multiplexed_model_ids = set(models)
        self.max_ongoing_requests = max_ongoing_requests

    async def get_queue_len(self, *, deadline_s: float) -> int:
        return self.queue_len


class Bench:
    """A router, and the requests that it sent."""

    def __init__(self, *replicas: Replica, **options) -> None:
        self.now_s = 100.0
        self.router = PrefixTreeRouter(
            deployment_id=DEPLOYMENT,
            handle_source=DeploymentHandleSource.UNKNOWN,
            use_replica_queue_len_cache=True,
        )
        options = {"prompt_tokens_per_s": 1000.0} | options
        self.router.initialize_state(clock=lambda: self.now_s, **options)
        self.router.update_replicas([*replicas])
        self.number = 0

    async def send(self, text: str, *, headers: dict | None = None, model: str = "", retry_of=None) -> tuple:
        """Returns the name of the replica, and the arguments of ``end``."""
        if retry_of is None:
            self.number += 1
            metadata = RequestMetadata("", f"request {self.number}", multiplexed_model_id=model)
            body = {"messages": [{"role": "user", "content": text}]}
            retry_of = PendingRequest([body, SimpleNamespace(headers=headers or {})], {}, metadata)
            is_retry = False
        else:
            is_retry = True
        replica = await self.router._choose_replica_for_request(retry_of, is_retry=is_retry)
        self.router.on_send_request(replica.replica_id)
        return replica.replica_id.unique_id, replica.replica_id, retry_of

    def end(self, sent: tuple) -> None:
        self.router.on_request_completed(sent[1], sent[2].metadata.internal_request_id)
        self.router.decrement_queue_len_cache(sent[1])

    def check_empty(self) -> None:
        router = self.router
        assert not router._chosen
        assert not router._sent
        assert not router._sent_at
        assert not +router._num_sent
        router._places.tree.check()
        assert not any(edge.running for edge in router._places.tree.edges())
        for load in router._places.loads._loads:
            assert (load.num_waiting, load.num_running, load.num_latency) == (0, 0, 0)
            assert load.used_tokens == pytest.approx(0)


async def test_requests_follow_their_prefix_until_waiting_costs_more():
    bench = Bench(Replica("a"), Replica("b"))
    first = await bench.send(LONG)
    bench.end(first)
    bench.now_s += 10
    sent = [await bench.send(f"{LONG} and question {number}") for number in range(8)]
    assert {one[0] for one in sent} == {first[0]}
    for one in sent:
        bench.end(one)
    # Other prompts queue there for longer than the prefix takes.
    busy = [await bench.send(f"{number} {LONG}") for number in range(8)]
    assert Counter(one[0] for one in busy) == {"a": 4, "b": 4}
    for one in busy:
        if one[0] != first[0]:
            bench.end(one)
    moved = await bench.send(f"{LONG} and another question")
    assert moved[0] != first[0]
    for one in (moved, *(one for one in busy if one[0] == first[0])):
        bench.end(one)
    bench.check_empty()


def test_the_router_fits_the_installed_ray() -> None:
    """The router's methods take the arguments of Ray's class, and of Ray's own router for ``ray.serve.llm``.
    The latter needs more packages to be imported, so its source is read."""
    source = Path(ray.__file__).parent / "llm/_internal/serve/routing_policies/prefix_aware"
    [theirs] = [
        one
        for one in ast.parse((source / "prefix_aware_router.py").read_text()).body
        if isinstance(one, ast.ClassDef)
    ]
    arguments = {
        one.name: [argument.arg for argument in one.args.args]
        for one in theirs.body
        if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    overridden = [
        name
        for name, method in vars(PrefixTreeRouter).items()
        if inspect.isfunction(method) and hasattr(RequestRouter, name)
    ]
    assert {"initialize_state", "choose_replicas", "on_request_completed", "update_replicas"} <= {*overridden}
    assert {"choose_replicas", "initialize_state"} <= arguments.keys()
    for name in set(overridden) - {"initialize_state"}:  # this one gets request_router_kwargs
        ours, given = getattr(PrefixTreeRouter, name), getattr(RequestRouter, name)
        assert [*inspect.signature(ours).parameters] == [*inspect.signature(given).parameters]
        assert inspect.iscoroutinefunction(ours) == inspect.iscoroutinefunction(given)
        assert arguments.get(name, [*inspect.signature(ours).parameters]) == [
            *inspect.signature(ours).parameters
        ]


async def test_the_oldest_prompts_leave_the_caches():
    bench = Bench(Replica("a"), Replica("b"), cache_tokens=4000)
    first = await bench.send(LONG)
    bench.end(first)
    for number in range(8):
        bench.end(await bench.send(f"{number} {LONG}"))
    assert bench.router._places.tree.num_blocks <= 2 * 4000 // 64


async def test_programs_and_multiplexed_models_prefer_their_replica():
    bench = Bench(Replica("a", "x"), Replica("b", "y"))
    for name in "pqrst":
        headers = {"X-Agentflow-Program": name}
        names = set()
        for number in range(3):
            bench.end(sent := await bench.send(f"{number}", headers=headers))
            names.add(sent[0])
        assert len(names) == 1
    for _ in range(3):
        assert (await bench.send("hello", model="x"))[0] == "a"
        assert (await bench.send("hello", model="y"))[0] == "b"
    assert (await bench.send("hello", model="on no replica"))[0] in "ab"


async def test_f37_a_multiplexed_model_that_no_replica_has_any_more_is_forgotten():
    bench = Bench(Replica("a", "m"), Replica("b"))
    sent = [await bench.send(LONG, model="m")]
    assert sent[0][0] == "a"
    bench.router.update_replicas([Replica("a"), Replica("b")])  # it was evicted
    sent += [await bench.send(f"{number} {LONG}", model="m") for number in range(3)]
    assert Counter(one[0] for one in sent) == {"a": 2, "b": 2}
    assert not bench.router._places.loads._missing
    for one in sent:
        bench.end(one)
    bench.check_empty()


async def test_a_full_replica_gets_nothing():
    bench = Bench(Replica("a", max_ongoing_requests=2), Replica("b", max_ongoing_requests=2))
    names = [(await bench.send(LONG))[0] for _ in range(4)]
    assert sorted(names) == ["a", "a", "b", "b"]


async def test_requests_of_other_handles_count():
    """Ray's lengths of queues have them."""
    bench = Bench(Replica("a", queue_len=20), Replica("b"))
    await anyio.wait_all_tasks_blocked()  # Ray asks for the lengths
    assert [(await bench.send(f"{number}"))[0] for number in range(3)] == ["b"] * 3


async def test_a_cancelled_request_leaves_nothing():
    bench = Bench(Replica("a", max_ongoing_requests=1, queue_len=1))
    await anyio.wait_all_tasks_blocked()
    async with anyio.create_task_group() as group:
        group.start_soon(bench.send, "hello")
        await until(lambda: bool(bench.router._chosen))
        group.cancel_scope.cancel()
    bench.check_empty()


async def test_a_request_without_an_end_is_given_up():
    bench = Bench(Replica("a"), Replica("b"))
    await bench.send("first")
    for _ in range(2):
        bench.now_s += EVENT_LOST_S + 10
        bench.end(await bench.send("another"))
    bench.check_empty()


async def test_a_request_that_has_ended_keeps_no_prompt():
    bench = Bench(Replica("a"))
    for number in range(3):
        bench.end(await bench.send(f"{number} {LONG}"))
    bench.check_empty()
    gc.collect()
    calls = [one for one in gc.get_objects() if isinstance(one, RoutedRequest)]
    assert not calls


EVENTS = st.lists(
    st.tuples(st.sampled_from(("send", "send", "end", "reject", "lose", "join", "wait")), st.integers(0, 40)),
    min_size=15,
    max_size=60,
)


@given(EVENTS)
def test_the_books_end_empty(events):
    """For any order of requests, rejections, ends and losses, some of them late."""

    async def run() -> None:
        bench = Bench(Replica("a"), Replica("b"))
        replicas = {name: Replica(name) for name in "ab"}
        sent: list[tuple] = []
        late: list[tuple] = []
        for event, number in events:
            chosen = sent.pop(number % len(sent)) if sent and event in ("end", "reject") else None
            if event == "send":
                sent.append(await bench.send(f"{number % 5} {LONG[: 400 * number]}"))
            elif event == "end" and chosen:
                bench.end(chosen)
            elif event == "reject" and chosen:
                # Ray tells the end of the rejected attempt when the next one was sent.
                sent.append(await bench.send("", retry_of=chosen[2]))
                late.append(chosen)
                if number % 2:
                    bench.end(late.pop())
            elif event == "lose" and len(replicas) > 1:
                name = sorted(replicas)[number % len(replicas)]
                lost = replicas.pop(name)
                if number % 2:
                    bench.router.on_replica_actor_died(lost.replica_id)
                bench.router.update_replicas([*replicas.values()])
            elif event == "join":
                replicas[f"n{number}"] = Replica(f"n{number}")
                bench.router.update_replicas([*replicas.values()])
            elif event == "wait":
                bench.now_s += number / 10
        for one in (*sent, *late):
            bench.end(one)
        bench.check_empty()

    asyncio.run(run())


def test_prompts_of_requests():
    ids = np.array([1, 2, 3], dtype=np.int32).tobytes()
    assert prompt_run([{"prompt": [1, 2, 3]}]) == ids
    assert prompt_run(["ignored", SimpleNamespace(prompt=None, input_ids=[1, 2, 3])]) == ids
    chat = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "hi"}]},
    ]
    longer = [*chat, {"role": "assistant", "content": "hello"}]
    short = prompt_run([{"messages": chat}]).rstrip(b" ")
    assert prompt_run([SimpleNamespace(messages=longer, tools=None)]).startswith(short)
    with_tools = prompt_run([{"messages": chat, "tools": [{"type": "function"}]}])
    assert with_tools != prompt_run([{"messages": chat}])
    assert prompt_run([]) == prompt_run([{"prompt": ""}])
    # Large fields of clients are cut.
    deep: object = "deepest"
    for _ in range(10 * MAX_DEPTH):
        deep = [deep]
    assert b"deepest" not in prompt_run([{"messages": [deep]}])
    assert len(prompt_run([{"prompt": "x" * (2 * MAX_RUN_BYTES)}])) == MAX_RUN_BYTES
    assert prompt_run([{"prompt": [2**70, -1]}])
    assert prompt_run([{"prompt": "\ud800"}])


def test_fields_of_requests():
    assert output_limit([{"max_tokens": 7}]) == output_limit([SimpleNamespace(max_completion_tokens=7)]) == 7
    assert output_limit([{"max_tokens": None}, {"max_tokens": True}]) == 0
    assert find_program([{"headers": {"x-session-id": "s", "X-Agentflow-Program": "p"}}]) == "p"
    assert find_program([{}, "text"]) == ""
