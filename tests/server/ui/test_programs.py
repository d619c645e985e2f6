"""The playground writes a program as a graph and as Python. Both send the same prompts, with the same seeds.

``programs/`` has the page's output for its examples; the page's own tests check that it still does.
"""

import json
import runpy
from pathlib import Path

import msgspec
import pytest

import agentflow as af
from agentflow.language.graphs.graph import Graph, GraphOutput
from agentflow.protocol import ops

pytestmark = pytest.mark.anyio

PROGRAMS = sorted((Path(__file__).parent / "programs").glob("*.py"))
PERSON = {"name": "Ada", "born": 1815, "field": "mathematics", "prizes": [{"name": "none", "year": 1}]}


class Submitted(msgspec.Struct):
    """The page's submission."""

    ops: tuple[ops.Op, ...]
    places: dict[int, str]


def answer(call) -> str:
    """Depends on the prompt, so that a join that mixed up the branches would show in a later prompt."""
    if call.kind == "select":
        return call.choices[len(call) % len(call.choices)]
    if call.constraint is not None:
        return json.dumps(PERSON)
    return f" {call.name} of {len(call)} characters "


def sent(backend: af.Scripted) -> list[tuple]:
    """The ops that the backend received, without the order of branches and the spaces in schemas."""

    def schema_of(call) -> object:
        return None if call.constraint is None else json.loads(call.constraint.source)

    found = [(call.name, str(call), call.params, schema_of(call), call.choices) for call in backend.calls]
    return sorted(found, key=repr)


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: path.stem)
async def test_a_program_in_python_and_its_graph_send_the_same_prompts_and_seeds(path):
    written = runpy.run_path(str(path))["program"]
    in_python = af.Scripted(answer)
    async with af.session(backend=in_python, seed=1) as flow:
        result = await flow.run(written)
    submitted = msgspec.json.decode(path.with_suffix(".json").read_bytes(), type=Submitted)
    calls = [op.var for op in submitted.ops if isinstance(op, ops.Gen | ops.Select)]
    as_graph = af.Scripted(answer)
    async with af.session(backend=as_graph, seed=1) as flow:
        outputs = [GraphOutput(variable) for variable in calls]
        graph = Graph(path.stem, submitted.ops, {}, outputs, places=submitted.places)
        values = await flow.submit(graph)
    assert sent(in_python) == sent(as_graph)
    assert len(in_python.calls) == len(values) == len(calls) > 1
    printed = {str(json.loads(value)) if value.startswith("{") else value for value in values}
    assert {result} <= printed or set(result.split("\n")) <= printed
