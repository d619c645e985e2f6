"""The detokenizer against decoding everything from the start after each token."""

from __future__ import annotations

import codecs
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import small_tokenizers

from agentflow.engine.text.detokenizer import Detokenizer
from agentflow.engine.text.tokenizer import Tokenizer

# Few tokens, of which many begin or end inside a character.
PIECES = ["é", "日", "日本", "👩", "a", "ab", "ba", " a", "a👩"]
TINY = Tokenizer(small_tokenizers.byte_level_of(PIECES))
TINY_IDS = [i for i in range(TINY.vocab_size) if set(TINY.token_bytes(i)) <= set("".join(PIECES).encode())]
TOKENIZERS = {
    "byte_level": Tokenizer(small_tokenizers.byte_level()),
    "prefix_every": Tokenizer(small_tokenizers.sentencepiece("every")),
    "prefix_none": Tokenizer(small_tokenizers.sentencepiece("none")),
}
REAL_TEXTS = [
    "The quick brown fox.\n\n\tIt jumps  twice.",
    "Größenwahn, déjà vu, Žluťoučký kůň",
    "Съешь же ещё этих мягких французских булок",
    "日本語と中文、한국어도.",
    "اللغة العربية हिन्दी ภาษาไทย עברית",
    "👩‍🚀👨‍👩‍👧‍👦🏳️‍🌈 e\u0301 \U0001f1e9\U0001f1ea",
]


def certain(data: bytes) -> str:
    """The text of ``data`` less the beginning of a character at its end."""
    return codecs.utf_8_decode(data, "replace", False)[0]


def check_all_prefixes(tokenizer: Tokenizer, ids: list[int], *, continues: bool) -> Detokenizer:
    detokenizer = Detokenizer(tokenizer, continues=continues)
    text = ""
    for n, token_id in enumerate(ids, start=1):
        text += detokenizer.push(token_id)
        data = b"".join(tokenizer.token_bytes(i) for i in ids[:n])
        expected = certain(data)
        assert text == (expected if continues else expected[tokenizer.leading_spaces(expected) :])
        assert detokenizer.text == text
        assert detokenizer.num_chars == len(text)
        whole = tokenizer.decode(ids[:n], continues=continues)
        assert whole.startswith(text)
        assert detokenizer.is_unfinished == (len(expected) < len(data.decode(errors="replace")))
        if not detokenizer.is_unfinished:
            assert whole == text
    return detokenizer


def clean_ends(tokenizer: Tokenizer, ids: list[int]) -> list[int]:
    """For each number of ids at the front the length of their text, -1 where it ends inside a character."""
    ends = []
    for n in range(len(ids) + 1):
        data = b"".join(tokenizer.token_bytes(i) for i in ids[:n])
        whole = data.decode(errors="replace")
        ends.append(len(whole) if whole == certain(data) else -1)
    return ends


@pytest.mark.parametrize("name", TOKENIZERS)
@given(data=st.data(), continues=st.booleans())
def test_random_ids_of_the_whole_vocabulary(name: str, data: st.DataObject, continues: bool) -> None:
    tokenizer = TOKENIZERS[name]
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 2), max_size=15))
    check_all_prefixes(tokenizer, ids, continues=continues)


@given(ids=st.lists(st.sampled_from(TINY_IDS), max_size=15))
def test_many_broken_characters(ids: list[int]) -> None:
    check_all_prefixes(TINY, ids, continues=True)


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("text", REAL_TEXTS)
def test_real_text_comes_back_whole(name: str, text: str) -> None:
    tokenizer = TOKENIZERS[name]
    for continues in (False, True):
        ids = tokenizer.encode(text, continues=continues)
        detokenizer = check_all_prefixes(tokenizer, ids, continues=continues)
        assert detokenizer.text == text
        assert not detokenizer.is_unfinished


@given(ids=st.lists(st.sampled_from(TINY_IDS), max_size=12), data=st.data())
def test_cutting_at_a_place_in_the_text(ids: list[int], data: st.DataObject) -> None:
    detokenizer = Detokenizer(TINY)
    text = detokenizer.push_all(ids)
    start = data.draw(st.integers(0, len(text)))
    end = data.draw(st.integers(start, len(text)))
    ends = clean_ends(TINY, ids)
    within = detokenizer.num_ids_within(end)
    assert within == max(n for n, at in enumerate(ends) if -1 < at <= end)

    cut = detokenizer.list_ids(start, end)
    assert TINY.decode(cut, continues=True) == text[start:end]
    first = next((n for n, at in enumerate(ends) if at >= start), None)
    if first is not None and first < within:
        kept = ids[first:within]
        assert any(cut[n : n + len(kept)] == kept for n in range(len(cut)))


@given(text=st.text(st.sampled_from(" a"), max_size=6))
def test_a_decoder_that_strips_two_spaces(text: str) -> None:
    spec = small_tokenizers.sentencepiece("none")
    spec["decoder"]["decoders"].append({"type": "Strip", "content": " ", "start": 2, "stop": 0})
    tokenizer = Tokenizer(spec)
    ids = [i for char in text for i in tokenizer.encode(char)]
    detokenizer = check_all_prefixes(tokenizer, ids, continues=False)
    assert detokenizer.text == small_tokenizers.library(spec).decode(ids)


@pytest.mark.parametrize("name", TOKENIZERS)
@given(data=st.data(), continues=st.booleans())
def test_cutting_the_front_of_a_text(name: str, data: st.DataObject, continues: bool) -> None:
    tokenizer = TOKENIZERS[name]
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=12))
    detokenizer = Detokenizer(tokenizer, continues=continues)
    text = detokenizer.push_all(ids)
    end = data.draw(st.integers(0, len(text)))
    cut = detokenizer.list_ids(0, end)
    kept = detokenizer.num_ids_within(end)
    assert cut[:kept] == ids[:kept]
    assert tokenizer.decode(cut, continues=continues) == text[:end]


def test_special_tokens_add_nothing() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    fox = tokenizer.encode("fox")
    detokenizer = Detokenizer(tokenizer)
    assert detokenizer.push(0) == ""
    detokenizer.push_all([*fox, 1])
    assert detokenizer.text == "fox"
    assert detokenizer.list_ids(0, 3) == [0, *fox, 1]
    assert detokenizer.num_ids_within(0) == 1


@pytest.mark.model
@given(data=st.data())
def test_default_model(model_folder: Path, data: st.DataObject) -> None:
    tokenizer = _default(model_folder)
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=15))
    check_all_prefixes(tokenizer, ids, continues=True)


_LOADED: list[Tokenizer] = []


def _default(folder: Path) -> Tokenizer:
    if not _LOADED:
        _LOADED.append(Tokenizer.from_folder(folder))
    return _LOADED[0]
