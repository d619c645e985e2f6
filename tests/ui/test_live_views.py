"""The prefix tree, the scheduler's numbers and recorded runs, and their parts that a tenant may see."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch
from urllib.parse import urlencode

import pytest
from anyio.from_thread import start_blocking_portal
from playwright.sync_api import expect
from support.api_server import ApiServer, api_server
from support.stack_tools import find_tool, free_port, process, wait_for
from support.ui.accessibility import axe_violations
from support.ui.http import complete, get
from support.ui.screen import Screen
from support.ui.stage import Stage
from support.ui.tenants import KEYS, tenants

from agentflow.errors import Overloaded
from agentflow.runtime.interpreter import observation
from agentflow.runtime.limits import MemoryBudget, MemoryReservation

Visit = Callable[..., Screen]
UNITS = {"": 1.0, "k": 1e3, "M": 1e6, "%": 0.01, "s": 1.0, "ms": 1e-3, "µs": 1e-6}


@contextmanager
def prometheus(url: str, folder: Path) -> Iterator[Callable[[str], list[float]]]:
    """Debian's Prometheus, which scrapes the server each second: evaluates queries."""
    config = {
        "global": {"scrape_interval": "1s"},
        "scrape_configs": [{"job_name": "a", "static_configs": [{"targets": [url.removeprefix("http://")]}]}],
    }
    (folder / "prometheus.yml").write_text(json.dumps(config))
    address = f"127.0.0.1:{free_port()}"
    command = [
        find_tool("prometheus"),
        f"--config.file={folder}/prometheus.yml",
        f"--storage.tsdb.path={folder}/data",
        f"--web.listen-address={address}",
    ]

    def query(expression: str) -> list[float]:
        answer = json.loads(get(f"http://{address}", f"/api/v1/query?{urlencode({'query': expression})}"))
        return [float(series["value"][1]) for series in answer["data"]["result"]]

    def is_scraping() -> bool:
        try:
            return query("up") == [1]
        except (OSError, AssertionError):  # it listens before it is ready, and answers 503
            return False

    with process(command, {}, folder / "prometheus.log"):
        wait_for(is_scraping, folder / "prometheus.log")
        yield query


def is_shown(text: str, value: float) -> bool:
    """Whether a number of the page is this value, to the digits that it shows."""
    if text == "–":
        return math.isnan(value)
    found = re.fullmatch(r"(\d+)(?:\.(\d+))? ?(\D*)", text.replace(",", ""))
    assert found, text
    unit = UNITS[found[3]]
    digit = unit * 10.0 ** -len(found[2] or "")
    return abs(float(f"{found[1]}.{found[2] or 0}") * unit - value) <= digit * 0.500001


def test_every_number_of_the_scheduler_is_the_value_of_its_query(
    model_url: str, visit: Visit, tmp_path: Path
) -> None:
    """Prometheus evaluates the queries that the page names. The server is idle, so that rates do not depend
    on when it was scraped."""
    for _ in range(2):
        complete(model_url, "The river turns under the old stone bridge, and", ignore_eos=True)
    screen = visit(model_url)
    screen.open("scheduler")
    screen.wait_status("open")
    values = screen.page.locator(".view-scheduler .value")
    expect(values.filter(has_text=re.compile(r"^\d.* ms$")).first).to_be_visible()
    expect(values.filter(has_text="–")).to_have_count(0)  # the values of the second look are there too
    labels = values.evaluate_all("(all) => all.map((one) => one.getAttribute('aria-label'))")
    assert len(labels) == 30
    with prometheus(model_url, tmp_path) as query:
        for label in labels:
            shown, _, expression = label.rpartition(", from ")
            text = shown.rpartition(": ")[2]
            wait_for(lambda expression=expression: len(query(expression)) == 1, tmp_path / "prometheus.log")
            [value] = query(expression)
            assert is_shown(text, value), (label, value)


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


def test_the_picture_of_the_tree_is_read_by_keyboard(model_url: str, visit: Visit) -> None:
    complete(model_url, "Windmills that are read by keyboard alone", ignore_eos=True)
    screen = visit(model_url)
    screen.open("tree")
    screen.wait_status("open")
    expect(screen.view("tree")).to_contain_text(re.compile(r"\d nodes"))
    screen.at("tree-picture").focus()
    for _ in range(30):  # down the first contexts, until this one is found
        screen.page.keyboard.press("ArrowDown")
        details = screen.page.get_by_role("region", name="Node")
        expect(details.locator("pre")).to_be_visible()
        if "Windmills" in details.inner_text():
            break
    else:
        raise AssertionError("the arrow keys do not lead to the text")
    expect(screen.at("announcer")).to_contain_text("tokens")


def test_a_timeline_is_read_by_keyboard(stage: Stage, visit: Visit) -> None:
    screen = visit(stage.url)
    screen.open("chat")
    screen.wait_status("open")
    stage.answer("Which tree", "An oak.")
    screen.at("message").fill("Which tree is it?")
    screen.at("message").press("Enter")
    expect(screen.at("turns")).to_contain_text("An oak.")
    screen.page.get_by_role("link", name="Runs").click()
    screen.at("timeline").get_by_role("row").nth(1).focus()
    screen.page.keyboard.press("ArrowRight")
    expect(screen.at("call-details").locator("pre")).to_have_text("An oak.")
    expect(screen.at("timeline").locator(".bar")).to_be_focused()
    screen.page.keyboard.press("ArrowLeft")
    expect(screen.at("timeline").get_by_role("row").nth(1)).to_be_focused()


@pytest.mark.parametrize(("width", "height"), [(1280, 800), (400, 780), (1280, 420)])
def test_f43e_a_chosen_call_shows_its_prompt_and_text_inside_the_window(
    stage: Stage, visit: Visit, width: int, height: int
) -> None:
    screen = visit(stage.url, viewport={"width": width, "height": height})
    screen.open("playground")
    screen.wait_status("open")
    screen.at("run").click()
    stage.wait_running(4)
    stage.say("It is clear.")
    stage.end()
    stage.wait_running(1)
    stage.say("So it is.")
    stage.end()
    expect(screen.at("ledger")).to_have_attribute("data-status", "done")
    screen.page.get_by_role("link", name="Runs").click()
    details = screen.at("call-details")
    bars = screen.at("timeline").locator(".bar")
    prompt = details.get_by_role("region", name="Prompt")
    for number, text in ((6, "It is clear."), (3, "It is clear."), (0, "yes")):
        bar = bars.nth(number)
        bar.click()
        expect(details.locator("pre")).to_have_text(text)
        expect(details).to_be_in_viewport(ratio=0.99)
        expect(bar).to_be_in_viewport(ratio=0.5)
        bar.click(trial=True)  # the details do not cover it
        expect(prompt).to_contain_text("Read this essay")
    screen.page.keyboard.press("ArrowRight")
    expect(details.locator("pre")).to_have_text("So it is.")
    expect(prompt).to_contain_text("style: It is clear.")
    expect(prompt).to_contain_text("In short, the essay")
    assert axe_violations(screen) == []
    details.get_by_role("button", name="Close").click()
    expect(details).to_have_count(0)
    expect(bars.nth(1)).to_be_focused()


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


def test_f37_a_watch_that_the_server_had_no_room_for_is_requested_again(
    shared_engine: ApiServer, visit: Visit
) -> None:
    tried: list[int] = []

    def reserved(memory: MemoryBudget, num_bytes: int) -> MemoryReservation:
        tried.append(num_bytes)
        if len(tried) == 1:
            raise Overloaded("no room")
        return MemoryReservation(memory, num_bytes)

    screen = visit(shared_engine.url)
    screen.expect_problem("401|WebSocket connection to")
    screen.open("tree")
    with patch.object(observation, "MemoryReservation", reserved):
        screen.give_key(KEYS["ann"])
        expect(screen.view("tree")).to_contain_text("queue is full")
        expect(screen.view("tree")).not_to_contain_text("queue is full")


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
    newer.write_text("".join([lines[0].replace('"recording":2', '"recording":99'), *lines[1:]]))
    screen.at("recording-file").set_input_files(newer)
    expect(problem).to_contain_text("version 99")
    expect(timeline).to_be_visible()


def test_f37_a_recorded_run_tells_the_exception_of_its_program(
    stage: Stage, visit: Visit, tmp_path: Path
) -> None:
    import agentflow as af

    async def program(s: af.State) -> None:
        s += af.user("Say something.")
        await s.fork(1)[0]
        raise KeyError("<b>title</b>")

    record(program, tmp_path / "run.jsonl")
    screen = visit(stage.url)
    screen.open("runs")
    screen.at("recording-file").set_input_files(tmp_path / "run.jsonl")
    rows = screen.at("timeline").get_by_role("rowheader")
    expect(rows.filter(has_text="run 0")).to_have_text(re.compile("failedKeyError: '<b>title</b>'"))
    expect(rows.filter(has_text="(0)")).to_have_text(re.compile("cancelled"))


def record(program: Any, path: Any) -> None:
    """Records a run of the program on the scripted backend. In a separate thread: this one has a loop."""
    import threading

    import anyio

    import agentflow as af

    async def run() -> None:
        async with af.session(backend=af.Scripted(lambda call: "two words"), record=path) as flow:
            with suppress(KeyError):  # of a program that fails
                await flow.run(program)

    thread = threading.Thread(target=anyio.run, args=(run,))
    thread.start()
    thread.join(60)
    assert path.exists()
