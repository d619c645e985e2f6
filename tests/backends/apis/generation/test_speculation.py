"""One call for several gens of a turn, against a fake server whose model is a function of its prompt."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.apis import openai_answers as answers
from support.apis.api_sessions import openai_session
from support.apis.fake_server import Answer, AnyAnswer, FakeServer, Hold, Received, fake_server

import agentflow as af
from agentflow.errors import InvalidValue, NotSupported

pytestmark = [pytest.mark.anyio, pytest.mark.on_trio]

PERSON = "Name: Ada\nJob: engineer\nAge: 36\nEnd"


def written(request: Received, turn: str) -> AnyAnswer:
    """The text of a model that writes ``turn``, one character per token. After any other beginning it
    writes ``?``."""
    body = request.json
    last = body["messages"][-1]
    begun = last["content"] if last["role"] == "assistant" else ""
    assert not begun or body["continue_final_message"]
    text = turn[len(begun) :] if turn.startswith(begun) else "?"
    stops = [text.find(stop) for stop in body.get("stop") or () if stop in text]
    end = min(stops, default=len(text))
    most = body.get("max_tokens") or body.get("max_completion_tokens") or 10**6
    reason: Any = "stop"
    if end > most:
        end, reason = most, "length"
    usage = answers.usage(len(begun) + 100, end)
    return answers.stream(
        [*answers.text_chunks(*text[:end]), *answers.ending(reason), answers.chunk(usage=usage)]
    )


@asynccontextmanager
async def session(
    turn: str, *, continues: bool = False, **options: Any
) -> AsyncIterator[tuple[af.Session, FakeServer]]:
    async with fake_server(lambda request: written(request, turn)) as server:
        url = f"{server.url}/v1"
        backend: Any = af.OpenAI("gpt-4o", base_url=url, api_key="k", max_retries=0, **options)
        if continues:
            backend = af.OpenAICompatible(url, "m", flavour="vllm", max_retries=0, **options)
        async with af.session(backend=backend) as flow:
            yield flow, server


def person(**options: Any) -> Any:
    return af.assistant(
        "Name: ",
        af.gen("name", stop="\n", **options),
        "\nJob: ",
        af.gen("job", stop="\n", **options),
        "\nAge: ",
        af.gen("age", stop="\n", **options),
    )


async def test_the_fields_of_a_turn_take_one_call() -> None:
    async with session(PERSON) as (flow, server), flow.state() as s:
        s += af.user("Who?") + person(temperature=0.0, max_tokens=20)
        assert [await s[name] for name in ("name", "job", "age")] == ["Ada", "engineer", "36"]
        assert (await s.messages())[-1]["content"] == "Name: Ada\nJob: engineer\nAge: 36"
        (request,) = server.received
        assert "stop" not in request.json
        assert [message["role"] for message in request.json["messages"]] == ["user"]
        total = sum([s[name].usage for name in ("name", "job", "age")], af.Usage())
        assert (total.saved_calls, total.saved_tokens > 0) == (2, True)
        stats = await flow.stats()
        assert (stats.saved_calls, stats.failed_speculations) == (2, 0)


async def test_the_usage_of_the_call_is_divided_among_the_values() -> None:
    async with session("Name: Ada\nJob: x") as (flow, _), flow.state() as s:
        s += af.user("Who?") + af.assistant(
            "Name: ", af.gen("name", stop="\n"), "\nJob: ", af.gen("job", stop="\n")
        )
        name, job = await s["name"], await s["job"]
        assert (name, job) == ("Ada", "x")
        total = s["name"].usage + s["job"].usage
        assert (total.prompt_tokens, total.output_tokens) == (100, len("Name: Ada\nJob: x"))


async def test_the_tokens_of_all_gens_limit_the_call() -> None:
    async with session(PERSON) as (flow, server), flow.state() as s:
        s += af.user("Who?") + person(max_tokens=10)
        await s
        most = server.last.json["max_completion_tokens"]
        assert 30 <= most <= 30 + len("Name: \nJob: \nAge: ")


async def test_a_model_that_writes_another_turn_fails_the_gen_with_the_reason() -> None:
    async with session("It is Ada.") as (flow, server), flow.state() as s:
        s += af.user("Who?") + person()
        with pytest.raises(NotSupported):
            await s["name"]
        assert (await flow.stats()).failed_speculations == 1
        assert len(server.received) == 1


async def test_a_model_that_leaves_the_form_fails_the_later_gen() -> None:
    async with session("Name: Ada\nI do not know.") as (flow, _), flow.state() as s:
        s += af.user("Who?") + person()
        assert await s["name"] == "Ada"
        with pytest.raises(NotSupported):
            await s["job"]


async def test_a_state_that_does_not_speculate_makes_a_call_for_each_gen() -> None:
    async with session(PERSON, continues=True, speculate=True) as (flow, server), flow.state() as s:
        s.hint(speculate=False)
        s += af.user("Who?") + person()
        assert [await s[name] for name in ("name", "job", "age")] == ["Ada", "engineer", "36"]
        assert [request.json["stop"] for request in server.received] == [["\n"]] * 3


async def test_a_server_that_continues_turns_is_called_for_each_gen_unless_asked() -> None:
    for speculate, num_calls in ((None, 3), (True, 1)):
        async with session(PERSON, continues=True, speculate=speculate) as (flow, server):
            async with flow.state() as s:
                s += af.user("Who?") + person()
                assert [await s[name] for name in ("name", "job", "age")] == ["Ada", "engineer", "36"]
            assert len(server.received) == num_calls


async def test_one_gen_without_text_before_it_is_an_ordinary_call() -> None:
    async with session("Ada\nand more") as (flow, server), flow.state() as s:
        s += af.user("Who?") + af.assistant(af.gen("name", stop="\n"))
        assert await s["name"] == "Ada"
        assert server.last.json["stop"] == ["\n"]


@pytest.mark.parametrize("continues", [False, True])
async def test_a_gen_that_samples_otherwise_takes_no_text_of_the_call(continues: bool) -> None:
    async with (
        session(PERSON, continues=continues, speculate=True) as (flow, server),
        flow.state() as s,
    ):
        s += af.user("Who?")
        s += af.assistant(
            "Name: ", af.gen("name", stop="\n"), "\nJob: ", af.gen("job", stop="\n", temperature=0.7)
        )
        assert await s["name"] == "Ada"
        if continues:
            assert await s["job"] == "engineer"
            assert [request.json.get("temperature") for request in server.received] == [None, 0.7]
        else:
            with pytest.raises(NotSupported):
                await s["job"]


async def test_a_later_value_must_satisfy_its_constraint() -> None:
    def turn(kind: type) -> Any:
        return af.assistant(
            "Name: ", af.gen("name", stop="\n"), "\nJob: ", af.gen("job", type=kind), "\nAge: ", af.gen("age")
        )

    retry: Any = {"on_unsupported": "retry"}
    async with session("Name: 7\nJob: 12\nAge: 36", **retry) as (flow, _), flow.state() as s:
        s += af.user("Who?") + turn(int)
        assert [await s[name] for name in ("name", "job", "age")] == ["7", 12, "36"]
    async with session("Name: 7\nJob: none\nAge: 36", **retry) as (flow, _), flow.state() as s:
        s += af.user("Who?") + turn(int)
        with pytest.raises(NotSupported):
            await s["job"]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_forks_share_the_text_of_a_call_only_where_it_is_no_draw(temperature: float) -> None:
    async with session(PERSON, continues=True, speculate=True) as (flow, server), flow.state() as s:
        options = {"stop": "\n", "temperature": temperature}
        s += af.user("Who?")
        async with s.assistant():
            s += "Name: "
            s += af.gen("name", **options) + "\nJob: " + af.gen("job", **options)
            await s["name"]
            branches = s.fork(2)
            for branch in branches:
                branch += "\nAge: "
                branch += af.gen("age", **options)
            assert await branches.gather("age") == ["36", "36"]
        assert len(server.received) == (1 if temperature == 0 else 3)


@pytest.mark.parametrize("continues", [False, True])
async def test_a_fork_that_draws_takes_no_text_of_a_call_at_temperature_0(continues: bool) -> None:
    async with session(PERSON, continues=continues, speculate=True) as (flow, server), flow.state() as s:
        s += af.user("Who?")
        async with s.assistant():
            s += "Name: "
            s += af.gen("name", stop="\n", temperature=0.0) + "\nJob: "
            s += af.gen("job", stop="\n", temperature=0.0)
            await s["job"]
            branches = s.fork(2)
            for branch in branches:
                branch += "\nAge: " + af.gen("age", stop="\n", temperature=1.0)
            assert await branches.gather("age") == ["36", "36"]
        drawn = [request for request in server.received if request.json["temperature"] == 1]
        assert len(drawn) == 2


async def test_a_later_value_may_be_empty() -> None:
    async with session("Name: Ada\nNote: ") as (flow, server), flow.state() as s:
        s += af.user("Who?")
        s += af.assistant("Name: ", af.gen("name", stop="\n"), "\nNote: ", af.gen("note"))
        assert (await s["name"], await s["note"]) == ("Ada", "")
        assert len(server.received) == 1
        assert (await flow.stats()).failed_speculations == 0


@pytest.mark.parametrize(("job", "num_calls"), [("12", 1), ("none", 2)])
async def test_a_later_value_may_have_a_grammar(job: str, num_calls: int) -> None:
    turn = f"Name: 7\nJob: {job}\nAge: 36"
    async with session(turn, continues=True, speculate=True) as (flow, server), flow.state() as s:
        grammar = af.gen("job", grammar="start: /[0-9]+/", stop="\n")
        s += af.user("Who?") + af.assistant(
            "Name: ", af.gen("name", stop="\n"), "\nJob: ", grammar, "\nAge: "
        )
        if num_calls == 1:
            assert await s["job"] == job
        else:  # a call for this value, whose server does not keep the grammar
            with pytest.raises(InvalidValue):
                await s["job"]
        assert len(server.received) == num_calls


async def test_a_later_value_with_a_pattern_that_cannot_be_checked_is_asked_for() -> None:
    """The server may know a pattern whose repeats are too large for the checks here."""
    async with session(PERSON, continues=True, speculate=True) as (flow, server), flow.state() as s:
        job = af.gen("job", regex="[a-z]{1,30000}", stop="\n")
        s += af.user("Who?") + af.assistant("Name: ", af.gen("name", stop="\n"), "\nJob: ", job)
        assert await s["job"] == "engineer"
        assert len(server.received) == 2


async def test_the_end_of_a_constrained_value_may_begin_like_the_text_after_it() -> None:
    async with session("Name: Ada\nGrade: ab", on_unsupported="retry") as (flow, _), flow.state() as s:
        grade = af.gen("grade", regex="ab|b")
        s += af.user("Who?")
        s += af.assistant("Name: ", af.gen("name", stop="\n"), "\nGrade: ", grade, "b!")
        assert await s["grade"] == "ab"


async def test_the_first_value_is_visible_before_the_call_has_ended() -> None:
    hold = Hold()
    chunks = answers.text_chunks("Ada", "\n", "Job: ", "engineer")
    steps = [answers.event(chunk) for chunk in chunks[:3]]
    rest = [answers.event(chunk) for chunk in (*chunks[3:], *answers.ending("stop"))]
    body = [*steps, hold, *rest, answers.DONE]
    answer = Answer(body, content_type=answers.EVENT_STREAM)
    async with openai_session([answer]) as (flow, _), flow.state() as s:
        s += af.user("Who?") + af.assistant(af.gen("name", stop="\n"), "\nJob: ", af.gen("job", stop="\n"))
        assert await s["name"] == "Ada"
        assert not s["job"].is_done
        hold.go_on()
        assert await s["job"] == "engineer"


@pytest.mark.parametrize("end", ["cancel", "close"])
async def test_a_call_that_nothing_needs_any_more_is_left(end: str) -> None:
    body = [*[answers.event(chunk) for chunk in answers.text_chunks("Ada", "\n")], Hold()]
    answer = Answer(body, content_type=answers.EVENT_STREAM)
    async with openai_session([answer]) as (flow, server):
        s = flow.state()
        s += af.user("Who?")
        s += af.assistant(af.gen("name", stop="\n"), "\nJob: ", af.gen("job", stop="\n"))
        assert await s["name"] == "Ada"
        getattr(s, end)()
        await server.wait_until_gone()


PIECES = st.sampled_from(["A: ", "B: ", "x", "yy", "\n", ";", "\nB: ", ";A: "])


ITEMS = st.lists(
    st.one_of(
        st.sampled_from(["A: ", "B: ", "\nB: ", ";A: ", "x"]),
        st.tuples(st.sampled_from(["\n", ";"]), st.sampled_from([2, 5, 50])),
    ),
    min_size=1,
    max_size=7,
)


async def outcome(turn: str, items: list[Any], *, speculate: bool) -> tuple[list[Any], int]:
    """The values of all gens with the turn's text, and the number of calls."""
    async with session(turn, continues=True, speculate=speculate) as (flow, server):
        async with flow.state() as s:
            s += af.user("Go.")
            parts: list[Any] = []
            for number, item in enumerate(items):
                if isinstance(item, str):
                    parts.append(item)
                else:
                    stop, most = item
                    parts.append(af.gen(f"v{number}", stop=stop, max_tokens=most, temperature=0.0))
            s += af.assistant(*parts)
            await s
            values: list[Any] = [await variable for variable in s.variables]
            values.append((await s.messages())[-1]["content"])
        return values, len(server.received)


@given(turn=st.lists(PIECES, max_size=12).map("".join), items=ITEMS)
async def test_speculation_changes_no_value(turn: str, items: list[Any]) -> None:
    expected, num_calls = await outcome(turn, items, speculate=False)
    values, num_speculated = await outcome(turn, items, speculate=True)
    assert values == expected
    assert num_speculated <= num_calls
