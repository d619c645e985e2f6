"""The replicas of a model on the page, and where the requests of programs run."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager

import pytest
from anyio.from_thread import BlockingPortal, start_blocking_portal
from playwright.sync_api import expect
from support.fake_engine import TEMPLATE
from support.fake_replicas import Replicas
from support.plain_model import runner
from support.ui.accessibility import axe_violations, scrolls_sideways
from support.ui.screen import Screen
from support.ui.tenants import KEYS, tenants

import agentflow as af
from agentflow.server.app import Access
from agentflow.server.models.models import EngineModel, Models
from agentflow.server.serve import running_server

Visit = Callable[..., Screen]
NUM_BRANCHES = 6


class World:
    """A server with two fake replicas. ``url``: its address."""

    def __init__(self, url: str, replicas: Replicas, portal: BlockingPortal) -> None:
        self.url = url
        self.replicas = replicas
        self._portal = portal

    def step_on_messages(self) -> None:
        """From now on, an engine runs a step for each message: requests last for as long as the test."""
        self._portal.call(self._set, False)

    def go_on(self) -> None:
        """Engines run by themselves again."""
        self._portal.call(self._set, True)

    def _set(self, is_automatic: bool) -> None:
        self.replicas.steps_on_message = True
        if is_automatic:
            self.replicas.become_automatic()
        else:
            self.replicas.is_automatic = False

    def lose(self, number: int) -> None:
        """The process of a replica dies, and cannot be started again."""

        def lose() -> None:
            self.replicas.fails_to_start = {number}
            self.replicas.children[number].die()

        self._portal.call(lose)

    def held(self) -> list[int]:
        """The number of requests that each replica has."""
        children = self.replicas.children
        return self._portal.call(lambda: [len(children[number].engine._requests) for number in (0, 1)])


@pytest.fixture
def world() -> Iterator[World]:
    with start_blocking_portal() as portal:
        replicas = portal.call(Replicas, 2)
        replicas.make_runner = lambda number: runner(num_slots=8000, max_context=4000)

        @asynccontextmanager
        async def open_models() -> AsyncIterator[Models]:
            async with replicas.open() as client:
                yield Models([EngineModel("many", client, TEMPLATE)])

        async def open_server():
            return running_server(open_models, access=Access(tenants()))

        with portal.wrap_async_context_manager(portal.call(open_server)) as server:
            yield World(server.url.replace("ws://", "http://"), replicas, portal)


async def survey(s: af.State) -> None:
    """Writes several parts, each on a different subject."""
    branches = s.fork(NUM_BRANCHES)
    for number, branch in enumerate(branches):
        branch += f"Part {number}: " * 20 + af.gen(f"part {number}", max_tokens=2000, ignore_eos=True)
    for number, branch in enumerate(branches):
        await branch[f"part {number}"]


@contextmanager
def running(world: World, key: str) -> Iterator[None]:
    """The survey runs until the end of the block."""
    world.step_on_messages()

    async def run() -> None:
        async with af.session(world.url.replace("http://", "ws://"), api_key=key) as flow:
            await flow.run(survey)

    with start_blocking_portal() as portal:
        future = portal.start_task_soon(run)
        try:
            yield
        finally:
            future.cancel()
            world.go_on()


def test_an_operator_sees_the_replicas_and_where_requests_run(world: World, visit: Visit) -> None:
    screen = visit(world.url, viewport={"width": 1280, "height": 900})
    screen.expect_problem("401|WebSocket connection to")
    screen.open("scheduler")
    screen.give_key(KEYS["ops"])
    screen.wait_status("open")
    table = screen.page.get_by_role("region", name="Replicas of models")
    rows = table.locator("tbody").get_by_role("row")
    expect(rows).to_have_count(2)
    expect(rows.filter(has_text="serving")).to_have_count(2)
    expect(screen.page.get_by_role("button", name="Drain")).to_have_count(0)  # this key may only look
    with running(world, KEYS["ops"]):
        screen.open("programs")
        nodes = screen.page.get_by_role("listbox").get_by_role("option")
        expect(nodes.filter(has_text="running")).to_have_count(NUM_BRANCHES)
        expect(nodes.filter(has_text="replica")).to_have_count(NUM_BRANCHES)
        held = world.held()
        assert sum(held) == NUM_BRANCHES
        for number in (0, 1):
            expect(nodes.filter(has_text=f"replica {number}")).to_have_count(held[number])
        nodes.first.click()
        expect(screen.page.get_by_role("region", name="Node")).to_contain_text("Replica")
        assert axe_violations(screen) == []
        screen.open("scheduler")
        for number in (0, 1):
            cells = rows.nth(number).get_by_role("cell")
            expect(cells.nth(3)).to_have_text(str(held[number]))  # running
        screen.page.get_by_role("button", name="survey").click()
        expect(screen.page.get_by_text("on replica")).to_have_count(NUM_BRANCHES)
        assert axe_violations(screen) == []
        assert scrolls_sideways(screen) == []


def test_a_replica_that_is_down_and_its_problem_are_shown(world: World, visit: Visit) -> None:
    screen = visit(world.url, viewport={"width": 360, "height": 740})
    screen.expect_problem("401|WebSocket connection to")
    screen.open("scheduler")
    screen.give_key(KEYS["ops"])
    row = (
        screen.page.get_by_role("region", name="Replicas of models")
        .get_by_role("row")
        .filter(has_text="down")
    )
    world.lose(1)
    expect(row).to_have_count(1)
    expect(row.get_by_role("rowheader")).to_have_text("1")
    expect(row.get_by_role("cell").nth(3)).to_have_text("–")  # nothing is known of a process
    expect(screen.view("scheduler")).to_contain_text("replica 1 is down: it died")
    assert axe_violations(screen) == []
    assert scrolls_sideways(screen) == []


def test_an_operator_drains_a_replica(world: World, visit: Visit) -> None:
    screen = visit(world.url, viewport={"width": 360, "height": 740})
    screen.expect_problem("401|503|WebSocket connection to")
    screen.open("scheduler")
    screen.give_key(KEYS["boss"])
    screen.wait_status("open")
    page = screen.page
    rows = page.get_by_role("region", name="Replicas of models").locator("tbody").get_by_role("row")
    expect(rows.filter(has_text="serving")).to_have_count(2)
    page.get_by_role("button", name="Drain replica 1").click()
    dialog = page.get_by_role("dialog", name="Drain replica 1")
    expect(dialog).to_be_visible()
    assert axe_violations(screen) == []
    page.keyboard.press("Escape")
    expect(dialog).to_have_count(0)
    assert world.replicas.num_started == 2
    page.get_by_role("button", name="Drain replica 1").click()
    dialog.get_by_role("button", name="Drain").click()
    restarts = rows.nth(1).get_by_role("cell").nth(5)
    expect(restarts).to_have_text("1")
    expect(rows.filter(has_text="serving")).to_have_count(2)
    world.lose(1)  # the last one that serves is not drained
    expect(page.get_by_role("button", name="Drain replica 1")).to_be_disabled()
    page.get_by_role("button", name="Drain replica 0").click()
    page.get_by_role("dialog").get_by_role("button", name="Drain").click()
    expect(screen.view("scheduler")).to_contain_text("replica 0 is not drained: ")
    assert axe_violations(screen) == []
    assert scrolls_sideways(screen) == []


def test_a_tenant_sees_no_replicas_but_those_of_its_requests(world: World, visit: Visit) -> None:
    screen = visit(world.url)
    screen.expect_problem("401|403|WebSocket connection to")
    screen.open("scheduler")
    screen.give_key(KEYS["ann"])
    screen.wait_status("open")
    expect(screen.page.get_by_role("heading", name="Requests", exact=True)).to_be_visible()
    with running(world, KEYS["ann"]):
        expect(screen.page.get_by_role("button", name="survey")).to_be_visible()
        expect(screen.page.get_by_role("heading", name="Replicas")).to_have_count(0)
    assert not any("/v1/replicas" in address for address in screen.addresses)
