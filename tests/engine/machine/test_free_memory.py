"""Free memory: of the machine, of the containers around the process, and of a GPU."""

from __future__ import annotations

import tempfile
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.engine.cgroups import write_membership
from support.faults import has_param

from agentflow.engine.machine import resources
from agentflow.engine.machine.resources import (
    FreeMemory,
    free_cuda_bytes,
    free_host_bytes,
    free_memory,
    gpu_number,
)
from agentflow.errors import BadArgument, EngineFailed

AVAILABLE = 10_000
V1, V2 = "7:cpu,memory:", "0::"
FILES = {
    V1: ("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    V2: ("sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"),
}


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with ``AVAILABLE`` bytes of free memory."""
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=AVAILABLE))


def write_group(
    root: Path, version: str, path: str, limit: int | str, used: int = 0, cached: int | None = 0
) -> None:
    """The files of one cgroup. ``cached``: the part of ``used`` that is inactive file cache."""
    mount, limit_name, used_name, cached_name = FILES[version]
    folder = root / mount / path
    folder.mkdir(parents=True, exist_ok=True)
    (folder / limit_name).write_text(f"{limit}\n")
    (folder / used_name).write_text(f"{used}\n")
    line = "" if cached is None else f"{cached_name} {cached}\n"
    (folder / "memory.stat").write_text(f"anon 5\nactive_file 9999\n{line}slab 7\n")


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize("version", [V1, V2])
def test_a_containers_limit_bounds_its_free_memory(tmp_path: Path, version: str) -> None:
    write_membership(tmp_path, "9:name=systemd:/a", f"{version}/a")
    write_group(tmp_path, version, "a", 3000, used=1000)
    assert free_host_bytes(tmp_path) == 2000
    write_group(tmp_path, version, "a", 3000, used=1000, cached=400)
    assert free_host_bytes(tmp_path) == 2400
    write_group(tmp_path, version, "a", 3000, used=1000, cached=None)
    assert free_host_bytes(tmp_path) == 2000
    write_group(tmp_path, version, "a", 3000, used=4000)
    assert free_host_bytes(tmp_path) == 0
    write_group(tmp_path, version, "a", AVAILABLE + 2, used=1)
    assert free_host_bytes(tmp_path) == AVAILABLE


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize("version", [V1, V2])
@pytest.mark.parametrize("path", ["/docker/0a1b", "/../0a1b", "/"])
def test_inside_a_container_its_own_files_count_whatever_the_path_is_called(
    tmp_path: Path, version: str, path: str
) -> None:
    write_membership(tmp_path, f"{version}{path}")
    write_group(tmp_path, version, "", 3000, used=1000)
    assert free_host_bytes(tmp_path) == 2000


@pytest.mark.usefixtures("machine")
def test_without_a_limit_all_main_memory_is_free(tmp_path: Path) -> None:
    assert free_host_bytes(tmp_path) == AVAILABLE
    write_membership(tmp_path, f"{V2}/a")
    assert free_host_bytes(tmp_path) == AVAILABLE
    write_group(tmp_path, V2, "a", "max", used=1000)
    assert free_host_bytes(tmp_path) == AVAILABLE
    write_membership(tmp_path, f"{V2}/b", "3:cpuset:/a")
    write_group(tmp_path, V2, "a", 3000)  # of others
    assert free_host_bytes(tmp_path) == AVAILABLE


GROUPS = st.lists(
    st.tuples(
        st.one_of(st.just("max"), st.integers(0, 2 * AVAILABLE)),
        st.integers(0, AVAILABLE),
        st.integers(0, AVAILABLE),
    ),
    max_size=4,
)


@given(GROUPS, GROUPS)
def test_the_tightest_of_all_groups_around_the_process_counts(first: list, second: list) -> None:
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        patch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=AVAILABLE))
        root, left = Path(name), [AVAILABLE]
        for version, groups in ((V1, first), (V2, second)):
            for depth, (limit, used, cached) in enumerate(groups):
                write_group(root, version, "/".join("abcd"[:depth]), limit, used, cached)
                if limit != "max":
                    left.append(max(0, limit - max(0, used - cached)))
        write_membership(root, f"{V1}/a/b/c/d", f"{V2}/a/b/c/d/e")
        assert free_host_bytes(root) == min(left)


def test_the_real_memory_files_can_be_read() -> None:
    assert 0 < free_host_bytes() <= psutil.virtual_memory().total


# A GPU


def test_the_device_follows_from_the_free_memory() -> None:
    without, beside = FreeMemory(1), FreeMemory(1, 0)
    assert [without.is_on_gpu(device) for device in (None, "cpu", "cuda")] == [False] * 3
    assert [beside.is_on_gpu(device) for device in (None, "cpu", "cuda")] == [True, False, True]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_torch_finds_no_memory_without_a_gpu() -> None:
    assert free_cuda_bytes() is None


@pytest.mark.full  # make test shows the process with a fake torch, and torch in the process of the test
@pytest.mark.anyio
async def test_gpu_memory_is_queried_in_a_separate_process_if_a_model_may_run_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(resources, "has_driver", lambda: True)
    found = (await free_memory([None])).cuda_bytes
    if torch.cuda.is_available():
        assert found is not None
        assert 0 < found <= torch.cuda.mem_get_info()[1]
    else:
        assert found is None


TORCH = """
class cuda:
    def is_available():
        return True
    def mem_get_info():
        {}
"""
WITHOUT_GPU = """
class cuda:
    def is_available():
        return False
"""


@pytest.mark.anyio
@pytest.mark.trio_in_full
@pytest.mark.parametrize(
    ("source", "devices", "cuda_bytes"),
    [
        (TORCH.format("return 5_000, 7_000"), ["cpu", "cuda"], 5_000),
        (TORCH.format("return 5_000, 7_000"), ["cpu", None], 5_000),
        (TORCH.format("return 5_000, 7_000"), ["cpu", "cpu"], None),
        (WITHOUT_GPU, [None], None),
        ("raise ModuleNotFoundError('no torch')", [None], None),
    ],
)
async def test_torchs_free_memory_of_a_gpu_is_used(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    source: str,
    devices: list[str | None],
    cuda_bytes: int | None,
) -> None:
    """With a fake torch that has a GPU."""
    (tmp_path / "torch.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(resources, "has_driver", lambda: True)
    assert (await free_memory(devices)).cuda_bytes == cuda_bytes
    monkeypatch.setattr(resources, "has_driver", lambda: False)
    assert (await free_memory(devices)).cuda_bytes is None


@pytest.mark.anyio
@pytest.mark.trio_in_full
async def test_the_memory_of_each_gpu_that_models_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """With a fake torch that has two GPUs."""
    (tmp_path / "torch.py").write_text(
        TORCH.replace("mem_get_info()", "mem_get_info(gpu=0)").format("return (5_000, 6_000)[gpu], 7_000")
        + "    def device_count():\n        return 2\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(resources, "has_driver", lambda: True)
    free = await free_memory(["cuda:1", "cuda", "cuda:4", "cpu"])
    assert (free.cuda_bytes, free.other_cuda_bytes) == (5_000, {1: 6_000})
    assert [free.is_on_gpu(device) for device in ("cuda:1", "cuda", "cpu")] == [True, True, False]
    assert [free.count_bytes(gpu_number(device)) for device in (None, "cuda:0", "cuda:1")] == [
        5_000,
        5_000,
        6_000,
    ]
    with pytest.raises(BadArgument, check=has_param("device")):
        free.count_bytes(gpu_number("cuda:4"))


@pytest.mark.anyio
@pytest.mark.trio_in_full
async def test_a_gpu_that_does_not_answer_is_a_one_line_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "torch.py").write_text(TORCH.format("raise RuntimeError('CUDA error: no memory')"))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(resources, "has_driver", lambda: True)
    with pytest.raises(EngineFailed, match="RuntimeError: CUDA error: no memory"):
        await free_memory(["cuda"])
