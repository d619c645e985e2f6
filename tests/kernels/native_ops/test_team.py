"""The thread team of the native kernels on several NUMA nodes. Each of two processors stands for a node, so
that the tests run on machines that have one."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from kernel_cases import compiled

PROCESSORS = sorted(os.sched_getaffinity(0))


@pytest.fixture(scope="module")
def team_case() -> Path:
    return compiled(Path(__file__).parent / "team_case.cpp", "-O1", "-pthread")


def output_of(*command: object) -> str:
    return subprocess.run([*map(str, command)], capture_output=True, text=True, check=False).stdout


@pytest.mark.skipif(len(PROCESSORS) < 2, reason="each of the two nodes needs a separate processor")
def test_threads_take_the_units_of_their_own_node_first(team_case: Path) -> None:
    """And every unit of every loop is run exactly once, by any number of threads."""
    assert output_of(team_case, "loops", *PROCESSORS[:2]) == "passed\n"


def test_nodes_are_those_with_processors_that_may_be_used(team_case: Path, tmp_path: Path) -> None:
    first = PROCESSORS[0]
    (tmp_path / "online").write_text("0-1,3\n")
    lists = {0: "", 1: f"{first}\n", 2: f"{first}\n", 3: "2000-2001,1000\n"}
    for node, processors in lists.items():
        (tmp_path / f"node{node}").mkdir()
        (tmp_path / f"node{node}" / "cpulist").write_text(processors)
    assert output_of(team_case, "nodes", tmp_path) == f"{first} \n"
    (tmp_path / "node3" / "cpulist").write_text(f"{PROCESSORS[-1]},1000")
    assert output_of(team_case, "nodes", tmp_path) == f"{first} \n{PROCESSORS[-1]} \n"
    assert output_of(team_case, "nodes", tmp_path / "absent") == ""
