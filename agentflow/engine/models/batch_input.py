"""What a forward pass is given for a batch."""

from __future__ import annotations

from torch import Tensor

from agentflow.engine.batch import Batch
from agentflow.kernels.forward_input import ForwardInput
from agentflow.kernels.inputs import AttentionBatch
from agentflow.kernels.ops import Kernels


def forward_input_of(batch: Batch, kernels: Kernels, kv_layers: tuple[Tensor, ...]) -> ForwardInput:
    """Its arrays, and the plan of its attention. ``kv_layers``: the pool, in the model's dtype and on its
    device (``KvPool.layers``)."""
    attended = AttentionBatch(
        batch.page_table, batch.page_rows, batch.query_lens, batch.kv_lens, batch.branches
    )
    plan = kernels.plan_attention(attended, kv_layers[0].dtype, kv_layers[0].device)
    rows = batch.sampled.rows
    return ForwardInput(batch.token_ids, batch.positions, batch.write_slots, kv_layers, plan, rows)
