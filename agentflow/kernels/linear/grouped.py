"""Grouped products: each row is multiplied with one of several matrices, such as the experts of a mixture or
the matrices of adapters, all together and without waiting for the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor

from agentflow.kernels.inputs import AdapterRows


class Mixture(Protocol):
    """A mixture of experts."""

    def __call__(
        self, x: Tensor, scores: Tensor, added: Tensor | None = None, slots: Tensor | None = None
    ) -> Tensor:
        """Computes the mixture: for each row, the sum of its experts' rounded results times their weights
        (``routing.routed``), plus ``added``. Sums in float32, and rounds once.

        Args:
            x: the rows, [T, hidden_size].
            scores: the router's scores, [T, experts].
            added: added to the result, [T, hidden_size]; or None.
            slots: [T]; a row with a slot below 0 is padding, with no experts and an arbitrary result. None:
                no row is padding.

        Returns:
            [T, hidden_size].
        """


class GroupedAdapters(Protocol):
    """The adapter of each row of a batch, on the device."""

    @property
    def slots(self) -> Tensor:
        """[T] int32: the number in the table of each row's adapter; -1: none."""

    @property
    def form(self) -> Any:
        """The parameters of launches, in addition to the number of rows. Hashable."""

    def at(self, slots: Tensor) -> GroupedAdapters:
        """Returns the same for other slots, such as the tensor at a fixed address that a graph reads."""


class AdapterTable(Protocol):
    """The matrices of all adapters, so that one launch computes rows with different adapters."""

    def grouped(self, adapters: Sequence[AdapterRows], num_rows: int) -> GroupedAdapters | None:
        """Returns the adapters of the rows of a batch; None if the table cannot hold them. ``adapters``: at
        least one."""
