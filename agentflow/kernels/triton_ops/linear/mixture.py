"""A mixture of experts (Shazeer et al. 2017, arXiv 1701.06538) in five launches, regardless of the chosen
experts.

One kernel chooses the experts of each row, one sorts the rows by expert, two multiply them with all chosen
experts (``grouped_products``), and one adds the results of a row, always in the order in which they were
chosen. Nothing waits for the device, so that a graph can contain the launches. A single row needs no sorting.
"""

from __future__ import annotations

import functools
import logging
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from agentflow.kernels.activations import Activation
from agentflow.kernels.decoder_weights import Experts, Mlp, Routing
from agentflow.kernels.inputs import LinearWeight
from agentflow.kernels.linear.routing import routed
from agentflow.kernels.triton_ops.early_start import early_start, take_turn
from agentflow.kernels.triton_ops.interpreted import IS_INTERPRETED, rounded
from agentflow.kernels.triton_ops.linear.grouped_products import (
    StackedWeight,
    block_size,
    multiply_grouped,
    stacked,
)
from agentflow.kernels.triton_ops.linear.row_blocks import RowBlocks, sorted_rows

logger = logging.getLogger(__name__)

ACTIVATIONS: tuple[Activation, ...] = ("silu", "clamped_swiglu")
_COLUMNS = 1024  # for each program that adds experts
_MOST_VALUES = 1 << 27  # in intermediate results; more rows are computed in parts


def group_experts(experts: Experts, activation: Activation) -> GroupedExperts | None:
    """Like ``LinearMethod.group_experts``."""
    grouped, why = _grouped(experts, activation)
    if grouped is not None:
        values = grouped.gate_up.values
        dtype = values.dtype if values.is_floating_point() else torch.bfloat16
        if not _is_right(values.device, dtype):
            grouped, why = None, "a grouped product fails"
    if grouped is None:
        _warn(why)
    return grouped


def _grouped(experts: Experts, activation: Activation) -> tuple[GroupedExperts | None, str]:
    """Returns the grouped experts, or None and the reason why they cannot be grouped."""
    if activation not in ACTIVATIONS:
        return None, f"their activation is {activation}"
    gate_up = stacked([expert.gate_up for expert in experts.experts])
    down = stacked([expert.down for expert in experts.experts])
    if gate_up is None or down is None:
        return None, "the formats of their weights differ"
    return GroupedExperts(experts.routing, gate_up, down, activation), ""


@functools.cache  # once, not for each layer
def _warn(why: str) -> None:
    logger.warning("experts are computed one after the other, and steps are not captured in graphs: %s", why)


@functools.cache
def _is_right(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether small mixtures have the expected results on this device. Logs a warning if not."""
    if IS_INTERPRETED.value:
        return True
    eye = torch.eye(32, device=device, dtype=dtype)

    def dense(weight: Tensor) -> LinearWeight:
        return LinearWeight(weight.t(), None, None, (weight.shape[0], weight.shape[1]))

    def expert(factor: float) -> Mlp:
        return Mlp(dense(torch.cat((2.0 * eye, eye))), dense(factor * eye))

    try:
        grouped, _ = _grouped(Experts(dense(eye[:2]), Routing(1), [expert(1.0), expert(-1.0)]), "silu")
        assert grouped is not None
        for num_rows in (1, 2):
            result = grouped(eye[:num_rows], eye[:num_rows, :2].contiguous()).float()
            signs = torch.tensor([1.0, -1.0], device=device)[:num_rows, None]
            expected = 1.7616 * signs * eye[:num_rows].float()
            if not bool(((result - expected).abs() < 0.02).all()):
                logger.warning("a grouped product has a wrong result")
                return False
    except Exception as error:  # of Triton, its compiler, or the driver
        logger.warning("a kernel of grouped products fails: %s", error)
        return False
    return True


@dataclass(frozen=True, slots=True)
class GroupedExperts:
    """The experts of one layer, with weights in one format: ``linear.grouped.Mixture``."""

    routing: Routing
    gate_up: StackedWeight
    down: StackedWeight
    activation: Activation

    def __call__(
        self, x: Tensor, scores: Tensor, added: Tensor | None = None, slots: Tensor | None = None
    ) -> Tensor:
        most = max(1, _MOST_VALUES // (self.routing.num_used * sum(self.down.shape)))
        parts = []
        for first in range(0, max(1, len(x)), most):
            rows = slice(first, first + most)
            rest = [None if each is None else each[rows] for each in (added, slots)]
            parts.append(self._computed(x[rows], scores[rows], *rest))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _computed(self, x: Tensor, scores: Tensor, added: Tensor | None, slots: Tensor | None) -> Tensor:
        num_rows, num_used = len(x), self.routing.num_used
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        if not num_rows:
            return out
        x = x if x.stride(-1) == 1 else x.contiguous()
        size = block_size(num_rows * num_used, self.gate_up.num, x.dtype)
        weights, blocks = self._assigned(scores, slots, size)
        inner = multiply_grouped(x, self.gate_up, blocks, num_used, activation=self.activation)
        parts = multiply_grouped(inner, self.down, blocks, num_used)
        _add_experts[(num_rows, -(-x.shape[1] // _COLUMNS))](
            parts, weights, out if added is None else added.contiguous(), out, x.shape[1], NUM_USED=num_used,
            HAS_ADDED=added is not None, BLOCK=_COLUMNS, **early_start(x.device, num_rows),
        )  # fmt: skip
        return out

    def _assigned(self, scores: Tensor, slots: Tensor | None, size: int) -> tuple[Tensor, RowBlocks]:
        """Returns the weights of each row's experts as float32, [T, used], and the rows sorted by expert."""
        routing, num = self.routing, self.gate_up.num
        if routing.num_groups > 1:
            weights, numbers = routed(scores, routing)
            chosen = numbers.to(torch.int32)
            if slots is not None:
                chosen = torch.where(slots.unsqueeze(1) >= 0, chosen, -1)
            return weights.contiguous(), sorted_rows(chosen, num, size)
        num_rows, num_used = len(scores), routing.num_used
        weights = torch.empty((num_rows, num_used), dtype=torch.float32, device=scores.device)
        # For a single row, these are its blocks; their first line has its experts.
        chosen = torch.empty((3, num_rows * num_used), dtype=torch.int32, device=scores.device)
        order = torch.empty(num_used, dtype=torch.int32, device=scores.device)
        _choose_experts[(num_rows,)](
            scores, scores if slots is None else slots, chosen, order, weights, num,
            scores.stride(0), routing.scale, NORMALISES=routing.normalises, NUM_USED=num_used,
            HAS_SLOTS=slots is not None, IS_ONE_ROW=num_rows == 1, BLOCK=triton.next_power_of_2(num),
            BLOCK_USED=triton.next_power_of_2(num_used),
            num_warps=1 if num <= 256 else 4, **early_start(scores.device, num_rows),
        )  # fmt: skip
        if num_rows == 1:
            return weights, RowBlocks(chosen, order, size)
        return weights, sorted_rows(chosen[0], num, size)


@triton.jit(do_not_specialize=["num_experts"])
def _choose_experts(
    scores, slots, chosen, order, weights, num_experts, row_stride, scale,
    NORMALISES: tl.constexpr, NUM_USED: tl.constexpr, HAS_SLOTS: tl.constexpr, IS_ONE_ROW: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_USED: tl.constexpr, IS_EARLY: tl.constexpr,
):  # fmt: skip
    """Chooses the experts with a row's highest scores; of equal scores, the lowest indices. A row with NaN
    gets NaN weights."""
    take_turn(IS_EARLY)
    row = tl.program_id(0)
    experts = tl.arange(0, BLOCK)
    is_left = experts < num_experts
    values = tl.load(scores + row.to(tl.int64) * row_stride + experts, mask=is_left, other=float("-inf"))
    values = values.to(tl.float32)
    is_nan = tl.max((values != values).to(tl.int32), 0) > 0
    values = tl.where(values == values, values, float("-inf"))
    highest = tl.max(values, 0)
    total = tl.sum(tl.exp(values - highest), 0)
    places = tl.arange(0, BLOCK_USED)
    numbers = tl.zeros([BLOCK_USED], dtype=tl.int32)
    powers = tl.zeros([BLOCK_USED], dtype=tl.float32)
    for place in tl.static_range(NUM_USED):
        top = tl.max(tl.where(is_left, values, float("-inf")), 0)
        number = tl.min(tl.where(is_left & (values == top), experts, BLOCK), 0)
        is_left = is_left & (experts != number)
        numbers = tl.where(places == place, number, numbers)
        powers = tl.where(places == place, tl.exp(top - highest), powers)
    if NORMALISES:
        powers /= tl.sum(powers, 0)
    else:
        powers = powers / total * scale
    powers = tl.where(is_nan, float("nan"), powers)
    if HAS_SLOTS:  # a padding row of a captured graph has no slot, and reads no expert
        numbers = tl.where(tl.load(slots + row) >= 0, numbers, -1)
    is_used = places < NUM_USED
    tl.store(weights + row * NUM_USED + places, powers, mask=is_used)
    tl.store(chosen + row * NUM_USED + places, numbers, mask=is_used)
    if IS_ONE_ROW:  # each expert of the row is a block
        tl.store(chosen + NUM_USED + places, places, mask=is_used)
        tl.store(chosen + 2 * NUM_USED + places, places + 1, mask=is_used)
        tl.store(order + places, places, mask=is_used)


@triton.jit
def _add_experts(
    parts, weights, added, out, size,
    NUM_USED: tl.constexpr, HAS_ADDED: tl.constexpr, BLOCK: tl.constexpr, IS_EARLY: tl.constexpr,
):  # fmt: skip
    take_turn(IS_EARLY)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_column = columns < size
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for place in tl.static_range(NUM_USED):
        number = row * NUM_USED + place
        part = tl.load(parts + number * size + columns, mask=is_column, other=0.0).to(tl.float32)
        total += tl.load(weights + number) * part
    if HAS_ADDED:
        total += tl.load(added + row * size + columns, mask=is_column, other=0.0).to(tl.float32)
    tl.store(out + row * size + columns, rounded(total, out.dtype.element_ty), mask=is_column)
