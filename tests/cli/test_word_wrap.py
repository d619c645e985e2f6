"""Text that streams into a terminal is wrapped between words, however it is divided into pieces."""

from __future__ import annotations

import itertools

from hypothesis import example, given
from hypothesis import strategies as st
from rich.cells import cell_len
from support.terminal import in_a_terminal, screen_lines
from support.ui.stage import open_stage

from agentflow.cli.word_wrap import WordWrap

WIDTH = 12
WORDS = st.text(st.sampled_from("abcé-.ß"), min_size=1, max_size=WIDTH)


def written(text: str, cuts: list[int]) -> str:
    """The output to a terminal when the text comes in pieces."""
    wrap = WordWrap(lambda: WIDTH)
    ends = sorted({cut % (len(text) + 1) for cut in cuts} | {0, len(text)})
    return "".join(wrap.push(text[start:end]) for start, end in itertools.pairwise(ends))


@given(st.lists(WORDS, min_size=1), st.lists(st.integers(0, 500)))
@example(["elephants", "came"], [3])
def test_f43l_no_word_is_broken(words: list[str], cuts: list[int]) -> None:
    lines = screen_lines(written(" ".join(words), cuts), WIDTH)
    assert " ".join(lines).split() == words
    for line, after in itertools.pairwise(lines):  # no line ends too early
        assert cell_len(line.rstrip()) + 1 + cell_len(after.split(" ")[0]) > WIDTH


@given(st.text(st.sampled_from("ab \t\n漢字"), max_size=80), st.lists(st.integers(0, 500)))
def test_f43l_wrapping_moves_words_and_changes_nothing_else(text: str, cuts: list[int]) -> None:
    output = written(text, cuts)
    assert output == written(text, [])
    lines = screen_lines(output, WIDTH)
    assert "".join("".join(lines).split()) == "".join(text.split())
    assert all(cell_len(line.rstrip()) <= WIDTH for line in lines)


def test_f43l_a_word_longer_than_a_line_is_left_to_the_terminal() -> None:
    address = "http://127.0.0.1/" + "a" * 30
    assert address in written(f"See {address} now", list(range(50)))


def test_f43l_lines_may_end_between_wide_characters() -> None:
    lines = screen_lines(written("東京は日本の首都です。", []), WIDTH)
    assert [cell_len(line) for line in lines] == [12, 10]


def test_f43l_answers_in_a_terminal_break_between_words() -> None:
    words = [f"word{number}" * (1 + number % 3) for number in range(60)]
    with (
        open_stage() as stage,
        in_a_terminal("chat", "--url", stage.url.replace("http", "ws"), columns=40) as terminal,
    ):
        terminal.until("> ")
        terminal.type(b"Tell me.\n")
        stage.wait_running(1)
        stage.think("It is a rather long thought about the words that are to come.")
        for word in words:
            stage.say(word[:5])
            stage.say(f"{word[5:]} ")
        stage.end()
        terminal.until("thinking…")
        lines = screen_lines(terminal.until("cached)"), 40)
    assert " ".join(words) in " ".join(" ".join(lines).split())
    assert "long thought about" in " ".join(" ".join(lines).split())
    assert "% cached" in " ".join(" ".join(lines).split())
