"""How many processors a process can keep busy, from cgroup files made here, and an engine's threads."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.engine.cgroups import write_membership
from support.engine.family_models import save_model

from agentflow.engine.machine.resources import usable_cpus
from agentflow.engine.models import device
from agentflow.engine.models.torch_runner import TorchRunner

NUM_CPUS = 64
V1, V2 = "4:cpu,cpuacct:", "0::"
PERIOD = 100_000


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine whose threads may run on ``NUM_CPUS`` processors."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(NUM_CPUS)), raising=False)


def write_group(root: Path, version: str, path: str, quota: int | None, mount: str = "cpu") -> None:
    """The files of one cgroup. ``quota``: None where there is none. ``mount``: the folder of version 1."""
    folder = root / "sys/fs/cgroup" / (path if version == V2 else f"{mount}/{path}")
    folder.mkdir(parents=True, exist_ok=True)
    if version == V2:
        (folder / "cpu.max").write_text(f"{'max' if quota is None else quota} {PERIOD}\n")
    else:
        (folder / "cpu.cfs_quota_us").write_text(f"{-1 if quota is None else quota}\n")
        (folder / "cpu.cfs_period_us").write_text(f"{PERIOD}\n")


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize("version", [V1, V2])
@pytest.mark.parametrize(
    ("quota", "cpus"),
    [
        (200_000, 2),
        (150_000, 2),
        (5_000, 1),
        (PERIOD * NUM_CPUS * 2, NUM_CPUS),
        (None, NUM_CPUS),
        (0, NUM_CPUS),
    ],
)
def test_a_container_with_a_quota_gets_no_more_threads_than_it_pays_for(
    tmp_path: Path, version: str, quota: int | None, cpus: int
) -> None:
    write_membership(tmp_path, "9:name=systemd:/a", f"{version}/docker/0a1b")
    write_group(tmp_path, version, "", quota)  # as it looks inside: the path is the host's
    assert usable_cpus(tmp_path) == cpus


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize("mount", ["cpu", "cpu,cpuacct"])
def test_controllers_that_are_mounted_together_are_found_by_either_name(tmp_path: Path, mount: str) -> None:
    write_membership(tmp_path, f"{V1}/a")
    write_group(tmp_path, V1, "a", 300_000, mount)
    assert usable_cpus(tmp_path) == 3


@pytest.mark.usefixtures("machine")
def test_without_a_quota_all_that_the_affinity_allows_are_usable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert usable_cpus(tmp_path) == NUM_CPUS
    write_membership(tmp_path, f"{V2}/a", "3:cpuset:/a", "5:cpuacct:/a")
    write_group(tmp_path, V2, "b", 100_000)  # of others
    assert usable_cpus(tmp_path) == NUM_CPUS
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3, 5})
    assert usable_cpus(tmp_path) == 2
    monkeypatch.delattr(os, "sched_getaffinity")  # not Linux
    assert usable_cpus(tmp_path) == os.cpu_count()


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize("content", ["", "max", "a b", "100000 0", "100000 -1"])
def test_files_that_say_nothing_limit_nothing(tmp_path: Path, content: str) -> None:
    write_membership(tmp_path, f"{V2}/")
    write_group(tmp_path, V2, "", None)
    (tmp_path / "sys/fs/cgroup/cpu.max").write_text(content)
    assert usable_cpus(tmp_path) == NUM_CPUS


QUOTAS = st.lists(st.one_of(st.none(), st.integers(1, 2 * NUM_CPUS * PERIOD)), max_size=4)


@given(QUOTAS, QUOTAS)
def test_the_tightest_quota_around_the_process_counts(
    first: list[int | None], second: list[int | None]
) -> None:
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "sched_getaffinity", lambda pid: set(range(NUM_CPUS)), raising=False)
        root, allowed = Path(name), [NUM_CPUS]
        for version, quotas in ((V1, first), (V2, second)):
            for depth, quota in enumerate(quotas):
                write_group(root, version, "/".join("abcd"[:depth]), quota)
                if quota is not None:
                    allowed.append(-(-quota // PERIOD))
        write_membership(root, f"{V1}/a/b/c/d", f"{V2}/a/b/c/d/e")
        assert usable_cpus(root) == min(allowed)


def test_at_least_one_cpu_is_usable() -> None:
    assert 1 <= usable_cpus() <= (os.cpu_count() or 1)


def test_an_engine_has_no_more_threads_than_the_quota_allows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_model("llama", tmp_path)
    before = torch.get_num_threads()
    try:
        for torch_has, quota, asked_for, expected in ((3, 1, None, 1), (2, 64, None, 2), (2, 1, 3, 3)):
            torch.set_num_threads(torch_has)
            monkeypatch.setattr(device, "usable_cpus", lambda quota=quota: quota)
            TorchRunner(tmp_path, num_slots=10, device="cpu", num_threads=asked_for).close()
            assert torch.get_num_threads() == expected
    finally:
        torch.set_num_threads(before)
