"""What the engine and its client say to each other, the same whether a thread or a process is between.

To the engine: one message each. From the engine: one list for the whole batch, once a step. Every
``Submit`` is answered by exactly one ``Finished`` or ``Failed``, also when it was aborted.

What goes over the socket between a server and its engine process, and how messages lie on it.

First ``Start`` and the answer to it, then the messages of ``engine_messages``: one a frame to the
engine, one list a frame from it (frames: ``message_frames.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import msgspec

from agentflow.engine.grammar.compiler.messages import CompiledConstraint
from agentflow.engine.request import Objective, TopTokens
from agentflow.engine.runner import ModelRunner, RunnerInfo
from agentflow.engine.scheduling.scheduler import SchedulerConfig
from agentflow.engine.step_times import BucketCounts
from agentflow.engine.text.tokenizer import Tokenizer
from agentflow.protocol.sampling import SamplingParams


class Origin(msgspec.Struct, frozen=True, array_like=True):
    """Where a request comes from. Requests share cached KV only under an equal ``tenant`` and
    ``cache_salt``. ``state``: the program's state that it continues (0: none). ``task_group``: equal
    for siblings that one consumer waits for (0: none). ``output_tokens``: what the program expects its
    generations to have (0: nothing is known). ``deadline_s``: in so many seconds they should be done.
    ``share``: the tenant's part of the engine's work, against that of others while both wait; its latest
    request's holds. ``priority``: higher goes first, within the tenant; -10 to 10. ``patience_s``: who has
    waited so long goes before all others of its tenant and priority (None: nobody is in a hurry)."""

    tenant: str = ""
    cache_salt: str = ""
    objective: Objective = "latency"
    state: int = 0
    task_group: int = 0
    output_tokens: int = 0
    deadline_s: float | None = None
    share: float = 1.0
    priority: int = 0
    patience_s: float | None = None


class Submit(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Run a request over ``token_ids``: generate (``params.max_tokens``), or only compute them
    (``params`` None), or score the tokens from index ``score_from`` on, or score each of ``choices`` as
    what comes after them.

    ``generated_ids``: what an engine that died had generated already, as told in ``Progress``. They
    count as output, with ``generated_logprobs`` and ``generated_top_logprobs``; their text is not told
    again. ``constraint``: what the text must be, without its payload where the engine has had that one
    before; ``jump_forward``: whether what it forces is appended
    without sampling."""

    request_id: int
    token_ids: list[int]
    params: SamplingParams | None
    seed: int = 0
    origin: Origin = Origin()
    score_from: int = 0
    choices: Sequence[Sequence[int]] = ()
    generated_ids: Sequence[int] = ()
    generated_logprobs: Sequence[float] = ()
    generated_top_logprobs: Sequence[TopTokens] = ()
    constraint: CompiledConstraint | None = None
    jump_forward: bool = True


class Abort(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Forget the request, wherever it stands. Unknown ids are ignored: it may just have ended."""

    request_id: int


class CloseState(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The program's state is over: what it computed need not be kept longer than other cache."""

    state: int


class Report(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Ask for ``EngineStats``."""

    ticket: int


class Stop(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """End the engine; whatever still runs is dropped."""


ToEngine = Submit | Abort | CloseState | Report | Stop


class Started(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """These requests are in a batch for the first time. Told before the batch runs, so that one that
    brings the engine down is known."""

    request_ids: list[int]


class StepBegins(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A forward pass over ``num_rows`` rows begins. The next list is sent when it has run, so that an engine
    that hangs differs from one that computes."""

    num_rows: int


class Progress(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A request went on by ``token_ids``, with a log-probability and the likeliest tokens each where asked
    for (of tokens that a grammar forced, these come later). ``text`` is what became certain with them, often
    nothing; deltas are never taken back. ``num_dropped``: so many of the tokens that were told before are
    replaced by these, for the same text is encoded in another way now."""

    request_id: int
    text: str
    token_ids: Sequence[int]
    logprobs: Sequence[float]
    top_logprobs: Sequence[TopTokens] = ()
    num_dropped: int = 0


class Wanted(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The request came with the key of its constraint alone, and the engine has that one no longer: the
    request is to be sent again, whole."""

    request_id: int


class Finished(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The end of a request. ``token_ids`` and ``text`` are all of the generation; ``finish_reason``
    is ``eos`` (the model's end token), ``stop`` or ``length``. ``logprobs``: one per generated (or
    scored) token, None for a token that was re-encoded; empty where not asked for. ``top_logprobs``: the
    same for the likeliest tokens at each place. ``choice_logprobs``: of each choice those of its tokens.
    ``stopped_by``: the string of ``stop`` or the id of ``stop_token_ids`` that ended it, if one did."""

    request_id: int
    token_ids: list[int]
    text: str
    finish_reason: str
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    logprobs: list[float | None]
    top_logprobs: list[TopTokens | None] = []
    choice_logprobs: list[list[float]] = []
    stopped_by: str | int | None = None


class Failed(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The request (or ``Report``) ended with an error of the tree in ``errors.py``; an aborted one with
    ``cancelled``."""

    request_id: int
    code: str
    message: str


class EngineStats(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Counters since the start (tokens, steps) and gauges of now (slots, requests, bytes).
    ``restarts``: how often an engine process that died was started anew; the counters began anew then.
    ``step_times``: of each phase of ``step_times.PHASES``."""

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
    restarts: int = 0
    forced_tokens: int = 0
    step_times: Sequence[BucketCounts] = ()


FromEngine = Started | StepBegins | Progress | Wanted | Finished | Failed | EngineStats


class LoadEngine(Protocol):
    """What ``Start.loader`` names: makes all that an engine needs, in the engine's process."""

    def __call__(self, **options: Any) -> tuple[ModelRunner, Tokenizer, SchedulerConfig]: ...


class Start(msgspec.Struct, frozen=True):
    """What an engine process is to run: ``loader`` is the name of a ``LoadEngine``, as in
    ``package.module:function``, and ``options`` its arguments (plain values only)."""

    loader: str
    options: dict[str, Any]


class Loaded(msgspec.Struct, frozen=True, tag=True):
    """The engine is ready for messages. ``tokenizer``: the fingerprint of its tokenizer."""

    info: RunnerInfo
    tokenizer: str


class LoadFailed(msgspec.Struct, frozen=True, tag=True):
    """It will never be, and ends: an error of the tree in ``errors.py``, or the name of a package that
    is not installed."""

    code: str
    message: str
    missing_package: str | None = None


start_decoder = msgspec.msgpack.Decoder(Start)
answer_decoder: msgspec.msgpack.Decoder[Loaded | LoadFailed] = msgspec.msgpack.Decoder(Loaded | LoadFailed)
to_engine_decoder: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)
from_engine_decoder: msgspec.msgpack.Decoder[list[FromEngine]] = msgspec.msgpack.Decoder(list[FromEngine])
