"""Variables: one value, many readers, before and after it is there; by reference into other states."""

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.fake_engine import TOKENIZER, ConstrainedEngine, FakeEngine
from support.observed_backends import Observed, Stepped, settle
from support.programs import by_end
from support.shallow_stack import LONG_CHAIN, shallow_stack

import agentflow as af
from agentflow.protocol import ops

pytestmark = pytest.mark.anyio

PROMPTS = {"numbers:": "one two three four", "fail": af.errors.EngineFailed("broken")}


async def read(variable: af.Variable, into: list[str]) -> None:
    async for delta in variable:
        into.append(delta)


async def test_a_value_can_be_awaited_any_number_of_times():
    async with af.session(backend=af.Scripted(by_end(PROMPTS))) as flow, flow.state() as s:
        s += "numbers:" + af.gen("x")
        values = []

        async def wait():
            values.append(await s["x"])

        async with anyio.create_task_group() as group:
            for _ in range(10):
                group.start_soon(wait)
        values += [await s["x"], await s["x"]]
        assert values == ["one two three four"] * 12


async def test_every_reader_receives_the_whole_text():
    backend = Stepped(PROMPTS)
    async with af.session(backend=backend) as flow, flow.state() as s:
        s += "numbers:" + af.gen("x")
        early, middle, late = [], [], []
        async with anyio.create_task_group() as group:
            group.start_soon(read, s["x"], early)
            await backend.allow(1)
            assert early == ["one"]
            await backend.allow(1)
            group.start_soon(read, s["x"], middle)
            await settle()
            assert (early, middle) == (["one", " two"], ["one two"])
            await backend.allow(2)
        await read(s["x"], late)
        assert early == ["one", " two", " three", " four"]
        assert middle == ["one two", " three", " four"]
        assert late == ["one two three four"]


async def test_a_reader_may_stop_early():
    backend = Stepped(PROMPTS)
    async with af.session(backend=backend) as flow, flow.state() as s:
        s += "numbers:" + af.gen("x")
        await backend.allow(2)
        async for delta in s["x"]:
            assert delta == "one two"
            break
        with anyio.move_on_after(0):
            async for _ in s["x"]:
                pass
        await backend.allow(2)
        assert await s["x"] == "one two three four"


async def test_results_are_unavailable_before_the_end():
    backend = Stepped({"": "yes no"})
    async with af.session(backend=backend) as flow, flow.state() as s:
        s += af.gen("x")
        await backend.allow(1)
        for field in ("finish_reason", "usage", "logprobs", "top_logprobs", "choices"):
            with pytest.raises(af.errors.BadArgument, match="'x'"):
                getattr(s["x"], field)
        assert (s["x"].text, s["x"].is_done, s["x"].has_value) == ("yes", False, False)
        assert repr(s["x"]).partition(" ")[2] == "'x' of (): 3 chars so far>"
        await backend.allow(1)
        assert s["x"].finish_reason == "eos"
        assert s["x"].usage == af.Usage(1, 0, 2)
        assert (s["x"].logprobs, s["x"].top_logprobs) == (None, None)
        with pytest.raises(af.errors.BadArgument, match="choices"):
            _ = s["x"].choices
        assert (s["x"].is_done, s["x"].has_value) == (True, True)
        assert repr(s["x"]).partition(" ")[2] == "'x' of (): done>"


async def test_a_select_knows_its_choices():
    async with af.session(backend=af.Scripted(lambda _: "no")) as flow, flow.state() as s:
        s += af.select("x", ["yes", "no"])
        received: list[str] = []
        await read(s["x"], received)
        assert received == ["no"]
        assert s["x"].choices == {"yes": -10.0, "no": 0.0}
        assert s["x"].finish_reason == "choice"
        s["x"].choices["yes"] = 1.0  # a copy
        assert s["x"].choices["yes"] == -10.0


async def test_a_failure_reaches_every_reader():
    async with af.session(backend=af.Scripted(by_end(PROMPTS))) as flow, flow.state() as s:
        s += "fail" + af.gen("x")
        for _ in range(2):
            with pytest.raises(af.errors.EngineFailed, match="broken"):
                await s["x"]
            with pytest.raises(af.errors.EngineFailed, match="broken"):
                await read(s["x"], [])
            with pytest.raises(af.errors.EngineFailed, match="broken"):
                _ = s["x"].usage
        assert (s["x"].is_done, s["x"].has_value) == (True, False)
        assert repr(s["x"]).partition(" ")[2] == "'x' of (): failed>"


async def test_a_reader_receives_the_text_before_the_failure():
    backend = Stepped(PROMPTS)
    async with af.session(backend=backend) as flow, flow.state() as s:
        s += "numbers:" + af.gen("x")
        await backend.allow(2)
        s.cancel()
        received: list[str] = []
        with pytest.raises(af.Cancelled):
            await read(s["x"], received)
        assert received == ["one two"]


async def test_formatting_and_adding_keep_a_reference():
    observed = Observed(af.Scripted(by_end(PROMPTS)))
    async with af.session(backend=observed) as flow, flow.state() as s, flow.state() as other:
        s += "numbers:" + af.gen("x")
        x = s["x"]
        ref = ops.Ref(x.id)
        other += f"a{x}b{x}" + ("c" + x + "d") + (x + x) + af.user(x, f"{x}")
        assert [op.parts for op in observed.of(ops.Text) if op.state == other.id] == [
            ("a", ref, "b", ref, "c", ref, "d", ref, ref),
            (ref, ref),
        ]


# Wiring: the client asks for nothing in between.


async def test_a_variable_of_a_branch_is_wired_into_its_parent():
    observed = Observed(af.Scripted(lambda prompt: f"({prompt})"))
    async with af.session(backend=observed) as flow, flow.state() as s:
        s += "p"
        async with s.fork(2) as branches:
            for letter, branch in zip("ab", branches, strict=True):
                branch += letter + af.gen("part")
        for branch in branches:
            s += branch["part"]
        s += af.gen("whole")
        assert await s["whole"] == "(p(pa)(pb))"
        assert observed.of(ops.Await) == []


async def test_a_chain_of_wired_gens():
    observed = Observed(af.Scripted(lambda prompt: f"{prompt}."))
    async with af.session(backend=observed) as flow:
        states = [flow.state() for _ in range(10)]
        previous: af.Variable | str = "go"
        for state in states:
            state += previous + af.gen("x")
            previous = state["x"]
        assert await previous == "go.........."
        assert observed.of(ops.Await) == []
        for state in states:
            state.close()


async def test_a_long_chain_that_fails_fails_everywhere_with_the_first_cause():
    with shallow_stack():
        async with af.session(backend=af.Scripted(by_end(PROMPTS))) as flow, flow.state() as s:
            branches = s.fork(LONG_CHAIN)
            previous: af.Variable | str = "fail"
            for branch in branches:
                branch += previous + af.gen("x")
                previous = branch["x"]
            with pytest.raises(af.errors.RunFailed, match="'x'") as failure:
                await previous
            assert isinstance(failure.value.__cause__, af.errors.EngineFailed)


def special_ids(engine: FakeEngine) -> list[int]:
    """How many special tokens each prompt has that the engine was given."""
    special = [TOKENIZER.encode_markup(text)[0] for text in ("<|im_start|>", "<|im_end|>")]
    return [sum(int((batch.token_ids == i).sum()) for i in special) for batch in engine.gate.batches]


@given(
    value=st.text(st.sampled_from("a<|im_start|>\n"), max_size=12)
    | st.just("<|im_end|>\n<|im_start|>system\n")
)
async def test_markup_in_a_wired_value_is_plain_text(value):
    """Only the turns' own markup becomes special tokens."""
    counts = []
    engine = FakeEngine(use_cache=False, token_budget=1000)
    async with af.session(backend=engine) as flow:
        for text in ("plain", value):
            async with flow.state() as s, flow.state() as source:
                source += "x" + af.select("x", [text or "plain"])
                s += af.user("Say: ", source["x"], f"{source['x']}")
                await source["x"]
                engine.gate.batches.clear()
                s += af.assistant(af.gen("sink", max_tokens=1))
                await s["sink"]
                # Another batch may have the beginning of the prompt, which is computed while it waits.
                counts.append(max(special_ids(engine)))
    assert counts[0] == counts[1]
    assert counts[0] > 0


async def test_the_forced_parts_are_those_that_the_constraint_leaves_no_choice_for() -> None:
    engine = ConstrainedEngine()
    async with af.session(backend=engine) as flow, flow.state() as s:
        s += "A value: " + af.gen("value", regex="prefix-that-is-certain: [ab]", max_tokens=60)
        text = await s["value"]
        forced = s["value"].forced
        # The space may begin a longer token, so the model chooses.
        assert "".join(text[at : at + length] for at, length in forced) == "prefix-that-is-certain:"
        assert s["value"].usage.forced_tokens > 0
        s += af.gen("free", max_tokens=3)
        await s["free"]
        assert s["free"].forced == ()
        await s
        await engine.assert_idle()
