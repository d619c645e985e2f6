"""The cursors of a client, against an interpreter's records: each event is delivered once and
complete, even if messages are repeated or split."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.session_peer import Listener, gen

from agentflow.backends.cursors import Cursors
from agentflow.errors import Cancelled, ProtocolError
from agentflow.protocol import ops
from agentflow.protocol.events import (
    Delta,
    ErrorInfo,
    Reached,
    StateFailed,
    Stats,
    StatsReply,
    Usage,
    Value,
    VarFailed,
)
from agentflow.runtime.interpreter.state_tree import StateRecord
from agentflow.runtime.interpreter.variables import EventCursor, VariableRecord
from agentflow.runtime.limits import MemoryBudget, MemoryReservation

FAILURE = ErrorInfo("run_failed", "why")
steps = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(["extend 2", "extend 3", "think 2"]), st.text(max_size=5)),
        st.tuples(
            st.sampled_from(["complete 2", "fail 3", "reach", "fail state", "deliver", "lose", "resume"]),
            st.just(""),
        ),
    ),
    max_size=40,
)


@given(steps)
def test_each_event_is_delivered_once_across_broken_connections(recorded: list[tuple[str, str]]) -> None:
    cursors, listener, events = Cursors(), Listener(), EventCursor()
    for op in (ops.Open(1), gen(1, 2), gen(1, 3), ops.Await(1, 100)):
        assert cursors.submit(op)
    memory = MemoryBudget()
    variables = {
        var: VariableRecord(var, "v", events, MemoryReservation(memory, 1), lambda call: call())
        for var in (2, 3)
    }
    state: StateRecord[None] = StateRecord(1, None, events, MemoryReservation(memory, 1))

    def resume() -> None:
        resumed = cursors.resume("session", "secret")
        for var, num_chars in resumed.variables.items():
            variables[var].rewind(num_chars)
        for _, ticket in resumed.states.items():
            state.rewind(ticket)

    for action, text in recorded:
        name, _, which = action.partition(" ")
        if name == "extend" and not variables[int(which)].has_ended:
            variables[int(which)].extend(text)
        elif name == "think" and not variables[2].has_ended:
            variables[2].extend_reasoning(text)
        elif action == "complete 2" and not variables[2].has_ended:
            reasoning = variables[2].reasoning or None
            variables[2].complete(Value(2, 0, variables[2].text, "eos", Usage(), reasoning=reasoning))
        elif action == "fail 3":
            variables[3].fail(Cancelled("enough"))
        elif action == "reach" and state.error is None:
            state.reach(state.reached + 1)
        elif action == "fail state" and state.error is None:
            state.error = Cancelled("enough")
            state.mark()
        elif action == "deliver":
            listener.deliver(cursors.receive(events.drain()))
        elif action == "lose":
            events.drain()
            resume()
        elif action == "resume":
            resume()
    resume()
    listener.deliver(cursors.receive(events.drain()))
    assert listener.reasoning.get(2, "") == variables[2].reasoning
    for var, variable in variables.items():
        assert listener.texts.get(var, "") == variable.text
        assert (var in listener.ends) == variable.has_ended
    assert listener.reached.get(1, 0) == state.reached
    assert (1 in listener.failed) == (state.error is not None)


def test_a_gap_before_a_text_is_a_protocol_error() -> None:
    cursors = Cursors()
    cursors.submit(ops.Open(1))
    cursors.submit(gen(1, 2))
    assert cursors.receive([Delta(2, 0, "ab"), Delta(2, 1, "bc")]) == [Delta(2, 0, "ab"), Delta(2, 2, "c")]
    with pytest.raises(ProtocolError, match=r"variable 2 at character 4.* 3 "):
        cursors.receive([Value(2, 4, "", "eos", Usage())])


def test_a_close_waits_for_the_pending_events_of_its_state() -> None:
    cursors = Cursors()
    for op in (ops.Open(1), gen(1, 2), gen(1, 3), ops.Await(1, 1), ops.Fork(1, (4,))):
        assert cursors.submit(op)
    assert not cursors.submit(ops.Close(1))
    assert cursors.submit(ops.Close(4))  # owes nothing
    cursors.receive([Value(2, 0, "a", "eos", Usage()), Reached(1, 1)])
    assert cursors.due_closes() == []
    assert cursors.resume("a", "b").states == {1: 1}
    cursors.receive([VarFailed(3, FAILURE)])
    assert cursors.due_closes() == [ops.Close(1)]
    assert cursors.due_closes() == []
    assert cursors.resume("a", "b").states == {}


def test_a_failed_state_has_pending_variables_and_no_pending_ticket() -> None:
    cursors = Cursors()
    for op in (ops.Open(1), gen(1, 2), ops.Await(1, 1)):
        cursors.submit(op)
    assert not cursors.submit(ops.Close(1))
    cursors.receive([StateFailed(1, FAILURE)])
    assert cursors.due_closes() == []
    cursors.receive([VarFailed(2, FAILURE)])
    assert cursors.due_closes() == [ops.Close(1)]


def test_a_reply_is_delivered_once_and_only_if_it_was_requested() -> None:
    cursors = Cursors()
    cursors.unanswered[7] = 1
    reply = StatsReply(7, Stats("model"))
    assert cursors.receive([reply, reply, StatsReply(8, Stats("model"))]) == [reply]
