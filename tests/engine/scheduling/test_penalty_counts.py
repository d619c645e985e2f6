"""The counts that penalties use, against counting the request's ids again: also after a grammar has replaced
tokens that were generated before."""

from __future__ import annotations

from collections import Counter

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st
from support.engine.requests import request_of
from support.engine.scheduler_harness import Harness, UnpenalizedRunner

from agentflow.engine.batch import Batch
from agentflow.engine.request import Status
from agentflow.engine.scheduling.rows.batch_builder import TokenCounts
from agentflow.protocol.sampling import SamplingParams

tokens = st.integers(0, 5)
replacements = st.tuples(st.integers(0, 12), st.lists(tokens, max_size=4), st.booleans())


@given(st.lists(tokens, min_size=1, max_size=8), st.lists(replacements, max_size=12))
@example([0], [(0, [1, 1, 2], True), (1, [3], True), (0, [], True)])
def test_counts_follow_pushed_and_replaced_tokens(prompt, changes):
    """Each change keeps some of the generated tokens and puts others after them; between two changes the
    counts are read, or not."""
    request = request_of(1, np.array(prompt, dtype=np.int32), 100, SamplingParams())
    counters = {wide: TokenCounts(request, with_prompt=wide) for wide in (True, False)}
    generated: list[int] = []
    for num_kept, pushed, is_read in changes:
        kept = min(num_kept, len(generated))
        generated = generated[:kept] + pushed
        request.num_tokens = len(prompt) + len(generated)
        request.tokens[len(prompt) : request.num_tokens] = generated
        for wide, counter in counters.items():
            counter.truncate(kept)
            if is_read:
                assert counted(counter) == expected(generated, prompt if wide else [])
    for wide, counter in counters.items():
        assert counted(counter) == expected(generated, prompt if wide else [])


def counted(counter: TokenCounts) -> dict[int, float]:
    ids, counts = counter.now()
    assert len(set(ids.tolist())) == len(ids)
    return dict(zip(ids.tolist(), counts.tolist(), strict=True))


def expected(generated: list[int], prompt: list[int]) -> dict[int, float]:
    return {**dict.fromkeys(prompt, 0.0), **{token: float(n) for token, n in Counter(generated).items()}}


def penalized(batch: Batch, req_row: int) -> dict[int, float] | None:
    """The penalized tokens of the row that samples for this row of the table; None if no row does."""
    rows = np.flatnonzero(batch.req_rows == req_row).tolist()
    last_rows = (np.cumsum(batch.query_lens) - 1)[rows].tolist()
    found = [index for index, row in enumerate(batch.sampled.rows.tolist()) if row in last_rows]
    if not found:
        return None
    edits = batch.sampled.edits
    if edits is None:
        return {}
    mine = edits.penalized_rows == found[0]
    ids, counts = edits.penalized_ids[mine].tolist(), edits.penalized_counts[mine].tolist()
    assert len(set(ids)) == len(ids)
    return dict(zip(ids, counts, strict=True))


actions = st.one_of(
    st.just("step"),
    st.just("preempt"),
    st.tuples(st.integers(0, 9), st.lists(tokens, max_size=3)),
)


@given(st.sampled_from([1.0, 1.5]), st.lists(actions, max_size=25))
@example(1.0, ["step", "step", "step", (0, [200, 201, 102]), "step"])
@example(1.5, ["step", "step", (0, [3]), "step", "preempt", (0, [4, 4]), "step", "step"])
def test_a_batch_penalizes_the_tokens_that_the_request_has_after_replacements(repetition, plan):
    """Through the scheduler, next to another request, preempted now and then."""
    harness = Harness(token_budget=16)
    harness.runner = UnpenalizedRunner(num_slots=256, max_context=128)
    params = SamplingParams(frequency_penalty=0.5, repetition_penalty=repetition)
    prompt = [1, 2, 2]
    request = harness.add(1, prompt, 60, params=params)
    harness.add(2, [7], 60)
    for action in plan:
        if action == "preempt":
            if request.status is Status.RUNNING:
                harness.scheduler.preempt(request)
            continue
        if action != "step":
            num_kept = min(action[0], request.num_generated)
            harness.scheduler.replace_output(request, num_kept, list(action[1]))
            continue
        generated, row_before = harness.output(1), request.req_row
        harness.step()
        found = penalized(harness.batches[-1], request.req_row)
        if found is not None and row_before in (-1, request.req_row):
            assert found == expected(generated, prompt if repetition != 1 else [])
