"""Chooses one token for each row of logits, for all rows of a batch together.

A row's choice depends on its logits, its parameters and one number derived from (seed, position), and not on
other rows or earlier draws: a run that is resumed, replayed or batched differently generates the same tokens.
Penalties, biases and forbidden tokens change single logits in place, which are restored afterwards.

On a GPU there are three steps, and none of them waits for the device: ``stage`` computes the token masks and
uploads the parameters, before or after the forward pass is launched; ``choose_tensors`` queues the
computation of all results; and ``ChosenTensors.output`` reads them from the caller's copy in host memory.
``choose_tokens`` runs all three.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from agentflow.engine.batch import BatchOutput, FloatArray, IntArray, LogitEdits, SampledRows
from agentflow.kernels.inputs import ChoiceRows, Likelihoods
from agentflow.kernels.sampling.no_choice import NOT_FINITE
from agentflow.kernels.sampling.sampler import Sampler
from agentflow.kernels.uploads import upload
from agentflow.protocol.sampling import MAX_TOP_LOGPROBS


def choose_tokens(logits: Tensor, sampled: SampledRows, sampler: Sampler) -> BatchOutput:
    """Returns the token of each row, with its log-probability and the likeliest tokens if any row needs them.

    ``logits`` [S, vocabulary] float32: modified and restored. ``sampled.edits`` and then ``sampled.masks``
    are applied before ``Sampler.choose``. A row that is not finite gets ``NOT_FINITE``, even if it has a
    target.
    """
    chosen = choose_tensors(logits, stage(sampled, sampler, logits.device), sampler)
    return chosen.output_on_cpu() if logits.device.type == "cpu" else chosen.output(chosen.packed.cpu())


@dataclass(frozen=True, slots=True)
class StagedRows:
    """``SampledRows`` on a device, from ``stage``."""

    choice: Any  # from ``Sampler.stage``
    needs_logprobs: bool
    needs_ranks: bool
    edits: _StagedEdits | None
    scored: tuple[Tensor, Tensor] | None  # the row and the id of each token to score
    wants_top: NDArray[np.bool_] | None  # [S] whether a row needs the likeliest tokens; None: no row does
    top_rows: Tensor | None  # [K] the rows that need them; None: all rows do, or none


@dataclass(frozen=True, slots=True)
class ChosenTensors:
    """The results of ``choose_tensors``, on the device of the logits."""

    results: dict[str, Tensor]  # by fields of ``BatchOutput``; integers come first
    wants_top: NDArray[np.bool_] | None  # as in ``StagedRows``; other rows are not in the results

    @property
    def token_ids(self) -> Tensor:
        """[S] int64: tokens, or a number below 0 (``kernels.sampling.no_choice``). The next forward pass can
        read them on the device before the host has them."""
        return self.results["token_ids"]

    @property
    def packed(self) -> Tensor:
        """[any] uint8: all results, for a single copy to the host. From a GPU, a copy to pinned memory is
        asynchronous: wait for it before ``output``."""
        parts = [value.reshape(-1).view(torch.uint8) for value in self.results.values()]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def output(self, host: Tensor) -> BatchOutput:
        """Returns the results. ``host``: a copy of ``packed`` in host memory, which can be reused
        afterwards."""
        memory, first = host.numpy().copy(), 0
        arrays = {}
        for name, value in self.results.items():
            end = first + value.nbytes
            arrays[name] = memory[first:end].view(_DTYPES[value.dtype]).reshape(value.shape)
            first = end
        return self._output(arrays)

    def output_on_cpu(self) -> BatchOutput:
        """Returns the results if the device is a CPU."""
        return self._output({name: value.numpy() for name, value in self.results.items()})

    def _output(self, arrays: dict[str, Any]) -> BatchOutput:
        if self.wants_top is not None:
            arrays["top_ids"] = _spread(arrays["top_ids"], self.wants_top, -1)
            arrays["top_logprobs"] = _spread(arrays["top_logprobs"], self.wants_top, 0)
        return BatchOutput(**{"logprobs": None, **arrays})


def stage(sampled: SampledRows, sampler: Sampler, device: torch.device) -> StagedRows:
    """Uploads the parameters of the rows; does not wait for the device. The arrays of ``sampled`` must not
    change before ``choose_tensors``."""
    wants_top = None if sampled.top_counts is None else sampled.top_counts > 0
    top_rows = None
    if wants_top is not None and not wants_top.all():
        [top_rows] = _on_device([np.flatnonzero(wants_top)], device)
    scored = None
    if sampled.scored is not None:
        rows, token_ids = _on_device([sampled.scored.rows, sampled.scored.token_ids], device)
        scored = rows, token_ids
    return StagedRows(
        choice=sampler.stage(choice_rows(sampled), device),
        needs_logprobs=sampled.needs_logprobs,
        needs_ranks=_needs_ranks(sampled),
        edits=None if sampled.edits is None else _staged_edits(sampled.edits, device),
        scored=scored,
        wants_top=wants_top,
        top_rows=top_rows,
    )


def choose_tensors(logits: Tensor, staged: StagedRows, sampler: Sampler) -> ChosenTensors:
    """Computes the results of ``choose_tokens`` on the device of ``logits``. With ``triton_ops`` it queues
    kernels on the current stream and does not wait for them.

    Args:
        logits: [S, vocabulary] float32, contiguous; modified and restored.
        staged: from ``stage``, with the same sampler.
        sampler: chooses the tokens.
    """
    if staged.edits is None:
        tokens = sampler.choose(logits, staged.choice)
    else:
        with _edited(logits, staged.edits):
            tokens = sampler.choose(logits, staged.choice)
    if not staged.needs_logprobs:
        return ChosenTensors({"token_ids": tokens}, None)
    totals = sampler.log_sums(logits)
    tokens = torch.where(totals.isfinite(), tokens, NOT_FINITE)
    own = logits.gather(1, tokens.clamp(min=0).unsqueeze(1))
    results = {"token_ids": tokens}
    if staged.needs_ranks:
        results["ranks"] = _ranks(logits, own)
    top = None
    if staged.wants_top is not None:
        top = _top(logits, totals, staged.top_rows, sampler)
        results["top_ids"] = top[0]
    results["logprobs"] = own.squeeze(1) - totals
    if top is not None:
        results["top_logprobs"] = top[1]
    if staged.scored is not None:
        rows, token_ids = staged.scored
        results["scored_logprobs"] = logits[rows, token_ids] - totals[rows]
    return ChosenTensors(results, staged.wants_top)


def make_embedding_output(sampled: SampledRows, embeddings: FloatArray) -> BatchOutput:
    """Returns the output of a model that makes embeddings. Rows that are not finite get ``NOT_FINITE``."""
    is_finite = np.isfinite(embeddings).all(axis=1)
    return BatchOutput(np.where(is_finite, sampled.target_ids, NOT_FINITE), None, embeddings=embeddings)


def choice_rows(sampled: SampledRows) -> ChoiceRows:
    """Returns the parameters of the rows as the kernels read them."""
    masks = sampled.masks
    is_random = bool((sampled.temperatures > 0).any())
    return ChoiceRows(
        sampled.target_ids,
        sampled.temperatures,
        sampled.top_ks,
        sampled.top_ps,
        sampled.min_ps,
        uniforms(sampled.seeds, sampled.positions) if is_random else np.zeros(len(sampled.rows)),
        None if masks is None else masks.rows,
        None if masks is None else masks.words,
    )


def empty_likelihoods(sampled: SampledRows, vocab_size: int) -> Likelihoods | None:
    """Returns the arrays of log-probabilities for ``WholeForward.prepare_tokens``, or None if the rows need
    none."""
    if not sampled.needs_logprobs:
        return None
    num, counts, scored = len(sampled.rows), sampled.top_counts, sampled.scored
    wants_top = top_ids = top_logprobs = None
    if counts is not None:
        shape = num, min(MAX_TOP_LOGPROBS, vocab_size)
        wants_top = counts > 0
        top_ids, top_logprobs = np.full(shape, -1, dtype=np.int64), np.zeros(shape, dtype=np.float32)
    return Likelihoods(
        np.empty(num, dtype=np.float32),
        np.empty(num, dtype=np.int64) if _needs_ranks(sampled) else None,
        top_ids,
        top_logprobs,
        wants_top,
        None if scored is None else scored.rows,
        None if scored is None else scored.token_ids,
        None if scored is None else np.empty(len(scored.rows), dtype=np.float32),
    )


def make_output(token_ids: IntArray, found: Likelihoods | None) -> BatchOutput:
    """Returns the results of ``WholeForward.prepare_tokens`` as the output of a batch."""
    if found is None:
        return BatchOutput(token_ids, None)
    return BatchOutput(
        token_ids,
        found.logprobs,
        found.top_ids,
        found.top_logprobs,
        found.scored_logprobs,
        ranks=found.ranks,
    )


def _needs_ranks(sampled: SampledRows) -> bool:
    """Whether any row's target is a prompt token. The targets of token trees need no ranks."""
    has_target = sampled.target_ids >= 0
    if sampled.scored is not None:
        has_target[sampled.scored.rows] = False
    return bool(has_target.any())


_DTYPES = {torch.int64: np.int64, torch.float32: np.float32}


def _on_device(arrays: list[NDArray[Any]], device: torch.device) -> list[Tensor]:
    return [torch.from_numpy(array) for array in arrays] if device.type == "cpu" else upload(arrays, device)


def _parts(x: Tensor) -> Sequence[Tensor]:
    """Divides rows to bound the memory of intermediate results, which are up to twice as large as the logits:
    torch sums booleans as int64."""
    return torch.split(x, 16 if x.device.type == "cpu" else 64)


def _ranks(logits: Tensor, own: Tensor) -> Tensor:
    """Counts the logits of each row that are at least ``own`` [S, 1]."""
    parts = zip(_parts(logits), _parts(own), strict=True)
    return torch.cat([(part >= least).sum(dim=1) for part, least in parts])


def _top(logits: Tensor, totals: Tensor, rows: Tensor | None, sampler: Sampler) -> tuple[Tensor, Tensor]:
    """Returns the likeliest tokens of ``rows`` (None: all rows) and their log-probabilities. The number of
    tokens is constant, so that ties do not depend on the requests of other rows."""
    if rows is not None:
        logits, totals = logits.index_select(0, rows), totals.index_select(0, rows)
    values, token_ids = sampler.likeliest(logits, min(MAX_TOP_LOGPROBS, logits.shape[1]))
    return token_ids, values - totals.unsqueeze(1)


def _spread(values: NDArray[Any], chosen: NDArray[np.bool_], rest: int) -> NDArray[Any]:
    """Returns an array with the rows of ``values`` where ``chosen``, and ``rest`` in the other rows."""
    spread = np.full((len(chosen), values.shape[1]), rest, dtype=values.dtype)
    spread[chosen] = values
    return spread


@dataclass(frozen=True, slots=True)
class _StagedEdits:
    """``LogitEdits`` on a device. ``rows`` and ``token_ids`` join penalized, biased and forbidden logits, in
    this order."""

    rows: Tensor
    token_ids: Tensor
    num_each: tuple[int, int, int]
    penalties: tuple[Tensor, Tensor, Tensor, Tensor]  # counts, repetitions, frequencies, presences
    biases: Tensor


def _staged_edits(edits: LogitEdits, device: torch.device) -> _StagedEdits:
    rows, token_ids, counts, repetitions, frequencies, presences, biases = _on_device(
        [
            np.concatenate((edits.penalized_rows, edits.biased_rows, edits.forbidden_rows)),
            np.concatenate((edits.penalized_ids, edits.biased_ids, edits.forbidden_ids)),
            edits.penalized_counts,
            edits.repetitions,
            edits.frequencies,
            edits.presences,
            edits.biases,
        ],
        device,
    )
    num_each = len(edits.penalized_rows), len(edits.biased_rows), len(edits.forbidden_rows)
    return _StagedEdits(rows, token_ids, num_each, (counts, repetitions, frequencies, presences), biases)


@contextmanager
def _edited(logits: Tensor, edits: _StagedEdits) -> Iterator[None]:
    """Applies the edits to ``logits`` [S, vocabulary] inside the context, and restores the old values
    afterwards. Few logits are edited, so saving their values costs less than copying all logits."""
    flat = logits.view(-1)
    places = edits.rows * logits.shape[1] + edits.token_ids
    penalized, biased, forbidden = torch.split(places, list(edits.num_each))
    # Reads all values before changing any: a token may be in several lists.
    before = flat.index_select(0, places)
    if len(penalized):
        flat.index_copy_(0, penalized, _penalized(before[: len(penalized)], *edits.penalties))
    if len(biased):
        flat.index_add_(0, biased, edits.biases)
    if len(forbidden):
        flat.index_fill_(0, forbidden, -math.inf)
    try:
        yield
    finally:
        flat.index_copy_(0, places, before)


def _penalized(
    values: Tensor, counts: Tensor, repetitions: Tensor, frequencies: Tensor, presences: Tensor
) -> Tensor:
    """Applies the penalties as defined in ``SamplingParams``, each step rounded to float32."""
    values = torch.where(values > 0, values / repetitions, values * repetitions)
    values = values - frequencies * counts
    return values - presences * (counts > 0)


_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_FIRST_MULTIPLIER = np.uint64(0xBF58476D1CE4E5B9)
_SECOND_MULTIPLIER = np.uint64(0x94D049BB133111EB)


def uniforms(seeds: NDArray[np.uint64], positions: IntArray) -> NDArray[np.float64]:
    """Returns one number in [0, 1) for each pair of seed and position.

    Two rounds of the mixing function of splitmix64 (Steele, Lea and Flood, OOPSLA 2014), with the seed in the
    first and the position in the second; the number is the upper 53 bits.
    """
    state = _mix(_mix(seeds + _GOLDEN) + positions.astype(np.uint64) * _GOLDEN)
    return (state >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    x = (x ^ (x >> np.uint64(30))) * _FIRST_MULTIPLIER
    x = (x ^ (x >> np.uint64(27))) * _SECOND_MULTIPLIER
    return x ^ (x >> np.uint64(31))
