"""The chat: replies stream, an edited turn forks the conversation, and no branch is lost."""

from __future__ import annotations

from collections.abc import Callable

from playwright.sync_api import expect
from support.ui.proxy import BreakingProxy
from support.ui.screen import Screen
from support.ui.stage import Stage

Visit = Callable[..., Screen]


def open_chat(screen: Screen) -> None:
    screen.open("chat")
    screen.wait_status("open")


def say(screen: Screen, text: str) -> None:
    """Sends a message."""
    screen.at("message").fill(text)
    screen.at("message").press("Enter")


def test_a_reply_streams_and_an_edited_turn_becomes_a_branch(stage: Stage, visit: Visit) -> None:
    screen = visit(stage.url)
    open_chat(screen)
    say(screen, "What is a leaf?")
    stage.wait_running(1)
    stage.say("A leaf is **green")
    reply = screen.page.locator(".chat-turn.is-assistant").first
    expect(reply).to_contain_text("green")
    stage.say("**.")
    stage.end()
    expect(reply.locator("strong")).to_have_text("green")
    screen.page.get_by_role("button", name="Edit").first.click()
    area = screen.page.get_by_label("The edited turn")
    area.fill("What is a root?")
    area.press("Enter")
    stage.wait_running(1, to="What is a root?")
    assert stage.running(to="What is a leaf?") == 0  # the branch has its own past
    stage.say("It is below.")
    stage.end()
    expect(screen.at("branch-place").first).to_have_text("2 / 2")
    screen.page.get_by_label("Previous branch").first.click()
    expect(screen.at("turns")).to_contain_text("A leaf is green.")
    expect(screen.at("turns")).not_to_contain_text("It is below.")


def test_stop_keeps_what_was_said(stage: Stage, visit: Visit) -> None:
    screen = visit(stage.url)
    open_chat(screen)
    say(screen, "Tell me a story.")
    stage.wait_running(1)
    stage.say("Once upon a time")
    expect(screen.at("turns")).to_contain_text("Once upon a time")
    screen.at("stop").click()
    stage.wait_running(0)
    expect(screen.at("turns")).to_contain_text("Once upon a time")
    expect(screen.at("send")).to_be_visible()


def test_a_dropped_connection_loses_nothing_of_a_reply(
    stage: Stage, proxy: BreakingProxy, visit: Visit
) -> None:
    screen = visit(proxy.url)
    screen.expect_problem(r"net::ERR_|WebSocket connection to|Failed to load")
    open_chat(screen)
    say(screen, "Count.")
    stage.wait_running(1)
    stage.say("One, ")
    expect(screen.at("turns")).to_contain_text("One, ")
    proxy.cut()
    stage.say("two, ")
    stage.say("three.")
    stage.end()
    expect(screen.at("turns")).to_contain_text("One, two, three.")


def test_the_chat_outlives_a_look_at_another_view(stage: Stage, visit: Visit) -> None:
    screen = visit(stage.url)
    open_chat(screen)
    say(screen, "Stay.")
    stage.wait_running(1)
    stage.say("I ")
    expect(screen.at("turns")).to_contain_text("I")
    screen.page.get_by_role("link", name="Playground").first.click()
    screen.view("playground")
    stage.say("stayed.")
    stage.end()
    screen.page.get_by_role("link", name="Chat").click()
    expect(screen.at("turns")).to_contain_text("I stayed.")
