"""``gen(..., on_invalid="retry")`` and ``"reask"``: only a valid text is appended to the state.

Validators are Python functions of this process, so the backend cannot decide whether a text is valid. The
recorder forks the state where the gen stands, and appends a variable whose text the client provides, for
which the state's later ops wait. ``Attempts`` forks that branch once for each attempt, generates, and
provides the first valid text. So the state never holds an invalid text, and attempts share its prefix. The
seed of an attempt comes from its place in the fork tree, like any other seed, so recordings and replays need
nothing more. ``"reask"`` continues the branch of the invalid text instead, with a turn that says why it is
invalid.

A backend may find a text invalid, too: models behind APIs check whether the server kept the constraint. That
fails the branch of the attempt, so the next one begins at the prompt again, for ``"reask"`` with the text.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from agentflow.errors import AgentflowError, InvalidValue, RunFailed, shown_error
from agentflow.language.gen import GenExpression
from agentflow.language.states.readers import complete_value
from agentflow.language.states.run import FIRST_MAPPED, StateNode, VariableNode
from agentflow.language.states.traced import traced
from agentflow.language.states.variable import Variable
from agentflow.protocol import ops
from agentflow.protocol.events import ErrorInfo, Usage
from agentflow.protocol.sampling import derived_seed

RETRY_TEMPERATURE: Final = 0.7
"""The temperature for retries of a greedy gen, which would repeat itself."""


def correction(invalid: InvalidValue, kind: str) -> str:
    """The fault of the model's last text, for the model. ``kind``: the type, in words."""
    wrong = [
        f"- {'.'.join(map(str, one['loc']))}: {one['msg']}".replace("- :", "-") for one in invalid.errors
    ]
    why = "\n".join(wrong or ["- it is too long and was truncated: write a shorter one"])
    return f"This is not a valid {kind}:\n{why}\nWrite it again without these mistakes."


class Attempts:
    """The generations of one variable.

    Args:
        item: The gen.
        variable: Its variable, whose state is forked before it.
        number: The number of that branch in the state.
        num_entries: The number of entries of the state's transcript before the variable.
        role: The role of the open turn.
    """

    def __init__(
        self,
        item: GenExpression[Any],
        variable: VariableNode,
        number: int,
        num_entries: int,
        *,
        role: ops.Role | None,
    ) -> None:
        state = variable.state
        self._item = item
        self._variable = variable
        self._num_entries = num_entries
        self._role = role
        (self.base,) = state.branches([state.link.next_id()], number)
        self.base.is_hidden = True
        (branch,) = self.base.branches([state.link.next_id()], 0)
        self._first = self._declared(branch)

    def first_ops(self) -> list[ops.Op]:
        """The ops that begin the first attempt and declare the variable."""
        branch = self._first.state
        return [
            ops.Fork(self.base.id, (branch.id,)),
            self._op(self._first, 0),
            ops.Expect(self._variable.state.id, self._variable.id, self._variable.name),
        ]

    def adopt(self, num_ops: int) -> None:
        """The ops were sent; the base was forked with op number ``num_ops``."""
        state, branch = self._variable.state, self._first.state
        state.mapped_lines[self._variable.id] = self._variable.line
        state.adopt([self.base], num_ops)
        self.base.count_sent(1)
        self.base.adopt([branch], 1)
        branch.count_sent(1)
        self._begin(self._first)

    async def run(self) -> None:
        """Provides the variable with a valid text, or with an error."""
        variable, link = self._variable, self._variable.state.link
        try:
            link.send([await self._outcome()], quiet=True)
        except Exception as error:
            is_known = isinstance(error, AgentflowError)
            failure = error if is_known else RunFailed(f"validation failed: {shown_error(error)}")
            failure.__cause__ = None if failure is error else error
            # With a separate place, so that two failures with equal messages count as two.
            info = ErrorInfo.of(failure).at(variable.state.id, FIRST_MAPPED + variable.id)
            link.send([ops.Provide(variable.id, error=info)], quiet=True)
        finally:
            self.base.run.drop(self.base)

    async def _outcome(self) -> ops.Provide:
        variable, usage, attempt = self._variable, Usage(), self._first
        num_attempts = self._item.max_retries + 1
        try:
            for index in range(1, num_attempts + 1):
                await attempt.settled()
                if attempt.error is None:
                    usage += attempt.end.usage
                    try:
                        complete_value(attempt)
                    except InvalidValue as error:
                        variable.invalid = error
                    else:
                        variable.read = attempt.read
                        variable.outcome = msgspec.structs.replace(attempt.end, var=variable.id, usage=usage)
                        return ops.Provide(variable.id, attempt.notation)
                # Not raised: that would count as raised in the program.
                elif attempt.error.code == InvalidValue.code:
                    variable.invalid = self._refused(attempt.error)
                    usage += attempt.error.usage or Usage(rejected_answers=1)
                else:
                    return ops.Provide(variable.id, error=attempt.error)
                if index < num_attempts:
                    attempt = self._again(index, attempt)
        finally:
            self.base.run.drop(attempt.state)
        assert variable.invalid is not None
        invalid = InvalidValue(f"{variable.invalid} (after {num_attempts} attempts)")
        invalid.text = variable.invalid.text
        raise invalid

    def _refused(self, info: ErrorInfo) -> InvalidValue:
        """The error of an attempt that the backend found invalid."""
        error = info.to_exception()
        assert isinstance(error, InvalidValue)
        constraint = self._item.value_type.constraint
        if constraint is not None:
            wanted = constraint.source or ", ".join(map(repr, constraint.choices))
            error.errors = ({"loc": (), "msg": f"it violates the {constraint.kind} {wanted:.500}"},)
        return error

    def _again(self, index: int, last: VariableNode) -> VariableNode:
        """Begins attempt number ``index``: from the prompt alone, or after the fault of the last attempt."""
        last.state.link.check_alive()
        invalid = self._variable.invalid
        assert invalid is not None
        asks_again = self._item.asks_again and (last.error is None or bool(invalid.text))
        branch, before = last.state, list[ops.Op]()
        if last.error is not None or not asks_again:
            self.base.run.drop(branch)
            (branch,) = self.base.fork(1)
        if asks_again:
            before = self._correction(branch.id)
            if last.error is not None:  # the branch has the prompt alone
                before.insert(0, ops.Text(branch.id, (invalid.text,)))
        node = self._declared(branch)
        branch.submit([*before, self._op(node, index, is_repeated=not asks_again)])
        self._begin(node)
        return node

    def _correction(self, state: int) -> list[ops.Op]:
        """The fault of the model's last text, as a turn of the user."""
        invalid = self._variable.invalid
        assert invalid is not None
        text = correction(invalid, self._item.value_type.shown)
        if self._role is None:
            return [ops.Text(state, (f"\n\n{text}\n\n",))]
        asked: list[ops.Op] = [ops.Begin(state, "user"), ops.Text(state, (text,)), ops.End(state)]
        return [ops.End(state), *asked, ops.Begin(state, self._role)]

    def _declared(self, branch: StateNode) -> VariableNode:
        item = self._item
        node = VariableNode(branch, branch.link.next_id(), item.name, item.value_type, is_shown=False)
        Variable(node)
        return node

    def _op(self, node: VariableNode, index: int, *, is_repeated: bool = False) -> ops.Gen:
        """The op of attempt number ``index``; ``is_repeated``: after the prompt alone, as the one before."""
        item, branch, params = self._item, node.state, self._item.params
        capabilities = branch.capabilities
        if params.seed is None and capabilities.seeds:
            seed = branch.seed_at(node, 0)
            params = msgspec.structs.replace(params, seed=seed)
        elif params.seed is not None and index:
            params = msgspec.structs.replace(params, seed=derived_seed(str(params.seed), f"attempt {index}"))
        if is_repeated and not params.temperature and capabilities.accepts("temperature"):
            params = msgspec.structs.replace(params, temperature=RETRY_TEMPERATURE)
        constraint = item.value_type.constraint
        op = ops.Gen(branch.id, node.id, item.name, params, constraint)
        return traced(
            op,
            node,
            num_entries=self._num_entries,
            in_turn=self._role is not None,
            transcript=self._variable.state.transcript,
        )

    def _begin(self, node: VariableNode) -> None:
        """The op of the attempt was sent."""
        branch = node.state
        branch.num_gens += 1
        branch.declare(node, branch.in_flight.num_submitted)
