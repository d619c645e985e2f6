"""Launches batches on a GPU without waiting for it. A mark in its queue shows when a batch is finished.

A batch may continue the previous batch while that still runs: it then reads the tokens that the previous
batch chooses on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from agentflow.engine.batch import Batch, BatchOutput, SampledRows, joined
from agentflow.engine.models.device_table import DeviceTable, write_slots
from agentflow.engine.models.forward.decode_graphs import DeviceInput, list_arrays, on_device
from agentflow.engine.models.forward.decoder import Decoder
from agentflow.engine.models.sampler import ChosenTensors, StagedRows, choose_tensors, stage
from agentflow.kernels.device_stream import DeviceStream, StreamMark
from agentflow.kernels.inputs import ForwardInput
from agentflow.kernels.sampling.sampler import Sampler

MAX_LOGIT_ROWS = 256
"""The most rows of logits in memory. A row takes 200 kB for a vocabulary of 50,000."""


def divide_rows(sampled: SampledRows) -> list[SampledRows]:
    """Divides sampled rows into parts of at most ``MAX_LOGIT_ROWS``."""
    if 0 < len(sampled.rows) <= MAX_LOGIT_ROWS:
        return [sampled]
    firsts = range(0, len(sampled.rows), MAX_LOGIT_ROWS)
    return [sampled.slice(first, first + MAX_LOGIT_ROWS) for first in firsts]


@dataclass(slots=True)
class DeviceStep:
    """A batch that was launched. ``chosen`` and ``copies`` have one item for each part of ``divide_rows``."""

    sampled: SampledRows
    chosen: list[ChosenTensors] = field(default_factory=list)  # on the device
    copies: list[Tensor] = field(default_factory=list)  # the results on the host, after the mark
    mark: StreamMark | None = None  # after all work of the batch

    @property
    def tokens(self) -> Tensor:
        """The token of each sampled row, on the device."""
        if len(self.chosen) == 1:
            return self.chosen[0].token_ids
        return torch.cat([part.token_ids for part in self.chosen])

    def output(self) -> BatchOutput:
        """Waits for the batch. Returns its results."""
        assert self.mark is not None
        self.mark.synchronize()
        outputs = [part.output(copy) for part, copy in zip(self.chosen, self.copies, strict=True)]
        return joined(outputs) if outputs else BatchOutput(self.sampled.target_ids.copy(), None)


class DeviceSteps:
    """Launches batches of a model on a device, in order.

    Args:
        model: the model.
        sampler: the sampler of its kernels.
        stream: the queue of the device.
        table_shape: the shape of the table of slots: the most requests in a batch, and the most tokens of a
            request. A batch with a larger table needs a new one on the device, and new graphs.
    """

    def __init__(
        self, model: Decoder, sampler: Sampler, stream: DeviceStream, table_shape: tuple[int, int]
    ) -> None:
        self._model = model
        self._sampler = sampler
        self._stream = stream
        self.table = DeviceTable(table_shape, stream.device)
        self._before: DeviceStep | None = None  # the last batch that was launched

    def launch(self, batch: Batch, given: ForwardInput) -> DeviceStep:
        """Queues the forward pass of a batch on the device, computes the token masks meanwhile, and queues
        the choice of tokens. ``given``: the batch's input for the model, whose plan refers to ``table``. The
        arrays may change after this returns."""
        before, self._before = self._before, None  # stays None if this launch fails
        try:
            step = self._launch(batch, given, before)
        except BaseException:
            self.table.forget()
            raise
        self._before = step
        return step

    def _launch(self, batch: Batch, given: ForwardInput, before: DeviceStep | None) -> DeviceStep:
        arrays = list_arrays(given) | self.table.changes(batch)
        if batch.pending is not None:
            arrays |= {"inputs": batch.pending.inputs, "outputs": batch.pending.outputs}
        arrived = self._stream.upload(arrays)
        pending: tuple[Tensor, DeviceStep, Tensor] | None = None
        if batch.pending is not None:
            assert before is not None
            pending = arrived["inputs"], before, arrived["outputs"]
        step = DeviceStep(batch.sampled)
        write, hidden = partial(write_slots, self.table.slots, arrived), list[Tensor]()
        self._stream.run(partial(self._forward, hidden, write, on_device(given, arrived), pending))
        # Computes the token masks while the device runs the forward pass.
        staged = [stage(part, self._sampler, self._stream.device) for part in divide_rows(batch.sampled)]
        self._stream.run(partial(self._choose, step, hidden, staged))
        step.mark = self._stream.mark()
        return step

    def _forward(
        self,
        hidden: list[Tensor],
        write_table: Callable[[], None],
        given: DeviceInput,
        pending: tuple[Tensor, DeviceStep, Tensor] | None,
    ) -> None:
        """Appends the hidden states of the sampled rows to ``hidden``.

        Args:
            hidden: receives one tensor.
            write_table: applies the batch's changes to the table on the device.
            given: the input of the model.
            pending: the indices in the batch of tokens that the previous batch chooses, the previous batch,
                and its rows that choose them.
        """
        write_table()
        if pending is not None:
            inputs, before, outputs = pending
            # A row of the previous batch may have no token. Its request then fails, and its result in this
            # batch is discarded.
            given.token_ids.index_copy_(0, inputs, before.tokens.index_select(0, outputs).clamp_(min=0))
        hidden.append(self._model.launch(given))

    def _choose(self, step: DeviceStep, hidden: list[Tensor], staged: Sequence[StagedRows]) -> None:
        rows = hidden.pop()
        for number, part in enumerate(staged):
            first = number * MAX_LOGIT_ROWS
            logits = self._model.logits(rows[first : first + MAX_LOGIT_ROWS])
            chosen = choose_tensors(logits, part, self._sampler)
            step.chosen.append(chosen)
            step.copies.append(self._stream.download(chosen.packed))
