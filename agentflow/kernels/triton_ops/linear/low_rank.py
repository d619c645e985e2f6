"""Low-rank changes of a product by the adapters of its rows, in two launches for all adapters.

The rows of a batch are sorted by adapter once (``row_blocks``). For each product, one kernel multiplies the
rows with the first matrices of their adapters, in parts of the inputs. Another kernel adds the parts,
multiplies them with the second matrices, and adds the result to the product. So rows of different adapters
and ranks share a launch, as in Punica (Chen et al. 2023, arXiv 2310.18547) and S-LoRA (Sheng et al. 2023,
arXiv 2311.03285). A table on the device has the addresses of the matrices, so that a graph does not depend on
the adapters of a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from agentflow.kernels.inputs import Adapter, AdapterRows, LayerAdapter, LinearWeight, LowRank
from agentflow.kernels.triton_ops.device_limits import num_processors
from agentflow.kernels.triton_ops.early_start import early_start, take_turn
from agentflow.kernels.triton_ops.interpreted import dot, rounded
from agentflow.kernels.triton_ops.linear.row_blocks import RowBlocks, sorted_rows
from agentflow.kernels.uploads import upload

NUM_SLOTS = 64
"""The most adapters in the table. A batch with more adapters computes them one after the other."""
MAX_PARTS = 3
"""The most parts of a change: queries, keys and values."""
PRODUCT_NAMES = tuple(field.name for field in fields(LayerAdapter))
_COLUMNS = 2 + 5 * MAX_PARTS
"""The columns of a change in the table: the distance of its first matrix and the sum of its ranks; then for
each part the distance of its second matrix, its first output, its number of outputs, its rank, and its first
row in the first matrix."""
_PART_COLUMNS = tl.constexpr(5)
_TABLE_COLUMNS = tl.constexpr(_COLUMNS)
_BLOCK_IN = 128
_LEAST_INPUTS = 256  # in a part of the inputs
_MAX_RANKS = 64  # in a tile


class ProductForm(NamedTuple):
    """Bounds of the changes of one product, over all layers and adapters in the table."""

    num_ranks: int = 0  # the ranks of all parts, as a power of two; 0: no adapter changes this product
    num_parts: int = 0
    num_outputs: int = 0  # the outputs of the largest part


class AdaptersForm(NamedTuple):
    """The parameters of a step's launches, in addition to its number of rows."""

    products: tuple[ProductForm, ...]
    num_adapters: int  # the most different adapters, as a power of two


class AdapterTable:
    """The matrices of adapters in use, for all products of a model: ``linear.grouped.AdapterTable``.

    Args:
        num_layers: the number of the model's layers.
        dtype: the model's type.
        device: the model's device.
    """

    def __init__(self, num_layers: int, dtype: torch.dtype, device: torch.device) -> None:
        self._slots: WeakKeyDictionary[Adapter, int] = WeakKeyDictionary()
        self._device = device
        # Matrices are addressed by their distance from this one, in values.
        self._base = torch.zeros(16, dtype=dtype, device=device)
        self._table = torch.zeros(
            (num_layers, len(PRODUCT_NAMES), NUM_SLOTS, _COLUMNS), dtype=torch.int64, device=device
        )
        self._products: tuple[ProductForm, ...] = (ProductForm(),) * len(PRODUCT_NAMES)
        self._forms: WeakKeyDictionary[Adapter, tuple[ProductForm, ...]] = WeakKeyDictionary()

    @property
    def base(self) -> Tensor:
        return self._base

    def grouped(self, adapters: Sequence[AdapterRows], num_rows: int) -> GroupedAdapters | None:
        """Like ``linear.grouped.AdapterTable.grouped``."""
        if len(adapters) > NUM_SLOTS or not self._enter([one.adapter for one in adapters]):
            return None
        slots = np.full(num_rows, -1, dtype=np.int32)
        for one in adapters:
            slots[one.rows] = self._slots[one.adapter]
        [on_device] = upload([slots], self._device)
        form = AdaptersForm(self._products, triton.next_power_of_2(len(adapters)))
        return GroupedAdapters(self, on_device, form)

    def of_product(self, layer: int, product: int) -> Tensor:
        """Returns the changes of one product: [slots, columns]."""
        return self._table[layer, product]

    def _enter(self, adapters: Sequence[Adapter]) -> bool:
        """Writes adapters that are not in the table yet. Returns whether all are in the table."""
        missing = [adapter for adapter in adapters if adapter not in self._slots]
        if not missing:
            return True
        if not all(map(self._fits, missing)):
            return False
        free = [slot for slot in range(NUM_SLOTS) if slot not in {*self._slots.values()}]
        if len(free) < len(missing):  # replace adapters that this batch does not use
            kept = {id(adapter) for adapter in adapters}
            for adapter in [each for each in self._slots if id(each) not in kept]:
                free.append(self._slots.pop(adapter))
        for adapter in missing:
            slot = free.pop(0)
            rows = np.zeros((self._table.shape[0], len(PRODUCT_NAMES), _COLUMNS), dtype=np.int64)
            for layer, changes in enumerate(adapter.layers):
                for number, name in enumerate(PRODUCT_NAMES):
                    change: LowRank | None = getattr(changes, name)
                    if change is not None:
                        rows[layer, number] = self._columns_for(change)
            self._table[:, :, slot].copy_(torch.from_numpy(rows))
            self._slots[adapter] = slot
            self._forms[adapter] = _forms(adapter)
        present = [self._forms[adapter] for adapter in self._slots]
        self._products = tuple(
            ProductForm(*map(max, zip(*(forms[number] for forms in present), strict=True)))
            for number in range(len(PRODUCT_NAMES))
        )
        return True

    def _fits(self, adapter: Adapter) -> bool:
        changes = [getattr(layer, name) for layer in adapter.layers for name in PRODUCT_NAMES]
        found = [change for change in changes if change is not None]
        return all(_is_plain(change, self._base.dtype) for change in found) and (
            # Allocations of a GPU are aligned. On other devices only the interpreter runs, which needs no
            # alignment.
            self._device.type != "cuda" or all(self._distance(change.down) % 16 == 0 for change in found)
        )

    def _columns_for(self, change: LowRank) -> list[int]:
        columns, first = [self._distance(change.down), change.down.shape[0]], 0
        for part in change.parts:
            num_out, rank = part.up.shape
            columns += [self._distance(part.up), part.first_output, num_out, rank, first]
            first += rank
        return columns + [0] * (_COLUMNS - len(columns))

    def _distance(self, weight: LinearWeight) -> int:
        assert weight.transposed is not None
        return (weight.transposed.data_ptr() - self._base.data_ptr()) // self._base.element_size()


def _is_plain(change: LowRank, dtype: torch.dtype) -> bool:
    matrices = [change.down, *(part.up for part in change.parts)]
    return len(change.parts) <= MAX_PARTS and all(
        each.transposed is not None
        and each.transposed.dtype == dtype
        and each.transposed.t().is_contiguous()
        and each.bias is None
        for each in matrices
    )


def _forms(adapter: Adapter) -> tuple[ProductForm, ...]:
    forms = []
    for name in PRODUCT_NAMES:
        form = ProductForm()
        for layer in adapter.layers:
            change: LowRank | None = getattr(layer, name)
            if change is not None:
                num_ranks = max(16, triton.next_power_of_2(change.down.shape[0]))
                widest = max(part.up.shape[0] for part in change.parts)
                form = ProductForm(*map(max, form, (num_ranks, len(change.parts), widest)))
        forms.append(form)
    return tuple(forms)


@dataclass(slots=True)
class GroupedAdapters:
    """The adapter of each row of a batch: ``linear.grouped.GroupedAdapters``."""

    table: AdapterTable
    slots: Tensor  # [T] int32: the slot in the table; -1: the row has no adapter
    form: AdaptersForm
    _blocks: RowBlocks | None = None

    def at(self, slots: Tensor) -> GroupedAdapters:
        """Like ``linear.grouped.GroupedAdapters.at``."""
        return GroupedAdapters(self.table, slots, self.form)

    def add(self, out: Tensor, x: Tensor, layer: int, product_name: str) -> None:
        """Adds the rounded changes to a product of x, ``out`` [T, out]."""
        number = PRODUCT_NAMES.index(product_name)
        form = self.form.products[number]
        if not form.num_ranks or not len(x):
            return
        if self._blocks is None:
            size = 16 if len(x) <= 16 * self.form.num_adapters else 64
            self._blocks = sorted_rows(self.slots, NUM_SLOTS, size, self.form.num_adapters)
        add_low_rank(out, x, self.table.base, self.table.of_product(layer, number), self._blocks, form)


def add_low_rank(
    out: Tensor, x: Tensor, base: Tensor, table: Tensor, blocks: RowBlocks, form: ProductForm
) -> None:
    """Adds the changes of each row's adapter to a product, in place.

    Args:
        out: the product, [T, out]; the values of a row must be adjacent.
        x: the rows, [T, in].
        base: the matrix from which the table counts distances.
        table: the changes of this product by adapter, [slots, columns].
        blocks: the rows sorted by adapter.
        form: the bounds of the changes.
    """
    num_rows, num_in = x.shape
    x = x if x.stride(-1) == 1 else x.contiguous()
    assert out.stride(-1) == 1
    block_ranks = min(form.num_ranks, _MAX_RANKS)
    rank_blocks = form.num_ranks // block_ranks
    at_once = 2 * num_processors(x.device) // (blocks.num_blocks * rank_blocks)
    num_splits = max(1, min(at_once, num_in // _LEAST_INPUTS, 16))
    split = -(-num_in // (num_splits * _BLOCK_IN)) * _BLOCK_IN
    num_splits = -(-num_in // split)
    inner = torch.empty((num_splits, num_rows, form.num_ranks), dtype=torch.float32, device=x.device)
    early = early_start(x.device, num_rows)
    block_in = _BLOCK_IN if x.dtype != torch.float32 else 64
    _shrink[(blocks.num_blocks, rank_blocks, num_splits)](
        x, base, table, blocks.blocks, blocks.order, inner, blocks.num_blocks, num_rows, num_in, split,
        x.stride(0), NUM_RANKS=form.num_ranks, IS_EVEN=num_in % block_in == 0, BLOCK_ROWS=blocks.size,
        BLOCK_RANKS=block_ranks, BLOCK_IN=block_in, STAGES=3, num_warps=4, **early,
    )  # fmt: skip
    block_columns = 128 if x.dtype != torch.float32 and blocks.size == 16 else 64
    _expand[(blocks.num_blocks, -(-form.num_outputs // block_columns), form.num_parts)](
        inner, base, table, blocks.blocks, blocks.order, out, blocks.num_blocks, num_rows, num_splits,
        out.stride(0), NUM_RANKS=form.num_ranks, BLOCK_ROWS=blocks.size, BLOCK_RANKS=min(block_ranks, 32),
        BLOCK_COLUMNS=block_columns, num_warps=4, **early,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_blocks", "num_rows"])
def _shrink(
    x, base, table, blocks, order, inner, num_blocks, num_rows, num_in, split, row_stride,
    NUM_RANKS: tl.constexpr, IS_EVEN: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_RANKS: tl.constexpr,
    BLOCK_IN: tl.constexpr, STAGES: tl.constexpr, IS_EARLY: tl.constexpr,
):  # fmt: skip
    """Multiplies a block of rows with some rows of its adapter's first matrix, over a part of the inputs."""
    take_turn(IS_EARLY)
    slot = tl.load(blocks + tl.program_id(0))
    if slot < 0:
        return
    entry = table + slot * _TABLE_COLUMNS
    num_ranks = tl.load(entry + 1).to(tl.int32)
    ranks = tl.program_id(1) * BLOCK_RANKS + tl.arange(0, BLOCK_RANKS)
    if tl.program_id(1) * BLOCK_RANKS >= num_ranks:
        return
    first = tl.load(blocks + num_blocks + tl.program_id(0))
    end = tl.load(blocks + 2 * num_blocks + tl.program_id(0))
    within = tl.arange(0, BLOCK_ROWS)
    places = tl.minimum(first + within, end - 1)
    rows = tl.load(order + places).to(tl.int64)
    offset = tl.multiple_of(tl.load(entry), 16)  # ``_fits`` checks it
    inputs = tl.arange(0, BLOCK_IN)
    begin = tl.program_id(2) * split
    tile = base + offset + tl.minimum(ranks, num_ranks - 1).to(tl.int64)[:, None] * num_in + inputs[None, :]
    tile_of_x = x + rows[None, :] * row_stride + inputs[:, None]
    sums = tl.zeros([BLOCK_RANKS, BLOCK_ROWS], dtype=tl.float32)
    for start in tl.range(begin, tl.minimum(begin + split, num_in), BLOCK_IN, num_stages=STAGES):
        if IS_EVEN:
            weights = tl.load(tile + start)
            values = tl.load(tile_of_x + start)
        else:
            is_input = start + inputs < num_in
            weights = tl.load(tile + start, mask=is_input[None, :], other=0.0)
            values = tl.load(tile_of_x + start, mask=is_input[:, None], other=0.0)
        sums += dot(weights, values)
    plane = inner + tl.program_id(2) * num_rows.to(tl.int64) * NUM_RANKS
    tl.store(
        plane + (first + within).to(tl.int64)[None, :] * NUM_RANKS + ranks[:, None],
        sums, mask=(first + within < end)[None, :] & (ranks < num_ranks)[:, None],
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_blocks", "num_rows", "num_splits"])
def _expand(
    inner, base, table, blocks, order, out, num_blocks, num_rows, num_splits, out_stride,
    NUM_RANKS: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_RANKS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr, IS_EARLY: tl.constexpr,
):  # fmt: skip
    """Multiplies the results of ``_shrink`` with one part's second matrix, and adds the result to the
    product."""
    take_turn(IS_EARLY)
    slot = tl.load(blocks + tl.program_id(0))
    if slot < 0:
        return
    entry = table + slot * _TABLE_COLUMNS + 2 + tl.program_id(2) * _PART_COLUMNS
    num_out = tl.load(entry + 2).to(tl.int32)
    if tl.program_id(1) * BLOCK_COLUMNS >= num_out:  # other adapters have more outputs or parts
        return
    rank = tl.load(entry + 3).to(tl.int32)
    first_rank = tl.load(entry + 4).to(tl.int32)
    first = tl.load(blocks + num_blocks + tl.program_id(0))
    end = tl.load(blocks + 2 * num_blocks + tl.program_id(0))
    within = tl.arange(0, BLOCK_ROWS)
    places = tl.minimum(first + within, end - 1)
    columns = tl.program_id(1) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    is_column = columns < num_out
    up = base + tl.load(entry) + columns.to(tl.int64)[:, None] * rank
    dtype = out.dtype.element_ty
    plane_size = num_rows.to(tl.int64) * NUM_RANKS
    sums = tl.zeros([BLOCK_COLUMNS, BLOCK_ROWS], dtype=tl.float32)
    for start in range(0, rank, BLOCK_RANKS):
        ranks = start + tl.arange(0, BLOCK_RANKS)
        is_rank = ranks < rank
        place = inner + places.to(tl.int64)[None, :] * NUM_RANKS + (first_rank + ranks)[:, None]
        values = tl.zeros([BLOCK_RANKS, BLOCK_ROWS], dtype=tl.float32)
        for number in range(num_splits):
            values += tl.load(place + number * plane_size, mask=is_rank[:, None], other=0.0)
        weights = tl.load(up + ranks[None, :], mask=is_column[:, None] & is_rank[None, :], other=0.0)
        sums += dot(weights, rounded(values, dtype))
    rows = tl.load(order + places).to(tl.int64)
    first_output = tl.load(entry + 1)
    target = out + rows[None, :] * out_stride + first_output + columns[:, None]
    is_stored = (first + within < end)[None, :] & is_column[:, None]
    before = tl.load(target, mask=is_stored, other=0.0).to(tl.float32)
    tl.store(target, rounded(before + rounded(sums, dtype).to(tl.float32), dtype), mask=is_stored)
