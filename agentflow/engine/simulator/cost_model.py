"""How long a forward pass takes, without running it: a linear model fitted to passes that were timed."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import asdict, astuple, dataclass
from pathlib import Path

import msgspec
import numpy as np

from agentflow.engine.batch import Batch
from agentflow.errors import BadArgument


@dataclass(frozen=True, slots=True)
class CostModel:
    """Seconds of one pass: ``base_s``, and for each row, each row whose logits are needed, each token of
    KV that a single row reads, and each pair of query and key within a chunk's attention."""

    base_s: float
    row_s: float
    logits_s: float
    read_s: float
    pair_s: float

    def step_s(self, batch: Batch) -> float:
        """For one batch."""
        return float(np.dot(astuple(self), features(batch)))

    def write(self, path: Path) -> None:
        """As JSON."""
        path.write_bytes(msgspec.json.format(msgspec.json.encode(asdict(self))))

    @classmethod
    def read(cls, path: Path) -> CostModel:
        """``BadArgument`` where the file is none."""
        try:
            return msgspec.json.decode(path.read_bytes(), type=cls)
        except (OSError, msgspec.MsgspecError) as error:
            raise BadArgument(f"cannot read the cost model {path}: {error}") from error


@functools.cache
def default_cost() -> CostModel:
    """The default model in bfloat16 on two cores with AMX, as ``python -m benchmarks scheduler --only
    cost`` fitted it."""
    return CostModel.read(Path(__file__).with_name("default_cost.json"))


def features(batch: Batch) -> tuple[float, float, float, float, float]:
    """What the model's coefficients are multiplied with."""
    single = batch.kv_lens[: batch.num_decode].sum()
    chunks, ends = batch.query_lens[batch.num_decode :], batch.kv_lens[batch.num_decode :]
    pairs = (chunks * (ends - chunks / 2)).sum()
    return 1.0, len(batch.token_ids), len(batch.sampled.rows), float(single), float(pairs)


def fit_cost(samples: Sequence[tuple[tuple[float, ...], float]]) -> CostModel:
    """The non-negative coefficients that fit (features, seconds) best, in relative terms: a short pass
    counts as much as a long one."""
    rows = np.array([sample for sample, _ in samples])
    seconds = np.array([seconds for _, seconds in samples])
    rows, target = rows / seconds[:, None], np.ones(len(seconds))
    used = list(range(rows.shape[1]))
    while True:  # what would become negative is left out, and the others are fitted again
        found, *_ = np.linalg.lstsq(rows[:, used], target, rcond=None)
        if (found >= 0).all() or len(used) == 1:
            break
        del used[int(found.argmin())]
    coefficients = np.zeros(rows.shape[1])
    coefficients[used] = np.maximum(found, 0)
    return CostModel(*coefficients.tolist())
