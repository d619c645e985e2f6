"""A model whose other rank is reached over TCP, as on another machine. The test starts its process."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from engine.models.test_divided_models import EVEN, greedy
from support.engine.family_models import save_model
from support.process_template import start_python

from agentflow.engine.models.tensor_parallel.rank_group import RANK_MODULE, RankGroup
from agentflow.engine.models.tensor_parallel.runner import TensorParallelRunner
from agentflow.engine.models.torch_runner import TorchRunner
from agentflow.engine.runner import AcceleratorFault
from agentflow.errors import BadArgument

pytestmark = pytest.mark.timeout(120)
HERE = "127.0.0.1"


@contextmanager
def remote_rank() -> Iterator[tuple[socket.socket, subprocess.Popen[bytes]]]:
    """The connection to a rank's process, and the process."""
    with socket.create_server((HERE, 0)) as listener:
        ours = socket.create_connection(listener.getsockname())
        theirs, _ = listener.accept()
    lifeline, held = os.pipe()
    numbers = [theirs.fileno(), lifeline]
    process = start_python("-m", RANK_MODULE, *map(str, numbers), pass_fds=numbers)
    theirs.close()
    os.close(lifeline)
    try:
        yield ours, process
    finally:
        os.close(held)
        process.wait(30)


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_the_tokens_are_those_of_one_process_until_the_rank_is_lost(tmp_path: Path) -> None:
    save_model("qwen3", tmp_path, **EVEN)
    options = {"num_slots": 1000, "device": "cpu", "dtype": "float32"}
    expected = greedy(TorchRunner(tmp_path, **options), 60)
    with remote_rank() as (connection, process):
        group = RankGroup(2, [connection], HERE)
        assert group.pids == []
        runner = TensorParallelRunner(tmp_path, 2, group=group, num_threads=2, **options)
        assert greedy(runner, 60) == expected
        process.kill()
        process.wait(30)
        with pytest.raises(AcceleratorFault):
            greedy(runner, 60)
        runner.close()


def test_a_rank_ends_with_the_group_that_cannot_use_it(tmp_path: Path) -> None:
    save_model("qwen3", tmp_path, **EVEN)
    with remote_rank() as (connection, process):
        group = RankGroup(3, [connection, connection.dup()], HERE)
        with pytest.raises(BadArgument):  # 4 heads are not divided by 3
            TensorParallelRunner(tmp_path, 3, num_slots=100, device="cpu", group=group)
        assert process.wait(30) == 0
