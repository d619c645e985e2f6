"""The first, the best and the most frequent value of a fork: winners, cancelled branches, errors."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.faults import has_param
from support.observed_backends import Stepped, assert_idle, outcome_of, settle, unconstrained
from support.programs import by_end, echo

import agentflow as af
from agentflow.language.states.contest import Poll

pytestmark = [pytest.mark.anyio, pytest.mark.on_trio]

SCRIPT = by_end({"short": "one", "medium": "one two", "long": "one two three", "never": "word " * 500})


def begin(branches: Sequence[af.State], prompts: Sequence[str], name: str = "x") -> None:
    """Each branch generates the answer to its prompt."""
    for branch, prompt in zip(branches, prompts, strict=True):
        branch += prompt + af.gen(name, max_tokens=1000)


@pytest.mark.parametrize("is_group", [True, False])
async def test_the_first_complete_branch_wins_and_the_others_are_cancelled(is_group):
    backend = Stepped(SCRIPT)

    async def program(s: af.State) -> str:
        if is_group:
            async with s.fork(3) as branches:
                begin(branches, ["never", "medium", "never"])
        else:
            branches = s.fork(3)
            begin(branches, ["never", "medium", "never"])
        winner = await branches.first("x")
        assert winner is branches[1]
        for loser in (branches[0], branches[2]):
            with pytest.raises(af.Cancelled):
                await loser["x"]
        s += winner["x"]
        await s
        return await winner["x"]

    assert await outcome_of(program, backend, num_words=6) == "one two"


async def test_the_winner_goes_on_inside_of_the_block():
    async with af.session(backend=af.Scripted(SCRIPT)) as flow, flow.state() as s:
        async with s.fork(2) as branches:
            begin(branches, ["never", "short"])
            winner = await branches.first("x")
            winner += " medium" + af.gen("y")
            assert await winner["y"] == "one two"
        await s


async def test_of_values_that_are_there_already_the_one_that_ended_first_wins():
    async def program(s: af.State) -> int:
        branches = s.fork(3)
        begin(branches, ["long", "short", "medium"])
        await branches
        return branches.index(await branches.first("x"))

    assert await outcome_of(program, Stepped(SCRIPT), num_words=6) == 1


async def test_a_branch_that_fails_cannot_win_and_does_not_fail_the_run():
    script = {"bad": af.errors.EngineFailed("no"), "medium": "one two", "invalid": "none"}
    backend = unconstrained(by_end(script))

    async def program(s: af.State) -> str:
        branches = s.fork(3)
        begin(branches[:2], ["bad", "medium"])
        branches[2] += "invalid" + af.gen("x", type=int)
        return await (await branches.first("x"))["x"]

    async with af.session(backend=backend) as flow:
        assert await flow.run(program) == "one two"


@pytest.mark.parametrize("choose", ["first", "best", "vote"])
async def test_if_no_branch_has_a_value_the_first_failure_is_raised(choose):
    async with af.session(backend=af.Scripted(echo)) as flow, flow.state() as s:
        branches = s.fork(3)
        begin(branches, ["a!", "b!", "never"])
        branches[2].cancel()
        with pytest.raises(af.errors.EngineFailed):
            await getattr(branches, choose)("x")


async def test_in_a_task_group_the_failure_of_a_branch_is_raised():
    script = {"bad": af.errors.EngineFailed("no"), "never": "word " * 500}

    async def program(s: af.State, choose: str) -> object:
        async with s.fork(3) as branches:
            begin(branches, ["never", "bad", "never"])
        return await getattr(branches, choose)("x")

    async with af.session(backend=af.Scripted(by_end(script))) as flow:
        for choose in ("first", "best", "vote"):
            with pytest.raises(af.errors.EngineFailed, match="no"):
                await flow.run(program, choose)


async def test_the_greatest_value_wins():
    backend = af.Scripted(by_end({"a": "7", "b": "9", "c": "9", "d": "x", "e": "-12"}))
    async with af.session(backend=backend) as flow, flow.state() as s:
        branches = s.fork(5)
        for branch, prompt in zip(branches, "abcde", strict=True):
            branch += prompt + af.gen("score", **({} if prompt == "d" else {"type": int}))
            branch += af.gen("more") if prompt == "a" else ""
        numbers = af.Branches(s, [branches[i] for i in (0, 1, 2, 4)])
        assert await numbers.best("score", key=abs) is branches[4]
        with pytest.raises(af.errors.StateClosed, match="cancelled"):
            branches[0] += "more"
        copies = s.fork(3)
        begin(copies, ["a", "b", "c"])
        assert await copies.best("x") is copies[1]


async def test_a_vote_cancels_the_branches_that_it_does_not_need():
    backend = Stepped(by_end({"yes": "yes", "no": "no", "never": "word " * 50}))
    async with af.session(backend=backend) as flow, flow.state() as s, anyio.create_task_group() as group:
        async with s.fork(5) as branches:
            begin(branches, ["yes", "no", "yes", "yes", "never"])

        async def vote() -> None:
            assert await branches.vote("x", key=str.upper) == "YES"
            assert all(branches[index]["x"].has_value for index in (0, 2, 3))
            with pytest.raises(af.Cancelled):
                await branches[4]["x"]
            await s

        group.start_soon(vote)
        await settle()
        await backend.allow(5)
    assert_idle(backend)


async def test_abstentions_and_enough_votes():
    async with (
        af.session(backend=af.Scripted(by_end({"a": "1", "b": "it is 2", "z": "none"}))) as flow,
        flow.state() as s,
    ):

        async def vote(prompts: str, **options: object) -> object:
            branches = s.fork(len(prompts))
            begin(branches, list(prompts))
            return await branches.vote(
                "x", key=lambda text: int(text[-1]) if text[-1].isdigit() else None, **options
            )

        assert await vote("zzz") is None
        assert await vote("zbz") == 2
        assert await vote("abb") == 2
        assert await vote("abb", n=1) == 1
        with pytest.raises(af.errors.BadArgument):
            await vote("a", n=0)


async def test_f37_an_async_key_is_rejected():
    async def first_word(value: object) -> str:
        return str(value).split()[0]

    async with af.session(backend=af.Scripted({"x": "one two"})) as flow, flow.state() as s:
        for method, options in (
            ("best", {"key": first_word}),
            ("best", {"branch_key": first_word}),
            ("vote", {"key": first_word}),
        ):
            async with s.fork(1) as branches:
                begin(branches, ["a"])
            with pytest.raises(af.errors.BadArgument, check=has_param("key")):
                await getattr(branches, method)("x", **options)


async def test_votes_need_not_be_hashable():
    async with af.session(backend=af.Scripted(['["a"]', '["b"]', '["b"]'])) as flow, flow.state() as s:
        branches = s.fork(3)
        for branch in branches:
            branch += af.gen("x", schema=list[str])
        assert await branches.vote("x") == ["b"]


async def test_an_unknown_variable_is_rejected():
    async with af.session(backend=af.Scripted("x")) as flow, flow.state() as s:
        branches = s.fork(2)
        begin(branches[:1], ["a"])
        for choose in (branches.first, branches.best, branches.vote):
            with pytest.raises(af.errors.UnknownVariable):
                await choose("x")


async def test_leaving_a_choice_leaves_the_branches():
    backend = Stepped(SCRIPT)
    async with af.session(backend=backend) as flow, flow.state() as s:
        branches = s.fork(2)
        begin(branches, ["medium", "medium"])
        with anyio.move_on_after(0):
            await branches.first("x")
        await settle()
        await backend.allow(4)
        assert await branches.gather("x") == ["one two"] * 2


@pytest.mark.parametrize("choose", ["first", "best", "vote"])
def test_a_trace_names_the_line(choose):
    @af.program
    async def program(s: af.State) -> None:
        branches = s.fork(2)
        begin(branches, ["a", "b"])
        await getattr(branches, choose)("x")

    with pytest.raises(af.errors.DataDependent, match=r"test_contest.py:\d+, in program"):
        program.trace()


ANSWERS = (None, "a", "b", "c")


def winner_of(votes: Sequence[str | None], enough: int | None) -> str | None:
    """The definition: the first answer with enough votes, else the most votes, among equals the first to have
    as many."""
    counts: Counter[str] = Counter()
    reached: dict[str, int] = {}
    for at, vote in enumerate(votes):
        if vote is not None:
            counts[vote] += 1
            reached[vote] = at
            if counts[vote] == enough:
                return vote
    return min(counts, key=lambda answer: (-counts[answer], reached[answer]), default=None)


@given(
    votes=st.lists(st.sampled_from(ANSWERS), min_size=1, max_size=6),
    enough=st.one_of(st.none(), st.integers(1, 4)),
)
def test_a_poll_stops_exactly_when_no_further_votes_can_change_the_winner(votes, enough):
    poll = Poll(len(votes), enough)
    for num_seen in range(len(votes) + 1):
        rest = itertools.product(ANSWERS, repeat=len(votes) - num_seen)
        possible = {winner_of([*votes[:num_seen], *more], enough) for more in rest}
        assert poll.is_decided == (len(possible) == 1)
        if poll.is_decided:
            assert {poll.winner} == possible
            return
        poll.add(votes[num_seen])


@given(
    votes=st.lists(st.sampled_from(ANSWERS), min_size=1, max_size=6),
    lengths=st.lists(st.integers(1, 5), min_size=6, max_size=6),
    enough=st.one_of(st.none(), st.integers(1, 4)),
)
async def test_a_vote_is_that_of_the_order_in_which_the_backend_ends_the_branches(votes, lengths, enough):
    def answer(prompt: str) -> str:
        index = int(prompt)
        return " ".join([*["w"] * lengths[index], f"{votes[index] or '-'}"])

    async with af.session(backend=af.Scripted(answer)) as flow, flow.state() as s:
        branches = s.fork(len(votes))
        begin(branches, [str(index) for index in range(len(votes))])
        winner = await branches.vote("x", n=enough, key=lambda text: None if text[-1] == "-" else text[-1])
        done = [branch["x"] for branch in branches if branch["x"].has_value]
        by_end = sorted(done, key=lambda variable: variable._node.end_number)
        ended = [None if variable.text[-1] == "-" else variable.text[-1] for variable in by_end]
        assert winner == winner_of(ended, enough)
        assert len(done) == len(votes) or winner is not None


@pytest.mark.parametrize("choose", ["first", "best"])
async def test_f23a_the_branch_that_was_chosen_in_the_block_goes_on_after_it(choose):
    async def program(s: af.State) -> str:
        async with s.fork(2) as branches:
            begin(branches, ["short", "long"] if choose == "best" else ["never", "short"])
            winner = await getattr(branches, choose)("x", **({"key": len} if choose == "best" else {}))
        winner += " medium" + af.gen("y")
        return await winner["y"]

    async with af.session(backend=af.Scripted(SCRIPT)) as flow:
        assert await flow.run(program) == "one two"


async def test_f23b_a_branch_that_was_chosen_after_the_block_is_sealed_and_the_error_tells_the_way_out():
    async with af.session(backend=af.Scripted(SCRIPT)) as flow, flow.state() as s:
        async with s.fork(2) as branches:
            begin(branches, ["short", "long"])
            copy = branches[1].copy()
        winner = await branches.best("x", key=len)
        assert winner is branches[1]
        with pytest.raises(af.errors.StateClosed, match=r"copy\(\)"):
            winner += "more"
        copy += " medium" + af.gen("y")
        assert await copy["y"] == "one two"


@given(values=st.lists(st.integers(0, 4) | st.none(), min_size=1, max_size=5), count=st.integers(1, 6))
async def test_f23c_the_n_best_are_ordered_and_the_others_are_cancelled(values, count):
    script = by_end(
        {f"{number}.": "no" if value is None else str(value) for number, value in enumerate(values)}
    )
    async with af.session(backend=unconstrained(script)) as flow, flow.state() as s:
        branches = s.fork(len(values))
        for number, branch in enumerate(branches):
            branch += f"{number}." + af.gen("x", type=int)
        with_values = [number for number, value in enumerate(values) if value is not None]
        if not with_values:
            with pytest.raises(af.InvalidValue):
                await branches.best("x", n=count)
            return
        best = await branches.best("x", n=count)
        expected = sorted(with_values, key=lambda number: -values[number])[:count]
        assert [branches.index(branch) for branch in best] == expected
        for branch in branches:
            if branch in best:
                branch += "more"
            else:
                with pytest.raises(af.errors.StateClosed):
                    branch += "more"


async def test_f23d_a_beam_search_by_log_probability():
    async with af.session(backend=af.Scripted(SCRIPT)) as flow, flow.state() as s:
        beams = s.fork(3)
        begin(beams, ["long", "short", "medium"])
        chosen = await beams.best("x", n=2, branch_key=lambda beam: -beam["x"].usage.output_tokens)
        assert chosen == [beams[1], beams[2]]


async def test_f23e_branches_come_as_they_complete():
    backend = unconstrained(by_end({"bad": af.errors.EngineFailed("no"), "a": "1", "b": "2"}))
    async with af.session(backend=backend) as flow, flow.state() as s:
        branches = s.fork(3)
        begin(branches, ["a", "bad", "b"])
        failed, found = [], []
        async for branch in branches.as_completed("x"):
            try:
                found.append(await branch["x"])
            except af.errors.EngineFailed:
                failed.append(branch)
        assert (sorted(found), failed) == (["1", "2"], [branches[1]])


async def test_f23f_branches_come_in_the_order_in_which_the_backend_ends_them():
    backend = Stepped(by_end({"long": "one two three", "short": "one", "medium": "one two"}))

    async def program(s: af.State) -> list[int]:
        branches = s.fork(3)
        begin(branches, ["long", "short", "medium"])
        return [branches.index(branch) async for branch in branches.as_completed("x")]

    assert await outcome_of(program, backend, num_words=6) == [1, 2, 0]


async def test_f23g_in_a_task_group_a_failure_ends_the_iteration():
    async def program(s: af.State) -> None:
        async with s.fork(2) as branches:
            begin(branches, ["never", "bad"])
        async for _ in branches.as_completed("x"):
            raise AssertionError("no branch has a value")

    script = {"bad": af.errors.EngineFailed("no"), "never": "word " * 500}
    async with af.session(backend=af.Scripted(by_end(script))) as flow:
        with pytest.raises(af.errors.EngineFailed, match="no"):
            await flow.run(program)


async def test_f23h_variables_are_found_by_their_gens():
    async with af.session(backend=af.Scripted(["7", "7", "8"])) as flow, flow.state() as s:
        number = af.gen("number", type=int)
        branches = s.fork(3)
        for branch in branches:
            branch += number
        assert sorted(await branches.gather(number)) == [7, 7, 8]
        assert await (await branches.best(number))[number] == 8
        assert len(branches.variables(number)) == 3
        with pytest.raises(af.errors.UnknownVariable):
            branches.variables(af.gen("number", type=int))


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"n": 0}, "n"),
        ({"n": "2"}, "n"),
        ({"key": len, "branch_key": len}, "branch_key"),
        ({"key": 3}, "key"),
        ({"branch_key": 3}, "branch_key"),
    ],
)
async def test_f23i_wrong_arguments_of_best(options, param):
    async with af.session(backend=af.Scripted(SCRIPT)) as flow, flow.state() as s:
        branches = s.fork(2)
        begin(branches, ["short", "long"])
        with pytest.raises(af.errors.BadArgument) as caught:
            await branches.best("x", **options)
        assert caught.value.param == param
