"""Places the models of a server on a Ray cluster: room for each, and the sizes of their KV pools there."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import anyio.to_thread
from msgspec.structs import replace

from agentflow.cluster.ray.bundles import GIB, Bundle, Placement, connected_to_ray, num_gpus, placed
from agentflow.cluster.ray.node import NodeReport
from agentflow.cluster.ray.options import RayOptions
from agentflow.engine.local_engine import adapter_folders, engine_need
from agentflow.engine.models.memory_need import MemoryNeed, divide_memory
from agentflow.engine.options import EngineOptions
from agentflow.errors import BadArgument


@dataclass(frozen=True, slots=True)
class PlacedModel:
    """A model with room for its replicas."""

    replicas: list[EngineOptions]  # the options of each
    placement: Placement


@asynccontextmanager
async def placed_models(
    options: RayOptions,
    models: Mapping[str, EngineOptions],
    folders: Mapping[str, Path],
    memory_share: float,
) -> AsyncIterator[dict[str, PlacedModel]]:
    """Reserves room for all models within the scope, and looks at its nodes. No engine is started.

    Args:
        options: How to place them.
        models: The options of each model, by its name.
        folders: The folder or file of each model.
        memory_share: The part of the free memory of each node that its engines may use.

    Raises:
        BadArgument: There is no room, the device is wrong, or a node has other versions or too little memory.
        BadModelFolder: A node does not have a model.
        ServerUnreachable: There is no cluster.
    """
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(connected_to_ray(options.address))
        has_gpus = await num_gpus() > 0
        found: dict[str, EngineOptions] = {}
        placements: dict[str, Placement] = {}
        reports: dict[str, list[NodeReport]] = {}
        for name, one in models.items():
            bundle = _bundle(name, one, options, has_gpus=has_gpus)
            chosen = _chosen(one, folders[name], bundle)
            placing = placed(name, one.replicas, bundle, wait_s=options.wait_s, ranks=one.tensor_parallel)
            placement = await stack.enter_async_context(placing)
            files = [str(folder) for folder in adapter_folders(chosen).values()]
            if chosen.chat_template is not None:
                files.append(chosen.chat_template)
            reports[name] = await placement.inspect(folders[name], files, chosen.device or "cpu")
            found[name], placements[name] = chosen, placement
        ranks = {name: placement.ranks for name, placement in placements.items()}
        sizes = await anyio.to_thread.run_sync(_kv_tokens, found, ranks, reports, memory_share)
        yield {
            name: PlacedModel(
                [replace(one, kv_tokens=sizes[name]) for _ in range(models[name].replicas)], placements[name]
            )
            for name, one in found.items()
        }


def _bundle(name: str, model: EngineOptions, options: RayOptions, *, has_gpus: bool) -> Bundle:
    if model.device not in (None, "cpu", "cuda"):
        raise BadArgument(
            f"{name}: device is {model.device}, and Ray chooses the GPUs of its engines: give cuda or cpu",
            param="device",
        )
    gpus = options.gpus
    if model.device == "cpu":
        gpus = 0.0
    elif gpus is None:
        gpus = float(model.tensor_parallel) if has_gpus or model.device == "cuda" else 0.0
    cpus = options.cpus or float(model.threads or model.tensor_parallel)
    return Bundle(cpus, gpus, int((options.memory_gib or 0.0) * GIB))


def _chosen(options: EngineOptions, folder: Path, bundle: Bundle) -> EngineOptions:
    """The options for the nodes: Ray has chosen the device, and nodes have other working directories."""
    template = options.chat_template
    return replace(
        options,
        model=str(folder.absolute()),
        chat_template=None if template is None else str(Path(template).absolute()),
        device="cuda" if bundle.gpus else "cpu",
        threads=options.threads or (None if bundle.gpus else max(1, int(bundle.cpus))),
        replicas=1,
        own_process=True,
    )


def _kv_tokens(
    models: Mapping[str, EngineOptions],
    ranks: Mapping[str, int],
    reports: Mapping[str, list[NodeReport]],
    memory_share: float,
) -> dict[str, int]:
    """The size of each model's KV pool: the same for all its replicas, and small enough for the node that has
    the least memory for it. Engines on one node, or one GPU, divide its memory.

    Args:
        models: The options of each model, by its name.
        ranks: The number of bundles of each replica.
        reports: The nodes of the bundles.
        memory_share: As in ``placed_models``.
    """
    on_device: dict[tuple[str, ...], list[MemoryNeed]] = {}
    free_bytes: dict[tuple[str, ...], int] = {}
    for name, options in models.items():
        is_on_gpu = options.device == "cuda"
        need = engine_need(name, options, Path(options.model), on_gpu=is_on_gpu)
        if not is_on_gpu and (parts := ranks[name]) > 1:  # else it is the need of one rank already
            need = dataclasses.replace(
                need,
                weight_bytes=need.weight_bytes // parts,
                kv_bytes_per_token=-(-need.kv_bytes_per_token // parts),
                processes=1,
            )
        for number, report in enumerate(reports[name]):
            device = (report.node, *report.gpus) if is_on_gpu else (report.node,)
            if is_on_gpu and report.free.cuda_bytes is None:
                raise BadArgument(
                    f"torch finds no GPU on the Ray node {report.address}: install CUDA's torch"
                )
            own = dataclasses.replace(need, name=f"{name}/{number}")
            on_device.setdefault(device, []).append(own)
            gpus = range(options.tensor_parallel // ranks[name] if is_on_gpu else 0)
            free_bytes[device] = min(map(report.free.count_bytes, gpus), default=report.free.host_bytes)
    least: dict[str, float] = dict.fromkeys(models, math.inf)
    for device, needs in on_device.items():
        for label, size in divide_memory(needs, int(free_bytes[device] * memory_share)).items():
            name = label.rpartition("/")[0]
            least[name] = min(least[name], size)
    return {name: int(size) for name, size in least.items()}
