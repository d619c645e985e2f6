"""How the ranks of a model meet: by memory that they share, or by a store of torch.distributed.

Either is in a file without a name, so that nothing is left behind.
"""

from __future__ import annotations

import os

import torch
from torch.distributed import FileStore  # type: ignore[attr-defined]

from agentflow.errors import BadArgument
from agentflow.kernels.native_ops.shared_ranks import SharedRanks, make_room
from agentflow.kernels.platforms import Kernels
from agentflow.kernels.ranks import DistributedRanks, Ranks

COLLECTIVES = ("shared", "gloo", "nccl")


def collective_for(device: torch.device, kernels: Kernels) -> str:
    """Returns how the ranks of one machine add: through shared memory with the native kernels, else by gloo
    on CPUs and NCCL on GPUs. ``AGENTFLOW_RANKS`` may choose gloo on CPUs. Raises ``BadArgument`` if it has
    another value."""
    chosen = os.environ.get("AGENTFLOW_RANKS", "")
    if chosen not in ("", "shared", "gloo"):
        raise BadArgument(
            f"AGENTFLOW_RANKS is {chosen!r}: it must be shared or gloo", param="AGENTFLOW_RANKS"
        )
    if device.type == "cuda":
        return "nccl"
    return "shared" if kernels.name == "native" and chosen != "gloo" else "gloo"


def prepare(collective: str, file: int, size: int) -> None:
    """Makes an empty file without a name ready for ``join`` by ``size`` ranks."""
    if collective == "shared":
        make_room(file, size)


def join(collective: str, file: int, rank: int, size: int, device: str, limit_s: float) -> Ranks:
    """Joins the group; with gloo and NCCL, waits until all ranks have. ``limit_s``: as of ``Ranks``."""
    if collective == "shared":
        return SharedRanks(file, rank, size, limit_s=limit_s)
    store = FileStore(f"/proc/self/fd/{file}", size)
    return DistributedRanks(store, rank, size, device=torch.device(device), limit_s=limit_s)
