"""Limits of time: which requests they end, that nothing hangs or leaks, and values that are no limit."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.faults import has_param
from support.observed_backends import Observed, Stepped, Unbatched, assert_idle, settle
from support.session_peer import HANG

import agentflow as af
from agentflow.protocol import ops
from agentflow.runtime.interpreter.op_execution import TokenCharge
from agentflow.runtime.limits import Budget

pytestmark = pytest.mark.anyio

SOON_S = 0.001


@asynccontextmanager
async def opened(
    backend: af.Scripted | Stepped | None = None, *, unbatched: bool = False
) -> AsyncIterator[af.OpenSession]:
    """A session on a backend, which answers "yes" by default and may hold nothing afterwards."""
    backend = backend or af.Scripted(lambda prompt: "yes")
    async with af.session(backend=Unbatched(backend) if unbatched else backend) as flow:
        yield flow
    assert_idle(backend)


@pytest.mark.parametrize("unbatched", [False, True])
async def test_a_state_runs_nothing_after_its_deadline(unbatched):
    async with opened(unbatched=unbatched) as flow, flow.state() as s:
        s += "a" + af.gen("x")
        assert await s["x"] == "yes"
        s.limit(deadline_s=0)
        s += "b" + af.gen("y")
        s.set("q", "c")
        branch = s.copy()
        branch += af.gen("z")
        with pytest.raises(af.DeadlineExceeded):
            await s
        for late in (s["y"], s["q"], branch["z"], branch):
            with pytest.raises(af.DeadlineExceeded) as failure:
                await late
            assert isinstance(failure.value.__cause__, af.DeadlineExceeded)
        assert await s["x"] == "yes"


@pytest.mark.parametrize("op", ["gen", "select", "text", "fork", "set", "read", "turn", "hint"])
async def test_each_op_fails_after_the_deadline(op):
    async with opened() as flow, flow.state() as s:
        s.limit(deadline_s=0)
        match op:
            case "gen":
                s += af.gen("x")
            case "select":
                s += af.select("x", ["yes", "no"])
            case "text":
                s += "text"
            case "fork":
                s.copy()
            case "set":
                s.set("x", "y")
            case "read":
                s.text()
            case "turn":
                s += af.user()
            case "hint":
                s.hint(forks=2)
        with pytest.raises(af.DeadlineExceeded):
            await s


@pytest.mark.parametrize("limits_first", [False, True])
async def test_a_deadline_ends_running_gens(limits_first):
    backend = Stepped(["one two three"])
    async with opened(backend) as flow, flow.state() as s, flow.state() as free:
        if limits_first:
            s.limit(deadline_s=SOON_S)
        s += af.gen("x")
        free += s["x"]
        if not limits_first:
            await backend.allow(1)
            assert s["x"].text == "one"
            s.limit(deadline_s=SOON_S)
        with pytest.raises(af.DeadlineExceeded):
            await s["x"]
        with pytest.raises(af.errors.RunFailed, match="'x'") as failure:
            await free
        assert isinstance(failure.value.__cause__, af.DeadlineExceeded)
        await settle()
        assert backend.generator.num_running == 0


async def test_a_state_that_waits_for_another_has_its_own_deadline():
    backend = Stepped(["one two"])
    async with opened(backend) as flow, flow.state() as s, flow.state() as other:
        s += af.gen("x")
        other.limit(deadline_s=SOON_S)
        other += s["x"] + af.gen("y")
        with pytest.raises(af.DeadlineExceeded):
            await other
        await backend.allow(2)
        assert await s["x"] == "one two"


async def test_a_task_group_fails_with_a_branch_past_its_deadline():
    async with opened(Stepped(["one two three"] * 3)) as flow, flow.state() as s:
        async with s.fork(3) as branches:
            for branch in branches:
                branch += af.gen("x")
            branches[1].limit(deadline_s=SOON_S)
        with pytest.raises(af.DeadlineExceeded):
            await branches[1]["x"]
        for sibling in (branches[0], branches[2]):
            with pytest.raises(af.Cancelled):
                await sibling["x"]
        s += "more"
        with pytest.raises(af.errors.RunFailed, match="branch 1") as failure:
            await s
        assert isinstance(failure.value.__cause__, af.DeadlineExceeded)


async def test_a_deadline_of_the_session_applies_to_existing_and_later_states():
    backend = Stepped(["one two"])
    async with opened(backend) as flow, flow.state() as s:
        s += af.gen("x")
        await backend.allow(1)
        flow.limit(deadline_s=SOON_S)
        with pytest.raises(af.DeadlineExceeded):
            await s["x"]
        async with flow.state() as late:
            late += "text"
            with pytest.raises(af.DeadlineExceeded):
                await late
    with pytest.raises(af.errors.StateClosed):
        flow.limit(deadline_s=1)


async def test_only_what_exceeds_a_limit_itself_has_its_error():
    backend = af.Scripted(lambda prompt: "one two")
    async with opened(backend) as flow, flow.state() as s, flow.state() as other:
        s.limit(output_tokens=1)
        s += "a" + af.gen("x") + af.gen("y")
        branches = s.fork(2)
        other += s["y"] + af.gen("z")
        other_end = (other, other["z"])
        for variable in (s["x"], s["y"], branches[0]):
            with pytest.raises(af.BudgetExceeded):
                await variable
        for dependent in other_end:
            with pytest.raises(
                af.errors.RunFailed, check=lambda error: isinstance(error.__cause__, af.BudgetExceeded)
            ):
                await dependent
    async with opened(backend) as flow, flow.state() as s:
        s.limit(deadline_s=0)
        s += "a" + af.gen("x") + af.gen("y")
        for variable in (s["x"], s["y"]):
            with pytest.raises(af.DeadlineExceeded):
                await variable


# Over the wire, and values that are no limit


async def test_limits_over_the_wire(server):
    async with af.session(server.url) as flow, flow.state() as s, flow.state() as slow:
        s.limit(output_tokens=2)
        s += "w#5" + af.gen("x")
        with pytest.raises(af.BudgetExceeded, check=has_param("output_tokens")):
            await s["x"]
        slow += f"a {HANG}" + af.gen("x")
        slow.limit(deadline_s=SOON_S)
        with pytest.raises(af.DeadlineExceeded):
            await slow["x"]
    await server.wait_until_idle()


NO_LIMITS = [
    ({}, None),
    *[({"deadline_s": bad}, "deadline_s") for bad in (-1, float("nan"), "1", True)],
    *[({"output_tokens": bad}, "output_tokens") for bad in (-1, 1.5, "1", True)],
]


@pytest.mark.parametrize(("limit", "param"), NO_LIMITS)
async def test_invalid_limits_are_rejected(limit, param):
    observed = Observed(af.Scripted([]))
    async with af.session(backend=observed) as flow, flow.state() as s:
        for limited in (s, flow):
            with pytest.raises(af.errors.BadArgument, check=has_param(param)):
                limited.limit(**limit)
        assert observed.of(ops.Limit) == []


# Tokens, against a list of all limits and of the tokens that each counts.


@given(st.data())
async def test_f37_limits_count_the_tokens_of_generations_that_run(data):
    """A limit counts all tokens of generations that have not ended when it is set, and of later ones."""
    budgets: list[Budget] = []
    limits: list[tuple[int, int, int]] = []  # the budget, the tokens, and the tokens of ended generations
    ended = 0
    running: dict[int, tuple[TokenCharge, list[int]]] = {}
    for number in range(data.draw(st.integers(1, 25))):
        match data.draw(st.sampled_from(["limit", "tighten", "begin", "count", "end", "cancel"])):
            case "limit":
                most = data.draw(st.integers(0, 40))
                limits.append((len(budgets), most, ended))
                budgets.append(Budget(output_tokens=most))
            case "tighten" if budgets:
                index, most = data.draw(st.integers(0, len(budgets) - 1)), data.draw(st.integers(0, 40))
                limits.append((index, most, ended))
                budgets[index].tighten(Budget(output_tokens=most))
            case "begin":
                charge = TokenCharge(SimpleNamespace(budgets=budgets, abort=lambda: None))
                running[number] = charge, [0]
            case "count" if running:
                charge, tokens = data.draw(st.sampled_from(list(running.values())))
                tokens[0] += (new := data.draw(st.integers(-tokens[0], 12)))
                charge.count(new)
            case ("end" | "cancel") as how if running:
                charge, tokens = running.pop(data.draw(st.sampled_from(list(running))))
                if how == "end":
                    tokens[0] = max(0, tokens[0] + data.draw(st.integers(-3, 5)))
                    with suppress(af.BudgetExceeded):
                        charge.end(af.Usage(output_tokens=tokens[0]), was_truncated=False)
                assert charge.close() == tokens[0]
                ended += tokens[0]
        for charge, _ in running.values():
            charge.count(0)  # charges new budgets
        total = ended + sum(tokens[0] for _, tokens in running.values())
        for index, budget in enumerate(budgets):
            lefts = [most - (total - before) for at, most, before in limits if at == index]
            assert budget.tokens_left == min(lefts)
