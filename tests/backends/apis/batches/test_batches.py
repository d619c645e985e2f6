"""Maps whose generations run in batches of a vendor."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, get_args

import anyio
import anyio.lowlevel
import pytest
from openai.types import Batch, BatchError
from support.apis import openai_answers
from support.apis.batch_sessions import MODELS, VENDORS, ask, backend_at, compare, session_on
from support.apis.batch_vendors import FakeVendor, OpenAIVendor
from support.apis.fake_server import Answer, AnyAnswer, Close, Hold, RawAnswer, Received, fake_server
from support.fake_engine import FakeEngine
from support.programs import ask_twice

import agentflow as af
from agentflow.backends.apis.batches.anthropic_batches import AnthropicBatches
from agentflow.backends.apis.batches.openai_batches import OpenAIBatches
from agentflow.backends.apis.http.file_slots import has_slots
from agentflow.errors import DataDependent, NotSupported, ReplayDiffers, RequestRefused
from agentflow.language.batch.map import ProgramMap, Tally
from agentflow.language.batch.progress import MapProgress
from agentflow.protocol.batches import BatchCounts

pytestmark = pytest.mark.anyio


async def test_all_inputs_are_one_batch(vendor: FakeVendor) -> None:
    questions = [f"Question {number}?" for number in range(20)]
    async with session_on(vendor) as place:
        plain = await place.flow.map(ask, questions)
        assert vendor.num_batches == 0
        assert await place.flow.map(ask, questions, batch=True) == plain
        assert sorted(vendor.prompts[0]) == sorted(questions)
        assert vendor.num_batches == 1


@pytest.mark.parametrize(("program", "depth"), [(ask_twice, 2), (compare, 2)], ids=["turns", "fork"])
async def test_each_stage_is_one_batch(vendor: FakeVendor, program: Any, depth: int) -> None:
    questions = [f"Question {number}?" for number in range(5)]
    async with session_on(vendor) as place:
        plain = await place.flow.map(program, questions)
        assert await place.flow.map(program, questions, batch=True) == plain
        assert vendor.num_batches == depth


async def test_typed_values_and_choices(vendor: FakeVendor) -> None:
    @af.program
    async def typed(s: af.State, question: str) -> list[Any]:
        s += af.user(question) + af.assistant(af.gen("number", schema=int))
        s += af.user("Which?") + af.assistant(af.select("choice", ["red", "green", "blue"]))
        return [await s["number"], await s["choice"]]

    async with session_on(vendor) as place:
        plain = await place.flow.map(typed, ["a", "b"])
        assert await place.flow.map(typed, ["a", "b"], batch=True) == plain


@dataclass
class Answered:
    text: str
    question: str


@pytest.mark.parametrize(
    "form",
    [
        lambda value, question: f"Answer: {value}",
        lambda value, question: "A: " + value + f" to {question}",
        lambda value, question: Answered(value, question),
        lambda value, question: {f"<{value}>": [value.strip()]},
    ],
)
async def test_f37_values_in_texts_and_records_are_returned_and_kept(
    vendor: FakeVendor, form: Any, tmp_path: Path
) -> None:
    async def formed(s: af.State, question: str) -> Any:
        s += af.user(question) + af.assistant(af.gen("answer"))
        return form(await s["answer"], question)

    async with session_on(vendor) as place:
        wanted = await place.flow.map(formed, ["a", "b"])
        assert await place.flow.map(formed, ["a", "b"], batch=True) == wanted
        if not isinstance(wanted[0], Answered):  # whose type the file does not have
            file = tmp_path / "results.jsonl"
            for _ in range(2):
                assert await place.flow.map(formed, ["a", "b"], batch=True, resume=file) == wanted


async def test_a_graph_and_arguments_of_other_types(vendor: FakeVendor) -> None:
    @af.program
    async def repeat(s: af.State, question: str, times: int, suffix: str = "!") -> str:
        for _ in range(times):
            s += af.user(question + suffix) + af.assistant(af.gen("answer", max_tokens=8))
        return await s["answer"]

    async with session_on(vendor) as place:
        inputs = [("a", 1), ("b", 3), {"question": "c", "times": 2, "suffix": "?"}]
        plain = await place.flow.map(repeat, inputs)
        assert await place.flow.map(repeat, inputs, batch=True) == plain
        assert [len(batch) for batch in vendor.prompts] == [3, 2, 1]
        graph = repeat.trace(times=1, suffix=".")
        assert await place.flow.map(graph, ["a"], batch=True) == await place.flow.map(graph, ["a"])


PICTURE = b"\x89PNG\r\n\x1a\n of a batch"


@af.program
async def look(s: af.State, picture: bytes) -> str:
    s += af.user("What is this? ", af.image(picture)) + af.assistant(af.gen("answer"))
    return await s["answer"]


async def test_a_batch_has_the_images_of_its_requests(vendor: FakeVendor) -> None:
    pictures = [PICTURE + bytes([number]) * 1_000 for number in range(3)]
    async with session_on(vendor) as place:
        answers = await place.flow.map(look, pictures, batch=True)
        assert len(answers) == 3
    sent = b"".join([request.body for request in place.server.received])
    for picture in pictures:
        assert base64.b64encode(picture) in sent
    assert not has_slots(sent)


async def test_a_request_that_fits_into_no_batch_fails_alone(
    vendor: FakeVendor, monkeypatch: pytest.MonkeyPatch
) -> None:
    for kind in (OpenAIBatches, AnthropicBatches):
        monkeypatch.setattr(kind, "max_bytes", 20_000)
    pictures = [PICTURE, PICTURE + bytes(20_000), PICTURE + b"2"]
    async with session_on(vendor) as place:
        first, large, last = await place.flow.map(look, pictures, batch=True, on_error="return")
    assert isinstance(large, af.errors.BadArgument)
    assert isinstance(first, str)
    assert isinstance(last, str)


async def test_a_program_that_depends_on_values_is_refused_before_anything_is_sent(
    vendor: FakeVendor,
) -> None:
    async def peek(s: af.State, question: str) -> str:
        s += af.user(question) + af.assistant(af.gen("answer"))
        return "yes" if "w" in await s["answer"] else "no"

    async with session_on(vendor) as place:
        with pytest.raises(DataDependent) as raised:
            await place.flow.map(peek, ["a", "b"], batch=True, on_error="return")
        assert __file__.rpartition("/")[2] in str(raised.value)
        assert place.server.received == []


async def test_models_without_batches_are_refused() -> None:
    engine = FakeEngine()
    async with af.session(backend=engine) as flow:
        with pytest.raises(NotSupported) as raised:
            flow.map(ask, ["a"], batch=True)
        assert raised.value.param == "batch"
    backend = af.OpenAICompatible("http://127.0.0.1:9/v1", "m", flavour="vllm")
    async with af.session(backend=backend) as flow:
        with pytest.raises(NotSupported) as raised:
            flow.map(ask, ["a"], batch=True)
        assert raised.value.param == "batch"


@pytest.mark.parametrize("program", [ask, ask_twice, compare], ids=["one", "turns", "fork"])
async def test_a_recorded_map_is_replayed_without_a_vendor(
    vendor: FakeVendor, tmp_path: Path, program: Any
) -> None:
    async def work(flow: af.Session) -> list[Any]:
        first = await flow.run(program, "before")
        found = await flow.map(program, ["a", "b", "a"], batch=True)
        return [first, *found, await flow.run(program, "after")]

    path = tmp_path / "run.jsonl"
    async with session_on(vendor, record=path) as place:
        recorded = await work(place.flow)
        assert vendor.num_batches >= 1
    async with af.session(backend=af.Replay(path)) as flow:
        assert await work(flow) == recorded
    async with af.session(backend=af.Replay(path)) as flow:
        assert await flow.run(program, "before") == recorded[0]
        with pytest.raises(ReplayDiffers):
            await flow.map(program, ["a", "c"], batch=True)


async def test_failures_in_batches_are_replayed(vendor: FakeVendor, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"

    async def work(flow: af.Session) -> list[Any]:
        options: Any = {"batch": True, "on_error": "return"}
        found = await flow.map(ask_twice, ["a", "b", "c"], **options)
        return [type(one) if isinstance(one, Exception) else one for one in found]

    vendor.fate = lambda body: "refused" if "b" in str(body["messages"][0]) else "answered"
    async with session_on(vendor, record=path) as place:
        recorded = await work(place.flow)
    assert recorded[1] is RequestRefused
    async with af.session(backend=af.Replay(path)) as flow:
        assert await work(flow) == recorded


async def test_a_recorded_session_without_batches_is_refused(tmp_path: Path) -> None:
    backend = af.OpenAICompatible("http://127.0.0.1:1/v1", "m", flavour="generic")
    async with af.session(backend=backend, record=tmp_path / "run.jsonl") as flow:
        with pytest.raises(NotSupported) as raised:
            flow.map(ask, ["a"], batch=True)
    assert raised.value.param == "batch"


async def test_the_default_of_several_models(vendor: FakeVendor) -> None:
    async with fake_server(vendor) as server:
        models = {"one": backend_at(type(vendor), server.url), "other": af.Scripted("Hi.")}
        async with af.session(models=models) as flow:
            assert await flow.map(ask, ["a"], batch=True) == await flow.map(ask, ["a"])
            assert vendor.num_batches == 1


async def test_callables_that_are_no_functions(vendor: FakeVendor) -> None:
    class Asker:
        async def __call__(self, s: af.State, question: str) -> str:
            return await ask(s, question)

    async def ask_as(role: str, s: af.State, question: str) -> str:
        return await ask(s, role + question)

    async with session_on(vendor) as place:
        for program in (Asker(), partial(ask_as, "Bee: ")):
            plain = await place.flow.map(program, ["a"])
            assert await place.flow.map(program, ["a"], batch=True) == plain


async def test_a_script_answers_a_map_in_batches() -> None:
    async with af.session(backend=af.Scripted({"first": "A", "second": "B"})) as flow:
        assert await flow.map(ask_twice, ["a"], batch=True) == [["A", "B"]]
        assert len(flow.runs) == 1


async def test_limits_of_the_session_hold_in_batches(vendor: FakeVendor) -> None:
    async with session_on(vendor) as place:
        place.flow.limit(output_tokens=4)
        with pytest.raises(af.BudgetExceeded):
            await place.flow.map(ask_twice, ["a"], batch=True)


async def test_batches_are_in_the_counters_of_the_session(vendor: FakeVendor) -> None:
    async with session_on(vendor) as place:
        await place.flow.run(ask, "a")
        await place.flow.map(ask, ["b", "c"], batch=True)
        vendor.num_polls = 10**9
        running: list[af.Stats] = []

        async def look() -> None:
            await place.server.wait_until(lambda: vendor.num_batches == 2)
            running.append(await place.flow.stats())
            vendor.num_polls = 1

        async with anyio.create_task_group() as group:
            group.start_soon(look)
            await place.flow.map(ask, ["d"], batch=True)
        stats = await place.flow.stats()
        usages = [run.usage for run in place.flow.runs]
    assert stats.generated_tokens == sum(usage.output_tokens for usage in usages)
    assert stats.prompt_tokens == sum(usage.prompt_tokens for usage in usages)
    assert stats.cost == pytest.approx(sum(usage.cost for usage in usages))
    assert running[0].generated_tokens == sum(usage.output_tokens for usage in usages[:3])


async def test_batches_use_up_the_limits_of_the_session(vendor: FakeVendor) -> None:
    async with session_on(vendor) as place, place.flow.state() as before:
        await place.flow.map(ask, ["a", "b"], batch=True)
        used = sum(run.usage.output_tokens for run in place.flow.runs)
        place.flow.limit(output_tokens=used)
        await place.flow.map(ask, ["c", "d"], batch=True)
        with pytest.raises(af.BudgetExceeded):
            await place.flow.run(ask, "e")
        before += af.user("f") + af.assistant(af.gen("answer", max_tokens=8))
        with pytest.raises(af.BudgetExceeded):
            await before["answer"]


async def test_f37_an_answer_of_a_batch_that_a_limit_cut_uses_it_up() -> None:
    async with af.session(backend=af.Scripted(lambda call: "two words")) as flow:
        flow.limit(output_tokens=1)
        [cut] = await flow.map(ask, ["a"], batch=True, on_error="return")
        assert isinstance(cut, af.BudgetExceeded)
        with pytest.raises(af.BudgetExceeded) as caught:
            await flow.run(ask, "b")
        assert caught.value.usage is None  # it generated nothing


async def test_f37_runs_beside_a_batch_use_up_its_limit() -> None:
    async with af.session(backend=af.Scripted(lambda call: "two words")) as flow:
        flow.limit(output_tokens=5)
        results = flow.map(ask, ["a", "b"], batch=True, on_error="return")
        async with results:
            ends: list[Any] = [await anext(results)]
            try:
                ends.append(await flow.run(ask, "c"))
            except af.BudgetExceeded as error:
                ends.append(error)
            ends.append(await anext(results))
    assert [type(end) for end in ends].count(af.BudgetExceeded) == 1


async def test_a_limit_that_is_set_while_a_batch_runs_holds_there(vendor: FakeVendor) -> None:
    vendor.num_polls = 10**9
    async with session_on(vendor) as place:

        async def limit() -> None:
            await place.server.wait_until(lambda: bool(vendor.num_asked))
            place.flow.limit(output_tokens=1)
            vendor.num_polls = 1

        async with anyio.create_task_group() as group:
            group.start_soon(limit)
            with pytest.raises(af.BudgetExceeded):
                await place.flow.map(ask_twice, ["a", "b"], batch=True)


async def test_a_batch_is_cancelled_if_the_map_is_left_while_it_is_sent(vendor: FakeVendor) -> None:
    hold = Hold()

    def held(request: Received) -> AnyAnswer | None:
        if request.method != "POST" or not request.path.endswith("/batches"):
            return None
        answer = vendor.answer(request)
        assert isinstance(answer, Answer)
        assert isinstance(answer.body, bytes)
        return Answer([hold, answer.body])

    vendor.override = held
    async with session_on(vendor) as place, anyio.create_task_group() as group:
        results = place.flow.map(ask, ["a"], batch=True)
        async with results:
            await hold.reached.wait()
            group.start_soon(results.aclose)
            await anyio.lowlevel.checkpoint()
            hold.go_on()
    assert vendor.cancelled == vendor.ids


async def test_a_refused_request_fails_its_input_only(vendor: FakeVendor) -> None:
    vendor.fate = lambda body: "refused" if "bad" in str(body["messages"]) else "answered"
    async with session_on(vendor) as place:
        found = await place.flow.map(ask, ["a", "bad", "c"], batch=True, on_error="return")
        assert isinstance(found[1], RequestRefused)
        assert [isinstance(one, str) for one in found] == [True, False, True]
        with pytest.raises(RequestRefused):
            await place.flow.map(ask, ["a", "bad", "c"], batch=True)


async def test_retries_send_expired_requests_again(vendor: FakeVendor) -> None:
    vendor.fate = lambda body: "expired" if vendor.num_batches == 1 else "answered"
    async with session_on(vendor) as place:
        found = await place.flow.map(ask, ["a", "b"], batch=True, on_error="return")
        assert all(isinstance(one, af.Overloaded) and vendor.ids[0] in str(one) for one in found)
        vendor.sent.clear()
        again = await place.flow.map(ask, ["a"], batch=True, retries=1)
        assert again == await place.flow.map(ask, ["a"])


async def test_tokens_of_a_batch_cost_half(vendor: FakeVendor) -> None:
    prices = {MODELS[type(vendor)]: af.Price(input=2.0, output=10.0)}
    async with session_on(vendor, prices=prices) as place:
        await place.flow.map(compare, ["a"])
        plain = place.flow.runs[-1].usage
        await place.flow.map(compare, ["a"], batch=True)
        batched = place.flow.runs[-1].usage
        assert batched.cost == pytest.approx(4 * (9 * 2.0 + 3 * 10.0) / 2 / 1e6)
        assert plain.cost == pytest.approx(2 * batched.cost)
        assert batched.output_tokens == plain.output_tokens


async def test_a_cap_holds_before_a_batch_is_sent(vendor: FakeVendor) -> None:
    prices = {MODELS[type(vendor)]: af.Price(input=2.0, output=1000.0)}
    async with session_on(vendor, prices=prices, max_cost=0.01) as place:
        # Half the price of 8 tokens is $0.004, so two of the requests fit.
        found = await place.flow.map(ask, ["a", "b", "c", "d"], batch=True, on_error="return")
        assert sum(isinstance(one, af.BudgetExceeded) for one in found) == 2
        assert [len(batch) for batch in vendor.sent] == [2]


async def test_leaving_a_map_cancels_its_batches(vendor: FakeVendor) -> None:
    vendor.num_polls = 10**6
    async with session_on(vendor) as place:
        async with place.flow.map(ask, ["a"], batch=True):
            await place.server.wait_until(lambda: bool(vendor.num_asked))
        assert vendor.cancelled == [vendor.ids[0]]


async def test_polls_go_on_while_the_vendor_refuses_them(vendor: FakeVendor) -> None:
    refusals = [openai_answers.rate_limited(ms=1), openai_answers.OVERLOADED, openai_answers.BROKEN]

    def refuse(request: Received) -> AnyAnswer | None:
        is_poll = request.method == "GET" and "/batches/" in request.path
        return refusals.pop() if is_poll and refusals else None

    vendor.override = refuse
    async with session_on(vendor) as place:
        assert await place.flow.map(ask, ["a"], batch=True) == await place.flow.map(ask, ["a"])
        assert refusals == []


async def test_a_lost_answer_to_a_batch_does_not_send_it_twice(vendor: FakeVendor) -> None:
    def lose(request: Received) -> AnyAnswer | None:
        if request.method != "POST" or not request.path.endswith("/batches") or vendor.num_batches:
            return None
        vendor.answer(request)
        return RawAnswer([Close()])

    vendor.override = lose
    async with session_on(vendor) as place:
        found = await place.flow.map(ask, ["a", "b"], batch=True)
        assert found == await place.flow.map(ask, ["a", "b"])
        assert vendor.num_batches == 1


async def test_f37_a_refused_batch_is_not_looked_for(vendor: FakeVendor) -> None:
    """Another batch with as many requests runs, perhaps for a day."""
    refusals = [openai_answers.rate_limited(ms=1), openai_answers.OVERLOADED]

    def refuse(request: Received) -> AnyAnswer | None:
        is_batch = request.method == "POST" and request.path.endswith("/batches")
        return refusals.pop() if is_batch and vendor.num_batches == 1 and refusals else None

    async with session_on(vendor, max_retries=2) as place:
        vendor.num_polls = 10**6
        async with anyio.create_task_group() as group, place.flow.map(ask, ["x", "y"], batch=True):
            await place.server.wait_until(lambda: bool(vendor.num_asked))
            vendor.num_polls, vendor.override = 0, refuse
            vendor.num_asked[vendor.ids[0]] = -(10**6)  # the other batch
            with anyio.fail_after(60):
                assert len(await place.flow.map(ask, ["a", "b"], batch=True)) == 2
            assert refusals == []
            group.cancel_scope.cancel()


@pytest.mark.parametrize("status", get_args(Batch.model_fields["status"].annotation))
async def test_f37_a_batch_ends_with_each_status_of_the_vendors_client(status: Any) -> None:
    vendor = OpenAIVendor()

    def poll(request: Received) -> AnyAnswer | None:
        if vendor.batches:
            vendor.batches[0].status = "cancelled" if vendor.batches[0].status == status else status
        return None

    vendor.override = poll
    async with session_on(vendor) as place:
        with anyio.fail_after(60):
            found = await place.flow.map(ask, ["a", "b"], batch=True, on_error="return")
        assert all(isinstance(one, af.AgentflowError) for one in found)
        if status in ("cancelled", "cancelling"):
            assert all(isinstance(one, RequestRefused) for one in found)


async def test_a_batch_that_the_vendor_refuses_fails_its_inputs() -> None:
    vendor = OpenAIVendor()
    vendor.refusal = BatchError(code="invalid_json_line", message="Line 1 is bad.", line=1)
    async with session_on(vendor) as place:
        found = await place.flow.map(ask, ["a", "b"], batch=True, on_error="return")
        assert all(isinstance(one, RequestRefused) and vendor.ids[0] in str(one) for one in found)


async def test_a_stage_is_divided_at_the_limits_of_the_vendor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OpenAIBatches, "max_requests", 2)
    vendor = OpenAIVendor()
    questions = list("abcde")
    async with session_on(vendor) as place:
        assert await place.flow.map(ask, questions, batch=True) == await place.flow.map(ask, questions)
        assert sorted(map(len, vendor.sent)) == [1, 2, 2]


async def test_the_concurrency_limits_the_inputs_of_a_batch(vendor: FakeVendor) -> None:
    async with session_on(vendor) as place:
        await place.flow.map(ask, list("abcde"), batch=True, concurrency=2)
        assert sum(map(len, vendor.sent)) == 5
        assert max(map(len, vendor.sent)) == 2


async def test_several_gens_in_a_turn_are_stages_where_the_model_continues() -> None:
    @af.program
    async def fill(s: af.State, name: str) -> list[str]:
        s += af.user(name)
        s += af.assistant("Name: ", af.gen("name", max_tokens=4), " Job: ", af.gen("job", max_tokens=4))
        return [await s["name"], await s["job"]]

    vendor = VENDORS["anthropic"]()
    async with session_on(vendor) as place:
        assert await place.flow.map(fill, ["a", "b"], batch=True) == await place.flow.map(fill, ["a", "b"])
        assert [len(batch) for batch in vendor.sent] == [2, 2]
    vendor = VENDORS["openai"]()
    async with session_on(vendor) as place:
        with pytest.raises(NotSupported):
            await place.flow.map(fill, ["a"], batch=True)
        assert vendor.num_batches == 0


async def test_the_progress_has_the_counts_of_the_batch(vendor: FakeVendor) -> None:
    seen: list[BatchCounts] = []
    tallies: list[Tally] = []

    @contextmanager
    def show(tally: Tally) -> Iterator[Callable[[], None]]:
        tallies.append(tally)
        yield lambda: seen.append(tally.batches) if tally.batches is not None else None

    async with session_on(vendor) as place:
        flow = place.flow
        await ProgramMap(flow._link, ask_twice, list("abc"), batch=True, backend=flow._backend, show=show)
    assert seen[0] == BatchCounts(1, 3, 0, 0)
    assert BatchCounts(2, 3, 3, 0) in seen
    progress = MapProgress(Tally(3, batches=BatchCounts(2, 3, 1, 0)), lambda: 0.0)
    assert progress.parts()["batch"] == "batch 2: 1/3"


async def test_a_stop_here_is_charged_with_the_whole_answer(vendor: FakeVendor) -> None:
    if isinstance(vendor, OpenAIVendor):
        pytest.skip("OpenAI's API takes no stop_regex")

    @af.program
    async def stopped(s: af.State, question: str) -> str:
        s += af.user(question) + af.assistant(af.gen("answer", stop_regex="[0-9]"))
        return await s["answer"]

    async with session_on(vendor) as place:
        assert await place.flow.map(stopped, ["a"], batch=True) == ["w"]
        assert place.flow.runs[-1].usage.output_tokens == 3
