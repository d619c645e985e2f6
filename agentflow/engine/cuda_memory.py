"""How many bytes the GPU has free; ``python -m agentflow.engine.cuda_memory`` prints it, or ``null`` where
torch finds no GPU."""

from __future__ import annotations

import json


def free_cuda_bytes() -> int | None:
    """Of the GPU that models run on. Loads torch, and takes what CUDA itself needs of the GPU's memory."""
    import torch

    if not torch.cuda.is_available():
        return None
    num_bytes: int = torch.cuda.mem_get_info()[0]
    return num_bytes


if __name__ == "__main__":
    try:
        free = free_cuda_bytes()
    except ImportError:  # the engine's process tells it better
        free = None
    print(json.dumps(free))
