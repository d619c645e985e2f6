"""The interpreter of a session whose ops come from a client over the network, which may send anything."""

from __future__ import annotations

from collections.abc import Iterator

from agentflow.protocol import ops
from agentflow.protocol.op_table import check_received_op, require
from agentflow.runtime.generator import ContextT
from agentflow.runtime.interpreter.interpreter import Interpreter
from agentflow.runtime.interpreter.state_tree import GraphExecution, PendingOp, StateRecord


class CheckingInterpreter(Interpreter[ContextT]):
    """Checks the values of each op when it accepts it, and that the state's model can run it when its turn
    comes: a fork on another model begins only then."""

    def _accept(self, op: ops.Op, graph: GraphExecution[ContextT] | None) -> Iterator[None]:
        if not isinstance(op, ops.Watch | ops.Upload):  # these are checked where their errors are kept
            check_received_op(op)
        return super()._accept(op, graph)

    async def _execute(self, state: StateRecord[ContextT], pending: PendingOp[ContextT]) -> None:
        if state.generator is not None and not isinstance(pending.op, ops.Rejected):
            require(pending.op, self._find_capabilities(state.generator))
        await super()._execute(state, pending)
