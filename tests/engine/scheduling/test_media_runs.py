"""Prompts with media in the scheduler, against each request alone without slots, chunks or cache."""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.engine.requests import request_of
from support.engine.scheduler_harness import Harness
from support.faults import has_param

from agentflow.engine.cache.token_run import INNER_IDS, TOKEN_BYTES
from agentflow.engine.media_run import (
    ID_BITS,
    INNER_ID_BITS,
    LEAD_BITS,
    MediaRun,
    lead_tokens,
    pseudo_tokens,
    rope_positions,
)
from agentflow.errors import BadArgument
from agentflow.protocol.sampling import SamplingParams


@dataclass(frozen=True)
class Picture:
    """``rows`` times ``columns`` tokens, after ``num_before`` tokens of text."""

    identity: str
    num_before: int
    rows: int
    columns: int

    @property
    def axes(self) -> list[tuple[int, int, int]]:
        return [(0, row, column) for row in range(self.rows) for column in range(self.columns)]


@dataclass(frozen=True)
class Job:
    pictures: list[Picture]
    num_after: int
    count: int


pictures = st.builds(
    Picture, st.sampled_from(["cat", "dog"]), st.integers(0, 4), st.integers(1, 3), st.integers(1, 3)
)
jobs = st.builds(Job, st.lists(pictures, max_size=3), st.integers(1, 9), st.integers(1, 12))


def request_parts(job: Job) -> tuple[list[int], list[MediaRun]]:
    """The prompt, with 7 in place of media, and its media."""
    prompt: list[int] = []
    media: list[MediaRun] = []
    for picture in job.pictures:
        prompt += [picture.num_before] * picture.num_before
        media.append(MediaRun(picture.identity, len(prompt), np.array(picture.axes).T))
        prompt += [7] * len(picture.axes)
    return prompt + [job.num_after] * job.num_after, media


def expected_output(job: Job) -> list[int]:
    """Token by token: positions by counting, and the fake model's hash of tokens and positions."""
    tokens: list[int] = []
    ropes: list[int] = []
    position = 0
    for picture in job.pictures:
        tokens += [picture.num_before] * picture.num_before
        ropes += range(position, position + picture.num_before)
        position += picture.num_before
        tokens += pseudo_tokens(MediaRun(picture.identity, 0, np.array(picture.axes).T)).tolist()
        for axes in picture.axes:
            place = np.array([position + axis for axis in axes])
            ropes.append(position if (place == position).all() else zlib.crc32(place.tobytes()))
        position += max(max(axes) for axes in picture.axes) + 1
    tokens += [job.num_after] * job.num_after
    ropes += range(position, position + job.num_after)
    position += job.num_after
    num_prompt = len(tokens)
    for _ in range(job.count):
        seen = tokens if ropes == [*range(len(tokens))] else tokens + ropes
        tokens.append(zlib.crc32(np.array(seen, dtype=np.int64).tobytes()) % 1000)
        ropes.append(position)
        position += 1
    return tokens[num_prompt:]


@given(
    work=st.lists(jobs, min_size=1, max_size=6),
    num_slots=st.integers(100, 200),
    token_budget=st.integers(1, 40),
    max_running=st.integers(1, 4),
    ahead=st.booleans(),
)
def test_prompts_with_media_give_what_each_gives_alone(
    work, num_slots, token_budget, max_running, ahead
) -> None:
    harness = Harness(num_slots, ahead=ahead, token_budget=token_budget, max_running=max_running)
    for number, job in enumerate(work):
        prompt, media = request_parts(job)
        harness.add(number, prompt, job.count, media=media)
    harness.run()
    harness.scheduler.check_idle()
    for number, job in enumerate(work):
        assert harness.output(number) == expected_output(job)


def test_a_prompt_shares_the_cache_up_to_a_picture_that_differs() -> None:
    harness = Harness(token_budget=64)
    for number, identity in enumerate(["cat", "cat", "dog"]):
        prompt, media = request_parts(Job([Picture(identity, 4, 2, 3)], 5, 1))
        harness.add(number, prompt, 1, media=media)
        harness.run()
    cached = [harness.requests[number].num_cached for number in range(3)]
    assert cached == [0, 14, 4]


@given(
    before=st.lists(st.integers(0, 3) | st.sampled_from([2**18, 2**20 - 1, 2**20]), max_size=14),
    identity=st.sampled_from(["cat", "dog"]),
    num_tokens=st.integers(1, 6),
    sees_all=st.booleans(),
)
def test_at_least_128_bits_of_a_picture_come_before_its_keys_and_values(
    before: list[int], identity: str, num_tokens: int, sees_all: bool
) -> None:
    run = MediaRun(identity, len(before), np.arange(num_tokens)[None], sees_all=sees_all)
    prompt = np.array([*before, *[7] * num_tokens, 5, 5], dtype=np.int32)
    request = request_of(0, prompt, 1, SamplingParams(), media=[run])
    assert request.tokens[: len(before)].tolist() == before  # the model reads the text
    ids = np.frombuffer(request.run(len(prompt)), dtype=np.int32).tolist()
    own, leads = pseudo_tokens(run).tolist(), ids[: len(before)]
    assert ids[len(before) :] == [*own, 5, 5]
    assert [one in INNER_IDS for one in own] == [sees_all] * (num_tokens - 1) + [False]
    bits = sum([INNER_ID_BITS if one in INNER_IDS else ID_BITS for one in own])
    for one, token in zip(reversed(leads), reversed(before), strict=True):
        if bits < 128 and token < 2**20:
            assert -(2**29) <= one < 0
            assert one % 2**20 == token  # texts stay distinct after any picture
        else:
            assert one == token
        bits += LEAD_BITS
    assert [request.cached_id(index) for index in range(len(prompt))] == ids
    assert request.run(len(prompt), 1) == request.run(len(prompt))[TOKEN_BYTES:]


def test_leads_of_different_pictures_differ() -> None:
    tokens = np.full(60, 3, dtype=np.int32)
    seen = [
        tuple(lead_tokens(tokens, [MediaRun(f"cat {number}", 30, np.arange(1)[None])]).values())
        for number in range(200)
    ]
    assert {len(leads) for leads in seen} == {11}
    assert len({*seen}) == 200
    for place in range(11):
        assert len({leads[place] for leads in seen}) > 100


def test_runs_in_a_row_share_no_text() -> None:
    tokens = np.full(60, 3, dtype=np.int32)
    runs = [MediaRun("cat", 26, np.arange(3)[None]), MediaRun("dog", 31, np.arange(1)[None])]
    leads = lead_tokens(tokens, [*runs, MediaRun("owl", 50, np.arange(5)[None])])
    assert [*leads] == [21, 22, 23, 24, 25, 29, 30]
    frames = [MediaRun("clip", 30 + 4 * number, np.arange(2)[None], 2 * number) for number in range(3)]
    assert [*lead_tokens(tokens, frames)] == [*range(22, 30)]  # in front of the first one only
    assert lead_tokens(tokens, [MediaRun("cat", 0, np.arange(4)[None])]) == {}


def test_pictures_of_few_tokens_share_the_text_before_them_but_not_all_of_it() -> None:
    harness = Harness(token_budget=64)
    for number, identity in enumerate(["cat", "cat", "dog"]):
        prompt, media = request_parts(Job([Picture(identity, 4, 2, 2)], 5, 1))
        harness.add(number, prompt, 1, media=media)
        harness.run()
    assert [harness.requests[number].num_cached for number in range(3)] == [0, 12, 3]
    harness.scheduler.check_idle()


def test_text_continues_after_the_largest_position_of_a_picture() -> None:
    _, media = request_parts(Job([Picture("cat", 2, 2, 3)], 2, 1))
    assert rope_positions(10, media).tolist() == [
        [0, 1, 2, 2, 2, 2, 2, 2, 5, 6, 7],
        [0, 1, 2, 2, 2, 3, 3, 3, 5, 6, 7],
        [0, 1, 2, 3, 4, 2, 3, 4, 5, 6, 7],
    ]


def test_pictures_have_no_log_probabilities() -> None:
    prompt, media = request_parts(Job([Picture("cat", 2, 2, 2)], 2, 0))
    with pytest.raises(BadArgument, check=has_param("prompt")):
        request_of(1, np.array(prompt, dtype=np.int32), 0, SamplingParams(), score_from=1, media=media)
