"""Every view in both themes: the complaints of the browser and axe, its width, and its picture."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
from playwright.sync_api import expect
from support.ui.accessibility import axe_violations, scrolls_sideways
from support.ui.http import complete
from support.ui.screen import Screen
from support.ui.stage import open_stage

Visit = Callable[..., Screen]
SHARED = "A short report from the harbour, for the people of the town. Today's topic is"
TOPICS = (
    "the tide",
    "boats",
    "herrings",
    "rope",
    "gulls",
    "salt",
    "the lighthouse",
    "fog",
    "ferries",
    "nets",
    "ice",
    "crabs",
)
VIEWS = ("playground", "chat", "tree", "scheduler", "programs", "runs")


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_a_program_and_a_chat_on_the_model_and_axe_on_what_every_view_shows_of_them(
    model_url: str, visit: Visit, theme: str, request: pytest.FixtureRequest
) -> None:
    """The pictures of the docs are taken on the way."""
    screen = visit(model_url, color_scheme=theme)

    def looked_at(view: str) -> None:
        expect(screen.page.locator("h1")).to_have_count(1)
        assert axe_violations(screen) == [], view
        if request.config.getoption("--update-images"):
            from support.ui.pictures import save_picture

            save_picture(screen.page, f"page-{view}-{theme}")

    screen.open("playground")
    screen.wait_status("open")
    assert axe_violations(screen) == []
    screen.at("run").click()
    for branch in range(4):
        expect(screen.at(f"text-{branch}:0")).not_to_be_empty(timeout=60_000)
    expect(screen.at("ledger")).to_have_attribute("data-status", "done", timeout=60_000)
    # The branches share their prompt, so all but one of them find it in the cache.
    assert int(screen.at("cached-tokens").inner_text().replace(",", "")) > 300
    screen.page.set_viewport_size({"width": 1280, "height": 1500})  # so that the branches are in the picture
    looked_at("playground")
    screen.page.set_viewport_size({"width": 1280, "height": 800})
    go_to(screen, "chat")
    screen.at("message").fill("What do plants live on?")
    screen.at("message").press("Enter")
    expect(screen.page.get_by_role("button", name="Another reply")).to_be_enabled(timeout=60_000)
    looked_at("chat")
    go_to(screen, "tree")
    for key in ("ArrowDown", "ArrowRight"):  # so that the details of a block are in the picture
        screen.at("tree-picture").press(key)
    expect(screen.page.get_by_role("region", name="Node").locator("pre")).to_be_visible()
    looked_at("tree")
    go_to(screen, "scheduler")
    expect(screen.page.locator(".view-scheduler .value").first).to_be_visible()
    with working(model_url):
        expect(screen.page.get_by_role("table").get_by_role("button").first).to_be_visible()
        expect(screen.page.locator(".view-scheduler .charts path").first).to_be_attached()
        looked_at("scheduler")
    go_to(screen, "runs")
    expect(screen.at("timeline")).to_be_visible()
    looked_at("runs")


@contextmanager
def working(url: str) -> Iterator[None]:
    """The server has requests that run, and others that have ended, for as long as the block takes."""
    is_over = threading.Event()

    def write(topics: Sequence[str]) -> None:
        for topic in itertools.cycle(topics):
            complete(url, f"{SHARED} {topic}", max_tokens=80, ignore_eos=True)
            if is_over.is_set():
                return

    with ThreadPoolExecutor(max_workers=4) as clients:
        writing = [clients.submit(write, TOPICS[number::4]) for number in range(4)]
        try:
            yield
        finally:
            is_over.set()
        for each in writing:
            each.result()


def go_to(screen: Screen, view: str) -> None:
    """Follows the link to a view; the page stays."""
    screen.page.get_by_role("navigation").first.locator(f'a[href="#/{view}"]').click()
    screen.view(view)


def test_no_view_is_wider_than_360_pixels(model_url: str, visit: Visit) -> None:
    screen = visit(model_url, viewport={"width": 360, "height": 740}, has_touch=True)
    for view in VIEWS:
        screen.open(view)
        screen.wait_status("open")
        assert scrolls_sideways(screen) == [], view
        assert axe_violations(screen) == [], view


ROWS = """(items) => {
  const rows = new Map();
  for (const item of document.querySelectorAll(items)) {
    const { top, height } = item.getBoundingClientRect();
    const middle = Math.round(top + height / 2);
    rows.set(middle, (rows.get(middle) ?? 0) + 1);
  }
  return [...rows.values()];
}"""


def test_f37_no_part_of_the_header_stands_alone_on_a_line(visit: Visit) -> None:
    with open_stage(model="a-model-with-a-name-of-32-letters") as stage:
        screen = visit(stage.url)
        screen.open("runs")
        screen.wait_status("open")
        for width in (320, 360, 400, 440, 460, 640, 700, 800, 1280):
            screen.page.set_viewport_size({"width": width, "height": 740})
            assert screen.page.evaluate(ROWS, ".top nav a") in ([6], [3, 3]), width
            assert screen.page.evaluate(ROWS, ".settings > *") == [2], width
            assert scrolls_sideways(screen) == [], width


CONTROLS = "a[href], button, select, input, textarea, summary, [tabindex]"
REACHABLE = """(controls) => [...document.querySelectorAll(controls)]
  .filter((one) => !one.disabled && one.tabIndex >= 0 && one.checkVisibility())
  .map((one, index) => { one.dataset.stop = index; return index; })"""
STOP = """() => {
  const one = document.activeElement;
  const style = getComputedStyle(one);
  const box = one.getBoundingClientRect();
  return one === document.body ? null : {
    stop: Number(one.dataset.stop), html: one.outerHTML.slice(0, 120),
    isSeen: style.outlineStyle !== "none" && box.width > 0 && box.bottom > 0 && box.top < innerHeight,
  };
}"""


def test_tab_reaches_all_controls_of_every_view_and_each_shows_the_focus(
    model_url: str, visit: Visit
) -> None:
    screen = visit(model_url)
    screen.open("playground")
    screen.wait_status("open")
    screen.at("run").click()
    expect(screen.at("ledger")).to_have_attribute("data-status", "done", timeout=60_000)
    for view in VIEWS:
        go_to(screen, view)
        if view == "runs":
            expect(screen.at("timeline")).to_be_visible()
        # The scheduler's numbers come with its first look at the engine.
        if view == "scheduler":
            expect(screen.page.locator(".view-scheduler .value").first).to_be_visible()
        wanted = set(screen.page.evaluate(REACHABLE, CONTROLS))
        screen.page.evaluate("() => document.activeElement.blur()")
        screen.page.locator("body").evaluate("(body) => { body.tabIndex = -1; body.focus(); }")
        reached: set[int] = set()
        for _ in range(len(wanted) + 5):
            screen.page.keyboard.press("Tab")
            stop = screen.page.evaluate(STOP)
            if stop is None:
                break  # it left the page: nothing holds it
            assert stop["isSeen"], (view, stop["html"])
            reached.add(stop["stop"])
        else:
            raise AssertionError(f"{view} does not let Tab go")
        assert wanted - reached == set(), view


def test_the_page_runs_no_code_but_its_own(model_url: str, visit: Visit) -> None:
    """The policy allows neither inline scripts nor eval, nor a request to another host."""
    screen = visit(model_url)
    screen.expect_problem("Content Security Policy|another host|violates")
    screen.open("playground")
    screen.page.evaluate("""() => {
      const script = document.createElement("script");
      script.textContent = "window.ran = 'inline'";
      document.head.append(script);
      const button = document.createElement("button");
      button.setAttribute("onclick", "window.ran = 'handler'");
      document.body.append(button);
      button.click();
    }""")
    assert screen.page.evaluate("() => window.ran ?? null") is None
    # In a callback, because the debugger's own code may use eval.
    evaluated = """() => new Promise((resolve) => setTimeout(() => {
      try { resolve((0, eval)("1")); } catch (error) { resolve(error.name); }
    }))"""
    assert screen.page.evaluate(evaluated) == "EvalError"
    fetched = "() => fetch('http://127.0.0.2:1/').then(() => 'sent', () => 'rejected')"
    assert screen.page.evaluate(fetched) == "rejected"


def test_each_view_has_an_address_and_the_browser_goes_back(model_url: str, visit: Visit) -> None:
    screen = visit(model_url)
    screen.open("playground")
    for view in VIEWS[1:]:
        go_to(screen, view)
    for view in reversed(VIEWS[:-1]):
        screen.page.go_back()
        screen.view(view)


def test_the_chosen_theme_overrides_that_of_the_system(model_url: str, visit: Visit) -> None:
    screen = visit(model_url, color_scheme="light")
    screen.open("playground")
    ground = "() => getComputedStyle(document.documentElement).backgroundColor"
    light = screen.page.evaluate(ground)
    screen.page.get_by_label("Theme").select_option("dark")
    screen.wait(f"(light) => ({ground})() !== light", light)
