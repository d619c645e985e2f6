"""Products with weights in panels, which store weights in the order in which the products read them."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from agentflow.kernels.activations import ACTIVATIONS, Activation
from agentflow.kernels.inputs import BlockMatrix, LinearWeight, LowRank, QuantisedPanels
from agentflow.kernels.linear.method import LinearMethod
from agentflow.kernels.native_ops.structures import (
    BLOCK_TYPES,
    LANES,
    MAX_SEGMENTS,
    PANEL,
    PANEL_FORMATS,
    NativeChangedRows,
    array_address,
    native_low_rank,
    native_weight,
    pointer,
)
from agentflow.kernels.native_ops.team import is_bf16, team
from agentflow.kernels.page_advice import empty_memory, release_file_pages


class NativeLinear(LinearMethod):
    """``LinearMethod`` of the native kernels."""

    block_types = BLOCK_TYPES

    def pack(
        self, weight: Tensor, bias: Tensor | None, *, exact_output: bool = False, gated: bool = False
    ) -> LinearWeight:
        num_out, num_in = weight.shape
        loaded, weight = team(), weight.contiguous()
        size = loaded.af_panel_size(is_bf16(weight), num_out, num_in, gated)
        num_panels = -(-num_out // 2 // LANES) if gated else -(-num_out // PANEL)
        panels = _zeroed_panels(empty_memory(size, weight.dtype), 0, num_panels, num_panels)
        loaded.af_pack(is_bf16(weight), weight.data_ptr(), num_out, num_in, gated, panels.data_ptr())
        return LinearWeight(None, panels, bias, (num_out, num_in), is_gated=gated)

    def pack_blocks(
        self,
        parts: Sequence[BlockMatrix],
        bias: Tensor | None,
        *,
        gated: bool = False,
        device: torch.device | None = None,
    ) -> LinearWeight | None:
        if not _are_packable(parts, gated):
            return None
        num_out, num_in = sum(part.shape[0] for part in parts), parts[0].shape[1]
        if gated:
            num_panels = -(-num_out // 2 // LANES)
            panels = _empty_panels(parts[0].type, num_in, 0, num_panels, num_panels)
            first = 0
            for part in parts:
                _pack_part(part, first, num_out // 2, panels)
                first += part.shape[0]
            return LinearWeight(None, None, bias, (num_out, num_in), (panels,), is_gated=True)
        made: list[QuantisedPanels] = []
        for part in parts:
            first, num = sum(one.num_panels for one in made), -(-part.shape[0] // PANEL)
            made.append(_empty_panels(part.type, num_in, first, num, -(-num_out // PANEL)))
            _pack_part(part, 0, 0, made[-1])
        return LinearWeight(None, None, bias, (num_out, num_in), tuple(made))

    def pack_embedding(self, weight: Tensor, head: LinearWeight | None) -> LinearWeight:
        return self.pack(weight, None) if head is None else head

    def embed(self, token_ids: Tensor, weight: LinearWeight, dtype: torch.dtype) -> Tensor:
        ids, is_narrow = token_ids.contiguous(), dtype == torch.bfloat16
        out = torch.empty(len(ids), weight.shape[1], dtype=dtype)
        team().af_rows_of(is_narrow, native_weight(weight), ids.data_ptr(), len(ids), out.data_ptr())
        return out

    def multiply(
        self,
        x: Tensor,
        weight: LinearWeight,
        added: Tensor | None = None,
        *,
        activation: Activation | None = None,
    ) -> Tensor:
        num_out = weight.shape[0] // 2 if weight.is_gated else weight.shape[0]
        return _product(x, weight, x.new_empty(x.shape[0], num_out), added, activation)

    def add_product(self, hidden: Tensor, x: Tensor, weight: LinearWeight) -> None:
        assert hidden.is_contiguous()
        _product(x, weight, hidden, hidden)

    def multiply_exactly(self, x: Tensor, weight: LinearWeight) -> Tensor:
        return _product(
            x, weight, torch.empty(x.shape[0], weight.shape[0], dtype=torch.float32), is_exact=True
        )

    def low_rank(self, x: Tensor, num_out: int, changes: Sequence[tuple[LowRank, Tensor]]) -> Tensor:
        x, out = x.contiguous(), x.new_empty(x.shape[0], num_out)
        natives = [native_low_rank(change) for change, _ in changes]
        made = [
            NativeChangedRows(ctypes.pointer(native), rows.data_ptr(), len(rows))
            for native, (_, rows) in zip(natives, changes, strict=True)
        ]
        array = (NativeChangedRows * len(made))(*made)
        team().af_low_rank(
            is_bf16(x), x.data_ptr(), x.shape[0], x.shape[1], array, len(made), num_out, out.data_ptr()
        )
        return out


def _product(
    x: Tensor,
    weight: LinearWeight,
    out: Tensor,
    added: Tensor | None = None,
    activation: Activation | None = None,
    *,
    is_exact: bool = False,
) -> Tensor:
    """Writes a product to ``out``, and returns ``out``."""
    assert activation is not None or not weight.is_gated
    x, added = x.contiguous(), None if added is None else added.contiguous()
    function = len(ACTIVATIONS) if activation is None else ACTIVATIONS.index(activation)
    team().af_linear(
        *(is_bf16(x), x.data_ptr(), x.shape[0], native_weight(weight)),
        *(weight.is_gated, function, is_exact, pointer(added), out.data_ptr()),
    )
    return out


def _zeroed_panels(memory: Tensor, first: int, num: int, num_in_weight: int) -> Tensor:
    """Zeroes memory for panels and returns it.

    Args:
        memory: from ``empty_memory``, because each decode step reads all of it.
        first: the index in the weight of the first panel.
        num: the number of panels in the memory.
        num_in_weight: the number of panels in the whole weight.
    """
    team().af_zero_panels(memory.data_ptr(), first, num, num_in_weight, memory.nbytes // num)
    return memory


def _are_packable(parts: Sequence[BlockMatrix], gated: bool) -> bool:
    types = {part.type for part in parts}
    if not types.issubset(BLOCK_TYPES) or len(parts) > MAX_SEGMENTS:
        return False
    if gated:
        return len(types) == 1
    return all(part.shape[0] % PANEL == 0 for part in parts[:-1])


def _empty_panels(block_type: str, num_in: int, first: int, num: int, num_in_weight: int) -> QuantisedPanels:
    loaded, number = team(), BLOCK_TYPES.index(block_type)
    memory = empty_memory(num * loaded.af_block_panel_bytes(number, num_in), torch.uint8)
    panels = _zeroed_panels(memory, first, num, num_in_weight)
    return QuantisedPanels(PANEL_FORMATS[loaded.af_block_format(number)], panels, num)


_SLICE_BYTES = 16 << 20
"""The most bytes of a file that are in memory while it is packed, in addition to the panels."""


def _pack_part(part: BlockMatrix, first: int, gated_half: int, to: QuantisedPanels) -> None:
    rows, num_in = np.ascontiguousarray(part.rows), part.shape[1]
    number, is_mapped = BLOCK_TYPES.index(part.type), part.is_mapped and rows is part.rows
    step = max(PANEL, _SLICE_BYTES // rows.shape[1] // PANEL * PANEL) if is_mapped else len(rows)
    for begin in range(0, len(rows), step):
        some = rows[begin : begin + step]
        panels = to.panels.data_ptr()
        team().af_pack_blocks(
            number, array_address(some), len(some), num_in, first + begin, gated_half, panels
        )
        if is_mapped:
            release_file_pages(some.ctypes.data, some.nbytes)
