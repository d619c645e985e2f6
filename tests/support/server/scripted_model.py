"""A server whose model writes the text that a function returns for the conversation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray
from support.api_server import ApiServer, api_server
from support.fake_engine import TOKENIZER, FakeEngine

from agentflow.engine.simulator.fake_runner import FakeRunner

END = 1
LONGEST = 64
"""More characters than a word of the texts has."""


@contextmanager
def scripted_server(
    answer: Callable[[str], str], *, opening: str = "<|im_start|>assistant\n", **options: Any
) -> Iterator[ApiServer]:
    """``answer`` gets the text before the model's turn, which begins with ``opening``. ``options``: of
    ``api_server``."""

    def next_token(tokens: NDArray[np.int64]) -> int:
        text = TOKENIZER.decode(tokens.tolist(), skip_special=False, continues=True)
        before, _, written = text.rpartition(opening)
        rest = answer(before).removeprefix(written)
        return TOKENIZER.encode(rest[:LONGEST], continues=True)[0] if rest else END

    runner = FakeRunner(
        vocab_size=TOKENIZER.vocab_size, max_context=2048, end_token_ids=(END,), next_token=next_token
    )
    with api_server(FakeEngine(runner=runner), **options) as running:
        yield running
        running.assert_idle()
