"""The engine is killed while a program runs on it."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable

import psutil
from playwright.sync_api import expect
from support.ui.screen import Screen

Visit = Callable[..., Screen]


def test_a_killed_engine_restarts_and_the_page_runs_again(
    served_model: tuple[str, subprocess.Popen[str]], visit: Visit
) -> None:
    url, server = served_model
    screen = visit(url)
    screen.expect_problem(r"net::ERR_|Failed to load resource")
    screen.open("playground")
    screen.wait_status("open")
    screen.at("run").click()
    expect(screen.at("text-0:0")).not_to_be_empty(timeout=60_000)
    streamed = screen.at("text-0:0").inner_text()
    [engine] = [
        child
        for child in psutil.Process(server.pid).children()
        if "agentflow.engine.process.worker" in child.cmdline()
    ]
    engine.kill()
    # The supervisor runs what was unfinished again; where it cannot, the page says so and goes on when asked.
    ledger = screen.at("ledger")
    expect(ledger).to_have_attribute("data-status", re.compile("done|failed"), timeout=90_000)
    if ledger.get_attribute("data-status") == "failed":
        assert screen.at("text-0:0").inner_text().startswith(streamed)
        screen.at("go-on").click()
        expect(ledger).to_have_attribute("data-status", "done", timeout=90_000)
