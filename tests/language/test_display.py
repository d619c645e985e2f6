"""How states are shown: as text, as HTML, and live in a notebook."""

from __future__ import annotations

import io
import re
import unicodedata
from html.parser import HTMLParser
from importlib import import_module

import anyio
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from support.fake_engine import FakeEngine
from support.observed_backends import Stepped, settle
from support.programs import echo
from support.shallow_stack import LONG_CHAIN, shallow_stack

import agentflow as af
from agentflow.language.display.outline import OutlinePiece, elided, shorten_items
from agentflow.language.display.terminal import show
from agentflow.language.states import live_display
from agentflow.language.states.outliner import MAX_BRANCHES, MAX_STATES, _CacheEstimate, outline_state

pytestmark = pytest.mark.anyio


class Tags(HTMLParser):
    """The text of a piece of HTML by class. Fails where tags are not balanced."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.open: list[tuple[str, str]] = []
        self.texts: dict[str, str] = {}
        self.feed(source)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.open.append((tag, dict(attrs).get("class") or ""))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop()[0] == tag

    def handle_data(self, data: str) -> None:
        kind = self.open[-1][1]
        self.texts[kind] = self.texts.get(kind, "") + data


async def test_a_state_is_shown_with_its_branches():
    async with af.session(backend=af.Scripted({"x": "one\ntwo", "y": "three"})) as flow, flow.state() as s:
        s += af.system("Be kind.") + af.user("Hello") + af.assistant(af.gen("x"))
        branches = s.fork(2)
        branches[0] += af.user("a") + af.assistant(af.gen("y"))
        s += af.user("again ", branches[0]["y"])
        await s
        assert str(s) == (
            "[system]\nBe kind.\n[user]\nHello\n[assistant]\none\ntwo\n"
            "├╴branch 0\n│ [user]\n│ a\n│ [assistant]\n│ three\n├╴branch 1\n"
            "[user]\nagain three"
        )
        assert str(branches[0]) == (
            "[system]\nBe kind.\n[user]\nHello\n[assistant]\none\ntwo\n[user]\na\n[assistant]\nthree"
        )
        assert repr(s).partition(" ")[2] == "() with 'x'>"
        html = Tags(s._repr_html_())
        assert html.texts["af-generated"].replace("generated", "") == "one\ntwothree"
        assert html.texts["af-inserted"] == "three"
        assert html.texts["af-role"] == "systemuserassistantuserassistantuser"


async def test_a_state_in_an_open_turn_is_shown():
    async with af.session(backend=af.Scripted(echo)) as flow, flow.state() as s:
        assert str(s) == ""
        s += "before"
        async with s.user():
            s += "a"
            branch = s.copy()
            branch += "b"
            branch.end()
            s += "c"
            shown = str(s)
        assert shown == "before\n[user]\na\n├╴branch 0\n│ [user]\n│ b\n[user]\nc"
        assert str(branch) == "before\n[user]\nab"


async def test_showing_does_not_wait():
    backend = Stepped({"": "never"})
    async with af.session(backend=backend) as flow, flow.state() as s:
        s += af.user("a") + af.assistant(af.gen("x"))
        s += f"b {s['x'].strip()}"
        assert str(s) == "[user]\na\n[assistant]\n‹x…›\nb ‹x…›"
        assert s._repr_html_().count("af-cursor") == 3  # one is the style
        s.cancel()
        assert "x failed" in str(s)


async def test_failures_are_shown():
    async with af.session(backend=af.Scripted(echo)) as flow, flow.state() as s:
        s += "a!" + af.gen("x")
        await s.settled()
        assert "x failed: cannot answer a!" in str(s)
        assert "cannot answer a!" in Tags(s._repr_html_()).texts["af-error"]


async def test_tool_calls_are_shown():
    calls = (af.ToolCall("rain", {"city": "<Oslo>"}),)
    backend = af.Scripted([af.Reply("Let me look.", calls)])

    def rain(city: str) -> str:
        return city

    async with af.session(backend=backend) as flow, flow.state() as s:
        s += af.conversation([{"role": "user", "content": "Rain?"}])
        s += af.reply("answer", tools=[rain])
        await s
        assert str(s).endswith('Let me look.\n→ rain({"city": "<Oslo>"})')
        assert "&lt;Oslo&gt;" in s._repr_html_()


@given(text=st.text())
@example("\x9b31m\x7f")  # a terminal may read it as a colour
def test_any_text_is_escaped(text: str):
    async def shown() -> tuple[str, str]:
        async with af.session(backend=af.Scripted([text])) as flow, flow.state() as s:
            s += af.user(text) + af.assistant(af.gen("</span>"))
            await s
            return str(s), s._repr_html_()

    plain, html = anyio.run(shown)
    assert {c for c in plain if unicodedata.category(c) == "Cc"} <= {"\t", "\n"}
    visible = "".join(chr(0x2400 + ord(c)) if c < " " and c not in "\t\n" else c for c in text)
    visible = re.sub("[\x80-\x9f]", "\ufffd", visible.replace("\x7f", "\u2421"))
    assert visible.strip("\n") in plain
    tags = Tags(html)
    assert {tag for tag, _ in re.findall(r"<(\w+)( [^>]*)?>", html)} <= {"style", "div", "span"}
    assert tags.texts.get("af-text", "") == text


@given(counts=st.lists(st.sampled_from([1, 3, MAX_BRANCHES, 200]), max_size=12))
async def test_f37_the_branches_of_all_forks_together_are_bounded(counts: list[int]):
    async with af.session(backend=af.Scripted(echo)) as flow, flow.state() as s:
        for count in counts:
            s += "a"
            s.fork(count)
        shown = str(s)
        num_shown = shown.count("╴branch ")
        num_left_out = sum(int(number) for number in re.findall(r"╴… (\d+) more branch", shown))
        assert num_shown <= MAX_STATES
        assert num_shown + num_left_out == sum(counts)
        if sum(min(count, MAX_BRANCHES) for count in counts) <= MAX_STATES:
            assert num_shown == sum(min(count, MAX_BRANCHES) for count in counts)


async def test_a_long_state_is_shortened_in_the_middle():
    async with af.session(backend=af.Scripted(echo)) as flow, flow.state() as s:
        s += "first" + "x" * 3_000_000 + "last"
        for number in range(500):
            s += af.user(f"turn {number}")
        for branch in s.fork(100):
            for inner in branch.fork(20):
                inner += "y" * 10_000
        for shown in (str(s), s._repr_html_()):
            assert len(shown) < 200_000
            for piece in ("first", "last", "turn 0", "turn 499", "2,996,009 characters"):
                assert piece in shown
            assert "branch 0" in shown
            assert "branch 99" in shown
            assert "turn 250" not in shown
            assert "branch 50" not in shown


async def test_a_deep_chain_of_copies_is_shown():
    with shallow_stack():
        async with af.session(backend=af.Scripted(echo)) as flow, flow.state() as s:
            states: list[af.State] = [s]
            for number in range(LONG_CHAIN):
                states[-1].add(f"{number} ")
                states.append(states[-1].copy())
            assert str(states[-1]).endswith(f"{LONG_CHAIN - 1} ")
            assert str(s).startswith("0")


@given(
    st.lists(st.tuples(st.integers(0, 40), st.integers(0, 60), st.integers(0, 10)), min_size=1, max_size=8),
)
def test_cached_text_is_the_beginning_of_each_prompt(gens: list[tuple[int, int, int]]):
    """With one character a token, the estimate is exact: compared with marking each token."""
    estimate, pieces, position = _CacheEstimate(), [], 0
    marks: list[bool] = []
    for num_new, num_cached, num_output in gens:
        piece = OutlinePiece("text", "x" * num_new)
        estimate.pieces.append(piece)
        cached = min(num_cached, position + num_new)
        marks += [index < cached for index in range(position, position + num_new)]
        pieces.append(piece)
        estimate.generated(af.Usage(position + num_new, cached, num_output))
        position += num_new + num_output
    found = [index < piece.cached_chars for piece in pieces for index in range(len(piece.text))]
    assert found == marks


@given(st.text(max_size=30), st.integers(0, 40))
def test_elided_texts_keep_their_ends(text: str, most: int):
    before, num_omitted, after = elided(text, most)
    assert len(before) + len(after) == min(most, len(text))
    assert len(before) + num_omitted + len(after) == len(text)
    assert text.startswith(before)
    assert text.endswith(after)


@given(st.lists(st.integers(), max_size=40), st.integers(3, 20))
def test_shortened_lists_keep_their_ends(items: list[int], most: int):
    found = shorten_items(items, most)
    kept = [item for item in found if isinstance(item, int)]
    assert len(kept) == min(most, len(items))
    left_out = sum(item.count for item in found if not isinstance(item, int))
    assert len(kept) + left_out == len(items)


async def test_text_that_was_cached_is_tinted():
    async with af.session(backend=FakeEngine()) as flow:
        for _ in range(2):
            async with flow.state() as s:
                s += "The same prompt of many tokens, said twice. " * 3 + af.gen("x", max_tokens=4)
                await s
                tags = Tags(s._repr_html_())
    cached = tags.texts["af-cached"].removesuffix("cached")
    assert len(cached) > 100
    assert ("The same prompt of many tokens, said twice. " * 3).startswith(cached)


async def test_colours_are_for_terminals():
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    async with af.session(backend=af.Scripted(["[red]b"])) as flow, flow.state() as s:
        s += af.user("a") + af.assistant(af.gen("x"))
        await s
        plain, coloured = io.StringIO(), Terminal()
        show(outline_state(s._node), plain)
        show(outline_state(s._node), coloured)
        assert plain.getvalue() == f"{s}\n"
        assert re.sub(r"\x1b\[[\d;]*m", "", coloured.getvalue()) == f"{s}\n"


class Cell:
    """A display handle as IPython's: it keeps the shown objects."""

    def __init__(self) -> None:
        self.shown: list[dict[str, str]] = []

    def update(self, bundle: dict[str, str], *, raw: bool) -> None:
        assert raw
        self.shown.append(bundle)


async def test_a_running_state_is_redrawn_until_it_is_done(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(live_display, "S_BETWEEN_DRAWINGS", 0)
    backend = Stepped({"": "one two three"})
    cell = Cell()
    async with af.session(backend=backend) as flow, flow.state() as s:
        s += af.user("a") + af.assistant(af.gen("x"))
        flow._link.start_soon(live_display._follow, s._node, cell)
        await settle()
        await backend.allow(2)
        assert cell.shown[-1]["text/plain"].endswith("one two‹x…›")
        await backend.allow(1)
        await s
        await settle()
        assert cell.shown[-1]["text/plain"].endswith("one two three")
        assert "af-cursor" not in cell.shown[-1]["text/html"].partition("</style>")[2]


async def test_ipython_takes_the_html():
    formatter = import_module("IPython.core.formatters").DisplayFormatter()
    async with af.session(backend=af.Scripted(echo)) as flow, flow.state() as s:
        s += af.user("a<b>")
        data, _ = formatter.format(s)
        assert data == {"text/html": s._repr_html_(), "text/plain": repr(s)}
        data, _ = formatter.format(flow.runs)
        assert data["image/svg+xml"].startswith("<svg")


async def test_a_notebook_shows_small_images_up_to_a_limit():
    small = [b"\x89PNG\r\n\x1a\n" + bytes([number]) + bytes(50_000) for number in range(8)]
    large = b"\x89PNG\r\n\x1a\n" + bytes(100_000)
    async with af.session(backend=af.Scripted("a")) as flow, flow.state() as s:
        s += af.user(af.image(small[0]), " and ", af.image(large), af.image("https://example.org/x.png"))
        await s
        html = s._repr_html_()
        Tags(html)
        assert html.count("<img") == 1
        assert af.image(small[0]).image.url in html
        assert html.count("[image]") == 3  # one is the text in place of the picture
        assert "example.org" not in html
        assert str(s) == "[user]\n[image] and [image][image]"
        s += af.user(*[af.image(data) for data in small])
        await s
        html = s._repr_html_()
        assert 1 < html.count("<img") < 9
        assert len(html) < 400_000
