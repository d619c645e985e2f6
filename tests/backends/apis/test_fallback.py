"""Several endpoints answer in the place of one another: the first one that can, and never two in one text."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import Any

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.apis import anthropic_answers, openai_answers
from support.apis.circuit_reference import CircuitReference, Event
from support.apis.fake_server import (
    Answer,
    AnyAnswer,
    Close,
    FakeServer,
    Hold,
    RawAnswer,
    Received,
    Reset,
    Script,
    fake_server,
)
from support.examples import examples

import agentflow as af
from agentflow.backends.apis.http import transport
from agentflow.errors import (
    AgentflowError,
    BadArgument,
    BudgetExceeded,
    EngineFailed,
    NotAuthorized,
    NotSupported,
    Overloaded,
    RequestRefused,
    RunFailed,
    ServerLost,
    ServerUnreachable,
)
from agentflow.runtime import circuit
from agentflow.runtime.circuit import Circuit

pytestmark = pytest.mark.anyio


def said(text: str) -> AnyAnswer:
    return openai_answers.text_stream(text)


def openai(server: FakeServer, model: str = "m", **options: Any) -> af.OpenAI:
    """A backend that would repeat failed requests, but for the fallback."""
    return af.OpenAI(model, base_url=f"{server.url}/v1", api_key="k", **options)


def anthropic(server: FakeServer, **options: Any) -> af.Anthropic:
    return af.Anthropic("claude-opus-4-5", base_url=server.url, api_key="k", **options)


@asynccontextmanager
async def opened(
    *scripts: Script, clock: Clock | None = None, **options: Any
) -> AsyncIterator[tuple[Any, ...]]:
    """A session whose models ``m0``, ``m1``, … answer in the place of one another, with their servers."""
    async with AsyncExitStack() as stack:
        servers = [await stack.enter_async_context(fake_server(script)) for script in scripts]
        backends = [openai(server, f"m{number}", **options) for number, server in enumerate(servers)]
        backend = af.Fallback(*backends) if clock is None else clock.of(*backends)
        flow = await stack.enter_async_context(af.session(backend=backend))
        yield flow, *servers


async def asked(flow: af.Session, question: str = "Hi", **params: Any) -> str:
    async with flow.state() as s:
        s += af.user(question) + af.assistant(af.gen("x", **params))
        return await s["x"]


CURABLE: dict[str, AnyAnswer] = {
    "500": Answer(b"{}", 500),
    "502 of a proxy": Answer(b"<html>", 502, content_type="text/html"),
    "503": Answer(b"{}", 503),
    "529": Answer(b"{}", 529),
    "429 with a long wait": Answer(b"{}", 429, {"retry-after": "30"}),
    "no quota": Answer(b'{"error": {"code": "insufficient_quota"}}', 429),
    "no credit": Answer(b"{}", 402),
    "401": Answer(b"{}", 401),
    "a model that is gone": Answer(b'{"error": {"code": "model_not_found"}}', 404),
    "a page": Answer(b"<html>", content_type="text/html"),
    "closed": RawAnswer([]),
    "reset": RawAnswer([Reset()]),
    "cut before the text": openai_answers.stream(openai_answers.text_chunks(), Close()),
    "an error before the text": Answer(
        [b'data: {"error": {"type": "overloaded_error"}}\n\n'], content_type="text/event-stream"
    ),
}


@pytest.mark.parametrize("name", CURABLE)
async def test_the_next_endpoint_answers_without_a_second_attempt(name: str) -> None:
    async with opened([CURABLE[name]], [said("Hello")]) as (flow, first, second), flow.state() as s:
        s += af.user("Hi") + af.assistant(af.gen("x"))
        assert await s["x"] == "Hello"
        assert (len(first.received), len(second.received)) == (1, 1)
        assert second.last.json["messages"] == [{"role": "user", "content": "Hi"}]


async def test_an_address_without_a_server() -> None:
    async with fake_server([said("Hello")]) as server:
        gone = af.OpenAI("gone", base_url="http://127.0.0.1:9/v1", api_key="k")
        async with af.session(backend=gone, fallback=[openai(server)]) as flow:
            assert await asked(flow) == "Hello"


@pytest.mark.on_trio
async def test_a_silent_endpoint_is_left_after_its_time() -> None:
    async with fake_server([RawAnswer([Hold()])]) as first, fake_server([said("Hello")]) as second:
        backends = openai(first, timeout_s=0.05), openai(second)
        async with af.session(backend=af.Fallback(*backends)) as flow:
            assert await asked(flow) == "Hello"
            await first.wait_until_gone()


REFUSED: dict[str, tuple[AnyAnswer, type[AgentflowError]]] = {
    "a parameter": (Answer(b'{"error": {"param": "top_p", "message": "no"}}', 400), RequestRefused),
    "a filter": (Answer(b'{"error": {"code": "content_filter"}}', 400), RequestRefused),
    "a filtered answer": (
        openai_answers.stream(openai_answers.chunk(finish_reason="content_filter")),
        RequestRefused,
    ),
    "the length": (Answer(b'{"error": {"code": "context_length_exceeded"}}', 400), RequestRefused),
}


@pytest.mark.parametrize("name", REFUSED)
async def test_a_request_that_is_refused_is_not_sent_elsewhere(name: str) -> None:
    answer, kind = REFUSED[name]
    async with opened([answer], [said("Hello")]) as (flow, _, second):
        with pytest.raises(kind):
            await asked(flow)
        assert second.received == []


@pytest.mark.on_trio
@pytest.mark.parametrize("end", [Close(), Reset()])
async def test_after_the_first_visible_token_a_stream_fails(end: Any) -> None:
    cut = openai_answers.stream(openai_answers.text_chunks("One ", "two"), end)
    async with opened([cut], [said("Hello")]) as (flow, _, second), flow.state() as s:
        s += af.user("Hi") + af.assistant(af.gen("x"))
        await s["x"].settled()
        assert s["x"].text in ("One ", "One two")
        with pytest.raises(ServerLost):
            await s["x"]
        assert second.received == []


@pytest.mark.on_trio
async def test_reasoning_that_is_streamed_is_visible() -> None:
    cut = openai_answers.stream(openai_answers.reasoning_chunks("Hm"), Close())
    script = [cut, said("Hello")]
    async with fake_server(script) as first, fake_server([said("Hello")]) as second:
        backends = [
            af.OpenAICompatible(f"{server.url}/v1", "m", flavour="vllm", max_retries=0)
            for server in (first, second)
        ]
        async with af.session(backend=af.Fallback(*backends)) as flow:
            with pytest.raises(ServerLost):
                await asked(flow, stream_reasoning=True)
            assert second.received == []


@pytest.mark.on_trio
async def test_an_answer_that_is_held_is_not_visible() -> None:
    cut = openai_answers.stream(openai_answers.text_chunks("a"), Close())
    async with opened([cut], [said("b")], on_unsupported="retry") as (flow, first, _):
        assert await asked(flow, regex="a|b") == "b"
        assert len(first.received) == 1


async def test_a_select_of_another_endpoint() -> None:
    async with (
        opened([Answer(b"{}", 500)], [said('{"value": "no"}')], on_unsupported="retry") as (flow, *_),
        flow.state() as s,
    ):
        s += af.user("Hi") + af.assistant(af.select("x", ["yes, and there is no doubt", "no"]))
        assert await s["x"] == "no"
        assert s["x"].model == "m1"


async def test_an_endpoint_whose_model_calls_a_tool_by_mistake_works() -> None:
    mistake = openai_answers.call_stream(("c1", "weather", ["{}"]))
    mistakes = [mistake] * (circuit.MAX_FAILURES + 1)
    async with opened([*mistakes, said("Hello")], [said("elsewhere")]) as (flow, *_):
        for _ in mistakes:
            with pytest.raises(RunFailed):
                await asked(flow)
        assert await asked(flow) == "Hello"
        first = (await flow.stats()).endpoints[0]
        assert (first.circuit, first.failed) == ("closed", 0)


async def test_all_errors_are_told_if_no_endpoint_answers() -> None:
    async with opened([CURABLE["401"]], [CURABLE["503"]], max_retries=0) as (flow, *_):
        with pytest.raises(Overloaded) as raised:  # which a map tries again
            await asked(flow)
        assert all(name in str(raised.value) for name in ("m0", "m1"))
        assert raised.value.__cause__ is None


async def test_a_lone_error_is_raised_unchanged() -> None:
    async with fake_server([Answer(b"{}", 503, {"retry-after": "90"})]) as server:
        backend = openai(server, max_retries=0)
        async with af.session(backend=backend, fallback=["http://127.0.0.1:9/v1"]) as flow:
            with pytest.raises(Overloaded) as raised:
                await asked(flow)
            assert (raised.value.retry_after_s, raised.value.__cause__) == (90.0, None)


async def test_the_last_endpoint_has_its_retries() -> None:
    script = [CURABLE["500"], CURABLE["closed"], said("Hello")]
    async with opened([CURABLE["500"]], script) as (flow, first, second):
        assert await asked(flow) == "Hello"
        assert (len(first.received), len(second.received)) == (1, 3)


class Clock:
    """The time of the circuits of backends, whose pauses have no jitter."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def of(self, *backends: af.OpenAI) -> af.Fallback:
        for backend in backends:
            watched = Circuit(lambda: self.now_s, lambda: 1.0)
            backend._settings = replace(backend._settings, circuit=watched)
        return af.Fallback(*backends)


async def test_an_endpoint_that_fails_is_left_out_and_tried_again() -> None:
    clock = Clock()
    state = {"is_up": False}

    def first_script(_: Received) -> AnyAnswer:
        return said("first") if state["is_up"] else Answer(b"{}", 500)

    async with opened(first_script, lambda _: said("second"), clock=clock) as (flow, first, _):
        for _ in range(6):
            assert await asked(flow) == "second"
        assert len(first.received) == circuit.MAX_FAILURES
        clock.now_s += circuit.FIRST_PAUSE_S
        assert await asked(flow) == "second"  # the trial fails
        assert len(first.received) == circuit.MAX_FAILURES + 1
        clock.now_s += circuit.FIRST_PAUSE_S
        assert await asked(flow) == "second"
        assert len(first.received) == circuit.MAX_FAILURES + 1
        state["is_up"] = True
        clock.now_s += 2 * circuit.FIRST_PAUSE_S
        assert await asked(flow) == "first"
        assert await asked(flow) == "first"


@pytest.mark.on_trio
async def test_one_request_tries_an_endpoint_again() -> None:
    clock = Clock()
    hold = Hold()
    served = 0

    def first_script(_: Received) -> AnyAnswer:
        nonlocal served
        served += 1
        return Answer(b"{}", 500) if served <= 3 else openai_answers.stream(hold, _whole("first"))

    async with opened(first_script, lambda _: said("second"), clock=clock) as (flow, first, _):
        for _ in range(3):
            await asked(flow)
        clock.now_s += circuit.FIRST_PAUSE_S
        async with flow.state() as s:
            s += af.user("Hi") + af.assistant(af.gen("x"))
            await hold.reached.wait()
            assert await asked(flow) == "second"
            hold.go_on()
            assert await s["x"] == "first"
        assert len(first.received) == 4


def _whole(text: str) -> list[Any]:
    return [*openai_answers.text_chunks(text), *openai_answers.ending()]


async def test_if_all_circuits_are_open_the_call_is_made() -> None:
    broken = [Answer(b"{}", 500)] * 3
    scripts = [*broken, said("Hello")], broken
    async with opened(*scripts, clock=Clock(), max_retries=0) as (flow, *_):
        for _ in range(3):
            with pytest.raises(EngineFailed):
                await asked(flow)
        assert [one.circuit for one in (await flow.stats()).endpoints] == ["open", "open"]
        assert await asked(flow) == "Hello"
        assert (await flow.stats()).endpoints[0].circuit == "closed"


OUTCOMES = st.lists(
    st.sampled_from([["failed"] * 3, ["failed"], ["cut", "failed"], ["cut"], ["answered"], ["refused"]]),
    min_size=20,
    max_size=20,
).map(lambda runs: [outcome for run in runs for outcome in run])
KINDS = {"failed": EngineFailed, "cut": ServerLost, "refused": RequestRefused}


def expected(circuits: list[CircuitReference], outcomes: list[list[str]]) -> tuple[int, str]:
    """Which endpoint ends a call, and how, by the definition of fallbacks and circuits. ``outcomes``: of the
    next requests to each endpoint."""
    untried = [*range(len(circuits))]
    ready = [one for one in untried if circuits[one].is_ready()]
    chosen = ready[0] if ready else min(untried, key=lambda one: circuits[one].left_s())
    while True:
        untried.remove(chosen)
        outcome, reference = outcomes[chosen].pop(0), circuits[chosen]
        number = sum(len(period.events) for period in reference.periods)
        kinds = {"answered": ["begun", "succeeded"], "cut": ["begun", "failed"], "refused": ["succeeded"]}
        for kind in ("begin", *kinds.get(outcome, [outcome]), "left"):
            reference.add(Event(kind, number, reference.now_s))
        ready = [one for one in untried if circuits[one].is_ready()]
        if outcome != "failed" or not ready:
            return chosen, outcome
        chosen = ready[0]


def answer_of(endpoint: int, outcome: str) -> AnyAnswer:
    match outcome:
        case "answered":
            return said(f"by {endpoint}")
        case "cut":
            return openai_answers.stream(openai_answers.text_chunks(f"by {endpoint}"), Close())
        case "refused":
            return Answer(b"{}", 400)
        case _:
            return Answer(b"{}", 500)


@given(
    st.lists(st.sampled_from([0.0, 0.0, 1.0, 5.0, 60.0]), min_size=6, max_size=16),
    OUTCOMES,
    OUTCOMES,
)
@examples(80)
def test_calls_end_as_the_definition_says(waits: list[float], first: list[str], second: list[str]) -> None:
    """``waits``: the seconds before each call."""
    circuits = [CircuitReference(), CircuitReference()]
    outcomes = [[*first], [*second]]
    clock = Clock()

    async def run() -> None:
        scripts = [
            [answer_of(endpoint, outcome) for outcome in listed]
            for endpoint, listed in enumerate((first, second))
        ]
        async with opened(*scripts, clock=clock, max_retries=0) as (flow, *_):
            for wait_s in waits:
                clock.now_s += wait_s
                for reference in circuits:
                    reference.now_s = clock.now_s
                endpoint, outcome = expected(circuits, outcomes)
                async with flow.state() as s:
                    s += af.user("Hi") + af.assistant(af.gen("x"))
                    await s["x"].settled()
                    if outcome == "answered":
                        assert (await s["x"], s["x"].model) == (f"by {endpoint}", f"m{endpoint}")
                    else:
                        with pytest.raises((KINDS[outcome], Overloaded)):
                            await s["x"]
                    if outcome == "cut":
                        assert s["x"].text == f"by {endpoint}"
                shown = [one.circuit for one in (await flow.stats()).endpoints]
                assert shown == [reference.status() for reference in circuits]

    anyio.run(run)


async def test_sessions_of_one_backend_share_their_circuits() -> None:
    async with fake_server(lambda _: Answer(b"{}", 500)) as first, fake_server(lambda _: said("b")) as second:
        backend = af.Fallback(openai(first), openai(second))
        for _ in range(5):
            async with af.session(backend=backend) as flow:
                assert await asked(flow) == "b"
        assert len(first.received) == circuit.MAX_FAILURES


async def test_a_value_says_who_answered_and_who_did_not(tmp_path: Any) -> None:
    path = tmp_path / "run.jsonl"
    async with fake_server([CURABLE["503"], said("a")]) as first, fake_server([said("b")]) as second:
        backend = af.Fallback(openai(first, "m0"), openai(second, "m1"))

        async def ask(s: af.State) -> str:
            s += af.user("Hi") + af.assistant(af.gen("x"))
            await s["x"]
            return s["x"].model

        async with af.session(backend=backend, record=path) as flow:
            events = [event async for event in flow.stream(ask)]
            assert [event.model for event in events if isinstance(event, af.VariableDone)] == ["m1"]
            assert await flow.run(ask) == "m0"
            stats = await flow.stats()
        assert [(one.model, one.answered, one.failed) for one in stats.endpoints] == [
            ("m0", 1, 1),
            ("m1", 1, 0),
        ]
        assert stats.generated_tokens == 6
    values = [
        entry["received"] for entry in map(json.loads, path.read_text().splitlines()) if "received" in entry
    ]
    recorded = [value for value in values if value["event"] == "value"]
    assert [value["model"] for value in recorded] == ["m1", "m0"]
    assert [(one["model"], one["error"]["code"]) for one in recorded[0]["passed_over"]] == [
        ("m0", "overloaded")
    ]
    async with af.session(backend=af.Replay(path)) as flow:
        assert [await flow.run(ask) for _ in range(2)] == ["m1", "m0"]


async def test_a_model_without_a_fallback_is_named_too() -> None:
    async with (
        fake_server([said("a")]) as server,
        af.session(backend=openai(server)) as flow,
        flow.state() as s,
    ):
        s += af.user("Hi") + af.assistant(af.gen("x"))
        await s["x"]
        assert s["x"].model == "m"


async def test_endpoints_with_one_name_are_told_apart() -> None:
    async with (
        fake_server([CURABLE["500"]]) as first,
        fake_server([said("b")]) as second,
        af.session(backend=openai(first), fallback=[openai(second)]) as flow,
        flow.state() as s,
    ):
        s += af.user("Hi") + af.assistant(af.gen("x"))
        await s["x"]
        assert second.url in s["x"].model


async def test_another_vendors_model_reads_the_same_conversation() -> None:
    thinking = anthropic_answers.stream(
        anthropic_answers.beginning(),
        anthropic_answers.thinking_block("Hm"),
        anthropic_answers.text_block("One", index=1),
        anthropic_answers.ending(),
    )
    async with (
        fake_server([thinking, CURABLE["503"], anthropic_answers.text_stream("Four")]) as first,
        fake_server([said("Two"), said("Three")]) as second,
    ):
        backend = af.Fallback(anthropic(first, reasoning=True), openai(second))
        async with af.session(backend=backend) as flow, flow.state() as s:
            for name in ("x", "y", "z"):
                s += af.user("Go on") + af.assistant(af.gen(name))
                await s[name]
            assert [s[name].model for name in ("x", "y", "z")] == ["claude-opus-4-5", "m", "claude-opus-4-5"]
        sent = [{"role": "user", "content": "Go on"}, {"role": "assistant", "content": "One"}]
        assert second.received[0].json["messages"] == [*sent, sent[0]]
        first_kinds = [block["type"] for block in first.last.json["messages"][1]["content"]]
        assert first_kinds == ["thinking", "text"]  # its own reasoning is sent back
        assert first.last.json["messages"][3]["content"][0]["text"] == "Two"


async def test_another_endpoint_of_the_vendor_gets_no_reasoning_of_the_first() -> None:
    thinking = anthropic_answers.stream(
        anthropic_answers.beginning(),
        anthropic_answers.thinking_block("Hm"),
        anthropic_answers.text_block("One", index=1),
        anthropic_answers.ending(),
    )
    async with (
        fake_server([thinking, CURABLE["529"]]) as first,
        fake_server([anthropic_answers.text_stream("Two")]) as second,
    ):
        backends = [anthropic(server, reasoning=True) for server in (first, second)]
        async with af.session(backend=af.Fallback(*backends)) as flow, flow.state() as s:
            s += af.user("Go") + af.assistant(af.gen("x")) + af.user("On") + af.assistant(af.gen("y"))
            assert await s["y"] == "Two"
        kinds = [block["type"] for block in second.last.json["messages"][1]["content"]]
        assert kinds == ["text"]


@pytest.mark.on_trio
async def test_the_prefix_of_forks_is_warmed_where_they_ask() -> None:
    async with AsyncExitStack() as stack:
        servers = [
            await stack.enter_async_context(fake_server(script))
            for script in ([RawAnswer([Hold()])] * 9, [said("ok")] * 9)
        ]
        silent, other = [openai(server, "gpt-4o") for server in servers]
        flow = await stack.enter_async_context(af.session(backend=af.Fallback(silent, other)))
        for _ in range(circuit.MAX_FAILURES):
            silent._settings.circuit.attempt().failed()
        async with flow.state() as s:
            s += af.user("Plants live on light. " * 400)
            s.hint(forks=2)
            branches = s.fork(2)
            for number, branch in enumerate(branches):
                branch += af.user(f"Question {number}") + af.assistant(af.gen("x"))
            with anyio.fail_after(20):
                assert [await branch["x"] for branch in branches] == ["ok"] * 2
        assert servers[0].received == []


async def test_branches_of_a_fork_share_the_messages() -> None:
    async with opened([said("a"), *[CURABLE["500"]] * 3], lambda _: said("b")) as (flow, first, second):
        async with flow.state() as s:
            s += af.system("Be brief.") + af.user("Hi") + af.assistant(af.gen("x"))
            branches = s.fork(3)
            for branch in branches:
                branch += af.user("Go on") + af.assistant(af.gen("y"))
            assert [await branch["y"] for branch in branches] == ["b"] * 3
        bodies = [request.json["messages"] for request in second.received]
        assert all(body == first.received[-1].json["messages"] for body in bodies)


async def test_tools_and_replies_go_on_elsewhere() -> None:
    @af.tool
    async def weather(place: str) -> str:
        """The weather."""
        return f"Sun in {place}"

    call = openai_answers.stream(
        openai_answers.call_chunks(("c1", "weather", ['{"place":"Ulm"}'])),
        openai_answers.ending("tool_calls"),
    )
    async with (
        fake_server([call, CURABLE["503"]]) as first,
        fake_server([said("Sunny")]) as second,
        af.session(backend=openai(first, "gpt-4o"), fallback=[openai(second, "gpt-4o")]) as flow,
        flow.state() as s,
    ):
        s += af.user("How is the weather in Ulm?")
        assert await af.act(s, tools=[weather]) == "Sunny"
        roles = [message["role"] for message in second.last.json["messages"]]
        assert roles == ["user", "assistant", "tool"]


@pytest.mark.on_trio
async def test_a_call_that_goes_on_is_made_elsewhere_before_it_is_visible() -> None:
    script = [CURABLE["500"]]
    async with opened(script, [said("Name: Ada\nJob: x")]) as (flow, _, second), flow.state() as s:
        s += af.user("Who?")
        s += af.assistant("Name: ", af.gen("name", stop="\n"), "\nJob: ", af.gen("job", stop="\n"))
        assert (await s["name"], await s["job"]) == ("Ada", "x")
        assert len(second.received) == 1
        assert (s["name"].model, s["job"].model) == ("m1", "m1")


@pytest.mark.on_trio
async def test_later_values_of_a_lost_call_go_elsewhere() -> None:
    cut = openai_answers.stream(openai_answers.text_chunks("Name: Ada\nJob: "), Close())
    async with (
        fake_server([cut]) as first,
        fake_server([anthropic_answers.text_stream("x")]) as second,
    ):
        backend = af.Fallback(openai(first), anthropic(second))
        async with af.session(backend=backend) as flow, flow.state() as s:
            s += af.user("Who?")
            s += af.assistant("Name: ", af.gen("name", stop="\n"), "\nJob: ", af.gen("job", stop="\n"))
            assert (await s["name"], await s["job"]) == ("Ada", "x")
            assert s["job"].model == "claude-opus-4-5"


@pytest.mark.on_trio
async def test_one_endpoint_dies_in_the_middle_of_a_map() -> None:
    """Each result is of one endpoint alone, and all of the texts that endpoint gives."""
    served = 0

    def first_script(request: Received) -> AnyAnswer:
        nonlocal served
        served += 1
        asked_for = request.json["messages"][-1]["content"]
        if served > 20:
            return [RawAnswer([]), Answer(b"{}", 500), RawAnswer([Reset()])][served % 3]
        if served > 10 and served % 2:
            return openai_answers.stream(openai_answers.text_chunks(f"first: {asked_for[:1]}"), Close())
        return openai_answers.text_stream("first: ", asked_for)

    def second_script(request: Received) -> AnyAnswer:
        return openai_answers.text_stream("second: ", request.json["messages"][-1]["content"])

    async def ask(s: af.State, question: str) -> tuple[str, str, list[str]]:
        s += af.user(question) + af.assistant(af.gen("x"))
        deltas = [delta async for delta in s["x"]]
        return await s["x"], s["x"].model, deltas

    async with opened(first_script, second_script) as (flow, _, second):
        questions = [f"question {number}" for number in range(60)]
        results = await flow.map(ask, questions, on_error="return", concurrency=6)
        for question, result in zip(questions, results, strict=True):
            if isinstance(result, BaseException):
                assert "was cut" in str(result)  # visible text was lost
                continue
            text, model, deltas = result
            assert text == "".join(deltas) == f"{'first' if model == 'm0' else 'second'}: {question}"
        models = [result[1] for result in results if not isinstance(result, BaseException)]
        assert {"m0", "m1"} == set(models)
        assert sum(isinstance(result, BaseException) for result in results) <= 6
        stats = await flow.stats()
        assert stats.running == 0
        assert stats.endpoints[1].failed == 0
    assert second.num_gone == 0


@pytest.mark.on_trio
async def test_nothing_is_left_behind_after_a_cancellation() -> None:
    hold = Hold()
    async with opened([CURABLE["503"], said("a")], [openai_answers.stream(hold)]) as (flow, first, second):
        async with flow.state() as s:
            s += af.user("Hi") + af.assistant(af.gen("x"))
            await hold.reached.wait()
            s.cancel()
            await second.wait_until_gone()
        assert await asked(flow) == "a"
        assert (await flow.stats()).running == 0
        assert first.num_connections == 1  # it went back to the pool


@pytest.mark.on_trio
async def test_a_deadline_holds_over_all_endpoints() -> None:
    hold = Hold()
    async with opened([CURABLE["503"]], [openai_answers.stream(hold)]) as (flow, *_), flow.state() as s:
        s += af.user("Hi")
        s.limit(deadline_s=0.3)
        s += af.assistant(af.gen("x"))
        with pytest.raises(af.DeadlineExceeded):
            await s["x"]


async def test_the_cap_of_the_costs_holds_over_all_endpoints() -> None:
    prices = {"m0": af.Price(input=0, output=0), "m1": af.Price(input=100, output=100)}
    async with fake_server([CURABLE["500"], said("a")]) as first, fake_server([said("b")]) as second:
        backend = af.Fallback(openai(first, "m0"), openai(second, "m1"))
        async with af.session(backend=backend, prices=prices, max_cost=0.001) as flow:
            with pytest.raises(BudgetExceeded):
                await asked(flow, max_tokens=100)
            assert second.received == []
            assert await asked(flow, max_tokens=100) == "a"


async def test_a_feature_that_one_candidate_lacks_is_refused_with_its_name() -> None:
    sent: list[Received] = []

    def script(request: Received) -> AnyAnswer:
        sent.append(request)
        return said("x")

    async with fake_server(script) as server:
        vllm = af.OpenAICompatible(f"{server.url}/v1", "qwen", flavour="vllm")
        async with af.session(backend=vllm, fallback=[openai(server, "gpt-4o")]) as flow:
            assert flow.capabilities.model == "qwen"
            assert [one.model for one in flow.capabilities.candidates] == ["qwen", "gpt-4o"]
            assert "regex" not in flow.capabilities.constraints
            async with flow.state() as s:
                s += af.user("Hi")
                for wrong, param in (({"top_k": 5}, "top_k"), ({"regex": "a|b"}, None)):
                    with pytest.raises(NotSupported) as raised:
                        s += af.assistant(af.gen("x", **wrong))
                    assert raised.value.param == param
                    assert "gpt-4o" in str(raised.value)
    assert sent == []


@pytest.mark.on_trio
async def test_a_server_that_cannot_be_asked_for_its_model_is_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(transport, "_pause", lambda pause_s: anyio.lowlevel.checkpoint())
    async with fake_server([said("a")]) as server:
        async with af.session(backend=openai(server), fallback=["http://127.0.0.1:9/v1"]) as flow:
            assert await asked(flow) == "a"
            assert [one.model for one in flow.capabilities.candidates] == ["m"]
        with pytest.raises(ServerUnreachable):
            async with af.session("http://127.0.0.1:9/v1", fallback=["http://127.0.0.1:9/v1"]):
                raise AssertionError


async def test_several_models_each_with_a_fallback() -> None:
    async with fake_server([CURABLE["500"], said("a")]) as first, fake_server([said("b")]) as second:
        models: dict[str, Any] = {"small": af.Fallback(openai(first), openai(second)), "large": openai(first)}
        async with af.session(models=models) as flow:
            assert await asked(flow) == "b"
            async with flow.state(model="large") as s:
                s += af.user("Hi") + af.assistant(af.gen("x"))
                assert await s["x"] == "a"


async def test_addresses_and_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    async with fake_server([CURABLE["500"]]) as first, fake_server([said("b")]) as second:
        monkeypatch.setenv("OPENAI_API_KEY", "of openai")
        monkeypatch.setenv("OPENAI_BASE_URL", f"{second.url}/v1")
        monkeypatch.setenv("ANTHROPIC_BASE_URL", first.url)
        monkeypatch.delenv("ANTHROPIC_API_KEY", raising=False)
        with pytest.raises(NotAuthorized):
            af.session("openai:gpt-4o", fallback=["anthropic:claude-opus-4-5"])
        options: dict[str, Any] = {"api_key": "mine", "fallback": ["openai:gpt-4o"]}
        async with af.session("anthropic:claude-opus-4-5", **options) as flow:
            assert await asked(flow) == "b"
        assert first.last.headers["authorization"] == "Bearer mine"
        assert second.last.headers["authorization"] == "Bearer of openai"


def test_a_fallback_of_a_fallback_is_one() -> None:
    a, b, c = (af.OpenAI(name, api_key="k") for name in "abc")
    assert repr(af.Fallback(af.Fallback(a, b), c)) == repr(af.Fallback(a, b, c))


@pytest.mark.parametrize(
    "make",
    [
        lambda: af.Fallback(),
        lambda: af.Fallback("openai:gpt-4o"),
        lambda: af.Fallback("openai:gpt-4o", "ws://127.0.0.1:8410"),
        lambda: af.Fallback("openai:gpt-4o", "gpt-4o"),
        lambda: af.Fallback("openai:gpt-4o", 5),  # type: ignore[arg-type]
        lambda: af.Fallback("openai:gpt-4o", af.Scripted("a")),
        lambda: af.session("openai:gpt-4o", fallback=[]),
        lambda: af.session("openai:gpt-4o", fallback="openai:gpt-4o"),
        lambda: af.session(fallback=["openai:gpt-4o"]),
        lambda: af.session(backend=af.Scripted("a"), fallback=["openai:gpt-4o"]),
        lambda: af.session(models={"a": "openai:gpt-4o"}, fallback=["openai:gpt-4o"]),
    ],
)
def test_models_that_cannot_replace_another_are_refused(
    make: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "k")
    monkeypatch.delenv("AGENTFLOW_URL", raising=False)
    with pytest.raises(BadArgument) as raised:
        make()
    assert raised.value.param == "fallback"


@pytest.mark.on_trio
async def test_no_task_waits_after_many_calls() -> None:
    async with opened(lambda _: Answer(b"{}", 500), lambda _: said("b")) as (flow, *_):
        async with anyio.create_task_group() as group:
            for _ in range(20):
                group.start_soon(asked, flow)
        assert (await flow.stats()).running == 0
