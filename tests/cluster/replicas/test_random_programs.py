"""Random programs on replicas that die, with cancellations: each other program ends with the texts that it
has alone, and nothing is held afterwards. Scheduler, graph, fills ahead and router are real."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import anyio
from hypothesis import given
from hypothesis import strategies as st
from support.examples import examples
from support.fake_engine import TEMPLATE
from support.fake_replicas import Replicas
from support.plain_model import runner

from agentflow.engine.generator.generator import EngineGenerator
from agentflow.engine.scheduling.scheduler import SchedulerConfig
from agentflow.protocol import ops
from agentflow.protocol.sampling import GenParams
from agentflow.runtime.interpreter.interpreter import Interpreter

MAX_DEATHS = 3
_numbers = st.integers(0, 9)
_steps = st.lists(
    st.tuples(st.sampled_from(["text", "ref", "gen", "gen", "fork", "open"]), _numbers, _numbers),
    min_size=2,
    max_size=12,
)
_events = st.lists(
    st.tuples(st.sampled_from(["begin", "begin", *["step"] * 6, "die", "cancel"]), _numbers),
    min_size=5,
    max_size=50,
)


@dataclass
class Program:
    """The ops of a program. Its states and variables have numbers from ``base`` on."""

    base: int
    steps: Sequence[tuple[str, int, int]]
    states: list[int] = field(default_factory=list)
    variables: list[int] = field(default_factory=list)

    def ops(self) -> list[ops.Op]:
        made: list[ops.Op] = []
        self.states, self.variables = [], []
        for name, a, b in [("open", 0, 0), ("text", 0, 3), *self.steps, ("gen", 0, 3)]:
            made += self._op(name, self.states[a % len(self.states)] if self.states else 0, b)
        return made

    def _op(self, name: str, state: int, number: int) -> list[ops.Op]:
        new = self.base + len(self.states) + len(self.variables)
        match name:
            case "open":
                self.states.append(new)
                return [ops.Open(new, program=f"program {self.base}"), ops.Text(new, ("once ",))]
            case "fork":
                self.states.append(new)
                return [ops.Fork(state, (new,))]
            case "gen":
                self.variables.append(new)
                return [ops.Gen(state, new, "x", GenParams(max_tokens=4 * (1 + number)))]
            case "ref" if self.variables:
                return [ops.Text(state, ("after: ", ops.Ref(self.variables[number % len(self.variables)])))]
            case _:
                return [ops.Text(state, ("so it is said " * (1 + number % 4),))]


async def texts(
    replicas: Replicas, programs: list[Program], events: Sequence[tuple[str, int]]
) -> list[list[str]]:
    """Runs the programs, and returns the texts of each that was neither cancelled nor blamed for deaths; of
    others nothing."""
    waiting, begun, cancelled = [*programs], list[Program](), list[Program]()
    num_deaths = 0
    async with replicas.open() as client, anyio.create_task_group() as group:
        await replicas.settle()
        interpreter = Interpreter(EngineGenerator(client, TEMPLATE), group)

        def begin() -> None:
            begun.append(waiting.pop(0))
            interpreter.submit_all(begun[-1].ops())

        replicas.is_automatic = False
        for event, number in events:
            match event:
                case "begin" if waiting:
                    begin()
                case "step":
                    replicas.children[number % len(replicas.children)].step()
                case "die" if num_deaths < MAX_DEATHS:
                    num_deaths += 1
                    replicas.children[number % len(replicas.children)].die()
                case "cancel" if begun:
                    program = begun[number % len(begun)]
                    cancelled.append(program)
                    interpreter.submit(ops.Cancel(program.base))
                case _:
                    pass
            await replicas.settle()
        while waiting:
            begin()
        replicas.become_automatic()
        known = [interpreter.variable(number) for program in programs for number in program.variables]
        await replicas.ticks.until(lambda: all(variable.has_ended for variable in known))
        found: list[list[str]] = []
        for program in programs:
            own = [interpreter.variable(number) for number in program.variables]
            errors = [str(variable.error) for variable in own if variable.error is not None]
            if program not in cancelled:  # a request may be blamed for deaths that the test has caused
                assert [error for error in errors if "the engine died" not in error] == []
            found.append([] if program in cancelled or errors else [variable.text for variable in own])
        group.cancel_scope.cancel()
        interpreter.close()
        with anyio.CancelScope(shield=True):
            await replicas.until(lambda: all(is_idle(replicas, number) for number in replicas.children))
    return found


def is_idle(replicas: Replicas, number: int) -> bool:
    """Whether nothing runs, waits or holds KV on a replica. Then its scheduler is checked."""
    child = replicas.children[number]
    scheduler = child.engine.scheduler
    if child.is_dead:
        return True
    if scheduler.running or len(scheduler.waiting) or child.engine._in_flight or child.step():
        return False
    scheduler.check_idle()
    return True


def small_replicas(count: int) -> Replicas:
    replicas = Replicas(count, SchedulerConfig(max_running=3, token_budget=32))
    replicas.make_runner = lambda number: runner(num_slots=900)
    return replicas


@examples(40)
@given(st.lists(_steps, min_size=1, max_size=5), _events, st.integers(1, 3))
def test_programs_end_with_the_texts_that_they_have_alone(
    plans: list[list[tuple[str, int, int]]], events: list[tuple[str, int]], num_replicas: int
) -> None:
    async def run() -> None:
        programs = [Program(1000 * (1 + number), steps) for number, steps in enumerate(plans)]
        found = await texts(small_replicas(num_replicas), programs, events)
        for program, own in zip(programs, found, strict=True):
            if own:
                alone = await texts(small_replicas(1), [Program(program.base, program.steps)], [])
                assert [own] == alone

    anyio.run(run)
