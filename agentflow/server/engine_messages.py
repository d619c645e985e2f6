"""What the engine and its client say to each other, the same whether a thread or a process is between.

To the engine: one message each. From the engine: one list for the whole batch, once a step.
"""

from __future__ import annotations

import msgspec

from agentflow.sampling import SamplingParams
from agentflow.server.core.request import Objective


class Origin(msgspec.Struct, frozen=True):
    """Where a request comes from. Requests share cached KV only under an equal ``tenant`` and
    ``cache_salt``. ``state``: the program's state that it continues (0: none). ``task_group``: equal
    for siblings that one consumer waits for (0: none)."""

    tenant: str = ""
    cache_salt: str = ""
    objective: Objective = "latency"
    state: int = 0
    task_group: int = 0


class Submit(msgspec.Struct, frozen=True, tag=True):
    """Run a request over ``token_ids``: generate (``params.max_tokens``), or only compute them
    (``params`` None), or score the tokens from index ``score_from`` on."""

    request_id: int
    token_ids: list[int]
    params: SamplingParams | None
    seed: int = 0
    origin: Origin = Origin()
    score_from: int = 0


class Abort(msgspec.Struct, frozen=True, tag=True):
    """Forget the request, wherever it stands. Unknown ids are ignored: it may just have ended."""

    request_id: int


class CloseState(msgspec.Struct, frozen=True, tag=True):
    """The program's state is over: what it computed need not be kept longer than other cache."""

    state: int


class Report(msgspec.Struct, frozen=True, tag=True):
    """Ask for ``EngineStats``."""

    ticket: int


class Stop(msgspec.Struct, frozen=True, tag=True):
    """End the engine; whatever still runs is dropped."""


ToEngine = Submit | Abort | CloseState | Report | Stop


class Progress(msgspec.Struct, frozen=True, tag=True):
    """Text that became certain. Deltas are never taken back."""

    request_id: int
    text: str


class Finished(msgspec.Struct, frozen=True, tag=True):
    """The end of a request. ``token_ids`` and ``text`` are all of the generation; ``finish_reason``
    is ``eos`` (the model's end token), ``stop`` or ``length``. ``logprobs``: one per generated (or
    scored) token, None for a token that was re-encoded; empty where not asked for."""

    request_id: int
    token_ids: list[int]
    text: str
    finish_reason: str
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    logprobs: list[float | None]


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The request ended with an error of the tree in ``errors.py``."""

    request_id: int
    code: str
    message: str


class EngineStats(msgspec.Struct, frozen=True, tag=True):
    """Counters since the start (tokens, steps) and gauges of now (slots, requests, bytes)."""

    ticket: int
    model: str
    steps: int
    prompt_tokens: int
    cached_tokens: int
    cached_output_tokens: int
    computed_tokens: int
    generated_tokens: int
    evicted_tokens: int
    retractions: int
    free_slots: int
    cached_slots: int
    held_slots: int
    total_slots: int
    running: int
    waiting: int
    peak_resident_bytes: int


FromEngine = Progress | Finished | Failed | EngineStats
