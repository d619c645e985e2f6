"""The interface for attention over the paged KV pool."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from agentflow.kernels.attention.segments import attend_segments
from agentflow.kernels.inputs import AttentionBatch, IntArray


@dataclass(frozen=True, slots=True)
class AttentionRule:
    """How a layer attends, beyond causality.

    With a *window* of W, a row attends to the last W tokens, including itself (Mistral, arXiv 2310.06825).
    *Capped* scores are ``cap * tanh(score / cap)`` (Gemma 2, arXiv 2408.00118).
    """

    scale: float  # the factor of the scores
    window: int = 0  # the number of tokens to which a row attends, including itself; 0: all
    cap: float = 0.0  # the cap of the scores; 0: none


class GraphPlans(Protocol):
    """Buffers at fixed addresses for the plans of decode batches, one plan at a time."""

    def forms(self) -> Sequence[Any]:
        """Returns all forms, the most frequent first."""

    def update(self, plan: Any) -> Any:
        """Writes a plan from ``AttentionBackend.plan`` into the buffers. Returns the form of its launches,
        which is hashable and has ``num_rows``; None if the batch does not fit."""

    def capture_with(self, form: Any, plan: Any) -> Any:
        """Returns the plan with which a graph of this form is captured."""


class AttentionBackend(ABC):
    """Plans the attention of a batch once, and computes it in each layer: decoded rows, chunks of prompts,
    trees of tokens, and prefixes that requests share. T is the number of rows of the batch."""

    @abstractmethod
    def plan(self, batch: AttentionBatch, dtype: torch.dtype, device: torch.device) -> AttentionBatch:
        """Plans the attention of a batch once for all layers. ``dtype``: the type of the KV pool."""

    def graph_plans(
        self,
        num_rows: Sequence[int],
        num_heads: int,
        num_kv_heads: int,
        device: torch.device,
        windows: Sequence[int] = (0,),
    ) -> GraphPlans | None:
        """Returns buffers for the plans of decode batches, which captured graphs read; None if this
        implementation has none. The batches must have a ``device_table``, which the graphs also read.

        Args:
            num_rows: the numbers of rows of the graphs, ascending.
            num_heads: the query heads of a layer.
            num_kv_heads: the KV heads of a layer.
            device: where the buffers are.
            windows: the windows that layers use; 0: none.
        """
        return None

    @abstractmethod
    def attend(
        self, q: Tensor, kv_layer: Tensor, plan: Any, rule: AttentionRule, sinks: Tensor | None = None
    ) -> Tensor:
        """Computes paged causal attention for decode and prefill rows, over cached and newly written KV.
        Slots of other requests may contain anything, NaN included.

        Args:
            q: the queries, [T, heads, head_dim].
            kv_layer: one layer of the KV pool, [slots, 2, kv_heads, head_dim].
            plan: from ``plan`` of the same implementation.
            rule: the rule of the layer.
            sinks: [heads]: for each head a score without a value, which receives a part of the softmax
                (GPT-OSS); None: there are none.

        Returns:
            [T, heads * head_dim].
        """

    def attend_segments(self, q: Tensor, kv: Tensor, starts: IntArray, first: int, scale: float) -> Tensor:
        """Computes attention in both directions within segments, as in encoders, which cache no KV. The
        queries may be a part of the rows.

        Args:
            q: [T, heads, head_dim]: the queries of the rows from ``first`` on. May be a strided view, like
                ``kv``.
            kv: [rows, 2, heads, head_dim]: keys and values of all rows.
            starts: [S + 1]: the first row of each segment, ascending, and the number of rows.
            first: the row of the first query.
            scale: the factor of the scores.

        Returns:
            [T, heads * head_dim].
        """
        return attend_segments(q, kv, starts, first, scale)
