"""The TypeScript client alone in a browser: its built modules on an empty page of the server's origin."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Route
from support.ui.proxy import BreakingProxy
from support.ui.screen import Screen
from support.ui.stage import Stage, open_stage
from support.ui.tenants import KEYS, tenants

from agentflow.server.app import Access

Visit = Callable[..., Screen]
CLIENT = Path(__file__).parents[2] / "clients" / "typescript"
LOST = r"WebSocket connection to|net::ERR_|Failed to load resource"


@pytest.fixture(scope="module")
def modules() -> Path:
    """The folder of the built modules."""
    compiler = CLIENT / "node_modules" / "typescript" / "bin" / "tsc"
    subprocess.run(["node", compiler, "-p", "tsconfig.build.json"], check=True, timeout=60, cwd=CLIENT)
    return CLIENT / "dist"


@pytest.fixture
def empty_page(modules: Path, visit: Visit) -> Callable[[str], Screen]:
    """``empty_page(url)`` opens a page of this origin, in which ``client`` is the client's module."""

    def serve(route: Route) -> None:
        name = urlsplit(route.request.url).path.rpartition("/")[2]
        route.fulfill(path=modules / name, content_type="text/javascript")

    def open_page(url: str) -> Screen:
        screen = visit(url)
        screen.page.route("**/client/*.js", serve)
        screen.page.goto(f"{url}/health/live")
        screen.page.evaluate("async () => { window.client = await import('/client/index.js'); }")
        return screen

    return open_page


def test_branches_stream_over_a_connection_that_breaks(
    stage: Stage, proxy: BreakingProxy, empty_page: Callable[[str], Screen]
) -> None:
    screen = empty_page(proxy.url)
    screen.expect_problem(LOST)
    screen.page.evaluate("""async () => {
        window.session = await client.connect();  // to the page's own origin
        window.statuses = [];
        session.onStatus((status) => statuses.push(status));
        window.root = session.state().text("The shared part. ");
        window.branches = root.fork(3).map((branch, index) => branch.text(`[${index}]`).gen("text"));
        window.added = branches.map(() => []);
        branches.forEach((variable, index) => variable.onChange((_, text) => added[index].push(text)));
    }""")
    stage.wait_running(3)
    expected = ["", "", ""]
    for round_number in range(4):
        for branch in range(3):
            piece = f"{round_number}é😀 of {branch}. "
            expected[branch] += piece
            stage.say(piece, to=f"[{branch}]")
        if round_number % 2 == 0:
            screen.wait("(text) => branches[2].text === text", expected[2])
            proxy.cut()
        else:
            screen.wait("() => session.status === 'open'")
    stage.end()
    assert screen.page.evaluate("() => Promise.all(branches)") == expected
    screen.wait("() => added.every((texts, index) => texts.join('') === branches[index].text)")
    assert screen.page.evaluate("() => statuses") == ["lost", "open", "lost", "open"]
    screen.page.evaluate("() => session.close()")


def test_one_branch_of_a_live_graph_is_cancelled(stage: Stage, empty_page: Callable[[str], Screen]) -> None:
    screen = empty_page(stage.url)
    screen.page.evaluate("""async () => {
        window.session = await client.connect();
        const graph = new client.Graph();
        const branches = graph.root.fork(2);
        const [left, right] = branches.map((branch, index) => branch.text(`[${index}]`).gen("text"));
        window.run = session.submit(graph, { live: true });
        window.left = run.variable(left);
        window.right = run.variable(right);
        window.cancel = () => run.cancelBranch(branches[0]);
    }""")
    stage.wait_running(2)
    stage.say("begun")
    screen.wait("() => left.text === 'begun' && right.text === 'begun'")
    screen.page.evaluate("() => cancel()")
    stage.wait_running(1)
    stage.say(" and ended")
    stage.end()
    assert screen.page.evaluate("() => right.then()") == "begun and ended"
    assert screen.page.evaluate("() => left.catch((error) => error.code)") == "cancelled"
    screen.page.evaluate("() => run.done().then(() => session.close())")


@pytest.fixture(scope="module")
def locked_stage() -> Iterator[Stage]:
    """A stage that needs a key."""
    with open_stage(access=Access(tenants())) as stage:
        yield stage


def test_a_key_opens_a_session_and_is_in_no_address(
    locked_stage: Stage, empty_page: Callable[[str], Screen]
) -> None:
    screen = empty_page(locked_stage.url)
    screen.expect_problem("401|WebSocket connection to")
    code = "(key) => client.connect({ key }).then((session) => session.close(), (error) => error.code)"
    for key in (None, "af-wrong"):
        assert screen.page.evaluate(code, key) == "not_authorized"
    screen.secrets.append(KEYS["ann"])
    assert screen.page.evaluate(code, KEYS["ann"]) is None
