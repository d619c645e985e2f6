"""Programs in the playground: runs that stream, end, are stopped, lose a branch, a connection or the page."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from playwright.sync_api import Locator, expect
from support.ui.accessibility import axe_violations
from support.ui.proxy import BreakingProxy
from support.ui.screen import Screen
from support.ui.stage import Stage

Visit = Callable[..., Screen]
# The four branches of the essay judge, and the key of the gen in each.
BRANCHES = ("0", "1", "2", "3")
FIRST, SECOND = "clear and easy", "claims with evidence"  # in the prompts of the first two


def text_of(screen: Screen, branch: str) -> Locator:
    """What a branch of the essay judge has streamed."""
    return screen.at(f"text-{branch}:0")


def run_judge(screen: Screen) -> None:
    """Opens the playground and runs the essay judge, which is the program that it begins with."""
    screen.open("playground")
    screen.wait_status("open")
    screen.at("run").click()


def wait_end(screen: Screen, status: str) -> None:
    """Waits until the run has ended in this way."""
    expect(screen.at("ledger")).to_have_attribute("data-status", status, timeout=60_000)


def test_branches_stream_side_by_side_and_flow_into_the_join(stage: Stage, visit: Visit) -> None:
    screen = visit(stage.url)
    run_judge(screen)
    stage.wait_running(4)
    stage.say("Yes, ", to=FIRST)
    expect(text_of(screen, "0")).to_have_text("Yes, ")
    expect(text_of(screen, "1")).to_be_empty()
    stage.say("It has none. ", to=SECOND)
    expect(text_of(screen, "1")).to_have_text("It has none. ")
    stage.say("it is.", to=FIRST)
    expect(text_of(screen, "0")).to_have_text("Yes, it is.")
    stage.end()
    stage.wait_running(1, to="Yes, it is.")  # what the branches said is in the prompt of the summary
    stage.say("A fine essay.")
    stage.end()
    wait_end(screen, "done")
    expect(screen.view("playground")).to_contain_text("A fine essay.")


def test_an_edited_program_that_another_replaced_comes_back(stage: Stage, visit: Visit) -> None:
    screen = visit(stage.url)
    screen.open("playground")
    screen.wait_status("open")
    choice, replaced = screen.at("example"), screen.at("replaced")
    others = choice.locator("option").evaluate_all("all => all.map(one => one.value)")
    # Nothing was edited, so nothing is asked.
    choice.select_option(others[1])
    expect(replaced).to_have_count(0)
    choice.select_option("essay_judge")
    field = screen.view("playground").locator("textarea:visible").first
    field.fill("My own words.")
    choice.focus()
    choice.select_option(others[1])
    choice.select_option(others[2])
    expect(field).not_to_have_value("My own words.")
    expect(replaced).to_be_visible()
    assert axe_violations(screen) == []
    choice.focus()
    screen.page.keyboard.press("Tab")
    expect(replaced.get_by_role("button", name="Undo")).to_be_focused()
    screen.page.keyboard.press("Enter")
    expect(field).to_have_value("My own words.")
    expect(choice).to_have_value("essay_judge")
    expect(choice).to_be_focused()
    expect(replaced).to_have_count(0)
    # What was chosen instead stays once it is edited.
    choice.select_option(others[1])
    expect(replaced).to_be_visible()
    field.fill("Other words.")
    expect(replaced).to_have_count(0)


def test_stop_cancels_at_once_and_keeps_what_was_streamed(stage: Stage, visit: Visit) -> None:
    screen = visit(stage.url)
    run_judge(screen)
    stage.wait_running(4)
    stage.say("So far. ")
    for branch in BRANCHES:
        expect(text_of(screen, branch)).to_have_text("So far. ")
    screen.at("stop").click()
    stage.wait_running(0)
    wait_end(screen, "stopped")
    for branch in BRANCHES:
        expect(text_of(screen, branch)).to_have_text("So far. ")
    expect(screen.at("run")).to_be_focused()  # it is the same button


def test_cancelling_one_branch_leaves_the_others_running(stage: Stage, visit: Visit) -> None:
    screen = visit(stage.url)
    run_judge(screen)
    stage.wait_running(4)
    stage.say("Begun")
    expect(text_of(screen, "1")).to_have_text("Begun")
    screen.at("cancel-1").click()
    stage.wait_running(3)
    assert stage.running(to=SECOND) == 0
    stage.say(" and ended.")
    expect(text_of(screen, "0")).to_have_text("Begun and ended.")
    expect(text_of(screen, "1")).to_have_text("Begun")
    stage.end()
    stage.wait_running(1)  # the summary, of the three that are left
    stage.say("Three judges agree.")
    stage.end()
    wait_end(screen, "done")
    expect(text_of(screen, "1")).to_have_text("Begun")


def test_a_dropped_connection_loses_no_text(stage: Stage, proxy: BreakingProxy, visit: Visit) -> None:
    screen = visit(proxy.url)
    screen.expect_problem(r"net::ERR_|WebSocket connection to|Failed to load")
    run_judge(screen)
    stage.wait_running(4)
    stage.say("Before, ")
    expect(text_of(screen, "0")).to_have_text("Before, ")
    proxy.refuse()
    proxy.cut()
    stage.say("meanwhile, ")
    screen.wait_status("lost")
    expect(text_of(screen, "0")).to_have_text("Before, ")
    proxy.refuse(False)
    screen.wait_status("open")
    stage.say("and after.")
    for branch in BRANCHES:
        expect(text_of(screen, branch)).to_have_text("Before, meanwhile, and after.")
    screen.at("stop").click()
    stage.wait_running(0)


def test_a_run_whose_server_stayed_away_goes_on_in_a_new_session(
    forgetful_stage: Stage, forgetful_proxy: BreakingProxy, visit: Visit
) -> None:
    """Complete texts are not generated again, and what was streamed of the others stays until it is replaced.
    While the server is away, every view can be shown."""
    stage, proxy = forgetful_stage, forgetful_proxy
    screen = visit(proxy.url)
    screen.expect_problem(r"net::ERR_|WebSocket connection to|Failed to load")
    run_judge(screen)
    stage.wait_running(4)
    stage.say("Whole.", to=FIRST)
    stage.end(to=FIRST)
    stage.say("Half", to=SECOND)
    expect(screen.at("branch-0").locator(".call")).to_have_attribute("data-status", "done")
    expect(text_of(screen, "1")).to_have_text("Half")
    proxy.refuse()
    proxy.cut()
    wait_end(screen, "failed")
    for view in ("chat", "tree", "scheduler", "runs", "playground"):
        screen.page.get_by_role("navigation").first.locator(f'a[href="#/{view}"]').click()
        screen.view(view)
    expect(text_of(screen, "1")).to_have_text("Half")
    proxy.refuse(False)
    screen.at("status-line").get_by_role("button").click()
    screen.wait_status("open")
    screen.at("go-on").click()
    stage.wait_running(3)
    assert stage.running(to=FIRST) == 0
    expect(text_of(screen, "0")).to_have_text("Whole.")
    expect(text_of(screen, "1")).to_have_text("Half")
    stage.say("Anew.", to=SECOND)
    expect(text_of(screen, "1")).to_have_text("Anew.")
    screen.at("stop").click()
    stage.wait_running(0)


def test_a_reload_in_mid_stream_frees_the_server_and_the_page_runs_again(
    forgetful_stage: Stage, visit: Visit
) -> None:
    stage, screen = forgetful_stage, visit(forgetful_stage.url)
    run_judge(screen)
    stage.wait_running(4)
    stage.say("Lost on purpose. ")
    expect(text_of(screen, "0")).not_to_be_empty()
    screen.page.reload()
    screen.wait_status("open")
    stage.wait_running(0)
    screen.at("run").click()
    stage.wait_running(4)
    screen.at("stop").click()
    stage.wait_running(0)


def test_a_program_runs_and_stops_by_keyboard_alone(stage: Stage, visit: Visit) -> None:
    screen = visit(stage.url)
    screen.open("playground")
    screen.wait_status("open")
    tab_to(screen, "run")
    screen.page.keyboard.press("Enter")
    stage.wait_running(4)
    tab_to(screen, "cancel-2")
    screen.page.keyboard.press("Space")
    stage.wait_running(3)
    tab_to(screen, "stop", backwards=True)
    screen.page.keyboard.press("Enter")
    stage.wait_running(0)


def test_a_schema_fills_a_tree_and_marks_show_what_was_forced_and_cached(
    model_url: str, visit: Visit
) -> None:
    screen = visit(model_url)
    screen.open("playground")
    screen.wait_status("open")
    screen.at("example").select_option("extraction")
    screen.at("run").click()
    wait_end(screen, "done")
    for branch in ("0", "1", "2"):
        values = json.loads(text_of(screen, branch).inner_text())
        tree = screen.at(f"branch-{branch}").locator(".json-tree")
        for value in (values["name"], str(values["born"]), values["field"]):
            expect(tree).to_contain_text(value)
        forced = text_of(screen, branch).locator("mark.forced")
        assert "".join(forced.all_inner_texts()).count('name":') == 1 + len(values["prizes"])
    assert int(screen.at("forced-tokens").inner_text()) > 0
    prompt = screen.at("branch-2").locator(".prompt")
    prompt.locator("summary").click()
    expect(prompt.locator(".cached")).to_contain_text("You fill in records")


def test_a_select_shows_the_probability_of_each_choice(stage: Stage, visit: Visit) -> None:
    screen = visit(stage.url)
    run_judge(screen)
    stage.wait_running(4)
    rows = screen.view("playground").get_by_role("row")
    expect(rows).to_have_count(2)  # of the select before the fork
    assert rows.get_by_role("cell").filter(has_text="%").all_inner_texts() == ["73%", "27%"]
    expect(rows.first).to_contain_text("yes")
    screen.at("stop").click()
    stage.wait_running(0)


def tab_to(screen: Screen, test_id: str, *, backwards: bool = False) -> None:
    """Presses Tab until the element has the focus. Every stop on the way must be visible."""
    focused = """() => {
      const box = document.activeElement.getBoundingClientRect();
      return {id: document.activeElement.dataset.testid ?? "", seen: box.width > 0 && box.height > 0};
    }"""
    for _ in range(150):
        screen.page.keyboard.press("Shift+Tab" if backwards else "Tab")
        at: dict[str, Any] = screen.page.evaluate(focused)
        assert at["seen"], screen.page.evaluate("document.activeElement.outerHTML")
        if at["id"] == test_id:
            return
    raise AssertionError(f"Tab does not lead to {test_id}")


def test_screen_readers_get_sentences(stage: Stage, visit: Visit) -> None:
    screen = visit(stage.url)
    run_judge(screen)
    stage.wait_running(4)
    said = screen.at("announcer").locator("p")
    for piece in ("The ", "essay ", "is ", "clear. ", "It "):
        stage.say(piece, to=FIRST)
    expect(said.last).to_contain_text("The essay is clear.")
    # A sentence that has not ended yet is not read.
    texts = [text.strip() for text in said.all_inner_texts()]
    assert [text for text in texts if text[-1] not in ".!?…"] == []
    stage.end()
    stage.wait_running(1)
    screen.at("stop").click()
    stage.wait_running(0)


def test_nothing_moves_where_less_motion_is_wanted(stage: Stage, visit: Visit) -> None:
    screen = visit(stage.url, reduced_motion="reduce")
    run_judge(screen)
    stage.wait_running(4)
    stage.say("Still. ")
    expect(text_of(screen, "0")).to_have_text("Still. ")
    moving = """() => document.getAnimations().filter((one) => one.playState === "running")
      .map((one) => `${one.animationName ?? one.transitionProperty} of ${one.effect.target.className}`)"""
    assert screen.page.evaluate(moving) == []
    screen.at("stop").click()
    stage.wait_running(0)


def test_the_columns_of_a_run_fit_360_pixels(stage: Stage, visit: Visit) -> None:
    from support.ui.accessibility import scrolls_sideways

    screen = visit(stage.url, viewport={"width": 360, "height": 740})
    run_judge(screen)
    stage.wait_running(4)
    stage.say("w" * 300)  # a word that is wider than the window
    expect(text_of(screen, "0")).not_to_be_empty()
    assert scrolls_sideways(screen) == []
    screen.at("stop").click()
    stage.wait_running(0)
