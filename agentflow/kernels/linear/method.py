"""The interface for products with weights, each in the format that its implementation packed it in."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from agentflow.kernels.activations import Activation
from agentflow.kernels.decoder_weights import Experts
from agentflow.kernels.inputs import BlockMatrix, LinearWeight, LowRank
from agentflow.kernels.linear.grouped import AdapterTable, GroupedAdapters, Mixture


class LinearMethod(ABC):
    """Packs weights, and multiplies rows with weights that it has packed. T is the number of rows.

    Sums are computed in float32. In bfloat16, each result named here is rounded where transformers' eager
    modules round it, so that both accumulate the same error.
    """

    block_types: Sequence[str] = ()
    """The types of blocks that ``pack_blocks`` accepts."""

    def has_fp8(self, device: torch.device) -> bool:
        """Whether weights (blocks of the type "F8_E4M3") and the KV pool may be 8-bit floats on a device,
        ``torch.float8_e4m3fn``. Keys and values have no scales then: larger numbers than 448 become 448."""
        return False

    @abstractmethod
    def pack(
        self, weight: Tensor, bias: Tensor | None, *, exact_output: bool = False, gated: bool = False
    ) -> LinearWeight:
        """Lays out ``weight`` [out, in] for ``multiply``, or with ``exact_output`` for ``multiply_exactly``.
        ``gated``: the first half of the outputs are gates of the second half (``LinearWeight.is_gated``). The
        caller should then drop the weight."""

    def pack_blocks(
        self,
        parts: Sequence[BlockMatrix],
        bias: Tensor | None,
        *,
        gated: bool = False,
        device: torch.device | None = None,
    ) -> LinearWeight | None:
        """Lays out matrices with the same input as one stacked weight for all products, without dequantising
        them. Returns None if this implementation cannot, which may happen if the types differ. ``bias``: in
        the model's dtype. ``device``: of the weight; None: the CPU."""
        return None

    @abstractmethod
    def pack_embedding(self, weight: Tensor, head: LinearWeight | None) -> LinearWeight:
        """Lays out ``weight`` [vocabulary, hidden_size] for ``embed``. ``head``: the weight from ``pack`` of
        the same matrix, if they are tied; the result may share its memory."""

    @abstractmethod
    def embed(self, token_ids: Tensor, weight: LinearWeight, dtype: torch.dtype) -> Tensor:
        """Returns the rows ``token_ids`` [T] of ``weight``, as ``dtype``: [T, hidden_size]."""

    @abstractmethod
    def multiply(
        self,
        x: Tensor,
        weight: LinearWeight,
        added: Tensor | None = None,
        *,
        activation: Activation | None = None,
    ) -> Tensor:
        """Returns the product x Wᵀ + b, rounded, plus ``added``, and then its activation.

        Args:
            x: [T, in].
            weight: the weight. A gated one needs an activation.
            added: [T, out], such as the change by an adapter.
            activation: None: there is none.

        Returns:
            [T, out]; with a gated weight [T, out / 2], the activation of the first half times the second half
            (SwiGLU and its relatives, arXiv 2002.05202).
        """

    def add_product(self, hidden: Tensor, x: Tensor, weight: LinearWeight) -> None:
        """Adds the rounded product of x to ``hidden`` [T, out], which is contiguous."""
        hidden.add_(self.multiply(x, weight))

    @abstractmethod
    def multiply_exactly(self, x: Tensor, weight: LinearWeight) -> Tensor:
        """Returns the product as float32 with at least 16 significant bits. For logits: in bfloat16, close
        ones would tie."""

    @abstractmethod
    def low_rank(self, x: Tensor, num_out: int, changes: Sequence[tuple[LowRank, Tensor]]) -> Tensor:
        """Returns the sum that low-rank changes add to the product of x with a weight of ``num_out`` outputs:
        [T, num_out], zeros for rows without a change. No row is in two changes. Both products are rounded.
        ``changes``: each with the numbers of its rows, int64 on the device of x."""

    def adapter_table(self, num_layers: int, dtype: torch.dtype, device: torch.device) -> AdapterTable | None:
        """Returns an empty table for the adapters of a model, for ``multiply_adapted``. None: there is none,
        and ``low_rank`` computes the changes."""
        return None

    def multiply_adapted(
        self,
        x: Tensor,
        weight: LinearWeight,
        adapters: GroupedAdapters,
        layer: int,
        place: str,
        *,
        activation: Activation | None = None,
    ) -> Tensor:
        """Returns ``multiply`` with the changes by the rows' adapters, which ``low_rank`` defines. Only where
        there is an ``adapter_table``.

        Args:
            x, weight, activation: As in ``multiply``.
            adapters: Of the rows.
            layer: The number of the layer.
            place: A field of ``LayerAdapter``.
        """
        raise NotImplementedError

    def group_experts(self, experts: Experts, activation: Activation) -> Mixture | None:
        """Returns the experts of a layer as a ``Mixture``. None: it cannot, and the caller computes them one
        after the other. ``activation``: of the experts, which have a gate."""
        return None
