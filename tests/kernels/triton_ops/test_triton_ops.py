"""The Triton kernels: on a GPU compiled, elsewhere under Triton's interpreter."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import (
    FOREIGN,
    RULE,
    Case,
    Rows,
    Shape,
    Tree,
    assert_exact,
    batch_of,
    batches,
    exact_attention,
    make_case,
    seen_by_all,
    with_trees,
)
from numpy.typing import NDArray
from support.examples import examples

from agentflow.kernels import platforms
from agentflow.kernels.inputs import AttentionBatch, ForwardInput
from agentflow.kernels.platforms import REFERENCE, TORCH, Kernels, triton_kernels
from benchmarks.step import gpu_attention
from benchmarks.step.random_llama import llama_config, random_llama

pytest.importorskip("triton", reason="triton is for x86-64 and Linux")

from agentflow.kernels.triton_ops import early_start, interpreted
from agentflow.kernels.triton_ops.attention import units
from agentflow.kernels.triton_ops.attention.units import (
    EVERYWHERE,
    Units,
    find_groups,
    joined_slots,
    make_units,
)

TRITON = triton_kernels()
pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
RELATIVE_ERROR = {torch.float32: 5e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}
"""Of a whole result, by Euclid's norm: some units of rounding of each dtype."""
HEADS = [(4, 2, 8), (9, 3, 64), (12, 1, 32), (3, 3, 48), (17, 1, 16)]
"""Query heads, KV heads and the size of a head, which need not be powers of two."""


@pytest.fixture(autouse=True)
def _short_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs and segments short enough for small batches to have several."""
    monkeypatch.setattr(units, "LEAST_SAVING", 10)
    monkeypatch.setattr(units, "LEAST_SEGMENT", units.KEY_STEP)
    monkeypatch.setattr(units, "LEAST_BESIDE_WIDE", units.KEY_STEP)


def attended(case: Case, rows: Rows | None, *, has_table: bool = False) -> torch.Tensor:
    batch = batch_of(case, rows)
    plan = TRITON.attention.plan(with_table(batch) if has_table else batch, case.q.dtype, DEVICE)
    return TRITON.attention.attend(case.q.to(DEVICE), case.kv_layer.to(DEVICE), plan, RULE).cpu()


def with_table(batch: AttentionBatch) -> AttentionBatch:
    """The batch of an engine, whose table of slots is on the device, in longer rows."""
    rows, columns = batch.req_to_token.shape
    table = torch.full((rows + 1, columns + 5), FOREIGN, dtype=torch.int32, device=DEVICE)
    table[:rows, :columns] = torch.from_numpy(batch.req_to_token)
    return replace(batch, device_table=table)


def relative_error(result: torch.Tensor, expected: torch.Tensor) -> float:
    return float((result.double() - expected).norm() / expected.norm())


@examples(32)
@given(
    st.sampled_from([*RELATIVE_ERROR]),
    batches(),
    st.integers(0, 1000),
    st.sampled_from(HEADS),
    st.booleans(),
)
def test_f42a_attention_equals_float64(
    dtype: torch.dtype,
    batch: tuple[list[Shape], list[Tree]],
    seed: int,
    heads: tuple[int, int, int],
    has_table: bool,
) -> None:
    """Compares a random tree of requests, in a pool whose other slots are NaN."""
    sizes = dict(zip(("num_heads", "num_kv_heads", "head_dim"), heads, strict=True))
    case, rows = with_trees(make_case(batch[0], seed=seed, dtype=dtype, **sizes), batch[1], seed)
    assert_exact(attended(case, rows, has_table=has_table), case, rows)


@DTYPES
def test_f42a_attention_over_long_contexts(dtype: torch.dtype) -> None:
    """With prefixes of two levels, chunks, and segments of keys."""
    batch = [Shape(-1, 0, 700, 1), Shape(0, 600, 650, 1), Shape(0, 600, 630, 1), Shape(1, 620, 640, 12)]
    case = make_case([*batch, Shape(-1, 0, 20, 100), Shape(-1, 0, 0, 1)], dtype=dtype)
    assert_exact(attended(case, None, has_table=True), case)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_f42a_attention_over_5000_tokens(dtype: torch.dtype) -> None:
    """With shared prefixes of two levels, none a multiple of a block, and a request of one token."""
    batch = [Shape(-1, 0, 4999, 1), Shape(0, 4801, 4930, 3), Shape(1, 4907, 4925, 1), Shape(-1, 0, 0, 1)]
    case = make_case(batch, dtype=dtype, num_heads=2, num_kv_heads=1, head_dim=16)
    found = attended(case, None, has_table=True)
    assert_exact(found, case)
    assert relative_error(found, exact_attention(case).out) < RELATIVE_ERROR[dtype]


def cut_units(batch: AttentionBatch, *args: int) -> tuple[Units, NDArray[np.int32]]:
    """The units, and the table to which they refer."""
    table = batch.req_to_token if batch.device_table is not None else joined_slots(batch)[None]
    return make_units(find_groups(batch), *args), table


def keys_of(made: Units, table: NDArray[np.int32]) -> Iterator[tuple[int, int, int, bool]]:
    """Each row, slot and partial result for which a unit computes a score, and whether without a mask."""
    for (
        *(first_entry, num_rows, first_column, begin, end, full_end, first_end, full_begin),
        table_row,
    ) in np.concatenate((made.narrow, made.wide)).tolist():
        slots = table[table_row, first_column:] if first_end < 0 else made.nodes[first_end:]
        for entry in range(first_entry, first_entry + num_rows):
            low = made.lows[entry] if len(made.lows) else -1
            for key in range(begin, end):
                key_end = made.ends[first_end + key] if first_end >= 0 else EVERYWHERE
                is_unmasked = full_begin <= key < full_end
                if is_unmasked or low < key <= made.at[entry] < key_end:
                    yield (
                        int(made.rows[entry]),
                        int(slots[key]),
                        int(made.partial[entry]),
                        is_unmasked,
                    )


@given(
    batches(),
    st.integers(0, 1000),
    st.sampled_from([1, 2, 3, 12, 71]),
    st.integers(1, 40),
    st.sampled_from([0, 1, 2, 20]),
    st.booleans(),
)
def test_f42a_units_have_each_key_of_each_row_once(
    batch: tuple[list[Shape], list[Tree]],
    seed: int,
    queries_per_kv: int,
    processors: int,
    window: int,
    has_table: bool,
) -> None:
    """Against the slots that each row sees by definition. The partial results of a row are consecutive."""
    case, rows = with_trees(make_case(batch[0], seed=seed), batch[1], seed)
    window = max(window, int(rows.path_lens.max())) if window and rows is not None else window
    attended_batch = batch_of(case, rows)
    if has_table:
        attended_batch = with_table(attended_batch)
    made, table = cut_units(attended_batch, queries_per_kv, processors, window)
    seen: dict[int, list[int]] = {}
    parts: dict[int, set[int]] = {}
    for row, slot, part, _ in keys_of(made, table):
        seen.setdefault(row, []).append(slot)
        parts.setdefault(row, set()).add(part)
    assert [Counter(seen[row]) for row in sorted(seen)] == [
        Counter(slots[-window:]) for slots in seen_by_all(case, rows)
    ]
    numbers = np.split(np.arange(made.num_partials), made.merged_bounds[1:-1])
    merged = dict(zip(made.merged_rows.tolist(), (set(own.tolist()) for own in numbers), strict=False))
    for row in seen:
        # A segment of a chunk may hold no key of one of its rows: that part has no weight.
        assert parts[row] <= merged.get(row, {-1})


@given(batches(), st.integers(1, 40), st.sampled_from([0, 1, 20]))
def test_f42a_unmasked_blocks_are_whole(
    batch: tuple[list[Shape], list[Tree]], processors: int, window: int
) -> None:
    """The kernel reads them without bounds."""
    case, rows = with_trees(make_case(batch[0]), batch[1], 0)
    made, _ = cut_units(batch_of(case, rows), 2, processors, window)
    for unit in np.concatenate((made.narrow, made.wide)):
        begin, end, full_end, full_begin = unit[[3, 4, 5, 7]]
        assert begin <= full_begin <= full_end <= end
        assert begin % units.KEY_STEP == 0
        assert full_end % units.KEY_STEP == 0 or full_end in (full_begin, end)
        assert (full_end - full_begin) % units.KEY_STEP == 0


@pytest.mark.parametrize("window", [1, 64, 70, 200])
def test_units_skip_the_keys_outside_of_a_window(window: int) -> None:
    """Also the keys of prefixes that requests share."""
    case = make_case([Shape(-1, 0, 700, 1), Shape(0, 600, 650, 1), Shape(0, 600, 630, 30)])
    made, table = cut_units(with_table(batch_of(case)), 2, 40, window)
    seen: dict[int, set[int]] = {}
    for row, slot, _, _ in keys_of(made, table):
        seen.setdefault(row, set()).add(slot)
    assert [seen[row] for row in sorted(seen)] == [set(slots[-window:]) for slots in seen_by_all(case)]
    num_read = sum(int(unit[4] - unit[3]) for unit in np.concatenate((made.narrow, made.wide)))
    assert num_read <= 3 * (window + 2 * units.KEY_STEP) + 30


def test_f42a_a_prefix_that_requests_share_is_read_once() -> None:
    case = make_case([Shape(-1, 0, 300, 1), *[Shape(0, 256, 300, 1)] * 9])
    made, table = cut_units(with_table(batch_of(case, None)), 2, 10_000)
    reads = Counter(slot for _, slot, _, _ in keys_of(made, table))
    assert len(made.nodes) == 0  # no slots are copied to the device
    assert max(reads.values()) == 10  # each row attends to it, in tiles that read it together
    tiles = [unit for unit in made.wide if unit[4] - unit[3] and unit[1] > 1]
    assert sum(int(unit[4] - unit[3]) for unit in tiles) == 256


@pytest.mark.parametrize("levels", gpu_attention.LAYOUTS.values(), ids=str)
def test_programs_with_wide_tiles_fit_the_processors_beside_narrow_ones(
    levels: gpu_attention.Levels, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second wide program on a multiprocessor would take the room of narrow ones, and end later."""
    monkeypatch.undo()  # the lengths of real segments
    num, processors = 64, 132 / 8
    table = gpu_attention.slot_table(levels, num, 400_000)
    lens, ones = np.full(num, table.shape[1]), np.ones(num, dtype=int)
    shared = gpu_attention.shared_prefixes(levels, num)
    batch = AttentionBatch(table, np.arange(num), ones, lens, None, shared=shared)
    made = make_units(find_groups(batch), 4, processors)
    assert 0.75 * processors < len(made.wide) <= processors
    assert len(made.narrow) >= num


@settings(max_examples=6)
@given(st.lists(st.integers(1, 150), min_size=1, max_size=8), st.integers(0, 100), st.integers(0, 1000))
def test_f42b_plans_at_fixed_addresses(lens: list[int], shared: int, seed: int) -> None:
    """One batch after another, with rows that round the number up: nothing of an earlier batch remains."""
    plans = TRITON.attention.graph_plans((2, 8), 4, 2, DEVICE)
    first = max(lens[0], shared)
    for batch in (
        [Shape(-1, 0, first, 1), *(Shape(0, shared, shared + length, 1) for length in lens[1:])],
        [Shape(-1, 0, lens[-1], 1)],
    ):
        case = make_case(batch, seed=seed)
        plan = TRITON.attention.plan(with_table(batch_of(case, None)), torch.float32, DEVICE)
        form = plans.update(plan)
        assert form is not None
        assert form.num_rows == (2 if len(batch) <= 2 else 8)
        q = torch.zeros(form.num_rows, 4, 8, device=DEVICE)
        q[: len(batch)] = case.q.to(DEVICE)
        kv_layer = case.kv_layer.to(DEVICE)
        result = TRITON.attention.attend(q, kv_layer, plans.capture_with(form, plan), RULE)[: len(batch)]
        assert_exact(result.cpu(), case)


@pytest.mark.parametrize(
    ("batch", "has_table"),
    [([Shape(-1, 0, 5, 2)], True), ([Shape(-1, 0, 5, 1)] * 9, True), ([Shape(-1, 0, 5, 1)], False)],
    ids=["a chunk", "too many rows", "no table on the device"],
)
def test_f42b_batches_without_a_form(batch: list[Shape], has_table: bool) -> None:
    plans = TRITON.attention.graph_plans((2, 8), 4, 2, DEVICE)
    made = batch_of(make_case(batch))
    made = with_table(made) if has_table else made
    assert plans.update(TRITON.attention.plan(made, torch.float32, DEVICE)) is None


def random(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(*shape).to(dtype)


def on_device(*tensors: torch.Tensor) -> list[torch.Tensor]:
    return [tensor.clone().to(DEVICE) for tensor in tensors]


def assert_rounds_alike(result: torch.Tensor, expected: torch.Tensor) -> None:
    """Up to the last bit, which the order of a sum may turn."""
    assert result.dtype == expected.dtype
    eps = torch.finfo(expected.dtype).eps
    torch.testing.assert_close(result.cpu(), expected, rtol=2 * eps, atol=2 * eps)


@DTYPES
@pytest.mark.parametrize("shape", [(1, 48), (7, 64), (5, 3, 20)], ids=str)
def test_f42c_norms(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Norms of rows, and of heads in a strided view."""
    torch.manual_seed(0)
    x, residual, weight = (
        random(*shape, dtype=dtype),
        random(*shape, dtype=dtype),
        random(shape[-1], dtype=dtype),
    )
    if len(shape) == 3:
        wide = random(shape[0], 8, shape[2], dtype=dtype)
        x = wide[:, 2:5]
        [on_gpu] = on_device(wide)
        expected = REFERENCE.rows.rms_norm(x, weight, 1e-5)
        assert_rounds_alike(TRITON.rows.rms_norm(on_gpu[:, 2:5], weight.to(DEVICE), 1e-5), expected)
        return
    assert_rounds_alike(
        TRITON.rows.rms_norm(*on_device(x, weight), 1e-5), REFERENCE.rows.rms_norm(x, weight, 1e-5)
    )
    expected, total = REFERENCE.rows.add_rms_norm(x, residual.clone(), weight, 1e-5)
    normed, added = TRITON.rows.add_rms_norm(*on_device(x, residual, weight), 1e-5)
    assert torch.equal(added.cpu(), total)
    assert_rounds_alike(normed, expected)


@DTYPES
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(4, 2, 16), (9, 3, 64), (3, 3, 24)])
def test_f42c_rope_and_write(dtype: torch.dtype, num_heads: int, num_kv_heads: int, head_dim: int) -> None:
    """A row without a slot writes nothing."""
    torch.manual_seed(0)
    qkv = random(5, num_heads + 2 * num_kv_heads, head_dim, dtype=dtype)
    angles = torch.rand(5, 1, head_dim // 2) * 7
    cos, sin = (
        torch.cat(parts, -1).to(dtype) for parts in ((angles.cos(),) * 2, (-angles.sin(), angles.sin()))
    )
    slots = torch.tensor([3, 0, -1, 6, 2])
    there = torch.full((8, 2, num_kv_heads, head_dim), 7.0).to(dtype)
    pool = there.clone()
    written = slots >= 0
    REFERENCE.rows.rope_and_write(qkv[written], cos[written], sin[written], pool, slots[written])
    expected = REFERENCE.rows.rope_and_write(qkv, cos, sin, there.clone(), slots.clip(min=0))
    moved = on_device(qkv, cos, sin, there, slots)
    assert torch.equal(TRITON.rows.rope_and_write(*moved).cpu(), expected)
    assert torch.equal(moved[3].cpu(), pool)


@pytest.mark.parametrize(
    ("dtype", "num_rows"), [*((dtype, 1) for dtype in RELATIVE_ERROR), (torch.bfloat16, 5)]
)
def test_f42c_the_gated_activation(dtype: torch.dtype, num_rows: int) -> None:
    torch.manual_seed(0)
    x, weight = random(num_rows, 24, dtype=dtype), random(2 * 1100, 24, dtype=dtype)
    plain = REFERENCE.linear.pack(weight, None, gated=True)
    expected = REFERENCE.linear.multiply(x, plain, activation="silu")
    packed = TRITON.linear.pack(weight.to(DEVICE), None, gated=True)
    result = TRITON.linear.multiply(x.to(DEVICE), packed, activation="silu")
    assert relative_error(result.cpu(), expected.double()) < RELATIVE_ERROR[dtype]


@DTYPES
@given(st.integers(1, 40), st.integers(1, 2_100), st.booleans(), st.booleans(), st.integers(0, 99))
@examples(60)
def test_f42c_products_of_one_row(
    dtype: torch.dtype, num_out: int, num_in: int, has_bias: bool, has_added: bool, seed: int
) -> None:
    torch.manual_seed(seed)
    x, weight, added = (
        random(*shape, dtype=dtype) for shape in ((1, num_in), (num_out, num_in), (1, num_out))
    )
    bias = random(num_out, dtype=dtype) if has_bias else torch.zeros(num_out, dtype=dtype)
    product = torch.nn.functional.linear(x.double(), weight.double(), bias.double())
    expected = product + added.double() if has_added else product
    packed = TRITON.linear.pack(weight.to(DEVICE), bias.to(DEVICE) if has_bias else None)
    result = TRITON.linear.multiply(x.to(DEVICE), packed, added.to(DEVICE) if has_added else None)
    exact = TRITON.linear.multiply_exactly(x.to(DEVICE), packed)
    # Sums in float32, then the product and the result are rounded.
    sums = (num_in + 1) * 2.0**-24 * (x.double().abs() @ weight.double().abs().T + bias.double().abs())
    unit = torch.finfo(dtype).eps
    assert (result.dtype, exact.dtype) == (dtype, torch.float32)
    assert ((exact.cpu().double() - product).abs() <= sums).all()
    assert ((result.cpu().double() - expected).abs() <= sums + unit * (product.abs() + expected.abs())).all()


def test_f42d_a_whole_model_computes_what_it_computes_on_torch_kernels() -> None:
    """A chunk, then decode steps; on a GPU these replay a graph."""
    cpu = torch.device("cpu")
    table = np.arange(120, dtype=np.int32).reshape(3, 40)
    steps = [np.array([9, 1, 17]), *[np.array([1, 1, 1])] * 4]
    results = []
    for kernels, device in ((TORCH, cpu), (TRITON, DEVICE)):
        model = random_llama(llama_config(32, 48, 2, 4, 2, 100), kernels, torch.float32, device)
        pool = torch.full((2, 120, 2, 2, 8), torch.nan, device=device).unbind(0)
        cached, hidden = np.zeros(3, dtype=np.int64), []
        rng = np.random.default_rng(0)
        for counts in steps:
            positions = np.concatenate([np.arange(c, c + n) for c, n in zip(cached, counts, strict=True)])
            slots = table[np.repeat(np.arange(3), counts), positions].astype(np.int64)
            cached = cached + counts
            batch = AttentionBatch(table, np.arange(3), counts, cached, None)
            plan = kernels.attention.plan(batch, torch.float32, device)
            tokens = rng.integers(0, 100, len(positions))
            with torch.inference_mode():
                given = ForwardInput(tokens, positions, slots, pool, plan, np.cumsum(counts) - 1)
                hidden.append(model.forward(given).cpu().clone())
        results.append(torch.cat(hidden))
    torch.testing.assert_close(results[1], results[0], rtol=2e-4, atol=2e-4)


@pytest.mark.only_gpu
def test_f42d_kernels_that_start_early_wait_for_what_they_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of one row, in graphs: most kernels start before the one in front has ended."""
    outputs = []
    for is_early in (True, False):
        if not is_early:
            monkeypatch.setattr(early_start, "_can_start_early", lambda device: False)
        model = random_llama(llama_config(2048, 4096, 8, 16, 4, 1_000), TRITON, torch.bfloat16, DEVICE)
        pool = torch.zeros((8, 600, 2, 4, 128), dtype=torch.bfloat16, device=DEVICE).unbind(0)
        table, one = np.arange(600, dtype=np.int32)[None], np.ones(1, dtype=np.int64)
        hidden = []
        for place in range(400):
            batch = AttentionBatch(table, 0 * one, one, one + place, None)
            with torch.inference_mode():
                plan = TRITON.attention.plan(batch, torch.bfloat16, DEVICE)
                given = ForwardInput(one * (place % 97), one * place, one * place, pool, plan, 0 * one)
                hidden.append(model.forward(given).clone())
        outputs.append(torch.cat(hidden).cpu())
    assert torch.equal(*outputs)


def test_f42d_which_kernels_a_device_gets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENTFLOW_KERNELS", "triton")
    assert platforms.kernels_for(DEVICE).name == "triton"
    with monkeypatch.context() as patch:
        patch.setattr(interpreted, "IS_INTERPRETED", SimpleNamespace(value=False))
        with pytest.raises(ValueError, match="TRITON_INTERPRET"):
            platforms.kernels_for(torch.device("cpu"))
    platforms.check(TRITON, DEVICE)
    monkeypatch.delenv("AGENTFLOW_KERNELS")
    monkeypatch.setattr(platforms, "check", lambda kernels, device: None)
    assert platforms.kernels_for(torch.device("cuda")).name == "triton"


@pytest.mark.parametrize("is_missing", [True, False])
def test_f42d_without_them_a_gpu_runs_on_torch_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, is_missing: bool
) -> None:
    def fails(kernels: Kernels, device: torch.device) -> None:
        raise RuntimeError("no C compiler")

    monkeypatch.delenv("AGENTFLOW_KERNELS", raising=False)
    monkeypatch.setattr(platforms, "check", fails)
    if is_missing:
        monkeypatch.delattr("agentflow.kernels.triton_ops")
        monkeypatch.setitem(sys.modules, "agentflow.kernels.triton_ops", None)
    assert platforms.kernels_for(torch.device("cuda")) is TORCH
    assert "slower torch kernels" in caplog.text
    monkeypatch.setenv("AGENTFLOW_KERNELS", "triton")
    with pytest.raises(ValueError, match="'triton', but"):
        platforms.kernels_for(torch.device("cuda"))
