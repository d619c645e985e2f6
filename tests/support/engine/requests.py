"""Requests of the scheduler without a client."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from agentflow.engine.media_run import MediaRun
from agentflow.engine.request import GREEDY, Origin, Request, Submit
from agentflow.protocol.sampling import SamplingParams


def request_of(
    request_id: int,
    prompt: Sequence[int] | np.ndarray,
    max_new_tokens: int,
    params: SamplingParams = GREEDY,
    *,
    salt: str = "",
    adapter: str = "",
    seed: int = 0,
    score_from: int = 0,
    choices: Sequence[Sequence[int]] = (),
    embeds: bool = False,
    end_ids: tuple[int, ...] = (),
    media: Sequence[MediaRun] = (),
    deadline: float = math.inf,
    patience_end: float = math.inf,
    **origin: Any,
) -> Request:
    """A waiting request. ``deadline``, ``patience_end``: on the scheduler's clock. ``origin``: fields of
    ``Origin``; states and task groups may be of any type."""
    submit = Submit(
        request_id,
        [],
        params,
        seed=seed,
        origin=Origin(cache_salt=salt, **origin),
        score_from=score_from,
        choices=choices,
        embeds=embeds,
        adapter=adapter,
    )
    tokens = np.array(prompt, dtype=np.int32)
    request = Request.of(submit, tokens, max_new_tokens, end_ids=end_ids, media=media)
    request.deadline, request.patience_end = deadline, patience_end
    return request
