"""The memory for keys and values: one slot for each token."""

from __future__ import annotations

import torch
from torch import Tensor

from agentflow.errors import BadArgument
from agentflow.kernels.page_advice import advise_huge_pages


class KvPool:
    """``layers[i]`` [num_slots, 2, num_kv_heads, head_dim]: keys at 0 and values at 1, adjacent, so that a
    token is one contiguous read or write in each layer.

    The memory is not cleared, so that on a CPU a page is first touched when a token is written to it. Kernels
    must not read slots that their request does not own.

    Args:
        num_layers: the layers of the model.
        num_slots: the size of the pool, in tokens.
        num_kv_heads: the KV heads of a layer.
        head_dim: the size of a key or a value of one head.
        dtype: the type of keys and values; 8-bit floats have no scale.
        device: where the pool is.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        num_slots: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.bytes_per_token = num_layers * 2 * num_kv_heads * head_dim * dtype.itemsize
        if num_slots < 1:
            raise BadArgument(f"the KV pool needs at least one token, not {num_slots}", param="num_slots")
        try:
            memory = torch.empty(
                (num_layers, num_slots, 2, num_kv_heads, head_dim), dtype=dtype, device=device
            )
        except RuntimeError as error:  # torch's out-of-memory errors are RuntimeErrors
            gigabytes = self.bytes_per_token * num_slots / 1e9
            raise BadArgument(
                f"a KV pool of {num_slots} tokens needs {gigabytes:.1f} GB, more than {device} has: "
                "configure fewer tokens",
                param="num_slots",
            ) from error
        advise_huge_pages(memory)
        self.layers: tuple[Tensor, ...] = memory.unbind(0)
