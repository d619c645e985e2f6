"""The page when the server is not there, not ready, or refuses it: a sentence and a way on,
and no streamed text is lost."""

from __future__ import annotations

import re
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any
from unittest.mock import patch

import anyio
import pytest
from anyio.from_thread import start_blocking_portal
from playwright.sync_api import Route, expect
from support.api_server import api_server
from support.fake_engine import FakeEngine
from support.stack_tools import free_port
from support.ui.proxy import BreakingProxy, breaking_proxy
from support.ui.screen import Screen
from support.ui.stage import Stage, StagedGenerator, open_stage
from support.ui.tenants import KEYS, tenants

from agentflow.runtime.generator import Generator
from agentflow.server import serve as serve_module
from agentflow.server.app import Access
from agentflow.server.config.limits import ServerLimits
from agentflow.server.models.models import one_model
from agentflow.server.serve import listen, running_server

Visit = Callable[..., Screen]
# Chromium's own messages in the console of a page whose requests fail.
NO_ANSWER = r"net::ERR_|WebSocket connection to|Failed to load resource"


@pytest.fixture(scope="module")
def locked_stage() -> Iterator[Stage]:
    """A stage that needs a key."""
    with open_stage(access=Access(tenants())) as stage:
        yield stage


def test_a_wrong_key_is_a_sentence_and_the_right_one_opens_the_session(
    locked_stage: Stage, visit: Visit
) -> None:
    screen = visit(locked_stage.url)
    screen.expect_problem("401|WebSocket connection to")
    screen.open("playground")
    screen.wait_status("key")
    expect(screen.at("key-input")).to_have_accessible_description(re.compile("^The key stays"))
    screen.give_key("af-wrong")
    expect(screen.at("status-line")).to_contain_text("key")
    screen.wait_status("key")
    # The refusal is apart from the explanation, and both are said of the field.
    refusal = screen.page.get_by_text("does not accept that key")
    expect(refusal).to_have_text("The server does not accept that key.")
    expect(screen.at("key-input")).to_have_accessible_description(re.compile("that key. The key stays"))
    screen.give_key(KEYS["ann"])
    screen.wait_status("open")
    # Nothing of it survives a reload.
    screen.page.reload()
    screen.wait_status("key")


def test_f43j_a_key_survives_a_reload_if_the_user_chooses_so(locked_stage: Stage, visit: Visit) -> None:
    screen = visit(locked_stage.url)
    screen.expect_problem("401|WebSocket connection to")
    screen.open("playground")
    for key, status in ((KEYS["ann"], "open"), ("af-wrong", "key")):
        screen.at("key-input").fill(key)
        screen.at("keep-key").check()
        screen.page.keyboard.press("Enter")
        screen.wait_status(status)
        screen.page.reload()
        screen.wait_status(status)
        if status == "open":  # and it can be replaced
            screen.page.get_by_role("button", name="Key", exact=True).click()
    assert screen.page.evaluate("() => sessionStorage.getItem('key 1')") is None
    # Without the choice, it is only in memory.
    screen.give_key(KEYS["ann"])
    screen.wait_status("open")


def test_the_prompt_for_a_key_can_be_closed_and_opened_again(locked_stage: Stage, visit: Visit) -> None:
    screen = visit(locked_stage.url)
    screen.expect_problem("401|WebSocket connection to")
    screen.open("chat")
    expect(screen.at("key-input")).to_be_focused()
    screen.page.keyboard.press("Escape")
    expect(screen.at("key-input")).to_be_hidden()
    screen.at("status-line").get_by_role("button").click()
    screen.give_key(KEYS["ann"])
    screen.wait_status("open")


def test_an_expired_ticket_is_replaced(locked_stage: Stage, visit: Visit) -> None:
    screen = visit(locked_stage.url)
    screen.expect_problem("401|WebSocket connection to")
    given: list[str] = []

    def old_one(route: Route) -> None:
        """The first answer has a ticket that the server does not know any more."""
        answer = route.fetch()
        if answer.ok and not given:
            given.append("old")
            route.fulfill(response=answer, json={**answer.json(), "ticket": "t" * 32})
        else:
            route.fulfill(response=answer)

    screen.page.route("**/v1/session-ticket", old_one)
    screen.open("playground")
    screen.give_key(KEYS["ann"])
    screen.wait_status("open")
    assert given


def test_a_server_that_is_gone_and_comes_back(stage: Stage, proxy: BreakingProxy, visit: Visit) -> None:
    screen = visit(proxy.url)
    screen.expect_problem(NO_ANSWER)
    screen.open("playground")
    screen.wait_status("open")
    proxy.refuse()
    proxy.cut()
    screen.wait_status("lost")
    line = screen.at("status-line")
    expect(line).to_contain_text("nothing that was streamed is lost")
    proxy.refuse(False)
    screen.wait_status("open")
    expect(line).to_have_count(0)


def test_a_server_that_stays_away_is_unreachable_until_it_answers(
    forgetful_proxy: BreakingProxy, visit: Visit
) -> None:
    proxy = forgetful_proxy
    screen = visit(proxy.url)
    screen.expect_problem(NO_ANSWER)
    screen.open("playground")
    screen.wait_status("open")
    proxy.refuse()
    proxy.cut()
    screen.wait_status("unreachable")  # after the grace period
    line = screen.at("status-line")
    expect(line).to_contain_text("The server does not answer. What was streamed stays here")
    proxy.refuse(False)
    line.get_by_role("button", name="Try now").click()
    screen.wait_status("open")
    expect(line).to_have_count(0)


def test_a_model_that_loads(visit: Visit) -> None:
    """The server answers while its model loads; the page opens the session by itself when it has loaded."""
    with loading_server() as (url, finish):
        screen = visit(url)
        screen.expect_problem("503|WebSocket connection to")
        screen.open("playground")
        screen.wait_status("unready")
        expect(screen.at("status-line")).not_to_be_empty()
        finish()
        screen.wait_status("open")


@contextmanager
def loading_server() -> Iterator[tuple[str, Callable[[], None]]]:
    """A server that listens, and whose model loads until the function is called."""
    ports: list[int] = []

    def noted(host: str, port: int) -> socket.socket:
        listener = listen(host, port)
        ports.append(listener.getsockname()[1])
        return listener

    with patch.object(serve_module, "listen", noted), start_blocking_portal("asyncio") as portal:
        loading, loaded = portal.call(anyio.Event), portal.call(anyio.Event)
        generator = portal.call(StagedGenerator)

        @asynccontextmanager
        async def open_generator() -> AsyncIterator[Generator[Any]]:
            loading.set()  # the server listens before it opens its models
            await loaded.wait()
            yield generator

        async def serve() -> None:
            async with running_server(one_model(open_generator)):
                await anyio.sleep_forever()

        task = portal.start_task_soon(serve)
        try:
            portal.call(loading.wait)
            yield f"http://127.0.0.1:{ports[0]}", lambda: portal.call(loaded.set)
        finally:
            task.cancel()


def test_f43g_a_session_that_the_server_has_forgotten_is_replaced(visit: Visit) -> None:
    """After the grace period the session cannot be resumed. The page keeps its content and opens a new one
    by itself."""
    with open_stage(ServerLimits(resume_grace_s=0.0)) as stage, breaking_proxy(stage.port) as proxy:
        screen = visit(proxy.url)
        screen.expect_problem(NO_ANSWER)
        screen.open("chat")
        screen.wait_status("open")
        stage.answer("first", "The first reply.")
        stage.answer("second", "The second reply.")
        screen.at("message").fill("first")
        screen.at("message").press("Enter")
        expect(screen.at("turns")).to_contain_text("The first reply.")
        proxy.cut()
        screen.wait_status("renewing")
        screen.wait_status("open")
        expect(screen.at("status-line")).to_have_count(0)
        screen.at("message").fill("second")
        screen.at("message").press("Enter")
        expect(screen.at("turns")).to_contain_text("The second reply.")
        expect(screen.at("turns")).to_contain_text("The first reply.")


def test_f43g_after_a_restart_of_the_server_the_page_is_connected_again(visit: Visit) -> None:
    """The first server tells its clients that it is shut down; the second has never seen them."""
    port = free_port()
    with open_stage(port=port) as stage:
        screen = visit(stage.url)
        screen.expect_problem(NO_ANSWER)
        screen.open("playground")
        screen.wait_status("open")
        screen.at("run").click()
        stage.wait_running(4)
        stage.say("Half")
        expect(screen.at("text-0:0")).to_have_text("Half")
    screen.wait_status("unreachable")
    with open_stage(port=port) as stage:
        screen.wait_status("open")
        expect(screen.at("text-0:0")).to_have_text("Half")
        # The runs of the session before are still there, and stay when the new one runs something.
        timeline = screen.at("timeline")
        screen.page.get_by_role("link", name="Runs").click()
        expect(timeline.locator(".bar")).to_have_count(7)
        screen.page.get_by_role("link", name="Playground", exact=True).click()
        screen.at("go-on").click()
        stage.wait_running(4)
        screen.at("stop").click()
        stage.wait_running(0)
        screen.page.get_by_role("link", name="Runs").click()
        expect(timeline).to_contain_text("continued")
        screen.page.get_by_role("button", name="Zoom in").click()
        earlier = screen.page.get_by_role("button", name="Earlier")
        expect(earlier).to_be_enabled()
        screen.page.get_by_label("Session", exact=True).select_option(index=0)
        expect(timeline).not_to_contain_text("continued")
        expect(earlier).to_be_disabled()  # the zoom was of the other session


def test_f37_after_a_restart_with_another_model_the_page_is_connected_again(visit: Visit) -> None:
    port = free_port()
    with open_stage(port=port, model="before") as stage:
        screen = visit(stage.url)
        screen.expect_problem(NO_ANSWER)
        screen.open("chat")
        screen.wait_status("open")
        expect(screen.page.locator(".model-name")).to_have_text("before")
    screen.wait_status("unreachable")
    with open_stage(port=port, model="after"):
        screen.wait_status("open")
        expect(screen.page.locator(".model-name")).to_have_text("after")


def test_f37_a_page_that_loads_says_so_until_it_is_there(stage: Stage, visit: Visit) -> None:
    screen = visit(stage.url)
    screen.expect_problem("net::ERR_")
    page, held = screen.page, list[Route]()
    page.route("**/assets/session.js", lambda route: route.abort())
    page.goto(f"{screen.url}/ui/#/chat")
    expect(page.locator("body")).to_contain_text("load the page again")
    page.unroute_all()
    page.route("**/assets/ChatView.js", lambda route: held.append(route))
    page.reload()
    screen.wait_status("open")
    expect(page.get_by_role("main")).to_have_text(re.compile("Loading"))
    expect(page.locator("body")).not_to_contain_text("load the page again")
    held[0].continue_()
    screen.view("chat")
    expect(page.get_by_role("main")).not_to_contain_text("Loading")


def test_a_view_that_could_not_be_fetched_is_fetched_again(stage: Stage, visit: Visit) -> None:
    screen = visit(stage.url)
    screen.expect_problem(NO_ANSWER)
    screen.page.route("**/TreeView.js", lambda route: route.abort())
    screen.open("playground")
    screen.page.get_by_role("link", name="Prefix tree").click()
    again = screen.page.get_by_role("main").get_by_role("button", name="Try again")
    expect(again).to_be_visible()
    screen.page.unroute("**/TreeView.js")
    again.click()
    screen.view("tree")


def test_f37_a_view_that_was_left_before_its_file_failed_hides_no_other(stage: Stage, visit: Visit) -> None:
    screen = visit(stage.url)
    screen.expect_problem(NO_ANSWER)
    held: list[Route] = []
    screen.page.route("**/TreeView.js", lambda route: route.abort() if held else held.append(route))
    with screen.page.expect_request("**/TreeView.js"):
        screen.open("playground")
    screen.page.get_by_role("link", name="Prefix tree").click()
    screen.page.get_by_role("link", name="Playground", exact=True).click()
    with screen.page.expect_event("requestfailed"):
        held[0].abort()
    # The page's own import has failed before this one does, and is drawn after that.
    screen.page.evaluate("() => import('/ui/assets/TreeView.js').catch(() => undefined)")
    screen.page.evaluate("() => new Promise((next) => requestAnimationFrame(() => setTimeout(next)))")
    screen.view("playground")
    expect(screen.page.get_by_role("main").get_by_role("button", name="Try again")).to_have_count(0)


def test_a_full_queue_is_a_sentence_and_the_request_can_be_repeated(visit: Visit) -> None:
    """One request of the first page fills the queue of this server. A program and a chat of the second
    one are rejected, until there is room."""
    engine = FakeEngine(max_unfinished=1)
    with api_server(engine, constraints=False) as server:
        server.call(engine.gate.allow, 0)
        first, second = visit(server.url), visit(server.url)
        for screen in (first, second):
            screen.open("chat")
            screen.wait_status("open")
        first.at("message").fill("Fill the queue.")
        first.at("message").press("Enter")
        server.call(engine.gate.held)
        second.at("message").fill("No room for this.")
        second.at("message").press("Enter")
        reply = second.page.locator(".chat-turn.is-assistant")
        expect(reply).to_contain_text("queue is full")
        second.page.get_by_role("link", name="Playground").click()
        second.at("example").select_option("few_shot")
        second.at("run").click()
        expect(second.view("playground")).to_contain_text("queue is full")
        expect(second.at("go-on")).to_be_enabled()
        second.page.get_by_role("link", name="Chat").click()
        server.call(engine.gate.open)
        expect(first.page.locator(".is-streaming")).to_have_count(0)
        reply.get_by_role("button", name="Try again").click()
        expect(reply.locator(".markdown")).not_to_be_empty()
        expect(reply).not_to_contain_text("queue is full")
