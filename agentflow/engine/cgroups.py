"""The cgroups of Linux around this process, with which containers limit memory and CPU time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path


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
