"""The machine's resources: processors, and the free memory of host and GPU.

A container may limit this process to less than the machine has, so the limits of Linux cgroups apply. The
server never loads torch; a child process reads the GPUs' free memory:
``python -m agentflow.engine.machine.resources 0 1`` prints a list with the bytes of two GPUs, ``null`` for a
GPU that torch does not find.
"""

from __future__ import annotations

import ctypes
import gc
import json
import math
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import anyio

from agentflow.engine.machine.child_process import import_path
from agentflow.errors import BadArgument, EngineFailed

# The files of limit and usage, and the cached part of the usage in memory.stat, by version of cgroups.
_MEMORY_FILES = {
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    2: ("memory.max", "memory.current", "inactive_file"),
}


def usable_cpus(root: Path = Path("/")) -> int:
    """Returns the number of processors that this process can keep busy: the processors in its affinity mask
    (which cpusets narrow), but at most the CPU quotas of its cgroups, rounded up. At least 1. ``root``: the
    root of the file system.

    Threads beyond the quota gain nothing: they exhaust it early in each period, and then all threads stall.
    """
    in_mask = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min([in_mask, *_quotas(root)]))


@dataclass(frozen=True, slots=True)
class FreeMemory:
    """The free memory for models."""

    host_bytes: int
    cuda_bytes: int | None = None  # on the first GPU; None if no model runs on a GPU
    other_cuda_bytes: Mapping[int, int] = field(default_factory=dict)  # on other GPUs that models use

    def is_on_gpu(self, device: str | None) -> bool:
        """Whether a model with this ``device`` option (None: a GPU if there is one) runs on the GPU."""
        return self.cuda_bytes is not None and device != "cpu"

    def count_bytes(self, gpu: int) -> int:
        """Returns the free memory of a GPU. Raises ``BadArgument`` if there is no GPU with this number."""
        found = self.other_cuda_bytes.get(gpu) if gpu else self.cuda_bytes
        if found is None:
            raise BadArgument(f"device is cuda:{gpu}, but torch finds no such GPU", param="device")
        return found


def devices_from(device: str | None, count: int) -> list[str | None]:
    """Returns the devices of ``count`` processes: consecutive GPUs from ``device`` on, or only ``"cpu"``.

    >>> devices_from("cuda:1", 3)
    ['cuda:1', 'cuda:2', 'cuda:3']
    """
    if device == "cpu":
        return [device]
    first = gpu_number(device)
    return [device, *(f"cuda:{first + number}" for number in range(1, count))]


def gpu_number(device: str | None) -> int:
    """Returns the number of the GPU in a ``device`` option other than cpu; 0 if it has no number."""
    return int((device or "").partition(":")[2] or 0)


async def free_memory(devices: Iterable[str | None]) -> FreeMemory:
    """Returns the free memory for models on these devices. Raises ``EngineFailed`` if the memory of a GPU
    cannot be read."""
    numbers = {gpu_number(device) for device in devices if device != "cpu"}
    if not numbers or not has_driver():
        return FreeMemory(free_host_bytes())
    others = sorted(numbers - {0})
    first, *rest = await _child_cuda_bytes([0, *others])
    found = {number: num for number, num in zip(others, rest, strict=True) if num is not None}
    return FreeMemory(free_host_bytes(), first, found)


def collect_garbage_rarely() -> None:
    """Excludes all current objects from garbage collection, and makes collections less frequent, because they
    pause the process. Steps and requests create few reference cycles."""
    gc.collect()
    gc.freeze()
    # Objects of older generations that are freed meanwhile delay a collection, which then visits several
    # times as many objects: while 1,000 programs start, the longest collection takes 30 to 55 ms of processor
    # time; with thresholds of 10,000 and 5, 88 to 106 ms. The oldest generation is collected equally often.
    gc.set_threshold(2_000, 5, 2_000)


def free_host_bytes(root: Path = Path("/")) -> int:
    """Returns the free memory of the machine or of a cgroup of this process, whichever is less. ``root``: the
    root of the file system."""
    import psutil

    available: int = psutil.virtual_memory().available
    return min([available, *_left_in_cgroups(root)])


def free_cuda_bytes(gpu: int = 0) -> int | None:
    """Returns the free memory of a GPU; None if there is no such GPU. Loads torch, and uses the GPU memory
    that CUDA needs."""
    import torch

    if not torch.cuda.is_available() or (gpu and gpu >= torch.cuda.device_count()):
        return None
    num_bytes: int = torch.cuda.mem_get_info(gpu)[0] if gpu else torch.cuda.mem_get_info()[0]
    return num_bytes


def _cgroups(controller: str, root: Path) -> Iterator[tuple[int, Path]]:
    """Yields the version (1 or 2) and the folder of each cgroup that may limit this process by
    ``controller``, innermost first. Some folders may not exist. Yields nothing on systems other than
    Linux."""
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
            # Mounted under its name, or under the names of all controllers of the mount (cpu,cpuacct).
            version, mount = 1, mounts / controller
            if not mount.is_dir():
                mount = mounts / controllers
        else:
            continue
        # In a container this may be the host's path, which does not exist here; the mount's root does.
        parts = [part for part in path.split("/") if part not in ("", "..")]
        for depth in range(len(parts), -1, -1):
            yield version, mount.joinpath(*parts[:depth])


def _quotas(root: Path) -> Iterator[int]:
    for version, folder in _cgroups("cpu", root):
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
        if cpus > 0:  # version 1 has -1 for no quota
            yield cpus


def _left_in_cgroups(root: Path) -> Iterator[int]:
    for version, folder in _cgroups("memory", root):
        left = _left_in(folder, *_MEMORY_FILES[version])
        if left is not None:
            yield left


def _left_in(folder: Path, limit_name: str, used_name: str, cached_name: str) -> int | None:
    """Returns the free memory of a cgroup; None if it has no limit."""
    try:
        limit = int((folder / limit_name).read_text())
        used = int((folder / used_name).read_text())
        stat = (folder / "memory.stat").read_text()
    except (OSError, ValueError):  # no such file, or "max"
        return None
    # The kernel counts cached file contents as used, but frees them when memory is needed.
    cached = dict(line.split(maxsplit=1) for line in stat.splitlines()).get(cached_name, "0")
    return max(0, limit - max(0, used - int(cached)))


def has_driver() -> bool:
    """Whether an NVIDIA driver is installed. Asking torch itself takes seconds."""
    try:
        ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    except OSError:
        return False
    return True


def driver_fault() -> str:
    """Returns why torch finds no GPU although an NVIDIA driver is installed, for example because the driver
    is too old. Empty without a driver, if all GPUs are hidden on purpose, or if torch was built for the
    CPU."""
    import torch

    is_hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    if is_hidden or torch.version.cuda is None or not has_driver():
        return ""
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        return " ".join(str(error).split())
    return ""


async def _child_cuda_bytes(gpus: Sequence[int]) -> list[int | None]:
    """Returns ``free_cuda_bytes`` for each GPU, from a child process."""
    done = await anyio.run_process(
        [sys.executable, "-P", "-m", __name__, *map(str, gpus)],
        check=False,
        env={**os.environ, "PYTHONPATH": import_path()},
    )
    if done.returncode:
        last = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        raise EngineFailed(f"cannot read the free memory of the GPU: {last}")
    num_bytes: list[int | None] = json.loads(done.stdout)
    return num_bytes


if __name__ == "__main__":
    try:
        free = [free_cuda_bytes(int(gpu)) for gpu in sys.argv[1:]]
    except ImportError:  # the engine's process reports it with a better message
        free = [None for _ in sys.argv[1:]]
    print(json.dumps(free))
