"""What a client submits: one request, and where it comes from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from agentflow.engine.grammar.compiler.messages import CompiledConstraint
from agentflow.engine.text.thoughts import Thinking
from agentflow.engine.text.tool_output import CallMarks
from agentflow.errors import BadArgument
from agentflow.protocol.sampling import SamplingParams

Objective = Literal["latency", "throughput"]
"""What to optimize: ``latency`` if a consumer waits for it, ``throughput`` if only the total counts."""

TopTokens = list[tuple[int, float]]
"""The likeliest tokens at one position with their log-probabilities, likeliest first."""


MIN_WEIGHT, MAX_WEIGHT = 0.01, 100.0
"""Range of a tenant's weight."""
MAX_PRIORITY = 10
"""Priorities of requests are -MAX_PRIORITY to MAX_PRIORITY."""


class Origin(msgspec.Struct, frozen=True, array_like=True):
    """Where a request comes from, and what the program says about it.

    Requests share cached KV only if their ``tenant``, ``cache_salt`` and adapter are equal.
    """

    tenant: str = ""
    # The client's part of the key of the cache.
    cache_salt: str = ""
    objective: Objective = "latency"
    # The program state that the request continues, which keeps its KV longer while it is open; 0: none.
    state: int = 0
    # Equal for sibling requests that one consumer waits for; 0: none.
    task_group: int = 0
    # The expected length of the output; 0: unknown.
    output_tokens: int = 0
    # Seconds from now until it should be done.
    deadline_s: float | None = None
    # The tenant's weight against other tenants. That of its latest request counts.
    weight: float = 1.0
    # -10 to 10, higher first, within the tenant.
    priority: int = 0
    # After this many seconds the request goes before others of its tenant and priority; None: never.
    patience_s: float | None = None
    # The client's ``traceparent``, for observers; the engine does not use it.
    trace: str = ""
    # The program's name, which snapshots show. Outputs of one label probably have similar lengths.
    label: str = ""
    # The name of a loaded adapter (LoRA); empty for the model itself.
    adapter: str = ""

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
    """Runs a request over ``token_ids``. Generates up to ``params.max_tokens``; or, if ``params`` is None,
    computes the tokens only, or scores those from index ``score_from`` on, or scores each of ``choices`` as
    their continuation, or makes their embedding (``embeds``).

    ``generated_ids``, ``generated_logprobs``, ``generated_top_logprobs``, ``generated_forced``,
    ``generated_text``: the output that an engine that died had sent as ``Progress``; its text is not sent
    again, also where the ids now end before it. ``num_redrawn``: how often it had replaced sampled tokens.
    ``constraint``: a grammar for the text, without its payload if this engine was already sent it.
    ``jump_forward``: append the tokens that the grammar forces without sampling them. ``thinking``: the
    output may begin with thoughts, to which neither constraint nor stops apply. ``calls``: it may have tool
    calls, to which no stop applies. ``adapter``: the identity of the adapter that had the name
    ``origin.adapter`` when the request was sent, and which it keeps until it ends."""

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
    generated_forced: Sequence[tuple[int, int]] = ()
    constraint: CompiledConstraint | None = None
    jump_forward: bool = True
    embeds: bool = False
    thinking: Thinking | None = None
    calls: CallMarks | None = None
    generated_text: str = ""
    num_redrawn: int = 0
    adapter: str = ""
