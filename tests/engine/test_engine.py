"""The engine through its client: each request has the answer that it has alone, and no fault spreads."""

from __future__ import annotations

import re
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.engine.stepped_engine import SteppedEngine, assert_resumable
from support.fake_engine import TOKENIZER, StepGate
from support.faults import has_param
from support.plain_engine import End, PlainEngine
from support.plain_model import (
    PLAIN_IDS,
    PLAIN_MODEL,
    alone,
    fake_logprob,
    plain_model_engine,
    plain_token,
    runner,
)
from support.small_tokenizers import byte_level

from agentflow.engine.batch import Batch
from agentflow.engine.cache.nodes import Node
from agentflow.engine.client import EngineClient, running_engine
from agentflow.engine.engine import Engine
from agentflow.engine.messages import (
    Abort,
    EngineStats,
    Failed,
    Finished,
    FromEngine,
    Progress,
    Started,
    StatsRequest,
    StepBegins,
    Stop,
)
from agentflow.engine.request import Origin, Submit
from agentflow.engine.runner import AcceleratorFault, OutOfMemory
from agentflow.engine.scheduling.scheduler import SchedulerConfig
from agentflow.engine.simulator.fake_runner import FakeRunner
from agentflow.engine.text.detokenizer import TextEnd
from agentflow.engine.text.tokenizer import Tokenizer
from agentflow.errors import BadModelFolder, EngineFailed, PromptTooLong
from agentflow.protocol.sampling import SamplingParams
from agentflow.runtime.task_group import open_task_group

pytestmark = pytest.mark.anyio

PROMPT = [5, 6, 7]


async def generate(
    client: EngineClient, prompt: list[int] = PROMPT, *, seed: int = 0, cache_key: str = "", **params
) -> tuple[Finished, list[str]]:
    """The end of a generation, and the deltas before it."""
    deltas: list[str] = []
    end = await client.generate(
        prompt,
        SamplingParams(**params),
        seed=seed,
        origin=Origin(cache_salt=cache_key),
        on_text=deltas.append,
    )
    return end, deltas


@dataclass(frozen=True)
class Job:
    prompt: list[int]
    params: SamplingParams
    cache_key: str


stops = st.sampled_from(["e", "an", "answer", "q", "the", " a", "z"])
jobs = st.builds(
    Job,
    prompt=st.lists(st.integers(2, 4), min_size=1, max_size=30),
    params=st.builds(
        SamplingParams,
        max_tokens=st.integers(8, 25),
        min_tokens=st.sampled_from([0, 0, 3, 8]),
        stop_regex=st.sampled_from([None, None, "[aeiou][^aeiou]", "(?i)an|t.e", " +q", "e{2}|o"]),
        stop=st.lists(stops, max_size=3, unique=True).map(tuple),
        stop_token_ids=st.sampled_from([(), (), tuple(PLAIN_IDS[:8])]),
        ignore_eos=st.booleans(),
        logprobs=st.booleans(),
        top_logprobs=st.sampled_from([0, 0, 3]),
    ),
    cache_key=st.sampled_from(["", "", "other"]),
)


@pytest.mark.trio_in_full
@given(
    jobs=st.lists(jobs, min_size=1, max_size=10),
    max_running=st.integers(1, 6),
    token_budget=st.integers(1, 40),
    num_plain_slots=st.integers(60, 300),
    use_cache=st.booleans(),
    ahead=st.booleans(),
)
async def test_requests_in_any_batch_have_the_results_of_the_plain_engine(
    jobs, max_running, token_budget, num_plain_slots, use_cache, ahead
):
    plain = PlainEngine(
        PLAIN_MODEL, TOKENIZER, num_slots=num_plain_slots, max_context=60, max_running=max_running
    )
    requests = [plain.submit(job.prompt, job.params, owner=job.cache_key) for job in jobs]
    plain.run()
    config = SchedulerConfig(max_running=max_running, token_budget=token_budget, use_cache=use_cache)
    options = {"num_slots": 600, "launches_ahead": ahead}
    async with plain_model_engine(config, **options) as client, anyio.create_task_group() as group:
        for job, request in zip(jobs, requests, strict=True):
            group.start_soon(run_and_check, client, job, request.end)


@pytest.mark.trio_in_full
@given(jobs=st.lists(jobs, min_size=1, max_size=10), ahead=st.booleans())
async def test_cached_tokens_are_the_longest_prefix_that_was_computed(jobs, ahead):
    """The plain engine compares each prompt with all earlier sequences."""
    plain = PlainEngine(PLAIN_MODEL, TOKENIZER)
    async with plain_model_engine(launches_ahead=ahead) as client:
        for job in jobs:
            request = plain.submit(job.prompt, job.params, owner=job.cache_key)
            plain.run()
            end = await run_and_check(client, job, request.end)
            assert end.cached_tokens == request.num_cached


async def run_and_check(client: EngineClient, job: Job, expected: End | None = None) -> Finished:
    sent: list[Progress] = []
    end = await client.generate(
        job.prompt, job.params, seed=0, origin=Origin(cache_salt=job.cache_key), on_progress=sent.append
    )
    deltas = [progress.text for progress in sent if progress.text]
    ids: list[int] = []
    for progress in sent:
        [token] = progress.token_ids
        logprob = fake_logprob([*job.prompt, *ids], token)
        assert progress.logprobs == ([logprob] if job.params.wants_logprobs else ())
        assert [top[0] for top in progress.top_logprobs] == [(token, logprob)] * (job.params.top_logprobs > 0)
        ids.append(token)
    expected = expected or alone(job.prompt, job.params)
    assert (end.text, end.finish_reason) == (expected.text, expected.reason)
    assert end.token_ids == expected.ids
    assert end.text.startswith("".join(deltas))
    assert (end.prompt_tokens, end.output_tokens) == (len(job.prompt), expected.num_sampled)
    assert 0 <= end.cached_tokens < len(job.prompt)
    assert end.logprobs == expected.logprobs
    if job.params.top_logprobs:
        for token, logprob, top in zip(end.token_ids, end.logprobs, end.top_logprobs, strict=True):
            assert (top is None) == (logprob is None)
            if top is not None:
                assert top[0] == (token, logprob)
                assert [number for number, _ in top] == [(token + n) % TOKENIZER.vocab_size for n in range(3)]
                assert len({value for _, value in top}) == 3
    else:
        assert end.top_logprobs == []
    return end


def test_the_reference_meets_every_kind_of_end():
    reasons = {
        alone([n], SamplingParams(max_tokens=25, stop=("an",), ignore_eos=n % 2 == 0)).reason
        for n in range(2, 60)
    }
    assert reasons == {"eos", "stop", "length"}


async def test_each_token_emits_its_text():
    async with plain_model_engine() as client:
        end, deltas = await generate(client, max_tokens=20, ignore_eos=True)
        assert deltas == [text for i in end.token_ids if (text := TOKENIZER.decode([i]))]
        assert "".join(deltas) == end.text


async def test_scoring_gives_the_logprob_of_each_token():
    tokens = list(range(10, 30))
    async with plain_model_engine() as client:
        for _ in range(2):  # the second time from the cache
            end = await client.score(tokens, 12)
            assert end.logprobs == [fake_logprob(tokens[:n], tokens[n]) for n in range(12, 20)]
            assert (end.token_ids, end.text, end.output_tokens) == ([], "", 0)
        assert end.cached_tokens == 11


async def test_computing_only_fills_the_cache():
    async with plain_model_engine() as client:
        computed = await client.compute(list(range(10, 40)), origin=Origin(cache_salt="k"))
        assert (computed.prompt_tokens, computed.output_tokens, computed.logprobs) == (30, 0, [])
        end, _ = await generate(client, list(range(10, 50)), cache_key="k", max_tokens=1)
        assert end.cached_tokens == 30
        end, _ = await generate(client, list(range(10, 50)), max_tokens=1)
        assert end.cached_tokens == 0


async def test_a_prompt_that_can_never_fit_fails_alone():
    async with plain_model_engine(max_context=64) as client:
        with pytest.raises(PromptTooLong, check=has_param("prompt")):
            await generate(client, [5] * 64)
        with pytest.raises(PromptTooLong):
            await client.score([5] * 65, 60)
        end, _ = await generate(client, [5] * 60, max_tokens=100, ignore_eos=True)
        assert (end.output_tokens, end.finish_reason) == (4, "length")


@pytest.mark.parametrize(
    "bad",
    [
        Submit(1, [], SamplingParams()),
        Submit(1, [5], SamplingParams(max_tokens=-7)),
        Submit(1, [2**40], SamplingParams()),
        Submit(1, ["x"], SamplingParams()),  # type: ignore[list-item]
    ],
    ids=["no tokens", "negative length", "no token", "no number"],
)
async def test_an_invalid_request_fails_alone(bad):
    async with plain_model_engine() as client:
        with pytest.raises(EngineFailed):
            await client._call(bad, None)
        end, _ = await generate(client, max_tokens=5)
        assert end.text == alone(PROMPT, SamplingParams(max_tokens=5)).text


async def test_a_request_whose_forward_pass_fails_fails_alone(caplog):
    bad = 12

    def choose(tokens) -> int:
        if tokens[0] == bad and len(tokens) > 20:
            raise ZeroDivisionError("in the model")
        return plain_token(tokens)

    params = SamplingParams(max_tokens=200, ignore_eos=True)
    async with plain_model_engine(SchedulerConfig(max_running=3), next_token=choose) as client:
        failed: list[str] = []
        texts: dict[int, str] = {}

        async def run(number: int) -> None:
            try:
                texts[number] = (await client.generate([number], params, seed=0)).text
            except EngineFailed as error:
                failed.append(str(error))

        async with anyio.create_task_group() as group:
            for number in range(10, 15):  # three in the batch, two wait
                group.start_soon(run, number)
        assert texts == {number: alone([number], params).text for number in (10, 11, 13, 14)}
        [message] = failed
    [error_id] = re.findall("error ([0-9a-f]{8}):", message)
    assert "ZeroDivisionError" not in message
    assert any(error_id in record.getMessage() and record.exc_info for record in caplog.records)


@pytest.mark.trio_in_full
@given(
    jobs=st.lists(jobs, min_size=1, max_size=6),
    max_running=st.integers(1, 6),
    token_budget=st.integers(1, 40),
    capacity=st.integers(1, 20),
    ahead=st.booleans(),
    at_launch=st.booleans(),
)
async def test_a_batch_that_does_not_fit_into_memory_runs_in_halves(
    jobs, max_running, token_budget, capacity, ahead, at_launch
):
    def check(batch: Batch) -> None:
        if len(batch.token_ids) > capacity:
            raise OutOfMemory

    class ChecksAtLaunch(FakeRunner):
        def launch(self, batch: Batch) -> Batch:
            check(batch)
            return super().launch(batch)

    config = SchedulerConfig(max_running=max_running, token_budget=token_budget)
    options = {"kind": ChecksAtLaunch} if at_launch else {"on_step": check}
    options |= {"num_slots": 600, "launches_ahead": ahead}
    async with plain_model_engine(config, **options) as client, anyio.create_task_group() as group:
        for job in jobs:
            group.start_soon(run_and_check, client, job)


async def test_without_memory_for_one_token_its_request_fails():
    is_short = True

    def on_step(batch: Batch) -> None:
        if is_short:
            raise OutOfMemory

    async with plain_model_engine(on_step=on_step) as client:
        with pytest.raises(EngineFailed):
            await generate(client)
        is_short = False
        end, _ = await generate(client, max_tokens=5)
        assert end.text == alone(PROMPT, SamplingParams(max_tokens=5)).text


async def test_f10c_requests_that_do_not_fit_alone_fail_and_no_others():
    huge = 12
    sizes: list[int] = []

    def on_step(batch: Batch) -> None:
        if huge in batch.token_ids:
            raise OutOfMemory
        sizes.append(len(batch.token_ids))

    params = SamplingParams(max_tokens=20, ignore_eos=True)
    num_failed = 0

    async def fail(number: int) -> None:
        nonlocal num_failed
        with pytest.raises(EngineFailed):
            await client.generate([huge, *[number] * 40], params, seed=0)
        num_failed += 1

    async def run(number: int) -> None:
        assert (await client.generate([number] * 9, params, seed=0)).text == alone([number] * 9, params).text

    async with plain_model_engine(on_step=on_step) as client:
        for beside in (False, True):
            async with anyio.create_task_group() as group:
                for number in range(20, 26):
                    group.start_soon(fail, number)
                    if beside:
                        group.start_soon(run, number)
        assert num_failed == 12
        sizes.clear()
        await client.generate([9] * 150, params, seed=0)
    assert sizes[0] == 150  # they taught the engine nothing about others


@pytest.mark.parametrize("whole", [True, False])
async def test_f10c_an_engine_that_ran_out_of_memory_learns_how_much_fits(whole: bool):
    """It tries larger passes again only now and then."""
    capacity = 16
    sizes: list[int] = []

    def on_step(batch: Batch) -> None:
        sizes.append(len(batch.token_ids))
        if sizes[-1] > capacity:
            raise OutOfMemory

    length = 12 if whole else 200
    config = SchedulerConfig(max_running=8, whole_prompts=whole)
    async with plain_model_engine(config, on_step=on_step) as client:
        for _ in range(5):
            async with anyio.create_task_group() as group:
                for number in range(10, 18):
                    group.start_soon(
                        run_and_check, client, Job([number] * length, SamplingParams(max_tokens=9), "")
                    )
    assert sum(size > capacity for size in sizes) < 15
    assert max(sizes[10:]) <= 2 * capacity


@pytest.mark.parametrize("error", [AcceleratorFault("an illegal memory access"), ArithmeticError()], ids=repr)
async def test_a_broken_accelerator_breaks_an_embedded_engine(error):
    is_broken = False
    num_failed = 0

    def on_step(batch: Batch) -> None:
        nonlocal num_failed
        if is_broken:
            num_failed += 1
            raise error

    failures: list[str] = []

    async def run(number: int) -> None:
        with pytest.raises(EngineFailed) as failure:
            await generate(client, [number])
        failures.append(str(failure.value))

    fake = runner(on_step=on_step)
    async with running_engine(lambda: (fake, TOKENIZER, SchedulerConfig())) as client:
        await generate(client, max_tokens=5)
        is_broken = True
        async with anyio.create_task_group() as group:
            for number in range(10, 15):
                group.start_soon(run, number)
        await run(20)
    assert num_failed == (1 if isinstance(error, AcceleratorFault) else 3)
    assert failures[-1].startswith("the engine is broken: the ")
    assert "illegal memory" not in failures[-1]


async def test_an_exception_of_on_text_fails_its_request_only():
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    texts: list[str] = []

    def break_off(text: str) -> None:
        raise LookupError(text)

    async def run_broken() -> None:
        with pytest.raises(LookupError):
            await client.generate([9], params, seed=0, on_text=break_off)

    async def run() -> None:
        texts.append((await client.generate(PROMPT, params, seed=0)).text)

    async with plain_model_engine() as client:
        async with anyio.create_task_group() as group:
            group.start_soon(run)
            group.start_soon(run_broken)
        assert texts == [alone(PROMPT, params).text]


class BrokenTable(list[bytes]):
    """Has no bytes for one token."""

    def __getitem__(self, token_id):
        if token_id == PLAIN_IDS[0]:
            raise KeyError(token_id)
        return super().__getitem__(token_id)


class BrokenTokenizer(Tokenizer):
    @cached_property
    def byte_table(self) -> list[bytes]:
        return BrokenTable(Tokenizer.byte_table.func(self))


async def test_an_output_that_cannot_be_used_fails_its_request_only(caplog):
    def choose(tokens) -> int:
        return PLAIN_IDS[0] if tokens[0] == 9 else PLAIN_IDS[1]

    fake = runner(next_token=choose)
    tokenizer = BrokenTokenizer(byte_level(special=("<|im_start|>", "<|im_end|>")))
    async with running_engine(lambda: (fake, tokenizer, SchedulerConfig())) as client:
        with pytest.raises(EngineFailed, match="request's output"):
            await generate(client, [9, 9])
        end, _ = await generate(client, [8], max_tokens=3)
        assert end.token_ids == [PLAIN_IDS[1]] * 3
        client.engine.scheduler.check_idle()
    assert "request's output" in caplog.text


async def test_a_broken_engine_fails_all_requests_and_accepts_no_more(caplog):
    gate = StepGate()
    gate.attach()
    gate.allow(0)
    errors: list[EngineFailed] = []
    fake = runner(on_step=gate)

    async def expect_failure(use, *args) -> None:
        with pytest.raises(EngineFailed, match="the engine broke") as failure:
            await use(*args)
        errors.append(failure.value)

    async with running_engine(lambda: (fake, TOKENIZER, SchedulerConfig())) as client:
        async with anyio.create_task_group() as group:
            for _ in range(3):
                group.start_soon(expect_failure, generate, client)
            await gate.held()
            group.start_soon(expect_failure, client.stats)
            await anyio.lowlevel.checkpoint()
            client.engine.scheduler = None  # type: ignore[assignment]
            gate.open()
        assert len(errors) == 4
        for use in (lambda: generate(client), client.stats, lambda: client.score([1, 2], 1)):
            with pytest.raises(EngineFailed, match="the engine broke"):
                await use()
        assert client.num_calls == 0
    assert "the engine broke" in caplog.text


@pytest.mark.parametrize(
    "error", [BadModelFolder("no model there"), ValueError("x"), SystemExit(3)], ids=repr
)
async def test_an_error_while_loading_is_raised_as_itself(error):
    def load():
        assert threading.current_thread() is not threading.main_thread()
        raise error

    with pytest.raises(type(error)) as failure:
        await running_engine(load).__aenter__()
    assert failure.value is error


class ClosingRunner(FakeRunner):
    """Counts how often it is closed."""

    num_closed = 0

    def close(self) -> None:
        self.num_closed += 1


@pytest.mark.parametrize("error", [None, ZeroDivisionError()], ids=repr)
async def test_leaving_the_scope_ends_the_engine_whatever_it_does(error):
    fake = ClosingRunner(vocab_size=TOKENIZER.vocab_size, next_token=plain_token)
    params = SamplingParams(max_tokens=1900)
    started = anyio.Event()
    failures: list[EngineFailed] = []

    async def run(client: EngineClient) -> None:
        try:
            await client.generate(PROMPT, params, seed=0, on_text=lambda text: started.set())
        except EngineFailed as failure:
            failures.append(failure)

    async def leave() -> None:
        async with (
            open_task_group() as group,
            running_engine(lambda: (fake, TOKENIZER, SchedulerConfig())) as c,
        ):
            group.start_soon(run, c)
            await started.wait()
            if error is not None:
                raise error

    if error is None:
        await leave()
        assert [str(failure) for failure in failures] == ["the engine has stopped"]
    else:
        with pytest.raises(ZeroDivisionError) as failure:
            await leave()
        assert failure.value is error
    assert fake.num_closed == 1


async def test_stats_count_what_was_done():
    async with plain_model_engine() as client:
        before = await client.stats()
        assert (before.steps, before.prompt_tokens, before.generated_tokens) == (0, 0, 0)
        await generate(client, [5] * 10, max_tokens=4, ignore_eos=True)
        await generate(client, [5] * 10, max_tokens=4, ignore_eos=True)
        stats = await client.stats()
        assert (stats.prompt_tokens, stats.cached_tokens, stats.generated_tokens) == (20, 9, 8)
        assert stats.computed_tokens == 10 + 3 + 1 + 3
        assert stats.steps == 8
        assert (stats.running, stats.waiting, stats.in_use_slots) == (0, 0, 0)
        assert stats.cached_slots == 13
        assert stats.free_slots + stats.cached_slots == stats.total_slots == 4096
        assert stats.peak_resident_bytes > 1_000_000


# The engine by itself, without its thread.


def test_messages_of_a_step_are_delivered_together():
    params = SamplingParams(max_tokens=3)
    prompts = [[n] for n in range(2, 99) if alone([n], params).reason == "length"][:4]
    submits = [Submit(number, prompt, params) for number, prompt in enumerate(prompts, 1)]
    before, first, second, third = SteppedEngine(runner(), 4).run(*submits, StatsRequest(9))
    assert [type(message) for message in before] == [EngineStats, Started, StepBegins]
    assert before[1] == Started([1, 2, 3, 4])
    assert before[2] == StepBegins(4)
    assert [type(message) for message in first] == [Progress] * 4 + [StepBegins]
    assert [message.request_id for message in second[:-1]] == [1, 2, 3, 4]
    assert [message.request_id for message in third if isinstance(message, Finished)] == [1, 2, 3, 4]


def test_a_steps_output_is_delivered_while_the_next_step_runs():
    delivered_before: list[int] = []
    by_hand = SteppedEngine(runner(on_step=lambda batch: delivered_before.append(len(by_hand.delivered))), 4)
    by_hand.run(Submit(1, [2], SamplingParams(max_tokens=4, ignore_eos=True)), StatsRequest(9))
    assert delivered_before == [1, 2, 3, 4]
    assert len(by_hand.delivered) == 5


def test_a_delivery_error_is_not_an_error_of_the_batch(caplog):
    def deliver(messages: list[FromEngine]) -> None:
        raise BrokenPipeError

    engine = Engine(runner(), TOKENIZER, SchedulerConfig(), deliver)
    engine.send(Submit(1, [2, 3], SamplingParams(max_tokens=4)))
    with pytest.raises(BrokenPipeError):
        engine.run()
    assert not caplog.records


@given(job=jobs, at=st.integers(0, 25))
def test_a_resumed_request_continues_as_if_uninterrupted(job, at):
    assert_resumable(runner, Submit(1, job.prompt, job.params), at)


def test_a_resumed_request_that_is_complete_just_ends():
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    ids = alone(PROMPT, params).ids
    [[end]] = SteppedEngine(runner(), 1).run(Submit(1, PROMPT, params, generated_ids=ids))
    assert isinstance(end, Finished)
    assert (end.token_ids, end.finish_reason, end.output_tokens) == (ids, "length", 4)
    stop = SamplingParams(stop=(TOKENIZER.decode(ids[2:3]),), ignore_eos=True)
    [[end]] = SteppedEngine(runner(), 1).run(Submit(1, PROMPT, stop, generated_ids=ids[:3]))
    assert isinstance(end, Finished)
    assert end.finish_reason == "stop"


def test_messages_before_a_stop_are_dropped():
    assert SteppedEngine(runner(), 1).run(Submit(1, PROMPT, SamplingParams()), Stop()) == []


def test_aborting_an_unknown_request_has_no_effect():
    by_hand = SteppedEngine(runner(), 1)
    submit = Submit(1, PROMPT, SamplingParams())
    [[aborted, stats]] = by_hand.run(Abort(7), submit, Abort(1), Abort(1), StatsRequest(2))
    assert aborted == Failed(1, "cancelled", "the request was aborted")
    assert isinstance(stats, EngineStats)
    assert (stats.waiting, stats.running, stats.steps) == (0, 0, 0)


def test_nothing_of_a_request_is_kept_after_its_end():
    by_hand = SteppedEngine(runner(), 3)
    first, second, third = by_hand.run(
        Submit(1, PROMPT, SamplingParams(max_tokens=2, ignore_eos=True)),
        Submit(2, [5] * 600, SamplingParams()),
        Submit(3, [4], None),
        Submit(4, [4, 4], None, score_from=1),
    )
    messages = first + second + third
    ends = [message for message in messages if not isinstance(message, Progress | Started | StepBegins)]
    assert sorted((type(end).__name__, end.request_id) for end in ends) == [
        ("Failed", 2),
        ("Finished", 1),
        ("Finished", 3),
        ("Finished", 4),
    ]
    assert (by_hand.engine._requests, len(by_hand.engine._outputs), by_hand.engine._started) == ({}, 0, set())
    by_hand.engine.scheduler.check_idle()


async def test_requests_that_compute_ahead_leave_room_for_others() -> None:
    async with plain_model_engine() as client:
        client._max_unfinished = 4
        for number in range(6):
            client.compute_ahead([5, 6, 7 + number], origin=Origin())
        client.check_room("")
        assert len(client._unfinished) == 2
        await generate(client, max_tokens=20)  # until then they have ended


@pytest.mark.parametrize("num_steps", [1, 2, 5])
def test_the_tokens_before_an_abort_are_reported_before_it(num_steps: int) -> None:
    """Their texts are made after the step, which the abort comes right behind."""
    delivered: list[FromEngine] = []
    engine = Engine(runner(), TOKENIZER, SchedulerConfig(), delivered.extend)
    engine.send(Submit(1, PROMPT, SamplingParams(max_tokens=50, ignore_eos=True)))
    engine.take_messages()
    for _ in range(num_steps):
        assert engine.step()
    tokens = engine.scheduler.running[1].tokens
    sampled = tokens[len(PROMPT) : engine.scheduler.running[1].num_tokens].tolist()
    for message in (Abort(1), Stop()):
        engine.send(message)
    engine.run()
    of_request = [message for message in delivered if isinstance(message, Progress | Failed)]
    assert [
        token for one in of_request[:-1] if isinstance(one, Progress) for token in one.token_ids
    ] == sampled
    assert len(of_request) == num_steps + 1
    assert isinstance(of_request[-1], Failed)


@given(
    submits=st.lists(
        st.tuples(st.sampled_from(["text", "prompt", "scores", "choices"]), st.integers(2, 40)),
        min_size=1,
        max_size=6,
    ),
    num_steps=st.integers(0, 12),
    which=st.integers(0, 5),
    ahead=st.booleans(),
)
def test_slots_are_free_at_the_end_of_the_first_step_after_an_abort(
    submits: list[tuple[str, int]], num_steps: int, which: int, ahead: bool
) -> None:
    """In any phase of the request, and also if a batch with it is in flight when the abort is read."""
    kinds: dict[str, Callable[[int, list[int]], Submit]] = {
        "text": lambda number, prompt: Submit(number, prompt, SamplingParams(max_tokens=8, ignore_eos=True)),
        "prompt": lambda number, prompt: Submit(number, prompt, None),
        "scores": lambda number, prompt: Submit(number, prompt, None, score_from=1),
        "choices": lambda number, prompt: Submit(number, prompt, None, choices=[[5, 6, 7], [6], [7, 5]]),
    }
    config = SchedulerConfig(max_running=3, token_budget=12)
    fake = runner(num_slots=100, max_context=60, launches_ahead=ahead)
    engine = Engine(fake, TOKENIZER, config, lambda messages: None)
    for number, (kind, length) in enumerate(submits, 1):
        engine.send(kinds[kind](number, [5 + number % 2] * length))
    engine.take_messages()
    for _ in range(num_steps):
        engine.step()
    aborted = 1 + which % len(submits)
    engine.send(Abort(aborted))
    engine.take_messages()
    engine.step()

    scheduler, num_in_use, locks = engine.scheduler, 0, Counter[Node]()
    rows = [row for launched in scheduler._in_flight.launched for row in launched.rows]
    assert aborted not in scheduler.running.keys() | {row.request.id for row in rows}
    for row in rows:
        num_in_use += 0 if row.withdrawn_slots is None else len(row.withdrawn_slots)
    for request in scheduler.running.values():
        assert request.committed is not None
        num_in_use += request.num_computed - request.committed.num_tokens + len(request.node_slots)
        node = request.committed.node
        while node.parent is not None:
            locks[node] += 1
            node = node.parent
    assert scheduler.memory.num_in_use == num_in_use
    assert all(node.locks == locks[node] for node in scheduler.memory.cache.nodes())


def test_an_abort_behind_a_text_that_fails_ends_the_request_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: TextEnd, token_id: int, *, is_free: bool = False) -> str:
        raise ZeroDivisionError

    monkeypatch.setattr(TextEnd, "push", fail)
    delivered: list[FromEngine] = []
    engine = Engine(runner(), TOKENIZER, SchedulerConfig(), delivered.extend)
    engine.send(Submit(1, PROMPT, SamplingParams(max_tokens=50, ignore_eos=True)))
    engine.take_messages()
    assert engine.step()
    for message in (Abort(1), Stop()):
        engine.send(message)
    engine.run()
    [end] = [message for message in delivered if isinstance(message, Failed)]
    assert end.code == "engine_failed"
    engine.scheduler.check_idle()
