"""The products of one forward pass, changed by the adapters that its rows use. Without adapters, the kernels
compute them directly."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from agentflow.kernels.activations import Activation
from agentflow.kernels.inputs import Adapter, AdapterRows, LinearWeight
from agentflow.kernels.linear.method import LinearMethod
from agentflow.kernels.uploads import upload

Place = Literal["qkv", "output", "gate_up", "down"]
"""A product of a layer: a field of ``LayerAdapter``."""


class Products:
    """The products of one forward pass.

    Args:
        linear: computes the products.
        adapters: as in ``ForwardInput``.
        device: where the products are computed.
    """

    def __init__(self, linear: LinearMethod, adapters: Sequence[AdapterRows], device: torch.device) -> None:
        self._linear = linear
        self._rows: list[tuple[Adapter, Tensor]] = []
        self._sampled: list[tuple[Adapter, Tensor]] = []
        if adapters:
            rows = upload([rows for one in adapters for rows in (one.rows, one.sampled)], device)
            for number, one in enumerate(adapters):
                self._rows.append((one.adapter, rows[2 * number]))
                if len(one.sampled):
                    self._sampled.append((one.adapter, rows[2 * number + 1]))

    def keep_sampled(self) -> None:
        """Prepares for products of ``ForwardInput.rows`` only, in this and all later calls."""
        self._rows = self._sampled

    def multiply(
        self,
        x: Tensor,
        weight: LinearWeight,
        layer: int,
        place: Place,
        activation: Activation | None = None,
    ) -> Tensor:
        """``LinearMethod.multiply`` at one place of a layer."""
        added = self._added(x, weight, layer, place) if self._rows else None
        return self._linear.multiply(x, weight, added, activation=activation)

    def _added(self, x: Tensor, weight: LinearWeight, layer: int, place: Place) -> Tensor | None:
        found = [(getattr(adapter.layers[layer], place), rows) for adapter, rows in self._rows]
        changes = [(change, rows) for change, rows in found if change is not None]
        return self._linear.low_rank(x, weight.shape[0], changes) if changes else None
