"""From options to a running engine: finds the model, sizes the KV pool, loads, and starts."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import anyio.to_thread

from agentflow.server.chat_template import ChatTemplate
from agentflow.server.core.policies import DEFAULT_POLICY
from agentflow.server.core.scheduler import SchedulerConfig
from agentflow.server.engine_client import EngineClient, running_engine
from agentflow.server.engine_generator import EngineGenerator
from agentflow.server.model_store import resolve_model
from agentflow.server.runner import ModelRunner
from agentflow.server.tokenizer import Tokenizer

DEFAULT_MODEL = "smollm2-135m"
DEFAULT_KV_TOKENS = 65_536
# Of the memory that is free when the engine starts, the KV pool takes at most this share.
MAX_MEMORY_SHARE = 0.5


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """``model``: a name or a folder. ``dtype``: ``bfloat16`` or ``float32``. ``device``: ``cpu``,
    ``cuda`` or None (CUDA where there is one). ``kv_tokens``: size of the KV pool; None: 65,536 or
    what half of the free memory holds, whichever is less. ``token_budget``: rows of one forward
    pass; None: 256 on a CPU, 4,096 on a GPU. ``num_threads``: of a CPU; None: torch's choice."""

    model: str = DEFAULT_MODEL
    dtype: str = "bfloat16"
    device: str | None = None
    kv_tokens: int | None = None
    token_budget: int | None = None
    max_running: int = 64
    num_threads: int | None = None
    policy: str = DEFAULT_POLICY
    use_cache: bool = True


@asynccontextmanager
async def open_engine(options: EngineOptions) -> AsyncIterator[EngineClient]:
    """Loads the model and runs its engine while the scope lasts."""
    folder = resolve_model(options.model)
    default_device = await anyio.to_thread.run_sync(_default_device)
    device = options.device or default_device
    config = SchedulerConfig(
        max_running=options.max_running,
        token_budget=options.token_budget or (256 if device == "cpu" else 4096),
        policy=options.policy,
        use_cache=options.use_cache,
    )

    def load() -> tuple[ModelRunner, Tokenizer]:
        # Imported here, in the engine's thread: torch takes seconds, and the loop goes on meanwhile.
        from agentflow.server.model.torch_runner import TorchRunner

        num_slots = options.kv_tokens or _fitting_kv_tokens(folder, options.dtype)
        runner = TorchRunner(
            folder, device=device, dtype=options.dtype, num_slots=num_slots, num_threads=options.num_threads
        )
        return runner, Tokenizer.from_folder(folder)

    async with running_engine(load, config) as client:
        yield client


@asynccontextmanager
async def open_generator(options: EngineOptions) -> AsyncIterator[EngineGenerator]:
    """An engine with its chat template, ready for an interpreter."""
    template = ChatTemplate.from_folder(resolve_model(options.model))
    async with open_engine(options) as client:
        yield EngineGenerator(client, template)


def _default_device() -> str:
    limit_spinning()
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def limit_spinning() -> None:
    """Threads of OpenMP spin only briefly while they wait for each other. To be called before torch
    loads OpenMP; what the user has set stays.

    Measured on two cores of AMD Zen 3, one stream: spinning for ever gave 30 tokens/s on a quiet
    machine and 0.6 beside one busy process; never spinning 23 and 10; a count of 10,000 gave 35 quiet.
    With AMX the count makes no difference on a quiet machine, from 2,000 to 1,000,000.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "10000")


def _fitting_kv_tokens(folder: Path, dtype: str) -> int:
    import psutil

    config: dict[str, int] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    heads = config.get("num_key_value_heads") or config.get("num_attention_heads", 1)
    head_size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    item_bytes = 4 if dtype == "float32" else 2
    bytes_per_token = 2 * config["num_hidden_layers"] * heads * head_size * item_bytes
    room: int = int(psutil.virtual_memory().available * MAX_MEMORY_SHARE) // bytes_per_token
    return max(1024, min(DEFAULT_KV_TOKENS, room))
