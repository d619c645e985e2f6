"""Loaders of engine processes in tests: the plain fake model, with faults that the options ask for.

Places where a process can be held: see ``holds.py``. A fault that must not repeat after a restart
is noted in a file.
"""

from __future__ import annotations

import itertools
import logging
import os
import signal
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from support.fake_engine import TOKENIZER
from support.holds import stand
from support.plain_model import END_ID, plain_token
from support.small_tokenizers import byte_level

from agentflow.engine.batch import Batch
from agentflow.engine.messages import Start
from agentflow.engine.runner import AcceleratorFault, ReadAdapter
from agentflow.engine.scheduling.scheduler import SchedulerConfig
from agentflow.engine.simulator.fake_runner import FakeRunner
from agentflow.engine.text.tokenizer import Tokenizer
from agentflow.errors import BadModelFolder

# The first token of prompts that kill the process which computes them.
POISON = 8
# The first token of prompts that kill it at ``SLOW_LENGTH``.
SLOW_POISON = 9
SLOW_LENGTH = 5


class SlowReader(FakeRunner):
    """Stands at a hold while it reads an adapter."""

    def __init__(self, hold: str, **options) -> None:
        super().__init__(**options)
        self._hold = hold

    def read_adapter(self, folder: Path) -> ReadAdapter:
        stand(self._hold)
        return super().read_adapter(folder)


def start(**options) -> Start:
    """An engine process on the plain fake model. ``options`` as of ``load``."""
    return Start("support.engine_loaders:load", options, logging.getLogger("agentflow").getEffectiveLevel())


def load(
    *,
    config: dict | None = None,
    hold_at: dict[str, str] | None = None,
    hold_load: str = "",
    kill_load: bool = False,
    missing: str = "",
    error: str = "",
    is_random: bool = False,
    other: str = "",
    fault_at: dict[str, str] | None = None,
    failing: str = "",
    poison: str = "kills",
    embedding_size: int = 0,
    says: str = "",
    hold_adapter: str = "",
) -> tuple:
    """``hold_at``: step number to a hold before it. ``hold_load``: a hold while loading. ``kill_load``:
    it dies there. ``missing``: a file without which it is a bad folder. ``error``: raised by loading.
    ``other``: a file that, if it exists, contains the name of the changed part: ``model`` or ``tokenizer``.
    ``fault_at``: step number to a file; if it is there, it goes, and the accelerator fails in that step.
    ``failing``: a file; while it exists, all forward passes fail. ``poison``: the effect of ``POISON``: it
    ``kills`` the process, or the pass ``fails``, or the accelerator (``faults``). ``embedding_size``: it
    makes embeddings. ``says``: is logged while it loads, and before each step. ``hold_adapter``: a hold
    while an adapter is read."""
    logger = logging.getLogger("agentflow.engine.of_tests")
    if says:
        logger.warning("loading: %s\ud800", says)
        logger.debug("too detailed")
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

    faults = {int(step): Path(path) for step, path in (fault_at or {}).items()}

    def on_step(batch: Batch) -> None:
        step = next(steps)
        if says:
            logger.info("step %d: %s", step, says)
        stand(holds.get(step, ""))
        if embedding_size and POISON in batch.token_ids:
            os.kill(os.getpid(), signal.SIGKILL)
        if step in faults and faults[step].exists():
            faults[step].unlink()
            raise AcceleratorFault("an illegal memory access")
        if failing and Path(failing).exists():
            raise ArithmeticError("it fails")

    def next_token(tokens: NDArray[np.int64]) -> int | None:
        if tokens[0] == POISON and poison != "kills":
            raise AcceleratorFault if poison == "faults" else ArithmeticError
        if tokens[0] == POISON or (tokens[0] == SLOW_POISON and len(tokens) == SLOW_LENGTH):
            os.kill(os.getpid(), signal.SIGKILL)
        return None if is_random else plain_token(tokens)

    changed = Path(other).read_text() if other and Path(other).exists() else ""
    runner = SlowReader(
        hold_adapter,
        num_slots=4096,
        max_context=1201 if changed == "model" else 1200,
        vocab_size=TOKENIZER.vocab_size,
        next_token=next_token,
        end_token_ids=(END_ID,),
        embedding_size=embedding_size,
        on_step=on_step,
    )
    tokenizer = Tokenizer(byte_level()) if changed == "tokenizer" else TOKENIZER
    return runner, tokenizer, SchedulerConfig(**(config or {}))
