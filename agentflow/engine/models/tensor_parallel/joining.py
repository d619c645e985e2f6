"""Connects the ranks of a model: by shared memory, or by a store of torch.distributed.

On one machine, either is in an unnamed file, so that nothing is left behind. For ranks on several machines,
rank 0 has the store at a TCP address.
"""

from __future__ import annotations

import os
import socket
from datetime import timedelta

import torch
from torch.distributed import FileStore, TCPStore  # type: ignore[attr-defined]

from agentflow.errors import BadArgument
from agentflow.kernels.native_ops.shared_ranks import SharedRanks, make_room
from agentflow.kernels.platforms import Kernels
from agentflow.kernels.ranks import DistributedRanks, Ranks


def collective_for(device: torch.device, kernels: Kernels, *, is_remote: bool = False) -> str:
    """Returns how the ranks add their results: "nccl" on GPUs; on CPUs "shared" (memory) if the ranks are on
    one machine and use the native kernels, else "gloo". ``AGENTFLOW_RANKS`` may choose gloo on CPUs. Raises
    ``BadArgument`` if it has an unknown value."""
    chosen = os.environ.get("AGENTFLOW_RANKS", "")
    if chosen not in ("", "shared", "gloo"):
        raise BadArgument(
            f"AGENTFLOW_RANKS is {chosen!r}: it must be shared or gloo", param="AGENTFLOW_RANKS"
        )
    if device.type == "cuda":
        return "nccl"
    is_shared = kernels.name == "native" and chosen != "gloo" and not is_remote
    return "shared" if is_shared else "gloo"


def prepare(collective: str, file: int, size: int) -> None:
    """Prepares an empty unnamed file for ``join`` by ``size`` ranks."""
    if collective == "shared":
        make_room(file, size)


def join(collective: str, file: int, rank: int, size: int, device: str, limit_s: float) -> Ranks:
    """Joins a group on this machine; with gloo and NCCL, waits until all ranks have joined.

    Args:
        collective: How the ranks exchange data.
        file: The descriptor of the file that they share.
        rank: The number of this rank.
        size: The number of ranks.
        device: The device of this rank.
        limit_s: As in ``Ranks``.
    """
    if collective == "shared":
        return SharedRanks(file, rank, size, limit_s=limit_s)
    # The store opens this path again when it is destroyed. If the descriptor were closed by then, its number
    # could belong to another file, into which the store would write, or to a socket, which ends the process.
    # So a copy stays open until the process ends.
    store = FileStore(f"/proc/self/fd/{os.dup(file)}", size)
    return DistributedRanks(store, rank, size, device=torch.device(device), limit_s=limit_s)


def open_store(host: str, limit_s: float) -> tuple[TCPStore, str]:
    """Opens a store on this machine for ``join_over_tcp``. Returns it with its address, HOST:PORT."""
    listener = socket.create_server((host, 0))
    port = listener.getsockname()[1]
    limit = timedelta(seconds=limit_s)
    store = TCPStore(
        host, port, is_master=True, wait_for_workers=False, timeout=limit, master_listen_fd=listener.detach()
    )
    return store, f"{host}:{port}"


def join_over_tcp(
    store: TCPStore | str, rank: int, size: int, device: str, limit_s: float, *, host: str
) -> Ranks:
    """Joins a group over several machines; waits until all ranks have joined.

    Args:
        store: the store of ``open_store`` on rank 0; its address on the other ranks.
        rank: the number of this rank.
        size: the number of ranks.
        device: where the tensors are.
        limit_s: as in ``Ranks``.
        host: the address of this machine for the other ranks.
    """
    if isinstance(store, str):
        address, _, port = store.rpartition(":")
        store = TCPStore(address, int(port), timeout=timedelta(seconds=limit_s), wait_for_workers=False)
    return DistributedRanks(store, rank, size, device=torch.device(device), limit_s=limit_s, host=host)
