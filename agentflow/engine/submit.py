"""The submission of one request, with its origin."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from agentflow.engine.grammar.compiler.messages import CompiledConstraint
from agentflow.engine.media_run import SubmittedRun
from agentflow.engine.text.reasoning import Thinking
from agentflow.engine.text.tool_output import CallMarks
from agentflow.errors import BadArgument
from agentflow.protocol.sampling import SamplingParams

Objective = Literal["latency", "throughput"]
"""The objective: ``latency`` if a consumer waits for it, ``throughput`` if only the total counts."""

TopTokens = list[tuple[int, float]]
"""The likeliest tokens at one position with their log-probabilities, likeliest first."""


GREEDY = SamplingParams()
"""The parameters of requests that are submitted without any."""
MIN_WEIGHT, MAX_WEIGHT = 0.01, 100.0
"""Range of a tenant's weight."""
MAX_PRIORITY = 10
"""Priorities of requests are -MAX_PRIORITY to MAX_PRIORITY."""


AWAITED_GROUPS = 2**61
"""Task groups from this number on, below ``PATIENT_GROUPS``, have a consumer that counts by its latency."""
PATIENT_GROUPS = 2**62
"""Task groups from this number on have a consumer that counts by its throughput."""


class Origin(msgspec.Struct, frozen=True, array_like=True):
    """The source of a request, and the program's hints about it. Requests share cached KV only if their
    ``tenant``, ``cache_salt`` and adapter are equal."""

    tenant: str = ""
    cache_salt: str = ""
    objective: Objective = "latency"
    state: int = 0  # the program state that the request continues; 0: none
    task_group: int = 0  # equal for sibling requests that one consumer waits for; 0: none
    output_tokens: int = 0  # the expected length of the output; 0: unknown
    deadline_s: float | None = None  # the time from now until the request should be done
    weight: float = 1.0  # the tenant's weight against other tenants; its latest request decides
    priority: int = 0  # -10 to 10, higher first, within the tenant
    # A request that has waited this long goes before others of its tenant and priority; None: never.
    patience_s: float | None = None
    trace: str = ""  # the client's ``traceparent``, for observers; the engine does not use it
    label: str = ""  # the program's name, which snapshots show
    adapter: str = ""  # the name of a loaded adapter (LoRA); empty: the model itself
    program: int = 0  # the program whose place in the queue the request has; 0: none
    # Why its prompt differs from earlier prompts of the same conversation, as in ``Usage.miss_reason``.
    changed: str = ""
    # It computes known tokens of a state that waits. Other requests do not wait for it.
    is_ahead: bool = False
    tpot_s: float | None = None  # the time of each further token that its reader asks for; None: any
    ttft_s: float | None = None  # the time from now until the first token that its reader asks for; None: any
    # Prefixes that the client asks to keep in the cache: their tokens, and seconds after their last use.
    kept_prefixes: Sequence[tuple[int, float]] = ()

    def at(
        self,
        program: int,
        task_group: int,
        objective: Objective,
        tpot_s: float | None = None,
        ttft_s: float | None = None,
    ) -> Origin:
        """Returns this origin at another place in the program. The arguments are fields of ``Origin``."""
        return msgspec.structs.replace(
            self, program=program, task_group=task_group, objective=objective, tpot_s=tpot_s, ttft_s=ttft_s
        )

    @property
    def gates_latency(self) -> bool:
        """Whether a request that counts by its latency waits for the last one of the task group."""
        return AWAITED_GROUPS <= self.task_group < PATIENT_GROUPS

    def check(self) -> None:
        """Raises ``BadArgument`` for a priority or a weight that is out of range."""
        if not -MAX_PRIORITY <= self.priority <= MAX_PRIORITY:
            raise BadArgument(
                f"priority must be {-MAX_PRIORITY} to {MAX_PRIORITY}, not {self.priority}", param="priority"
            )
        if not MIN_WEIGHT <= self.weight <= MAX_WEIGHT:
            raise BadArgument(
                f"a tenant's weight must be {MIN_WEIGHT} to {MAX_WEIGHT}, not {self.weight}", param="weight"
            )


class Submit(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Runs a request over ``token_ids``. Generates up to ``params.max_tokens``. Without ``params``, computes
    the tokens only, scores the tokens from ``score_from`` on, scores each of ``choices`` as a continuation
    (with ``heads``: of one of these, which follow the prompt), or makes an embedding.

    A request that continues after its engine died has the output that the engine had sent as ``Progress`` in
    the fields ``generated_…``. The text is not sent again, even if the ids now end before it."""

    request_id: int
    token_ids: list[int]
    params: SamplingParams | None
    seed: int = 0
    origin: Origin = Origin()
    score_from: int = 0  # the index of the first scored token
    choices: Sequence[Sequence[int]] = ()  # the token ids of each choice
    generated_ids: Sequence[int] = ()
    generated_logprobs: Sequence[float] = ()
    generated_top_logprobs: Sequence[TopTokens] = ()
    generated_forced: Sequence[tuple[int, int]] = ()
    constraint: CompiledConstraint | None = None  # of the text; without its payload if the engine has that
    jump_forward: bool = True  # append the tokens that the grammar forces without sampling them
    embeds: bool = False  # make an embedding
    thinking: Thinking | None = None  # the output may begin with reasoning, free of constraint and stops
    calls: CallMarks | None = None  # the output may have tool calls, to which no stop applies
    generated_text: str = ""
    num_redrawn: int = 0  # how often the dead engine had replaced sampled tokens
    # The identity of the adapter that had the name ``origin.adapter`` when the request was sent. The request
    # keeps this adapter until it ends.
    adapter: str = ""
    heads: Sequence[Sequence[int]] = ()
    head_of: Sequence[int] = ()  # the head of each choice
    media: Sequence[SubmittedRun] = ()  # the images in the prompt, in order; the engine has their content
