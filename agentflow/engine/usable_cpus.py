"""How many processors this process can keep busy: a machine may have more than its container may use."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path

from agentflow.engine.cgroups import groups_around


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
