"""How much memory there is for models: what the machine has free and the process's container allows, and
what the GPU has free.

The GPU is asked by a process of its own (``cuda_memory``): the server's never loads torch.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import anyio

from agentflow.engine.cgroups import groups_around
from agentflow.engine.process.child import import_path
from agentflow.errors import EngineFailed

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
