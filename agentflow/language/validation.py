"""``gen(..., on_invalid="retry")``: only a valid text is appended to the state.

Validators are Python functions of this process, so the backend cannot decide whether a text is valid. The
recorder forks the state where the gen stands, and appends a variable whose text the client provides, for
which the state's later ops wait. ``generate_valid`` forks that branch once for each attempt, generates, and
provides the first valid text. So the state never holds an invalid text, and attempts share its prefix. The
seed of an attempt is that of its place in the fork tree, as any other: recordings and replays need no more.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from agentflow.errors import AgentflowError, InvalidValue, RunFailed
from agentflow.language.expressions import GenExpression
from agentflow.language.run import FIRST_MAPPED, StateNode, VariableNode
from agentflow.language.traced import traced
from agentflow.language.variable import Variable, value_of
from agentflow.protocol import ops
from agentflow.protocol.events import ErrorInfo, Usage
from agentflow.protocol.ops import derived_seed

RETRY_TEMPERATURE: Final = 0.7
"""Of the retries of a greedy gen, which would repeat itself."""


def attempt_op(
    item: GenExpression[Any], state_id: int, var_id: int, derived: int | None, index: int
) -> ops.Gen:
    """The op of attempt number ``index``. ``derived``: the seed of its place."""
    params = item.params
    seed = derived
    if params.seed is not None:
        seed = derived_seed(str(params.seed), f"attempt {index}") if index else params.seed
    temperature = params.temperature or (RETRY_TEMPERATURE if index else 0.0)
    params = msgspec.structs.replace(params, seed=seed, temperature=temperature)
    return ops.Gen(state_id, var_id, item.name, params, item.value_type.constraint, item.timeout_s)


async def generate_valid(item: GenExpression[Any], variable: VariableNode, base: StateNode) -> None:
    """Provides ``variable`` with a valid text, generated in a fork of ``base``, or with the error for which
    it has none."""
    link = variable.state.link
    try:
        outcome = await _attempted(item, variable, base)
        link.send([outcome], quiet=True)
    except Exception as error:
        failure = error if isinstance(error, AgentflowError) else RunFailed(f"validation failed: {error!r}")
        failure.__cause__ = None if failure is error else error
        # With a place of its own, so that two failures with equal messages are two.
        info = ErrorInfo.of(failure).at(variable.state.id, FIRST_MAPPED + variable.id)
        link.send([ops.Provide(variable.id, error=info)], quiet=True)
    finally:
        base.run.drop(base)


async def _attempted(item: GenExpression[Any], variable: VariableNode, base: StateNode) -> ops.Provide:
    usage = Usage()
    failure: InvalidValue | None = None
    for index in range(item.max_retries + 1):
        (branch,) = base.fork(1)
        try:
            attempt = _generated(item, branch, index)
            await attempt.settled()
            if attempt.error is not None:  # not raised: that would count as raised in the program
                return ops.Provide(variable.id, error=attempt.error)
            usage += attempt.end.usage
            value_of(attempt)
        except InvalidValue as error:
            failure = error
        else:
            variable.outcome = msgspec.structs.replace(attempt.end, var=variable.id, usage=usage)
            return ops.Provide(variable.id, attempt.notation)
        finally:
            base.run.drop(branch)
    raise InvalidValue(f"{failure} (after {item.max_retries + 1} attempts)")


def _generated(item: GenExpression[Any], branch: StateNode, index: int) -> VariableNode:
    """The variable of an attempt, which is being generated."""
    node = VariableNode(branch, branch.link.next_id(), item.name, item.value_type, is_shown=False)
    Variable(node)
    seed = branch.run.seed_at(node.id, branch.seed_place(0))
    op = attempt_op(item, branch.id, node.id, seed, index)
    branch.submit([traced(op, node, num_entries=0, in_turn=branch.transcript.place.open_role is not None)])
    branch.num_gens += 1
    branch.declare(node)
    branch.in_flight.expect(node.id, 1)
    branch.run.touch(node)
    return node
