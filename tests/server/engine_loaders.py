"""What engine processes load in tests: the plain fake model, with faults that the options ask for.

Places where a process can be held: see ``holds.py``. What is to happen once and not again after a restart
is noted in a file.
"""

from __future__ import annotations

import itertools
import os
import signal
from pathlib import Path

import numpy as np
from fake_engine import TOKENIZER
from numpy.typing import NDArray
from plain_engine import END_ID, plain_token
from server.holds import stand

from agentflow.errors import BadModelFolder
from agentflow.server.core.batch import Batch
from agentflow.server.core.scheduler import SchedulerConfig
from agentflow.server.engine_frames import Start
from agentflow.server.fake_runner import FakeRunner

# The first token of prompts that kill the process which computes them.
POISON = 8
# And of those that do so at this length.
SLOW_POISON = 9
SLOW_LENGTH = 5


def start(**options) -> Start:
    """An engine process on the plain fake model. ``options`` as of ``load``."""
    return Start("server.engine_loaders:load", options)


def load(
    *,
    config: dict | None = None,
    hold_at: dict[str, str] | None = None,
    hold_load: str = "",
    kill_load: bool = False,
    missing: str = "",
    error: str = "",
    is_random: bool = False,
) -> tuple:
    """``hold_at``: step number to a hold before it. ``hold_load``: a hold while loading. ``kill_load``:
    it dies there. ``missing``: a file without which it is a bad folder. ``error``: what loading raises."""
    if hold_load:
        stand(hold_load)
    if kill_load:
        os.kill(os.getpid(), signal.SIGKILL)
    if missing and not Path(missing).exists():
        raise BadModelFolder(f"{missing} is not there")
    if error == "package":
        import no_such_package  # noqa: F401
    if error:
        raise ValueError(error)
    holds = {int(step): hold for step, hold in (hold_at or {}).items()}
    steps = itertools.count(1)

    def on_step(batch: Batch) -> None:
        stand(holds.get(next(steps), ""))

    def next_token(tokens: NDArray[np.int64]) -> int | None:
        if tokens[0] == POISON or (tokens[0] == SLOW_POISON and len(tokens) == SLOW_LENGTH):
            os.kill(os.getpid(), signal.SIGKILL)
        return None if is_random else plain_token(tokens)

    runner = FakeRunner(
        num_slots=4096,
        max_context=1200,
        vocab_size=TOKENIZER.vocab_size,
        next_token=next_token,
        end_token_ids=(END_ID,),
        on_step=on_step,
    )
    return runner, TOKENIZER, SchedulerConfig(**(config or {}))
