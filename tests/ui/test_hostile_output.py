"""Text of a model is text: nothing that a model writes, or a user pastes, becomes code, a link that runs or a
broken page."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from playwright.sync_api import expect
from support.ui.accessibility import scrolls_sideways
from support.ui.screen import Screen
from support.ui.stage import Stage

Visit = Callable[..., Screen]
ESSAY = "clear and easy"  # in the prompt of the essay judge's first branch

MARKUP = (
    "<script>window.ran = 'script'</script><img src=x onerror=\"window.ran = 'image'\">"
    "<svg onload=\"window.ran = 'svg'\"></svg>"
    "<iframe srcdoc=\"<script>parent.ran = 'frame'</script>\"></iframe>"
    '<a href="javascript:window.ran = 1">link</a><form action="http://127.0.0.2/"><button>go</button></form>'
    "<style>body { display: none }</style><base href='http://127.0.0.2/'><meta http-equiv=refresh content=0>"
    '<p style="color: red" onclick="window.ran = 5">styled</p>'
    '<math><mtext></table><mglyph><style><!--</style><img title="--&gt;&lt;img src=1 onerror=alert(1)&gt;">'
)
MARKDOWN = (
    "[run](javascript:window.ran=2) [data](data:text/html,<script>parent.ran=3</script>) "
    "![image](http://127.0.0.2/pixel.png) <http://127.0.0.2/> [ref]\n\n[ref]: javascript:window.ran=4\n\n"
    "| a | b |\n|---|---|\n| `<b>` | **x** |\n\n<div style='color: red'>\nblock\n</div>\n\n"
    "H<sub>2</sub>O <b style='color: red'>inline</b> &lt;i style='x'&gt;\n"
)
FORMULAS = "\n\n".join(
    rf"\( {formula} \)"
    for formula in (
        r"\href{javascript:window.ran=6}{x} \url{http://127.0.0.2/}",
        r"\includegraphics[height=1em]{http://127.0.0.2/pixel.png}",
        r"\id{app}{x} \class{dialog}{y} \style{position: fixed}{z} \data{testid=run}{z}",
        r"\htmlId{app}{x} \htmlClass{dialog}{y} \htmlStyle{position: fixed}{z} \htmlData{testid=run}{z}",
        r"\text{<img src=x onerror=window.ran=7> </mtext><script>window.ran=8</script>}",
        r"\def\a{\a\a}\a",
        r"\newcommand{\b}[1]{#1#1#1#1}\b{\b{\b{\b{\b{\b{\b{x}}}}}}}",
        r"\mathllap{" * 18 + "x" + "}" * 18,
        r"\cancelto{y}{" * 18 + "x" + "}" * 18,
        r"\sideset{_1^2}{_3^4}\sum \pmb{x}",
        r"\rule{9999em}{9999em} \hspace{-9999em} \raisebox{9999em}{x}",
        r"\sqrt{" * 200 + "x" + "}" * 200,
        r"\left(" * 150 + "x" + r"\right)" * 150,
        "x^{" * 300 + "x" + "}" * 300,
        r"\unknown{x}",
        r"\begin{matrix}" + "a & " * 400 + r"\end{matrix}",
    )
) + "\n\n".join(" ".join(f"$x_{{{n}}}$" for n in range(start, start + 100)) for start in range(0, 3_000, 100))
OVERRIDES = "safe \u202egnp.exe\u202c \u2066\u2067\u2068 unclosed \u202e\u202e\u202e end"
BROKEN = "a\ufffd\ufffdb\x00\x07\x1b[31m\u0000\ufeff\ufffe e\u0301\u0301\u0301 👩‍👩‍👧 \U000e0041"
LONG_LINE = "0123456789abcdef" * 65_536  # 1 MB without a space

HOSTILE = {
    "markup": MARKUP,
    "markdown": MARKDOWN,
    "formulas": FORMULAS,
    "overrides": OVERRIDES,
    "broken": BROKEN,
    "long": LONG_LINE,
    "nested": "> " * 20_000,
}
# Changes to the page that the text must not cause.
STATE = """() => ({
  ran: window.ran ?? null,
  links: [...document.links].map((a) => a.protocol).filter((p) => !/^https?:$/.test(p)),
  foreign: document.querySelectorAll(
    `main script, main iframe, main style, main form[action], main img, base,
     math [href], math [id], math [data-testid], math .dialog`).length,
  isShown: getComputedStyle(document.body).display !== "none",
})"""
HARMLESS: dict[str, Any] = {"ran": None, "links": [], "foreign": 0, "isShown": True}


def answers(stage: Stage, kind: str) -> str:
    """The stage answers prompts that contain the returned word with this hostile text."""
    word = f"hostile-{kind}"
    stage.answer(word, HOSTILE[kind])
    return word


@pytest.mark.parametrize("kind", list(HOSTILE))
def test_the_chat_shows_it_as_text(stage: Stage, visit: Visit, kind: str) -> None:
    screen = visit(stage.url)
    screen.open("chat")
    screen.wait_status("open")
    screen.at("message").fill(f"Say {answers(stage, kind)}")
    screen.at("send").click()
    reply = screen.page.locator(".chat-turn.is-assistant .markdown")
    expect(reply).not_to_be_empty()
    expect(screen.page.locator(".is-streaming")).to_have_count(0)
    assert screen.page.evaluate(STATE) == HARMLESS
    assert scrolls_sideways(screen) == []
    if kind == "markup":  # nothing of it is left out
        assert reply.inner_text() == MARKUP
    if kind == "nested":  # nor is it of a stored chat
        screen.page.reload()
        screen.wait_status("open")
        expect(reply).to_contain_text("> > >")
    # The page still answers: another message can be written and sent.
    stage.answer("Still there?", "Yes.")
    screen.at("message").fill("Still there?")
    screen.at("message").press("Enter")
    expect(screen.page.locator(".chat-turn.is-assistant").nth(1)).to_contain_text("Yes.")


def test_the_playground_shows_it_as_text(stage: Stage, visit: Visit) -> None:
    """Each branch streams something else that is hostile; the last one a megabyte in one line."""
    screen = visit(stage.url)
    screen.open("playground")
    screen.wait_status("open")
    screen.at("run").click()
    stage.wait_running(4)
    prompts = (ESSAY, "claims with evidence", "ideas of its own", "well written")
    for prompt, kind in zip(prompts, ("markup", "overrides", "broken", "long"), strict=True):
        stage.say(HOSTILE[kind], to=prompt)
        stage.end(to=prompt)
    stage.wait_running(1)  # the summary: all four are in its prompt
    stage.say(MARKDOWN)
    stage.end()
    expect(screen.at("ledger")).to_have_attribute("data-status", "done", timeout=60_000)
    assert screen.at("text-0:0").inner_text() == MARKUP
    assert screen.page.evaluate(
        "() => document.querySelector('[data-testid=\"text-3:0\"]').textContent.length"
    ) == (len(LONG_LINE))
    assert screen.page.evaluate(STATE) == HARMLESS
    assert scrolls_sideways(screen) == []


def test_overrides_of_the_direction_end_with_their_text(stage: Stage, visit: Visit) -> None:
    """Text after a hostile text is shown unchanged."""
    screen = visit(stage.url)
    screen.open("chat")
    screen.wait_status("open")
    screen.at("message").fill(f"Say {answers(stage, 'overrides')}")
    screen.at("send").click()
    reply = screen.page.locator(".chat-turn.is-assistant .markdown")
    expect(reply).not_to_be_empty()
    isolated = """(element) => ["isolate", "isolate-override", "plaintext"].includes(
      getComputedStyle(element).unicodeBidi) || element.dir === "auto" || element.tagName === "BDI" """
    assert reply.evaluate(isolated)


def test_lone_surrogates_that_a_user_pastes_do_not_end_the_session(stage: Stage, visit: Visit) -> None:
    screen = visit(stage.url)
    screen.open("chat")
    screen.wait_status("open")
    stage.answer("surrogate", "It arrived.")
    screen.at("message").evaluate("""(area) => {
      area.value = "a surrogate \\ud800 and \\udc00 alone";
      area.dispatchEvent(new Event("input", {bubbles: true}));
    }""")
    screen.at("send").click()
    expect(screen.page.locator(".chat-turn.is-assistant")).to_contain_text("It arrived.")
    screen.wait_status("open")
