"""Servers and a browser for the tests of the page, which only ``make test-ui`` runs."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    import subprocess

    from playwright.sync_api import Browser
    from support.ui.proxy import BreakingProxy
    from support.ui.screen import Screen
    from support.ui.stage import Stage

# The extra ``ui`` is not part of ``dev``.
if importlib.util.find_spec("playwright") is None:
    collect_ignore_glob = ["test_*.py"]


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the option."""
    parser.addoption("--update-images", action="store_true", help="write the screenshots to docs/images")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All tests here need a browser."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.ui)


@pytest.fixture(scope="package")
def browser() -> Iterator[Browser]:
    """Chromium. Without one, the run ends."""
    from benchmarks.browser import NoBrowser, open_browser

    try:
        with open_browser() as browser:
            yield browser
    except NoBrowser as error:
        pytest.exit(str(error), returncode=1)


@pytest.fixture
def visit(browser: Browser) -> Iterator[Callable[..., Screen]]:
    """``visit(url, **options)`` returns an empty page for a server, which is checked after the test."""
    from support.ui.screen import new_screen

    screens: list[Screen] = []

    def visit(url: str, **options: object) -> Screen:
        screens.append(new_screen(browser, url, **options))
        return screens[-1]

    yield visit
    try:
        for screen in screens:
            screen.check()
    finally:
        for screen in screens:
            screen.page.context.close()


@pytest.fixture(scope="package")
def served_model(model_folder: Path) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """``agentflow serve`` with the default model: its address and its process."""
    from support.commands import served

    with served("--threads", "1", "--kv-tokens", "20000") as (url, process):
        yield url.replace("ws://", "http://"), process


@pytest.fixture(scope="package")
def model_url(served_model: tuple[str, subprocess.Popen[str]]) -> str:
    """The address of a server with the default model."""
    return served_model[0]


@pytest.fixture(scope="package")
def shared_stage() -> Iterator[Stage]:
    from support.ui.stage import open_stage

    from agentflow.server.config.limits import ServerLimits

    with open_stage(ServerLimits(resume_grace_s=60.0)) as stage:
        yield stage


@pytest.fixture
def stage(shared_stage: Stage) -> Iterator[Stage]:
    """A server that generates the test's texts, and keeps sessions for longer than any test needs to resume
    one. When the test ends, no generation may be left; a failed test's generations end here, as the session
    of its page would keep them into the next test."""
    yield shared_stage
    try:
        shared_stage.wait_running(0)
    finally:
        shared_stage.forget_answers()  # they would answer prompts of other tests
        shared_stage.end_all()


@pytest.fixture
def forgetful_stage() -> Iterator[Stage]:
    """The same, but it soon ends a session that has lost its connection."""
    from support.ui.stage import open_stage

    from agentflow.server.config.limits import ServerLimits

    with open_stage(ServerLimits(resume_grace_s=0.5)) as stage:
        yield stage
        stage.wait_running(0)


@pytest.fixture
def proxy(stage: Stage) -> Iterator[BreakingProxy]:
    """A proxy before the stage."""
    from support.ui.proxy import breaking_proxy

    with breaking_proxy(stage.port) as proxy:
        yield proxy


@pytest.fixture
def forgetful_proxy(forgetful_stage: Stage) -> Iterator[BreakingProxy]:
    """A proxy before the forgetful stage."""
    from support.ui.proxy import breaking_proxy

    with breaking_proxy(forgetful_stage.port) as proxy:
        yield proxy
