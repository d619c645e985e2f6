"""``ModelRunner`` for a model that several processes compute together."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from agentflow.engine.batch import Batch, BatchOutput
from agentflow.engine.machine.resources import gpu_number, usable_cpus
from agentflow.engine.models.config import read_folder
from agentflow.engine.models.device import check_fp8, device_named, kernels_on
from agentflow.engine.models.families.registry import FAMILIES, is_native, read_config
from agentflow.engine.models.tensor_parallel.joining import (
    collective_for,
    join,
    join_over_tcp,
    open_store,
    prepare,
)
from agentflow.engine.models.tensor_parallel.rank_group import LOST_RANK_S, LoadPart, RankGroup
from agentflow.engine.models.tensor_parallel.steps import StepWriter
from agentflow.engine.models.torch_runner import TorchRunner
from agentflow.engine.models.vision.loading import TOWERS
from agentflow.engine.models.weights.cuts import check_divides
from agentflow.engine.runner import AcceleratorFault, RunnerInfo
from agentflow.errors import BadArgument
from agentflow.kernels.native_library import keep_order
from agentflow.kernels.native_ops.shared_ranks import MAX_RANKS


class TensorParallelRunner:
    """Divides a model over ``size`` processes. This process is rank 0.

    Any failure of a rank, even a lack of memory, becomes an ``AcceleratorFault``, because the ranks then have
    different KV. The model reads no images and has no adapters.

    Args:
        folder: the model folder, or a GGUF file.
        size: the number of ranks.
        num_slots: the size of the KV pool in tokens; each rank has a part of each slot.
        device: as in ``TorchRunner``. On one machine, the first of ``size`` consecutive GPUs.
        dtype: as in ``TorchRunner``.
        kv_dtype: as in ``TorchRunner``.
        quantize: as in ``TorchRunner``.
        num_threads: CPU threads of all ranks together; None: ``usable_cpus``.
        keeps_order: as in ``native_library.keep_order``.
        group: the processes of the other ranks, if they have been started; also ended if this call fails.

    Raises:
        UnknownModel: there is no such folder.
        BadModelFolder: the model cannot be run.
        BadArgument: the model cannot be divided over ``size`` ranks, or an argument is unknown or
            unavailable.
        EngineFailed: a rank cannot be started, or it ended while it was loading.
    """

    info: RunnerInfo

    def __init__(
        self,
        folder: str | Path,
        size: int,
        *,
        num_slots: int,
        device: str | None = None,
        dtype: str = "auto",
        kv_dtype: str = "auto",
        quantize: str | None = None,
        num_threads: int | None = None,
        keeps_order: bool = False,
        group: RankGroup | None = None,
    ) -> None:
        folder = Path(folder)
        with contextlib.ExitStack() as started:
            if group is not None:
                started.callback(group.close)
            is_remote = group is not None and bool(group.host)
            devices = _devices(device, size, is_remote=is_remote)
            _check(folder, size)
            if keeps_order:
                keep_order()
            first = torch.device(devices[0])
            kernels = kernels_on(first)
            check_fp8(kernels, first, quantize=quantize, kv_dtype=kv_dtype)
            collective = collective_for(first, kernels, is_remote=is_remote)
            if group is None:
                group = RankGroup(size)
                started.callback(group.close)
            options: dict[str, Any] = {
                "folder": str(folder),
                "num_slots": num_slots,
                "dtype": dtype,
                "kv_dtype": kv_dtype,
                "quantize": quantize,
                "num_threads": max(1, (num_threads or usable_cpus()) // size),
            }
            level = logging.getLogger("agentflow").getEffectiveLevel()
            address = ""
            if is_remote:
                store, address = open_store(group.host, LOST_RANK_S)
            else:
                prepare(collective, group.file, size)
            last = LOST_RANK_S, keeps_order, level
            group.load(
                [
                    LoadPart(options | {"device": devices[i]}, i, size, collective, address, *last)
                    for i in range(1, size)
                ]
            )
            if is_remote:
                self._ranks = join_over_tcp(store, 0, size, devices[0], LOST_RANK_S, host=group.host)
            else:
                self._ranks = join(collective, group.file, 0, size, devices[0], LOST_RANK_S)
            started.callback(self._ranks.close)
            started.callback(group.close)  # runs before ``close`` of the ranks: no thread may abort them then
            group.abort_by(self._ranks.abort)
            self._runner = TorchRunner(**options, device=devices[0], ranks=self._ranks)
            other_bytes = group.wait_until_loaded()
            started.pop_all()
        self._group = group
        self._steps = StepWriter()
        info = self._runner.info
        self.info = replace(
            info,
            kv_bytes_per_token=info.kv_bytes_per_token * size,
            weight_bytes=info.weight_bytes + other_bytes,
            weights=f"{info.weights}, divided over {size} processes",
            identity=f"{info.identity}/{size}",
        )

    @property
    def keeps_order(self) -> bool:
        """See ``TorchRunner``."""
        return self._runner.keeps_order

    @property
    def pids(self) -> list[int]:
        """The process ids of the other ranks on this machine."""
        return self._group.pids

    def launch(self, batch: Batch) -> Any:
        with self._failures():
            self._group.send(self._steps.message(batch))
            return self._runner.launch(batch)

    def collect(self, handle: Any) -> BatchOutput:
        with self._failures():
            return self._runner.collect(handle)

    def close(self) -> None:
        """Ends the other ranks and frees the memory. The runner must not be used afterwards."""
        self._group.close()
        self._ranks.close()
        self._runner.close()

    @contextlib.contextmanager
    def _failures(self) -> Iterator[None]:
        try:
            yield
        except AcceleratorFault:
            raise
        except Exception as error:
            raise AcceleratorFault(self._group.lost or f"{error!r} on rank 0 of the model") from error


def _devices(device: str | None, size: int, *, is_remote: bool) -> list[str]:
    """Returns the device of each rank."""
    if size > MAX_RANKS:
        raise BadArgument(f"tensor_parallel is at most {MAX_RANKS}, not {size}", param="tensor_parallel")
    first = device_named(device)
    if first.type == "cpu":
        return ["cpu"] * size
    if is_remote:  # Ray makes only the rank's GPU visible
        return ["cuda:0"] * size
    number, count = gpu_number(device), torch.cuda.device_count()
    if number + size > count:
        raise BadArgument(
            f"tensor_parallel needs {size} GPUs from cuda:{number} on, and torch finds {count}",
            param="tensor_parallel",
        )
    return [f"cuda:{number + i}" for i in range(size)]


def _check(folder: Path, size: int) -> None:
    """Raises ``BadArgument`` if the model cannot be divided, before a process is started."""
    if not is_native(folder):
        raise BadArgument(
            f"tensor_parallel needs a native architecture, and {folder.name} runs through transformers: "
            "leave it out, or take another model",
            param="tensor_parallel",
        )
    config = read_config(folder)
    if config.architecture in TOWERS and "vision_config" in read_folder(folder)[0]:
        raise BadArgument(
            f"{folder.name} reads images, and such models cannot be divided: leave out tensor_parallel",
            param="tensor_parallel",
        )
    check_divides(config, FAMILIES[config.architecture].names, size)
