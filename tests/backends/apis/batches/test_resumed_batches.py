"""Maps in batches that end early, and later maps that continue their batches."""

from __future__ import annotations

import json
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import anyio
import pytest
from openai.types import BatchError
from support.apis import openai_answers
from support.apis.batch_sessions import MODELS, VENDORS, ask, backend_at, compare, session_on
from support.apis.batch_vendors import FakeVendor, OpenAIVendor
from support.apis.fake_server import Answer, AnyAnswer, Hold, Received, fake_server
from support.process_template import start_python
from support.programs import ask_twice

import agentflow as af
from agentflow.errors import BadArgument, RequestRefused
from agentflow.language import link

pytestmark = pytest.mark.anyio

QUESTIONS = ["a", "b", "c"]


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "results.jsonl")


def file_of(path: str, suffix: str = ".batches") -> Path:
    return Path(path + suffix)


async def map_all(vendor: FakeVendor, program: Any, path: str, **options: Any) -> Any:
    async with session_on(vendor) as place:
        return await place.flow.map(program, QUESTIONS, batch=True, resume=path, **options)


async def plain(vendor: FakeVendor, program: Any) -> Any:
    async with session_on(vendor) as place:
        return await place.flow.map(program, QUESTIONS)


def requests_of(vendor: FakeVendor) -> Counter[str]:
    """How often each request was sent in a batch, without its seed."""
    bodies = [{**body, "seed": None} for batch in vendor.sent for body in batch]
    return Counter(json.dumps(body, sort_keys=True) for body in bodies)


class Interruption:
    """Never answers request ``number`` (from 0); ``acts``: the vendor acts on it."""

    def __init__(self, vendor: FakeVendor, number: int, *, acts: bool) -> None:
        self._vendor = vendor
        self._number = number
        self._acts = acts
        self.num_received = 0
        self.is_over = anyio.Event()

    def __call__(self, request: Received) -> AnyAnswer | None:
        self.num_received += 1
        if self.num_received != self._number + 1:
            return None
        if self._acts:
            self._vendor.answer(request)
        self.is_over.set()
        return Answer([Hold()])


async def interrupted(vendor: FakeVendor, program: Any, path: str, number: int, *, acts: bool) -> bool:
    """Runs a map until request ``number``. False if the map ended before."""
    interruption = Interruption(vendor, number, acts=acts)
    vendor.override = interruption
    has_ended = False
    async with anyio.create_task_group() as group:

        async def run() -> None:
            nonlocal has_ended
            await map_all(vendor, program, path)
            has_ended = True
            interruption.is_over.set()

        group.start_soon(run)
        await interruption.is_over.wait()
        group.cancel_scope.cancel()
    vendor.override = lambda request: None
    return not has_ended


@pytest.mark.parametrize(
    ("program", "acts"),
    [
        pytest.param(ask_twice, False, id="turns before"),
        pytest.param(ask_twice, True, id="turns after", marks=pytest.mark.full),
        pytest.param(compare, False, id="fork before", marks=pytest.mark.full),
        pytest.param(compare, True, id="fork after"),
    ],
)
async def test_a_map_that_ends_at_any_request_sends_no_request_twice(
    tmp_path: Path, request: pytest.FixtureRequest, program: Any, acts: bool
) -> None:
    for name, kind in VENDORS.items():
        expected = await plain(kind(), program)
        number = 0
        while True:
            vendor, path = kind(), str(tmp_path / f"{name}-{number}.jsonl")
            if not await interrupted(vendor, program, path, number, acts=acts):
                break
            assert vendor.cancelled == []
            assert await map_all(vendor, program, path) == expected
            assert max(requests_of(vendor).values()) == 1
            assert vendor.num_batches == 2
            number += 1
        assert number >= 6


async def test_a_cancelled_map_waits_for_no_counters(
    vendor: FakeVendor, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link, "_STATS_S", 1_000.0)
    assert await interrupted(vendor, ask, path, 2, acts=True)


async def test_the_file_of_batches_is_removed_when_all_inputs_have_results(
    vendor: FakeVendor, path: str
) -> None:
    assert await interrupted(vendor, ask, path, 2, acts=True)
    assert file_of(path).exists()
    found = await map_all(vendor, ask, path)
    assert not file_of(path).exists()
    assert await map_all(vendor, ask, path) == found
    assert vendor.num_batches == 1


async def test_requests_that_failed_are_sent_again_and_others_are_not(vendor: FakeVendor, path: str) -> None:
    vendor.fate = lambda body: "expired" if "b" in str(body["messages"][0]) else "answered"
    found = await map_all(vendor, ask_twice, path, on_error="return")
    assert [isinstance(one, af.Overloaded) for one in found] == [False, True, False]
    vendor.fate = lambda body: "answered"
    assert await map_all(vendor, ask_twice, path) == await plain(type(vendor)(), ask_twice)
    assert [len(batch) for batch in vendor.sent] == [3, 2, 1, 1]


async def test_a_failure_in_a_later_stage_does_not_repeat_the_earlier_one(
    vendor: FakeVendor, path: str
) -> None:
    vendor.fate = lambda body: "refused" if "And?" in str(body["messages"]) else "answered"
    with pytest.raises(RequestRefused):
        await map_all(vendor, ask_twice, path)
    vendor.fate = lambda body: "answered"
    assert await map_all(vendor, ask_twice, path) == await plain(type(vendor)(), ask_twice)
    assert [len(batch) for batch in vendor.sent] == [3, 3, 3]


async def failed_and_sent_again(vendor: FakeVendor, path: str, program: Any) -> None:
    """A map whose first batch expires, and that ends while the second attempt runs."""
    vendor.fate = lambda body: "expired" if vendor.num_batches == 1 else "answered"
    sent_again = anyio.Event()

    def hold(request: Received) -> AnyAnswer | None:
        if vendor.num_batches < 2 or request.method != "GET":
            return None
        sent_again.set()
        return Answer([Hold()])

    vendor.override = hold
    async with anyio.create_task_group() as group:

        async def run() -> None:
            await map_all(vendor, program, path, retries=1)

        group.start_soon(run)
        await sent_again.wait()
        group.cancel_scope.cancel()
    vendor.override = lambda request: None


async def test_a_retry_that_runs_when_the_map_ends_is_found_again(vendor: FakeVendor, path: str) -> None:
    await failed_and_sent_again(vendor, path, ask)
    assert await map_all(vendor, ask, path) == await plain(type(vendor)(), ask)
    assert [len(batch) for batch in vendor.sent] == [3, 3]


async def test_equal_requests_that_failed_find_their_retries(vendor: FakeVendor, path: str) -> None:
    @af.program
    async def ask_alike(s: af.State, question: str) -> list[str]:
        s += af.user(question)
        branches = s.fork(2)
        for branch in branches:
            branch += af.assistant(af.gen("answer", max_tokens=8))
        return [await branch["answer"] for branch in branches]

    await failed_and_sent_again(vendor, path, ask_alike)
    assert await map_all(vendor, ask_alike, path) == await plain(type(vendor)(), ask_alike)
    assert [len(batch) for batch in vendor.sent] == [6, 6]


def is_of_outcomes(request: Received) -> bool:
    return request.path.endswith(("/content", "/results"))


async def test_outcomes_that_cannot_be_read_for_a_while_are_read_later(vendor: FakeVendor, path: str) -> None:
    num_failures = 0

    def fail(request: Received) -> AnyAnswer | None:
        nonlocal num_failures
        if num_failures == 5 or not is_of_outcomes(request):
            return None
        num_failures += 1
        return Answer(b"{}", 500)

    vendor.override = fail
    assert await map_all(vendor, ask, path, retries=3) == await plain(type(vendor)(), ask)
    assert (num_failures, vendor.num_batches) == (5, 1)


async def test_outcomes_that_were_read_once_and_cannot_be_read_again_are_not_paid_twice(
    vendor: FakeVendor, path: str
) -> None:
    vendor.fate = lambda body: "refused" if "And?" in str(body["messages"]) else "answered"
    with pytest.raises(RequestRefused):
        await map_all(vendor, ask_twice, path)
    vendor.override = lambda request: Answer(b"no outcome", 400) if is_of_outcomes(request) else None
    with pytest.raises(RequestRefused):
        await map_all(vendor, ask_twice, path)
    assert vendor.num_batches == 2


async def test_a_refused_batch_is_sent_again(path: str) -> None:
    vendor = OpenAIVendor()
    vendor.refusal = BatchError(code="token_limit_exceeded", message="Enqueued token limit reached.")
    with pytest.raises(af.Overloaded):
        await map_all(vendor, ask, path)
    vendor.refusal = None
    assert await map_all(vendor, ask, path) == await plain(OpenAIVendor(), ask)
    assert vendor.num_batches == 2


async def test_inputs_may_be_added_while_a_batch_runs(vendor: FakeVendor, path: str) -> None:
    assert await interrupted(vendor, ask, path, 3, acts=True)
    async with session_on(vendor) as place:
        more = ["new", *QUESTIONS[::-1]]
        assert await place.flow.map(ask, more, batch=True, resume=path) == await place.flow.map(ask, more)
    assert [sorted(batch) for batch in vendor.prompts] == [QUESTIONS, ["new"]]


async def test_equal_inputs_have_separate_requests(vendor: FakeVendor, path: str) -> None:
    async with session_on(vendor) as place:
        await place.flow.map(ask, ["a", "a"], batch=True, resume=path)
        assert [len(batch) for batch in vendor.sent] == [2]


async def test_batches_of_another_program_are_refused(vendor: FakeVendor, path: str) -> None:
    file_of(path, ".resume").touch()
    file_of(path).write_text('{"agentflow_batches":1,"program":"other"}\n')
    with pytest.raises(BadArgument) as raised:
        await map_all(vendor, ask, path)
    assert raised.value.param == "resume"
    assert vendor.num_batches == 0


async def test_a_batch_that_is_gone_is_an_error_with_the_remedy(vendor: FakeVendor, path: str) -> None:
    assert await interrupted(vendor, ask, path, 2, acts=True)

    def forget(request: Received) -> AnyAnswer | None:
        return openai_answers.error(404, "No such batch.") if "/batches/" in request.path else None

    vendor.override = forget
    with pytest.raises(RequestRefused) as raised:
        await map_all(vendor, ask, path)
    assert raised.value.param == "resume"
    assert vendor.num_batches == 1


async def test_a_cut_line_is_dropped(vendor: FakeVendor, path: str) -> None:
    assert await interrupted(vendor, ask, path, 2, acts=True)
    file = file_of(path)
    file.write_bytes(file.read_bytes() + b'{"tag":"x","requ')
    assert await map_all(vendor, ask, path) == await plain(type(vendor)(), ask)
    assert vendor.num_batches == 1


async def test_without_results_and_their_log_the_batches_are_not_used(vendor: FakeVendor, path: str) -> None:
    assert await interrupted(vendor, ask, path, 2, acts=True)
    file_of(path, "").unlink()
    file_of(path, ".resume").unlink()
    await map_all(vendor, ask, path)
    assert vendor.num_batches == 2


SCRIPT = """
import sys
import agentflow as af
from agentflow.backends.apis.batches import collector
from support.programs import ask_twice

collector.FIRST_POLL_S = collector.MAX_POLL_S = 0.01
vendor, model, url, path = sys.argv[1:]
flow = af.session(backend=getattr(af, vendor)(model, base_url=url, api_key="k", max_retries=0))
af.map(ask_twice, ["a", "b", "c"], batch=True, resume=path, session=flow)
"""


async def test_a_killed_process_continues_its_batch(vendor: FakeVendor, path: str) -> None:
    vendor.num_polls = 10**9
    async with fake_server(vendor) as server:
        backend = type(backend_at(type(vendor), server.url)).__name__
        url = f"{server.url}/v1" if backend == "OpenAI" else server.url
        child = start_python("-c", SCRIPT, backend, MODELS[type(vendor)], url, path)
        try:
            await server.wait_until(lambda: bool(vendor.num_asked), within_s=80)
        finally:
            child.send_signal(signal.SIGKILL)
            await anyio.to_thread.run_sync(child.wait)
    vendor.num_polls = 1
    assert await map_all(vendor, ask_twice, path) == await plain(type(vendor)(), ask_twice)
    assert [len(batch) for batch in vendor.sent] == [3, 3]
