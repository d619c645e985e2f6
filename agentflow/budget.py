"""What a state and all its forks, or a whole session, may still use: tokens and time."""

from __future__ import annotations

import math
from collections.abc import Sequence

import anyio
import msgspec

from agentflow import ops
from agentflow.errors import BadArgument, BudgetExceeded
from agentflow.sampling import SamplingParams


class Budget:
    """``deadline``: on the event loop's clock. ``tokens_left``: of all generations together; it goes
    below 0 where several run at once, and whoever ends after that fails."""

    def __init__(self, *, deadline_s: float | None = None, output_tokens: int | None = None) -> None:
        self.deadline = math.inf if deadline_s is None else anyio.current_time() + deadline_s
        self.output_tokens = output_tokens
        self.tokens_left: float = math.inf if output_tokens is None else output_tokens


def deadline_of(budgets: Sequence[Budget]) -> float:
    """The first of their deadlines; infinite where there is none."""
    return min([budget.deadline for budget in budgets], default=math.inf)


def clipped(params: SamplingParams, budgets: Sequence[Budget]) -> SamplingParams:
    """The parameters, with no more tokens than are left. ``BudgetExceeded`` where none are."""
    for budget in budgets:
        if budget.tokens_left < 1:
            raise _exceeded(budget)
        if budget.tokens_left < params.max_tokens:
            left = int(budget.tokens_left)
            params = msgspec.structs.replace(params, max_tokens=left, min_tokens=min(params.min_tokens, left))
    return params


def spend(num_tokens: int, budgets: Sequence[Budget], *, was_cut: bool) -> None:
    """A generation took so many. ``was_cut``: it would have gone on if there had been more."""
    for budget in budgets:
        budget.tokens_left -= num_tokens
    for budget in budgets:
        if budget.tokens_left < 0 or (was_cut and budget.tokens_left < 1):
            raise _exceeded(budget)


def _exceeded(budget: Budget) -> BudgetExceeded:
    return BudgetExceeded(f"the {budget.output_tokens:,} output tokens that were allowed are used up")


def limit_op(state_id: int, deadline_s: float | None, output_tokens: int | None) -> ops.Limit:
    """A limit, checked."""
    if deadline_s is not None and not (isinstance(deadline_s, int | float) and deadline_s >= 0):
        raise BadArgument(f"limit: deadline_s must be a number of seconds, not {deadline_s!r}")
    if output_tokens is not None and not (isinstance(output_tokens, int) and output_tokens >= 0):
        raise BadArgument(f"limit: output_tokens must be a whole number, not {output_tokens!r}")
    return ops.Limit(state_id, deadline_s, output_tokens)
