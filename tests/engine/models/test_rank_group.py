"""The processes of the ranks of a divided model."""

from __future__ import annotations

import logging
import threading
from pathlib import Path

import psutil
import pytest
from support.commands import run_python

from agentflow.engine.models.tensor_parallel import rank_group
from agentflow.engine.models.tensor_parallel.rank_group import LoadPart, RankGroup
from agentflow.errors import EngineFailed

pytestmark = pytest.mark.timeout(60)


def test_nothing_is_aborted_after_a_group_is_closed() -> None:
    """The runner frees the memory that ``abort`` writes to."""
    group = RankGroup(2)
    began, may_end = threading.Event(), threading.Event()
    order: list[str] = []

    def abort() -> None:
        began.set()
        may_end.wait(30)
        order.append("aborted")

    def close() -> None:
        group.close()
        order.append("closed")

    group.abort_by(abort)
    psutil.Process(group.pids[0]).kill()
    assert began.wait(30)
    closing = threading.Thread(target=close)
    closing.start()
    closing.join(0.5)
    may_end.set()
    closing.join(30)
    assert order == ["aborted", "closed"]


def test_ranks_whose_thread_cannot_start_are_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[psutil.Process] = []

    class StartedRank(rank_group._LocalRank):
        def __init__(self, file: int) -> None:
            super().__init__(file)
            started.append(psutil.Process(self.process.pid))

    class NoThread(threading.Thread):
        def start(self) -> None:
            raise RuntimeError("can't start new thread")

    monkeypatch.setattr(rank_group, "_LocalRank", StartedRank)
    monkeypatch.setattr(rank_group.threading, "Thread", NoThread)
    with pytest.raises(EngineFailed, match="thread"):
        RankGroup(2)
    assert started
    assert not any(process.is_running() for process in started)


def test_a_rank_of_another_version_is_refused() -> None:
    """A rank on another node of Ray may have another version."""
    group = RankGroup(2)
    try:
        group.load([LoadPart({}, 1, 2, "gloo", "", 1.0, False, logging.WARNING, version="0.0.1")])
        with pytest.raises(EngineFailed, match=r"rank 1 .*rank 0 0\.0\.1"):
            group.wait_until_loaded()
    finally:
        group.close()


CLOSED_BEFORE_ITS_GROUP = """
import gc, os, sys
from agentflow.engine.models.tensor_parallel.joining import join, prepare

file = os.memfd_create("group")
prepare("gloo", file, 1)
ranks = join("gloo", file, 0, 1, "cpu", 10.0)
os.close(file)
other = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)
if other != file:
    os.dup2(other, file)
ranks.close()
del ranks
gc.collect()
"""


def test_the_end_of_a_group_touches_no_other_file(tmp_path: Path) -> None:
    """The store of the group opens its file again by the number of the descriptor."""
    other = tmp_path / "other"
    done = run_python("-c", CLOSED_BEFORE_ITS_GROUP, str(other))
    assert done.returncode == 0, done.stderr
    assert other.read_bytes() == b""
