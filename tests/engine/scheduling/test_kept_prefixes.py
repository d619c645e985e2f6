"""Requests whose client asks to keep a beginning of the prompt: which tokens stay, for how long, and that no
request changes an answer."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from support.engine.scheduler_harness import Harness, expected_output

from agentflow.engine.media_run import MediaRun
from agentflow.engine.request import Request


class Timed:
    """A scheduler with 100 slots, on a clock that the test sets."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.harness = Harness(num_slots=100, token_budget=128)
        self.harness.scheduler.memory._clock = lambda: self.now
        self.num_asked = 0

    def ask(self, prompt: list[int], **origin: object) -> Request:
        self.num_asked += 1
        request = self.harness.add(self.num_asked, prompt, 1, **origin)
        self.harness.run()
        assert self.harness.output(self.num_asked) == expected_output(prompt, 1)
        return request

    def ask_others(self, tenant: str = "") -> None:
        """Other prompts than the test's fill the pool twice."""
        for _ in range(5):
            self.ask([100 + self.num_asked] * 39, tenant=tenant)


DOCUMENT = [1] * 30
QUESTION = [2] * 10


def test_a_kept_beginning_stays_for_its_time_after_the_last_request_that_keeps_it() -> None:
    timed = Timed()
    timed.ask(DOCUMENT + QUESTION, kept_prefixes=[(len(DOCUMENT), 300.0)])
    for _ in range(3):
        timed.ask_others()
        timed.now += 299
        asked = timed.ask(DOCUMENT + QUESTION, kept_prefixes=[(len(DOCUMENT), 300.0)])
        assert asked.num_cached == len(DOCUMENT)  # and no more of it
    timed.now += 301
    timed.ask_others()
    assert timed.ask(DOCUMENT + QUESTION).num_cached == 0
    timed.harness.scheduler.check_idle()


def test_a_beginning_that_nobody_keeps_goes() -> None:
    timed = Timed()
    timed.ask(DOCUMENT + QUESTION)
    timed.ask_others()
    assert timed.ask(DOCUMENT + QUESTION).num_cached == 0


def test_a_longer_one_outlasts_a_shorter_one() -> None:
    timed = Timed()
    kept = [(len(DOCUMENT), 3600.0), (len(DOCUMENT + QUESTION), 300.0)]
    timed.ask(DOCUMENT + QUESTION + [3], kept_prefixes=kept)
    timed.ask_others()
    assert timed.ask([*DOCUMENT, *QUESTION, 4], kept_prefixes=kept).num_cached == len(DOCUMENT + QUESTION)
    timed.now += 301
    timed.ask_others()
    assert timed.ask([*DOCUMENT, *QUESTION, 5]).num_cached == len(DOCUMENT)


def test_a_tenant_that_keeps_everything_takes_nothing_from_another() -> None:
    timed = Timed()
    for number in range(10):
        timed.ask([200 + number] * 30, tenant="hoarder", kept_prefixes=[(30, 1e9)])
    own = [3] * 30
    timed.ask(own, tenant="other")
    for number in range(10):
        timed.ask([300 + number] * 30, tenant="hoarder", kept_prefixes=[(30, 1e9)])
        assert timed.ask(own, tenant="other").num_cached == len(own) - 1


def test_a_beginning_is_never_cut_within_an_image_that_attends_both_ways() -> None:
    timed = Timed()
    media = [MediaRun("cat", 10, np.arange(20)[None], sees_all=True)]
    for _ in range(2):
        timed.num_asked += 1
        timed.harness.add(timed.num_asked, DOCUMENT + QUESTION, 1, media=media, kept_prefixes=[(25, 300.0)])
        timed.harness.run()
        timed.ask_others()
    assert timed.harness.requests[7].num_cached == 10


counts = st.integers(-5, 60)
seconds = st.sampled_from([0.0, -1.0, 1.0, 300.0, 1e300, math.inf])
requests = st.tuples(
    st.lists(st.integers(1, 2), min_size=1, max_size=40),
    st.integers(1, 8),
    st.sampled_from("ab"),
    st.lists(st.tuples(counts, seconds), max_size=5),
    st.integers(0, 400),
)


@given(work=st.lists(requests, min_size=1, max_size=8), ahead=st.booleans(), budget=st.integers(1, 40))
def test_every_answer_is_that_of_the_request_alone(work, ahead: bool, budget: int) -> None:
    harness = Harness(100, ahead=ahead, token_budget=budget, max_running=3)
    now = 0.0
    harness.scheduler.memory._clock = lambda: now
    for number, (prompt, count, tenant, kept, wait_s) in enumerate(work):
        harness.add(number, prompt, count, tenant=tenant, kept_prefixes=kept)
        harness.step()
        now += wait_s
    harness.run()
    harness.scheduler.check_idle()
    for number, (prompt, count, *_) in enumerate(work):
        assert harness.output(number) == expected_output(prompt, count)
