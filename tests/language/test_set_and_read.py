"""Variables that the program sets, and states read back: neither changes the state."""

from __future__ import annotations

import pytest
from support.fake_engine import TOKENIZER, FakeEngine
from support.faults import has_param
from support.observed_backends import Observed, Stepped, Unbatched, assert_idle, settle
from support.programs import echo

import agentflow as af
from agentflow.protocol import ops
from agentflow.runtime.interpreter import state_tree

pytestmark = pytest.mark.anyio


VALUES = {
    "text": (lambda x: "plain", "plain"),
    "nothing": (lambda x: "", ""),
    "variable": (lambda x: x, "<p>"),
    "transformed": (lambda x: x.upper(), "<P>"),
    "f-string": (lambda x: f"why {x}, {x.upper()}?", "why <p>, <P>?"),
    "sum": (lambda x: "(" + x + f")[{x}" + "]", "(<p>)[<p>]"),
}


@pytest.mark.parametrize("kind", VALUES)
@pytest.mark.parametrize("unbatched", [False, True])
async def test_set_makes_a_variable_and_does_not_append(kind, unbatched):
    make, expected = VALUES[kind]
    backend = af.Scripted(echo)
    async with af.session(backend=Unbatched(backend) if unbatched else backend) as flow, flow.state() as s:
        s += "p" + af.gen("x")
        variable = s.set("q", make(s["x"]))
        assert variable is s["q"]
        s += "r" + af.gen("y")
        assert await s["q"] == expected
        assert await s["y"] == "<p<p>r>"
        assert await s.text() == "p<p>r<p<p>r>"
        assert (variable.finish_reason, variable.usage, variable.logprobs) == ("set", af.Usage(), None)
        assert [v.name for v in s.variables] == ["x", "q", "y"]
        assert await s.messages() == []
    assert_idle(backend)


async def test_a_set_variable_is_wired_before_it_has_a_value():
    backend = Stepped({"p": "one two", "why one two?": "because"})
    async with af.session(backend=backend) as flow, flow.state() as s, flow.state() as other:
        s += "p" + af.gen("x")
        s.set("q", f"why {s['x']}?")
        other += s["q"] + af.gen("z")
        inner = s.copy()
        inner += inner["q"].upper()
        await backend.allow(1)
        assert not s["q"].is_done
        await backend.allow(2)
        assert await other["z"] == "because"
        assert await inner.text() == "pone twoWHY ONE TWO?"
        assert [delta async for delta in s["q"]] == ["why one two?"]


PICTURE = b"\x89PNG\r\n"
MEDIA = {
    "image": lambda: af.image(PICTURE),
    "video": lambda: af.video(b"\x00\x00\x00\x18ftypmp42"),
    "f-string": lambda: f"look: {af.image(PICTURE)}",
    "sum": lambda: "look: " + af.image(PICTURE),
}


@pytest.mark.parametrize("kind", MEDIA)
async def test_a_variable_holds_no_image_or_video(kind):
    async with af.session(backend=af.Scripted(echo)) as flow, flow.state() as s:
        with pytest.raises(af.errors.BadArgument, check=has_param("value")):
            s.set("q", MEDIA[kind]())


async def test_a_mapped_variable_is_no_image():
    async with af.session(backend=af.Scripted(echo)) as flow, flow.state() as s:
        s += "p" + af.gen("x")
        mapped = s["x"].map(lambda text: af.image(PICTURE))
        with pytest.raises(af.errors.BadArgument, check=has_param("value")):
            await mapped


async def test_a_name_set_again_is_another_variable():
    async with af.session(backend=af.Scripted(echo)) as flow, flow.state() as s:
        first = s.set("q", "1")
        second = s.set("q", f"{first}2")
        assert (await s["q"], await first) == ("12", "1")
        assert second is s["q"]


async def test_a_set_variable_whose_source_failed_fails_its_state():
    async with af.session(backend=af.Scripted(echo)) as flow, flow.state() as s, flow.state() as other:
        other += "!" + af.gen("x")
        s.set("q", other["x"])
        s += "after" + af.gen("y")
        with pytest.raises(af.errors.RunFailed, match="'x'") as failure:
            await s["q"]
        assert isinstance(failure.value.__cause__, af.errors.EngineFailed)
        with pytest.raises(af.errors.RunFailed, match="'y'"):
            await s["y"]


@pytest.mark.parametrize("value", [3, None, ["a"], b"text", af.gen("g"), af.user("u"), "a" + af.gen("g")])
async def test_only_text_can_be_set(value):
    observed = Observed(af.Scripted(echo))
    async with af.session(backend=observed) as flow, flow.state() as s:
        with pytest.raises(af.errors.BadArgument, check=has_param("value")):
            s.set("q", value)
        assert observed.ops == [ops.Open(s.id)]
        assert "q" not in s


@pytest.mark.parametrize("name", ["", None, 3])
async def test_a_set_variable_needs_a_name(name):
    async with af.session(backend=af.Scripted(echo)) as flow, flow.state() as s:
        with pytest.raises(af.errors.BadArgument, check=has_param("name")):
            s.set(name, "text")


async def test_text_reads_the_state_at_its_place_in_the_stream():
    backend = Stepped({"a": "one two"})
    async with af.session(backend=backend) as flow, flow.state() as s:
        empty = s.text()
        s += "a" + af.gen("x")
        before = s.text()
        s += "b"
        after = s.text()
        assert await empty == ""
        await backend.allow(1)
        assert not before.is_done
        await backend.allow(1)
        assert (await before, await after) == ("aone two", "aone twob")
        assert before.finish_reason == "read"


async def test_a_read_text_can_be_wired():
    async with af.session(backend=af.Scripted(echo)) as flow, flow.state() as s, flow.state() as other:
        s += "a" + af.gen("x")
        other += f"it says: {s.text()}" + s.text().upper()
        assert await other.text() == "it says: a<a>A<A>"


async def test_reads_are_not_among_the_variables_and_events_of_a_program():
    async with af.session(backend=af.Scripted(echo)) as flow:

        @af.program
        async def program(s: af.State) -> str:
            s += "a" + af.gen("x")
            s["x"].map(str.upper)
            s.set("q", s["x"])
            text = s.text()
            assert [v.name for v in s.variables] == ["x", "q"]
            assert text.name not in s
            with pytest.raises(af.errors.UnknownVariable, match=r"it has: 'x', 'q'"):
                s["text()"]
            return await text

        async with flow.stream(program) as events:
            found = [event async for event in events]
        assert {event.name for event in found[:-1]} == {"x", "q"}
        assert found[-1] == af.RunDone("a<a>")


async def test_reads_sets_maps_selects_and_hints_shift_no_seed():
    async def seeds(busy: bool) -> list[int | None]:
        observed = Observed(af.Scripted(lambda prompt: "yes"))
        async with af.session(backend=observed, seed=7) as flow, flow.state() as s:
            for name in "abc":
                s += af.gen(name)
                if busy:
                    s += af.select("s", ["yes", "no"]) + af.gen(f"{name}2")
                    s.set("q", f"{s[name]}")
                    s.text()
                    s[name].map(str.upper)
                    s.hint(forks=2)
                else:
                    s += af.gen(f"{name}2")
            await s
        return [op.params.seed for op in observed.of(ops.Gen)]

    plain = await seeds(False)
    assert plain == await seeds(True)
    assert len(set(plain)) == 6


async def test_a_sum_draws_as_its_parts_do():
    async def seeds(whole: bool) -> list[int | None]:
        observed = Observed(af.Scripted(lambda prompt: "yes"))
        items = [af.gen("a"), af.select("s", ["yes", "no"]), af.gen("b"), af.gen("c", seed=3), af.gen("d")]
        async with af.session(backend=observed, seed=7) as flow, flow.state() as s:
            if whole:
                s += "" + items[0] + items[1] + items[2] + items[3] + items[4]
            else:
                for item in items:
                    s += item
            s += af.gen("e")
            await s
        return [op.params.seed for op in observed.of(ops.Gen)]

    assert await seeds(True) == await seeds(False)
    assert len(set(await seeds(True))) == 5


async def test_token_ids_are_rejected_by_a_backend_without_them():
    observed = Observed(af.Scripted(echo))
    async with af.session(backend=observed) as flow, flow.state() as s:
        with pytest.raises(af.errors.NotSupported):
            s.token_ids()
        assert observed.ops == [ops.Open(s.id)]


async def test_reading_token_ids_does_not_change_the_tokenization():
    engine = FakeEngine()
    async with af.session(backend=engine, seed=1) as flow:
        prompts = []
        for reads in (False, True):
            async with flow.state() as s:
                s += "the answer "
                if reads:
                    assert await s.token_ids() == TOKENIZER.encode("the answer ")
                    assert await s.text() == "the answer "
                s += "to the question is"
                ids = await s.token_ids()
                s += af.gen("x", max_tokens=5, logprobs=True)
                after = await s.token_ids()
                assert ids == TOKENIZER.encode("the answer to the question is")
                assert after[: len(ids)] == ids
                assert len(after) == len(ids) + len(s["x"].logprobs)
                assert await s.text() == "the answer to the question is" + await s["x"]
                prompts.append((ids, after, await s["x"]))
        assert prompts[0] == prompts[1]
        await engine.assert_idle()


async def test_an_unawaited_read_is_cancelled_with_its_state():
    backend = Stepped(["one two"])
    async with af.session(backend=backend) as flow:
        async with flow.state() as s:
            s += af.gen("x")
            text = s.text()
            await settle()
        with pytest.raises(af.Cancelled):
            await text
        await settle()
        assert_idle(backend)


@pytest.mark.parametrize("how", ["set", "text"])
async def test_the_length_of_a_text_is_limited(how):
    backend = af.Scripted([])
    async with af.session(backend=backend) as flow, flow.state() as s:
        variable = s.set("x", "0123456789abcdef")
        for _ in range(30):
            if how == "set":
                variable = s.set("x", f"{variable}{variable}")
            else:
                s += variable
                variable = s.text()
                s += variable
        with pytest.raises(af.PromptTooLong, match="8,388,608 characters"):
            await s
    assert_idle(backend)


@pytest.mark.parametrize("how", ["embedded", "server", "unbatched"])
async def test_a_branch_is_read_after_its_block_is_left(how, server):
    backend = {
        "embedded": FakeEngine(),
        "server": af.Remote(server.url),
        "unbatched": Unbatched(FakeEngine()),
    }[how]
    async with af.session(backend=backend) as flow:
        async with flow.state() as s:
            s += "the prefix, "
            async with s.fork(2) as branches:
                branches[0].add("and more")
                branches[1].add("and another").add(af.gen("x", max_tokens=2))
                ids = branches[0].token_ids() if flow.capabilities.token_ids else None
            texts = [branch.text() for branch in branches]
            assert await texts[0] == "the prefix, and more"
            assert await texts[1] == "the prefix, and another" + await branches[1]["x"]
            if ids is not None:
                assert await branches[0].token_ids() == await ids
            s += branches[0].text() + "!"
            assert await s.text() == "the prefix, the prefix, and more!"
            with pytest.raises(af.errors.StateClosed, match="sealed"):
                branches[0].add("more")
        with pytest.raises(af.errors.StateClosed, match="nothing can be appended"):
            branches[0].text()


async def test_a_branch_that_was_cancelled_is_not_read():
    backend = Stepped({"": "never"})
    async with af.session(backend=backend) as flow, flow.state() as s:
        async with s.fork(1) as branches:
            branches[0].add(af.gen("x"))
        text = branches[0].text()
        branches[0].cancel()
        with pytest.raises(af.Cancelled):
            await text
        with pytest.raises(af.Cancelled):
            await branches[0].text()
    assert_idle(backend)


async def test_the_memory_of_sealed_branches_is_limited(monkeypatch):
    """The newest can be read; the program goes on in any case."""
    monkeypatch.setattr(state_tree, "MAX_SEALED_BYTES", 250_000)
    async with af.session(backend=af.Scripted(echo)) as flow, flow.state() as s:
        s += "x" * 10_000  # a branch of it counts 40,000 bytes
        rounds = []
        for _ in range(20):
            async with s.fork(1) as branches:
                branches[0].add("y")
            rounds += branches
            await branches[0].text()  # it has been sealed by then
        assert len(await rounds[-1].text()) == 10_001
        with pytest.raises(af.errors.StateClosed, match="dropped"):
            await rounds[0].text()
        s += "z"
        assert len(await s.text()) == 10_001


async def test_reads_of_sealed_branches_are_replayed(tmp_path):
    @af.program
    async def use(s: af.State) -> tuple[str, ...]:
        s += "q"
        async with s.fork(2) as branches:
            for branch in branches:
                branch += af.gen("x")
        s.join(branches)
        s += branches[0]["x"].map(str.upper)
        s += af.gen("y")
        return await s["y"], await branches[1].text()

    path = tmp_path / "run.jsonl"
    async with af.session(backend=af.Scripted(echo), record=path) as flow:
        first = await flow.run(use)
    async with af.session(backend=af.Replay(path)) as flow:
        assert await flow.run(use) == first
