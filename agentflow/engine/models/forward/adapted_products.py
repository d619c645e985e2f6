"""The products of one forward pass, changed by the adapters that its rows use. Without adapters, the kernels
compute them directly."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from torch import Tensor

from agentflow.kernels.inputs import AdapterRows, LinearWeight
from agentflow.kernels.ops import Kernels

Place = Literal["qkv", "output", "gate_up", "down"]
"""A product of a layer: a field of ``LayerAdapter``."""


class Products:
    """The products of one forward pass. ``adapters``: as in ``ForwardInput``."""

    def __init__(self, kernels: Kernels, adapters: Sequence[AdapterRows]) -> None:
        self._kernels = kernels
        self._rows = [(one.adapter, one.rows) for one in adapters]
        self._sampled = [(one.adapter, one.sampled) for one in adapters if len(one.sampled)]

    def keep_sampled(self) -> None:
        """Prepares for products of ``ForwardInput.rows`` only, in this and all later calls."""
        self._rows = self._sampled

    def linear(self, x: Tensor, weight: LinearWeight, layer: int, place: Place) -> Tensor:
        """``Kernels.linear`` at one place of a layer."""
        if not self._rows:
            return self._kernels.linear(x, weight)
        return self._kernels.linear(x, weight, self._added(x, weight, layer, place))

    def gated_linear(self, x: Tensor, weight: LinearWeight, layer: int, place: Place) -> Tensor:
        """``Kernels.gated_linear`` at one place of a layer."""
        if not self._rows:
            return self._kernels.gated_linear(x, weight)
        return self._kernels.gated_linear(x, weight, self._added(x, weight, layer, place))

    def _added(self, x: Tensor, weight: LinearWeight, layer: int, place: Place) -> Tensor | None:
        found = [(getattr(adapter.layers[layer], place), rows) for adapter, rows in self._rows]
        changes = [(change, rows) for change, rows in found if change is not None]
        return self._kernels.low_rank(x, weight.shape[0], changes) if changes else None
