"""What one forward pass of a whole model is given."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from agentflow.kernels.inputs import IntArray


@dataclass(frozen=True, slots=True)
class ForwardInput:
    """T rows to compute. ``token_ids``, ``positions``, ``write_slots`` [T]: what each is, where it stands in
    its sequence, and the slot its key and value go to. ``kv_layers``: the pool, layer by layer, as in
    ``Kernels.rope_and_write``. ``plan``: of the same kernels' ``plan_attention``. ``rows`` [S]: those of
    which something is wanted."""

    token_ids: IntArray
    positions: IntArray
    write_slots: IntArray
    kv_layers: tuple[Tensor, ...]
    plan: Any
    rows: IntArray
