"""The end of a generation against a plain search in the text of all its tokens."""

from __future__ import annotations

import codecs
import contextlib
import re
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from support import small_tokenizers
from support.examples import examples
from support.faults import has_param

from agentflow.engine.text.detokenizer import TextEnd
from agentflow.engine.text.tokenizer import Tokenizer
from agentflow.engine.text.tool_output import CallMarks
from agentflow.errors import BadArgument, RequestRefused
from agentflow.protocol.text import stop_pattern

# Words over a, b and é, so that stops occur, overlap and straddle tokens; é and 👩 also in halves.
WORDS = ["ab", "ba", "aab", "abab", "bbé", "éa", "é", "b👩a"]
TINY = Tokenizer(small_tokenizers.byte_level_of(WORDS))
TINY_IDS = [i for i in range(TINY.vocab_size) if set(TINY.token_bytes(i)) <= set("abé👩".encode())]
SENTENCEPIECE = Tokenizer(small_tokenizers.sentencepiece("every"))

stops = st.lists(st.text(st.sampled_from("abé\ufffd"), min_size=1, max_size=7), max_size=4)
tokens = st.lists(st.sampled_from(TINY_IDS), max_size=14)


@dataclass
class Expected:
    text: str
    kept: int
    num_read: int
    delivered: list[int]


def certain(tokenizer: Tokenizer, ids: list[int]) -> str:
    return codecs.utf_8_decode(b"".join(map(tokenizer.token_bytes, ids)), "replace", False)[0]


def search(text: str, stop: list[str], pattern: str | None = None, first: int = 0) -> int | None:
    """Where the text ends: before the stop that is complete first, the earliest one if several are;
    none begins before ``first``."""
    for end in range(first + 1, len(text) + 1):
        begins = [end - len(s) for s in stop if text.endswith(s, first, end)]
        found = None if pattern is None else re.compile(pattern).search(text, first, end)
        begins += [] if found is None else [found.start()]
        if begins:
            return min(begins)
    return None


def brute_force(tokenizer: Tokenizer, ids: list[int], stop: list[str]) -> Expected:
    """Decodes everything after each token, searches it from the start, and cuts."""
    delivered = []
    num_read = 0
    cut = None
    for num_read in range(1, len(ids) + 1):
        text = certain(tokenizer, ids[:num_read])
        cut = search(text, stop)
        if cut is not None:
            delivered.append(cut)
            break
        starts = [n for s in stop for n in range(1, len(s)) if text.endswith(s[:n])]
        delivered.append(len(text) - max(starts, default=0))
    text = certain(tokenizer, ids[:num_read])[:cut]
    whole = [tokenizer.decode(ids[:n], continues=True) for n in range(num_read + 1)]
    clean = [n for n in range(num_read + 1) if whole[n] == certain(tokenizer, ids[:n])]
    kept = max(n for n in clean if len(whole[n]) <= len(text))
    return Expected(text, kept, num_read, delivered)


def one(text: str) -> int:
    """The id of the token that is all of ``text``."""
    return next(i for i in range(TINY.vocab_size) if TINY.token_bytes(i) == text.encode())


HALF = next(i for i in range(TINY.vocab_size) if TINY.token_bytes(i) == "é".encode()[:1])


@examples(300)
@given(ids=tokens, stop=stops)
@example(ids=[], stop=["x"])
@example(ids=[one("a"), one("abab"), one("a")], stop=["ba"])  # inside one token
@example(ids=[one("a"), one("ab"), one("ba")], stop=["bb"])  # over two tokens
@example(ids=[one("a"), one("b"), one("b")], stop=["aba", "bbb"])  # undecided at the end
@example(ids=[one("abab")], stop=["abab", "b"])  # one begins first, the other is complete first
@example(ids=[one("ab")], stop=["ab"])
@example(ids=[one("a"), HALF], stop=[])
@example(ids=[one("a"), HALF, one("b")], stop=[])
def test_like_brute_force(ids: list[int], stop: list[str]) -> None:
    expected = brute_force(TINY, ids, stop)
    end = TextEnd(TINY, stop)
    delivered = ""
    for n, token_id in enumerate(ids):
        delta = end.push(token_id)
        delivered += delta
        if n < expected.num_read:
            assert len(delivered) == expected.delivered[n]
        else:
            assert delta == ""
    assert end.stopped == (search(certain(TINY, ids), stop) is not None)
    ending = end.finish()
    assert ending.text == expected.text == delivered + ending.rest
    assert ending.kept == expected.kept
    assert ending.ids[: ending.kept] == ids[: ending.kept]
    assert TINY.decode(ending.ids, continues=True) == ending.text
    assert end.finish() == ending


@examples(150)
@given(data=st.data(), continues=st.booleans())
def test_ids_stand_for_the_text_in_the_other_family(data: st.DataObject, continues: bool) -> None:
    ids = data.draw(st.lists(st.integers(3, SENTENCEPIECE.vocab_size - 1), max_size=10))
    stop = data.draw(st.lists(st.sampled_from([" ", "e", "th", "the", "an ", "\n", "é"]), max_size=3))
    end = TextEnd(SENTENCEPIECE, stop, continues=continues)
    delivered = "".join(end.push(i) for i in ids)
    ending = end.finish()
    assert ending.text == delivered + ending.rest
    assert SENTENCEPIECE.decode(ending.ids, continues=continues) == ending.text
    assert ending.ids[: ending.kept] == ids[: ending.kept]


PATTERNS = [
    None,
    "ab+a",
    "(?i)BA.",
    "a(b|é)?a|bbb",
    "[^a]{3}",
    "(a|b)\\1",
    "(?<=b)a",
    "^a",
    "a.*é",
    "a(?=b)",
    "\\bb",
    "abé$",
    "é*b",
    ".👩",
]
atoms = st.sampled_from(["a", "b", "é", ".", "[ab]", "(?:ab|é)", "(b)", "\\1"])
repeated = st.tuples(atoms, st.sampled_from(["", "", "+", "*", "?", "{2}", "{1,2}?"])).map("".join)
built = st.lists(repeated, min_size=1, max_size=5).map(lambda parts: "(a|b)" + "".join(parts))


@examples(500)
@given(
    ids=tokens,
    stop=st.lists(st.sampled_from(["ab", "b", "éa", "bbé"]), max_size=2),
    pattern=st.one_of(st.sampled_from(PATTERNS), built),
    min_tokens=st.sampled_from([0, 0, 1, 2, 5]),
)
def test_a_regex_and_a_least_length_like_brute_force(
    ids: list[int], stop: list[str], pattern: str | None, min_tokens: int
) -> None:
    """The text ends where a search of every beginning of it first finds a match, however it came in tokens;
    delivered text is never taken back."""
    end = TextEnd(TINY, stop, stop_regex=pattern, min_tokens=min_tokens)
    first = len(certain(TINY, ids[:min_tokens]))
    delivered = ""
    for n, token_id in enumerate(ids, start=1):
        delivered += end.push(token_id)
        assert end.stopped == (search(certain(TINY, ids[:n]), stop, pattern, first) is not None)
        if n <= min_tokens:
            assert delivered == certain(TINY, ids[:n])
    text = certain(TINY, ids)
    ending = end.finish()
    assert ending.text == text[: search(text, stop, pattern, first)]
    assert ending.text == delivered + ending.rest
    assert TINY.decode(ending.ids, continues=True) == ending.text


@given(tokens, stops, st.integers(0, 14))
@example(ids=[one("ab"), one("ba"), one("ba")], stop=["abbaba", "bba"], free=1)
def test_no_stop_reaches_into_a_free_token(ids: list[int], stop: list[str], free: int) -> None:
    end = TextEnd(TINY, stop)
    delivered = "".join([end.push(token, is_free=n == free) for n, token in enumerate(ids)])
    whole = certain(TINY, ids)
    cut = search(certain(TINY, ids[:free]), stop)
    if cut is None and free < len(ids):
        cut = search(whole, stop, first=len(certain(TINY, ids[: free + 1])))
    ending = end.finish()
    assert delivered + ending.rest == ending.text == whole[:cut]


def test_text_that_cannot_match_is_delivered_at_once() -> None:
    end = TextEnd(TINY, stop_regex="a(bb|é)")
    ids = [one("b"), one("a"), one("b"), one("a"), one("b"), one("b")]
    assert [end.push(i) for i in ids] == ["b", "", "", "ab", "", ""]
    assert end.stopped
    assert end.finish().text == "bab"


def test_a_regex_that_is_not_found_holds_nothing_back_in_the_end() -> None:
    end = TextEnd(TINY, stop_regex="ab.*é")
    assert [end.push(one(text)) for text in ("b", "ab", "ba")] == ["b", "", ""]
    ending = end.finish()
    assert (ending.text, ending.rest, ending.kept) == ("babba", "abba", 3)


@pytest.mark.parametrize("pattern", ["(a|aa)+[éx]", "((a*)*)*[éx]", "(a?){30}a{30}é", "(?=(a+a+)+é)a"])
def test_a_pattern_that_takes_for_ever_is_refused(pattern: str) -> None:
    """It would take billions of years; the rejection ends this test."""
    end = TextEnd(TINY, stop_regex=pattern, min_tokens=40)
    for _ in range(40):
        end.push(one("a"))
    with pytest.raises(RequestRefused, check=has_param("stop_regex")):
        push_all(end, "a")


def push_all(end: TextEnd, text: str) -> None:
    """The same token again and again, up to a length that no search of this kind survives."""
    for _ in range(2000):
        end.push(one(text))


def test_a_pattern_that_costs_a_little_at_each_token_is_refused_in_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = iter(range(10_000))
    monkeypatch.setattr(stop_pattern.time, "thread_time", lambda: next(clock) * 0.001)
    end = TextEnd(TINY, stop_regex="é")
    # A millisecond each: half of it is a token's share, the rest eats up the burst.
    for _ in range(98):
        end.push(one("a"))
    with pytest.raises(RequestRefused):
        push_all(end, "a")


@pytest.mark.parametrize("pattern", ["(a", "a*", "b|(a?)"])
def test_a_pattern_that_makes_no_sense_is_a_bad_argument(pattern: str) -> None:
    with pytest.raises(BadArgument, check=has_param("stop_regex")):
        TextEnd(TINY, stop_regex=pattern)


@pytest.mark.parametrize("pattern", ["(?:a?|b?){99}(?!)", "(|a|){99}(?<=x)"])
def test_a_pattern_that_takes_for_ever_on_nothing_affects_no_other_text(pattern: str) -> None:
    with contextlib.suppress(RequestRefused):
        push_all(TextEnd(TINY, stop_regex=pattern), "a")


def test_a_token_that_ends_one_character_and_begins_another() -> None:
    """The part of it that is whole is kept, as new ids."""
    first, second = "é".encode()
    spec = small_tokenizers.byte_level_of(["é"])
    chars = {data: char for char, data in _alphabet().items()}
    straddling = chars[second] + chars[first]
    spec["model"]["vocab"][straddling] = len(spec["model"]["vocab"])
    spec["model"]["merges"].append([chars[second], chars[first]])
    tokenizer = Tokenizer(spec)
    lead = tokenizer.find_id(chars[first])
    both = tokenizer.find_id(straddling)
    assert lead is not None
    assert both is not None
    end = TextEnd(tokenizer)
    assert [end.push(i) for i in (lead, both)] == ["", "é"]
    ending = end.finish()
    assert (ending.text, ending.kept, ending.ids) == ("é", 0, tokenizer.encode("é"))


def _alphabet() -> dict[str, int]:
    """The byte of each character of the byte-level alphabet."""
    written = {i: char for char, i in small_tokenizers.byte_level_of([])["model"]["vocab"].items()}
    found = {}
    for token_id in range(TINY.vocab_size):
        data = TINY.token_bytes(token_id)
        if len(data) == 1:
            found[written[token_id]] = data[0]
    return found


BYTES = Tokenizer(small_tokenizers.byte_level_of([]))
"""Each token is a byte."""


def outside_calls(text: str, marks: CallMarks) -> list[bool]:
    """For each character, whether it is outside of tool calls and their marks. Searches for marks at each
    character."""
    outside: list[bool] = []
    is_inside, at = False, 0
    for end in range(1, len(text) + 1):
        outside.append(not is_inside)
        mark = marks.end if is_inside else marks.begin
        if mark and text.endswith(mark, at, end):
            outside[end - len(mark) :] = [False] * len(mark)
            is_inside, at = not is_inside, end
    return outside


@example(text="a<c>b;b</c>b;", marks=CallMarks("<c>", "</c>"), stop=["b;"])
@given(
    text=st.lists(st.sampled_from(["<c>", "</c>", "<c", "b;", "a", ";", "{", " ", "<"]), max_size=12).map(
        "".join
    ),
    marks=st.sampled_from([CallMarks("<c>", "</c>"), CallMarks("<c>", ""), CallMarks("<", ";")]),
    stop=st.lists(st.sampled_from(["b;", ";", "a<", "<", "c"]), min_size=1, max_size=2, unique=True),
)
def test_f31a_no_stop_is_in_a_call(text: str, marks: CallMarks, stop: list[str]) -> None:
    """A stop lies in text outside of calls, from its first to its last character."""
    outside = outside_calls(text, marks)
    cut = len(text)
    for end in range(1, len(text) + 1):
        begins = [end - len(s) for s in stop if text.endswith(s, 0, end) and all(outside[end - len(s) : end])]
        if begins:
            cut = min(begins)
            break
    end_of_text = TextEnd(BYTES, stop, calls=marks)
    delivered = "".join([end_of_text.push(token) for token in BYTES.encode(text)])
    ending = end_of_text.finish()
    assert ending.text == text[:cut]
    assert delivered + ending.rest == text[:cut]


@pytest.mark.parametrize("how", [{"stop": ["<"]}, {"stop_regex": "<"}])
@pytest.mark.parametrize(
    ("text", "cut"),
    [
        ("a<c>b</c>c<d", "a<c>b</c>c"),
        ("a<<c>", "a"),
        ("a<", "a"),
        ("<c", ""),
        ("<c>", "<c>"),
        ("<c><", "<c><"),
    ],
)
def test_f37_no_stop_is_in_the_mark_of_a_call(how: dict[str, Any], text: str, cut: str) -> None:
    end_of_text = TextEnd(BYTES, calls=CallMarks("<c>", "</c>"), **how)
    delivered = "".join([end_of_text.push(token) for token in BYTES.encode(text)])
    ending = end_of_text.finish()
    assert (ending.text, delivered + ending.rest) == (cut, cut)
    assert end_of_text.stopped == (cut != text)


@pytest.mark.parametrize(
    ("text", "is_call"), [(' {"a": 1}', True), ("[{", True), ("a {", False), ("", False)]
)
def test_f31a_an_answer_of_json_is_one_call(text: str, is_call: bool) -> None:
    end_of_text = TextEnd(BYTES, ["stop"], calls=CallMarks("", ""))
    for token in BYTES.encode(text + "stop"):
        end_of_text.push(token)
    assert end_of_text.stopped != is_call


@pytest.mark.parametrize("marks", [CallMarks("<c>", "</c>"), CallMarks("<c>", ""), CallMarks("", "")])
@given(
    reasoning=st.text(st.sampled_from("<c>/{[a "), max_size=8),
    answer=st.lists(st.sampled_from(["<c>", "</c>", "b;", "{", " ", "a"]), max_size=8).map("".join),
    is_known_late=st.booleans(),
)
@example(reasoning="x<c>y", answer="ab;", is_known_late=False)
@example(reasoning="<c", answer=">b;", is_known_late=True)
def test_f37_calls_are_searched_in_the_answer_alone(
    marks: CallMarks, reasoning: str, answer: str, is_known_late: bool
) -> None:
    """``is_known_late``: the last token of the reasoning shows that all were reasoning."""
    whole, alone = TextEnd(BYTES, ["b;"], calls=marks), TextEnd(BYTES, ["b;"], calls=marks)
    tokens = BYTES.encode(reasoning)
    for number, token in enumerate(tokens, start=1):
        is_known = not is_known_late or number == len(tokens)
        whole.push(token, is_free=True, calls_from=-1 if is_known else 0)
    for token in BYTES.encode(answer):
        whole.push(token, calls_from=len(reasoning))
        alone.push(token)
        assert (whole.stopped, whole.is_in_call) == (alone.stopped, alone.is_in_call)
    assert whole.finish().text == reasoning + alone.finish().text


def test_f37_a_token_of_reasoning_and_answer_may_begin_a_call() -> None:
    end_of_text = TextEnd(TINY, ["b"], calls=CallMarks("ab", ""))
    end_of_text.push(one("ab"), is_free=True, calls_from=-1)
    end_of_text.push(one("abab"), is_free=True, calls_from=3)  # the answer begins with its second character
    assert end_of_text.is_in_call
    end_of_text = TextEnd(TINY, ["b"], calls=CallMarks("ab", ""))
    end_of_text.push(one("abab"), is_free=True, calls_from=3)
    assert not end_of_text.is_in_call
