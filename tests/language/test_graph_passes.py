"""The compiler's passes: constants first without a change of any text, and reordering with a judge."""

from __future__ import annotations

from collections import Counter
from functools import partial
from itertools import pairwise, takewhile
from typing import Any

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.faults import has_param
from support.language.random_programs import Step, answer, steps, whole

import agentflow as af
from agentflow.backends.scripted_generator import ScriptedContext, ScriptedGenerator
from agentflow.language.graphs.graph import Graph
from agentflow.language.graphs.optimise import constants_first
from agentflow.protocol import ops
from agentflow.protocol.op_table import references

pytestmark = pytest.mark.anyio


class Prompts(ScriptedGenerator):
    """Keeps the prompts of all gens."""

    def __init__(self, script: Any = answer) -> None:
        super().__init__(script)
        self.prompts: list[str] = []

    async def generate(self, context: ScriptedContext, *args: Any, **kwargs: Any) -> Any:
        self.prompts.append(context.text)
        return await super().generate(context, *args, **kwargs)


async def submitted(graph: Graph, *inputs: str, script: Any = answer) -> tuple[list[Any], list[str]]:
    """The results of the graph for each input, and all prompts."""
    backend = af.Scripted(script)
    backend.generator = generator = Prompts(script)
    async with af.session(backend=backend, seed=1) as flow:
        results = [await flow.submit(graph, dict.fromkeys(graph.arguments, one)) for one in inputs]
    assert generator.num_open == 0
    return results, generator.prompts


async def refuse(old: str, new: str) -> bool:
    return False


async def accept(old: str, new: str) -> bool:
    return True


@given(todo=steps, argument=st.text(max_size=5))
def test_optimised_graphs_have_the_same_prompts_and_values(todo: list[Step], argument: str) -> None:
    async def compare() -> None:
        graph = whole.trace(todo=todo)
        optimised = graph.optimised()
        results, prompts = await submitted(graph, argument)
        assert await graph.optimised(reorder=True, judge=refuse) == optimised
        results_after, prompts_after = await submitted(optimised, argument)
        assert results_after == results
        assert Counter(prompts_after) == Counter(prompts)

    anyio.run(compare)


@given(todo=steps)
def test_the_order_of_a_state_changes_only_for_sets_and_never_before_a_use(todo: list[Step]) -> None:
    sequence = whole.trace(todo=todo).ops
    moved = constants_first(sequence)
    assert Counter(map(id, moved)) == Counter(map(id, sequence))
    declared: set[int] = set()
    for op in moved:
        assert set(references(op)) <= declared
        if isinstance(op, ops.Declaring):
            declared.add(op.var)
    for state in {getattr(op, "state", None) for op in sequence}:
        stream = [op for op in sequence if getattr(op, "state", None) == state]
        stream_after = [op for op in moved if getattr(op, "state", None) == state]
        assert [op for op in stream_after if not isinstance(op, ops.Set)] == [
            op for op in stream if not isinstance(op, ops.Set)
        ]
        for before, after in pairwise(stream_after):
            if isinstance(before, ops.Set) and references(before) and is_constant(after):
                between = moved[moved.index(before) : moved.index(after)]
                assert any(before.var in references(op) for op in between)


def is_constant(op: ops.Op) -> bool:
    return isinstance(op, ops.Begin | ops.End | ops.Text) and not references(op)


@given(todo=steps, argument=st.text(max_size=5))
def test_reordered_graphs_have_the_same_variables_and_passages(todo: list[Step], argument: str) -> None:
    async def compare() -> None:
        graph = whole.trace(todo=todo).optimised()
        moved = await graph.optimised(reorder=True, judge=accept)
        assert moved.names == graph.names
        assert moved.outputs == graph.outputs
        for before, after in zip(graph.ops, moved.ops, strict=True):
            if isinstance(before, ops.Text) and isinstance(after, ops.Text):
                assert characters(before) == characters(after)
        [result], _ = await submitted(moved, argument)
        assert len(result) == len((await submitted(graph, argument))[0][0])

    anyio.run(compare)


def characters(op: ops.Text) -> Counter[Any]:
    return Counter([one for part in op.parts for one in (part if isinstance(part, str) else [part])])


def num_constant_before_waiting(graph: Graph) -> int:
    """The characters of constant text that the states append before their first op that waits for a
    variable."""
    has_waited: set[int] = set()
    found = 0
    for op in graph.ops:
        state = getattr(op, "state", 0)
        if references(op) or isinstance(op, ops.Gen):
            has_waited.add(state)
        if isinstance(op, ops.Text) and state not in has_waited:
            found += sum(len(part) for part in op.parts if isinstance(part, str))
    return found


@af.program
async def review(s: af.State, code: str) -> str:
    """A reviewer whose state sets a variable before its own rules."""
    finder = s.copy()
    finder += af.user("Find a fault in:\n", code) + af.assistant(af.gen("fault"))
    fault = s.set("fault", finder["fault"].strip())
    s += af.system("You review code. Be strict, and give reasons for all that you say.")
    s += af.user("Fault: ", fault, "\nIs it one?") + af.assistant(af.gen("verdict"))
    return await s["verdict"]


async def test_the_constant_prefix_of_a_state_comes_before_the_variables_that_it_sets() -> None:
    graph = review.trace()
    optimised = graph.optimised()
    rules = len("You review code. Be strict, and give reasons for all that you say.")
    assert num_constant_before_waiting(optimised) - num_constant_before_waiting(graph) == rules
    assert (await submitted(graph, "x = 1"))[0] == (await submitted(optimised, "x = 1"))[0]


@af.program
async def failing(s: af.State, essay: str) -> str:
    score = s.set("score", "none")
    s += af.user("Essay: ", essay, score) + af.assistant(af.gen("grade"))
    s += af.user("Points: ", score.number()) + af.assistant(af.gen("points"))
    return await s["points"]


async def test_f37_a_transform_of_a_constant_that_fails_does_so_in_the_run() -> None:
    for graph in (failing.trace(), failing.trace().optimised()):
        with pytest.raises(af.errors.RunFailed):
            await submitted(graph, "x")
    graph = failing.trace().optimised()
    (needed,) = [op.var for op in graph.ops if isinstance(op, ops.Set)]
    assert [references(op).count(needed) for op in graph.ops if isinstance(op, ops.Text)] == [0, 1]


@af.program
async def grade(s: af.State, essay: str, author: str) -> str:
    s += af.system("You grade essays.")
    s += af.user(
        f"Essay:\n{essay}\n\nIt is by {author}.\n\nGive it a grade from A to F. Say nothing else.\n\nGrade:"
    )
    s += af.assistant(af.gen("grade"))
    return await s["grade"]


def shared(prompts: list[str]) -> int:
    """The characters at the beginning of each prompt but the first that the first one has, too."""
    pairs = [zip(prompts[0], prompt, strict=False) for prompt in prompts[1:]]
    return sum(len(list(takewhile(lambda pair: pair[0] == pair[1], pair))) for pair in pairs)


async def test_moved_constants_lengthen_the_prefix_that_runs_share() -> None:
    asked: list[tuple[str, str]] = []

    async def judge(old: str, new: str) -> bool:
        asked.append((old, new))
        return True

    essays = [f"{number} plants" for number in range(8)]
    graph = grade.trace().optimised()
    moved = await graph.optimised(reorder=True, judge=judge)
    [(old, new)] = asked
    assert old.startswith("Essay:\n{essay}\n\nIt is by {author}.")
    assert new == (
        "Give it a grade from A to F.\n\nSay nothing else.\n\nEssay:\n{essay} It is by {author}.\n\nGrade:"
    )
    _, before = await submitted(graph, *essays)
    _, after = await submitted(moved, *essays)
    num_moved = len("Give it a grade from A to F.\n\nSay nothing else.\n\n")
    assert shared(after) - shared(before) == 7 * num_moved
    assert moved.names == graph.names


async def test_a_refused_move_keeps_the_original() -> None:
    @af.program
    async def two(s: af.State, first: str, second: str) -> str:
        s += af.user("One: ", first, "\nBe brief.") + af.assistant("So ", second, "\nthen: ", af.gen("x"))
        s += af.user("Two: ", second, "\nBe kind.") + af.assistant(af.gen("y"))
        return await s["y"]

    async def judge(old: str, new: str) -> bool:
        return "kind" in new

    graph = two.trace().optimised()
    moved = await graph.optimised(reorder=True, judge=judge)
    changed = [after for before, after in zip(graph.ops, moved.ops, strict=True) if before != after]
    assert [op.parts[0] for op in changed if isinstance(op, ops.Text)] == ["Be kind.\nTwo: "]
    assert len(changed) == 1  # the answers of the assistant stay unchanged


async def test_a_program_is_a_judge() -> None:
    @af.program
    async def has_same_meaning(s: af.State, old: str, new: str) -> bool:
        s += af.user(f"Do these prompts mean the same?\n1. {old}\n2. {new}")
        s += af.assistant(af.select("same", ["yes", "no"]))
        return await s["same"] == "yes"

    graph = grade.trace()
    for said in ("yes", "no"):
        async with af.session(backend=af.Scripted({"same": said})) as flow:
            moved = await graph.optimised(reorder=True, judge=partial(flow.run, has_same_meaning))
        assert (moved == graph.optimised()) == (said == "no")


async def test_a_failure_of_the_judge_is_raised() -> None:
    async def judge(old: str, new: str) -> bool:
        raise KeyError(old)

    with pytest.raises(KeyError):
        await grade.trace().optimised(reorder=True, judge=judge)


async def says_no(old: str, new: str) -> Any:
    return "no"


@pytest.mark.parametrize(
    "judge", [says_no, lambda old, new: True, "yes"], ids=["a text", "not async", "no function"]
)
async def test_other_judges_than_async_functions_that_return_a_bool_are_rejected(judge: Any) -> None:
    with pytest.raises(af.errors.BadArgument) as caught:
        await grade.trace().optimised(reorder=True, judge=judge)
    assert caught.value.param == "judge"


@pytest.mark.parametrize(
    ("options", "missing"), [({"reorder": True}, "judge"), ({"judge": accept}, "reorder")]
)
def test_reorder_and_judge_are_given_together(options: Any, missing: str) -> None:
    with pytest.raises(af.errors.BadArgument, check=has_param(missing)):
        grade.trace().optimised(**options)
