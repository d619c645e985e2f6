"""Starts an engine from ``EngineOptions``: finds the model, sizes the KV pool, loads, and runs it."""

from __future__ import annotations

import dataclasses
import logging
import os
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack, asynccontextmanager, nullcontext
from pathlib import Path
from typing import Any

from msgspec.structs import asdict, replace

from agentflow.engine.client import EngineClient, running_engine
from agentflow.engine.generator.generator import EngineGenerator
from agentflow.engine.grammar.compiler.compiler import constraint_compiler
from agentflow.engine.machine.resources import devices_from, free_cuda_bytes, free_host_bytes, gpu_number
from agentflow.engine.media.reader import open_reader
from agentflow.engine.messages import Start
from agentflow.engine.models.memory_need import MemoryNeed, fitting_kv_tokens, memory_need
from agentflow.engine.models.tensor_parallel.rank_group import RankGroup
from agentflow.engine.options import EngineOptions
from agentflow.engine.process.child import StartChild, start_child_process
from agentflow.engine.process.deadlines import Deadlines
from agentflow.engine.process.shutdown_budget import ShutdownBudget
from agentflow.engine.process.supervisor import supervised_engine
from agentflow.engine.runner import ModelRunner
from agentflow.engine.scheduling.defaults import CPU_BATCH_SIZE, CPU_TOKEN_BUDGET, GPU_TOKEN_BUDGET
from agentflow.engine.scheduling.scheduler import SchedulerConfig
from agentflow.engine.store.adapter_folder import missing_adapters, named_adapters, resolve_adapter
from agentflow.engine.store.embedding_folder import check_generates, read_embedding_folder
from agentflow.engine.store.gguf.file import find_gguf, reading_once
from agentflow.engine.store.hub_names import served_name
from agentflow.engine.store.model_folder import gguf_parts, weight_files
from agentflow.engine.store.model_store import fetch_model_async, resolve_model
from agentflow.engine.text.chat_template import ChatTemplate
from agentflow.engine.text.tokenizer import Tokenizer
from agentflow.engine.text.turn_ends import all_end_ids
from agentflow.errors import BadArgument, UnknownModel

logger = logging.getLogger(__name__)

# Time limit of a load in addition to reading the weights: importing torch, compiling kernels, a cold disk.
LOAD_S = 180.0
SLOW_DISK_BYTES_PER_S = 20e6
# Tokens of one forward pass of an encoder on a CPU, which computes whole texts.
ENCODER_TOKEN_BUDGET = 512


@asynccontextmanager
async def open_engine(
    options: EngineOptions,
    shutdown: ShutdownBudget | None = None,
    start_child: StartChild = start_child_process,
) -> AsyncIterator[EngineClient]:
    """Loads the model and runs its engine within the scope. ``shutdown``: limits the time to end its process.
    ``start_child``: starts the process."""
    folder, adapters = find_model(options)
    if options.own_process:
        opening = supervised_engine(
            engine_start(options, folder),
            lambda: open_tokenizer(options, folder),
            max_unfinished=options.max_unfinished,
            deadlines=make_deadlines(options, folder),
            exits_when_down=options.exit_on_engine_failure,
            shutdown=shutdown,
            start_child=start_child,
        )
    else:
        chosen = replace(options, model=str(folder))
        opening = running_engine(lambda: load_engine(**asdict(chosen)), max_unfinished=options.max_unfinished)
    async with opening as client:
        for name, adapter in adapters.items():
            await client.load_adapter(name, adapter)
        yield client


def find_model(options: EngineOptions) -> tuple[Path, dict[str, Path]]:
    """The folder of the model, and its adapters' folders by their names. Rejects options that the model does
    not support. Raises the errors of ``resolve_model``, ``check_generates`` and ``adapter_folders``."""
    folder = resolve_model(options.model)
    if options.task == "generate":
        check_generates(folder)
    _check_divided(options)
    return folder, adapter_folders(options)


def engine_need(name: str, options: EngineOptions, folder: Path, *, on_gpu: bool) -> MemoryNeed:
    """The memory that the model in ``folder`` needs with these options. ``BadModelFolder``."""
    return memory_need(
        name,
        folder,
        options.dtype,
        options.kv_tokens,
        options.quantize,
        kv_dtype=options.kv_dtype,
        task=options.task,
        on_gpu=on_gpu,
        adapters=adapter_folders(options).values(),
        ranks=options.tensor_parallel,
    )


def _check_divided(options: EngineOptions) -> None:
    """``BadArgument`` for settings that a divided model does not support."""
    if options.tensor_parallel == 1:
        return
    if sys.platform != "linux":
        raise BadArgument("tensor_parallel needs Linux: leave it out", param="tensor_parallel")
    for is_so, feature in (
        (options.task == "embed", "makes no embeddings"),
        (bool(options.loras), "has no adapters: leave out loras, or merge one into the weights"),
    ):
        if is_so:
            raise BadArgument(f"a model with tensor_parallel {feature}", param="tensor_parallel")


def engine_start(options: EngineOptions, folder: Path, *, reports: bool = False) -> Start:
    """How to load the model in ``folder`` in a process. ``reports``: for a router."""
    # Sized once, here: after a restart the pool must have the same size.
    kv_tokens = options.kv_tokens or _kv_tokens(options, folder, "cpu")
    chosen = replace(options, model=str(folder), kv_tokens=kv_tokens)
    log_level = logging.getLogger("agentflow").getEffectiveLevel()
    return Start(f"{__name__}:{load_engine.__name__}", asdict(chosen), log_level, reports)


def open_tokenizer(options: EngineOptions, folder: Path) -> Tokenizer:
    """The tokenizer of the model in ``folder``. ``BadModelFolder``."""
    return _read_texts(options, folder)[0]


def adapter_folders(options: EngineOptions) -> dict[str, Path]:
    """The folders of the adapters to load, by name. ``BadArgument``, ``UnknownModel`` or
    ``BadModelFolder``."""
    return {name: resolve_adapter(path) for name, path in named_adapters(options.loras).items()}


def read_template(options: EngineOptions, folder: Path) -> ChatTemplate:
    """The chat template of the model in ``folder``, or the one given for it. ``BadModelFolder`` or
    ``BadArgument``."""
    return ChatTemplate.from_folder(folder, None if options.task == "embed" else options.chat_template)


def load_engine(**options: Any) -> tuple[ModelRunner, Tokenizer, SchedulerConfig]:
    """Loads an engine, in its thread or process. ``options``: the fields of ``EngineOptions``."""
    chosen = EngineOptions(**options)
    limit_spinning()
    # First: its processes import torch while this one does.
    group = RankGroup(chosen.tensor_parallel) if chosen.tensor_parallel > 1 else None
    return load_with(chosen, group)


def load_with(
    chosen: EngineOptions, group: RankGroup | None
) -> tuple[ModelRunner, Tokenizer, SchedulerConfig]:
    """Loads an engine. ``group``: the other ranks of its model, which end if this fails; None: there are
    none."""
    with ExitStack() as started:
        if group is not None:
            started.callback(group.close)
        device = chosen.device or _default_device()
        with reading_once():
            runner, tokenizer, is_paged = _load(chosen, resolve_model(chosen.model), device, group)
        started.pop_all()
    config = _config(chosen, device, is_paged=is_paged)
    batch_size = min(config.max_running, CPU_BATCH_SIZE) if device == "cpu" else config.max_running
    runner.info = dataclasses.replace(runner.info, batch_size=batch_size)
    return runner, tokenizer, config


def make_deadlines(options: EngineOptions, folder: Path) -> Deadlines:
    """Time limits of an engine process."""
    gguf = find_gguf(folder)
    names = weight_files(folder) if gguf is None else gguf_parts(gguf.name)
    files = [(folder if gguf is None else gguf.parent) / name for name in names]
    weight_bytes = sum(file.stat().st_size for file in files)
    load_s = options.load_timeout_s or LOAD_S + weight_bytes / SLOW_DISK_BYTES_PER_S
    if options.step_timeout_s is None:
        return Deadlines(load_s=load_s)
    return Deadlines(load_s=load_s, step_s=options.step_timeout_s, first_step_s=options.step_timeout_s)


def _config(options: EngineOptions, device: str, *, is_paged: bool) -> SchedulerConfig:
    if not is_paged:
        return SchedulerConfig(
            max_running=options.max_running,
            token_budget=options.token_budget
            or (ENCODER_TOKEN_BUDGET if device == "cpu" else GPU_TOKEN_BUDGET),
            policy=options.policy,
            use_cache=False,
            whole_prompts=True,
        )
    return SchedulerConfig(
        max_running=options.max_running,
        token_budget=options.token_budget or (CPU_TOKEN_BUDGET if device == "cpu" else GPU_TOKEN_BUDGET),
        policy=options.policy,
        use_cache=options.cache,
        tpot_target_ms=options.tpot_target_ms,
    )


def _load(
    options: EngineOptions, folder: Path, device: str, group: RankGroup | None
) -> tuple[ModelRunner, Tokenizer, bool]:
    """The last result: whether its tokens have keys and values in a pool. ``group``: the processes over which
    the model is divided; None: it is not divided."""
    # Imported here, in the engine's thread, because importing torch takes seconds.
    from agentflow.engine.models.families.registry import is_native
    from agentflow.engine.models.torch_runner import TorchRunner

    # In a separate process, the size of the pool is given; the process that started this one chose it.
    num_slots = options.kv_tokens if options.own_process else None
    num_slots = num_slots or _kv_tokens(options, folder, device)
    embeds = options.task == "embed"
    tokenizer, template = _read_texts(options, folder)
    if group is not None:
        divided = _load_divided(options, folder, device, num_slots, group)
        _set_ends(divided, tokenizer, template)
        return divided, tokenizer, True
    embedding = read_embedding_folder(folder) if embeds else None
    if options.deterministic:
        from agentflow.kernels.native_library import keep_order

        keep_order()
    if embedding is not None and not (embedding.takes_last and is_native(folder)):
        from agentflow.engine.models.encoder_runner import EncoderRunner

        if options.deterministic:
            raise _has_no_order(folder)
        if options.quantize is not None:
            raise BadArgument(
                f"quantize needs a native architecture, and {folder.name} runs through transformers: leave "
                "it out, or take another model",
                param="quantize",
            )
        encoder = EncoderRunner(
            folder,
            embedding,
            device=device,
            dtype=options.dtype,
            num_slots=num_slots,
            num_threads=options.threads,
        )
        return encoder, tokenizer, False
    runner = TorchRunner(
        folder,
        device=device,
        dtype=options.dtype,
        kv_dtype=options.kv_dtype,
        quantize=options.quantize,
        num_slots=num_slots,
        num_threads=options.threads,
        embedding=embedding,
        max_running=options.max_running,
    )
    if options.deterministic and not runner.keeps_order:
        runner.close()
        raise _has_no_order(folder)
    if not embeds:
        _set_ends(runner, tokenizer, template)
    return runner, tokenizer, True


def _set_ends(runner: ModelRunner, tokenizer: Tokenizer, template: ChatTemplate) -> None:
    ends = all_end_ids(runner.info.end_token_ids, tokenizer, template)
    runner.info = dataclasses.replace(runner.info, end_token_ids=ends)


def _load_divided(
    options: EngineOptions, folder: Path, device: str, num_slots: int, group: RankGroup
) -> ModelRunner:
    from agentflow.engine.models.tensor_parallel.runner import TensorParallelRunner

    runner = TensorParallelRunner(
        folder,
        options.tensor_parallel,
        device=device,
        dtype=options.dtype,
        kv_dtype=options.kv_dtype,
        quantize=options.quantize,
        num_slots=num_slots,
        num_threads=options.threads,
        keeps_order=options.deterministic,
        group=group,
    )
    if options.deterministic and not runner.keeps_order:
        runner.close()
        raise _has_no_order(folder)
    return runner


def _read_texts(options: EngineOptions, folder: Path) -> tuple[Tokenizer, ChatTemplate]:
    with reading_once():
        template = read_template(options, folder)
        return Tokenizer.from_folder(folder, template=template, embeds=options.task == "embed"), template


def _has_no_order(folder: Path) -> BadArgument:
    return BadArgument(
        "deterministic needs a model of a native family and the native kernels, which run on x86-64 CPUs "
        f"with Linux: the sums of {folder.name} depend on the batch here",
        param="deterministic",
    )


@asynccontextmanager
async def open_generator(**options: Any) -> AsyncIterator[EngineGenerator]:
    """A generator for an interpreter: an engine and its chat template, with a compiler of constraints if it
    generates text, and a reader of images if it reads any. ``options``: the fields of ``EngineOptions``."""
    chosen = EngineOptions(**options)
    if chosen.replicas > 1:
        raise BadArgument("an embedded engine has one replica: use agentflow serve", param="replicas")
    folder = await fetch_model_async(chosen.model)
    for path in missing_adapters(chosen.loras):
        await fetch_model_async(path)
    name = served_name(chosen.model)
    chosen = replace(chosen, model=str(folder))
    template = read_template(chosen, folder)
    embeds = chosen.task == "embed"
    # The compiler first: its process loads at the same time as the model, and uses only the remaining time.
    compiling = nullcontext() if embeds else constraint_compiler()
    async with compiling as compiler, open_engine(chosen) as client:
        logger.info("%s: %s", name, client.info.weights)
        embedding = read_embedding_folder(folder) if embeds else None
        adapter = chosen.adapter
        if adapter and adapter not in client.adapters:
            raise UnknownModel(f"there is no adapter {adapter!r} among loras", param="adapter")
        name = f"{name}:{adapter}" if adapter else name
        async with open_reader(folder) if client.info.reads_media else nullcontext() as reader:
            yield EngineGenerator(
                client,
                template,
                name=name,
                adapter=adapter,
                compiler=compiler,
                embedding=embedding,
                reader=reader,
            )


def _default_device() -> str:
    limit_spinning()
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def limit_spinning() -> None:
    """Makes OpenMP's threads spin only briefly while they wait for each other. Call it before torch loads
    OpenMP. Keeps the user's settings.

    Measured with one stream on two cores of AMD Zen 3: endless spinning gave 30 tokens/s on an idle machine
    and 0.6 next to one busy process; no spinning 23 and 10; a count of 10,000 gave 35 on an idle machine.
    With AMX the count makes no difference on an idle machine, from 2,000 to 1,000,000.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "10000")


def _free_bytes(devices: Sequence[str | None]) -> int:
    on_gpus = [None if device == "cpu" else free_cuda_bytes(gpu_number(device)) for device in devices]
    return min((num_bytes for num_bytes in on_gpus if num_bytes is not None), default=free_host_bytes())


def _kv_tokens(options: EngineOptions, folder: Path, device: str) -> int:
    free_bytes = _free_bytes(devices_from(device, options.tensor_parallel))
    need = engine_need(folder.name, options, folder, on_gpu=device != "cpu")
    return fitting_kv_tokens(need, free_bytes)
