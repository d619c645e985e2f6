"""Which requests are resubmitted when an engine process dies, and which one is blamed."""

from __future__ import annotations

import random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.counted_lines import counted_lines

from agentflow.engine.media_run import SubmittedRun
from agentflow.engine.messages import Failed, Finished, Progress, Started, UpdateHint
from agentflow.engine.process.request_journal import MAX_DEATHS, RequestJournal
from agentflow.engine.request import Origin, Submit


def submit(number: int) -> Submit:
    return Submit(number, [number], None)


def finished(number: int) -> Finished:
    return Finished(number, [], "", "length", 1, 0, 0, [])


def journal_of(*numbers: int) -> RequestJournal:
    journal = RequestJournal()
    for number in numbers:
        journal.add(submit(number))
    return journal


def ids(submits: list[Submit]) -> list[int]:
    return [one.request_id for one in submits]


def test_requests_are_released_once_and_in_order():
    journal = journal_of(1, 2)
    assert ids(journal.take_ready()) == [1, 2]
    journal.add(submit(3))
    assert ids(journal.take_ready()) == [3]
    assert journal.take_ready() == []


def test_after_a_death_unfinished_requests_are_released_with_their_output():
    journal = journal_of(1, 2, 3)
    journal.take_ready()
    journal.receive(Started([1, 2]))
    journal.receive(Progress(2, "a", [7], [-0.5], [[(7, -0.5), (3, -1.0)]]))
    journal.receive(finished(1))
    journal.receive(Progress(2, "", [8], [-0.25], [[(8, -0.25)]]))
    journal.add(submit(4))
    assert journal.process_died() == ([], False)
    again = journal.take_ready()
    assert ids(again) == [2, 3, 4]
    assert (again[0].generated_ids, again[0].generated_logprobs) == ([7, 8], [-0.5, -0.25])
    assert again[0].generated_top_logprobs == [[(7, -0.5), (3, -1.0)], [(8, -0.25)]]
    assert again[1:] == [submit(3), submit(4)]


def test_f10d_a_request_that_is_sent_again_has_the_time_that_is_left():
    now_s = 100.0
    journal = RequestJournal(lambda: now_s)
    origin = Origin(deadline_s=10.0, patience_s=3.0, label="timed")
    journal.add(Submit(1, [1], None, origin=origin))
    journal.add(submit(2))
    now_s = 101.0
    [timed, plain] = journal.take_ready()
    assert (timed.origin, plain) == (
        msgspec.structs.replace(origin, deadline_s=9.0, patience_s=2.0),
        submit(2),
    )
    journal.receive(Progress(1, "a", [7], ()))
    for now_s, left_s in ((104.0, (6.0, -1.0)), (112.0, (-2.0, -9.0))):  # noqa: B007  the clock reads it
        journal.process_died()
        again = journal.take_ready()[0]
        assert (again.origin.deadline_s, again.origin.patience_s) == left_s
        assert again.generated_ids == [7]
        assert journal.resubmit(1) == again


def test_the_time_to_the_first_token_goes_on_when_a_request_is_sent_again():
    """The time counts from the request's arrival, or from the time that its reader gave instead."""
    now_s = 100.0
    journal = RequestJournal(lambda: now_s)
    journal.add(Submit(1, [1], None, origin=Origin(state=5, ttft_s=4.0)))
    now_s = 101.0
    assert journal.take_ready()[0].origin.ttft_s == 3.0
    journal.update_hint(UpdateHint(5, 1, 3, "latency", ttft_s=4.0))  # as before
    now_s = 102.0
    journal.process_died()
    assert journal.take_ready()[0].origin.ttft_s == 2.0
    journal.update_hint(UpdateHint(5, 1, 3, "latency", ttft_s=6.0))
    now_s = 105.0
    journal.process_died()
    assert journal.take_ready()[0].origin.ttft_s == 3.0


def test_a_request_that_is_sent_again_has_its_last_hint():
    journal = RequestJournal()
    origins = [Origin(state=state, program=1, task_group=2, label="kept") for state in (5, 5, 6)]
    for number, origin in enumerate(origins[:2], 1):
        journal.add(Submit(number, [number], None, origin=origin))
    journal.take_ready()
    journal.update_hint(UpdateHint(5, 1, 3, "latency"))
    journal.process_died()
    journal.add(Submit(3, [3], None, origin=origins[2]))
    journal.update_hint(UpdateHint(5, 7, 8, "throughput", tpot_s=0.5))
    hint = {"program": 7, "task_group": 8, "objective": "throughput", "tpot_s": 0.5}
    updated = msgspec.structs.replace(origins[0], **hint)
    assert [one.origin for one in journal.take_ready()] == [updated, updated, origins[2]]


def test_f4d_requests_wait_for_their_adapters_and_fail_without_them():
    journal = RequestJournal()
    for number, adapter in enumerate(["", "here", "gone"], 1):
        journal.add(Submit(number, [number], None, adapter=adapter))
    journal.wait_for(["here", "gone"])
    assert ids(journal.take_ready()) == [1]
    journal.adapter_loaded("here")
    assert ids(journal.take_ready()) == [2]
    ended = journal.adapter_gone("gone")
    assert [(end.request_id, end.code) for end in ended] == [(3, "engine_down")]
    journal.add(Submit(4, [4], None, adapter="gone"))
    assert ids(journal.take_ready()) == [4]  # for the engine to refuse
    assert [journal.needs(adapter) for adapter in ("gone", "here", "other")] == [True, True, False]
    journal.receive(finished(2))
    assert not journal.needs("here")


def test_f4d_a_suspect_is_tried_when_its_adapter_is_loaded():
    journal = RequestJournal()
    journal.add(Submit(1, [1], None, adapter="late"))
    journal.add(submit(2))
    journal.take_ready()
    journal.receive(Started([1, 2]))
    journal.process_died()
    journal.take_ready()
    journal.receive(Started([1, 2]))
    journal.process_died()
    journal.wait_for(["late"])
    assert ids(journal.take_ready()) == []
    journal.adapter_loaded("late")
    assert ids(journal.take_ready()) == [1]
    journal.receive(finished(1))
    assert ids(journal.take_ready()) == [2]


def test_an_aborted_request_ends_with_the_process_that_received_the_abort():
    journal = journal_of(1, 2)
    journal.take_ready()
    assert journal.abort(1)
    ended, _ = journal.process_died()
    assert [(end.request_id, end.code) for end in ended] == [(1, "cancelled")]
    assert not journal.abort(2)
    assert len(journal) == 0


def test_alone_at_two_deaths_without_progress_a_request_is_blamed():
    journal = journal_of(1, 2)
    for _ in range(2):
        journal.take_ready()
        journal.receive(Started([1]))
        ended, is_blamed = journal.process_died()
    assert ([end.request_id for end in ended], is_blamed) == ([1], True)
    assert ids(journal.take_ready()) == [2]


def test_progress_clears_blame_up_to_a_number_of_deaths():
    journal = journal_of(1)
    for number in range(MAX_DEATHS):
        assert ids(journal.take_ready()) == [1]
        journal.receive(Started([1]))
        journal.receive(Progress(1, "", [number], ()))
        ended, is_blamed = journal.process_died()
        assert not is_blamed
        assert len(ended) == (number == MAX_DEATHS - 1)


def test_suspects_are_tried_one_by_one_and_alone():
    journal = journal_of(1, 2, 3)
    for _ in range(2):
        journal.take_ready()
        journal.receive(Started([1, 2, 3]))
        assert journal.process_died() == ([], False)
    journal.add(submit(4))
    assert ids(journal.take_ready()) == [1]
    assert journal.take_ready() == []
    journal.receive(Started([1]))
    journal.receive(Progress(1, "", [5], ()))
    assert ids(journal.take_ready()) == [2]
    journal.receive(Started([2]))
    ended, is_blamed = journal.process_died()  # 1 was there too, but it is 2 that stood trial
    assert ([end.request_id for end in ended], is_blamed) == ([2], True)
    assert ids(journal.take_ready()) == [3]
    journal.receive(Started([3]))
    journal.receive(finished(3))
    assert ids(journal.take_ready()) == [1, 4]


@pytest.mark.parametrize("is_sent", [False, True])
def test_an_aborted_suspect_delays_no_other_request(is_sent):
    journal = journal_of(1, 2, 3)
    for _ in range(2):
        journal.take_ready()
        journal.receive(Started([1, 2]))
        journal.process_died()
    assert ids(journal.take_ready()) == [1]
    if is_sent:
        assert journal.abort(1)
        journal.receive(Failed(1, "cancelled", ""))
        assert ids(journal.take_ready()) == [2]
    else:
        assert not journal.abort(2)
        journal.receive(finished(1))
        assert ids(journal.take_ready()) == [3]


@given(
    seed=st.integers(0, 10_000),
    deadly=st.lists(st.integers(0, 9), max_size=3, unique=True),
    width=st.integers(1, 10),
)
def test_deadly_requests_fail_and_all_others_finish(seed, deadly, width):
    """A small engine: runs up to ``width`` requests, in steps; dies with a deadly one at its own length."""
    chance = random.Random(seed)
    lengths = {number: chance.randint(1, 4) for number in range(10)}
    journal = journal_of(*range(10))
    done: dict[int, int] = {}
    failed: list[int] = []
    num_deaths = 0
    while len(journal):
        running: dict[int, int] = {}
        waiting: list[Submit] = []
        is_alive = True
        while is_alive and len(journal):
            waiting += journal.take_ready()
            while waiting and len(running) < width:
                one = waiting.pop(0)
                running[one.request_id] = len(one.generated_ids)
                journal.receive(Started([one.request_id]))
            for number in chance.sample(sorted(running), chance.randint(1, len(running))):
                running[number] += 1
                if number in deadly and running[number] == lengths[number]:
                    is_alive = False
                    break
                journal.receive(Progress(number, "", [running[number]], ()))
                if running[number] == 5:
                    done[number] = running.pop(number)
                    journal.receive(finished(number))
        if not is_alive:
            num_deaths += 1
            assert num_deaths < 20
            failed += [end.request_id for end in journal.process_died()[0]]
    assert set(deadly) <= set(failed) | set(done)
    assert not set(deadly) & set(done)
    assert set(done) == set(range(10)) - set(failed)
    if len(deadly) <= 1:
        assert failed == deadly


@pytest.mark.parametrize("waits_for", ["image", "adapter", "no longer needed adapter"])
def test_f37_a_request_costs_the_same_however_many_others_wait(waits_for):
    """Each of them, and each frame of the process, asks which ones may be sent."""
    num_lines = {}
    for num_waiting in (100, 400):
        journal = RequestJournal()
        adapter = "late" if waits_for == "adapter" else ""
        journal.wait_for(["late"])
        with counted_lines() as lines:
            for number in range(num_waiting):
                media = [SubmittedRun(f"image {number}", 0, 1, b"")] if waits_for == "image" else []
                journal.add(Submit(number, [number], None, adapter=adapter, media=media))
                assert journal.missing_media() == {run.identity for run in media}
                assert len(journal.take_ready()) == (waits_for == "no longer needed adapter")
                assert not journal.needs("other")
            for number in range(num_waiting):
                if waits_for == "image":
                    journal.medium_sent(f"image {number}")
                    assert ids(journal.take_ready()) == [number]
            if adapter:
                journal.adapter_loaded("late")
                assert ids(journal.take_ready()) == [*range(num_waiting)]
        assert len(journal) == num_waiting
        num_lines[num_waiting] = lines.num
    assert num_lines[400] < 5 * num_lines[100]


def test_f37_a_frame_of_a_trial_looks_at_no_request_that_waits_for_its_end():
    num_lines = {}
    for num_waiting in (100, 400):
        journal = journal_of(1, 2)
        for _ in range(2):
            journal.take_ready()
            journal.receive(Started([1, 2]))
            journal.process_died()
        for number in range(3, num_waiting):
            media = [SubmittedRun(f"image {number}", 0, 1, b"")]
            journal.add(Submit(number, [number], None, media=media))
        assert ids(journal.take_ready()) == [1]
        with counted_lines() as lines:
            assert not journal.missing_media()
            assert journal.take_ready() == []
        num_lines[num_waiting] = lines.num
        journal.receive(finished(1))
        assert ids(journal.take_ready()) == [2]
        journal.receive(finished(2))
        assert journal.missing_media() == {f"image {number}" for number in range(3, num_waiting)}
    assert num_lines[400] == num_lines[100]


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["add", "add", "vanish", "sent", "loaded", "abort", "die", "replace", "give up"]),
            st.integers(0, 3),
            st.sets(st.integers(0, 3), max_size=2),
        ),
        max_size=40,
    )
)
def test_requests_are_sent_as_soon_as_the_process_has_their_images_and_adapters(steps):
    """Against a look at all requests that are queued."""
    journal, number = RequestJournal(), 0
    queued: dict[int, Submit] = {}
    sent: dict[int, Submit] = {}
    missing: set[str] = set()
    for step, which, images in steps:
        name = str(which)
        match step:
            case "add" | "vanish":
                number += 1
                media = [SubmittedRun(str(image), 0, 1, b"") for image in sorted(images)]
                queued[number] = Submit(number, [number], None, adapter=name, media=media)
                journal.add(queued[number])
                if step == "vanish":
                    assert not journal.abort(number)
                    del queued[number]
            case "sent":
                journal.medium_sent(name)
            case "loaded":
                missing.discard(name)
                journal.adapter_loaded(name)
            case "abort":
                first = next(iter(queued), None)
                if first is not None:
                    assert not journal.abort(first)
                    del queued[first]
            case "die" | "replace":
                assert (journal.process_died()[0] if step == "die" else journal.process_replaced()) == []
                queued, sent, missing = dict(sorted((queued | sent).items())), {}, {name}
                journal.media.clear()
                journal.wait_for(missing)
            case "give up":
                given = journal.give_up(adapter=name)
                assert [entry.submit for entry in given] == [
                    one for one in queued.values() if one.adapter == name
                ]
                queued = {key: one for key, one in queued.items() if one.adapter != name}
        assert journal.missing_media() <= {run.identity for one in queued.values() for run in one.media}
        ready = {
            key: one
            for key, one in queued.items()
            if one.adapter not in missing and journal.media.issuperset(run.identity for run in one.media)
        }
        assert sorted(ids(journal.take_ready())) == sorted(ready)
        queued = {key: one for key, one in queued.items() if key not in ready}
        sent |= ready
        assert len(journal) == len(queued) + len(sent)
        users = {one.adapter for one in (queued | sent).values()}
        assert all(journal.needs(adapter) == (adapter in users) for adapter in "0123")
    journal.fail_all("it is down")
    assert not any(journal.needs(adapter) for adapter in "0123")
