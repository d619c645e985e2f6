"""The machine of a measurement, and the load of other processes meanwhile."""

from __future__ import annotations

import os
import platform
import subprocess
import time
from pathlib import Path
from typing import Any

import psutil

FEATURES = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16")


def describe() -> dict[str, Any]:
    """Describes the machine, with the versions that affect figures."""
    import torch

    return {
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "memory_gb": round(psutil.virtual_memory().total / 1e9, 1),
        "cpu_features": [name for name in FEATURES if name in _flags()],
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torch_threads": torch.get_num_threads(),
        "system": f"{platform.system()} {platform.machine()}",
    }


def commit() -> str:
    """Returns the commit, marked as dirty if the tree has changes."""
    folder = Path(__file__).parent
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


class OthersLoad:
    """Cores that other processes kept busy between construction and ``cores()``."""

    def __init__(self) -> None:
        self._start = time.monotonic()
        self._busy = _busy_s()
        self._own = _own_s()
        self._ended: float | None = None

    def end(self) -> None:
        """Ends the measurement while this benchmark's processes still run: if a process ends and its parent
        does not wait for it, its time would count as time of other processes."""
        self._ended = self.cores()

    def cores(self) -> float:
        """Returns the mean number of cores that other processes kept busy."""
        if self._ended is not None:
            return self._ended
        elapsed = max(1e-9, time.monotonic() - self._start)
        others = (_busy_s() - self._busy) - (_own_s() - self._own)
        return max(0.0, others / elapsed)


def _busy_s() -> float:
    times = psutil.cpu_times()
    return float(sum(times) - times.idle - getattr(times, "iowait", 0.0) - getattr(times, "guest", 0.0))


def _own_s() -> float:
    total = 0.0
    process = psutil.Process()
    for member in [process, *process.children(recursive=True)]:
        try:
            times = member.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += times.user + times.system
    ended = process.cpu_times()
    return float(total + ended.children_user + ended.children_system)


def _cpu_info() -> str:
    try:
        return Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return ""


def _cpu_name() -> str:
    """Returns the name with the family, because several generations may have one name."""
    found: dict[str, str] = {}
    for line in _cpu_info().splitlines():
        key, _, value = line.partition(":")
        found.setdefault(key.strip(), value.strip())
    name = found.get("model name") or platform.processor() or platform.machine()
    return f"{name}, family {found['cpu family']}" if "cpu family" in found else name


def _flags() -> set[str]:
    for line in _cpu_info().splitlines():
        if line.startswith("flags"):
            return set(line.partition(":")[2].split())
    return set()
