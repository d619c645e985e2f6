"""Limits of tokens: of a state with its forks, of several states together, of a session."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.faults import has_param
from support.observed_backends import Observed, Stepped, assert_idle
from support.programs import by_end, words

import agentflow as af

pytestmark = [pytest.mark.anyio, pytest.mark.on_trio]


async def test_a_gen_that_exceeds_the_budget_is_truncated_and_has_no_value():
    backend = af.Scripted([words(10)])
    observed = Observed(backend)
    async with af.session(backend=observed) as flow, flow.state() as s:
        s.limit(output_tokens=4)
        s += af.gen("x", max_tokens=100)
        with pytest.raises(af.BudgetExceeded, check=has_param("output_tokens")):
            await s["x"]
        assert s["x"].text == words(4)
    assert_idle(backend)


async def test_only_generated_tokens_count_against_a_budget():
    backend = af.Scripted(["yes", words(2)])
    async with af.session(backend=backend) as flow, flow.state() as s:
        s.limit(output_tokens=2)
        s += "a lot of text that is not generated" + af.select("c", ["yes", "no"])
        s.set("q", "more of it than two words")
        s += af.gen("x")
        assert await s["x"] == words(2)
        await s


async def test_forks_share_the_budget_of_their_parent():
    backend = af.Scripted(lambda prompt: words(3))
    async with af.session(backend=backend) as flow, flow.state() as s:
        before = s.copy()
        s.limit(output_tokens=7)
        after = s.copy()
        leaf = after.copy()
        for state in (before, leaf):
            state += af.gen("x")
            assert await state["x"] == words(3)
        after += af.gen("x")
        s += af.gen("x")
        for state in (after, s):  # one is truncated, and the budget of the other is empty
            await state.settled()
        assert sorted([state._node.error is None for state in (after, s)]) == [False, False]
    assert_idle(backend)


@pytest.mark.parametrize(("budget", "num_ended"), [(4, 0), (5, 1), (6, 2)])
async def test_concurrent_gens_share_a_budget(budget: int, num_ended: int):
    """With 4 tokens, both have two when the third of either exceeds the budget."""
    backend = Stepped(lambda prompt: words(3))
    async with af.session(backend=backend) as flow, flow.state() as s:
        s.limit(output_tokens=budget)
        branches = s.fork(2)
        for branch in branches:
            branch += af.gen("x", max_tokens=3)
        await backend.allow(6)
        ends = []
        for branch in branches:
            try:
                ends.append(await branch["x"])
            except af.BudgetExceeded as error:
                ends.append(error.usage.output_tokens)
        assert sorted(ends, key=str) == [3] * (2 - num_ended) + [words(3)] * num_ended
    assert_idle(backend)


async def test_the_tightest_of_several_limits_holds():
    backend = af.Scripted(lambda prompt: words(3))
    async with af.session(backend=backend) as flow, flow.state() as s:
        s.limit(output_tokens=100)
        s.limit(deadline_s=3600)
        branch = s.copy()
        branch.limit(output_tokens=5)
        branch += af.gen("x")
        assert await branch["x"] == words(3)
        branch += af.gen("y")
        with pytest.raises(af.BudgetExceeded, check=has_param("output_tokens")):
            await branch["y"]
        s += af.gen("x")
        assert await s["x"] == words(3)


async def test_a_limit_applies_to_running_gens():
    backend = Stepped([words(3)])
    async with af.session(backend=backend) as flow, flow.state() as s:
        s += af.gen("x")
        await backend.allow(1)
        s.limit(output_tokens=2)
        await backend.allow(2)
        with pytest.raises(af.BudgetExceeded, check=has_param("output_tokens")):
            await s["x"]
    assert_idle(backend)


@given(
    budgets=st.lists(st.integers(1, 30), min_size=1, max_size=3),
    sizes=st.lists(st.integers(1, 12), min_size=1, max_size=8),
)
async def test_f37_concurrent_gens_exceed_the_budget_by_a_token_each(budgets, sizes):
    """``sizes``: of each gen, the words of its answer."""
    backend = af.Scripted(by_end({f"{count} words:": words(count) for count in sizes}))
    async with af.session(backend=backend) as flow, flow.state() as s:
        for budget in budgets:
            s.limit(output_tokens=budget)
        branches = s.fork(len(sizes))
        for branch, count in zip(branches, sizes, strict=True):
            branch += f"{count} words:" + af.gen("x", max_tokens=40)
        for branch in branches:
            await branch.settled()
        ended = [branch["x"].text for branch in branches if branch._node.error is None]
        assert sum(len(text.split()) for text in ended) <= min(budgets)
        if sum(sizes) <= min(budgets):
            assert len(ended) == len(sizes)
        written = [len(branch["x"].text.split()) for branch in branches]
        assert sum(written) <= min(budgets) + len(sizes)
        assert max(written, default=0) <= max(sizes)
    assert_idle(backend)


# The session


async def test_a_limit_of_the_session_applies_to_existing_and_later_states():
    backend = af.Scripted(lambda prompt: words(3))
    async with af.session(backend=backend) as flow, flow.state() as first:
        orphan = first.copy()
        inner = orphan.copy()
        await inner
        # A client may close a state whose forks go on.
        orphan._node.close()
        flow.limit(output_tokens=6)
        inner += af.gen("x")
        assert await inner["x"] == words(3)
        async with flow.state() as second:
            second += af.gen("x")
            assert await second["x"] == words(3)
            second += af.gen("y")
            with pytest.raises(af.BudgetExceeded):
                await second["y"]
        first += af.gen("x")
        with pytest.raises(af.BudgetExceeded):
            await first["x"]


@given(
    budgets=st.lists(st.integers(0, 12), min_size=1, max_size=3),
    sizes=st.lists(st.tuples(st.integers(1, 6), st.integers(1, 6)), min_size=1, max_size=6),
)
async def test_sequential_gens_spend_exactly_the_budget(budgets, sizes):
    """``sizes``: of each gen, the words of its answer and its ``max_tokens``."""
    backend = af.Scripted([words(count) for count, _ in sizes])
    async with af.session(backend=backend) as flow, flow.state() as s:
        for budget in budgets:
            s.limit(output_tokens=budget)
        left = min(budgets)
        for index, (count, most) in enumerate(sizes):
            wanted = min(count, most)
            s += af.gen(f"x{index}", max_tokens=most)
            if wanted > left or left == 0:
                with pytest.raises(af.BudgetExceeded):
                    await s[f"x{index}"]
                break
            assert await s[f"x{index}"] == words(wanted)
            left -= wanted
    assert_idle(backend)
