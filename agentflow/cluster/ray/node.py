"""Looks at a node before engines start there: its version, its files and its free memory."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import anyio

from agentflow.engine.machine.resources import FreeMemory, devices_from, free_memory
from agentflow.engine.store.model_folder import weight_files
from agentflow.version import __version__


@dataclass(frozen=True, slots=True)
class NodeReport:
    """A node, as one bundle of a placement group sees it."""

    address: str
    node: str  # its id in Ray
    gpus: tuple[str, ...]  # the ids of the bundle's GPUs on the node
    version: str  # of agentflow
    missing: tuple[str, ...]  # the paths that do not exist
    fingerprint: str  # of the model
    free: FreeMemory


def inspect_node(model: str, files: Sequence[str], device: str) -> NodeReport:
    """Runs on the node.

    Args:
        model: The model's folder or file.
        files: Other paths that the engine reads.
        device: The engine's device: ``cpu`` or ``cuda``.
    """
    import ray
    import ray.util

    gpus = ray.get_gpu_ids()
    devices = devices_from(device, max(1, len(gpus)))
    return NodeReport(
        ray.util.get_node_ip_address(),
        ray.get_runtime_context().get_node_id(),
        tuple(str(gpu) for gpu in gpus),
        __version__,
        tuple(path for path in (model, *files) if not os.path.exists(path)),
        fingerprint(Path(model)),
        anyio.run(free_memory, devices),
    )


def fingerprint(model: Path) -> str:
    """A digest of a model's configuration and of the names and sizes of its weights, which takes hardly any
    time; empty if there is no such model."""
    if not model.exists():
        return ""
    files = [model] if model.is_file() else [model / name for name in weight_files(model)]
    found = hashlib.blake2b(digest_size=16)
    for file in sorted(files):
        found.update(f"{file.name} {file.stat().st_size if file.exists() else -1}\n".encode())
    config = model / "config.json"
    if config.exists():
        found.update(config.read_bytes())
    return found.hexdigest()
