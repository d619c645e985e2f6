"""The time of a forward pass without running it: a linear model fitted to timed passes."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeAlias

import msgspec
import numpy as np

from agentflow.engine.batch import Batch
from agentflow.errors import BadArgument
from agentflow.protocol.unreadable import UNREADABLE

Amounts: TypeAlias = tuple[float, float, float, float, float]
"""The factors of a cost model's coefficients, in their order."""


@dataclass(frozen=True, slots=True)
class CostModel:
    """The time of one pass, as a sum of costs in seconds."""

    base_s: float  # for the pass
    row_s: float  # for each token
    logits_s: float  # for each row of logits
    read_s: float  # for each KV token that a decoding request reads
    pair_s: float  # for each pair of query and key in a chunk's attention

    def step_s(self, batch: Batch) -> float:
        """Returns the time of one batch."""
        return self.seconds(*features(batch))

    def seconds(self, passes: float, rows: float, logits: float, reads: float, pairs: float) -> float:
        """Returns the time of a pass. The arguments are the ``Amounts``, in order."""
        per_row_s = self.row_s * rows + self.logits_s * logits
        return self.base_s * passes + per_row_s + self.read_s * reads + self.pair_s * pairs

    def write(self, path: Path) -> None:
        """Writes the model as JSON."""
        path.write_bytes(msgspec.json.format(msgspec.json.encode(asdict(self))))

    @classmethod
    def read(cls, path: Path) -> CostModel:
        """Reads a model. Raises ``BadArgument`` if the file is not one."""
        try:
            return msgspec.json.decode(path.read_bytes(), type=cls)
        except (*UNREADABLE, OSError) as error:
            raise BadArgument(f"cannot read the cost model {path}: {error}", param="cost") from error


@functools.cache
def default_cost() -> CostModel:
    """Returns the costs of the default model in bfloat16 on two cores with AMX, as fitted by ``python -m
    benchmarks scheduler --only cost``."""
    return CostModel.read(Path(__file__).with_name("default_cost.json"))


def features(batch: Batch) -> Amounts:
    """Returns the amounts of a batch."""
    single = batch.kv_lens[: batch.num_decode].sum()
    chunks, ends = batch.query_lens[batch.num_decode :], batch.kv_lens[batch.num_decode :]
    pairs = (chunks * (ends - chunks / 2)).sum() if len(chunks) else 0.0
    return 1.0, len(batch.token_ids), len(batch.sampled.rows), float(single), float(pairs)


def fit_cost(samples: Sequence[tuple[tuple[float, ...], float]]) -> CostModel:
    """Returns the non-negative coefficients that best fit (features, seconds) by relative error, so that
    short passes count as much as long ones."""
    rows = np.array([sample for sample, _ in samples])
    seconds = np.array([seconds for _, seconds in samples])
    rows, target = rows / seconds[:, None], np.ones(len(seconds))
    used = list(range(rows.shape[1]))
    while True:  # drops the most negative coefficient and fits again
        found, *_ = np.linalg.lstsq(rows[:, used], target, rcond=None)
        if (found >= 0).all() or len(used) == 1:
            break
        del used[int(found.argmin())]
    coefficients = np.zeros(rows.shape[1])
    coefficients[used] = np.maximum(found, 0)
    return CostModel(*coefficients.tolist())
