"""What is owed when an engine process dies, and who is to blame."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentflow.engine.process.ipc import Failed, Finished, Progress, Started, Submit
from agentflow.engine.process.request_journal import MAX_DEATHS, RequestJournal


def submit(number: int) -> Submit:
    return Submit(number, [number], None)


def finished(number: int) -> Finished:
    return Finished(number, [], "", "length", 1, 0, 0, [])


def ledger_of(*numbers: int) -> RequestJournal:
    ledger = RequestJournal()
    for number in numbers:
        ledger.add(submit(number))
    return ledger


def ids(submits: list[Submit]) -> list[int]:
    return [one.request_id for one in submits]


def test_requests_are_given_out_once_and_in_order():
    ledger = ledger_of(1, 2)
    assert ids(ledger.release()) == [1, 2]
    ledger.add(submit(3))
    assert ids(ledger.release()) == [3]
    assert ledger.release() == []


def test_after_a_death_all_that_has_not_ended_is_given_out_again_with_what_it_had():
    ledger = ledger_of(1, 2, 3)
    ledger.release()
    ledger.hear(Started([1, 2]))
    ledger.hear(Progress(2, "a", [7], [-0.5], [[(7, -0.5), (3, -1.0)]]))
    ledger.hear(finished(1))
    ledger.hear(Progress(2, "", [8], [-0.25], [[(8, -0.25)]]))
    ledger.add(submit(4))
    assert ledger.bury() == ([], False)
    again = ledger.release()
    assert ids(again) == [2, 3, 4]
    assert (again[0].generated_ids, again[0].generated_logprobs) == ([7, 8], [-0.5, -0.25])
    assert again[0].generated_top_logprobs == [[(7, -0.5), (3, -1.0)], [(8, -0.25)]]
    assert again[1:] == [submit(3), submit(4)]


def test_an_aborted_request_ends_with_the_process_that_was_told():
    ledger = ledger_of(1, 2)
    ledger.release()
    assert ledger.abort(1)
    ended, _ = ledger.bury()
    assert [(end.request_id, end.code) for end in ended] == [(1, "cancelled")]
    assert not ledger.abort(2)
    assert len(ledger) == 0


def test_alone_at_two_deaths_without_progress_a_request_is_convicted():
    ledger = ledger_of(1, 2)
    for _ in range(2):
        ledger.release()
        ledger.hear(Started([1]))
        ended, is_convicted = ledger.bury()
    assert ([end.request_id for end in ended], is_convicted) == ([1], True)
    assert ids(ledger.release()) == [2]


def test_progress_clears_but_not_for_ever():
    ledger = ledger_of(1)
    for number in range(MAX_DEATHS):
        assert ids(ledger.release()) == [1]
        ledger.hear(Started([1]))
        ledger.hear(Progress(1, "", [number], ()))
        ended, is_convicted = ledger.bury()
        assert not is_convicted
        assert len(ended) == (number == MAX_DEATHS - 1)


def test_suspects_are_tried_one_by_one_and_nobody_else_runs_meanwhile():
    ledger = ledger_of(1, 2, 3)
    for _ in range(2):
        ledger.release()
        ledger.hear(Started([1, 2, 3]))
        assert ledger.bury() == ([], False)
    ledger.add(submit(4))
    assert ids(ledger.release()) == [1]
    assert ledger.release() == []
    ledger.hear(Started([1]))
    ledger.hear(Progress(1, "", [5], ()))
    assert ids(ledger.release()) == [2]
    ledger.hear(Started([2]))
    ended, is_convicted = ledger.bury()  # 1 was there too, but it is 2 that stood trial
    assert ([end.request_id for end in ended], is_convicted) == ([2], True)
    assert ids(ledger.release()) == [3]
    ledger.hear(Started([3]))
    ledger.hear(finished(3))
    assert ids(ledger.release()) == [1, 4]


@pytest.mark.parametrize("is_sent", [False, True])
def test_a_suspect_that_is_aborted_holds_up_nobody(is_sent):
    ledger = ledger_of(1, 2, 3)
    for _ in range(2):
        ledger.release()
        ledger.hear(Started([1, 2]))
        ledger.bury()
    assert ids(ledger.release()) == [1]
    if is_sent:
        assert ledger.abort(1)
        ledger.hear(Failed(1, "cancelled", ""))
        assert ids(ledger.release()) == [2]
    else:
        assert not ledger.abort(2)
        ledger.hear(finished(1))
        assert ids(ledger.release()) == [3]


@given(
    seed=st.integers(0, 10_000),
    deadly=st.lists(st.integers(0, 9), max_size=3, unique=True),
    width=st.integers(1, 10),
)
def test_deadly_requests_fail_and_all_others_finish(seed, deadly, width):
    """A small engine: runs up to ``width`` requests, in steps; dies with a deadly one at its own length."""
    chance = random.Random(seed)
    lengths = {number: chance.randint(1, 4) for number in range(10)}
    ledger = ledger_of(*range(10))
    done: dict[int, int] = {}
    failed: list[int] = []
    num_deaths = 0
    while len(ledger):
        running: dict[int, int] = {}
        waiting: list[Submit] = []
        is_alive = True
        while is_alive and len(ledger):
            waiting += ledger.release()
            while waiting and len(running) < width:
                one = waiting.pop(0)
                running[one.request_id] = len(one.generated_ids)
                ledger.hear(Started([one.request_id]))
            for number in chance.sample(sorted(running), chance.randint(1, len(running))):
                running[number] += 1
                if number in deadly and running[number] == lengths[number]:
                    is_alive = False
                    break
                ledger.hear(Progress(number, "", [running[number]], ()))
                if running[number] == 5:
                    done[number] = running.pop(number)
                    ledger.hear(finished(number))
        if not is_alive:
            num_deaths += 1
            assert num_deaths < 20
            failed += [end.request_id for end in ledger.bury()[0]]
    assert set(deadly) <= set(failed) | set(done)
    assert not set(deadly) & set(done)
    assert set(done) == set(range(10)) - set(failed)
    if len(deadly) <= 1:
        assert failed == deadly
