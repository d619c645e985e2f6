"""How long the requests of one server take, learned from requests.

The time of a request is a sum: a fixed part, the units of the prompt that were to be computed before its
end, and the tokens of its output. The coefficients follow by least squares over relative errors, in which
older requests count less and less (recursive least squares with a forgetting factor; Ljung, "System
Identification", 1999, section 11.2). Before the first requests, the times of a small GPU are
assumed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from agentflow.engine.simulator.cost_model import CostModel

FORGOTTEN_PART = 0.05
"""How much less a request counts with each later one."""
_LEAST_S = 1e-4
_PRIOR: NDArray[np.float64] = np.array((0.02, 1e-4, 0.02))
_LEAST = _PRIOR * 1e-3
_LASTING = np.diag(1e-6 / _PRIOR**2)  # decides where requests of one length cannot


class LearnedCosts(NamedTuple):
    """``fixed_s`` of a request, ``unit_s`` of a unit of the prompt that is computed, ``output_s`` of a token
    of the output."""

    fixed_s: float
    unit_s: float
    output_s: float


class LearnedCost:
    """The costs of one server."""

    def __init__(self) -> None:
        self._products = np.diag(1 / _PRIOR**2)  # as if there had been a request, which is forgotten
        self._targets = self._products @ _PRIOR

    def observe(self, num_units: float, num_output: float, seconds: float) -> None:
        """A request, or its part up to the first token (``num_output`` is 0), took this long.

        Args:
            num_units: The units to compute, including the requests before it in the queue.
            num_output: The tokens that it generated.
            seconds: From sending it.
        """
        row = np.array((1.0, num_units, num_output)) / max(seconds, _LEAST_S)
        self._products *= 1 - FORGOTTEN_PART
        self._targets *= 1 - FORGOTTEN_PART
        self._products += row[:, None] * row
        self._targets += row

    def costs(self) -> LearnedCosts:
        """The costs fitted to the requests so far. Far slower than ``observe``."""
        matrix, right = self._products + _LASTING, self._targets + _LASTING @ _PRIOR
        used = [0, 1, 2]
        while True:  # a time is not negative: without the most negative part, as in ``fit_cost``
            found = np.linalg.solve(matrix[np.ix_(used, used)], right[used])
            if (found >= 0).all() or len(used) == 1:
                break
            del used[int(found.argmin())]
        costs = _LEAST.copy()
        costs[used] = np.maximum(found, _LEAST[used])
        return LearnedCosts(*costs.tolist())


def mean_cost(costs: Sequence[LearnedCosts]) -> CostModel:
    """The cost of an engine like the mean of the servers."""
    return CostModel(
        base_s=float(np.mean([cost.output_s for cost in costs])),
        row_s=float(np.mean([cost.unit_s for cost in costs])),
        logits_s=0.0,
        read_s=0.0,
        pair_s=0.0,
    )
