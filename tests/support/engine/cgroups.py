"""The files of cgroups, as Linux shows them."""

from __future__ import annotations

from pathlib import Path


def write_membership(root: Path, *lines: str) -> None:
    """The cgroups of the process, below the root of a file system: ``id:controllers:path`` each."""
    (root / "proc/self").mkdir(parents=True, exist_ok=True)
    (root / "proc/self/cgroup").write_text("".join(f"{line}\n" for line in lines))
