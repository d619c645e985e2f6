"""The functions of a forward pass between attention and products."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor


class RowOps(ABC):
    """Norms, and rotary embeddings with the write of keys and values. T is the number of rows.

    Sums and means are computed in float32. In bfloat16, results are rounded where transformers' eager modules
    round them, so that both accumulate the same error.
    """

    @abstractmethod
    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        """Returns (x - mean(x)) / sqrt(variance(x) + eps) * ``weight`` + ``bias`` over the last dimension,
        rounded once (arXiv 1607.06450)."""

    @abstractmethod
    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Returns x / sqrt(mean(x²) + eps) over the last dimension, rounded, times ``weight`` (Zhang and
        Sennrich 2019, arXiv 1910.07467). x may be a strided view."""

    @abstractmethod
    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """Returns (rms_norm(x + residual), x + residual). May overwrite ``residual``."""

    @abstractmethod
    def rope_and_write(
        self, qkv: Tensor, cos: Tensor, sin: Tensor, kv_layer: Tensor, write_slots: Tensor
    ) -> Tensor:
        """Rotates queries and keys (RoPE, arXiv 2104.09864, halves as in transformers), and writes
        keys and values to the pool.

        Args:
            qkv: [T, heads + 2 kv_heads, head_dim]; may be overwritten.
            cos: [T, 1, head_dim].
            sin: [T, 1, head_dim], its first half negated.
            kv_layer: [slots, 2, kv_heads, head_dim]: keys at 0, values at 1. May have 8-bit floats if
                ``LinearMethod.has_fp8``.
            write_slots: [T] int64.

        Returns:
            The rotated queries [T, heads, head_dim].
        """
