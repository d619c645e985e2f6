"""How much memory there is for models: what the machine has free and the process's container allows, and
what the GPU has free.

The GPU is asked by a process of its own (``cuda_memory``): the server's never loads torch.

How many bytes the GPU has free; ``python -m agentflow.engine.machine`` prints it, or ``null`` where
torch finds no GPU.

The cgroups of Linux around this process, with which containers limit memory and CPU time.

How many processors this process can keep busy: a machine may have more than its container may use.

What the system may do with the pages of a tensor in host memory.
"""

from __future__ import annotations

import ctypes
import json
import math
import os
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import anyio

from agentflow.engine.process.child import import_path
from agentflow.errors import EngineFailed


def groups_around(controller: str, root: Path) -> Iterator[tuple[int, Path]]:
    """Version (1 or 2) and folder of each cgroup that may limit this process by ``controller``, the innermost
    first. Not all of the folders exist. Elsewhere than on Linux there are none. ``root``: where the system's
    files are."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    mounts = root / "sys/fs/cgroup"
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            version, mount = 2, mounts
        elif controller in controllers.split(","):
            # Under its own name, or (cpu,cpuacct) under that of all that are mounted together.
            version, mount = 1, mounts / controller
            if not mount.is_dir():
                mount = mounts / controllers
        else:
            continue
        # Inside a container the path may be that of the host, which is not there: its root is, then.
        parts = [part for part in path.split("/") if part not in ("", "..")]
        for depth in range(len(parts), -1, -1):
            yield version, mount.joinpath(*parts[:depth])


def usable_cpus(root: Path = Path("/")) -> int:
    """Those that its threads may run on (affinity, which cpusets narrow), but no more than the CPU quotas of
    the cgroups around it pay for, rounded up. At least 1. ``root``: where the system's files are.

    More threads than the quota pays for gain nothing: they use it up early in each period, spinning or
    working, and all of them stand still for the rest.
    """
    may_run_on = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min([may_run_on, *_quotas(root)]))


def _quotas(root: Path) -> Iterator[int]:
    for version, folder in groups_around("cpu", root):
        try:
            if version == 2:
                quota, period = (folder / "cpu.max").read_text().split()
            else:
                quota, period = (
                    (folder / name).read_text() for name in ("cpu.cfs_quota_us", "cpu.cfs_period_us")
                )
            cpus = math.ceil(int(quota) / int(period))
        except (OSError, ValueError, ZeroDivisionError):  # no such file, or "max"
            continue
        if cpus > 0:  # version 1 says -1 for no quota
            yield cpus


_NAMES = {
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    2: ("memory.max", "memory.current", "inactive_file"),
}
"""By version of cgroups: the files of limit and use, and in memory.stat what is cached."""


@dataclass(frozen=True, slots=True)
class FreeMemory:
    """``cuda_bytes``: of the GPU; None where no model runs on one."""

    host_bytes: int
    cuda_bytes: int | None = None

    def is_on_gpu(self, device: str | None) -> bool:
        """Whether a model that was given this device (None: a GPU where there is one) runs on the GPU."""
        return self.cuda_bytes is not None and device != "cpu"


async def free_memory(devices: Iterable[str | None]) -> FreeMemory:
    """What is free for models on these devices. ``EngineFailed`` where a GPU is there and does not say."""
    wants_gpu = any(device != "cpu" for device in devices)
    return FreeMemory(free_host_bytes(), await _free_cuda_bytes() if wants_gpu and _has_driver() else None)


def free_host_bytes(root: Path = Path("/")) -> int:
    """What the machine has free, or a container (cgroup) that this process is in, whichever is less.
    ``root``: where the files of the system are."""
    import psutil

    available: int = psutil.virtual_memory().available
    return min([available, *_left_in_cgroups(root)])


def _left_in_cgroups(root: Path) -> Iterator[int]:
    """Of each cgroup with a limit that this process is in, the innermost first."""
    for version, folder in groups_around("memory", root):
        left = _left_in(folder, *_NAMES[version])
        if left is not None:
            yield left


def _left_in(folder: Path, limit_name: str, used_name: str, cached_name: str) -> int | None:
    """None where there is no limit."""
    try:
        limit = int((folder / limit_name).read_text())
        used = int((folder / used_name).read_text())
        stat = (folder / "memory.stat").read_text()
    except (OSError, ValueError):  # no such file, or "max"
        return None
    # Files that were read and are not in use count as used, and go when memory is wanted.
    cached = dict(line.split(maxsplit=1) for line in stat.splitlines()).get(cached_name, "0")
    return max(0, limit - max(0, used - int(cached)))


def _has_driver() -> bool:
    """Whether torch could find an NVIDIA GPU at all; asking torch itself takes seconds."""
    try:
        ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    except OSError:
        return False
    return True


async def _free_cuda_bytes() -> int | None:
    """None where torch finds no GPU."""
    done = await anyio.run_process(
        [sys.executable, "-P", "-m", "agentflow.engine.cuda_memory"],
        check=False,
        env={**os.environ, "PYTHONPATH": import_path()},
    )
    if done.returncode:
        last = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        raise EngineFailed(f"the GPU does not say how much memory it has free: {last}")
    num_bytes: int | None = json.loads(done.stdout)
    return num_bytes
