"""The interpreter against a reference model that computes every variable alone; its limits and rejections."""

from __future__ import annotations

import gc
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import anyio
import anyio.lowlevel
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.language.op_programs import ANSWERS, CERTAIN, Failure, OpProgram, Pause, answer, op_programs
from support.observed_backends import settle
from support.session_peer import Listener

import agentflow as af
from agentflow.backends.scripted_generator import ScriptedContext, ScriptedGenerator
from agentflow.errors import MAX_MESSAGE_CHARS, EngineFailed
from agentflow.protocol import ops
from agentflow.protocol.events import (
    Delta,
    ErrorInfo,
    Event,
    Reached,
    StateFailed,
    StatsReply,
    Value,
    VarFailed,
)
from agentflow.protocol.sampling import GenParams
from agentflow.protocol.text.transform import Transform
from agentflow.runtime import loop_turns
from agentflow.runtime.interpreter import interpreter as interpreter_module
from agentflow.runtime.interpreter import state_tree, wired_text
from agentflow.runtime.interpreter.checking import CheckingInterpreter
from agentflow.runtime.interpreter.interpreter import MAX_PENDING_OPS, Interpreter
from agentflow.runtime.limits import STATE_BYTES, MemoryBudget

pytestmark = [pytest.mark.anyio, pytest.mark.trio_in_full]


@pytest.fixture(scope="module", autouse=True)
def small_steps() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wired_text, "MIN_GROWN_CHARS", 2)
        yield


class AheadGenerator(ScriptedGenerator):
    """Receives provided text in parts, because it could compute them ahead."""

    async def fill_ahead(self, context: ScriptedContext) -> None:
        await anyio.lowlevel.checkpoint()


class Bench:
    """An interpreter on the scripted generator, without a pump: the test reads its events."""

    def __init__(self, generator: ScriptedGenerator, interpreter: Interpreter[ScriptedContext]) -> None:
        self.generator = generator
        self.interpreter = interpreter
        self.listener = Listener()

    def submit(self, *submitted: ops.Op) -> None:
        for op in submitted:
            self.interpreter.submit(op)

    def listen(self) -> list[Event]:
        events = self.interpreter.events.drain()
        self.listener.deliver(events)
        return events

    async def play(self, program: OpProgram) -> None:
        for step in program.script:
            if isinstance(step, Pause):
                for _ in range(step.num_turns):
                    await anyio.lowlevel.checkpoint()
            else:
                self.submit(step)

    async def listen_until_all_ended(self, variables: list[int]) -> None:
        with anyio.fail_after(10):
            while not all(var in self.listener.ends for var in variables):
                await self.interpreter.events.wait()
                self.listen()

    async def until_idle(self) -> None:
        """Waits until no op runs any more: some search for a pattern in a thread."""
        with anyio.fail_after(10):
            while any(state.is_running for state in self.interpreter._states):
                await anyio.lowlevel.checkpoint()
        await settle()

    def assert_has_nothing(self) -> None:
        assert list(self.interpreter._states) == []
        assert self.interpreter._variables == {}
        assert (self.generator.num_open, self.generator.num_running) == (0, 0)
        if self.interpreter._memory.num_bytes:  # a cycle may hold some
            gc.collect()
        assert self.interpreter._memory.num_bytes == 0


@asynccontextmanager
async def bench(generator: ScriptedGenerator | None = None) -> AsyncIterator[Bench]:
    """At its end all states are closed, and nothing may be held. It cancels nothing: a task that is still
    there hangs the test. By default the model writes its prompt in angle brackets."""
    generator = generator or ScriptedGenerator(lambda prompt: f"<{prompt}>")
    with anyio.fail_after(20):
        async with anyio.create_task_group() as group:
            at = Bench(generator, CheckingInterpreter(generator, group))
            yield at
            at.submit(*[ops.Close(state.id) for state in at.interpreter._states if not state.is_closing])
            await at.until_idle()
            while at.listen():
                pass
            at.assert_has_nothing()


def gen(state: int, var: int, **params) -> ops.Gen:
    return ops.Gen(state, var, f"v{var}", GenParams(**params))


def check(program: OpProgram, listener: Listener) -> None:
    uncertain = program.uncertain_states()
    for var, (state, _) in program.variables.items():
        expected, end = program.outcome(var), listener.ends[var]
        if state.id in uncertain and isinstance(end, VarFailed):
            continue  # it was cancelled, or failed with its state
        if isinstance(expected, Failure):
            assert isinstance(end, VarFailed)
            assert end.error.origin.message == expected.origin
            assert end.error.code == ("engine_failed" if expected.is_own else "run_failed")
        else:
            assert isinstance(end, Value)
            assert listener.texts[var] == expected
    for state in program.states:
        if state.id not in uncertain:
            failure = program.make_failure(state)
            assert (state.id in listener.failed) == (failure is not None)
            tickets = [op.ticket for op in state.stream if isinstance(op, ops.Await)]
            if tickets and failure is None:
                assert listener.reached[state.id] == tickets[-1]


@given(program=op_programs(), is_ahead=st.booleans())
async def test_any_program_gives_what_its_variables_give_alone(program, is_ahead):
    async with bench(AheadGenerator(answer) if is_ahead else ScriptedGenerator(answer)) as at:
        await at.play(program)
        await at.listen_until_all_ended(list(program.variables))
        await at.until_idle()
        at.listen()
        check(program, at.listener)


@given(program=op_programs(), num_turns=st.integers(0, 30))
async def test_the_end_of_a_session_frees_everything(program, num_turns):
    generator = AheadGenerator(answer)
    async with anyio.create_task_group() as group:
        interpreter = Interpreter(generator, group)
        at = Bench(generator, interpreter)
        await at.play(program)
        for _ in range(num_turns):
            await anyio.lowlevel.checkpoint()
        group.cancel_scope.cancel()
    interpreter.close()
    at.assert_has_nothing()


@given(
    program=op_programs(),
    losses=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 4)), max_size=20),
)
async def test_after_a_rewind_no_event_is_missing_or_repeated(program, losses):
    """After each loss, the listener has received only some of the sent events."""
    async with bench(ScriptedGenerator(answer)) as at:
        await at.play(program)
        for num_turns, num_received in losses:
            for _ in range(num_turns):
                await anyio.lowlevel.checkpoint()
            at.listener.deliver(at.interpreter.events.drain()[:num_received])
            received = at.listener
            at.interpreter.rewind(
                {v: len(received.texts.get(v, "")) for v in program.variables if v not in received.ends},
                {s.id: received.reached.get(s.id, 0) for s in program.states if s.id not in received.failed},
            )
        await at.listen_until_all_ended(list(program.variables))
        await at.until_idle()
        at.listen()
        check(program, at.listener)


def transformed(variable: af.Variable, ref: ops.Ref) -> af.Variable | af.Transformed:
    reference: af.Variable | af.Transformed = variable
    for step in ref.transforms:
        method = getattr(reference, step.name)
        reference = method(step.argument) if step.argument else method()
    return reference


# Without turns: the frontend puts a gen after a turn into a new turn.
@given(program=op_programs(kinds=[kind for kind in CERTAIN if kind != "turn"], size=20))
async def test_the_frontend_gives_the_same_values(program):
    """The same programs, written with states, variables, f-strings and forks."""
    variables: dict[int, af.Variable] = {}
    async with af.session(backend=af.Scripted(answer)) as flow:
        states: dict[int, af.State] = {}
        for step in program.script:
            match step:
                case Pause(num_turns):
                    for _ in range(num_turns):
                        await anyio.lowlevel.checkpoint()
                case ops.Open(state):
                    states[state] = flow.state()
                case ops.Text(state, (str() as text,)):
                    states[state] += text
                case ops.Text(state, (before, ops.Ref() as ref, after)):
                    states[state] += f"{before}{transformed(variables[ref.var], ref)}{after}"
                case ops.Set(state, var, name, parts):
                    pieces = [p if isinstance(p, str) else transformed(variables[p.var], p) for p in parts]
                    variables[var] = states[state].set(name, "".join([f"{piece}" for piece in pieces]))
                case ops.Read(state, var):
                    variables[var] = states[state].text()
                case ops.Image(state, source):
                    states[state] += af.image(source)
                case ops.Hint(state, objective, output_tokens, forks):
                    states[state].hint(objective=objective, output_tokens=output_tokens, forks=forks)
                case ops.Gen(state, var, name):
                    states[state] += af.gen(name)
                    variables[var] = states[state][name]
                case ops.Select(state, var, name):
                    states[state] += af.select(name, ANSWERS)
                    variables[var] = states[state][name]
                case ops.Fork(state, children):
                    states |= dict(zip(children, states[state].fork(len(children)), strict=True))
        for var, variable in variables.items():
            await variable.settled()
            expected = program.outcome(var)
            if isinstance(expected, str):
                assert await variable == expected
                assert "".join([delta async for delta in variable]) == expected
            else:
                with pytest.raises(af.errors.EngineFailed if expected.is_own else af.errors.RunFailed):
                    await variable
        for state in program.states:
            if program.make_failure(state) is None:
                await states[state.id]


# Refused ops, which harm nothing.

NO_STATE = [
    (ops.Text(9, ("a",)), "there is no state 9"),
    (ops.Cancel(9), "there is no state 9"),
    (ops.Close(9), "there is no state 9"),
    (ops.TaskGroup(9, (2,)), "there is no state 9"),
    (ops.Limit(0, -1.0), "limit: deadline_s must be a number of seconds, not -1.0"),
    (ops.Open(2**53), "states, variables and tickets have numbers up to .*"),
    (ops.Open(-(2**53)), "states, variables and tickets have numbers up to .*"),
    (ops.GetStats(2**53), "states, variables and tickets have numbers up to .*"),
    (ops.Text(4, ("a",)), "state 4 has been closed"),
    (gen(4, 9), "state 4 has been closed"),
    (ops.Close(4), "state 4 has been closed"),
    (ops.Cancel(4), "state 4 has been closed"),
]


@pytest.mark.parametrize("when", ["at once", "later"])
@pytest.mark.parametrize(
    ("op", "why"), NO_STATE, ids=lambda value: getattr(value, "__class__", value).__name__
)
async def test_an_op_without_a_state_is_rejected(op, why, when):
    async with bench() as at:
        at.submit(ops.Open(1), ops.Text(1, ("a",)), ops.Fork(1, (2, 4)), gen(1, 3), ops.Close(4))
        if when == "later":
            await settle()
            why = why.replace("state 4 has been closed", "there is no state 4")
        with pytest.raises(af.errors.ProtocolError, match=f"^{why}$"):
            at.submit(op)
        at.submit(ops.Text(2, (ops.Ref(3),)), gen(2, 5), ops.Fork(2, (7,)), gen(7, 6))
        await at.listen_until_all_ended([3, 5, 6])
        assert at.listener.texts == {3: "<a>", 5: "<a<a>>", 6: "<a<a><a<a>>>"}


# An op, the state that it fails, and the code of that.
NONSENSE = [
    (ops.TaskGroup(1, (2, 9)), 1, "protocol_error"),
    (ops.TaskGroup(2, (1,)), 2, "protocol_error"),
    (ops.TaskGroup(1, (2, 2)), 1, "protocol_error"),
    (ops.TaskGroup(1, (2,) * 1_000_000), 1, "protocol_error"),
    (ops.TaskGroup(1, (4,)), 1, "protocol_error"),
    (ops.Open(20, cache_salt="x" * 257), 20, "bad_argument"),
    (ops.Open(20, label="x" * 257), 20, "bad_argument"),
    (ops.Open(20, program="x" * 257), 20, "bad_argument"),
    (ops.Open(1), 1, "protocol_error"),
    (ops.Fork(1, ()), 1, "protocol_error"),
    (ops.Fork(1, (17, 17)), 1, "protocol_error"),
    (ops.Fork(1, (17, 2)), 1, "protocol_error"),
    (ops.Fork(2, (17, 2**53)), 2, "protocol_error"),
    (gen(1, 3), 1, "protocol_error"),
    (ops.Select(2, 3, "x", ("a",)), 2, "protocol_error"),
    (ops.Select(2, 2**53, "x", ("a",)), 2, "protocol_error"),
    (ops.Set(2, 11, "x", (ops.Ref(9),)), 2, "protocol_error"),
    (ops.Set(1, 2**53, "x", ("a",)), 1, "protocol_error"),
    (ops.Text(1, ("a", ops.Ref(9))), 1, "protocol_error"),
    (ops.Text(1, (ops.Ref(3, (Transform("strip"),) * 17),)), 1, "bad_argument"),
    (ops.Limit(1, output_tokens=-1), 1, "bad_argument"),
    (ops.Await(1, 2**53), 1, "protocol_error"),
    (ops.SubmitGraph(20, ()), 20, "protocol_error"),
    (ops.SubmitGraph(2**53 - 1, (ops.Open(1), gen(1, 2)), outputs=(2,)), 2**53 - 1, "protocol_error"),
    (ops.SubmitGraph(20, (ops.Open(1), gen(1, 2), ops.Open(1)), outputs=(2,)), 20, "protocol_error"),
    (ops.SubmitGraph(20, (ops.Open(1), ops.Fork(1, (3, 3)), gen(1, 2)), outputs=(2,)), 20, "protocol_error"),
    (ops.Rejected(2, af.errors.BadArgument("no"), "gen", {11: "x"}), 2, "bad_argument"),
    (ops.Rejected(2, af.errors.BadArgument("no"), "fork", {}, (17,)), 2, "bad_argument"),
]


@pytest.mark.parametrize(
    ("op", "state", "code"), NONSENSE, ids=lambda value: getattr(value, "__class__", value).__name__
)
async def test_an_invalid_op_fails_its_state_in_order(op, state, code):
    async with bench() as at:
        at.submit(ops.Open(1), ops.Text(1, ("a",)), ops.Fork(1, (2, 4)), gen(1, 3), ops.Text(2, ("b",)))
        at.submit(gen(2, 10), ops.Close(4), ops.Open(5), ops.Text(5, ("c",)))
        at.submit(op, ops.Text(state, ("more",)), ops.Text(5, (ops.Ref(3), ops.Ref(10))), gen(5, 6))
        await at.listen_until_all_ended([3, 6, 10])
        assert at.listener.texts == {3: "<a>", 10: "<ab>", 6: "<c<a><ab>>"}  # earlier ops have run
        await settle()
        at.listen()
        assert at.listener.failed[state].error.code == code
        assert at.listener.failed.keys() <= {state, 17}
        later = [var for var in (11, 21) if var in at.interpreter._variables]
        assert all(isinstance(at.listener.ends[var], VarFailed) for var in later)


@pytest.mark.parametrize(
    "bad",
    [
        gen(2, 3, max_tokens=0),
        gen(2, 3, max_tokens=-5),
        gen(2, 3, temperature=-1.0),
        gen(2, 3, temperature=float("nan")),
        gen(2, 3, top_k=2**63),
        gen(2, 3, stop=("",)),
        gen(2, 3, seed=2**64 - 1),
        ops.Select(2, 3, "x", ()),
        ops.Select(2, 3, "x", ("a", "")),
        ops.Select(2, 3, "x", ("a", "a")),
        ops.Select(2, 3, "x", tuple(str(n) for n in range(1001))),
    ],
    ids=lambda op: type(op).__name__,
)
async def test_invalid_arguments_fail_only_their_state(bad):
    async with bench() as at:
        at.submit(ops.Open(1), ops.Open(2), bad, gen(2, 4), ops.Text(1, ("a",)), gen(1, 5))
        await at.listen_until_all_ended([3, 4, 5])
        assert at.listener.ends[3].error.code == "bad_argument"
        assert at.listener.ends[4].error.code == "run_failed"
        assert at.listener.texts == {5: "<a>"}
        assert at.generator.num_open == 1  # a failed state holds no context


async def test_too_many_pending_ops_fail_their_state_with_all_that_it_declares():
    async with bench() as at:
        at.submit(ops.Open(5), ops.Open(1), gen(1, 2), *[ops.Text(1, ("a",))] * (MAX_PENDING_OPS - 1))
        at.submit(gen(1, 3), ops.Fork(1, (4,)), ops.Text(1, ("b",)), gen(4, 6))
        at.submit(ops.Text(5, ("c",)), gen(5, 7))
        await at.listen_until_all_ended([2, 3, 6, 7])
        assert at.listener.failed[1].error.code == "overloaded"
        assert at.listener.failed[4].error.cause.code == "overloaded"
        assert at.listener.texts == {7: "<c>"}


async def test_too_many_states_fail_their_fork(monkeypatch):
    monkeypatch.setattr(state_tree, "MAX_STATES", 3)
    async with bench() as at:
        at.submit(ops.Open(1), ops.Open(2), ops.Text(2, ("a",)), ops.Fork(1, (3, 4)), gen(4, 5), ops.Open(6))
        at.submit(gen(2, 7))
        await at.listen_until_all_ended([5, 7])
        codes = {state: event.error.origin.code for state, event in at.listener.failed.items()}
        assert codes == dict.fromkeys((1, 3, 4, 6), "overloaded")
        assert at.listener.texts == {7: "<a>"}


async def test_a_limit_that_is_refused_is_not_counted(monkeypatch):
    monkeypatch.setattr(state_tree, "MAX_LIMITS", 1)
    async with bench() as at:
        at.submit(ops.Open(1), ops.Text(1, ("a",)), ops.Open(3))
        for _ in range(3):
            with pytest.raises(af.Overloaded):
                at.submit(ops.Limit(0, output_tokens=100))  # one for each state
        at.submit(ops.Limit(1, output_tokens=100), gen(1, 2))
        await at.listen_until_all_ended([2])
        assert at.listener.texts == {2: "<a>"}


async def test_a_session_at_its_memory_limit_continues_after_closes():
    generator = ScriptedGenerator(lambda prompt: f"<{prompt}>")
    async with bench(generator) as at:
        memory = MemoryBudget(20_000)
        interpreter = at.interpreter = Interpreter(generator, at.interpreter._tasks, memory)
        at.submit(ops.Open(1), ops.Text(1, ("x" * 12_000,)), gen(1, 2), gen(1, 3), ops.Open(4), gen(4, 5))
        await at.listen_until_all_ended([2, 3, 5])
        assert at.listener.failed[1].error.code == "overloaded"
        at.submit(*[ops.Close(cell.id) for cell in interpreter._states])
        await settle()
        at.listen()
        at.submit(ops.Open(10), ops.Text(10, ("a",)), gen(10, 11))
        await at.listen_until_all_ended([11])
        assert at.listener.texts == {11: "<a>"}


async def test_the_memory_of_rejected_ops_is_limited(monkeypatch):
    monkeypatch.setattr(state_tree, "MAX_STATES", 1)
    monkeypatch.setattr(interpreter_module, "REJECTED_BYTES", 10 * STATE_BYTES)
    async with bench() as at:
        at.submit(ops.Open(1))
        with pytest.raises(af.Overloaded, match="rejected"):
            at.submit(*map(ops.Open, range(2, 20)))
        assert len(list(at.interpreter._states)) < 12


# Order and endings.


async def test_ops_after_a_seal_fail():
    async with bench() as at:
        at.submit(ops.Open(1), ops.Text(1, ("a",)), ops.Seal(1), ops.Await(1, 1), gen(1, 2))
        await at.listen_until_all_ended([2])
        assert at.listener.reached == {1: 1}
        error = at.listener.ends[2].error
        assert (error.code, error.state, error.op) == ("state_closed", 1, 2)
        assert at.generator.num_open == 0


async def test_a_sealed_state_is_read_until_it_is_closed():
    async with bench() as at:
        at.submit(ops.Open(1), ops.Text(1, ("a",)), ops.Seal(1), ops.Read(1, 2, "text()", "text"))
        await at.listen_until_all_ended([2])
        assert at.listener.texts[2] == "a"
        assert at.generator.num_open == 0


async def test_reached_tickets_are_sent_after_the_variables():
    async with bench(ScriptedGenerator(lambda prompt: "a b")) as at:
        at.submit(ops.Open(1), ops.Await(1, 1), gen(1, 2), ops.Await(1, 2), gen(1, 3), ops.Await(1, 3))
        await settle()
        assert [type(event) for event in at.listen()] == [Value, Value, Reached]
        assert at.listener.reached == {1: 3}


@pytest.mark.parametrize("ticket", [5, 4, 0])
@pytest.mark.parametrize("is_read", [True, False])
async def test_f37_the_tickets_of_a_state_increase(ticket: int, is_read: bool) -> None:
    async with bench(ScriptedGenerator(lambda prompt: "a")) as at:
        at.submit(ops.Open(1), gen(1, 2), ops.Await(1, 5), ops.Open(3))
        await settle()
        if is_read:
            at.listen()
        at.submit(gen(1, 4), ops.Await(1, ticket), gen(1, 6), ops.Await(3, ticket or 1))
        await settle()
        while at.listen():
            pass
        assert at.listener.reached == {1: 5, 3: ticket or 1}
        assert at.listener.failed[1].error.code == "protocol_error"
        assert at.listener.texts.keys() == {2, 4}  # the ops before the wrong one run
        # A client that has missed all events receives the last ticket again.
        at.interpreter.rewind({}, {1: 0})
        assert Reached(1, 5) in at.interpreter.events.drain()


async def test_f37_the_first_ticket_of_a_graph_is_larger_than_the_ticket_of_its_end() -> None:
    graph = ops.SubmitGraph(20, (ops.Open(1), gen(1, 3)), outputs=(3,))
    async with bench(ScriptedGenerator(["x"])) as at:
        at.submit(graph, ops.Await(20, 1))
        await settle()
        while at.listen():
            pass
        assert at.listener.failed[20].error.code == "protocol_error"


async def test_unread_text_is_sent_as_one_delta():
    words = " ".join(str(number) for number in range(500))
    async with bench(ScriptedGenerator(lambda prompt: words)) as at:
        at.submit(ops.Open(1), gen(1, 2, max_tokens=1000))
        for _ in range(100):
            await anyio.lowlevel.checkpoint()
        [delta] = at.listen()
        assert isinstance(delta, Delta)
        assert words.startswith(delta.text)
        assert len(delta.text) > 50
        await at.listen_until_all_ended([2])
        assert at.listener.texts[2] == words


async def test_a_long_stream_of_texts_does_not_block_other_states(monkeypatch):
    monkeypatch.setattr(loop_turns, "TURN_S", 0.0)  # however fast the machine is, its stream takes many turns
    async with bench(ScriptedGenerator(lambda prompt: "a b c")) as at:
        at.submit(ops.Open(1), *[ops.Text(1, ("a",))] * 1000, ops.Await(1, 1), ops.Open(2), gen(2, 3))
        await at.listen_until_all_ended([3])
        assert at.listener.reached == {}
        await at.until_idle()
        at.listen()
        assert at.listener.reached == {1: 1}


async def test_a_state_forgets_its_closed_forks():
    async with bench() as at:
        at.submit(ops.Open(1))
        for child in range(2, 50):
            at.submit(ops.Fork(1, (child,)), ops.Close(child))
        await settle()
        assert at.interpreter._states.open_state(1).children == {}


async def test_an_op_keeps_what_it_refers_to_when_that_state_is_closed():
    async with bench() as at:
        at.submit(ops.Open(1), ops.Text(1, ("a",)), gen(1, 2), ops.Open(3))
        at.submit(*[ops.Text(3, ("-",))] * 500, ops.Text(3, (ops.Ref(2),)), gen(3, 4), ops.Close(1))
        await at.listen_until_all_ended([4])
        assert at.listener.texts[4] == "<" + "-" * 500 + "<a>>"
        await at.until_idle()
        assert 2 not in at.interpreter._variables


async def test_stats_are_answered():
    async with bench(ScriptedGenerator(lambda prompt: "a b")) as at:
        at.submit(ops.Open(1), gen(1, 2))
        await at.listen_until_all_ended([2])
        at.submit(ops.GetStats(5))
        await at.interpreter.events.wait()
        assert at.interpreter.events.drain() == [
            StatsReply(5, af.Stats("scripted", steps=1, generated_tokens=2))
        ]


async def test_a_fault_of_the_generator_fails_the_op_with_what_happened(caplog):
    class Faulty(ScriptedGenerator):
        async def generate(self, *arguments):
            return 1 / 0

    async with bench(Faulty(["unused"])) as at:
        at.submit(ops.Open(1), gen(1, 2), ops.Open(3), ops.End(3), ops.Await(3, 1))
        await at.listen_until_all_ended([2])
        assert at.listener.ends[2].error == ErrorInfo(
            "engine_failed",
            "gen failed: ZeroDivisionError('division by zero')",
            ErrorInfo("run_failed", "ZeroDivisionError('division by zero')"),
            state=1,
            op=1,
        )
        [record] = caplog.records
        assert "an op failed" in record.getMessage()
        record.exc_info = None  # whose frames hold the state
        error = at.listener.failed[3].error
        assert (error.code, error.state, error.op) == ("bad_argument", 3, 1)


async def test_a_rewind_ignores_unknown_numbers():
    async with bench(ScriptedGenerator(lambda prompt: "a b")) as at:
        at.submit(ops.Open(1), gen(1, 2))
        await settle()
        at.interpreter.events.drain()
        at.interpreter.rewind({2: -5, 99: 1}, {1: 0, 99: 1})
        assert [event.at for event in at.listen()] == [0]
        at.interpreter.rewind({2: 10**9}, {})
        [again] = at.interpreter.events.drain()
        assert (again.at, again.text) == (3, "")


@pytest.mark.parametrize("num_turns", range(8))
async def test_cancelling_while_a_fork_is_under_way(num_turns):
    class SlowForks(ScriptedGenerator):
        async def fork(self, context, count):
            for _ in range(3):
                await anyio.lowlevel.checkpoint()
            return await super().fork(context, count)

    async with bench(SlowForks(lambda prompt: f"<{prompt}>")) as at:
        at.submit(
            ops.Open(1), ops.Text(1, ("a",)), ops.Fork(1, (2, 3)), gen(2, 4), ops.Fork(3, (5,)), gen(5, 6)
        )
        for _ in range(num_turns):
            await anyio.lowlevel.checkpoint()
        at.submit(ops.Cancel(1))
        await at.listen_until_all_ended([4, 6])
        ends = at.listener.ends.values()
        assert {end.error.code for end in ends if isinstance(end, VarFailed)} <= {"cancelled"}


def test_the_backlog_of_a_frontend_fits_into_the_interpreters():
    from agentflow.language.op_log import MAX_IN_FLIGHT

    assert MAX_IN_FLIGHT * 2 <= interpreter_module.MAX_PENDING_OPS


@pytest.mark.parametrize("downwards", [True, False])
async def test_messages_of_consequent_failures_are_short(downwards):
    """Each state forked from the one before, and a failure at one end: every message names its cause,
    and would contain all of them."""
    num_states = 500
    async with bench() as at:
        at.submit(ops.Open(1), *([ops.End(1)] if downwards else []))  # no role begins there: it fails
        for state in range(1, num_states):
            at.submit(ops.Fork(state, (state + 1,)))
            if not downwards:
                at.submit(ops.TaskGroup(state, (state + 1,)))
        at.submit(*[] if downwards else [ops.End(num_states)])
        at.submit(ops.Set(1 if not downwards else num_states, 1, "value", ("x",)))
        await at.until_idle()
        while at.listen():
            pass
        failed = {state: event.error for state, event in at.listener.failed.items()}
        assert len(failed) == num_states
        first, last = (1, num_states) if downwards else (num_states, 1)
        assert failed[last].origin.message == failed[first].origin.message
        messages = [str(state.error) for state in at.interpreter._states]
        messages += [error.message for error in failed.values()]
        assert max(map(len, messages)) <= MAX_MESSAGE_CHARS + 3


@pytest.mark.parametrize(
    "op", [ops.Text(20, ("more",)), ops.Text(21, ("more",)), ops.Fork(20, (50,)), ops.Seal(20)], ids=repr
)
async def test_f29d_nothing_is_appended_to_the_states_of_a_graph(op: ops.Op) -> None:
    graph = ops.SubmitGraph(20, (ops.Open(1), ops.Fork(1, (2,)), gen(1, 3), gen(2, 4)), outputs=(3, 4))
    for extra, is_allowed in (((op,), False), ((ops.Limit(20, output_tokens=1_000), ops.Await(20, 5)), True)):
        async with bench(ScriptedGenerator(["x", "y"])) as at:
            at.submit(graph, *extra)
            await settle()
            events = at.listen()
        failed = [event for event in events if isinstance(event, StateFailed | VarFailed)]
        assert (not failed) == is_allowed


@pytest.mark.parametrize("when", ["with the graph", "while a fork runs", "after the end"])
async def test_f37_a_graph_reaches_the_tickets_of_its_root_when_it_has_ended(when: str) -> None:
    may_answer = anyio.Event()

    class Slow(ScriptedGenerator):
        async def generate(self, *args, **kwargs):
            await may_answer.wait()
            return await super().generate(*args, **kwargs)

    graph = ops.SubmitGraph(20, (ops.Open(1), ops.Fork(1, (2,)), gen(2, 3)), outputs=(3,))
    asked = ops.Await(20, 5)
    async with bench(Slow("x")) as at:
        at.submit(graph, *[asked] * (when == "with the graph"))
        await settle()
        at.submit(*[asked] * (when == "while a fork runs"))
        await settle()
        assert not at.listen()
        may_answer.set()
        await settle()
        at.submit(*[asked] * (when == "after the end"))
        await settle()
        while at.listen():
            pass
        assert at.listener.reached[20] == 5
        assert at.listener.ends[22].text == "x"


async def test_f37_a_task_group_outlives_the_state_that_forked_it() -> None:
    """The failure of a branch ends its siblings and, because the fork is closed, no other state."""

    def fail_x(prompt: str) -> str | EngineFailed:
        return EngineFailed("broken") if "x" in prompt else "ok"

    async with bench(ScriptedGenerator(fail_x)) as at:
        at.submit(ops.Open(1), ops.Fork(1, (2, 3)), ops.TaskGroup(1, (2, 3)))
        at.submit(ops.Fork(2, (4, 5)), ops.TaskGroup(2, (4, 5)), ops.Expect(3, 30, "late"))
        at.submit(ops.Text(4, (ops.Ref(30),)), gen(4, 7), ops.Close(2))
        await settle()
        at.submit(ops.Provide(30, "x"), gen(1, 8), gen(3, 9))
        await at.listen_until_all_ended([7, 8, 9])
        await settle()
        at.listen()
        assert set(at.listener.failed) == {4, 5}
        assert at.listener.failed[5].error.code == "cancelled"
        assert at.listener.ends[8].text == "ok"


async def test_closed_states_that_wait_for_each_others_variables_end_when_the_client_provides_one() -> None:
    async with bench() as at:
        for state in (1, 2):
            at.submit(ops.Open(state), ops.Expect(state, 10 + state, "late"))
        at.submit(*[ops.Text(state, (ops.Ref(13 - state),)) for state in (1, 2)], gen(1, 7), gen(2, 8))
        at.submit(ops.Close(1), ops.Close(2))
        await settle()
        assert at.interpreter.num_active() == 0
        at.submit(ops.Provide(11, "x"))
        await at.listen_until_all_ended([7, 8])
        assert at.listener.ends[8].text == "<x>"
        assert at.listener.ends[7].error.origin.message == "its state was closed"


async def test_f37_readers_of_a_run_whose_program_failed_get_its_exception() -> None:
    async with bench() as at:
        at.submit(ops.Open(1), ops.Open(2), ops.Expect(1, 30, "late"), ops.Text(2, (ops.Ref(30),)), gen(2, 7))
        at.submit(ops.Cancel(1, ops.Failure("KeyError", "'title'")))
        await at.listen_until_all_ended([7])
        error = at.listener.ends[7].error
        assert (error.code, error.origin.code) == ("run_failed", "cancelled")
        assert "KeyError: 'title'" in error.origin.message


async def test_f37_a_closed_fork_hides_no_state_from_cancellation_and_limits() -> None:
    async with bench() as at:
        at.submit(ops.Open(1), ops.Fork(1, (2,)), ops.Fork(2, (3, 4)), ops.Expect(1, 30, "late"))
        at.submit(*[ops.Text(state, (ops.Ref(30),)) for state in (3, 4)], gen(3, 7), gen(4, 8), ops.Close(2))
        await settle()
        at.submit(ops.Limit(1, output_tokens=0), ops.Cancel(3), ops.Provide(30, "late"))
        await at.listen_until_all_ended([7, 8])
        assert [at.listener.ends[number].error.code for number in (7, 8)] == ["cancelled", "budget_exceeded"]
        at.submit(ops.Open(10), ops.Fork(10, (11,)), ops.Fork(11, (12,)), ops.Expect(10, 31, "never"))
        at.submit(ops.Text(12, (ops.Ref(31),)), gen(12, 13), ops.Close(11))
        await settle()
        at.submit(ops.Cancel(10))
        await at.listen_until_all_ended([13])
        assert at.listener.ends[13].error.code == "cancelled"
