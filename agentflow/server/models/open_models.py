"""Starts a server's models: engines from their options, each in its own process, within the available memory,
and the generators of models behind an API."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import anyio.to_thread
from msgspec.structs import replace

from agentflow.cluster.ray.models import placed_models
from agentflow.cluster.ray.options import RayOptions
from agentflow.cluster.replicas.open_replicas import open_replicas
from agentflow.cluster.replicas.placing_turn import PlacingTurn
from agentflow.cluster.replicas.shares import divide_machine
from agentflow.engine.client import EngineClient
from agentflow.engine.grammar.compiler.compiler import ConstraintCompiler, constraint_compiler
from agentflow.engine.grammar.compiler.messages import CompileLimits
from agentflow.engine.local_engine import engine_need, read_template
from agentflow.engine.machine.resources import FreeMemory, devices_from, free_memory, gpu_number
from agentflow.engine.media.reader import FetchImage, MediaReader, open_reader
from agentflow.engine.models.memory_need import MemoryNeed, divide_memory
from agentflow.engine.options import EngineOptions
from agentflow.engine.process.child import StartChild, start_child_process
from agentflow.engine.process.shutdown_budget import ShutdownBudget
from agentflow.engine.simulator.recording import recording
from agentflow.engine.simulator.workload_file import open_sink, workload_name
from agentflow.engine.store.embedding_folder import read_embedding_folder
from agentflow.engine.store.model_store import resolve_model
from agentflow.engine.text.chat_template import ChatTemplate
from agentflow.errors import AgentflowError, BadArgument, BadModelFolder, EngineFailed
from agentflow.protocol.sampling import SamplingParams
from agentflow.server.config.schema import EngineConfig
from agentflow.server.image_fetcher import ImageFetcher
from agentflow.server.models.api_model import ApiModel
from agentflow.server.models.models import EngineModel, Model, Models, OpenGenerator
from agentflow.server.tenants.rate_limit import TenantGate

logger = logging.getLogger(__name__)

_WARM_UP = SamplingParams(max_tokens=2, ignore_eos=True)


@asynccontextmanager
async def open_models(
    models: Mapping[str, EngineOptions | OpenGenerator],
    *,
    memory_share: float = EngineConfig().memory_share,
    compile_limits: CompileLimits | None = None,
    gate: TenantGate | None = None,
    max_wait_s: float | None = None,
    record_to: Path | None = None,
    shutdown: ShutdownBudget | None = None,
    aliases: Mapping[str, Sequence[str]] | None = None,
    image_hosts: Sequence[str] = (),
    ray: RayOptions | None = None,
) -> AsyncIterator[Models]:
    """The models, warmed up.

    Args:
        models: the options of each model, by its name; for a model behind an API, a function that opens its
            generator.
        memory_share: the part of the free memory that all models may use.
        compile_limits: limits on the compilation of constraints.
        gate: the rate limits of tenants.
        max_wait_s: the longest expected wait of a request over HTTP; None: any.
        record_to: a file for the workload of the only model.
        shutdown: the time budget for stopping the engines.
        aliases: other names of models, by their names.
        image_hosts: the hosts whose images are fetched for models of this server, as for ``ImageFetcher``.
        ray: places the engines on a Ray cluster; None: they run on this machine.

    Raises:
        BadArgument: an invalid option, before anything is loaded.
        ModelError: an unusable model folder, before anything is loaded.
    """
    engines = {name: one for name, one in models.items() if isinstance(one, EngineOptions)}
    if record_to is not None and (len(models) > 1 or not engines):
        raise BadArgument("a workload can be recorded of one model only: serve a single model")
    async with AsyncExitStack() as stack:
        opened: dict[str, Model] = {}
        # First, because it takes little time and may fail.
        for name, one in models.items():
            if not isinstance(one, EngineOptions):
                generator = await stack.enter_async_context(one())
                opened[name] = ApiModel(name, generator, gate=gate, aliases=(aliases or {}).get(name, ()))
        compiler: ConstraintCompiler | None = None
        if engines:
            compiler = await _open_engines(
                stack,
                engines,
                opened,
                memory_share=memory_share,
                compile_limits=compile_limits,
                gate=gate,
                max_wait_s=max_wait_s,
                record_to=record_to,
                shutdown=shutdown,
                aliases=aliases or {},
                fetch=ImageFetcher(image_hosts).fetch,
                ray=ray,
            )
        yield Models([opened[name] for name in models], compiler, gate)


async def _open_engines(
    stack: AsyncExitStack,
    models: Mapping[str, EngineOptions],
    opened: dict[str, Model],
    *,
    memory_share: float,
    compile_limits: CompileLimits | None,
    gate: TenantGate | None,
    max_wait_s: float | None,
    record_to: Path | None,
    shutdown: ShutdownBudget | None,
    aliases: Mapping[str, Sequence[str]],
    fetch: FetchImage,
    ray: RayOptions | None,
) -> ConstraintCompiler:
    """Opens the models with engines into ``opened``. Returns the compiler that they share."""
    # In a thread, so that the server answers in the meantime.
    folders, templates = await anyio.to_thread.run_sync(_read_folders, models)
    start_child: dict[str, StartChild] = dict.fromkeys(models, start_child_process)
    if ray is None:
        free = await free_memory(
            device
            for one in models.values()
            for device in devices_from(one.device, one.replicas * one.tensor_parallel)
        )
        sized = await anyio.to_thread.run_sync(_sized, models, folders, memory_share, free)
    else:
        placed = await stack.enter_async_context(placed_models(ray, models, folders, memory_share))
        sized = {name: one.replicas for name, one in placed.items()}
        start_child = {name: one.placement.start_child for name, one in placed.items()}
    sink = None if record_to is None else stack.enter_context(open_sink(record_to))
    # First, so that its process loads in parallel with the models, at a lower priority.
    compiler = await stack.enter_async_context(constraint_compiler(limits=compile_limits))
    turn = PlacingTurn()
    for name, replicas in sized.items():
        options = replicas[0]
        # Ray places engines on devices of other machines, which have no names here.
        opening = open_replicas(replicas, shutdown, start_child[name], turn if ray is None else None)
        client = await stack.enter_async_context(opening)
        logger.info("%s: %s", name, client.info.weights)
        try:
            await _warm_up(client)
        except EngineFailed as error:
            raise BadModelFolder(f"{folders[name]}: a first request failed: {error}") from error
        if record_to is not None and sink is not None:
            await stack.enter_async_context(recording(client, sink, name=workload_name(record_to)))
        embedding = None
        if options.task == "embed":
            embedding = await anyio.to_thread.run_sync(read_embedding_folder, folders[name])
        reader = await _open_reader(stack, folders[name], fetch) if client.info.reads_media else None
        opened[name] = EngineModel(
            name,
            client,
            templates[name],
            reader=reader,
            compiler=compiler,
            gate=gate,
            max_wait_s=max_wait_s,
            embedding=embedding,
            aliases=aliases.get(name, ()),
        )
    return compiler


async def _open_reader(stack: AsyncExitStack, folder: Path, fetch: FetchImage) -> MediaReader | None:
    """Opens the reader of a model's images. A model whose images cannot be read is served for text."""
    reader = await stack.enter_async_context(open_reader(folder, fetch=fetch))
    if reader is not None:
        try:
            await reader.warm_up()
        except AgentflowError as error:  # requests with images fail with it, too
            logger.warning("%s: %s", folder.name, error)
    return reader


def _read_folders(models: Mapping[str, EngineOptions]) -> tuple[dict[str, Path], dict[str, ChatTemplate]]:
    folders = {name: resolve_model(options.model) for name, options in models.items()}
    return folders, {name: read_template(options, folders[name]) for name, options in models.items()}


def _sized(
    models: Mapping[str, EngineOptions], folders: Mapping[str, Path], memory_share: float, free: FreeMemory
) -> dict[str, list[EngineOptions]]:
    """The options of the replicas of each model."""
    on_host: list[MemoryNeed] = []
    on_gpus: dict[int, list[MemoryNeed]] = {}
    replicas: dict[str, Sequence[EngineOptions]] = {}
    for name, model in models.items():
        is_on_gpu = free.is_on_gpu(model.device)
        if not is_on_gpu and model.device not in (None, "cpu"):
            raise BadArgument(
                f"{name}: device is {model.device}, but torch finds no such CUDA device", param="device"
            )
        replicas[name] = divide_machine(model, {0, *free.other_cuda_bytes} if is_on_gpu else None)
        of_each = engine_need(name, model, folders[name], on_gpu=is_on_gpu)
        for number, options in enumerate(replicas[name]):
            need = dataclasses.replace(of_each, name=_replica_name(name, number, model.replicas))
            if not is_on_gpu:
                on_host.append(need)
                continue
            for device in devices_from(options.device, options.tensor_parallel):
                on_gpus.setdefault(gpu_number(device), []).append(need)
    shares = divide_memory(on_host, int(free.host_bytes * memory_share))
    for gpu, needs in on_gpus.items():
        for name, kv_tokens in divide_memory(needs, int(free.count_bytes(gpu) * memory_share)).items():
            shares[name] = min(kv_tokens, shares.get(name, kv_tokens))
    sized: dict[str, list[EngineOptions]] = {}
    for name, model in models.items():
        # Replicas have pools of one size: a request that fits into one fits into each.
        kv_tokens = min(shares[_replica_name(name, n, model.replicas)] for n in range(model.replicas))
        sized[name] = [
            replace(options, model=str(folders[name]), kv_tokens=kv_tokens, own_process=True)
            for options in replicas[name]
        ]
    return sized


def _replica_name(name: str, number: int, count: int) -> str:
    return name if count == 1 else f"{name} (replica {number})"


async def _warm_up(client: EngineClient) -> None:
    """Runs a first request, so that no client waits for parts that are initialized at first use."""
    tokenizer = client.tokenizer
    if client.info.embedding_size:
        await client.embed(tokenizer.encode_whole(["Once upon a time"])[0])
        return
    prompt = [*tokenizer.prefix_ids, *tokenizer.encode("Once upon a time")]
    await client.generate(prompt, _WARM_UP, seed=0)
