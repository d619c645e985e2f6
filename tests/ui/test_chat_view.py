"""The chat: replies stream, an edited turn becomes a branch, and the model calls tools."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import msgspec
import pytest
from anyio.from_thread import start_blocking_portal
from playwright.sync_api import Locator, expect
from support.ui.accessibility import axe_violations, scrolls_sideways
from support.ui.proxy import BreakingProxy
from support.ui.screen import Screen
from support.ui.stage import Stage, open_stage

from agentflow.backends.scripted_generator import ScriptedGenerator
from agentflow.server.config.limits import ServerLimits
from agentflow.server.models.models import Models, OneGenerator
from agentflow.server.serve import running_server

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


def test_reasoning_are_open_while_the_model_thinks(stage: Stage, visit: Visit) -> None:
    screen = visit(stage.url)
    open_chat(screen)
    say(screen, "What is a leaf?")
    stage.wait_running(1)
    reasoning = screen.at("reasoning")
    expect(reasoning).to_have_count(0)
    stage.think("They ask about ")
    expect(reasoning).to_have_attribute("open", "")
    expect(reasoning).to_contain_text("Thinking…")
    stage.think("<b>plants</b>.")
    expect(reasoning).to_contain_text("They ask about <b>plants</b>.")
    for scheme in ("light", "dark"):
        screen.page.emulate_media(color_scheme=scheme)
        assert axe_violations(screen) == []
    # Closed once the reply begins, and opened and closed with the keyboard.
    stage.say("A leaf is green.")
    expect(screen.at("turns")).to_contain_text("A leaf is green.")
    expect(reasoning).not_to_have_attribute("open", "")
    stage.end()
    expect(reasoning.locator("summary")).to_have_text("Thought for 4 tokens")
    expect(reasoning).not_to_have_attribute("open", "")
    reasoning.locator("summary").focus()
    screen.page.keyboard.press("Enter")
    expect(reasoning.get_by_role("region")).to_be_visible()
    assert axe_violations(screen) == []
    screen.page.keyboard.press("Enter")
    expect(reasoning.get_by_role("region")).to_be_hidden()


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


def test_f37_the_focus_stays_where_the_keyboard_goes_on(stage: Stage, visit: Visit) -> None:
    screen = visit(stage.url)
    open_chat(screen)
    keyboard, focused = screen.page.keyboard, screen.page.locator(":focus")
    stage.answer("leaf", "Green.")
    say(screen, "A leaf?")
    edit = screen.page.get_by_role("button", name="Edit")
    expect(edit).to_be_enabled()
    edit.focus()
    keyboard.press("Enter")
    expect(focused).to_have_attribute("aria-label", "The edited turn")
    keyboard.press("Escape")
    expect(edit).to_be_focused()
    for number in (2, 3):
        edit.focus()
        keyboard.press("Enter")
        expect(focused).to_have_attribute("aria-label", "The edited turn")
        keyboard.type(f" Leaf {number}?")
        keyboard.press("Enter")
        expect(screen.at("message")).to_be_focused()
        expect(screen.at("branch-place")).to_have_text(f"{number} / {number}")
        expect(screen.page.get_by_role("button", name="Another reply")).to_be_enabled()
    previous = screen.page.get_by_label("Previous branch")
    previous.focus()
    keyboard.press("Enter")
    expect(screen.at("branch-place")).to_have_text("2 / 3")
    expect(previous).to_be_focused()
    keyboard.press("Enter")
    expect(screen.at("branch-place")).to_have_text("1 / 3")
    expect(screen.page.get_by_label("Next branch")).to_be_focused()  # there is no previous one
    screen.page.get_by_role("button", name="Another reply").focus()
    keyboard.press("Enter")
    expect(screen.at("message")).to_be_focused()


def test_f37_the_page_says_that_the_browser_has_no_room_for_the_chats(stage: Stage, visit: Visit) -> None:
    screen = visit(stage.url)
    open_chat(screen)
    stage.answer("a lot", "There is more of it. " * 2_000)
    stage.answer("a bit", "A bit.")
    note = screen.at("not-kept")
    screen.page.evaluate(
        """() => {
          for (let size = 2 ** 22; size > 1000; size /= 2) {
            try { sessionStorage.setItem(`full ${size}`, "x".repeat(size)); } catch {}
          }
        }"""
    )
    say(screen, "Say a lot.")
    expect(screen.page.locator(".chat-turn.is-assistant")).to_contain_text("There is more of it.")
    expect(note).to_be_visible()
    screen.page.evaluate("() => sessionStorage.clear()")
    say(screen, "Say a bit.")
    expect(screen.page.locator(".chat-turn.is-assistant").nth(1)).to_contain_text("A bit.")
    expect(note).to_have_count(0)
    screen.page.reload()
    expect(screen.page.locator(".chat-turn.is-assistant")).to_have_count(2)


def test_f43j_chats_survive_a_reload(forgetful_stage: Stage, visit: Visit) -> None:
    """With their branches, their settings, the unsent message, and the received part of a reply."""
    stage, screen = forgetful_stage, visit(forgetful_stage.url)
    stage.answer("What is a leaf?", "A leaf is green.")
    stage.answer("What is a root?", "It is below.")
    open_chat(screen)
    settle(screen, tools="auto")
    say(screen, "What is a leaf?")
    turns = screen.at("turns")
    expect(turns).to_contain_text("A leaf is green.")
    screen.page.get_by_role("button", name="Edit").first.click()
    screen.page.get_by_label("The edited turn").fill("What is a root?")
    screen.page.get_by_label("The edited turn").press("Enter")
    expect(turns).to_contain_text("It is below.")
    screen.page.get_by_role("button", name="New chat").click()
    say(screen, "Tell me a story.")
    stage.wait_running(1)
    stage.say("Once upon a")
    expect(turns).to_contain_text("Once upon a")
    screen.at("message").fill("And then")
    screen.page.reload()
    screen.wait_status("open")
    expect(turns).to_contain_text("Once upon a")
    expect(turns.get_by_role("button", name="Try again")).to_be_enabled()
    expect(screen.at("message")).to_have_value("And then")
    screen.page.get_by_label("Chat", exact=True).select_option(index=0)
    expect(turns).to_contain_text("It is below.")
    screen.page.get_by_label("Previous branch").first.click()
    expect(turns).to_contain_text("A leaf is green.")
    screen.page.get_by_text("Settings", exact=True).click()
    expect(screen.page.get_by_label("Tools")).to_have_value("auto")
    # Another tab has other chats.
    other = visit(stage.url)
    open_chat(other)
    expect(other.page.get_by_text("Nothing has been said yet.")).to_be_visible()


@pytest.mark.parametrize(("width", "height"), [(1280, 800), (400, 780), (1280, 480)])
def test_f43a_the_window_follows_a_reply_until_the_reader_scrolls_up(
    stage: Stage, visit: Visit, width: int, height: int
) -> None:
    screen = visit(stage.url, viewport={"width": width, "height": height})
    open_chat(screen)
    say(screen, "Tell me a long story.")
    stage.wait_running(1)

    def tell(first: int) -> None:
        """Twenty paragraphs."""
        for number in range(first, first + 20):
            stage.say(f"Paragraph {number} of the story.\n\n")
        expect(paragraph(first + 19)).to_be_visible()

    def paragraph(number: int) -> Locator:
        return screen.at("turns").get_by_text(f"Paragraph {number} of the story.")

    tell(0)
    for part in (paragraph(19), screen.at("stop"), screen.at("message")):
        expect(part).to_be_in_viewport()
    bottom = screen.at("message").bounding_box()
    last = paragraph(19).bounding_box()
    assert bottom is not None
    assert last is not None
    assert last["y"] + last["height"] <= bottom["y"]  # not behind the composer
    # The reader looks back: the window stays, and so do Stop and the message.
    screen.page.mouse.move(width / 2, 200)
    screen.page.mouse.wheel(0, -500)
    expect(paragraph(19)).not_to_be_in_viewport()
    screen.wait("() => { const same = window.seen === scrollY; window.seen = scrollY; return same; }")
    top = screen.page.evaluate("() => scrollY")
    tell(20)
    assert screen.page.evaluate("() => scrollY") == top
    for part in (screen.at("stop"), screen.at("message")):
        expect(part).to_be_in_viewport()
    # Back at the end, it follows again, and it shows the actions on the complete reply.
    screen.page.mouse.wheel(0, 100_000)
    expect(paragraph(39)).to_be_in_viewport()
    tell(40)
    expect(paragraph(59)).to_be_in_viewport()
    stage.end()
    expect(screen.page.get_by_role("button", name="Another reply")).to_be_in_viewport()
    assert axe_violations(screen) == []
    # It is where a reader looks who comes back, and who writes on.
    screen.page.get_by_role("link", name="Playground").first.click()
    expect(screen.view("playground").get_by_role("heading", name="Playground")).to_be_in_viewport()
    screen.page.get_by_role("link", name="Chat").click()
    expect(paragraph(59)).to_be_in_viewport()
    screen.page.evaluate("() => scrollTo(0, 0)")
    say(screen, "And then?")
    stage.wait_running(1)
    stage.say("Nothing more.")
    expect(screen.at("turns").get_by_text("Nothing more.")).to_be_in_viewport()
    stage.end()


def test_f43a_reasoning_are_followed_too(stage: Stage, visit: Visit) -> None:
    screen = visit(stage.url)
    open_chat(screen)
    say(screen, "What is a leaf?")
    stage.wait_running(1)
    for number in range(60):
        stage.think(f"Thought {number}.\n")
    box = screen.at("reasoning").get_by_role("region")
    expect(box).to_contain_text("Thought 59.")
    assert box.evaluate("(box) => box.scrollHeight > box.clientHeight")
    screen.wait("""() => { const box = document.querySelector(".reasoning-text");
        return box.scrollHeight - box.clientHeight - box.scrollTop < 2; }""")
    stage.end()


def test_f42_a_model_without_a_chat_template_leads_to_the_playground(visit: Visit) -> None:
    with open_stage(roles=False) as stage:
        screen = visit(stage.url)
        open_chat(screen)
        screen.at("message").fill("Hello?")
        expect(screen.at("send")).to_be_disabled()
        screen.at("no-turns").get_by_role("link").click()
        screen.view("playground")


def test_f37_on_a_server_with_several_models_replies_have_the_name_of_theirs(visit: Visit) -> None:
    @asynccontextmanager
    async def open_models() -> AsyncIterator[Models]:
        generators = [ScriptedGenerator(lambda prompt: "Green.") for _ in range(2)]
        for number, generator in enumerate(generators):
            generator.capabilities = msgspec.structs.replace(generator.capabilities, model=f"model {number}")
        yield Models([OneGenerator(generator) for generator in generators])

    with (
        start_blocking_portal() as portal,
        portal.wrap_async_context_manager(running_server(open_models)) as server,
    ):
        screen = visit(server.url.replace("ws://", "http://"))
        open_chat(screen)
        names = screen.page.locator(".is-assistant .chat-name")
        for number in range(2):
            screen.page.get_by_label("Model").select_option(f"model {number}")
            screen.wait_status("open")
            say(screen, "A leaf?")
            expect(screen.page.get_by_role("button", name="Another reply")).to_have_count(number + 1)
        expect(names).to_have_text(["model 0", "model 1"])


def test_f37_a_message_that_cannot_be_sent_says_why(visit: Visit) -> None:
    with open_stage() as stage:
        screen = visit(stage.url)
        screen.expect_problem(r"net::ERR_|WebSocket connection to|Failed to load")
        open_chat(screen)
        screen.at("message").fill("A leaf?")
        composer = screen.page.locator("form.composer")
        expect(composer).not_to_contain_text("Not connected")
    screen.wait_status("unreachable")
    expect(screen.at("send")).to_be_disabled()
    expect(composer).to_contain_text("Not connected")


def test_f37_a_deleted_chat_is_gone_after_a_reload_and_can_be_restored_before(
    stage: Stage, visit: Visit
) -> None:
    screen = visit(stage.url)
    open_chat(screen)
    keyboard = screen.page.keyboard
    turns, chats = screen.at("turns"), screen.page.get_by_label("Chat", exact=True)
    delete = screen.page.get_by_role("button", name="Delete this chat")
    undo = screen.page.get_by_role("button", name="Undo")
    for word in ("leaf", "root", "stem"):
        stage.answer(word, f"About the {word}.")
        screen.page.get_by_role("button", name="New chat").click(force=True)
        say(screen, f"A {word}?")
        expect(turns).to_contain_text(f"About the {word}.")
    chats.select_option("A root?")
    delete.focus()
    keyboard.press("Enter")
    expect(turns).to_contain_text("About the leaf.")
    expect(chats.locator("option")).to_have_text(["A leaf?", "A stem?"])
    expect(undo).to_be_focused()
    keyboard.press("Enter")
    expect(turns).to_contain_text("About the root.")
    expect(chats.locator("option")).to_have_text(["A leaf?", "A root?", "A stem?"])
    expect(delete).to_be_focused()
    assert axe_violations(screen) == []
    for _ in range(3):
        delete.click()
    expect(screen.page.get_by_text("Nothing has been said yet.")).to_be_visible()
    expect(delete).to_be_disabled()
    say(screen, "A root?")
    expect(turns).to_contain_text("About the root.")
    undo.click()  # its place may be taken now
    chats.select_option("A root?")
    expect(turns).to_contain_text("About the root.")
    expect(chats.locator("option")).to_have_count(2)
    delete.click()
    screen.page.reload()
    screen.wait_status("open")
    expect(turns.get_by_role("listitem")).to_have_count(2)
    expect(chats).to_have_count(0)
    screen.page.get_by_role("button", name="New chat").click()
    say(screen, "Wait.")
    stage.wait_running(1)
    expect(delete).to_be_disabled()
    stage.end()


MARKDOWN = """3. third
4. fourth

- [ ] open
- [x] done

| name | tokens |
|:-----|-------:|
| one  |      1 |

![a chart](http://127.0.0.2/chart.png)

```python
def leaf():
    return "green"
```
"""


def test_f37_lists_tables_images_and_code_of_a_reply(stage: Stage, visit: Visit) -> None:
    screen = visit(stage.url, permissions=["clipboard-read", "clipboard-write"])
    open_chat(screen)
    stage.answer("leaf", MARKDOWN)
    say(screen, "A leaf?")
    reply = screen.page.locator(".chat-turn.is-assistant")
    assert reply.locator("ol").evaluate("(list) => list.start") == 3
    assert reply.get_by_role("cell").evaluate_all(
        "(cells) => cells.map((cell) => getComputedStyle(cell).textAlign.replace(/-webkit-/, ''))"
    ) == ["left", "right"]
    expect(reply.get_by_role("listitem").filter(has_text="open")).to_have_text("☐ open")
    expect(reply.get_by_role("listitem").filter(has_text="done")).to_have_text("☑ done")
    expect(reply.get_by_role("link", name="a chart")).to_have_attribute("href", "http://127.0.0.2/chart.png")
    copy = reply.get_by_role("button", name="Copy this code")
    copy.focus()
    screen.page.keyboard.press("Enter")
    expect(copy).to_have_class(re.compile("is-copied"))
    expect(copy).to_be_focused()
    assert screen.page.evaluate("() => navigator.clipboard.readText()") == 'def leaf():\n    return "green"'
    for scheme in ("light", "dark"):
        screen.page.emulate_media(color_scheme=scheme)
        assert axe_violations(screen) == []


def test_f37_lists_and_code_of_a_reply_from_right_to_left_fit_and_keep_their_order(
    stage: Stage, visit: Visit
) -> None:
    screen = visit(stage.url, viewport={"width": 400, "height": 740})
    open_chat(screen)
    stage.answer("leaf", "1. \u0623\u0648\u0644\n   - \u0639 `a.b` \u0639 $a_1$ \u0639\n2. second\n")
    say(screen, "A leaf?")
    reply = screen.page.locator(".chat-turn.is-assistant .markdown")
    for part in (reply.locator(".formula"), reply.locator("code")):
        expect(part).to_have_css("direction", "ltr")
        expect(part).to_have_css("unicode-bidi", "isolate")
    column = reply.bounding_box()
    assert column is not None
    room = reply.get_by_role("listitem").evaluate_all(
        """(items, [left, right]) => items.map((item) => {
          const {left: x, right: end} = item.getBoundingClientRect();
          return item.matches(":dir(rtl)") ? [right - end, x - left] : [x - left, right - end];
        })""",
        [column["x"], column["x"] + column["width"]],
    )
    assert len(room) == 3
    for before, after in room:
        assert before >= 24  # for the marker
        assert after >= 0


def test_f37_a_browser_without_a_clipboard_copies_and_keeps_the_focus(stage: Stage, visit: Visit) -> None:
    screen = visit(stage.url, permissions=["clipboard-read"])
    screen.page.add_init_script("navigator.clipboard.writeText = () => Promise.reject(new Error('no'))")
    open_chat(screen)
    stage.answer("leaf", "Green.")
    say(screen, "A leaf?")
    copy = screen.page.locator(".chat-turn.is-assistant").get_by_role("button", name="Copy")
    copy.focus()
    screen.page.keyboard.press("Enter")
    expect(copy).to_have_class(re.compile("is-copied"))
    expect(copy).to_be_focused()
    assert screen.page.evaluate("() => navigator.clipboard.readText()") == "Green."


def test_f37_chats_with_long_titles_fit_and_a_new_one_has_the_focus(stage: Stage, visit: Visit) -> None:
    screen = visit(stage.url, viewport={"width": 360, "height": 740}, has_touch=True)
    open_chat(screen)
    stage.answer("leaf", "Green.")
    say(screen, "x" * 39 + "\U0001f343 is a leaf that has a long name")
    expect(screen.at("turns")).to_contain_text("Green.")
    new = screen.page.get_by_role("button", name="New chat")
    new.focus()
    screen.page.keyboard.press("Enter")
    expect(screen.at("message")).to_be_focused()
    chosen = screen.page.get_by_label("Chat", exact=True)
    box = chosen.bounding_box()
    assert box is not None
    assert box["x"] + box["width"] <= 360
    assert "\ufffd" not in chosen.inner_text()
    assert chosen.locator("option").first.evaluate("(option) => option.label.isWellFormed()")
    assert scrolls_sideways(screen) == []


def test_f37_a_typed_limit_of_tokens_is_whole_and_what_the_field_shows(stage: Stage, visit: Visit) -> None:
    screen = visit(stage.url)
    open_chat(screen)
    stage.answer("leaf", "Green.")
    screen.page.get_by_text("Settings", exact=True).click()
    field = screen.page.get_by_label("Max tokens")
    for number, (typed, shown) in enumerate([("12.5", "13"), ("", "13"), ("0", "1"), ("9999999", "100000")]):
        field.fill(typed)
        field.press("Tab")
        expect(field).to_have_value(shown)
        say(screen, "A leaf?")
        expect(screen.page.locator(".chat-turn.is-assistant").nth(number)).to_contain_text("Green.")


FORMULAS = r"""The root of \( x^2 = a_1 \) costs $5 or $10, and $\mathbb{R}$ is a set:
\[
\begin{aligned}
f(x) &= \frac{a_1}{b_1} \\
- g(x) &= \sqrt{c}
\end{aligned}
\]

In code, `$a$` stays, and so does \( \frac{ \).
"""


def test_f37_formulas_are_drawn_and_copied_as_their_source(stage: Stage, visit: Visit) -> None:
    screen = visit(stage.url, permissions=["clipboard-read", "clipboard-write"])
    open_chat(screen)
    stage.answer("root", FORMULAS)
    say(screen, "The root?")
    reply = screen.page.locator(".chat-turn.is-assistant .markdown")
    expect(reply.locator("math")).to_have_count(3)
    expect(reply.locator("math[display=block]")).to_have_count(1)
    expect(reply.locator("math[display=block] mfrac")).to_have_count(1)
    expect(reply.get_by_role("listitem")).to_have_count(0)
    expect(reply).to_contain_text("costs $5 or $10")
    expect(reply.locator("code")).to_have_text(["$a$", r"\( \frac{ \)"])
    for scheme in ("light", "dark"):
        screen.page.emulate_media(color_scheme=scheme)
        assert axe_violations(screen) == []
    reply.evaluate("(text) => getSelection().selectAllChildren(text)")
    screen.page.keyboard.press("Control+C")
    copied = screen.page.evaluate("() => navigator.clipboard.readText()")
    assert [line.strip() for line in copied.splitlines() if line.strip()] == [
        line.replace("`", "") for line in FORMULAS.splitlines() if line
    ]


def test_f37_a_formula_that_streams_is_its_source_until_it_ends(stage: Stage, visit: Visit) -> None:
    """Once it is drawn, it stays while the text goes on."""
    screen = visit(stage.url)
    open_chat(screen)
    say(screen, "The root?")
    stage.wait_running(1)
    turn = screen.page.locator(".chat-turn.is-assistant")
    stage.say("so \\( a_1 * b_1")
    expect(turn.locator("code")).to_have_text("\\( a_1 * b_1")
    stage.say(" * c \\) and")
    expect(turn.locator("math")).to_have_count(1)
    turn.evaluate("""(turn) => {
      window.numWithout = 0;
      new MutationObserver(() => { window.numWithout += turn.querySelector("math") ? 0 : 1; })
        .observe(turn, {childList: true, subtree: true});
    }""")
    for number in range(3):
        stage.say(f" part {number},")
        expect(turn).to_contain_text(f"part {number},")
    stage.end()
    expect(turn.get_by_role("button", name="Another reply")).to_be_enabled()
    assert screen.page.evaluate("() => window.numWithout") == 0


def test_f37_a_wide_formula_scrolls_in_its_place(stage: Stage, visit: Visit) -> None:
    screen = visit(stage.url, viewport={"width": 400, "height": 740})
    open_chat(screen)
    wide = "a_1 + " * 80 + "b"
    stage.answer("root", f"so \\({wide}\\) and\n\n\\[{wide}\\]\n\nin $x$")
    say(screen, "The root?")
    formulas = screen.page.locator(".formula")
    expect(formulas).to_have_count(3)
    assert scrolls_sideways(screen) == []
    for number in range(2):
        expect(formulas.nth(number)).to_have_attribute("tabindex", "0")
        formulas.nth(number).focus()
        screen.page.keyboard.press("ArrowRight")
        screen.wait(f"() => document.querySelectorAll('.formula')[{number}].scrollLeft > 0")
    expect(formulas.nth(2)).not_to_have_attribute("tabindex", "0")
    assert axe_violations(screen) == []


def test_f37_a_message_that_is_too_long_is_refused_and_leaves_no_state(visit: Visit) -> None:
    with open_stage(ServerLimits(frame_bytes=10_000)) as stage:
        screen = visit(stage.url)
        open_chat(screen)
        stage.answer("leaf", "Green.")
        say(screen, "word " * 2_000)
        expect(screen.page.locator(".chat-problem")).to_contain_text("shorten it")
        screen.wait_status("open")
        screen.page.get_by_role("link", name="Programs").click()
        expect(screen.view("programs")).to_contain_text("No state is open")
        screen.page.get_by_role("link", name="Chat").click()
        screen.page.get_by_role("button", name="New chat").click()
        say(screen, "A leaf?")
        expect(screen.at("turns")).to_contain_text("Green.")
        screen.page.goto("about:blank")


def test_f37_each_paragraph_of_a_field_has_its_direction(stage: Stage, visit: Visit) -> None:
    """Without dir="auto": Chromium's time to set a text grows with the square of its length there."""
    screen = visit(stage.url)
    for view in ("playground", "chat"):
        screen.open(view)
        fields = screen.page.locator("textarea")
        assert fields.count() > 1
        assert (
            fields.evaluate_all(
                "(fields) => fields.map((field) => [getComputedStyle(field).unicodeBidi, field.dir])"
            )
            == [["plaintext", ""]] * fields.count()
        )


def test_f37_typing_stores_the_message_and_not_all_chats(stage: Stage, visit: Visit) -> None:
    screen = visit(stage.url)
    screen.page.add_init_script("""
      window.names = [];
      const setItem = Storage.prototype.setItem;
      Storage.prototype.setItem = function (name, value) {
        names.push(name);
        setItem.call(this, name, value);
      };
    """)
    open_chat(screen)
    stage.answer("leaf", "Green.")
    say(screen, "A leaf?")
    expect(screen.at("turns")).to_contain_text("Green.")
    screen.wait("() => sessionStorage['chats 2']?.includes('Green.')")
    screen.page.evaluate("() => { window.names.length = 0; }")
    screen.at("message").fill("And a root?")
    screen.wait("() => Object.values(sessionStorage).some((value) => value.includes('And a root?'))")
    assert "chats 2" not in screen.page.evaluate("() => window.names")
    screen.page.reload()
    screen.wait_status("open")
    expect(screen.at("message")).to_have_value("And a root?")
    expect(screen.at("turns")).to_contain_text("Green.")


def settle(screen: Screen, *, tools: str, max_tokens: int = 512) -> None:
    """Opens the settings and sets them; the model's likeliest tokens are taken."""
    screen.page.get_by_text("Settings", exact=True).click()
    screen.page.get_by_label("Tools").select_option(tools)
    for label, value in (("Temperature", 0), ("Max tokens", max_tokens)):
        screen.page.get_by_label(label).fill(str(value))
        screen.page.get_by_label(label).press("Tab")


def wait_reply(screen: Screen, number: int) -> Locator:
    """The model's reply with this number, when it is over."""
    reply = screen.page.locator(".chat-turn.is-assistant").nth(number)
    expect(reply.get_by_role("button", name=re.compile("Another reply|Try again"))).to_be_enabled(
        timeout=60_000
    )
    return reply


def test_the_model_calls_a_tool_and_goes_on_with_its_answer(model_url: str, visit: Visit) -> None:
    screen = visit(model_url)
    open_chat(screen)
    settle(screen, tools="required")
    say(screen, "What is 12 * 34?")
    reply = wait_reply(screen, 0)
    call = reply.locator(".tool-call").first
    expect(call).to_contain_text("calculator")
    assert json.loads(call.locator("pre").inner_text()) == {"expression": "12 * 34"}
    call.get_by_role("button", name="Run in this page").click()
    answers = screen.page.locator(".chat-turn.is-tool")
    expect(answers.first).to_contain_text("408")
    while reply.get_by_role("button", name="Decline").count():  # further calls of the model
        reply.get_by_role("button", name="Decline").first.click()
    wait_reply(screen, 1)  # the model has read the answers, and may call or not
    expect(reply.locator(".tool-call").first).to_contain_text("Answered")
    assert axe_violations(screen) == []


def test_a_message_declines_the_calls_that_are_open(model_url: str, visit: Visit) -> None:
    screen = visit(model_url)
    open_chat(screen)
    settle(screen, tools="required")
    say(screen, "What is 12 * 34?")
    first = wait_reply(screen, 0)
    num_calls = first.locator(".tool-call").count()
    assert num_calls > 0
    say(screen, "Never mind. What is 5 + 6?")
    wait_reply(screen, 1)
    expect(screen.page.locator(".chat-turn.is-tool")).to_have_count(num_calls)
    expect(first.get_by_role("button", name="Run in this page")).to_have_count(0)


def test_a_truncated_call_is_shown_and_cannot_be_run(model_url: str, visit: Visit) -> None:
    """The server would reject a history with such a call: the next message goes without it."""
    screen = visit(model_url)
    open_chat(screen)
    settle(screen, tools="required", max_tokens=22)
    say(screen, "What is 12 * 34?")
    reply = wait_reply(screen, 0)
    expect(reply.locator(".tool-call")).to_contain_text("12 *")
    expect(reply.locator(".chat-problem")).to_contain_text("22 tokens")
    expect(reply.get_by_role("button", name="Run in this page")).to_have_count(0)
    screen.page.get_by_label("Tools").select_option("none")
    say(screen, "What is a leaf?")
    expect(wait_reply(screen, 1).locator(".markdown")).not_to_be_empty()


def test_f37_a_table_keeps_its_words_whole_and_scrolls(stage: Stage, visit: Visit) -> None:
    screen = visit(stage.url, viewport={"width": 400, "height": 800})
    open_chat(screen)
    say(screen, "Show me a table.")
    stage.wait_running(1)
    row = "| wonderful " * 12 + "|\n"
    stage.say(row + "|---" * 12 + "|\n" + row + "| " + "w" * 400 + " |\n")
    stage.end()
    table = screen.page.locator(".chat-turn.is-assistant table")
    expect(table.get_by_role("row")).to_have_count(3)
    heights = "(table) => [...table.rows].map((row) => row.offsetHeight)"
    [head, first, long] = table.evaluate(heights)
    assert head == first < long  # a line; a word without an end is broken
    table.focus()
    screen.page.keyboard.press("ArrowRight")
    screen.wait("() => document.querySelector('.chat-turn table').scrollLeft > 0")
    assert scrolls_sideways(screen) == []
    assert axe_violations(screen) == []
