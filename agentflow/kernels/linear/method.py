"""The interface for products with weights. Each implementation packs weights in its formats."""

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
    """Packs weights, and multiplies rows with the packed weights. T is the number of rows.

    Sums are computed in float32. In bfloat16, results are rounded where transformers' eager modules round
    them, so that both accumulate the same error.
    """

    block_types: Sequence[str] = ()
    """The types of blocks that ``pack_blocks`` accepts."""

    def has_fp8(self, device: torch.device) -> bool:
        """Whether weights (blocks of the type "F8_E4M3") and the KV pool may be ``torch.float8_e4m3fn`` on a
        device. Keys and values then have no scales: numbers above 448 become 448."""
        return False

    @abstractmethod
    def pack(
        self, weight: Tensor, bias: Tensor | None, *, exact_output: bool = False, gated: bool = False
    ) -> LinearWeight:
        """Packs ``weight`` [out, in] for ``multiply``, or with ``exact_output`` for ``multiply_exactly``.
        ``gated``: the first half of the outputs are the gates of the second half
        (``LinearWeight.is_gated``). The caller should drop ``weight`` afterwards."""

    def pack_blocks(
        self,
        parts: Sequence[BlockMatrix],
        bias: Tensor | None,
        *,
        gated: bool = False,
        device: torch.device | None = None,
    ) -> LinearWeight | None:
        """Packs matrices with the same input as one stacked weight for all products, without dequantising
        them. Returns None if this implementation cannot, for example because the types differ.

        Args:
            parts: the matrices.
            bias: in the model's dtype; or None.
            gated: as in ``pack``.
            device: the device of the result; None: the CPU.
        """
        return None

    @abstractmethod
    def pack_embedding(self, weight: Tensor, head: LinearWeight | None) -> LinearWeight:
        """Packs ``weight`` [vocabulary, hidden_size] for ``embed``. ``head``: the result of ``pack`` for the
        same matrix, if they are tied; the result may share its memory."""

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
            weight: the weight. A gated weight needs an activation.
            added: [T, out], such as the change by an adapter; or None.
            activation: the activation, or None.

        Returns:
            [T, out]; with a gated weight [T, out / 2], the activation of the first half times the second half
            (SwiGLU and its relatives, arXiv 2002.05202).
        """

    def add_product(self, hidden: Tensor, x: Tensor, weight: LinearWeight) -> None:
        """Adds the rounded product of x to ``hidden`` [T, out], which must be contiguous."""
        hidden.add_(self.multiply(x, weight))

    @abstractmethod
    def multiply_exactly(self, x: Tensor, weight: LinearWeight) -> Tensor:
        """Returns the product as float32 with at least 16 significant bits. For logits: close logits would
        tie in bfloat16."""

    @abstractmethod
    def low_rank(self, x: Tensor, num_out: int, changes: Sequence[tuple[LowRank, Tensor]]) -> Tensor:
        """Returns the summand that low-rank changes add to a product of x: [T, num_out], zeros for rows
        without a change. Both products are rounded.

        Args:
            x: [T, in].
            num_out: the outputs of the weight that is changed.
            changes: each with the indices of its rows, int64 on the device of x. A row has at most one.
        """

    def adapter_table(self, num_layers: int, dtype: torch.dtype, device: torch.device) -> AdapterTable | None:
        """Returns an empty table for the adapters of a model, for ``multiply_adapted``. None: this
        implementation has none, and ``low_rank`` computes the changes."""
        return None

    def multiply_adapted(
        self,
        x: Tensor,
        weight: LinearWeight,
        adapters: GroupedAdapters,
        layer: int,
        product_name: str,
        *,
        activation: Activation | None = None,
    ) -> Tensor:
        """Like ``multiply``, with the changes by the rows' adapters, as ``low_rank`` defines them. Only if
        there is an ``adapter_table``.

        Args:
            x, weight, activation: As in ``multiply``.
            adapters: The adapters of the rows.
            layer: The number of the layer.
            product_name: A field of ``LayerAdapter``.
        """
        raise NotImplementedError

    def group_experts(self, experts: Experts, activation: Activation) -> Mixture | None:
        """Returns the experts of a layer as a ``Mixture``. None: this implementation cannot group them, and
        the caller computes one after the other. ``activation``: the activation of the experts, which must
        have a gate."""
        return None
