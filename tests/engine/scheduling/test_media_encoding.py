"""Encodings of images in the scheduler: every request gets the same answer as alone, with images that are
shared, chunked, preempted, aborted or dropped for room."""

from __future__ import annotations

import itertools
import math
import zlib
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.counted_lines import counted_lines
from support.engine.fake_vision import answer_alone, prepared
from support.engine.scheduler_harness import Harness
from support.examples import examples

from agentflow.engine.batch import BatchOutput
from agentflow.engine.cache.radix_cache import RadixCache
from agentflow.engine.media_run import MediaRun, PreparedMedium, lead_tokens, pseudo_tokens
from agentflow.engine.request import AWAITED_GROUPS, Request, Row, Status
from agentflow.engine.scheduling import program_pauses
from agentflow.engine.scheduling import scheduler as scheduler_module
from agentflow.engine.scheduling.media_work import MediaWork
from agentflow.engine.scheduling.policies import match_order
from agentflow.engine.scheduling.retries import divide_work

MEDIA = {
    "cat": prepared(b"cat", num_rows=3),
    "dog": prepared(b"dog", num_rows=4),
    "owl": prepared(b"owl", num_rows=3, sees_all=True),
    "elk": prepared(b"elk", num_rows=5, sees_all=True, num_bytes=6000),
}


def thousand(seen: np.ndarray) -> int:
    return zlib.crc32(seen.tobytes()) % 1000


@dataclass
class Prompt:
    """A prompt of texts (a number of equal tokens) and images, and its runs."""

    parts: list[int | str]
    ids: list[int] = field(default_factory=list)
    runs: list[MediaRun] = field(default_factory=list)

    def __post_init__(self) -> None:
        for part in self.parts:
            if isinstance(part, int):
                self.ids += [part] * part
                continue
            for piece in MEDIA[part].pieces:
                if isinstance(piece, str):
                    self.ids.append(500)
                else:
                    run = piece.at(MEDIA[part].identity, len(self.ids))
                    self.runs.append(run)
                    self.ids += pseudo_tokens(run).tolist()

    @property
    def media(self) -> list[PreparedMedium]:
        return [MEDIA[part] for part in dict.fromkeys(self.parts) if isinstance(part, str)]

    def alone(self, count: int) -> list[int]:
        return answer_alone(self.ids, self.media, count, thousand)


parts = st.lists(st.one_of(st.integers(1, 4), st.sampled_from([*MEDIA])), min_size=1, max_size=5)
prompts = parts.map(Prompt)


def harness_with(**options) -> Harness:
    harness = Harness(**options)
    for medium in MEDIA.values():
        harness.media.add(medium)
    return harness


@given(
    work=st.lists(
        st.tuples(prompts, st.integers(1, 10), st.sampled_from(["a", "b"])), min_size=1, max_size=6
    ),
    events=st.lists(st.sampled_from(["step", "step", "step", "abort", "fail", "preempt"]), max_size=30),
    num_slots=st.integers(110, 200),
    token_budget=st.integers(1, 40),
    max_running=st.integers(1, 4),
    feature_bytes=st.sampled_from([0, 60, 150, 10_000]),
    ahead=st.booleans(),
    policy=st.sampled_from(["fair-lpm", "lpm", "fcfs"]),
)
def test_answers_are_the_same_as_alone(
    work, events, num_slots, token_budget, max_running, feature_bytes, ahead, policy
) -> None:
    harness = harness_with(
        num_slots=num_slots,
        ahead=ahead,
        feature_bytes=feature_bytes,
        token_budget=token_budget,
        max_running=max_running,
        policy=policy,
    )
    for number, (prompt, count, tenant) in enumerate(work):
        harness.add(number, prompt.ids, count, media=prompt.runs, tenant=tenant)
    gone: set[int] = set()
    for event in events:
        if event == "step":
            harness.step()
        elif event == "abort":
            number = len(gone)
            if number < len(work):
                gone.add(number)
                harness.scheduler.release(harness.requests[number])
        elif event == "fail":
            for request in harness.fail():
                gone.add(request.id)
                harness.scheduler.release(request)
        elif not harness.in_flight:
            running = [*harness.scheduler.running.values()]
            if running:
                harness.scheduler.preempt(running[-1])
    harness.run()
    harness.scheduler.check_idle()
    for number, (prompt, count, _) in enumerate(work):
        if number not in gone:
            assert harness.output(number) == prompt.alone(count)
    total = sum(
        harness.runner.feature_bytes(encoding._medium) for encoding in harness.runner.encodings.values()
    )
    assert harness.media.feature_bytes == total


arrivals = st.fixed_dictionaries(
    {
        "prompt": prompts,
        "count": st.integers(1, 8),
        "tenant": st.sampled_from("aab"),
        "extra": st.sampled_from(["", "", "salt"]),
        "objective": st.sampled_from(["latency", "throughput"]),
        "task_group": st.sampled_from([0, 1, AWAITED_GROUPS + 1]),
        "program": st.sampled_from([0, 1, 2, 3, 3]),
        "state": st.sampled_from([0, 1, 2, 3, 4]),
        "priority": st.sampled_from([0, 0, 1]),
        "is_ahead": st.sampled_from([False, False, True]),
        "deadline": st.sampled_from([math.inf, 5.0]),
    }
)
EVENTS = ["add"] * 4 + ["step"] * 6 + ["abort", "fail", "preempt", "hint", "close"]


@examples(150)
@given(
    work=st.lists(arrivals, min_size=6, max_size=14),
    events=st.lists(st.tuples(st.sampled_from(EVENTS), st.integers(0, 99)), min_size=30, max_size=60),
    num_slots=st.integers(110, 200),
    token_budget=st.integers(4, 40),
    max_running=st.integers(1, 6),
    feature_bytes=st.sampled_from([0, 60, 150, 10_000]),
    tpot_target_ms=st.sampled_from([None, 4, 12]),
    max_unencoded=st.integers(1, 3),
    max_passed=st.integers(1, 3),
    max_few=st.integers(0, 4),
    ahead=st.booleans(),
    policy=st.sampled_from(["fair-lpm", "fair-lpm", "lpm", "fcfs", "random", "dfs-weight"]),
)
def test_f37_each_request_ends_as_alone_whatever_waits_for_what(
    work,
    events,
    num_slots,
    token_budget,
    max_running,
    feature_bytes,
    tpot_target_ms,
    max_unencoded,
    max_passed,
    max_few,
    ahead,
    policy,
) -> None:
    """For memory, for images, for the time of steps, for other requests' tokens, or with a paused program."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scheduler_module, "MAX_UNENCODED", max_unencoded)
        patch.setattr(scheduler_module, "MAX_PASSED", max_passed)
        patch.setattr(match_order, "MAX_FEW", max_few)
        patch.setattr(program_pauses, "THRASHING", -1.0)
        patch.setattr(program_pauses, "COSTLY_GAPS", math.inf)
        clock = itertools.count(0.0, 0.25)
        harness = harness_with(
            num_slots=num_slots,
            ahead=ahead,
            feature_bytes=feature_bytes,
            token_budget=token_budget,
            max_running=max_running,
            policy=policy,
            tpot_target_ms=tpot_target_ms,
            clock=clock.__next__,
        )
        scheduler = harness.scheduler
        complete = scheduler.complete

        def complete_in_time(output: BatchOutput) -> list[Row]:
            return complete(output, 2e-3 + 1e-3 * len(output.token_ids))

        patch.setattr(scheduler, "complete", complete_in_time)
        fits = scheduler._fits

        def fits_exactly(request: Request, num_left: int, available: int) -> bool:
            """The tokens that open states need next are counted for each request."""
            found = fits(request, num_left, available)
            after, scheduler._most_expected = scheduler._most_expected, math.inf
            assert fits(request, num_left, available) == found
            scheduler._most_expected = after
            return found

        patch.setattr(scheduler, "_fits", fits_exactly)
        coming, wanted, gone = [*work], {}, set()

        def add() -> None:
            origin = {**coming.pop(0)}
            number, prompt, count = len(wanted), origin.pop("prompt"), origin.pop("count")
            wanted[number] = prompt.alone(count)
            harness.add(number, prompt.ids, count, media=prompt.runs, **origin)

        for event, number in events:
            match event:
                case "add" if coming:
                    add()
                case "step":
                    harness.step()
                case "abort" if wanted:
                    gone.add(number % len(wanted))
                    scheduler.release(harness.requests[number % len(wanted)])
                case "fail":
                    for request in harness.fail():
                        gone.add(request.id)
                        scheduler.release(request)
                case "preempt" if scheduler.running and not harness.in_flight:
                    running = [*scheduler.running.values()]
                    scheduler.preempt(running[number % len(running)])
                case "hint":
                    objective = "latency" if number % 2 else "throughput"
                    scheduler.update_hint(number % 5, number % 4, number % 3, objective)
                case "close":
                    scheduler.close_state(number % 5)
        while coming:
            add()
        num_idle = 0
        while num_idle < 2_000 and (len(scheduler.waiting) or scheduler.running or harness.in_flight):
            num_idle = 0 if harness.step() else num_idle + 1
        scheduler.check_idle()
        assert not harness.media.wanted
        for number, output in wanted.items():
            assert number in gone or harness.output(number) == output


@given(
    work=st.lists(prompts, min_size=1, max_size=6),
    token_budget=st.integers(1, 40),
    num_slots=st.sampled_from([120, 4096]),
)
def test_hits_are_where_tokens_and_pixels_are_equal(work, token_budget, num_slots) -> None:
    harness = harness_with(num_slots=num_slots, feature_bytes=10_000, token_budget=token_budget)
    seen: list[list[int]] = []
    for number, prompt in enumerate(work):
        request = harness.add(number, prompt.ids, 3, media=prompt.runs)
        harness.run()
        assert harness.output(number) == prompt.alone(3)
        reusable = request.media.whole_end(-1, len(prompt.ids) - 1)
        common = [num_common(old, with_leads_of(prompt)[:reusable]) for old in seen]
        wanted = max(common, default=0)
        # No prefix ends in a run that attends both ways, not even in one that eviction shortened.
        assert request.media.whole_end(-1, request.num_cached) == request.num_cached
        if num_slots == 4096:
            assert request.num_cached == wanted
        answer = request.tokens[len(prompt.ids) : request.num_tokens - 1].tolist()
        seen.append(with_leads_of(prompt) + answer)


def with_leads_of(prompt: Prompt) -> list[int]:
    """The ids of the prompt, as the cache has them: in front of short runs, text stands for the image."""
    leads = lead_tokens(np.array(prompt.ids, dtype=np.int32), prompt.runs)
    return [leads.get(index, one) for index, one in enumerate(prompt.ids)]


def num_common(one: list[int], other: list[int]) -> int:
    return next(
        (n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
    )


def test_a_picture_is_encoded_once_while_warm_and_not_if_its_kv_is_cached() -> None:
    harness = harness_with(feature_bytes=10_000, token_budget=64)
    for number, part in enumerate([1, 2, 3]):  # different texts before it: its keys and values differ
        prompt = Prompt([part, "cat", 1])
        harness.add(number, prompt.ids, 1, media=prompt.runs)
        harness.run()
    assert harness.runner.num_encoded == 1
    cold = harness_with(feature_bytes=10_000, token_budget=64)
    prompt = Prompt(["cat", 4])
    cold.add(0, prompt.ids, 1, media=prompt.runs)
    cold.run()
    cold.media.shrink([])
    assert not cold.runner.encodings
    longer = Prompt(["cat", 4, 3])
    cold.add(1, longer.ids, 1, media=longer.runs)
    cold.run()
    assert cold.output(1) == longer.alone(1)
    assert cold.runner.num_encoded == 1


def test_a_waiting_picture_holds_no_slots() -> None:
    harness = harness_with(feature_bytes=10_000, token_budget=64)
    prompt = Prompt([4, "elk", 1])
    request = harness.add(0, prompt.ids, 1, media=prompt.runs)
    while harness.media.num_encoded == 0:
        assert harness.step()
        assert request.status is Status.WAITING
        assert harness.scheduler.memory.num_in_use == 0
    harness.run()
    assert harness.output(0) == prompt.alone(1)


def test_slices_are_not_run_for_requests_that_have_left() -> None:
    harness = harness_with(feature_bytes=10_000, token_budget=64)
    prompt = Prompt([4, "cat", 1])
    request = harness.add(0, prompt.ids, 1, media=prompt.runs)
    assert harness.scheduler.schedule() is None
    assert harness.media.planned
    harness.scheduler.release(request)
    assert not harness.media.planned


def test_pictures_of_one_tenant_do_not_stretch_the_steps_of_others() -> None:
    """With simulated time: a slice takes 2 ms, a step 10 ms and 0.1 ms for each token."""
    now = 0.0
    harness = Harness(feature_bytes=1e6, token_budget=64, max_running=4)

    def on_slices(_: str, count: int) -> None:
        nonlocal now
        now += 2e-3 * count

    harness.runner._on_slices = on_slices
    media = harness.scheduler.media = harness.media = MediaWork(harness.runner, 1e6, clock=lambda: now)
    floods = [prepared(b"flood %d" % number, num_bytes=100_000, num_rows=2) for number in range(6)]
    for medium in floods:
        media.add(medium)
    decoding = harness.add(0, [1] * 8, 100, tenant="reader")
    durations: list[float] = []
    answered: list[int] = []
    for step in range(60):
        if step == 20:
            for number, medium in enumerate(floods):
                runs = [
                    piece.at(medium.identity, 1 + 3 * index)
                    for index, piece in enumerate(medium.pieces[1::2])
                ]
                ids = [7, *pseudo_tokens(runs[0]).tolist(), 7, *pseudo_tokens(runs[1]).tolist(), 7]
                harness.add(10 + number, ids, 1, media=runs, tenant="flood")
        if step == 22:
            harness.add(1, [2] * 30, 1, tenant="other")
        before = now
        assert harness.launch()
        batch = harness.in_flight.popleft()
        took_s = 0.01 + 1e-4 * len(batch.token_ids)
        now += took_s
        for row in harness.scheduler.complete(harness.runner.collect(batch), took_s):
            if row.request.num_generated >= row.request.max_new_tokens:
                answered.append(row.request.id)
                harness.scheduler.release(row.request)
        durations.append(now - before)
        if 1 in answered and len(durations) > 45:
            break
    assert max(durations[21:]) <= 2.75 * 0.0102 + 2e-3
    assert 1 in answered  # it did not wait for the pictures, which take 1.2 s
    assert len(answered) <= 3
    assert decoding.num_generated > 40


@pytest.mark.parametrize("policy", ["fair-lpm", "lpm"])
@pytest.mark.parametrize("is_shared", [False, True])
@pytest.mark.parametrize("task_group", [0, 1])
def test_f37_the_work_of_a_step_does_not_grow_with_the_requests_that_wait_for_the_encoding_of_their_image(
    policy, is_shared, task_group
) -> None:
    """For any number of waiting requests, whose prompts begin with the same text or with the image. All
    requests for text start."""
    num_lines = {}
    for num_waiting in (200, 1200):
        harness = Harness(feature_bytes=1e6, token_budget=64, max_running=64, policy=policy)
        media = MediaWork(harness.runner, 1e6, clock=itertools.count(0.0, 1e-3).__next__)
        harness.scheduler.media = harness.media = media
        harness.add(0, [1] * 8, 100, tenant="reader")
        for _ in range(10):
            harness.step()
        for number in range(num_waiting):
            medium = prepared(b"flood %d" % number, num_bytes=30_000, num_rows=2)
            media.add(medium)
            run = medium.pieces[1].at(medium.identity, 1 if is_shared else 0)
            prompt = [*([7] if is_shared else []), *pseudo_tokens(run).tolist(), 7]
            harness.add(10 + number, prompt, 1, media=[run], tenant="flood", task_group=task_group)
        for _ in range(20):  # each of the first steps looks at some of them
            harness.step()
        texts = [
            harness.add(1, [2] * 30, 1, tenant="reader"),
            harness.add(2, [7] + [3] * 30, 1, tenant="flood"),
        ]
        with counted_lines() as lines:
            assert harness.scheduler.schedule() is not None
        assert [text.status for text in texts] == [Status.RUNNING] * 2
        num_lines[num_waiting] = lines.num
    assert num_lines[1200] < 2 * num_lines[200]


@pytest.mark.parametrize("policy", ["fair-lpm", "lpm"])
@pytest.mark.parametrize("num_images", [1, 500])
@pytest.mark.parametrize("task_group", [0, 1])
def test_f37_no_step_looks_at_all_requests_of_a_flood_of_images(policy, num_images, task_group) -> None:
    """Neither when they arrive, nor when an image is encoded for which all wait."""
    most_lines = {}
    for num_waiting in (250, 500):
        harness = Harness(feature_bytes=1e9, token_budget=64, max_running=8, policy=policy)
        clock = itertools.count(0.0, 1e-3).__next__
        media = harness.scheduler.media = harness.media = MediaWork(harness.runner, 1e9, clock)
        harness.add(0, [1] * 8, 100, tenant="reader")
        for _ in range(10):
            harness.step()
        for number in range(num_waiting):
            medium = prepared(b"flood %d" % (number % num_images), num_bytes=30_000, num_rows=2)
            if medium.identity not in media:
                media.add(medium)
            run = medium.pieces[1].at(medium.identity, 1)
            prompt = [7, *pseudo_tokens(run).tolist(), number]
            harness.add(10 + number, prompt, 1, media=[run], tenant="flood", task_group=task_group)
        most_lines[num_waiting] = 0
        for _ in range(15):
            with counted_lines() as lines:
                batch = harness.scheduler.schedule()
            most_lines[num_waiting] = max(most_lines[num_waiting], lines.num)
            media.run_planned()
            if batch is not None:
                output = harness.runner.collect(harness.runner.launch(batch))
                for row in harness.scheduler.complete(output):
                    if row.request.num_generated >= row.request.max_new_tokens:
                        harness.scheduler.release(row.request)
        assert media.num_encoded
    assert most_lines[500] < 1.5 * most_lines[250]


def test_f37_a_text_passes_requests_that_wait_for_their_images_and_need_the_same_token_next() -> None:
    """Nothing of their prompts is cached: their system prompt is computed once the first image is encoded."""
    harness = Harness(feature_bytes=1e6, token_budget=64, max_running=64)
    media = MediaWork(harness.runner, 1e6, clock=itertools.count(0.0, 1e-3).__next__)
    harness.scheduler.media = harness.media = media
    harness.add(0, [1] * 8, 100, tenant="reader")
    for _ in range(10):
        harness.step()
    for number in range(100):
        medium = prepared(b"flood %d" % number, num_bytes=30_000, num_rows=2)
        media.add(medium)
        run = medium.pieces[1].at(medium.identity, 20)
        harness.add(10 + number, [*([7] * 20), *pseudo_tokens(run).tolist(), 7], 1, media=[run])
    text = harness.add(1, [*([7] * 20), 3], 1)
    harness.step()
    assert text.status is not Status.WAITING


def test_f37_a_step_hardly_looks_at_tenants_that_wait_for_the_encoding_of_their_images() -> None:
    """Each has one image, and the reader a text."""
    num_lines = {}
    for num_tenants in (200, 800):
        harness = Harness(feature_bytes=1e6, token_budget=64, max_running=64)
        media = MediaWork(harness.runner, 1e6, clock=itertools.count(0.0, 1e-3).__next__)
        harness.scheduler.media = harness.media = media
        harness.add(0, [1] * 8, 100, tenant="reader")
        for _ in range(10):
            harness.step()
        for number in range(num_tenants):
            medium = prepared(b"flood %d" % number, num_bytes=30_000, num_rows=2)
            media.add(medium)
            run = medium.pieces[1].at(medium.identity, 1)
            prompt = [7, *pseudo_tokens(run).tolist(), 7]
            harness.add(10 + number, prompt, 1, media=[run], tenant=f"flood {number}")
        for _ in range(10):
            harness.step()
        text = harness.add(1, [2] * 30, 1, tenant="reader")
        with counted_lines() as lines:
            assert harness.scheduler.schedule() is not None
        assert text.status is Status.RUNNING
        num_lines[num_tenants] = lines.num
    assert num_lines[800] - num_lines[200] < 600 * 40


def test_f37_a_request_starts_once_its_image_is_encoded_however_many_wait_for_other_images() -> None:
    """An earlier request with the same image was encoded for. The image of no other request is ready."""
    harness = Harness(feature_bytes=1e9, token_budget=64, max_running=64)
    media = harness.media
    assert media is not None
    harness.add(0, [1] * 8, 100, tenant="reader")
    flood: list = []
    for number in range(200):
        medium = prepared(b"flood %d" % (number if number != 150 else 0), num_bytes=30_000, num_rows=2)
        media.add(medium)
        run = medium.pieces[1].at(medium.identity, 1)
        prompt = [number, *pseudo_tokens(run).tolist(), 7]
        flood.append(harness.add(10 + number, prompt, 1, media=[run], tenant="flood"))
    while flood[150].status is Status.WAITING:
        assert flood[0].status is Status.WAITING or flood[149].status is Status.WAITING
        assert harness.step()
    assert flood[149].status is Status.WAITING
    assert not media.is_ready(flood[149].media.runs[0].identity)
    harness.run()
    assert all(one.status is Status.FINISHED for one in flood)


class SlowEncoding:
    """An encoding of ten slices that has begun. ``took_s``: the time of each slice."""

    def __init__(self) -> None:
        runner = Harness(feature_bytes=1e6).runner
        runner._on_slices = self._advance
        self._now, self.took_s = 0.0, 1.0
        self.media = MediaWork(runner, 1e6, clock=lambda: self._now)
        medium = prepared(b"slow", num_bytes=9_500)
        self.media.add(medium)
        self.identity = medium.identity
        assert self.media.begin(medium.identity, [])
        assert self.media.num_left(medium.identity) == 10

    def _advance(self, _: str, count: int) -> None:
        self._now += self.took_s * count


@pytest.mark.parametrize("stalled", [0, 3])
def test_f37_a_slice_that_was_stalled_changes_the_time_of_slices_little(stalled: int) -> None:
    """Weights that are read from the disk for the first time, or a machine that was paused."""
    slow = SlowEncoding()
    for number in range(5):
        slow.took_s = 30.0 if number == stalled else 0.01
        slow.media.start_step()
        slow.media.plan(slow.identity, 1)
        slow.media.run_planned()
    assert slow.media.slice_s(slow.identity) == pytest.approx(0.01, rel=0.01)


def test_an_encoding_whose_slices_take_longer_than_planned_goes_on_in_later_steps() -> None:
    slow = SlowEncoding()
    media, identity = slow.media, slow.identity
    media.start_step()
    assert media.plan(identity, 1) == 1
    media.run_planned()
    assert (media.num_left(identity), media.slice_s(identity)) == (9, 1.0)
    slow.took_s = 2.0
    media.start_step()
    assert media.plan(identity, 3) == 3  # 3 s, and two take 4 s
    media.run_planned()
    assert media.num_left(identity) == 8
    slow.took_s = 1.0
    media.start_step()
    assert media.plan(identity, 3) == 1  # two of them were planned before, and are not charged again
    media.run_planned()
    assert media.num_left(identity) == 5
    while not media.is_ready(identity):
        media.start_step()
        media.plan(identity, 1)
        media.run_planned()


def test_f37_room_is_made_without_a_look_at_all_features() -> None:
    num_lines = {}
    for num_features in (100, 800):
        runner = Harness(feature_bytes=1.0).runner
        most_bytes = num_features * runner.feature_bytes(prepared(b"any", num_rows=2))
        media = MediaWork(runner, most_bytes, clock=lambda: 0.0)
        for number in range(2 * num_features):
            medium = prepared(b"%d" % number, num_bytes=1_000, num_rows=2)
            media.add(medium)
            media.start_step()
            with counted_lines() as lines:
                assert media.begin(medium.identity, [])
            media.plan(medium.identity, media.num_left(medium.identity))
            assert not media.run_planned()
        assert media.num_evicted == num_features
        num_lines[num_features] = lines.num
    assert num_lines[800] < 1.5 * num_lines[100]


def test_features_that_a_step_uses_stay() -> None:
    harness = harness_with(feature_bytes=48 + 48, token_budget=64)
    for number, part in enumerate(["cat", "owl"]):
        prompt = Prompt([part, 1])
        harness.add(number, prompt.ids, 1, media=prompt.runs)
        harness.run()
    both, other = Prompt([3, "cat", "owl", 1]), Prompt(["dog", 1])
    harness.add(2, both.ids, 1, media=both.runs)
    harness.add(3, other.ids, 1, media=other.runs)
    harness.run()
    assert harness.output(2) == both.alone(1)
    assert harness.output(3) == other.alone(1)


def test_features_that_a_running_request_needs_stay() -> None:
    harness = harness_with(feature_bytes=64, token_budget=4)
    for number, part in enumerate(["cat", "dog"]):
        prompt = Prompt([part, 1])
        harness.add(number, prompt.ids, 1, media=prompt.runs, tenant=part)
    harness.run()
    assert harness.runner.num_encoded == 2


def test_a_batch_that_is_too_large_is_divided_between_runs() -> None:
    prompt = Prompt([4, "elk", 3])
    request = Harness().add(0, prompt.ids, 0, media=prompt.runs)
    ends = np.cumsum([count for part in divide_work([(request, len(prompt.ids))], 2) for _, count in part])
    assert ends[-1] == len(prompt.ids)
    assert [end for end in ends if any(run.start < end < run.end for run in prompt.runs)] == []


def test_eviction_takes_whole_runs() -> None:
    prompt = Prompt([2, "elk", 1])
    cache = RadixCache()
    run = np.array(prompt.ids[:-1], dtype=np.int32).tobytes()
    cache.extend(cache.match("", b""), "", run, np.arange(len(run) // 4, dtype=np.int32))
    for end in (prompt.runs[1].start, prompt.runs[0].end, prompt.runs[0].start):
        assert len(cache.evict(1)) > 0
        assert cache.num_cached == cache.peek("", run) == end
