"""Choices after a text: the same ids as when everything is encoded whole, however long the text is."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.engine.conversations import SENTENCEPIECE, SMALL
from support.faults import has_param
from support.small_tokenizers import byte_level, byte_level_of, sentencepiece

from agentflow.engine.text.state import choices as choice_encoding
from agentflow.engine.text.state.choices import encode_after, encode_choices
from agentflow.engine.text.tokenizer import Tokenizer
from agentflow.errors import BadArgument

TOKENIZERS = {"byte_level": SMALL} | {prepend: made for prepend, (made, _) in SENTENCEPIECE.items()}
WORDS = [
    "the",
    " quick",
    " answer",
    "s",
    " ",
    "  ",
    "\n",
    "é",
    "日本",
    "<think>",
    "<s>",
    "<|im_end|>",
    "\t",
    "1",
]
texts = st.lists(st.sampled_from(WORDS), max_size=80).map("".join)
choices = st.lists(
    st.lists(st.sampled_from([*WORDS, "wer", "tion", "an"]), min_size=1, max_size=4).map("".join),
    min_size=1,
    max_size=5,
)


@pytest.fixture
def small_window(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice_encoding, "MAX_PLAIN_CHARS", 0)
    monkeypatch.setattr(choice_encoding, "WINDOW_CHARS", 12)


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.usefixtures("small_window")
@given(text=texts, offered=choices, continues=st.booleans())
def test_a_window_gives_the_ids_of_the_whole(
    name: str, text: str, offered: list[str], continues: bool
) -> None:
    tokenizer = TOKENIZERS[name]
    head, tails = encode_after(tokenizer, text, offered, continues=continues)
    whole = [tokenizer.encode(text + choice, continues=continues) for choice in offered]
    assert [head + tail for tail in tails] == whole


@pytest.mark.parametrize("name", TOKENIZERS)
@given(text=texts, offered=choices, before=st.lists(st.just(5), max_size=1))
def test_all_share_the_longest_common_beginning(
    name: str, text: str, offered: list[str], before: list[int]
) -> None:
    tokenizer = TOKENIZERS[name]
    encoded = encode_choices(tokenizer, before, text, offered, continues=bool(before))
    whole = [before + tokenizer.encode(text + choice, continues=bool(before)) for choice in offered]
    if not before and text and [encoded.prefix + end for end in encoded.ends] != whole:
        # Nothing would stand before the scored tokens, so the text does.
        assert encoded.prefix == tokenizer.encode(text)
        assert encoded.ends == [tokenizer.encode(choice, continues=True) for choice in offered]
        assert len({ids[0] for ids in whole}) > 1 or min(map(len, whole)) == 1
        return
    assert [encoded.prefix + end for end in encoded.ends] == whole
    num_shared = len(encoded.prefix)
    assert all(ids[:num_shared] == encoded.prefix for ids in whole)
    assert len({ids[num_shared] for ids in whole}) > 1 or min(map(len, whole)) == num_shared + 1
    for index, choice in enumerate(offered):
        assert encoded.run(index) == (text + choice, whole[index][len(before) :])


@pytest.mark.parametrize("name", TOKENIZERS)
@given(text=texts, shared=texts, offered=choices)
def test_a_common_beginning_of_choices_may_be_part_of_the_text(
    name: str, text: str, shared: str, offered: list[str]
) -> None:
    """Such as a space at the end of the prompt, or at the front of each choice."""
    tokenizer = TOKENIZERS[name]
    one = encode_choices(tokenizer, [5], text + shared, offered, continues=True)
    other = encode_choices(tokenizer, [5], text, [shared + choice for choice in offered], continues=True)
    assert (one.prefix, one.ends) == (other.prefix, other.ends)


def test_a_space_at_the_end_of_the_text_is_scored_with_the_choices() -> None:
    """It is no separate token there: the choices' ids differ from it on."""
    encoded = encode_choices(SMALL, [5], "the ", ["answer", "question"], continues=True)
    assert encoded.prefix == [5, *SMALL.encode("the", continues=True)]
    assert [SMALL.decode(end, continues=True) for end in encoded.ends] == [" answer", " question"]


class CountingTokenizer(Tokenizer):
    """Counts the characters that it encodes."""

    num_chars = 0

    def encode(self, text: str, *, continues: bool = False) -> list[int]:
        self.num_chars += len(text)
        return super().encode(text, continues=continues)


@pytest.mark.parametrize("name", ["byte_level", "sentencepiece"])
def test_a_thousand_choices_do_not_encode_a_long_text_a_thousand_times(name: str) -> None:
    tokenizer = CountingTokenizer(byte_level() if name == "byte_level" else sentencepiece())
    text = "The quick brown fox answers the question. " * 100
    offered = [f"{number}" for number in range(1000)]
    head, tails = encode_after(tokenizer, text, offered, continues=False)
    assert tokenizer.num_chars < len(text) + 1000 * 3 * choice_encoding.WINDOW_CHARS
    for index in range(0, 1000, 97):
        assert head + tails[index] == tokenizer.encode(text + offered[index])


def test_a_choice_that_cannot_be_written_is_refused() -> None:
    spec = byte_level_of(["ab"])
    vocab = spec["model"]["vocab"]
    vocab["zz"] = vocab.pop("x")
    tokenizer = Tokenizer(spec)
    encoded = encode_choices(tokenizer, [0], "", ["ab", "a"], continues=True)
    assert [tokenizer.decode(end) for end in encoded.ends] == ["ab", "a"]
    with pytest.raises(BadArgument, check=has_param("choices")):
        encode_choices(tokenizer, [0], "", ["ab", "x"], continues=True)


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.usefixtures("small_window")
def test_a_place_for_the_window_is_found(name: str) -> None:
    for text in ("the quick answer " * 5, "日本" * 30):
        head, tails = encode_after(TOKENIZERS[name], text, ["an", "swer"], continues=False)
        assert len(head) > len(tails[0])
