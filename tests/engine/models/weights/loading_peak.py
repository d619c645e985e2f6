"""Loads model folders for test_loading_memory.py, each in a fork of this process, which has imported torch.

Each line of its input has the kernels, the type and the path; "auto" keeps the quantised weights of a GGUF
file. For each it prints three sizes in bytes: the growth of the fork's resident memory at the peak and at the
end, and the weights'.
"""

from __future__ import annotations

import ctypes
import os
import sys
import traceback
from pathlib import Path

import torch

from agentflow.engine.models.families.registry import read_config
from agentflow.engine.models.weights.loader import WeightFormat, load_model
from agentflow.kernels.platforms import kernels_for

M_MMAP_THRESHOLD = -3


def memory_bytes(name: str) -> int:
    """Memory of this process, from Linux: VmRSS is the resident memory, VmHWM its peak since the reset."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:")) * 1024


def main(folder: Path, name: str) -> None:
    keeps_blocks = name == "auto"
    dtype = torch.bfloat16 if keeps_blocks else getattr(torch, name)
    device = torch.device("cpu")
    config, kernels = read_config(folder), kernels_for(device)
    kernels.linear.pack(torch.zeros(64, 64, dtype=dtype), None)  # state that is made once, and by threads
    before = memory_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    weights = WeightFormat(dtype, keeps_blocks)
    loaded = load_model(folder, config, weights=weights, device=device, kernels=kernels)
    print(memory_bytes("VmHWM") - before, memory_bytes("VmRSS") - before, loaded.model.nbytes, flush=True)


def fork(kernels: str, name: str, path: str) -> None:
    """Runs ``main`` in a fork. Prints an empty line if it fails."""
    if os.fork():
        if os.wait()[1]:
            print(flush=True)
        return
    status = 1
    try:
        os.environ["AGENTFLOW_KERNELS"] = kernels
        main(Path(path), name)
        status = 0
    except Exception:
        traceback.print_exc()
    finally:
        os._exit(status)


if __name__ == "__main__":
    # Else the allocator keeps tens of megabytes of freed tensors, more or less by chance, or has memory that
    # imports have freed.
    libc = ctypes.CDLL(None)
    libc.mallopt(M_MMAP_THRESHOLD, 1 << 16)
    libc.malloc_trim(0)
    for line in sys.stdin:
        fork(*line.rstrip("\n").split(" ", 2))
