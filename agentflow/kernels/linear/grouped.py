"""Products of rows with one of several matrices each, computed together and without waiting for the device:
experts of a mixture, and changes by adapters."""

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
        """Computes the mixture: for each row the sum of its experts' rounded results times the weights that
        ``routing.routed`` gives them, and of ``added``, in float32 and rounded once.

        Args:
            x: the rows, [T, hidden_size].
            scores: of the experts, [T, experts].
            added: a summand, [T, hidden_size].
            slots: [T]; a row with a slot below 0 is padding: it has no experts and any result. None: no row
                is padding.

        Returns:
            [T, hidden_size].
        """


class GroupedAdapters(Protocol):
    """The rows of a batch with the adapter of each, on the device."""

    @property
    def slots(self) -> Tensor:
        """[T] int32: the adapter of each row, as a number in the table; -1: none."""

    @property
    def form(self) -> Any:
        """The parameters of launches, in addition to the number of rows. Hashable."""

    def at(self, slots: Tensor) -> GroupedAdapters:
        """Returns the same for other rows, such as those at the fixed address that a graph reads."""


class AdapterTable(Protocol):
    """The matrices of adapters, where rows of different adapters find them in one launch."""

    def grouped(self, adapters: Sequence[AdapterRows], num_rows: int) -> GroupedAdapters | None:
        """Returns the rows of a batch with their adapters, of which there is at least one; None if the table
        cannot have these."""
