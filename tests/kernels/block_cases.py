"""Random weights in the block types of GGUF, and how far a result is from the exact one."""

from __future__ import annotations

import gguf
import numpy as np
import torch

from agentflow.kernels.inputs import BlockMatrix

HALVES = {"Q4_1": (0, 2), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}
"""Where a block has its float16 numbers: the others have one, at their beginning."""


def random_blocks(
    rng: np.random.Generator, block_type: str, num_out: int, num_in: int, most: float = 1e-2
) -> BlockMatrix:
    """Any bytes are valid blocks; only their float16 numbers must have a sensible size, at most ``most``."""
    per_block, num_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[block_type]]
    blocks = rng.integers(0, 256, (num_out, -(-num_in // per_block), num_bytes), dtype=np.uint8)
    for at in HALVES.get(block_type, (0,)):
        numbers = rng.uniform(-most, most, blocks.shape[:2]).astype(np.float16)
        blocks[..., at : at + 2] = numbers.view(np.uint8).reshape(*blocks.shape[:2], 2)
    return BlockMatrix(block_type, blocks.reshape(num_out, -1), (num_out, num_in))


def relative_error(result: torch.Tensor, expected: torch.Tensor) -> float:
    """The relative error in Euclid's norm."""
    return float((result.double() - expected.double()).norm() / expected.double().norm())
