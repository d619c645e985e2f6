"""The engine is killed while a page runs a program on it, or looks at its prefix tree."""

from __future__ import annotations

import subprocess
from collections.abc import Callable

from playwright.sync_api import expect
from support.commands import engine_of
from support.ui.http import complete
from support.ui.screen import Screen

Visit = Callable[..., Screen]


def kill_engine(server: subprocess.Popen[str]) -> None:
    """Kills the engine's process; the server starts another one."""
    engine = engine_of(server)
    assert engine is not None
    engine.kill()


def test_a_program_goes_on_where_it_was_when_its_engine_was_killed(
    served_model: tuple[str, subprocess.Popen[str]], visit: Visit
) -> None:
    """The server runs the unfinished requests again: the page shows no failure, and no text is replaced."""
    url, server = served_model
    screen = visit(url)
    screen.open("playground")
    screen.wait_status("open")
    screen.at("run").click()
    text = screen.at("text-0:0")
    expect(text).not_to_be_empty(timeout=60_000)
    kill_engine(server)
    streamed = text.text_content() or ""
    assert streamed
    expect(screen.at("ledger")).to_have_attribute("data-status", "done", timeout=90_000)
    assert (text.text_content() or "").startswith(streamed)
    screen.wait_status("open")


def test_the_tree_says_that_the_engine_restarts_and_then_shows_the_new_one(
    served_model: tuple[str, subprocess.Popen[str]], visit: Visit
) -> None:
    url, server = served_model
    complete(url, "Nightjars that were there before the engine was killed", ignore_eos=True)
    screen = visit(url)
    screen.open("tree")
    screen.wait_status("open")
    screen.page.get_by_role("button", name="Outline").click()
    outline = screen.page.get_by_role("tree")
    expect(outline).to_contain_text("Nightjars")
    kill_engine(server)
    note = screen.view("tree").locator(".view-note")
    expect(note).to_have_text("The engine is restarting: what is shown is from before.")
    expect(outline).to_contain_text("Nightjars")
    expect(note).to_have_count(0, timeout=90_000)
    complete(url, "Herrings that the new engine has computed", ignore_eos=True)
    expect(outline).to_contain_text("Herrings")
    expect(outline).not_to_contain_text("Nightjars")
