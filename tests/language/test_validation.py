"""``gen(..., on_invalid="retry")``: a state holds only the valid text, after a bounded number of attempts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import AfterValidator, BaseModel, Field, ValidationError
from support.fake_engine import ConstrainedEngine
from support.observed_backends import Observed, Stepped, Unbatched, assert_idle

import agentflow as af
from agentflow.protocol import ops

pytestmark = pytest.mark.anyio


def check_even(number: int) -> int:
    if number % 2:
        raise ValueError("it is odd")
    return number


Even = Annotated[int, AfterValidator(check_even)]


def even(name: str = "n", **options: Any) -> Any:
    return af.gen(name, schema=Even, on_invalid="retry", **options)


def texts_of(answers: Sequence[int]) -> list[str]:
    return [str(answer) for answer in answers]


async def test_f37_the_failure_of_a_state_has_the_invalid_text():
    async with af.session(backend=af.Scripted({"n": "7", "next": "?"})) as flow, flow.state() as s:
        s += even(max_retries=1) + af.gen("next")
        with pytest.raises(af.errors.RunFailed) as failure:
            await s["next"]
    assert isinstance(failure.value.__cause__, af.InvalidValue)
    assert failure.value.__cause__.text == "7"


@pytest.mark.parametrize("unbatched", [False, True])
async def test_only_the_valid_text_is_in_the_state(unbatched):
    backend = af.Scripted({"n": ["1", "3", "4"], "rest": "the end"})
    async with af.session(backend=Unbatched(backend) if unbatched else backend) as flow, flow.state() as s:
        s += af.user("Even?") + af.assistant("It is ", even(), ".") + af.user("And?")
        s += af.assistant(af.gen("rest"))
        assert [partial async for partial in s["n"]] == [4]
        assert await s["n"] == 4
        shown = (
            "<user>Even?</user><assistant>It is 4.</assistant><user>And?</user><assistant>the end</assistant>"
        )
        assert await s.text() == shown
        assert (await s.messages())[1]["content"] == "It is 4."
        assert [variable.name for variable in s.variables] == ["n", "rest"]
        assert (s["n"].finish_reason, s["n"].usage.output_tokens) == ("eos", 3)
    assert_idle(backend)


async def test_a_value_can_be_passed_on_before_it_is_valid():
    async with af.session(backend=af.Scripted(["1", "4"])) as flow, flow.state() as s, flow.state() as other:
        s += even()
        other += f"[{s['n']}]"
        assert await other.text() == "[4]"


async def test_without_a_valid_value_the_state_fails_with_the_last_error():
    backend = Observed(af.Scripted(texts_of([1, 3, 5, 7])))
    async with af.session(backend=backend) as flow, flow.state() as s:
        s += "a" + even(max_retries=2) + "b"
        with pytest.raises(af.InvalidValue, match=r"'5'.*it is odd") as failure:
            await s["n"]
        assert "test_validation.py" in failure.value.__notes__[0]
        with pytest.raises(af.errors.RunFailed, match="'n'") as failed:
            await s
        assert isinstance(failed.value.__cause__, af.InvalidValue)
        assert len(backend.of(ops.Gen)) == 3


async def test_a_run_raises_what_its_program_did_not_await():
    @af.program
    async def program(s: af.State) -> str:
        s += even(max_retries=1)
        return "done"

    async with af.session(backend=af.Scripted(texts_of([1, 3, 2]))) as flow:
        with pytest.raises(af.AgentflowError) as failure:
            await flow.run(program)
        assert isinstance(failure.value.__cause__, af.InvalidValue)
        assert await flow.run(program) == "done"


@pytest.mark.parametrize("awaits", [False, True])
@pytest.mark.parametrize("on_invalid", ["retry", "reask"])
async def test_f37_a_run_does_not_fail_with_an_attempt_that_the_backend_refused(on_invalid, awaits):
    refused = af.InvalidValue("no number")
    refused.text = "one"

    @af.program
    async def program(s: af.State) -> int:
        s += "Even? " + af.gen("n", schema=Even, on_invalid=on_invalid)
        return await s["n"] if awaits else 2

    async def run(answers: list[Any], used: Any) -> Any:
        async with af.session(backend=af.Scripted(answers)) as flow:
            return await used(flow)

    async def streamed(flow: af.Session) -> Any:
        done = [event async for event in flow.stream(program)][-1]
        assert isinstance(done, af.RunDone)
        return done.result

    answers = [refused, "2"]
    with anyio.fail_after(30):
        assert await run(answers, lambda flow: flow.run(program)) == 2
        assert await run(answers * 2, lambda flow: flow.map(program, [(), ()], concurrency=1)) == [2, 2]
        assert await run(answers, streamed) == 2


async def test_f37_a_program_that_catches_the_last_refusal_does_not_fail_with_it():
    @af.program
    async def program(s: af.State) -> str:
        s += even(max_retries=1)
        try:
            await s["n"]
        except af.InvalidValue:
            return "none"
        return "some"

    with anyio.fail_after(30):
        async with af.session(backend=af.Scripted([af.InvalidValue("no number")] * 2)) as flow:
            assert await flow.run(program) == "none"


async def test_a_failed_attempt_is_not_repeated():
    backend = Observed(af.Scripted(["1", af.errors.EngineFailed("no power"), "2"]))
    async with af.session(backend=backend) as flow, flow.state() as s:
        s += even()
        with pytest.raises(af.errors.EngineFailed, match="no power"):
            await s["n"]
        assert len(backend.of(ops.Gen)) == 2


async def test_a_truncated_value_is_generated_again():
    async with af.session(backend=af.Scripted(["[1, 2]", "[1]"])) as flow, flow.state() as s:
        s += af.gen("x", schema=list[int], max_tokens=1, on_invalid="retry")
        assert await s["x"] == [1]


async def test_each_attempt_has_its_own_seed_and_retries_are_not_greedy():
    for seed in (None, 7):
        backend = Observed(af.Scripted(texts_of([1, 3, 4])))
        async with af.session(backend=backend) as flow, flow.state() as s:
            s += even(seed=seed)
            await s["n"]
        params = [gen.params for gen in backend.of(ops.Gen)]
        assert len({one.seed for one in params}) == 3
        assert seed is None or params[0].seed == seed
        assert params[0].temperature is None
        assert 0.0 < params[1].temperature == params[2].temperature


async def test_the_gens_after_it_keep_their_seeds():
    seeds = []
    for answers in (["2", "x"], ["1", "x", "2"]):  # the retry is appended last
        backend = Observed(af.Scripted(answers))
        async with af.session(backend=backend, seed=1) as flow, flow.state() as s:
            s += even() + af.gen("x")
            await s
            assert s.fork(1)[0].path == (1,)
        seeds += [gen.params.seed for gen in backend.of(ops.Gen) if gen.name == "x"]
    assert seeds[0] == seeds[1]


async def test_on_the_engine():
    engine = ConstrainedEngine()
    async with af.session(backend=engine) as flow, flow.state() as s:
        number = Annotated[Even, AfterValidator(lambda n: check_even(n // 10) * 0 + n)]  # two even digits
        s += "Even: "
        s += af.gen("n", schema=number, temperature=1.0, max_tokens=30, on_invalid="retry", max_retries=20)
        s += "!"
        value = await s["n"]
        assert value % 2 == value // 10 % 2 == 0
        assert await s.text() == f"Even: {s['n'].text}!"
        await s
        await engine.assert_idle()


async def test_attempts_are_replayed(tmp_path):
    path = tmp_path / "run.jsonl"

    def answer(prompt: str) -> str:
        calls[prompt] = calls.get(prompt, 0) + 1
        return str(2 * len(prompt) + (calls[prompt] < 2))

    @af.program
    async def program(s: af.State, question: str) -> int:
        s += question + even()
        branch = s.copy()
        branch += af.gen("more", type=int)
        return await s["n"] + await branch["more"]

    questions = ["a", "bb", "ccc"]
    calls: dict[str, int] = {}
    async with af.session(backend=af.Scripted(answer), record=path) as flow:
        first = await flow.map(program, questions)
    for order in (1, -1):
        async with af.session(backend=af.Replay(path)) as flow:
            assert await flow.map(program, questions[::order]) == first[::order]


async def test_cancelling_the_state_ends_its_attempts():
    backend = Stepped(["1 and", "2"])
    async with af.session(backend=backend) as flow, flow.state() as s:
        s += even()
        s.cancel()
        with pytest.raises(af.Cancelled):
            await s["n"]
    assert_idle(backend)


async def test_a_session_may_end_during_an_attempt():
    backend = Stepped(["1 and 2"])
    async with af.session(backend=backend) as flow:
        s = flow.state()
        s += even()
        await anyio.lowlevel.checkpoint()
    assert_idle(backend)


async def test_a_trace_cannot_hold_it():
    @af.program
    async def program(s: af.State) -> str:
        s += even()
        return await s["n"]

    with pytest.raises(af.errors.DataDependent, match="retry"):
        program.trace()


async def test_a_backend_without_the_constraint_rejects_it_at_once():
    async with af.session(backend=af.Scripted(["x"])) as flow, flow.state() as s:
        with pytest.raises(af.errors.NotSupported):
            s += "a" + af.gen("x", schema=Even, logprobs=True, on_invalid="retry")
        assert await s.text() == ""


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"schema": Even, "on_invalid": "repeat"}, "on_invalid"),
        ({"on_invalid": "retry"}, "on_invalid"),
        ({"schema": Even, "on_invalid": "retry", "max_retries": 0}, "max_retries"),
        ({"schema": Even, "on_invalid": "retry", "max_retries": 1000}, "max_retries"),
    ],
)
def test_wrong_options_are_rejected(options, param):
    with pytest.raises(af.errors.BadArgument) as failure:
        af.gen("x", **options)
    assert failure.value.param == param
    with pytest.raises(af.errors.BadArgument):
        af.reply("x", on_invalid="retry")


@given(st.lists(st.integers(0, 9), max_size=8), st.integers(1, 5), st.booleans())
def test_attempts_are_bounded(odd_first: list[int], max_retries: int, is_awaited: bool) -> None:
    """The reference: the first even number among the first ``max_retries`` + 1."""
    answers = [*odd_first, 2]
    tried = answers[: max_retries + 1]
    expected = next((number for number in tried if number % 2 == 0), None)

    async def main() -> None:
        backend = Observed(af.Scripted([*texts_of(answers), *["9"] * 9]))
        async with af.session(backend=backend) as flow, flow.state() as s:
            s += "[" + even(max_retries=max_retries) + "]"
            if is_awaited:
                await s["n"].settled()
            if expected is None:
                with pytest.raises(af.AgentflowError):
                    await s
            else:
                assert await s.text() == f"[{expected}]"
            num_gens = max_retries + 1 if expected is None else tried.index(expected) + 1
            assert len(backend.of(ops.Gen)) == num_gens

    anyio.run(main)


async def test_the_first_attempt_is_sent_with_the_append():
    """So a list of scripted answers is used in the order of the program, and nothing waits for a task."""
    backend = Observed(af.Scripted(["2", "x"]))
    async with af.session(backend=backend) as flow, flow.state() as s:
        s += even() + af.gen("x")
        assert [gen.name for gen in backend.of(ops.Gen)] == ["n", "x"]
        assert (await s["n"], await s["x"]) == (2, "x")


class Report(BaseModel):
    score: int = Field(multiple_of=2)


async def test_f19f_an_invalid_value_says_what_is_wrong():
    answers = ['{"score": 1}', '{"score": 3}', '{"score": 5}', "[1, 2]"]
    async with af.session(backend=af.Scripted(answers)) as flow:
        for options in ({}, {"on_invalid": "retry", "max_retries": 1}):
            async with flow.state() as s:
                s += af.gen("report", schema=Report, **options)
                with pytest.raises(af.InvalidValue) as failure:
                    await s["report"]
            error = failure.value
            assert error.text == ('{"score": 5}' if options else '{"score": 1}')
            assert [(one["loc"], one["type"]) for one in error.errors] == [(("score",), "multiple_of")]
            assert isinstance(error.__cause__, ValidationError)
        async with flow.state() as s:
            s += af.gen("list", schema=list[int], max_tokens=1)
            with pytest.raises(af.InvalidValue) as failure:
                await s["list"]
        assert failure.value.errors == ()
        assert "[1, 2]".startswith(failure.value.text)


@pytest.mark.parametrize("on_invalid", ["raise", "retry", "reask"])
async def test_f19g_a_validator_runs_once(on_invalid):
    seen: list[int] = []

    def note(number: int) -> int:
        seen.append(number)
        return check_even(number)

    answers = ["4"] if on_invalid == "raise" else ["3", "4"]
    async with af.session(backend=af.Scripted(answers)) as flow, flow.state() as s:
        s += af.gen("n", schema=Annotated[int, AfterValidator(note)], on_invalid=on_invalid)
        async for _ in s["n"]:
            pass
        assert await s["n"] == await s["n"] == 4
    assert seen == [int(answer) for answer in answers]


async def test_f19h_reask_tells_the_model_what_is_wrong():
    prompts: list[str] = []

    def answer(prompt: str) -> str:
        prompts.append(prompt)
        return ["1", "3", "4", "the end"][len(prompts) - 1]

    scripted = af.Scripted(answer)
    backend = Observed(scripted)
    async with af.session(backend=backend) as flow, flow.state() as s:
        s += af.user("Even?") + af.assistant(af.gen("n", schema=Even, on_invalid="reask")) + af.user("And?")
        s += af.assistant(af.gen("rest"))
        assert await s["n"] == 4
        shown = "<user>Even?</user><assistant>4</assistant><user>And?</user><assistant>the end</assistant>"
        assert await s.text() == shown
        assert [message["role"] for message in await s.messages()] == ["user", "assistant"] * 2
    first, second, third, rest = prompts
    assert second.startswith(f"{first}1</assistant><user>")
    assert third.startswith(f"{second}3</assistant><user>")
    assert "it is odd" in second
    assert second.endswith("</user><assistant>")
    assert "odd" not in rest
    assert [gen.params.temperature for gen in backend.of(ops.Gen)][:3] == [None] * 3
    assert_idle(scripted)


async def test_f19i_reask_works_without_turns_and_in_conversations():
    async with af.session(backend=af.Scripted(["1", "4"] * 2)) as flow:
        async with flow.state() as s:
            s += "Even: " + af.gen("n", schema=Even, on_invalid="reask") + "!"
            assert await s.text() == "Even: 4!"
        async with flow.state() as s:
            s += af.conversation([{"role": "user", "content": "Even?"}])
            s += af.gen("n", schema=Even, on_invalid="reask")
            assert await s["n"] == 4


async def test_f19j_reask_fails_with_the_last_error():
    async with af.session(backend=af.Scripted(texts_of([1, 3]))) as flow, flow.state() as s:
        s += af.gen("n", schema=Even, on_invalid="reask", max_retries=1)
        with pytest.raises(af.InvalidValue) as failure:
            await s["n"]
        assert failure.value.text == "3"


async def test_f19k_reask_on_the_engine():
    engine = ConstrainedEngine()
    async with af.session(backend=engine) as flow, flow.state() as s:
        s += "Even: "
        s += af.gen("n", schema=Even, temperature=1.0, max_tokens=30, on_invalid="reask", max_retries=20)
        assert await s["n"] % 2 == 0
        assert await s.text() == f"Even: {s['n'].text}"
        await s
        await engine.assert_idle()
