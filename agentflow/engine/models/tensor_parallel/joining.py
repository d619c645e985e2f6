"""How the ranks of a model meet: by memory that they share, or by a store of torch.distributed.

Both are files without a name, so that nothing is left behind: the ranks get their descriptors.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

from agentflow.errors import BadArgument
from agentflow.kernels import native_ops
from agentflow.kernels.ops import Kernels
from agentflow.kernels.ranks import DistributedRanks, Ranks
from agentflow.kernels.shared_ranks import SharedRanks, shared_memory

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
    return "shared" if kernels is native_ops and chosen != "gloo" else "gloo"


def meeting_file(collective: str, size: int) -> int:
    """Returns the descriptor of the file by which ``size`` ranks meet."""
    if collective == "shared":
        return shared_memory(size)
    return os.memfd_create("agentflow-store", os.MFD_CLOEXEC)


def join(collective: str, file: int, rank: int, size: int, device: str, limit_s: float) -> Ranks:
    """Joins the group; with gloo and NCCL, waits until all ranks have. ``limit_s``: as of ``Ranks``."""
    if collective == "shared":
        return SharedRanks(file, rank, size, limit_s=limit_s)
    store = dist.FileStore(f"/proc/self/fd/{file}", size)
    return DistributedRanks(store, rank, size, device=torch.device(device), limit_s=limit_s)
