"""axe-core on a page, and other things that hold on every view."""

from __future__ import annotations

from pathlib import Path

from support.ui.screen import Screen

AXE = Path(__file__).parents[3] / "ui" / "node_modules" / "axe-core" / "axe.min.js"
_RUN = """async () => (await axe.run(document, {resultTypes: ["violations"]})).violations.map((v) =>
  `${v.id}: ${v.help}: ${v.nodes.map((n) => n.html.slice(0, 200)).join(" | ")}`)"""
_OVERFLOWING = """() => [...document.querySelectorAll("body *")].filter((e) => {
  const box = e.getBoundingClientRect();
  return box.width && box.right > document.documentElement.clientWidth + 1 && !e.closest("[data-scrolls]");
}).slice(0, 5).map((e) => e.outerHTML.slice(0, 160))"""


def axe_violations(screen: Screen) -> list[str]:
    """The findings of axe on the page now, one line for each rule."""
    if screen.page.evaluate("typeof axe") == "undefined":
        screen.page.evaluate(AXE.read_text(encoding="utf-8"))
    found: list[str] = screen.page.evaluate(_RUN)
    return found


def scrolls_sideways(screen: Screen) -> list[str]:
    """The elements that are wider than the window; empty if the page fits."""
    root = "document.scrollingElement"
    if screen.page.evaluate(f"{root}.scrollWidth <= {root}.clientWidth"):
        return []
    wide: list[str] = screen.page.evaluate(_OVERFLOWING)
    return wide or ["something"]
