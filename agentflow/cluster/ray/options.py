"""The options of placing engines on a Ray cluster."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RayOptions:
    """How the engines of a server are placed. ``address``: the address of the head node; None: this machine's
    cluster."""

    address: str | None = None
    cpus: float | None = None  # of each replica; None: its threads, or 1
    gpus: float | None = None  # None: 1 if the cluster has GPUs, unless the model's device is cpu
    memory_gib: float | None = None  # None: Ray reserves no memory
    wait_s: float = 20.0
