"""Graphs: the ops that a trace collects, the programs that it refuses, and the values of graphs."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.faults import has_param
from support.language.random_programs import Step, answer, steps, whole
from support.observed_backends import Observed
from support.programs import by_end

import agentflow as af
from agentflow.backends.scripted_generator import ScriptedGenerator
from agentflow.protocol import ops

pytestmark = pytest.mark.anyio


@af.program
async def judge(s: af.State, essay: str, dimensions: list[str]) -> dict[str, str]:
    s += af.system("You are a strict judge.")
    s += af.user(f"Essay:\n{essay}\nIs it about science?")
    s += af.assistant(af.select("related", ["yes", "no"]))
    async with s.fork(len(dimensions)) as branches:
        for branch, dimension in zip(branches, dimensions, strict=True):
            branch += af.user(f"Judge its {dimension}.")
            branch += af.assistant(af.gen("judgment"))
    s += af.user("Judgments:", *[branch["judgment"].strip() for branch in branches])
    s += af.assistant(af.gen("report"))
    return {"related": await s["related"], "report": await s["report"]}


def judged(prompt: str) -> str:
    return "yes" if "Judg" not in prompt and prompt.endswith("<assistant>") else f"saw {len(prompt)}"


@given(todo=steps, argument=st.text(max_size=5))
def test_a_graph_gives_what_the_program_gives(todo: list[Step], argument: str):
    async def both() -> None:
        generator = af.Scripted(answer)
        async with af.session(backend=generator, seed=1) as flow:
            wanted = await flow.run(whole, argument, todo)
            graph = whole.trace(todo=todo)
            assert await flow.submit(graph, {"argument": argument}) == wanted
            folded = graph.optimised()
            assert len(folded.ops) <= len(graph.ops)
            assert await flow.submit(folded, {"argument": argument}) == wanted
        assert generator.generator.num_open == 0

    anyio.run(both)


@given(todo=steps)
def test_the_edges_are_those_of_streams_forks_and_references(todo: list[Step]):
    graph = whole.trace(todo=todo)
    edges = graph.edges()
    assert all(edge.source < edge.target for edge in edges)
    for target, op in enumerate(graph.ops):
        into = {
            kind: [e.source for e in edges if e[1:] == (target, kind)] for kind in ("stream", "fork", "data")
        }
        before = [i for i in range(target) if getattr(graph.ops[i], "state", None) == op.state]
        forks = [i for i, o in enumerate(graph.ops) if isinstance(o, ops.Fork) and op.state in o.children]
        assert into["stream"] == before[-1:]
        assert into["fork"] == ([] if before else forks)
        needed = [part.var for part in getattr(op, "parts", ()) if isinstance(part, ops.Ref)]
        assert [graph.ops[source].var for source in into["data"]] == needed


class TestSeeds:
    async def test_a_graph_has_the_seeds_of_the_program(self):
        seeds: list[int | None] = []

        class Noting(ScriptedGenerator):
            async def generate(self, context, params, on_text, constraint=None):
                seeds.append(params.seed)
                return await super().generate(context, params, on_text, constraint)

        backend = af.Scripted(judged)
        backend.generator = Noting(judged)
        for seed in (7, 8):
            async with af.session(backend=backend, seed=seed) as flow:
                await flow.run(judge, "Stars", ["a", "b"])
            async with af.session(backend=backend, seed=seed) as flow:
                await flow.submit(judge.trace(dimensions=["a", "b"]), {"essay": "Stars"})
        assert all(seed is not None for seed in seeds)
        assert sorted(seeds[:3]) == sorted(seeds[3:6]) != sorted(seeds[6:9]) == sorted(seeds[9:])


async def test_a_graph_is_one_op_and_returns_only_its_outputs():
    graph = judge.trace(dimensions=["a", "b"])
    backend = Observed(af.Scripted(judged))
    async with af.session(backend=backend) as flow:
        result = await flow.submit(graph, {"essay": "Stars"})
        assert result["related"] == "yes"
        assert result["report"].startswith("saw ")
        assert [type(event).__name__ for event in backend.events] == ["Value", "Value", "Reached"]
        assert [type(op).__name__ for op in backend.ops] == ["SubmitGraph", "Close"]
        assert not flow._link.states
        assert not flow._link.variables


async def test_f37_the_gathered_values_of_branches_are_traced():
    """``gather`` gives the values of a fork, in lists, dicts and later prompts, as in a run."""

    @af.program
    async def paragraphs(s: af.State, topic: str) -> dict[str, list[object]]:
        s += af.user(f"On {topic}.")
        words = af.gen("words", type=int)
        async with s.fork(2) as branches:
            for branch, part in zip(branches, ["light", "water"], strict=True):
                branch += (
                    af.user(part) + af.assistant(af.gen("text")) + af.user("Words?") + af.assistant(words)
                )
        await branches
        texts = await branches.gather("text")
        s += af.user("Sum up: ", *texts) + af.assistant(af.gen("sum"))
        return {"texts": [*texts, await s["sum"]], "words": [*await branches.gather(words)]}

    async with af.session(backend=af.Scripted(lambda call: str(len(call))), seed=1) as flow:
        wanted = await flow.run(paragraphs, "leaves")
        graph = paragraphs.trace()
        assert await flow.submit(graph, {"topic": "leaves"}) == wanted
        assert await flow.map(graph, ["leaves"]) == [wanted]


async def test_f37_sums_with_references_are_traced():
    @af.program
    async def sums(s: af.State) -> list[object]:
        s += "q" + af.gen("x") + af.gen("n", type=int)
        return ["a" + s["x"], {"k": s["x"].upper() + f"{s['n']}" + s["n"]}, f"{'b' + s['x']}"]

    async with af.session(backend=af.Scripted({"x": "y", "n": "-7"}), seed=1) as flow:
        wanted = await flow.run(sums)
        assert wanted == ["ay", {"k": "Y-7-7"}, "by"]
        assert await flow.submit(sums.trace()) == wanted


async def test_the_values_of_typed_gens_are_typed():
    @dataclass
    class City:
        name: str

    @af.program
    async def find(s: af.State, text: str) -> tuple[City, int]:
        city = af.gen("city", schema=City)
        s += text + city
        s += af.gen("age", type=int)
        return await s[city], await s["age"]

    async with af.session(backend=af.Scripted(['{"name": "Bern"}', "42"])) as flow:
        assert await flow.submit(find.trace(), {"text": "…"}) == (City("Bern"), 42)


@pytest.mark.parametrize("number", ["17", "-5", "-0"])
async def test_f37_an_awaited_value_has_the_same_form_in_the_prompts_of_a_run_and_a_trace(number: str):
    @af.program
    async def count(s: af.State, question: str) -> str:
        s += question + af.gen("n", type=int)
        n = await s["n"]
        s += f"<{n}>" + af.gen("x")
        match x := await s["x"]:
            case str() if isinstance(question, str) and isinstance("a" + x, str):
                s += f"{x} is text" + af.gen("is_new", type=bool)
        return f"{n} {await s['is_new']}"

    prompts, results = [], []
    for is_traced in (False, True):
        backend = af.Scripted([number, "yes", "true"])
        async with af.session(backend=backend) as flow:
            run = flow.submit(count.trace(), "How many?") if is_traced else flow.run(count, "How many?")
            results.append(await run)
        prompts.append(backend.prompts)
    assert prompts[0] == prompts[1]
    assert results == [f"{int(number)} True"] * 2


async def _f37_formatted(s: af.State) -> object:
    return s.add(f"{await s['n']}")


async def _f37_set(s: af.State) -> object:
    return s.set("y", f"It is {await s['n']}.")


async def _f37_appended(s: af.State) -> object:
    return s.add(await s["n"])


async def _f37_summed(s: af.State) -> object:
    return s.add("It is " + await s["n"])


async def _f37_asked_for_its_type(s: af.State) -> object:
    return isinstance(await s["n"], dict)


async def _f37_asked_for_a_method(s: af.State) -> object:
    return (await s["n"]).items()


F37_USES = [use for name, use in list(globals().items()) if name.startswith("_f37_")]


@pytest.mark.parametrize("use", F37_USES)
@pytest.mark.parametrize("options", [{"type": bool}, {"type": float}, {"schema": {"type": "object"}}])
async def test_f37_values_that_are_no_texts_are_refused_in_traced_prompts(use, options):
    @af.program
    async def uses(s: af.State) -> None:
        s += "q" + af.gen("n", **options)
        await use(s)

    line = use.__code__.co_firstlineno + 1
    with pytest.raises(af.errors.DataDependent, match=rf"test_trace\.py:{line}, in {use.__name__}: .*'n'"):
        uses.trace()


class TestFailures:
    async def test_a_failure_is_raised_with_its_cause_and_leaves_nothing_open(self):
        for _ in range(
            20
        ):  # trio's tasks take turns in any order: some ops are skipped after the graph's end
            backend = af.Scripted(
                by_end({"clarity.</user><assistant>": ValueError("broken"), "<assistant>": "yes"})
            )
            async with af.session(backend=backend) as flow:
                with pytest.raises(af.errors.RunFailed, match="branch 0") as failure:
                    await flow.submit(judge.trace(dimensions=["clarity", "b"]), {"essay": "x"})
                assert "broken" in str(failure.value.__cause__ or failure.value)
            assert backend.generator.num_open == backend.generator.num_running == 0

    async def test_a_plain_branch_that_fails_fails_the_graph_too(self):
        @af.program
        async def lost(s: af.State) -> str:
            branch = s.copy()
            branch += "bad" + af.gen("x")
            s += "good" + af.gen("y")
            return await s["y"]

        backend = af.Scripted({"x": ValueError("broken"), "y": "fine"})
        async with af.session(backend=backend) as flow:
            with pytest.raises(af.errors.EngineFailed, match="broken"):
                await flow.submit(lost.trace())

    async def test_cancelling_the_submission_cancels_the_graph(self):
        backend = af.Scripted(lambda prompt: "word " * 10_000)
        async with af.session(backend=backend) as flow:
            graph = whole.trace(todo=[Step("gen"), Step("gen", number=1)])
            with anyio.move_on_after(0.05):
                await flow.submit(graph, {"argument": ""})
            await flow.stats()
            assert backend.generator.num_running == 0

    @pytest.mark.parametrize(
        ("inputs", "param"),
        [
            ({}, "essay"),
            ({"essay": "x", "tone": "y"}, "tone"),
            ({"essay": 3}, "essay"),
        ],
    )
    async def test_the_arguments_are_checked(self, inputs, param):
        async with af.session(backend=af.Scripted([])) as flow:
            with pytest.raises(af.errors.BadArgument, check=has_param(param)):
                await flow.submit(judge.trace(dimensions=["a"]), inputs)

    async def test_only_graphs_are_submitted(self):
        async with af.session(backend=af.Scripted([])) as flow:
            with pytest.raises(af.errors.BadArgument, check=has_param("graph")):
                await flow.submit(judge)


async def _is_no(value) -> object:
    return "x" if value == "no" else "y"


async def _is_true(value) -> object:
    return 1 if value else 2


async def _number(value) -> object:
    return int(value)


async def _split(value) -> object:
    return value.split(",")


async def _loop(value) -> object:
    return list(value)


async def _length(value) -> object:
    return len(value)


async def _string(value) -> object:
    return str(value)


async def _f37_is_in_a_set(value) -> object:
    return value in {"no"}


async def _f37_key(value) -> object:
    return {"no": 1}.get(value)


async def _f37_counted(value) -> object:
    return Counter([value])


async def _f37_is_equal_to_a_value(value) -> object:
    return value == value.strip()


async def _f37_differs_from_itself(value) -> object:
    return value != value


async def _f37_sum_is_no(value) -> object:
    return "n" + value == "no"


async def _f37_longer_sum_is_true(value) -> object:
    return 1 if ("a" + value) + "b" else 2


async def _f37_sum_from_the_left_is_in_a_set(value) -> object:
    return "a" + (value + "b") in {"no"}


async def _f37_split_sum(value) -> object:
    return ("a," + value).split(",")


F37_LOOKS = [
    look for name, look in list(globals().items()) if name.startswith("_f37_") and look not in F37_USES
]


@pytest.mark.parametrize("look", [_is_no, _is_true, _number, _split, _loop, _length, _string])
@pytest.mark.parametrize("of", ["a value", "an argument"])
async def test_inspecting_a_value_is_rejected_with_the_line(look, of):
    @af.program
    async def looks(s: af.State, question: str) -> object:
        s += question + af.gen("x")
        return await look(await s["x"] if of == "a value" else question)

    line = look.__code__.co_firstlineno + 1
    with pytest.raises(af.errors.DataDependent, match=rf"test_trace\.py:{line}, in {look.__name__}"):
        looks.trace()


@pytest.mark.parametrize("look", F37_LOOKS)
@pytest.mark.parametrize("of", ["a value", "an argument"])
async def test_f37_hashing_and_comparing_a_value_is_rejected_with_the_line(look, of):
    await test_inspecting_a_value_is_rejected_with_the_line(look, of)


async def _map(s: af.State) -> object:
    return await s["x"].map(str.upper)


async def _mapped_and_wired(s: af.State) -> object:
    return s.add(s["x"].strip()).add(s.set("y", s["x"]).map(str.upper))


async def _iterate(s: af.State) -> object:
    return await anext(aiter(s["x"]))


async def _partials(s: af.State) -> object:
    return await anext(s["x"].partials())


async def _elements(s: af.State) -> object:
    return await anext(s.add(af.gen("y", schema=list[int]))["y"].elements())


async def _events(s: af.State) -> object:
    return await anext(aiter(s))


async def _messages(s: af.State) -> object:
    return await s.add(af.user(s["x"])).messages()


async def _usage(s: af.State) -> object:
    return s["x"].usage


async def _cancel(s: af.State) -> object:
    return s.cancel()


USES = [_map, _mapped_and_wired, _iterate, _partials, _elements, _events, _messages, _usage, _cancel]


@pytest.mark.parametrize("use", USES)
async def test_operations_that_need_a_value_are_rejected_with_the_line(use):
    @af.program
    async def uses(s: af.State) -> object:
        s += "q" + af.gen("x")
        return await use(s)

    line = use.__code__.co_firstlineno + 1
    with pytest.raises(af.errors.DataDependent, match=rf"test_trace\.py:{line}, in {use.__name__}"):
        uses.trace()


async def test_the_line_is_named_from_within_a_fork_too():
    @af.program
    async def uses(s: af.State) -> None:
        s += "q"
        async with s.fork(2) as branches:
            for branch in branches:
                branch += af.gen("x")
                branch += branch["x"].map(str.upper)

    line = uses.function.__code__.co_firstlineno + 6
    with pytest.raises(af.errors.DataDependent, match=rf"test_trace\.py:{line}, in uses: variable 'x'"):
        uses.trace()


async def test_waiting_for_something_else_is_refused():
    @af.program
    async def waits(s: af.State) -> None:
        await anyio.lowlevel.checkpoint()

    with pytest.raises(af.errors.DataDependent, match="waits for something that is not the model"):
        waits.trace()


def test_arguments_that_are_not_text_must_be_given():
    with pytest.raises(af.errors.BadArgument, check=has_param("dimensions")):
        judge.trace()


def test_optimising_folds_constants():
    @af.program
    async def groups(s: af.State, name: str) -> str:
        s += af.system("Be brief.")
        s += af.user("Greet ", name, " warmly.")
        tone = s.set("tone", "Kindly.")
        async with s.user():
            s += tone.upper()
            s += "!"
        async with s.fork(2) as branches:
            for branch in branches:
                branch += af.gen("x")
        return await s["tone"]

    graph = groups.trace()
    folded = [op.parts for op in graph.optimised().ops if isinstance(op, ops.Text)]
    assert ("KINDLY.!",) in folded


def test_the_drawing_has_every_state_and_edge():
    drawing = judge.trace(dimensions=["a", "b"]).draw()
    assert drawing.startswith("flowchart TD")
    assert drawing.count("subgraph") == 3
    assert drawing.count("-.->") == 3  # the essay, two judgments
    assert drawing.count("==>") == 2
    assert '(["gen report"])' in drawing
    assert "You are a strict judge." in drawing
