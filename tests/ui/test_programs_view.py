"""The view of the programs that run: their graph, states, and the missed tokens of the cache."""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

import anyio
import pytest
from anyio.from_thread import start_blocking_portal
from playwright.sync_api import expect
from support.api_server import ApiServer, api_server
from support.ui.accessibility import axe_violations, scrolls_sideways
from support.ui.image_files import drop, picture
from support.ui.screen import Screen
from support.ui.stage import Stage, open_stage
from support.ui.tenants import KEYS, tenants

import agentflow as af
from agentflow.server.app import Access

Visit = Callable[..., Screen]


@pytest.fixture(scope="module")
def shared_stage() -> Iterator[Stage]:
    """A server without the sessions of other tests, which the view would show."""
    with open_stage() as stage:
        yield stage


async def review(s: af.State) -> str:
    """Three judges of a draft, and a report on their judgments."""
    s += "Draft:" + af.gen("draft")
    branches = s.fork(3)
    for number, branch in enumerate(branches):
        branch += f"Judge {number}:" + af.gen(f"judgment {number}")
    s += "Report on " + "".join(f"{branch[f'judgment {n}']}" for n, branch in enumerate(branches))
    s += af.gen("report")
    return await s["report"]


@contextmanager
def running(
    url: str, work: Callable[[af.Session], Awaitable[object]], key: str | None = None
) -> Iterator[None]:
    """``work`` runs in another session until it ends, or until the end of the block."""

    async def run() -> None:
        async with af.session(url.replace("http://", "ws://"), api_key=key) as flow:
            await work(flow)

    with start_blocking_portal() as portal:
        future = portal.start_task_soon(run)
        try:
            yield
        finally:
            future.cancel()


def test_f37_before_the_first_connection_nothing_is_from_before(visit: Visit) -> None:
    with open_stage(access=Access(tenants())) as stage:
        screen = visit(stage.url)
        screen.expect_problem("401|WebSocket connection to")
        view = screen.open("programs")
        screen.wait_status("key")
        expect(view.locator(".empty")).to_have_text("Not connected.")


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_a_program_is_drawn_while_it_runs(
    stage: Stage, visit: Visit, theme: str, request: pytest.FixtureRequest
) -> None:
    screen = visit(stage.url, color_scheme=theme, viewport={"width": 1280, "height": 860})
    screen.open("programs")
    screen.wait_status("open")
    expect(screen.view("programs")).to_contain_text("No state is open")
    nodes = screen.page.get_by_role("listbox").get_by_role("option")
    with running(stage.url, lambda flow: flow.run(review)):
        expect(nodes).to_have_count(5)
        expect(nodes.filter(has_text="draft")).to_contain_text("running")
        expect(nodes.filter(has_text="report")).to_have_accessible_name("report, waiting · latency")
        expect(screen.page.get_by_role("heading", name="review")).to_be_visible()
        stage.wait_running(1)
        stage.end()
        stage.wait_running(3)
        stage.end("Judge 1")
        expect(nodes.filter(has_text="judgment 1")).to_contain_text("done")
        expect(nodes.filter(has_text="running · throughput")).to_have_count(2)
        expect(nodes.filter(has_text="draft")).to_contain_text("done")
        nodes.filter(has_text="judgment 0").click()
        screen.page.keyboard.press("ArrowRight")
        expect(nodes.filter(has_text="report")).to_be_focused()
        details = screen.page.get_by_role("region", name="Node")
        expect(details).to_contain_text("judgment 0, judgment 1, judgment 2")
        assert axe_violations(screen) == []
        if request.config.getoption("--update-images"):
            from support.ui.pictures import save_picture

            save_picture(screen.page, f"page-programs-{theme}")
        stage.end()
        stage.wait_running(1)
        stage.end()
    expect(nodes).to_have_count(0)


def test_requests_show_the_images_that_they_read(stage: Stage, visit: Visit) -> None:
    chart, photo = picture(80, 50), picture(90, 60, "JPEG")

    async def work(flow: af.Session) -> None:
        async with flow.state() as s:
            s += af.user("Compare ", af.image(chart), " and ", af.image(photo)) + af.gen("comparison")
            await s["comparison"]

    screen = visit(stage.url)
    screen.open("chat")
    screen.wait_status("open")
    drop(screen, "main", ("chart.png", "image/png", chart))
    screen.at("message").fill("What is it?")
    screen.at("message").press("Enter")
    stage.wait_running(1)
    with running(stage.url, work):
        stage.wait_running(2)
        screen.open("programs")
        nodes = screen.page.get_by_role("listbox").get_by_role("option")
        details = screen.page.get_by_role("region", name="Node")
        nodes.filter(has_text="comparison").click()
        expect(nodes.filter(has_text="2 images")).to_have_count(1)
        expect(details).to_contain_text("image/png")
        expect(details).to_contain_text("image/jpeg")
        nodes.filter(has_text="1 image").click()
        # The page has sent this one itself.
        own = screen.page.get_by_role("img", name="An image of the request")
        expect(own.last).to_be_visible()
        assert own.last.evaluate("(image) => image.naturalWidth") == 80
        assert axe_violations(screen) == []
        stage.end_all()


def test_failed_parts_stay_and_cancelled_ones_leave(stage: Stage, visit: Visit) -> None:
    async def work(flow: af.Session) -> None:
        failed, cancelled = flow.state(program="failed"), flow.state(program="cancelled")
        failed += failed.set("text", "no digit").regex("[0-9]+") + af.gen("number")
        cancelled += "Wait:" + af.gen("answer")
        await failed["number"].settled()
        await anext(aiter(cancelled["answer"]))
        cancelled.cancel()
        await anyio.sleep_forever()

    screen = visit(stage.url)
    screen.open("programs")
    screen.wait_status("open")
    nodes = screen.page.get_by_role("listbox").get_by_role("option")
    states = screen.page.get_by_role("region", name="States").get_by_role("row")
    with running(stage.url, work):
        expect(nodes.filter(has_text="answer")).to_have_accessible_name(
            "answer, running · latency · streamed"
        )
        expect(nodes.filter(has_text="number")).to_have_accessible_name("number, failed")
        assert axe_violations(screen) == []
        stage.say("Yes")
        expect(nodes).to_have_count(1)
        expect(states.filter(has_text="has failed or was cancelled")).to_have_count(2)
    expect(nodes).to_have_count(0)


def test_f37_a_session_keeps_its_place_when_an_earlier_one_ends(stage: Stage, visit: Visit) -> None:
    async def work(flow: af.Session, name: str) -> None:
        async with flow.state(program=name) as s:
            for number in range(2):
                s += "Item:" + af.gen(f"{name} {number}")
            await anyio.sleep_forever()

    screen = visit(stage.url)
    screen.open("programs")
    screen.wait_status("open")
    headings = screen.page.get_by_role("heading", level=2)
    details = screen.page.get_by_role("region", name="Node")
    first = running(stage.url, partial(work, name="first"))
    with ExitStack() as sessions:
        with first:
            expect(headings).to_have_count(1)
            for number, name in enumerate(("second", "third"), 2):
                sessions.enter_context(running(stage.url, partial(work, name=name)))
                expect(headings).to_have_count(number)
            before = headings.all_inner_texts()
            screen.page.get_by_role("option").filter(has_text="third 1").click()
            expect(details.get_by_role("heading")).to_have_text("third 1")
        expect(headings).to_have_text(before[1:])
        expect(details.get_by_role("heading")).to_have_text("third 1")
        expect(screen.page.get_by_role("option").filter(has_text="third 1")).to_be_focused()
        stage.end_all()


def test_many_states_are_counted_and_fit_into_360_pixels(stage: Stage, visit: Visit) -> None:
    async def work(flow: af.Session) -> None:
        async with flow.state() as s:
            s += "Item:" + af.gen("item")
            for number, branch in enumerate(s.fork(400)):
                branch += af.gen(f"part {number}")
            await anyio.sleep_forever()

    screen = visit(stage.url, viewport={"width": 360, "height": 740}, has_touch=True)
    screen.open("programs")
    screen.wait_status("open")
    nodes = screen.page.get_by_role("listbox").get_by_role("option")
    with running(stage.url, work):
        expect(nodes).to_have_count(300)
        expect(screen.view("programs")).to_contain_text("101 more nodes are not drawn")
        expect(screen.view("programs")).to_contain_text("301 more states are not listed")
        assert scrolls_sideways(screen) == []
        screen.page.get_by_role("button", name="Pause").click()
    expect(nodes).to_have_count(300)
    screen.page.get_by_role("button", name="Resume").click()
    expect(nodes).to_have_count(0)


@pytest.fixture(scope="module")
def shared_engine() -> Iterator[ApiServer]:
    """A server with tenants, on the deterministic engine."""
    with api_server(tenants=tenants(), constraints=False) as server:
        yield server


@pytest.mark.parametrize("name", ["ann", "bob"])
def test_a_tenant_sees_its_own_programs_and_what_they_missed(
    shared_engine: ApiServer, visit: Visit, name: str
) -> None:
    has_begun = threading.Event()

    async def work(flow: af.Session) -> None:
        async with flow.state(program="apricots") as s:
            s += f"{name} lists all that grows in the garden. " * 30 + af.gen("answer", max_tokens=1)
            await s["answer"]
            has_begun.set()
            await anyio.sleep_forever()

    screen = visit(shared_engine.url)
    screen.expect_problem("401|WebSocket connection to")
    with running(shared_engine.url, work, KEYS["ann"]):
        assert has_begun.wait(30)
        screen.open("programs")
        screen.give_key(KEYS[name])
        screen.wait_status("open")
        if name == "ann":
            row = screen.page.get_by_role("row").filter(has_text="apricots")
            expect(row).to_contain_text("tokens: seen for the first time")
            expect(row).to_contain_text("waits for its client")
        else:
            expect(screen.view("programs")).to_contain_text("No state is open")
            assert "apricots" not in screen.page.content()
