"""The attention of one layer against FlashInfer's, if that is installed: its decode, which reads shared runs
for each request, and its cascade, which reads them once at each of a fixed number of levels.

docs/internals/kernels.md says how to bring it to a machine without a network.
"""

from __future__ import annotations

import importlib
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from agentflow.engine.models.config import DecoderConfig
from benchmarks.report import Report, one_line
from benchmarks.step.device_time import Repeated, alternated_ms
from benchmarks.step.gpu_attention import LAYOUTS, REPEATS, RUNS, UNSHARED, Case, Levels

WORKSPACE_BYTES = 256 << 20
MAX_DIFFERENCE = 2e-2
"""Between two results, relative to the largest value: several roundings to bfloat16."""
Attend = Callable[[], Tensor]


@dataclass(frozen=True)
class Pages:
    """The keys of one level as pages of one token, in FlashInfer's form: the requests ``qo_indptr[i]`` to
    ``qo_indptr[i + 1]`` (exclusive) share the pages ``indices[kv_indptr[i] : kv_indptr[i + 1]]``."""

    qo_indptr: NDArray[np.int32]
    kv_indptr: NDArray[np.int32]
    indices: NDArray[np.int32]

    @classmethod
    def of(cls, table: NDArray[np.int32], start: int, length: int, num_sharing: int) -> Pages:
        """Returns the keys from ``start`` on, which each ``num_sharing`` requests share."""
        num = len(table) // num_sharing
        return cls(
            np.arange(0, len(table) + 1, num_sharing, dtype=np.int32),
            np.arange(num + 1, dtype=np.int32) * np.int32(length),
            np.ascontiguousarray(table[::num_sharing, start : start + length]).ravel(),
        )

    def tensors(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Returns the arrays on the device, and the number of tokens in the last page of each group."""
        last = np.ones(len(self.kv_indptr) - 1, dtype=np.int32)
        arrays = (self.qo_indptr, self.kv_indptr, self.indices, last)
        return tuple(torch.from_numpy(array).to(device) for array in arrays)  # type: ignore[return-value]


def pages_of(table: NDArray[np.int32], levels: Levels) -> list[Pages]:
    """Returns the keys of each level."""
    starts = np.cumsum([0, *(length for length, _ in levels)]).tolist()
    return [
        Pages.of(table, start, length, num_sharing)
        for start, (length, num_sharing) in zip(starts, levels, strict=False)
    ]


def measure(
    report: Report, device: torch.device, config: DecoderConfig, say: Callable[[str], object]
) -> None:
    """Measures all layouts. A part that fails is left out, and ``say`` gets a line about it."""
    try:
        flashinfer: Any = importlib.import_module("flashinfer")
    except Exception as error:
        say(f"FlashInfer was not compared: it cannot be imported ({one_line(error)})")
        return
    workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)

    def decode(case: Case, *, use_tensor_cores: bool) -> Attend:
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            workspace, "NHD", use_tensor_cores=use_tensor_cores, backend="fa2"
        )
        _, kv_indptr, indices, last = Pages.of(case.table, 0, case.table.shape[1], 1).tensors(device)
        wrapper.plan(
            *(kv_indptr, indices, last, *_heads(case), 1),
            q_data_type=torch.bfloat16,
            kv_data_type=torch.bfloat16,
        )
        return lambda: wrapper.run(case.q, case.kv_layer.unsqueeze(2))

    def cascade(case: Case, backend: str) -> Attend:
        wrapper = flashinfer.MultiLevelCascadeAttentionWrapper(len(case.levels), workspace, "NHD")
        for level in wrapper._batch_prefill_wrappers:  # the cascade has no option for it
            level._backend = backend
        levels = [pages.tensors(device) for pages in pages_of(case.table, case.levels)]
        wrapper.plan(
            *([*arrays] for arrays in zip(*levels, strict=True)),
            *_heads(case),
            1,
            q_data_type=torch.bfloat16,
            kv_data_type=torch.bfloat16,
        )
        return lambda: wrapper.run(case.q, case.kv_layer.unsqueeze(2))

    decodes: dict[str, Callable[[Case], Attend]] = {
        "decode": lambda case: decode(case, use_tensor_cores=False),
        "decode on tensor cores": lambda case: decode(case, use_tensor_cores=True),
    }
    cascades: dict[str, Callable[[Case], Attend]] = {
        "cascade": lambda case: cascade(case, "auto"),  # fa3 on Hopper
        "cascade with fa2": lambda case: cascade(case, "fa2"),
    }
    for name, levels in (*LAYOUTS.items(), ("decode64_attention", UNSHARED)):
        case = Case.of(levels, config, device)
        kinds = decodes if levels is UNSHARED else {**decodes, **cascades}
        theirs = {}
        for kind, make in kinds.items():
            try:
                theirs[kind] = _checked(make(case), case, device)
            except Exception as error:
                say(f"FlashInfer's {kind} was not compared on {name}: {one_line(error)}")
        if theirs:
            _compare(report, name, case, theirs)


def _heads(case: Case) -> tuple[int, int, int]:
    """Returns the numbers of query and KV heads, and their size."""
    return case.q.shape[1], case.kv_layer.shape[2], case.q.shape[2]


def _checked(attend: Attend, case: Case, device: torch.device) -> Repeated:
    """Captures attention whose result is right. Raises ``ValueError`` for another result."""
    expected, result = (one().float().view(case.q.shape) for one in (case.ours(), attend))
    difference = float((result - expected).abs().max() / expected.abs().max())
    if not difference < MAX_DIFFERENCE:
        raise ValueError(f"its result differs by {difference:.2g} of the largest value")
    try:
        return Repeated.of(attend, device, REPEATS)
    except RuntimeError:  # it cannot be captured, so launches count
        torch.cuda.synchronize(device)
        return Repeated(attend, REPEATS, None)


def _compare(report: Report, name: str, case: Case, theirs: dict[str, Repeated]) -> None:
    """Adds the ratios of their times and ours."""
    device = case.q.device
    ours, *others = (
        [ms / REPEATS for ms in took]
        for took in alternated_ms([Repeated.of(case.ours(), device, REPEATS), *theirs.values()], device, RUNS)
    )
    took = dict(zip(theirs, others, strict=True))
    note = f"{case.levels}: {1e3 * statistics.median(ours):.0f} us against " + ", ".join(
        f"{kind} {1e3 * statistics.median(each):.0f}" + ("" if theirs[kind].graph else " with launches")
        for kind, each in took.items()
    )
    for figure, kind, goal in (
        ("over_flashinfer", "decode", "" if case.levels is UNSHARED else ">= 4.0"),
        ("over_cascade", "cascade", ">= 1.2"),
    ):
        if found := [each for each_kind, each in took.items() if each_kind.startswith(kind)]:
            fastest = min(found, key=statistics.median)
            ratios = [their_ms / our_ms for their_ms, our_ms in zip(fastest, ours, strict=True)]
            report.median(f"gpu.{name}_{figure}", ratios, "ratio", note=note, goal=goal)
