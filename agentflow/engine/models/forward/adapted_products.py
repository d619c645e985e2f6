"""The products of one forward pass, with the changes of the adapters that its rows use. Kernels that can
group adapters add the changes of all of them together; otherwise one adapter is added after the other.
Without adapters, the kernels compute the products directly."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from agentflow.kernels.activations import Activation
from agentflow.kernels.inputs import Adapter, AdapterRows, LinearWeight
from agentflow.kernels.linear.grouped import GroupedAdapters
from agentflow.kernels.linear.method import LinearMethod
from agentflow.kernels.uploads import upload

ProductName = Literal["qkv", "output", "gate_up", "down"]
"""A product of a layer: a field of ``LayerAdapter``."""


class Products:
    """The products of one forward pass.

    Args:
        linear: computes the products.
        adapters: as in ``ForwardInput``.
        device: where the products are computed.
        grouped: the rows with their adapters, if ``linear`` computes all changes together.
    """

    def __init__(
        self,
        linear: LinearMethod,
        adapters: Sequence[AdapterRows],
        device: torch.device,
        grouped: GroupedAdapters | None = None,
    ) -> None:
        self._linear = linear
        # Sorts the rows again in each pass, because the pass may be captured in a graph.
        self._grouped = None if grouped is None else grouped.at(grouped.slots)
        self._rows: list[tuple[Adapter, Tensor]] = []
        self._sampled: list[tuple[Adapter, Tensor]] = []
        if adapters and grouped is None:
            rows = upload([rows for one in adapters for rows in (one.rows, one.sampled)], device)
            for number, one in enumerate(adapters):
                self._rows.append((one.adapter, rows[2 * number]))
                if len(one.sampled):
                    self._sampled.append((one.adapter, rows[2 * number + 1]))

    def keep_sampled(self, rows: Tensor) -> None:
        """Limits all later products to ``ForwardInput.rows``. ``rows``: these rows, on the device."""
        self._rows = self._sampled
        if self._grouped is not None:
            self._grouped = self._grouped.at(self._grouped.slots.index_select(0, rows))

    def multiply(
        self,
        x: Tensor,
        weight: LinearWeight,
        layer: int,
        product_name: ProductName,
        activation: Activation | None = None,
    ) -> Tensor:
        """Like ``LinearMethod.multiply``, with the changes for one product of a layer."""
        if self._grouped is not None:
            return self._linear.multiply_adapted(
                x, weight, self._grouped, layer, product_name, activation=activation
            )
        added = self._added(x, weight, layer, product_name) if self._rows else None
        return self._linear.multiply(x, weight, added, activation=activation)

    def _added(self, x: Tensor, weight: LinearWeight, layer: int, product_name: ProductName) -> Tensor | None:
        found = [(getattr(adapter.layers[layer], product_name), rows) for adapter, rows in self._rows]
        changes = [(change, rows) for change, rows in found if change is not None]
        return self._linear.low_rank(x, weight.shape[0], changes) if changes else None
