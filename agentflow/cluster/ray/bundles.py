"""Reserves room for a model's replicas on the nodes of a Ray cluster, and starts their engines there.

A *bundle* is the room of one replica: processors, GPUs and memory of one node. All bundles of a model are one
placement group: Ray reserves all of them or none, on different nodes as far as possible, and finds another
node for a bundle whose node is lost.

A model that is divided over processes (``tensor_parallel``) has all of them on one node if there is room. If
not, each rank has a bundle, on as few nodes as possible.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import signal
import socket
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import anyio
import anyio.to_thread

from agentflow.cluster.ray.child import RayChild, start_in_actor
from agentflow.cluster.ray.node import NodeReport, fingerprint, inspect_node
from agentflow.engine.messages import Start
from agentflow.errors import BadArgument, BadModelFolder, ServerUnreachable
from agentflow.version import __version__

T = TypeVar("T")

REACH_S = 5.0
"""The time to connect to the head node. Ray itself retries for minutes."""
INSPECT_S = 120.0
"""The time to look at all nodes: a node starts a process for it, which imports agentflow."""
GIB = 2**30


@dataclass(frozen=True, slots=True)
class Bundle:
    """The room of one replica."""

    cpus: float = 1.0
    gpus: float = 0.0
    memory_bytes: int = 0

    @property
    def resources(self) -> dict[str, float]:
        """The resources that it needs, by Ray's names."""
        named = {"CPU": self.cpus, "GPU": self.gpus, "memory": float(self.memory_bytes)}
        return {name: value for name, value in named.items() if value}

    def part(self, ranks: int) -> Bundle:
        """The room of one of ``ranks`` processes that share it."""
        return Bundle(self.cpus / ranks, self.gpus / ranks, self.memory_bytes // ranks)


class Placement:
    """The bundles of one model.

    Args:
        group: Ray's placement group.
        bundle: The room of one replica.
        count: The number of replicas.
        ranks: The number of bundles of each replica: its processes, if they are on different nodes.
    """

    def __init__(self, group: Any, bundle: Bundle, count: int, ranks: int = 1) -> None:
        self.ranks = ranks
        self._group = group
        self._bundle = bundle
        self._count = count
        self._free = list(range(count))  # the numbers of the replicas without an engine

    async def inspect(self, model: Path, files: Sequence[str], device: str) -> list[NodeReport]:
        """Looks at the node of each bundle: the ranks of a replica follow each other.

        Args:
            model: The model's folder or file.
            files: Other paths that the engine reads.
            device: ``cpu`` or ``cuda``.

        Raises:
            BadArgument: A node has another version of agentflow, or none.
            BadModelFolder: A node does not have these files, or has another model at this path.
        """
        reports = await _in_thread(partial(self._inspect, str(model), list(files), device))
        expected = await _in_thread(partial(fingerprint, model))
        for report in reports:
            where = f"the Ray node {report.address}"
            if report.version != __version__:
                raise BadArgument(
                    f"{where} has agentflow {report.version}, and this server {__version__}: install the "
                    "same version on all nodes"
                )
            if report.missing:
                raise BadModelFolder(
                    f"{where} has no {report.missing[0]}: models must be at the same path on all nodes, on "
                    "a shared disk or pulled on each"
                )
            if report.fingerprint != expected:
                raise BadModelFolder(f"{where} has another model at {model} than this server")
        return reports

    async def start_child(self, first: Start) -> RayChild:
        """Starts an engine in the free room of a replica. A ``StartChild``."""
        if not self._free:
            raise OSError("all of its room in the Ray cluster is in use")
        number = self._free.pop(0)
        try:
            bundles = range(number * self.ranks, (number + 1) * self.ranks)
            child = await start_in_actor(first, [partial(self._options, bundle) for bundle in bundles])
        except BaseException:
            self._free.append(number)
            raise
        child.on_end = partial(self._free.append, number)
        return child

    def _options(self, number: int) -> dict[str, Any]:
        """The arguments of Ray's ``options`` for a task or an actor that fills a bundle."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        options: dict[str, Any] = {
            "num_cpus": self._bundle.cpus,
            "num_gpus": self._bundle.gpus,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                self._group, placement_group_bundle_index=number
            ),
        }
        if self._bundle.memory_bytes:
            options["memory"] = self._bundle.memory_bytes
        return options

    def _inspect(self, model: str, files: Sequence[str], device: str) -> list[NodeReport]:
        import ray
        from ray.exceptions import GetTimeoutError, RayError

        task = ray.remote(inspect_node)
        bundles = range(self._count * self.ranks)
        options = [{"max_retries": 0, **self._options(number)} for number in bundles]
        pending = [task.options(**one).remote(model, files, device) for one in options]
        try:
            reports: list[NodeReport] = ray.get(pending, timeout=INSPECT_S)
        except GetTimeoutError:
            raise ServerUnreachable(f"the Ray nodes have not answered for {INSPECT_S:g} s") from None
        except (RayError, ImportError, RuntimeError) as error:
            why = str(error).strip().rpartition("\n")[2]
            raise BadArgument(
                f"a Ray node cannot run agentflow ({why}): install agentflow-lm[engine,cluster] in version "
                f"{__version__} on all nodes"
            ) from error
        return reports


@asynccontextmanager
async def connected_to_ray(address: str | None) -> AsyncIterator[None]:
    """Connects this process to a Ray cluster within the scope, unless it is connected.

    Args:
        address: The address of the head node, ``HOST:PORT``; None: the cluster that this machine belongs to.

    Raises:
        BadArgument: Ray is not installed, has another version than the cluster, or the address is wrong.
        ServerUnreachable: There is no cluster.
    """
    is_ours = await _in_thread(partial(_connect, address))
    _restore_sigterm()
    try:
        yield
    finally:
        if is_ours:
            import ray

            with anyio.CancelScope(shield=True):
                await _in_thread(ray.shutdown)


def _connect(address: str | None) -> bool:
    """Returns whether it has connected."""
    try:
        import ray
    except ModuleNotFoundError as error:
        raise BadArgument(
            f"cluster ray needs the package {error.name!r}: pip install 'agentflow-lm[cluster]'",
            param="cluster",
        ) from None
    from ray._private.services import canonicalize_bootstrap_address

    if ray.is_initialized():
        return False
    address = address or os.environ.get("RAY_ADDRESS") or None
    try:
        if address is None:  # the file that a cluster leaves behind when it is killed has an address, too
            address = canonicalize_bootstrap_address("auto")
        if address is not None:
            _check_reachable(address)
        ray.init(
            address=address or "auto",
            log_to_driver=False,
            logging_level=logging.ERROR,
            namespace="agentflow",
        )
    except ConnectionError as error:
        raise ServerUnreachable(
            "no Ray cluster runs on this machine: start its head with `ray start --head`, let this machine "
            "join one with `ray start --address HOST:PORT`, or give ray_address"
        ) from error
    except RuntimeError as error:
        found = re.search(r"Ray: (\S+)\s+Python: (\S+)\s.*Ray: (\S+)\s+Python: (\S+)", str(error), re.DOTALL)
        if found is None:
            raise ServerUnreachable(f"cannot use the Ray cluster: {error}") from error
        raise BadArgument(
            "the Ray cluster has Ray {} with Python {}, and this server Ray {} with Python {}: they must be "
            "the same".format(*found.groups())
        ) from error
    return True


def _restore_sigterm() -> None:
    """Restores this process's handler of SIGTERM. Ray's handler calls it, but also sets an alarm that aborts
    the process 3 s later, in the middle of its drain."""
    if threading.current_thread() is threading.main_thread():
        handler = signal.getsignal(signal.SIGTERM)
        if handler is not None:  # it was installed by Python
            signal.signal(signal.SIGTERM, handler)


async def num_gpus() -> float:
    """The GPUs of the cluster."""
    import ray

    resources = await _in_thread(ray.cluster_resources)
    return float(resources.get("GPU", 0.0))


def _check_reachable(address: str) -> None:
    host, _, port = address.rpartition(":")
    if not host or "//" in host or not port.isdecimal():
        raise BadArgument(
            f"ray_address must be HOST:PORT of the head node, not {address!r} (addresses with ray:// are of "
            "Ray's client, which cannot start engines)",
            param="ray_address",
        )
    try:
        socket.create_connection((host.strip("[]"), int(port)), REACH_S).close()
    except (OSError, OverflowError) as error:
        raise ServerUnreachable(
            f"no Ray cluster answers at {address} ({error}): check ray_address, and that the head node runs"
        ) from None


@asynccontextmanager
async def placed(
    name: str, count: int, bundle: Bundle, *, wait_s: float, ranks: int = 1
) -> AsyncIterator[Placement]:
    """Reserves room for ``count`` replicas within the scope, all of them or none. If some do not fit on one
    node, the ranks of all have separate bundles.

    Args:
        name: The name of the model, for messages.
        count: The number of replicas.
        bundle: The room of each replica.
        wait_s: The time to wait for room, on one node and then on several, in seconds.
        ranks: The number of processes of each replica.

    Raises:
        BadArgument: There is not enough room.
    """
    found = None
    if ranks == 1 or await _in_thread(partial(_fits_a_node, bundle)):
        found = await _reserved([bundle] * count, "SPREAD", wait_s)
    placement = Placement(found, bundle, count)
    if found is None and ranks > 1:
        part = bundle.part(ranks)
        found = await _reserved([part] * (count * ranks), "PACK", wait_s)
        placement = Placement(found, part, count, ranks)
    if found is None:
        raise BadArgument(await _in_thread(partial(_missing_room, name, count, bundle, ranks)))
    try:
        yield placement
    finally:
        _release(found)


async def _reserved(bundles: Sequence[Bundle], strategy: str, wait_s: float) -> Any:
    """A placement group; None if there is no room for it within ``wait_s``."""
    from ray.util import placement_group

    group = placement_group([bundle.resources for bundle in bundles], strategy=strategy)
    has_room = False
    try:
        has_room = await _in_thread(partial(group.wait, wait_s))
    finally:
        if not has_room:
            _release(group)
    return group if has_room else None


def _release(group: Any) -> None:
    from ray.util import remove_placement_group

    with contextlib.suppress(Exception):  # Ray itself may have ended
        remove_placement_group(group)


def _fits_a_node(bundle: Bundle) -> bool:
    import ray

    return any(
        all(node["Resources"].get(name, 0.0) >= amount for name, amount in bundle.resources.items())
        for node in ray.nodes()
        if node["Alive"]
    )


def _missing_room(name: str, count: int, bundle: Bundle, ranks: int) -> str:
    import ray

    total, free = ray.cluster_resources(), ray.available_resources()
    needs = ", ".join(_amount(resource, amount) for resource, amount in bundle.resources.items())
    rooms = ", ".join(
        f"{_amount(resource, free.get(resource, 0.0))} free of {_amount(resource, total.get(resource, 0.0))}"
        for resource in bundle.resources
    )
    return (
        f"the Ray cluster has no room for {count} replicas of {name}, each with {needs} on one node"
        f"{f' or in {ranks} parts' if ranks > 1 else ''}: it has "
        f"{rooms}; add nodes, or give smaller replicas, replica_cpus, replica_gpus or replica_memory_gib"
    )


def _amount(resource: str, amount: float) -> str:
    if resource == "memory":
        return f"{amount / GIB:.1f} GiB of memory"
    return f"{amount:g} {resource}{'' if amount == 1 else 's'}"


async def _in_thread(function: Callable[[], T]) -> T:
    """Runs a blocking call. If it is cancelled, the thread is left behind."""
    return await anyio.to_thread.run_sync(function, abandon_on_cancel=True, limiter=anyio.CapacityLimiter(1))
