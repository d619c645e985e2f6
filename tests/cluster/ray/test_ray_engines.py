"""Engines in the actors of a Ray cluster: no request loses or repeats a token if parts of the cluster die."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import anyio.from_thread
import anyio.to_thread
import psutil
import pytest
from anyio.abc import TaskStatus
from msgspec.structs import replace
from support.engine.random_model import write_random_model
from support.engine_loaders import start
from support.fake_engine import TOKENIZER
from support.holds import Hold, until
from support.plain_model import alone
from support.process_engine import PLAIN, generate, progress
from support.process_template import start_python
from support.processes import has_ended
from support.ray_nodes import HEAD, SECOND
from support.server.http_clients import only_asyncio
from support.tcp_proxy import proxied

import agentflow.cluster.ray.bundles as placement_module
import agentflow.cluster.ray.child as child_module
from agentflow.cluster.ray.bundles import Bundle, Placement, connected_to_ray, placed
from agentflow.cluster.ray.host import connect_actor
from agentflow.cluster.ray.options import RayOptions
from agentflow.cluster.replicas.open_replicas import replicated_engine
from agentflow.engine.local_engine import open_engine
from agentflow.engine.models.tensor_parallel.rank_group import RANK_MODULE
from agentflow.engine.options import EngineOptions
from agentflow.engine.process.supervisor import supervised_engine
from agentflow.errors import BadArgument, BadModelFolder, ServerUnreachable
from agentflow.protocol.sampling import SamplingParams
from agentflow.server.models.open_models import open_models

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(120)]
anyio_backend = pytest.fixture(only_asyncio)


@asynccontextmanager
async def room(cluster, count: int = 2, *, wait_s: float = 20.0, **bundle) -> AsyncIterator[Placement]:
    import ray

    async with connected_to_ray(cluster.address):
        # Ray releases the room of the test before after its end.
        await until(lambda: ray.available_resources().get("CPU") == ray.cluster_resources()["CPU"])
        async with placed("a model", count, Bundle(**bundle), wait_s=wait_s) as placement:
            yield placement


async def test_a_stream_continues_whatever_is_killed_on_its_node(ray_nodes, tmp_path):
    """The engine, its actor, and an actor that is silent."""
    cluster, _ = ray_nodes
    results, ended = [], []

    async def run() -> None:
        results.append(await generate(client))

    hold = Hold(tmp_path / "hold")
    async with (
        room(cluster) as placement,
        supervised_engine(
            start(hold_at={"2": hold.path}), lambda: TOKENIZER, start_child=placement.start_child
        ) as client,
        anyio.create_task_group() as group,
    ):
        group.start_soon(run)
        for fault in ("engine", "actor", "silence"):
            await hold.reached()
            await progress(client)
            engine = psutil.Process(client.engine.pid)
            actor = engine.parent()
            ended += [engine, actor]
            before, hold = hold, Hold(tmp_path / "hold") if fault != "silence" else None
            if fault == "silence":
                actor.suspend()
            else:
                (engine if fault == "engine" else actor).kill()
            await until(lambda pid=engine.pid: client.engine.pid != pid)
            before.release()
        await until(lambda: bool(results))
        assert (await client.stats()).restarts == 3
        ended += [psutil.Process(client.engine.pid)]
    [(end, deltas)] = results
    assert (end.text, "".join(deltas)) == (PLAIN.text, PLAIN.text)
    await until(lambda: all(map(has_ended, ended)))


@pytest.mark.full  # test_engine_host shows how each end notices it, without Ray
async def test_a_stream_continues_when_the_network_splits(ray_nodes, tmp_path, monkeypatch):
    """Messages to the node are lost, then messages from it. No connection closes."""
    cluster, _ = ray_nodes
    results, proxies = [], []

    def connected_over_proxy(address: tuple[str, int], head: bytes) -> socket.socket:
        return connect_actor(("127.0.0.1", anyio.from_thread.run(group.start, serve, address)), head)

    async def serve(address: tuple[str, int], *, task_status: TaskStatus[int]) -> None:
        async with proxied(address[1], address[0]) as proxy:
            proxies.append(proxy)
            task_status.started(proxy.port)
            await anyio.sleep_forever()

    async def run() -> None:
        results.append(await generate(client))

    monkeypatch.setattr(child_module, "connect_actor", connected_over_proxy)
    hold = Hold(tmp_path / "hold")
    async with (
        room(cluster) as placement,
        anyio.create_task_group() as group,
        supervised_engine(
            start(hold_at={"2": hold.path}), lambda: TOKENIZER, start_child=placement.start_child
        ) as client,
    ):
        group.start_soon(run)
        for side in ("up", "down"):
            await hold.reached()
            await progress(client)
            engine = psutil.Process(client.engine.pid)
            for proxy in proxies:
                proxy.split(side)
            before, hold = hold, Hold(tmp_path / "hold") if side == "up" else None
            await until(lambda pid=engine.pid: client.engine.pid != pid)
            before.release()
            await until(lambda engine=engine: has_ended(engine))
        await until(lambda: bool(results))
        assert (await client.stats()).restarts == 2
        group.cancel_scope.cancel()
    dropped = [proxy.num_dropped > 0 for proxy in proxies]  # two connections of each process
    assert any(dropped[:2])
    assert any(dropped[2:4])
    assert not any(dropped[4:])
    [(end, deltas)] = results
    assert (end.text, "".join(deltas)) == (PLAIN.text, PLAIN.text)


FRONT = """
import os, signal, sys, anyio
from support.engine_loaders import start
from support.fake_engine import TOKENIZER
from agentflow.cluster.ray.bundles import Bundle, connected_to_ray, placed
from agentflow.engine.process.supervisor import supervised_engine

signal.signal(signal.SIGTERM, lambda *_: os._exit(3 + signal.alarm(0)))

async def main():
    async with (
        connected_to_ray(sys.argv[1]),
        placed("a model", 1, Bundle(), wait_s=20) as placement,
        supervised_engine(start(), lambda: TOKENIZER, start_child=placement.start_child) as client,
    ):
        print(client.engine.pid, flush=True)
        await anyio.sleep_forever()

anyio.run(main)
"""


async def test_engines_and_room_are_released_when_the_server_dies(ray_nodes):
    """The server's handler of SIGTERM does it. Ray's handler sets an alarm to abort the process after 3 s."""
    import ray
    from ray.util import placement_group_table

    cluster, _ = ray_nodes
    async with connected_to_ray(cluster.address):
        with start_python("-c", FRONT, cluster.address, stdout=subprocess.PIPE) as front:
            assert front.stdout is not None
            engine = psutil.Process(int(await anyio.to_thread.run_sync(front.stdout.readline)))
            actor = engine.parent()
            front.terminate()
            assert await anyio.to_thread.run_sync(front.wait) == 3
        await until(lambda: has_ended(engine) and has_ended(actor))
        await until(lambda: all(one["state"] == "REMOVED" for one in placement_group_table().values()))
        await until(lambda: ray.available_resources().get("CPU") == ray.cluster_resources()["CPU"])


async def test_too_little_room_is_refused_before_anything_starts(ray_nodes):
    cluster, _ = ray_nodes
    with pytest.raises(
        BadArgument, match="no room for 2 replicas of a model, each with 3 CPUs, 1 GPU"
    ) as caught:
        async with room(cluster, 2, wait_s=0.5, cpus=3, gpus=1, memory_bytes=2**30):
            raise AssertionError
    assert "0 GPUs free of 0 GPUs" in str(caught.value)


async def test_nodes_with_other_files_or_another_version_are_refused(ray_nodes, monkeypatch, tmp_path):
    cluster, _ = ray_nodes
    (tmp_path / "config.json").write_text("{}")
    async with room(cluster, 1) as placement:
        [report] = await placement.inspect(tmp_path, [], "cpu")
        assert report.address in (HEAD, SECOND)
        with pytest.raises(BadModelFolder, match=r"127\.0\.0\.\d has no /no/such/model"):
            await placement.inspect(Path("/no/such/model"), [], "cpu")
        with pytest.raises(BadModelFolder, match="has no /no/such/adapter"):
            await placement.inspect(tmp_path, ["/no/such/adapter"], "cpu")
        monkeypatch.setattr(placement_module, "fingerprint", lambda model: "another")
        with pytest.raises(BadModelFolder, match="another model"):
            await placement.inspect(tmp_path, [], "cpu")
        monkeypatch.setattr(placement_module, "__version__", "0.0.1")
        with pytest.raises(BadArgument, match=r"and this server 0\.0\.1"):
            await placement.inspect(tmp_path, [], "cpu")


async def test_another_version_of_ray_is_refused(ray_nodes, monkeypatch):
    import ray

    cluster, _ = ray_nodes
    monkeypatch.setattr(ray, "__version__", "2.0.0")
    with pytest.raises(BadArgument, match=r"and this server Ray 2\.0\.0 with Python 3"):
        async with connected_to_ray(cluster.address):
            raise AssertionError
    assert not ray.is_initialized()


@pytest.mark.parametrize("address", ["ray://127.0.0.1:10001", "127.0.0.1", "127.0.0.1:99999", "127.0.0.1:1"])
async def test_an_address_without_a_cluster_is_refused(address, monkeypatch):
    """RAY_ADDRESS is refused, too: Ray itself would retry for minutes."""
    pytest.importorskip("ray")
    error = BadArgument if address in ("ray://127.0.0.1:10001", "127.0.0.1") else ServerUnreachable
    monkeypatch.setenv("RAY_ADDRESS", address)
    for given in (address, None):
        with pytest.raises(error, match=address):
            async with connected_to_ray(given):
                raise AssertionError


async def test_ray_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(BadArgument, match=r"agentflow-lm\[cluster\]"):
        async with connected_to_ray(None):
            raise AssertionError


@pytest.mark.full  # two engines load torch
async def test_models_are_served_from_the_nodes(ray_nodes, tmp_path):
    cluster, _ = ray_nodes
    folders = {name: write_random_model(tmp_path / name) for name in "ab"}
    options = {name: EngineOptions(str(folder)) for name, folder in folders.items()}
    async with open_models(options, ray=RayOptions(cluster.address)) as models:
        for model in models:
            assert model.client.info.num_slots > 1000
            host = psutil.Process(model.client.engine.pid).parent()
            assert "ray::EngineHost" in host.name() or "ray::" in " ".join(host.cmdline())
            [ids] = model.client.tokenizer.encode_whole(["Once upon a time"])
            end = await model.client.generate(ids, SamplingParams(max_tokens=4, ignore_eos=True), seed=0)
            assert end.output_tokens == 4


@pytest.mark.full  # seven processes load torch
@pytest.mark.timeout(300)
async def test_a_model_is_divided_over_nodes(ray_nodes, tmp_path):
    """It does not fit on one. A rank that dies, or whose node is silent, ends the group, and the request goes
    on in another one."""
    import ray

    cluster, _ = ray_nodes
    folder = write_random_model(tmp_path / "model")
    options = EngineOptions(str(folder), dtype="float32", kv_tokens=1000, threads=2, device="cpu")
    params, ids = SamplingParams(max_tokens=200, ignore_eos=True), [5, 6, 7, 8]
    async with open_engine(options) as client:
        expected = await client.generate(ids, params, seed=0)
    deltas: list[str] = []
    divided = {"m": replace(options, tensor_parallel=2)}
    async with open_models(divided, ray=RayOptions(cluster.address, cpus=3.0)) as [model]:
        client = model.client

        def ranks() -> tuple[psutil.Process, psutil.Process]:
            """The engine, and the other rank, which is in another actor."""
            engine = psutil.Process(client.engine.pid)
            [rank] = [
                process
                for process in psutil.process_iter(["cmdline"])
                if RANK_MODULE in (process.info["cmdline"] or ())
                and not has_ended(process)
                and "ray::" in " ".join(process.parent().cmdline())
            ]
            return engine, rank

        nodes = {one["NodeID"]: one["Resources"] for one in ray.nodes() if one["Alive"]}
        free = ray._private.state.available_resources_per_node()
        assert {node: free[node].get("CPU", 0.0) for node in nodes} == dict.fromkeys(nodes, 0.5)
        assert (await client.generate(ids, params, seed=0)).text == expected.text
        ended: list[psutil.Process] = []
        for fault in ("killed", "silent"):
            results: list[str] = []

            async def run(results: list[str] = results) -> None:
                end = await client.generate(
                    ids, params, seed=0, on_progress=lambda progress: deltas.append(progress.text)
                )
                results.append(end.text)

            deltas.clear()
            engine, rank = ranks()
            ended += [engine, rank]
            async with anyio.create_task_group() as group:
                group.start_soon(run)
                await until(lambda: len(deltas) > 3)
                if fault == "killed":
                    rank.kill()
                else:
                    rank.parent().suspend()
                    rank.suspend()
            assert results == [expected.text]
            assert "".join(deltas) == expected.text
        assert (await client.stats()).restarts == 2
        ended += ranks()
    await until(lambda: all(map(has_ended, ended)))


async def test_requests_move_to_other_replicas_when_a_node_is_lost(ray_nodes, tmp_path):
    """Then the lost replica starts on the other node. The last test, because the node does not come back."""
    from ray.util import placement_group_table

    cluster, _ = ray_nodes
    [node] = cluster.worker_nodes
    holds = [Hold(tmp_path / f"hold {number}") for number in range(2)]
    # The measurement of the router's cost takes some steps on the first replica.
    starts = [replace(start(hold_at={"40": hold.path}), reports=True) for hold in holds]
    results: dict[int, tuple[str, list[int]]] = {}

    async def run(number: int) -> None:
        ids: list[int] = []
        params = SamplingParams(max_tokens=60, ignore_eos=True)
        end = await client.generate(
            [number] * 20, params, seed=0, on_progress=lambda progress: ids.extend(progress.token_ids)
        )
        results[number] = end.text, ids

    async with room(cluster) as placement:
        [group] = [one for one in placement_group_table().values() if one["state"] == "CREATED"]
        assert len(set(group["bundles_to_node_id"].values())) == 2
        async with (
            replicated_engine(starts, lambda: TOKENIZER, start_child=placement.start_child) as client,
            anyio.create_task_group() as group,
        ):
            for number in range(10, 18):
                group.start_soon(run, number)
            for hold in holds:
                await hold.reached()
            before = {one.pid for one in client.engine.replicas}
            assert {one.device for one in client.engine.replicas} == {f"at {HEAD}", f"at {SECOND}"}
            cluster.remove_node(node, allow_graceful=False)
            await until(lambda: any(one.state != "serving" for one in client.engine.replicas))
            for hold in holds:
                hold.release()
            await until(lambda: len(results) == 8)
            for number, (text, ids) in results.items():
                expected = alone([number] * 20, SamplingParams(max_tokens=60, ignore_eos=True))
                assert (text, ids) == (expected.text, expected.ids)
            await until(lambda: all(one.state == "serving" for one in client.engine.replicas))
            assert len(before & {one.pid for one in client.engine.replicas}) == 1
