"""Every view in both themes: what the browser and axe say about it, its width, and its picture."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from playwright.sync_api import expect
from support.ui.accessibility import axe_violations, scrolls_sideways
from support.ui.screen import Screen

Visit = Callable[..., Screen]
VIEWS = ("playground", "chat", "tree", "scheduler", "runs")


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_axe_finds_nothing_on_any_view(
    model_url: str, visit: Visit, theme: str, request: pytest.FixtureRequest
) -> None:
    screen = visit(model_url, color_scheme=theme)
    screen.open("playground")
    screen.wait_status("open")
    for view in VIEWS:
        screen.open(view)
        expect(screen.page.locator("h1")).to_have_count(1)
        assert axe_violations(screen) == [], view
        if request.config.getoption("--update-images"):
            from support.ui.pictures import save_picture

            save_picture(screen.page, f"page-{view}-{theme}")


def test_no_view_is_wider_than_360_pixels(model_url: str, visit: Visit) -> None:
    screen = visit(model_url, viewport={"width": 360, "height": 740}, has_touch=True)
    for view in VIEWS:
        screen.open(view)
        screen.wait_status("open")
        assert scrolls_sideways(screen) == [], view
        assert axe_violations(screen) == [], view


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
    # In a callback, because what the debugger itself runs may use eval.
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
        screen.page.get_by_role("navigation").first.locator(f'a[href="#/{view}"]').click()
        screen.view(view)
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
