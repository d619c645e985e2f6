"""Products of rows with one of several matrices each, on a GPU: mixtures of experts, and adapters (LoRA).
They are compared with float64, with the limits of the GPU, and with one expert or adapter after the other."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from agentflow.engine.models.forward.adapted_products import Products
from agentflow.engine.models.forward.experts_in_turn import experts_in_turn
from agentflow.kernels.decoder_weights import Experts, Mlp, Routing
from agentflow.kernels.inputs import Adapter, AdapterRows, LayerAdapter, LowRank, LowRankPart
from agentflow.kernels.linear.method import LinearMethod
from agentflow.kernels.linear.routing import routed
from agentflow.kernels.platforms import kernels_for
from benchmarks.report import Report
from benchmarks.step.device_time import kernels_ms, timed_ms
from benchmarks.step.limits import Limits
from benchmarks.step.work import Work

NUM_INPUTS = 4
"""The number of alternating inputs, so that consecutive calls use different experts."""
RUNS, REPEATS = 5, 8
RANK = 16
"""The rank of adapters."""


@dataclass(frozen=True)
class MixtureShape:
    """The sizes of a mixture."""

    hidden: int
    inner: int
    num_experts: int
    num_used: int


MIXTURES = {
    "mixtral": MixtureShape(4096, 14336, 8, 2),  # Mixtral 8x7B
    "qwen3_moe": MixtureShape(2048, 768, 128, 8),  # Qwen3 30B-A3B
}
TINY_MIXTURES = {"mixtral": MixtureShape(64, 48, 4, 2)}


def random_experts(
    shape: MixtureShape, linear: LinearMethod, dtype: torch.dtype, device: torch.device
) -> Experts:
    """Returns experts with random weights, created on the device."""
    hidden, inner, num = shape.hidden, shape.inner, shape.num_experts
    gate_ups = torch.randn(num, 2 * inner, hidden, device=device, dtype=dtype).mul_(hidden**-0.5)
    downs = torch.randn(num, hidden, inner, device=device, dtype=dtype).mul_(inner**-0.5)
    experts = [
        Mlp(linear.pack(gate_up, None, gated=True), linear.pack(down, None))
        for gate_up, down in zip(gate_ups, downs, strict=True)
    ]
    router = linear.pack(torch.randn(num, hidden, device=device, dtype=dtype), None)
    return Experts(router, Routing(shape.num_used), experts)


def wrong_products(device: torch.device, *, is_small: bool) -> list[str]:
    """Returns the grouped products that differ from float64 by more than rounding does."""
    linear, wrong = kernels_for(device).linear, []
    shape = MixtureShape(96, 80, 6, 2) if is_small else MixtureShape(1_024, 768, 24, 4)
    torch.manual_seed(0)
    for dtype, most in ((torch.bfloat16, 1e-2), (torch.float16, 2e-3), (torch.float32, 1e-5)):
        experts = random_experts(shape, linear, dtype, device)
        mixture = linear.group_experts(experts, "silu")
        if mixture is None:
            return ["mixtures, which the kernels do not group"]
        for num_rows in (1, 5, 20) if is_small else (1, 5, 64, 300, 2_000):
            x = torch.randn(num_rows, shape.hidden, device=device).to(dtype)
            scores = linear.multiply(x, experts.router)
            error = _error(mixture(x, scores), _exact_mixture(x, scores, experts))
            if not error < most:
                wrong.append(f"a mixture of {num_rows} rows in {dtype} by {error:.2g}")
        for num_rows in (1, 5, 20) if is_small else (1, 64, 500):
            sizes = (96, 80) if is_small else (2_048, 1_536)
            case = Adapted.random(linear, dtype, device, num_rows, 4, sizes)
            product = case.products(is_grouped=True).multiply(case.x, case.weights[0], 0, "output")
            error = _error(product, case.exact(0))
            if not error < most:
                wrong.append(f"changes of {num_rows} rows by adapters in {dtype} by {error:.2g}")
    return wrong


def _error(result: Tensor, exact: Tensor) -> float:
    return float((result.double() - exact).norm() / exact.norm())


def _exact_mixture(x: Tensor, scores: Tensor, experts: Experts) -> Tensor:
    weights, chosen = routed(scores, experts.routing)
    out = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    for number, expert in enumerate(experts.experts):
        rows, places = (chosen == number).nonzero(as_tuple=True)
        assert expert.gate_up.transposed is not None
        assert expert.down.transposed is not None
        gate, up = (x[rows].double() @ expert.gate_up.transposed.double()).chunk(2, dim=-1)
        part = (torch.nn.functional.silu(gate) * up) @ expert.down.transposed.double()
        out.index_add_(0, rows, part * weights[rows, places].double().unsqueeze(1))
    return out


@dataclass(frozen=True)
class Adapted:
    """A product in several layers, whose rows have adapters in turn."""

    linear: LinearMethod
    x: Tensor
    weights: Sequence[Any]  # of the layers
    rows: Sequence[AdapterRows]

    @classmethod
    def random(
        cls,
        linear: LinearMethod,
        dtype: torch.dtype,
        device: torch.device,
        num_rows: int,
        num_adapters: int,
        shape: tuple[int, int],
        *,
        num_layers: int = 1,
    ) -> Adapted:
        """``shape``: outputs and inputs."""
        num_out, num_in = shape

        def random(*sizes: int) -> Any:
            made = torch.randn(*sizes, device=device, dtype=dtype).mul_(sizes[-1] ** -0.5)
            return linear.pack(made, None)

        def change() -> LowRank:
            return LowRank(random(RANK, num_in), (LowRankPart(random(num_out, RANK), 0),))

        adapters = [
            Adapter(tuple(LayerAdapter(output=change()) for _ in range(num_layers)))
            for _ in range(num_adapters)
        ]
        numbers = np.arange(num_rows)
        rows = [
            AdapterRows(adapter, numbers[number::num_adapters], numbers[number::num_adapters])
            for number, adapter in enumerate(adapters)
            if number < num_rows
        ]
        x = torch.randn(num_rows, num_in, device=device).to(dtype)
        return cls(linear, x, [random(num_out, num_in) for _ in range(num_layers)], rows)

    def products(self, *, is_grouped: bool) -> Products:
        grouped = None
        if is_grouped:
            table = self.linear.adapter_table(len(self.weights), self.x.dtype, self.x.device)
            assert table is not None
            grouped = table.grouped(self.rows, len(self.x))
            assert grouped is not None
        return Products(self.linear, self.rows, self.x.device, grouped)

    def exact(self, layer: int) -> Tensor:
        """Returns the changed product of a layer in float64."""
        x = self.x.double()
        out: Tensor = x @ self.weights[layer].transposed.double()
        for one in self.rows:
            change = one.adapter.layers[layer].output
            assert change is not None
            assert change.down.transposed is not None
            inner = x[one.rows] @ change.down.transposed.double()
            for part in change.parts:
                assert part.up.transposed is not None
                out[one.rows] += inner @ part.up.transposed.double()
        return out


def measure(
    report: Report, device: torch.device, limits: Limits, write: Callable[[], None], *, is_small: bool
) -> None:
    """Adds the times of mixtures and of adapters to the report."""
    linear = kernels_for(device).linear
    for name, shape in (TINY_MIXTURES if is_small else MIXTURES).items():
        torch.manual_seed(0)
        experts = random_experts(shape, linear, torch.bfloat16, device)
        for num_rows in (1, 4) if is_small else (1, 16, 64, 512):
            case = _MixtureCase(name, shape, experts, linear, device, num_rows)
            case.measure(report, limits, is_small=is_small)
        write()
        del experts, case
        if device.type == "cuda":
            torch.cuda.empty_cache()
    for num_rows, num_adapters in ((4, 2),) if is_small else ((1, 1), (64, 8)):
        sizes = (96, 64) if is_small else (4096, 4096)
        # As many layers as no cache holds.
        adapted = Adapted.random(
            *(linear, torch.bfloat16, device, num_rows, num_adapters, sizes), num_layers=NUM_INPUTS
        )
        _measure_adapters(report, adapted, limits, is_small=is_small)


@dataclass(frozen=True)
class _MixtureCase:
    name: str
    shape: MixtureShape
    experts: Experts
    linear: LinearMethod
    device: torch.device
    num_rows: int

    def measure(self, report: Report, limits: Limits, *, is_small: bool) -> None:
        shape, experts, linear, device = self.shape, self.experts, self.linear, self.device
        mixture = linear.group_experts(experts, "silu")
        assert mixture is not None
        inputs = [
            torch.randn(self.num_rows, shape.hidden, device=device).bfloat16() for _ in range(NUM_INPUTS)
        ]
        given = [(x, linear.multiply(x, experts.router)) for x in inputs]
        num_read = statistics.mean(
            len({*routed(scores, experts.routing)[1].flatten().tolist()}) for _, scores in given
        )
        of_expert = 3 * shape.hidden * shape.inner
        work = Work(2.0 * of_expert * num_read, 2.0 * of_expert * shape.num_used * self.num_rows)
        together, in_turn = itertools.cycle(given), itertools.cycle(given)

        def dense(mlp: Mlp, rows: Tensor) -> Tensor:
            return linear.multiply(linear.multiply(rows, mlp.gate_up, activation="silu"), mlp.down)

        [took] = kernels_ms([lambda: mixture(*next(together))], device, RUNS, 1 if is_small else REPEATS)
        before = timed_ms(
            lambda: experts_in_turn(*next(in_turn), experts, None, dense), device, 1 if is_small else RUNS
        )
        limit_ms, before_ms = limits.ms(work), statistics.median(before)
        note = (
            f"{self.num_rows} rows, {num_read:.0f} experts: {1e3 * statistics.median(took):.0f} us; "
            f"{work.num_bytes / 1e9:.2f} GB and {work.flops / 1e12:.3f} TFLOP need {1e3 * limit_ms:.0f}"
        )
        of_limit, name = [limit_ms / ms for ms in took], f"gpu.{self.name}_{self.num_rows}"
        over = [before_ms / ms for ms in took]
        report.median(f"{name}_of_limit", of_limit, "ratio", note=note)
        note = f"expert after expert: {1e3 * before_ms:.0f} us"
        report.median(f"{name}_over_in_turn", over, "ratio", note=note)


def _measure_adapters(report: Report, case: Adapted, limits: Limits, *, is_small: bool) -> None:
    num_rows, num_adapters = len(case.x), len(case.rows)
    num_out, num_in = case.weights[0].shape

    def repeated(multiply: Callable[[int], object]) -> Callable[[], object]:
        layers = itertools.cycle(range(len(case.weights)))
        return lambda: multiply(next(layers))

    def changed(products: Products) -> Callable[[], object]:
        return repeated(lambda layer: products.multiply(case.x, case.weights[layer], layer, "output"))

    calls = [
        repeated(lambda layer: case.linear.multiply(case.x, case.weights[layer])),
        changed(case.products(is_grouped=True)),
        changed(case.products(is_grouped=False)),
    ]
    plain, together, in_turn = kernels_ms(calls, case.x.device, RUNS, 1 if is_small else 5 * REPEATS)
    weights = float(RANK * (num_out + num_in))
    least_ms = limits.ms(Work(2.0 * weights * num_adapters, 2.0 * weights * num_rows))
    note = (
        f"{num_rows} rows, {num_adapters} adapters of rank {RANK}, {num_out:,} x {num_in:,}: "
        f"{1e3 * statistics.median(together):.1f} us; without adapters {1e3 * statistics.median(plain):.1f}; "
        f"reading the adapters takes {1e3 * least_ms:.1f}"
    )
    of_plain = [before / ms for before, ms in zip(plain, together, strict=True)]
    over = [before / ms for before, ms in zip(in_turn, together, strict=True)]
    before = f"adapter after adapter, in a graph too: {1e3 * statistics.median(in_turn):.1f} us"
    report.median(f"gpu.lora_{num_rows}_of_plain", of_plain, "ratio", note=note)
    report.median(f"gpu.lora_{num_rows}_over_in_turn", over, "ratio", note=before)
