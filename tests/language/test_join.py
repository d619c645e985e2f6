"""The ways to join branches: waiting for all, their values in order, their texts in the parent."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from support.faults import has_param
from support.observed_backends import Observed, Stepped, Unbatched, assert_idle, settle
from support.programs import echo

import agentflow as af
from agentflow.protocol import ops

pytestmark = [pytest.mark.anyio, pytest.mark.on_trio]


async def test_values_come_in_the_order_of_the_branches():
    backend = Stepped(lambda prompt: "a b c" if prompt == "0" else prompt)
    observed = Observed(backend)
    async with af.session(backend=observed) as flow, flow.state() as s:
        async with s.fork(3) as branches:
            for index, branch in enumerate(branches):
                branch += str(index) + af.gen("x")
        found = []

        async def gather():
            found.append(await branches.gather("x"))

        flow._link.start_soon(gather)
        await settle()
        assert [op.state for op in observed.of(ops.Await)] == [branch.id for branch in branches]
        await backend.allow(3)
        assert not found
        await backend.allow(2)
        assert found == [["a b c", "1", "2"]]
        assert await branches.gather("x") == found[0]
    assert_idle(backend)


async def test_variables_needs_the_name_in_every_branch():
    async with af.session(backend=af.Scripted(echo)) as flow, flow.state() as s:
        branches = s.fork(2)
        branches[0] += "a" + af.gen("x")
        with pytest.raises(af.errors.UnknownVariable, match="'x'"):
            branches.variables("x")
        with pytest.raises(af.errors.UnknownVariable, match="'x'"):
            await branches.gather("x")
        branches[1] += "b" + af.gen("x")
        assert branches.variables("x") == [branch["x"] for branch in branches]
        s += "; ".join([f"{x}" for x in branches.variables("x")])
        assert await s.text() == "<a>; <b>"
        with pytest.raises(af.errors.BadArgument, check=has_param("name")):
            branches.variables(3)


async def test_gather_raises_the_first_failure():
    async with af.session(backend=af.Scripted(echo)) as flow, flow.state() as s:
        branches = s.fork(3)
        for branch, text in zip(branches, ("a", "b!", "c!"), strict=True):
            branch += text + af.gen("x")
        with pytest.raises(af.errors.EngineFailed, match="cannot answer b!"):
            await branches.gather("x")
        assert await branches[0]["x"] == "<a>"


@pytest.mark.parametrize("separator", ["", "; ", "\n\n"])
@pytest.mark.parametrize("unbatched", [False, True])
async def test_a_join_appends_what_the_branches_appended(separator, unbatched):
    backend = af.Scripted(echo)
    async with af.session(backend=Unbatched(backend) if unbatched else backend) as flow, flow.state() as s:
        s += "p" + af.gen("own")
        async with s.fork(3) as branches:
            for index, branch in enumerate(branches):
                branch += f"{index}" + af.gen("x") + branch["own"].upper()
            branches[1] += af.select("c", ["<p<p>1<p<p>1><P>>"])
        assert s.join(branches, separator=separator) is s
        parts = ["0<p<p>0><P>", "1<p<p>1><P><p<p>1<p<p>1><P>>", "2<p<p>2><P>"]
        assert await s.text() == "p<p>" + separator.join(parts)
    assert_idle(backend)


async def test_a_join_takes_what_was_appended_before_it():
    backend = Stepped(["one two", "one two"])
    async with af.session(backend=backend) as flow, flow.state() as s:
        branches = s.fork(2)
        for branch in branches:
            branch += af.gen("x")
        s.join(branches, separator=" and ")
        branches[0] += "too late"
        text = s.text()
        await backend.allow(3)
        assert not text.is_done
        await backend.allow(1)
        assert await text == "one two and one two"
    assert_idle(backend)


async def test_turns_are_joined_as_plain_text():
    async with af.session(backend=af.Scripted(lambda prompt: "yes")) as flow, flow.state() as s:
        s += af.system("be kind")
        async with s.fork(2) as branches:
            for branch in branches:
                branch += af.user("why?") + af.assistant(af.gen("x"))
                branch.set("note", "not text")
            async with branches[0].user(), branches[1].user(), s.user():
                for branch in branches:
                    branch += "open"
                s.join(branches, separator=" | ")
        assert await s.messages() == [
            {"role": "system", "content": "be kind"},
            {"role": "user", "content": "why?yesopen | why?yesopen"},
        ]
        assert await s.text() == "<system>be kind</system><user>why?yesopen | why?yesopen</user>"


async def test_images_are_joined_as_images():
    observed = Observed(af.Scripted([]))
    async with af.session(backend=observed) as flow, flow.state() as s:
        branches = s.fork(1)
        branches[0] += af.user("see ", af.image("https://example.com/a.png"))
        s.join(branches)
        assert await s.text() == "see <image>"
        assert [op.source for op in observed.of(ops.Image)] == ["https://example.com/a.png"] * 2


@pytest.mark.parametrize("coupled", [False, True])
async def test_a_failed_branch_fails_the_join_with_its_cause(coupled):
    backend = af.Scripted(echo)
    async with af.session(backend=backend) as flow, flow.state() as s:
        branches = s.fork(2)
        branches[0] += "a" + af.gen("x")
        branches[1] += "b!" + af.gen("x") + "more"
        if coupled:
            async with branches:
                pass
        s.join(branches)
        s += af.gen("after")
        with pytest.raises(af.errors.RunFailed, match=r"cannot answer b!|'x'") as failure:
            await s
        assert isinstance(failure.value.__cause__, af.errors.EngineFailed)
        with pytest.raises(af.errors.RunFailed, match="'after'"):
            await s["after"]
    assert_idle(backend)


@pytest.mark.parametrize("coupled", [True, False])
async def test_a_branch_that_failed_outside_its_text_fails_the_join(coupled):
    """A variable that is not part of its text makes it fail."""
    backend = af.Scripted(echo)
    async with af.session(backend=backend) as flow, flow.state() as s:
        branches = s.fork(2)
        for branch in branches:
            branch += "fine" + af.gen("x")
        branches[1].set("y", branches[1]["x"].regex("nowhere"))
        if coupled:
            async with branches:
                pass
        s.join(branches)
        with pytest.raises(af.errors.RunFailed, match=r"finds nothing|the end of branch \(1,\)|branch 1"):
            await s
        assert await branches[0]["x"] == "<fine>"
    assert_idle(backend)


@pytest.mark.parametrize(("item", "failed"), [("text", "the end of branch"), (af.gen("x"), "'x'")])
async def test_a_cancelled_branch_fails_the_join(item, failed):
    backend = Stepped(["one two"] * 2)
    async with af.session(backend=backend) as flow, flow.state() as s:
        branches = s.fork(2)
        for branch in branches:
            branch += item
        if item == "text":
            branches[0].cancel()
        s.join(branches)
        branches[0].cancel()
        with pytest.raises(af.errors.RunFailed, match=failed) as failure:
            await s
        assert isinstance(failure.value.__cause__, af.Cancelled)
    assert_idle(backend)


async def test_only_the_branches_of_the_state_are_joined():
    observed = Observed(af.Scripted([]))
    async with af.session(backend=observed) as flow, flow.state() as s, flow.state() as other:
        branches, foreign = s.fork(2), other.fork(2)
        inner = branches[0].fork(1)
        num_ops = len(observed.ops)
        for wrong in (foreign, inner, list(branches), foreign[:1], [], None):
            with pytest.raises(af.errors.ForeignState, match="branches"):
                s.join(wrong)
        with pytest.raises(af.errors.BadArgument, check=has_param("separator")):
            s.join(branches, separator=3)
        assert len(observed.ops) == num_ops
        branches[0].join(inner)
        s.join(branches)
        await s


@given(
    plan=st.lists(
        st.lists(st.sampled_from(["text", "gen", "upper", "inner"]), max_size=4), min_size=1, max_size=4
    )
)
@example(plan=[[], ["text", "gen", "text", "gen"], []])  # empty branches, a variable that is overwritten
async def test_a_join_is_the_texts_of_its_branches_after_the_prefix(plan):
    """At any depth: a branch may join branches, too."""
    backend = af.Scripted(echo)
    async with af.session(backend=backend) as flow, flow.state() as s:
        s += "p" + af.gen("x")
        prefix = await s.text()
        branches = s.fork(len(plan))
        for branch, steps in zip(branches, plan, strict=True):
            for kind in steps:
                if kind == "text":
                    branch += "t"
                elif kind == "gen":
                    branch += af.gen("x", max_tokens=5)
                elif kind == "upper":
                    branch += branch["x"].upper()
                else:
                    inner = branch.fork(2)
                    inner[0] += "i" + af.gen("x", max_tokens=5)
                    branch.join(inner, separator="/")
        s.join(branches, separator="|")
        texts = [(await branch.text()).removeprefix(prefix) for branch in branches]
        assert await s.text() == prefix + "|".join(texts)
    assert_idle(backend)
