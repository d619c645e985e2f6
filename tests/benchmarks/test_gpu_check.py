"""The program that checks and measures a GPU, tried on a CPU: its sections, the workloads of the engine, and
the layouts of the attention that it compares."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from agentflow.engine.models.forward.decoder import Decoder
from benchmarks.step import gpu_attention, gpu_sections, gpu_workloads
from benchmarks.step.gpu_flashinfer import pages_of
from benchmarks.step.gpu_workloads import ALL_ON, WITHOUT, Words
from benchmarks.step.random_llama import TINY, RandomRunner

CPU = torch.device("cpu")
NAMES = ("few_shot", "tree_of_thought", "chat", "unshared")
PARTS = ("prefix_cache", "launching_ahead", "fair_policy")  # the others need a GPU


@pytest.mark.full
def test_the_check_of_a_device_finds_nothing_on_this_one() -> None:
    assert gpu_sections.differing_tokens(CPU, num_tokens=8) == []
    assert gpu_sections.differing_choices(CPU, 10, 300) == 0


@pytest.mark.full
@pytest.mark.timeout(300)
def test_f42q_the_check_of_8_bit_floats_finds_nothing_under_the_interpreter(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("triton", reason="triton is for x86-64 and Linux")
    from agentflow.kernels.triton_ops.linear import fp8

    monkeypatch.setenv("AGENTFLOW_KERNELS", "triton")
    assert gpu_sections.wrong_8_bit_floats(CPU) == []
    really = fp8.dequantised_rows
    monkeypatch.setattr(fp8, "dequantised_rows", lambda *args: really(*args) * 1.03)
    assert len(gpu_sections.wrong_8_bit_floats(CPU)) >= 4


def test_the_check_of_a_device_finds_a_wrong_product(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    right = RandomRunner.__post_init__

    def wrong_at_last(self: RandomRunner) -> None:
        right(self)
        made.append(self)
        if len(made) == 2:
            weights = self.model.weights
            wrong = torch.randn(weights.embedding.shape, dtype=weights.final_norm.weight.dtype)
            weights = replace(weights, embedding=self.kernels.linear.pack_embedding(wrong, None))
            self.model = Decoder(self.kernels, weights, self.model._head)

    monkeypatch.setattr(RandomRunner, "__post_init__", wrong_at_last)
    assert "instead of" in gpu_sections.differing_tokens(CPU, num_tokens=8)[0]


def test_chosen_sections_are_written_one_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, seen = tmp_path / "gpu.json", []
    measure = gpu_workloads.measure

    def measured(report, device, config, num_slots, write, **options):
        def written() -> None:
            write()
            seen.append({result["id"] for result in json.loads(file.read_text())["results"]})

        measure(report, device, config, num_slots, written, seconds=0, **options)

    monkeypatch.setattr(gpu_workloads, "measure", measured)
    assert gpu_sections.run("cpu", True, ["workloads", "limits", "flashinfer"], file) == 0
    expected = [{f"gpu.{name}_tokens_s", *(f"gpu.{name}_without_{part}" for part in PARTS)} for name in NAMES]
    assert seen[0] == expected[0] | {"gpu.read_gb_s", "gpu.bf16_tflops"}
    assert [now - before for before, now in pairwise(seen)] == expected[1:]
    written = json.loads(file.read_text())
    assert {result["id"] for result in written["results"]} == seen[-1]
    assert "failed" not in written


def test_a_section_that_fails_does_not_end_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(check: gpu_sections.Check) -> None:
        raise RuntimeError("no kernel")

    monkeypatch.setitem(gpu_sections.SECTIONS, "sharing", failing)
    file = tmp_path / "gpu.json"
    assert gpu_sections.run("cpu", True, ["sharing", "limits"], file) == 1
    written = json.loads(file.read_text())
    assert written["failed"] == {"sharing": "RuntimeError: no kernel"}
    assert [result["id"] for result in written["results"]] == ["gpu.read_gb_s", "gpu.bf16_tflops"]


@pytest.fixture(scope="module")
def runner() -> RandomRunner:
    return RandomRunner(TINY, 2_000, torch.float32, CPU)


@pytest.mark.parametrize("name", NAMES)
def test_a_workload_has_the_same_requests_under_all_settings(name: str, runner: RandomRunner) -> None:
    tokenizer = gpu_workloads.number_tokenizer(TINY.vocab_size)
    make = gpu_workloads.workloads(is_small=True)[name]
    runs = {
        setting.name: gpu_workloads.run_once(runner, tokenizer, make(Words(TINY.vocab_size)), setting)
        for setting in (ALL_ON, *WITHOUT)
        if not setting.needs_gpu
    }
    num_requests, num_output = {
        "few_shot": (6, 18),
        "tree_of_thought": (14, 42),
        "chat": (6, 18),
        "unshared": (4, 20),
    }[name]
    for setting, run in runs.items():
        assert (run.num_requests, run.num_output) == (num_requests, num_output), setting
        assert run.took_s > 0
        assert (run.hit_rate > 0) == (name != "unshared" and setting != "prefix_cache"), setting


def test_a_setting_without_shared_reads_shares_none(runner: RandomRunner) -> None:
    units = pytest.importorskip(
        "agentflow.kernels.triton_ops.attention.units", reason="triton is for x86-64 and Linux"
    )
    [setting] = [setting for setting in WITHOUT if not setting.shares_reads]
    least = units.LEAST_SAVING
    with gpu_workloads._changed(setting, runner):
        assert TINY.max_context * 64 < units.LEAST_SAVING
    assert least == units.LEAST_SAVING


def test_sharing_changes_the_plan_and_not_the_result() -> None:
    pytest.importorskip("triton", reason="triton is for x86-64 and Linux")
    case = gpu_attention.Case.of(((90, 4), (70, 2), (9, 1)), TINY, CPU, num_requests=4, num_slots=700)
    with gpu_attention.sharing(True):
        shared = case.plan().groups.others
    with gpu_attention.sharing(False):
        assert not case.plan().groups.others
    assert len(shared) == 1  # the second level saves too little
    once, each = case.ours()(), case.ours(shares=False)()
    torch.testing.assert_close(once.float(), each.float(), rtol=2e-2, atol=2e-3)
    assert case.num_bytes == (90 + 2 * 70 + 4 * 9) * 2 * TINY.num_kv_heads * TINY.head_dim * 2


@pytest.mark.parametrize("levels", [((6, 4), (2, 1)), ((3, 4), (4, 2), (1, 1)), ((5, 1),)])
def test_pages_have_the_keys_of_each_request_in_order(levels: gpu_attention.Levels) -> None:
    table = gpu_attention.slot_table(levels, 4, 100)
    pages = pages_of(table, levels)
    for request in range(4):
        found: list[int] = []
        for level in pages:
            [group] = np.flatnonzero((level.qo_indptr[:-1] <= request) & (request < level.qo_indptr[1:]))
            found += level.indices[level.kv_indptr[group] : level.kv_indptr[group + 1]].tolist()
        assert found == table[request].tolist()
    num_distinct = sum(length * 4 // num_sharing for length, num_sharing in levels)
    assert sum(len(level.indices) for level in pages) == len(np.unique(table)) == num_distinct
