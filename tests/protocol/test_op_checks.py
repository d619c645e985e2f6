"""Arguments that make no sense are refused in the line that has them, on every backend alike."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import anyio
import msgspec
import pytest
from support.faults import has_param
from support.wire_server import ThreadServer

import agentflow as af
from agentflow.backends.scripted_generator import ScriptedGenerator
from agentflow.protocol import ops
from agentflow.protocol.constraint import Constraint
from agentflow.protocol.events import Capabilities
from agentflow.protocol.op_table import op_spec
from agentflow.protocol.sampling import GenParams

pytestmark = pytest.mark.anyio
HALF = "\ud800"

BAD: dict[str, Callable[[af.Session, af.State], Any]] = {
    "a long salt": lambda flow, s: flow.state(cache_salt="x" * 257),
    "a salt that is a number": lambda flow, s: flow.state(cache_salt=5),  # type: ignore[arg-type]
    "a long program": lambda flow, s: flow.state(program="x" * 257),
    "a program that is none": lambda flow, s: flow.state(program=None),  # type: ignore[arg-type]
    "an objective": lambda flow, s: flow.state(objective="speed"),  # type: ignore[arg-type]
    "a path": lambda flow, s: s["x"].json(0),  # type: ignore[arg-type]
    "a role": lambda flow, s: s.add(af.conversation([af.Message("judge", "a")])),
    "a role that is a number": lambda flow, s: s.add(af.conversation([af.Message(1, "a")])),  # type: ignore[arg-type]
    "a content": lambda flow, s: s.add(af.conversation([af.Message("user", None)])),  # type: ignore[arg-type]
    "a call": lambda flow, s: s.add(af.conversation([af.Message("assistant", "", tool_calls=("x",))])),  # type: ignore[arg-type]
    "a call's arguments": lambda flow, s: s.add(
        af.conversation([af.Message("assistant", "", (af.ToolCall("f", {"x": object()}),))])
    ),
    "half a character": lambda flow, s: s.add(HALF),
    "half a character in a turn": lambda flow, s: s.add(af.conversation([af.Message("user", HALF)])),
    "half a character to stop at": lambda flow, s: s.add(af.gen("y", stop=HALF)),
    "a name with half a character": lambda flow, s: s.add(af.gen(HALF)),
}


def opened(server: ThreadServer | None) -> af.Session:
    return af.session(server.url) if server is not None else af.session(backend=af.Scripted(["a", "b"]))


@pytest.mark.parametrize("is_remote", [False, True])
async def test_bad_arguments_are_rejected_where_they_are_written(server, is_remote: bool) -> None:
    async with opened(server if is_remote else None) as flow, flow.state() as s:
        s += "say #1" + af.gen("x")
        for write in BAD.values():
            with pytest.raises(af.errors.BadArgument):
                write(flow, s)
        s += "say #1" + af.gen("z")  # the state has taken none of it
        await s["z"]
        assert [variable.name for variable in s.variables] == ["x", "z"]
    if is_remote:
        await server.wait_until_idle()


@pytest.mark.parametrize("is_remote", [False, True])
async def test_a_map_to_a_lone_surrogate_fails_only_its_variable(server, is_remote: bool) -> None:
    async with opened(server if is_remote else None) as flow, flow.state() as s:
        s += "say #1" + af.gen("x")
        with pytest.raises(af.errors.BadArgument):
            await s["x"].map(lambda text: HALF)
        s += af.gen("y")
        await s["y"]


def gen(state: int, var: int, **fields: Any) -> ops.Gen:
    return ops.Gen(state, var, "bad", GenParams(), **fields)


INVALID: list[tuple[str | None, str | None, Callable[[int, int], ops.Op]]] = [
    ("deadline_s", None, lambda state, _: ops.Limit(state, deadline_s=-1.0)),
    ("deadline_s", "nan", lambda state, _: ops.Limit(state, deadline_s=math.nan)),
    ("output_tokens", None, lambda state, _: ops.Limit(state, output_tokens=-1)),
    (None, "failure: its message", lambda state, _: ops.Cancel(state, ops.Failure("OSError", "é" * 501))),
    (
        None,
        "choices",
        lambda state, var: gen(state, var, constraint=Constraint("choices", choices=("a", "a"))),
    ),
]
"""Ops that the frontend does not send, with the params and some words of their errors."""


@pytest.mark.parametrize(("param", "shown", "make"), INVALID)
async def test_an_invalid_op_over_the_wire_fails_its_state(server, param, shown, make) -> None:
    async with af.session(server.url) as flow, flow.state() as s, flow.state() as other:
        s += "a" + af.gen("good")
        await s
        flow._link._connection.send([make(s.id, flow._link.next_id())])
        s += "b"
        with pytest.raises(af.errors.BadArgument, match=shown, check=has_param(param)):
            await s
        other += "a" + af.gen("good")
        await other
    await server.wait_until_idle()


class Limited(ScriptedGenerator):
    """A scripted backend that can do little."""

    def __init__(self, **can: bool) -> None:
        super().__init__(["a"] * 9)
        self.capabilities = msgspec.structs.replace(self.capabilities, **can)


class LimitedBackend(af.Scripted):
    def __init__(self, **can: bool) -> None:
        super().__init__([])
        self.generator = Limited(**can)


@af.program
async def with_a_turn(s: af.State) -> None:
    s += af.user("a")


@af.program
async def with_logprobs(s: af.State) -> None:
    s += "a" + af.gen("x", logprobs=True)


@af.program
async def with_a_decision(s: af.State) -> None:
    s += af.user("a")
    await s.decide({"good": bool})


@af.program
async def with_a_select(s: af.State) -> None:
    s += "a" + af.select("x", ["a", "b"])


@af.program
async def with_a_conversation(s: af.State) -> None:
    s += af.conversation([af.Message("user", "a")])


@af.program
async def with_token_ids(s: af.State) -> None:
    s += "a"
    s.token_ids()


UNSUPPORTED = [
    (with_a_turn, "roles"),
    (with_logprobs, "logprobs"),
    (with_a_select, "select"),
    (with_a_decision, "decisions"),
    (with_logprobs, "generates"),
    (with_a_select, "generates"),
    (with_a_decision, "generates"),
    (with_a_conversation, "conversations"),
    (with_token_ids, "token_ids"),
]


@pytest.mark.parametrize("is_graph", [False, True])
@pytest.mark.parametrize(("program", "ability"), UNSUPPORTED)
async def test_unsupported_ops_are_rejected_before_anything_runs(program, ability, is_graph) -> None:
    backend = LimitedBackend(**{ability: False})
    async with af.session(backend=backend) as flow:
        with pytest.raises(af.errors.NotSupported):
            await (flow.submit(program.trace()) if is_graph else flow.run(program))
        await anyio.wait_all_tasks_blocked()
        assert (await flow.stats()).steps == 0
    assert backend.generator.num_open == 0


def test_ops_without_requirements_are_supported_by_every_backend() -> None:
    """A plain op is supported by a backend without capabilities."""
    nothing = Capabilities("nothing", False, False, False, False, None, (), False, False, False)
    for op in (ops.Open(1), ops.Text(1, ("a",)), ops.Read(1, 2, "text()", "text"), ops.Close(1)):
        op_spec(op).require(op, nothing)


def test_values_that_are_zero_are_given() -> None:
    params = GenParams(temperature=0.0, top_k=0, min_tokens=0, max_reasoning_tokens=0, top_logprobs=2)
    assert set(params.given) == {"temperature", "top_k", "min_tokens", "max_reasoning_tokens"}
    assert GenParams().given == ()
    assert GenParams(stop=("a",), ignore_eos=True).given == ("stop", "ignore_eos")
