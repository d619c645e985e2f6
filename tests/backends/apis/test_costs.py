"""The costs of calls to APIs, and the cap of a session."""

from __future__ import annotations

from typing import Any

import pytest
from support.apis import openai_answers as answers
from support.apis.api_sessions import ApiSession, openai_session
from support.apis.fake_server import AnyAnswer, Forever, Hold, Received, Script, fake_server

import agentflow as af
from agentflow.errors import BadArgument, BudgetExceeded, NotSupported

pytestmark = pytest.mark.anyio

PRICE = af.Price(input=2.0, output=10.0, cached=0.5)
USAGE = answers.usage(1_000_000, 100_000, cached=400_000)
COST = 0.6 * 2.0 + 0.4 * 0.5 + 0.1 * 10.0


def answer(request: Received) -> AnyAnswer:
    chunks = [*answers.text_chunks("Name: Ada\nJob: x"), *answers.ending()]
    return answers.stream([*chunks, answers.chunk(usage=USAGE)])


def model(url: str, name: str = "m") -> af.OpenAI:
    return af.OpenAI(name, base_url=f"{url}/v1", api_key="k", max_retries=0)


def opened(script: Script, **session: Any) -> ApiSession:
    return openai_session(script, "m", session={"prices": {"m": PRICE}, **session})


async def test_a_value_a_run_and_the_session_have_their_costs() -> None:
    async def ask(s: af.State, question: str) -> float:
        s += af.user(question) + af.assistant(af.gen("x"))
        await s["x"]
        return s["x"].usage.cost

    async with opened(answer) as (flow, _):
        assert await flow.run(ask, "Hi") == pytest.approx(COST)
        assert flow.runs[-1].usage.cost == pytest.approx(COST)
        assert await flow.map(ask, ["a", "b"]) == [pytest.approx(COST)] * 2
        assert (await flow.stats()).cost == pytest.approx(3 * COST)


async def test_a_call_for_several_values_is_paid_once() -> None:
    async with opened(answer) as (flow, server), flow.state() as s:
        s += af.user("Who?")
        s += af.assistant("Name: ", af.gen("name", stop="\n"), "\nJob: ", af.gen("job", stop="\n"))
        await s
        assert s["name"].usage.cost + s["job"].usage.cost == pytest.approx(COST)
        assert len(server.received) == 1


async def test_a_call_that_could_exceed_the_cap_is_not_sent() -> None:
    async with opened(answer, max_cost=0.001) as (flow, server), flow.state() as s:
        s += af.user("Hi")
        branch = s.copy()
        branch += af.gen("x", max_tokens=1_000)
        with pytest.raises(BudgetExceeded) as raised:
            await branch["x"]
        assert raised.value.param == "max_cost"
        assert server.received == []
        s += af.gen("x", max_tokens=10)
        await s["x"]


async def test_sessions_of_one_backend_have_separate_caps() -> None:
    async with fake_server(answer) as server:
        for backend in (model(server.url), af.Fallback(model(server.url), model(server.url))):
            capped = af.session(backend=backend, prices={"m": PRICE}, max_cost=0.0)
            free = af.session(backend=backend)
            async with capped as flow, flow.state() as s:
                s += af.user("Hi") + af.assistant(af.gen("x"))
                with pytest.raises(BudgetExceeded):
                    await s["x"]
            async with free as flow, flow.state() as s:
                s += af.user("Hi") + af.assistant(af.gen("x"))
                assert await s["x"]


async def test_concurrent_calls_share_the_cap() -> None:
    hold = Hold()

    def held(request: Received) -> AnyAnswer:
        chunks = [*answers.text_chunks("Hi"), *answers.ending()]
        return answers.stream(hold, chunks, answers.chunk(usage=answers.usage(10, 1)))

    async with fake_server(held) as server:
        backends: Any = {"one": model(server.url), "other": model(server.url)}
        options: dict[str, Any] = {"prices": {"m": PRICE}, "max_cost": 0.15}
        async with af.session(models=backends, **options) as flow:
            states = [flow.state(model=name) for name in ("one", "other", "one")]
            for state in states[:2]:
                state += af.user("Hi") + af.gen("x", max_tokens=10_000)  # at most $0.1
            await server.wait_for_requests(1)
            await states[0].settled() if states[0]["x"].is_done else await states[1].settled()
            hold.go_on()
            for state in states[:2]:
                await state.settled()
            failed = [state["x"] for state in states[:2] if not state["x"].has_value]
            assert len(failed) == 1
            with pytest.raises(BudgetExceeded):
                await failed[0]
            states[2] += af.user("Hi") + af.gen("x", max_tokens=10_000)
            assert await states[2]["x"] == "Hi"


async def test_a_refused_call_costs_nothing() -> None:
    async with (
        opened([answers.WRONG_KEY, answers.text_stream("Hi")], max_cost=0.15) as (flow, _),
        flow.state() as s,
    ):
        s += af.user("Hi")
        branch = s.copy()
        branch += af.gen("x", max_tokens=10_000)
        with pytest.raises(af.errors.NotAuthorized):
            await branch["x"]
        s += af.gen("x", max_tokens=10_000)
        assert await s["x"] == "Hi"


async def test_an_answer_that_is_lost_before_it_is_shown_may_cost_the_most() -> None:
    cut = answers.stream(answers.text_chunks("a"), done=False)
    session = {"prices": {"m": PRICE}, "max_cost": 0.15}
    opening = openai_session([cut, answers.text_stream("a")], "m", session=session, on_unsupported="retry")
    async with opening as (flow, _), flow.state() as s:
        s += af.user("Hi")
        branch = s.copy()
        branch += af.gen("x", regex="a|b", max_tokens=10_000)
        with pytest.raises(af.errors.ServerLost):
            await branch["x"]
        s += af.gen("x", max_tokens=10_000)
        with pytest.raises(BudgetExceeded):
            await s["x"]


@pytest.mark.parametrize(("cap", "is_answered"), [(0.15, False), (0.24, True)])
async def test_f37_a_lost_answer_that_is_asked_for_again_may_cost_the_most_too(
    cap: float, is_answered: bool
) -> None:
    cut = answers.stream(answers.text_chunks("a"), done=False)
    script = [cut, answers.text_stream("a"), answers.text_stream("b")]
    session, given = {"prices": {"m": PRICE}, "max_cost": cap}, {"max_retries": 1, "on_unsupported": "retry"}
    async with openai_session(script, "m", session=session, **given) as (flow, server), flow.state() as s:
        s += af.user("Hi")
        branch = s.copy()
        branch += af.gen("x", regex="a|b", max_tokens=10_000)  # at most $0.1
        if is_answered:
            assert await branch["x"] == "a"
            s += af.gen("x", max_tokens=14_500)
            with pytest.raises(BudgetExceeded):
                await s["x"]
        else:
            with pytest.raises(BudgetExceeded):
                await branch["x"]
        assert len(server.received) == 1 + is_answered


async def test_a_call_that_is_left_costs_about_what_was_written() -> None:
    hold = Hold()
    left = answers.stream(answers.text_chunks("a", "b"), hold)
    async with opened([left, answers.text_stream("a")], max_cost=0.15) as (flow, server), flow.state() as s:
        s += af.user("Hi")
        branch = s.copy()
        branch += af.gen("x", max_tokens=10_000)  # at most $0.1
        async for _ in branch["x"]:
            break
        branch.cancel()
        await server.wait_until_gone()
        s += af.gen("x", max_tokens=10_000)
        assert await s["x"] == "a"
        assert 0 < (await flow.stats()).cost < 0.01


async def test_a_cap_needs_the_price_of_the_model() -> None:
    unknown = af.OpenAICompatible("http://127.0.0.1:9/v1", "no-such-model", flavour="generic")
    with pytest.raises(NotSupported) as raised:
        async with af.session(backend=unknown, max_cost=1.0):
            raise AssertionError
    assert raised.value.param == "max_cost"
    async with af.session(backend=af.OpenAI("gpt-4o", api_key="k", base_url=None), max_cost=1.0) as flow:
        assert flow.capabilities.model == "gpt-4o"


@pytest.mark.parametrize(
    "options",
    [
        {"max_cost": -1.0},
        {"max_cost": "5"},
        {"prices": {"m": 3.0}},
        {"prices": {"m": af.Price(input=-1, output=1)}},
        {"prices": {"m": af.Price(input=float("inf"), output=1)}},
        {"prices": {"m": af.Price(input=1, output=1, longer=((9, PRICE), (5, PRICE)))}},
        {"prices": {"m": af.Price(input=1, output=1, longer=(("5", PRICE),))}},  # type: ignore[arg-type]
        {"prices": {"m": af.Price(input=1, output=1, longer=(5,))}},  # type: ignore[arg-type]
        {"prices": [PRICE]},
    ],
)
def test_a_cap_or_price_that_is_none_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(BadArgument) as raised:
        af.session(backend=model("http://127.0.0.1:9"), **options)
    assert raised.value.param in (*options, "input", "longer")


def test_a_session_without_an_api_has_no_costs() -> None:
    for backend in (af.Scripted("x"), None):
        with pytest.raises(BadArgument) as raised:
            af.session(backend=backend, max_cost=1.0)
        assert raised.value.param == "max_cost"


async def test_f37_a_limit_of_tokens_ends_answers_while_they_are_written() -> None:
    def endless(request: Received) -> AnyAnswer:
        _, word = answers.text_chunks("another ")
        return answers.stream(Forever(answers.event(word)))

    async with opened(endless) as (flow, _), flow.state() as s:
        s += af.user("Hi")
        s.limit(output_tokens=20)
        branches = s.fork(8)
        for branch in branches:
            branch += af.assistant(af.gen("x"))
        for branch in branches:
            with pytest.raises(BudgetExceeded):
                await branch["x"]


@pytest.mark.parametrize("constraint", [{}, {"regex": "a+"}])
async def test_f37_an_answer_that_is_lost_and_asked_for_again_counts_once_against_a_limit(
    constraint: dict[str, str],
) -> None:
    """Nothing of it was visible: reasoning that is not streamed, or an answer that is checked first."""
    words = ["aaaaaaaa"] * 12
    beginning = answers.text_chunks(*words) if constraint else answers.reasoning_chunks(*words)
    usage = answers.chunk(usage=answers.usage(5, 13))
    whole = answers.stream(beginning, answers.text_chunks("a"), answers.ending(), usage)
    options: dict[str, Any] = {"max_retries": 2, "on_unsupported": "retry"}
    script = [answers.stream(beginning, done=False), whole]
    async with openai_session(script, "m", **options) as (flow, _), flow.state() as s:
        s.limit(output_tokens=20)
        s += af.user("Hi") + af.assistant(af.gen("x", **constraint))
        await s["x"]
        assert s["x"].usage.output_tokens == 13
