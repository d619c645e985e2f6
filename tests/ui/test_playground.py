"""Programs in the playground: runs that stream, end, are stopped, lose a branch, a connection or the page."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pytest
from playwright.sync_api import Locator, expect
from support.ui.accessibility import axe_violations
from support.ui.proxy import BreakingProxy
from support.ui.screen import Screen
from support.ui.stage import Stage, open_stage

Visit = Callable[..., Screen]
# The four branches of the essay judge, and the key of the gen in each.
BRANCHES = ("0", "1", "2", "3")
FIRST, SECOND = "clear and easy", "claims with evidence"  # in the prompts of the first two


def text_of(screen: Screen, branch: str) -> Locator:
    """The streamed text of a branch of the essay judge."""
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
    stage.wait_running(1, to="Yes, it is.")  # the branches' answers are in the prompt of the summary
    stage.say(" is fine.")
    stage.end()
    wait_end(screen, "done")
    summary = screen.page.locator(".streamed").filter(has_text="In short")
    assert summary.inner_text() == "In short, the essay is fine."  # on one line


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
    # The other choice stays once it is edited.
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
    """Complete texts are not generated again, and partial texts stay until they are replaced.
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


def test_f43j_an_edited_program_survives_a_reload(stage: Stage, visit: Visit) -> None:
    screen = visit(stage.url)
    screen.open("playground")
    screen.wait_status("open")
    screen.at("example").select_option("few_shot")
    field = screen.page.get_by_label("System", exact=True)
    field.fill("My own words.")
    screen.page.reload()
    screen.wait_status("open")
    expect(field).to_have_value("My own words.")
    expect(screen.at("example")).to_have_value("few_shot")
    other = visit(stage.url)  # another tab begins with the first program
    other.open("playground")
    expect(other.page.get_by_label("System", exact=True)).not_to_have_value("My own words.")


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


def test_f37_the_focus_follows_a_step_that_moves(stage: Stage, visit: Visit) -> None:
    screen = visit(stage.url)
    screen.open("playground")
    form = screen.page.get_by_role("form", name="Program")
    steps = form.locator(".steps").first.locator("> .step")
    number = steps.count()
    assert number > 1
    form.get_by_role("button", name="say").last.click()
    expect(steps).to_have_count(number + 1)
    form.get_by_label(f"Move step {number + 1} up").focus()
    for place in range(number, 1, -1):
        screen.page.keyboard.press("Enter")
        expect(form.get_by_label(f"Move step {place} up")).to_be_focused()
    screen.page.keyboard.press("Enter")
    expect(form.get_by_label("Move step 1 down")).to_be_focused()
    expect(steps.first.locator("h3")).to_contain_text("Turn")
    form.get_by_label(f"Remove step {number + 1}", exact=True).focus()
    screen.page.keyboard.press("Enter")
    expect(steps).to_have_count(number)
    expect(form.get_by_label(f"Remove step {number}", exact=True)).to_be_focused()


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
    prompts = [screen.at(f"branch-{branch}").locator(".prompt") for branch in range(3)]
    for prompt in prompts:
        prompt.locator("summary").click()
        expect(prompt).to_contain_text("You fill in records")
    cached = [text for prompt in prompts for text in prompt.locator(".cached").all_inner_texts()]
    assert sum("You fill in records" in text for text in cached) >= 2  # one branch computes it
    # The marks stay, where the texts are drawn again after another view.
    marks = text_of(screen, "0").locator("mark.forced")
    number = marks.count()
    screen.open("chat")
    screen.open("playground")
    expect(text_of(screen, "0")).to_contain_text('"name":')
    screen.page.evaluate("() => new Promise((next) => requestAnimationFrame(() => setTimeout(next, 0)))")
    expect(marks).to_have_count(number)


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


def number_of(text: str) -> int:
    """A sum of the ledger, which may be an estimate."""
    return int(text.removeprefix("≈").strip().replace(",", ""))


def test_f43b_tokens_are_counted_while_branches_stream(stage: Stage, visit: Visit) -> None:
    """The page shows an estimate until the server has reported them; for cancelled texts, it stays."""
    screen = visit(stage.url)
    run_judge(screen)
    stage.wait_running(4)
    prompt, output = screen.at("prompt-tokens"), screen.at("output-tokens")
    reported = number_of(prompt.inner_text())  # of the select before the fork
    expect(output).to_have_text("0")
    stage.say("This essay is clear, and easy to follow. ")
    expect(output).to_have_text(re.compile(r"^≈ [1-9]"))
    expect(prompt).to_have_text(re.compile(r"^≈"))
    assert number_of(prompt.inner_text()) > 2 * reported
    stage.end(to=FIRST)
    expect(screen.at("call-0:0")).to_have_attribute("data-status", "done")
    screen.at("stop").click()
    stage.wait_running(0)
    wait_end(screen, "stopped")
    assert number_of(output.inner_text()) >= 4 * 8


def test_f43b_the_sums_of_a_complete_run_are_those_of_the_server(stage: Stage, visit: Visit) -> None:
    screen = visit(stage.url)
    run_judge(screen)
    stage.wait_running(4)
    stage.say("one two three")
    stage.end()
    stage.wait_running(1)
    stage.say("four five")
    stage.end()
    wait_end(screen, "done")
    expect(screen.at("output-tokens")).to_have_text(str(4 * 3 + 2))


def test_f43c_a_text_that_reached_its_limit_is_not_just_done(stage: Stage, visit: Visit) -> None:
    screen = visit(stage.url)
    run_judge(screen)
    stage.wait_running(4)
    stage.say("one two three")
    stage.end(to=FIRST, finish="length")
    stage.end(to=SECOND)
    expect(screen.at("call-0:0").locator(".call-status")).to_have_text("cut at 3 tokens")
    expect(screen.at("call-1:0").locator(".call-status")).to_have_text("done")
    screen.at("stop").click()
    stage.wait_running(0)
    screen.page.get_by_role("link", name="Runs").click()
    bars = screen.at("timeline").locator(".bar")
    expect(bars.and_(screen.page.get_by_role("button", name="cut"))).to_have_count(1)


def test_f43d_a_turn_shows_the_values_that_its_prompt_has(stage: Stage, visit: Visit) -> None:
    screen = visit(stage.url)
    screen.open("playground")
    screen.wait_status("open")
    screen.at("example").select_option("skeleton_of_thought")
    screen.at("run").click()
    for text in (" dark.", " earplugs.", " late."):
        stage.wait_running(1)
        expect(screen.at("branch-2").locator(".chip")).to_have_text("food")  # the last one to get its value
        stage.say(text)
        stage.end()
    stage.wait_running(3)
    assert stage.running(to="Explain in one sentence: Use earplugs.") == 1
    for branch, text in enumerate(("Keep the bedroom dark.", "Use earplugs.", "Do not eat late.")):
        expect(screen.at(f"branch-{branch}")).to_contain_text(f"Explain in one sentence: {text}")
    assert "{" not in screen.page.locator(".stage").inner_text()
    screen.at("stop").click()
    stage.wait_running(0)


def test_f43h_the_mistake_of_a_program_stands_beside_run(stage: Stage, visit: Visit) -> None:
    screen = visit(stage.url)
    screen.open("playground")
    screen.wait_status("open")
    screen.at("example").select_option("extraction")
    schema = screen.page.get_by_role("textbox", name="JSON schema")
    whole = schema.input_value()
    schema.fill(whole[:-1])
    run, mistake = screen.at("run"), screen.at("run-mistake")
    expect(run).to_be_disabled()
    expect(run).to_have_accessible_description(re.compile("schema"))
    screen.page.evaluate("() => scrollTo(0, 0)")
    expect(mistake).to_be_in_viewport()
    button, text = run.bounding_box(), mistake.bounding_box()
    assert button is not None
    assert text is not None
    assert abs(text["y"] - button["y"]) < 60
    assert axe_violations(screen) == []
    schema.fill(whole)
    expect(run).to_be_enabled()
    expect(mistake).to_be_empty()


# The ends of all lines, in pixels of the window.
ENDS = """() => [...document.querySelectorAll(".fan path, .rails path")].flatMap((path) => {
  const at = (length) => new DOMPoint(...Object.values((({ x, y }) => ({ x, y }))(
    path.getPointAtLength(length)))).matrixTransform(path.getScreenCTM());
  return [at(0), at(path.getTotalLength())].map(({ x, y }) => [x, y]);
})"""


@pytest.mark.parametrize("width", [1280, 700, 400])
def test_f43i_a_line_leads_to_each_branch_and_one_out_of_each(stage: Stage, visit: Visit, width: int) -> None:
    screen = visit(stage.url, viewport={"width": width, "height": 800})
    screen.open("playground")
    screen.wait_status("open")
    screen.at("example").select_option("self_consistency")
    if width < 1088:  # the program is folded
        screen.page.get_by_text("Program", exact=True).click()
    screen.page.get_by_label("Branches", exact=True).fill("20")
    screen.page.get_by_label("Branches", exact=True).press("Tab")
    screen.at("run").click()
    stage.wait_running(20)
    expect(screen.page.locator("section.branch")).to_have_count(20)
    screen.wait("() => document.querySelectorAll('.fan path, .rails path').length >= 40")
    ends: list[tuple[float, float]] = screen.page.evaluate(ENDS)

    def has_end(x: float, y: float) -> bool:
        return any(abs(x - end[0]) < 3 and abs(y - end[1]) < 3 for end in ends)

    for box in screen.page.locator("section.branch").all():
        place = box.bounding_box()
        assert place is not None
        middle = place["x"] + place["width"] / 2
        assert has_end(middle, place["y"])
        assert has_end(middle, place["y"] + place["height"])
    screen.at("stop").click()
    stage.wait_running(0)


def test_f43f_a_program_without_one_branch_is_cancelled_and_continued_not_failed(
    stage: Stage, visit: Visit
) -> None:
    screen = visit(stage.url)
    run_judge(screen)
    stage.wait_running(4)
    stage.say("Begun")
    screen.at("cancel-1").click()
    stage.wait_running(3)
    stage.end()
    stage.wait_running(1)
    expect(screen.at("joined").locator(".chip")).to_have_text(["clarity", "originality", "style"])
    stage.end()
    wait_end(screen, "done")
    screen.page.get_by_role("link", name="Runs").click()
    timeline = screen.at("timeline")
    roots = timeline.locator(".timeline-row.is-root")
    expect(roots).to_have_count(2)
    expect(roots.first).to_contain_text("cancelled")
    expect(roots.last).to_contain_text("continued")
    expect(timeline).not_to_contain_text("failed")
    assert timeline.locator(".bar.is-failed").count() == 0


def test_f42_a_model_without_a_chat_template_runs_programs_without_turns(visit: Visit) -> None:
    with open_stage(roles=False) as stage:
        screen = visit(stage.url)
        run_judge(screen)
        stage.wait_running(4)
        expect(screen.at("no-turns")).to_be_visible()
        assert stage.running(to="Answer yes or no.\n\nyes\n\nIs the essay clear") == 1
        stage.say("It is.")
        stage.end()
        stage.wait_running(1, to="clarity: It is.\nevidence: It is.")
        stage.end()
        wait_end(screen, "done")
        screen.at("python").click()
        expect(screen.at("python-source")).not_to_contain_text("af.user")
        expect(screen.at("python-source")).to_contain_text("af.gen")


def test_f37_a_drawer_reaches_the_edge_of_the_window_and_the_page_under_it_stays(
    stage: Stage, visit: Visit
) -> None:
    screen = visit(stage.url, viewport={"width": 1280, "height": 500})
    screen.open("playground")
    screen.wait_status("open")
    # The browser of the tests shows no scroll bars, but it keeps their place.
    assert screen.page.evaluate("innerWidth - document.body.offsetWidth") > 0
    screen.page.mouse.wheel(0, 120)
    screen.wait("() => scrollY > 0")
    place = "() => JSON.stringify([scrollY, document.querySelector('.stage-side').getBoundingClientRect()])"
    before = screen.page.evaluate(place)
    screen.at("sampling").click()
    drawer = screen.page.get_by_role("dialog", name="Sampling")
    assert drawer.evaluate("(one) => one.getBoundingClientRect().right - innerWidth") == 0
    assert screen.page.evaluate(place) == before
    screen.page.keyboard.press("Escape")
    expect(drawer).to_have_count(0)
    assert screen.page.evaluate(place) == before
