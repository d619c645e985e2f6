"""The prefix tree, the scheduler's numbers and recorded runs, and what a tenant may see of them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from anyio.from_thread import start_blocking_portal
from playwright.sync_api import expect
from prometheus_client.parser import text_string_to_metric_families
from support.api_server import ApiServer, api_server
from support.ui.http import complete, get
from support.ui.screen import Screen
from support.ui.tenants import KEYS, tenants

Visit = Callable[..., Screen]
SELECTOR = re.compile(r"(\w+)(?:\{(.*)\})?")


def metric(scrape: str, query: str) -> float | None:
    """The value of a plain selector, such as ``name{label="value"}``; None for any other query."""
    found = SELECTOR.fullmatch(query)
    if found is None or "=~" in query or "!=" in query:
        return None
    wanted = dict(re.findall(r'(\w+)="([^"]*)"', found[2] or ""))
    values = [
        sample.value
        for family in text_string_to_metric_families(scrape)
        for sample in family.samples
        if sample.name == found[1] and wanted.items() <= sample.labels.items()
    ]
    assert values, f"/metrics has no {query}"
    return sum(values)


def test_the_numbers_of_the_scheduler_are_those_of_metrics(model_url: str, visit: Visit) -> None:
    for _ in range(2):
        complete(model_url, "The river turns under the old stone bridge, and", ignore_eos=True)
    screen = visit(model_url)
    screen.open("scheduler")
    screen.wait_status("open")
    values = screen.page.locator(".view-scheduler .value")
    expect(values.first).to_be_visible()
    expect(values.filter(has_text=re.compile(r"^\d")).first).to_be_visible()
    scrape = get(model_url, "/metrics")
    num_compared = 0
    for label in values.evaluate_all("(all) => all.map((one) => one.getAttribute('aria-label'))"):
        shown, _, query = label.rpartition(", from ")
        value = metric(scrape, query)
        text = shown.rpartition(": ")[2].replace(",", "")
        if value is not None and re.fullmatch(r"\d+", text):
            assert float(text) == value, label
            num_compared += 1
    assert num_compared >= 4


def test_requests_are_listed_by_the_names_of_python_programs(model_url: str, visit: Visit) -> None:
    import agentflow as af

    async def program(s: af.State) -> None:
        s += "The harbour at night." + af.gen("report", max_tokens=1000, ignore_eos=True)

    program.__name__ = "report <b>bold</b>"

    async def run() -> None:
        async with af.session(model_url.replace("http://", "ws://")) as flow:
            await flow.run(program)

    screen = visit(model_url)
    screen.open("scheduler")
    screen.wait_status("open")
    with start_blocking_portal() as portal:
        running = portal.start_task_soon(run)
        expect(screen.page.get_by_role("rowheader").filter(has_text="report <b>bold</b>")).to_be_visible()
        running.cancel()


def test_the_tree_shows_what_was_computed_and_its_text_on_demand(model_url: str, visit: Visit) -> None:
    complete(model_url, "A sentence about lighthouses that no other test sends", ignore_eos=True)
    screen = visit(model_url)
    screen.open("tree")
    screen.wait_status("open")
    screen.page.get_by_role("button", name="Outline").click()
    expect(screen.page.get_by_role("treeitem").first).to_be_visible()
    expect(screen.view("tree")).to_contain_text("lighthouses")


@pytest.fixture(scope="module")
def shared_engine() -> Iterator[ApiServer]:
    """A server with tenants, on the deterministic engine."""
    with api_server(tenants=tenants(), constraints=False) as server:
        complete(server.url, "Ann writes about apricots", KEYS["ann"])
        complete(server.url, "Bob writes about battleships, at some length", KEYS["bob"])
        yield server


@pytest.mark.parametrize(
    ("name", "own", "foreign"), [("ann", "apricots", "battleships"), ("bob", "battleships", "apricots")]
)
def test_a_tenant_sees_its_own_text_and_nothing_of_another(
    shared_engine: ApiServer, visit: Visit, name: str, own: str, foreign: str
) -> None:
    screen = visit(shared_engine.url)
    screen.expect_problem("401|403|WebSocket connection to")
    screen.open("tree")
    received: list[str] = []
    screen.page.on(
        "websocket", lambda socket: socket.on("framereceived", lambda frame: received.append(str(frame)))
    )
    screen.give_key(KEYS[name])
    screen.wait_status("open")
    tree = screen.view("tree")
    screen.page.get_by_role("button", name="Outline").click()
    expect(tree).to_contain_text(own)
    for view in ("tree", "scheduler", "runs"):
        screen.page.get_by_role("navigation").first.locator(f'a[href="#/{view}"]').click()
        screen.view(view)
        assert foreign not in screen.page.content()
        assert (
            ({"ann": "bob", "bob": "ann"}[name])
            not in screen.page.locator("main").inner_text().lower().split()
        )
    assert foreign not in "".join(received)


def test_an_operator_sees_all_sizes_and_no_text(shared_engine: ApiServer, visit: Visit) -> None:
    screen = visit(shared_engine.url)
    screen.expect_problem("401|WebSocket connection to")
    screen.open("tree")
    screen.give_key(KEYS["ops"])
    screen.wait_status("open")
    screen.page.get_by_role("button", name="Outline").click()
    expect(screen.page.get_by_role("treeitem").nth(1)).to_be_visible()
    assert "apricots" not in screen.page.content()
    assert "battleships" not in screen.page.content()


def test_a_recording_opens_and_a_truncated_one_is_a_sentence(
    model_url: str, visit: Visit, tmp_path: Any
) -> None:
    import agentflow as af

    path = tmp_path / "run.jsonl"

    async def program(s: af.State) -> str:
        s += af.user("Say something.")
        async with s.fork(2) as branches:
            for branch in branches:
                branch += af.assistant(af.gen("word", max_tokens=4))
        return "done"

    record(program, path)
    screen = visit(model_url)
    screen.open("runs")
    problem = screen.at("recording-problem")
    timeline = screen.at("timeline")
    screen.at("recording-file").set_input_files(path)
    expect(timeline).to_be_visible()
    expect(problem).to_have_count(0)
    lines = path.read_text().splitlines(keepends=True)
    ends = [number for number, line in enumerate(lines) if '"event":"value"' in line]
    assert len(ends) == 2
    # The first call has ended, the second not; then half a line.
    broken = tmp_path / "broken.jsonl"
    broken.write_text("".join(lines[: ends[1]]) + lines[ends[1]][:20])
    screen.at("recording-file").set_input_files(broken)
    expect(problem).to_have_text("broken.jsonl ends in the middle of a line: below is everything before it.")
    expect(timeline).to_be_visible()
    # Both calls are there, the second with as much of its text as the file has.
    for number, (outcome, text) in enumerate([("eos", "two words"), ("without an end", "two")]):
        timeline.get_by_role("button", name="gen").nth(number).click()
        expect(screen.at("call-details")).to_contain_text(outcome)
        expect(screen.at("call-details").locator("pre")).to_have_text(text)
    other = tmp_path / "other.jsonl"
    other.write_text('{"version": 99}\n')
    screen.at("recording-file").set_input_files(other)
    expect(screen.page.get_by_role("alert")).to_have_text(
        "other.jsonl is not a recording of agentflow: none of its lines could be read."
    )
    newer = tmp_path / "newer.jsonl"
    newer.write_text("".join([lines[0].replace('"recording":1', '"recording":99'), *lines[1:]]))
    screen.at("recording-file").set_input_files(newer)
    expect(problem).to_contain_text("version 99")
    expect(timeline).to_be_visible()


def record(program: Any, path: Any) -> None:
    """Records a run of the program on the scripted backend. In a thread of its own: this one has a loop."""
    import threading

    import anyio

    import agentflow as af

    async def run() -> None:
        async with af.session(backend=af.Scripted(lambda call: "two words"), record=path) as flow:
            await flow.run(program)

    thread = threading.Thread(target=anyio.run, args=(run,))
    thread.start()
    thread.join(60)
    assert path.exists()
