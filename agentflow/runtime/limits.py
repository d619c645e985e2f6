"""What a state and all its forks, or a whole session, may still use: tokens and time."""

from __future__ import annotations

import math
from collections.abc import Sequence

import anyio
import msgspec

from agentflow.errors import BadArgument, BudgetExceeded, DeadlineExceeded
from agentflow.protocol import ops
from agentflow.protocol.sampling import SamplingParams


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


def check_time(budgets: Sequence[Budget]) -> None:
    """``DeadlineExceeded`` where one of the deadlines has passed."""
    deadline = deadline_of(budgets)
    if deadline != math.inf and deadline <= anyio.current_time():
        raise time_is_over()


def time_is_over() -> DeadlineExceeded:
    """What fails when a limit's deadline has passed."""
    return DeadlineExceeded("the time that was allowed is over")


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
    if deadline_s is None and output_tokens is None:
        raise BadArgument("limit: say deadline_s or output_tokens, or both")
    ops.check_limit(deadline_s, output_tokens)
    return ops.Limit(state_id, deadline_s, output_tokens)
