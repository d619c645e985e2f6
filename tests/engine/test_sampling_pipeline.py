"""Every sampling parameter from the table of the scheduler to the token, against the plain sampler; then
through the engine, in any batch, preempted and resumed."""

from __future__ import annotations

from dataclasses import dataclass

import anyio
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.engine.requests import request_of
from support.engine.stepped_engine import assert_resumable
from support.faults import has_param
from support.logit_runner import alone_by_logits, logit_engine, logit_runner, logits_after
from support.plain_model import END_ID, PLAIN_IDS
from support.plain_sampler import MASK, plain_token_of

from agentflow.engine.batch import SampledRows
from agentflow.engine.messages import Finished
from agentflow.engine.models.sampler import choose_tokens
from agentflow.engine.request import Origin, Request, Submit
from agentflow.engine.scheduling.rows.batch_builder import SamplingTable
from agentflow.engine.scheduling.scheduler import SchedulerConfig
from agentflow.errors import BadArgument
from agentflow.kernels.platforms import NATIVE, TORCH
from agentflow.protocol.sampling import SamplingParams

VOCAB = 24
tokens = st.integers(0, VOCAB - 1)
penalties = st.sampled_from([0.0, 0.0, 0.5, 2.0, -1.5])
random_params = st.builds(
    SamplingParams,
    max_tokens=st.just(64),
    min_tokens=st.sampled_from([0, 0, 4, 60]),
    temperature=st.sampled_from([0.0, 0.0, 0.3, 1.0, 1.7]),
    top_p=st.sampled_from([1.0, 1.0, 0.9, 0.5]),
    top_k=st.sampled_from([0, 0, 1, 5]),
    min_p=st.sampled_from([0.0, 0.0, 0.1]),
    frequency_penalty=penalties,
    presence_penalty=penalties,
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.3, 0.7, 5.0]),
    logit_bias=st.dictionaries(tokens, st.sampled_from([-100.0, -2.5, 0.5, 4.0, 100.0]), max_size=4).map(
        lambda biases: tuple(biases.items())
    ),
    logprobs=st.booleans(),
    top_logprobs=st.sampled_from([0, 0, 1, 5, 20]),
)


@dataclass
class Row:
    params: SamplingParams
    prompt: list[int]
    generated: list[int]
    end_ids: tuple[int, ...]
    seed: int

    def request(self, number: int) -> Request:
        prompt = np.array(self.prompt, dtype=np.int32)
        request = request_of(number, prompt, 64, self.params, seed=self.seed, end_ids=self.end_ids)
        end = len(self.prompt) + len(self.generated)
        request.tokens[len(self.prompt) : end] = self.generated
        request.num_tokens = end
        return request

    def expected(self, logits: np.ndarray) -> int:
        forbidden = self.end_ids if len(self.generated) < self.params.min_tokens else ()
        return plain_token_of(
            logits, self.params, self.prompt, self.generated, forbidden=forbidden, seed=self.seed
        )


rows = st.builds(
    Row,
    params=random_params,
    prompt=st.lists(tokens, min_size=1, max_size=12),
    generated=st.lists(tokens, max_size=12),
    end_ids=st.lists(tokens, max_size=3, unique=True).map(tuple),
    seed=st.integers(0, MASK),
)


def sampled(batch: list[Row], req_rows: list[int]) -> SampledRows:
    """Sampled rows made like the scheduler's: attached to page rows, then gathered for a step."""
    table = SamplingTable(32)
    for number, (row, req_row) in enumerate(zip(batch, req_rows, strict=True)):
        request = row.request(number)
        request.req_row = req_row
        table.attach(request)
    positions = [len(row.prompt) + len(row.generated) for row in batch]
    return table.sampled_rows(np.arange(len(batch)), np.array(req_rows), np.array(positions))


def random_logits(num_rows: int, seed: int) -> torch.Tensor:
    return torch.randn(num_rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


@pytest.mark.parametrize("sampler", [TORCH.sampler, NATIVE.sampler], ids=["torch", "native"])
@given(st.lists(rows, min_size=1, max_size=6), st.permutations(range(32)), st.integers(0, 1000), st.data())
def test_the_pipeline_equals_the_loop_over_rows_and_tokens(sampler, batch, places, seed, data) -> None:
    logits = random_logits(len(batch), seed)
    before = logits.clone()
    steps = sampled(batch, places[: len(batch)])
    output = choose_tokens(logits, steps, sampler)
    assert torch.equal(logits, before)
    assert output.token_ids.tolist() == [
        row.expected(values) for row, values in zip(batch, before.numpy(), strict=True)
    ]
    assert (output.logprobs is not None) == any(row.params.wants_logprobs for row in batch)
    exact = torch.log_softmax(before.double(), -1).numpy()
    tops = output.list_tops(0, len(batch), 20)
    for index, row in enumerate(batch):
        top = tops[index][: row.params.top_logprobs]
        best = np.argsort(-exact[index], kind="stable")[: row.params.top_logprobs]
        assert [token for token, _ in top] == best.tolist()
        np.testing.assert_allclose([value for _, value in top], exact[index][best], rtol=1e-4, atol=1e-5)
        if output.logprobs is not None:
            chosen = output.token_ids[index]
            assert dict(top).get(chosen, output.logprobs[index]) == output.logprobs[index]
    # Neither the cut into parts nor the company changes a row.
    cut = data.draw(st.integers(0, len(batch)))
    parts = [(0, cut), (cut, len(batch))]
    apart = [choose_tokens(logits[a:b], steps.slice(a, b), sampler).token_ids for a, b in parts if a < b]
    assert np.concatenate(apart).tolist() == output.token_ids.tolist()


def test_a_batch_without_special_requests_pays_nothing_for_them() -> None:
    plain = Row(SamplingParams(temperature=1.0, logprobs=True), [1], [2], (3,), 5)
    assert (sampled([plain], [4]).edits, sampled([plain], [4]).top_counts) == (None, None)
    # Enough tokens are there, so that nothing is forbidden any more.
    later = Row(SamplingParams(min_tokens=1), [1], [2], (3,), 5)
    assert sampled([plain, later], [4, 9]).edits is None


def test_a_page_row_forgets_its_last_request() -> None:
    table = SamplingTable(2)
    first = Row(SamplingParams(logit_bias=((1, 5.0),), top_logprobs=2), [1], [], (), 5).request(1)
    second = Row(SamplingParams(), [1], [], (), 6).request(2)
    for request in (first, second):
        request.req_row = 1
        table.attach(request)
        got = table.sampled_rows(np.array([0]), np.array([1]), np.array([1]))
        assert (got.edits is not None) == (got.top_counts is not None) == (request is first)
        table.detach(request)
    assert got.seeds.tolist() == [6]


# Through the engine


@dataclass(frozen=True)
class Job:
    prompt: list[int]
    params: SamplingParams
    seed: int


plain_ids = st.sampled_from(PLAIN_IDS)
jobs = st.builds(
    Job,
    prompt=st.lists(plain_ids, min_size=1, max_size=20),
    seed=st.integers(0, 2**40),
    params=st.builds(
        SamplingParams,
        max_tokens=st.integers(8, 25),
        min_tokens=st.sampled_from([0, 0, 3, 8]),
        temperature=st.sampled_from([0.0, 1.0]),
        top_p=st.sampled_from([1.0, 0.9]),
        frequency_penalty=penalties,
        presence_penalty=penalties,
        repetition_penalty=st.sampled_from([1.0, 1.0, 1.3]),
        logit_bias=st.dictionaries(plain_ids, st.sampled_from([-100.0, 3.0]), max_size=3).map(
            lambda biases: tuple(biases.items())
        ),
        stop_token_ids=st.sampled_from([(), (), tuple(PLAIN_IDS[:8])]),
        ignore_eos=st.booleans(),
        top_logprobs=st.sampled_from([0, 0, 4]),
    ),
)


@pytest.mark.trio_in_full
@pytest.mark.anyio
@given(
    work=st.lists(jobs, min_size=1, max_size=8),
    num_slots=st.integers(64, 200),
    max_running=st.integers(1, 6),
    token_budget=st.integers(1, 40),
    ahead=st.booleans(),
)
async def test_in_any_batch_each_request_draws_what_it_draws_alone(
    work, num_slots, max_running, token_budget, ahead
):
    """With few slots, requests are preempted and restart: generated tokens still count."""
    config = SchedulerConfig(max_running=max_running, token_budget=token_budget)

    async def run(client, job: Job) -> None:
        end = await client.generate(
            job.prompt, job.params, seed=job.seed, origin=Origin(), on_text=lambda text: None
        )
        expected = alone_by_logits(job.prompt, job.params, job.seed)
        assert (end.token_ids, end.text, end.finish_reason) == (expected.ids, expected.text, expected.reason)
        check_tops(job, end)

    options = {"num_slots": num_slots, "launches_ahead": ahead}
    async with logit_engine(config, **options) as client, anyio.create_task_group() as group:
        for job in work:
            group.start_soon(run, client, job)


def check_tops(job: Job, end: Finished) -> None:
    """The likeliest tokens come from the unprocessed logits."""
    assert len(end.top_logprobs) == (len(end.token_ids) if job.params.top_logprobs else 0)
    for index, top in enumerate(end.top_logprobs):
        logits = logits_after([*job.prompt, *end.token_ids[:index]])
        exact = torch.log_softmax(torch.tensor(logits, dtype=torch.float64), -1).numpy()
        assert [token for token, _ in top] == np.argsort(-exact, kind="stable")[:4].tolist()
        np.testing.assert_allclose([value for _, value in top], np.sort(exact)[::-1][:4], rtol=1e-4)
        token = end.token_ids[index]
        assert end.logprobs[index] == pytest.approx(exact[token], rel=1e-4)


@pytest.mark.anyio
async def test_preempted_requests_draw_what_they_draw_alone():
    params = SamplingParams(max_tokens=40, ignore_eos=True, frequency_penalty=1.0, repetition_penalty=1.2)
    ends: dict[int, Finished] = {}

    async def run(number: int) -> None:
        prompt = [PLAIN_IDS[number]] * 8
        ends[number] = await client.generate(prompt, params, seed=0, on_text=lambda text: None)

    async with logit_engine(num_slots=80) as client:
        async with anyio.create_task_group() as group:
            for number in range(6):
                group.start_soon(run, number)
        assert (await client.stats()).preemptions > 0
    for number, end in ends.items():
        assert end.token_ids == alone_by_logits([PLAIN_IDS[number]] * 8, params).ids


@given(job=jobs, at=st.integers(0, 25))
def test_a_resumed_request_draws_as_if_uninterrupted(job, at):
    assert_resumable(logit_runner, Submit(1, job.prompt, job.params, seed=job.seed), at)


@pytest.mark.anyio
async def test_a_bias_beyond_the_vocabulary_fails_its_request_only():
    async with logit_engine() as client:
        wrong = SamplingParams(logit_bias=((10**6, 1.0),))
        with pytest.raises(BadArgument, check=has_param("logit_bias")):
            await client.generate([5], wrong, seed=0, on_text=lambda text: None)
        # Token ids that the model hasn't got can't end a text, nor be forbidden.
        fine = SamplingParams(max_tokens=9, min_tokens=9, stop_token_ids=(10**6,))
        end = await client.generate([PLAIN_IDS[0]], fine, seed=0, on_text=lambda text: None)
        assert end.token_ids == alone_by_logits([PLAIN_IDS[0]], fine).ids


def test_the_reference_meets_the_end_token_only_after_min_tokens():
    params = SamplingParams(max_tokens=40)
    short = next([n] for n in PLAIN_IDS if 0 < len(alone_by_logits([n], params).ids) < 5)
    assert alone_by_logits(short, params).reason == "eos"
    longer = alone_by_logits(short, SamplingParams(max_tokens=40, min_tokens=6))
    assert len(longer.ids) >= 6
    assert END_ID not in longer.ids
