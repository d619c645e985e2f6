"""The tokenizer against the tokenizers library, on the default model and on small ones of each family."""

from __future__ import annotations

import copy
import threading
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from support import small_tokenizers
from support.engine.gguf_references import library_tokenizer
from support.faults import has_param

from agentflow.engine.text.tokenizer import Tokenizer
from agentflow.errors import BadArgument, BadModelFolder

FAMILIES = {
    "byte_level": small_tokenizers.byte_level(plain_added=["<think>", "    "]),
    "prefix_every": small_tokenizers.sentencepiece("every", extra=["<0>"]),
    "prefix_first": small_tokenizers.sentencepiece("first"),
    "prefix_none": small_tokenizers.sentencepiece("none"),
}

TOKENIZERS = {name: Tokenizer(spec) for name, spec in FAMILIES.items()}
LIBRARIES = {name: small_tokenizers.library(spec) for name, spec in FAMILIES.items()}

family = pytest.mark.parametrize("name", FAMILIES)
# Lone surrogates are no text, and SentencePiece itself writes its space mark as a space.
texts = st.text(st.characters(exclude_categories=("Cs",), exclude_characters="▁"), max_size=40) | st.lists(
    st.sampled_from(
        ["<s>", "</s>", "<think>", " ", "  ", "\n", "the answer", "é", "日本", "<", "s>", "<0x41>", "👩‍🚀"]
    )
).map("".join)


@pytest.fixture(scope="module")
def default(model_folder: Path) -> Tokenizer:
    return Tokenizer.from_folder(model_folder)


@pytest.fixture(scope="module")
def default_library(model_folder: Path) -> tokenizers.Tokenizer:
    return library_tokenizer(model_folder)


@family
@given(text=texts)
def test_content_decodes_to_itself_and_is_never_special(name: str, text: str) -> None:
    tokenizer = TOKENIZERS[name]
    ids = tokenizer.encode(text)
    assert tokenizer.special_ids.isdisjoint(ids)
    assert len(ids) >= tokenizer.fewest_tokens(len(text))
    # This kind puts no space in front of one that is there, and takes it away all the same.
    assert tokenizer.decode(ids) == (text.removeprefix(" ") if name == "prefix_first" else text)


@family
@given(text=texts, cut=st.integers(0, 40))
def test_a_text_in_two_pieces_decodes_to_itself(name: str, text: str, cut: int) -> None:
    tokenizer = TOKENIZERS[name]
    first = tokenizer.encode(text[:cut])
    last = first[-1] if first else None
    continues = tokenizer.continues_after(len(text[:cut]), last)
    ids = first + tokenizer.encode(text[cut:], continues=continues)
    assert tokenizer.decode(ids) == (text.removeprefix(" ") if name == "prefix_first" else text)


@family
@given(ids=st.lists(st.integers(0, 300), max_size=30))
def test_the_texts_of_tokens_joined_are_their_text(name: str, ids: list[int]) -> None:
    tokenizer = TOKENIZERS[name]
    pieces = tokenizer.list_texts(ids)
    assert len(pieces) == len(ids)
    assert "".join(pieces) == tokenizer.decode(ids, skip_special=False, continues=True)


def test_a_character_in_several_tokens_is_in_the_last_of_them() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    ids = [
        next(i for i in range(tokenizer.vocab_size) if tokenizer.token_bytes(i) == bytes([byte]))
        for byte in "é".encode()
    ]
    assert tokenizer.list_texts(ids) == ["", "é"]
    assert tokenizer.list_texts(ids[:1]) == ["\ufffd"]


@family
@given(text=texts)
def test_markup_is_what_the_library_encodes(name: str, text: str) -> None:
    assert TOKENIZERS[name].encode_markup(text) == LIBRARIES[name].encode(text, add_special_tokens=False).ids


@family
@given(text=st.text(st.characters(exclude_categories=("Cs",), exclude_characters="<▁"), max_size=40))
def test_content_without_special_tokens_is_what_the_library_encodes(name: str, text: str) -> None:
    assert TOKENIZERS[name].encode(text) == LIBRARIES[name].encode(text, add_special_tokens=False).ids


@family
@given(data=st.data())
def test_pieces_of_markup_are_the_whole(name: str, data: st.DataObject) -> None:
    """Cut before a special token, two pieces of markup have the ids of the whole."""
    tokenizer = TOKENIZERS[name]
    words = st.sampled_from(["<s>", "</s>", " a", "the", "\n"])
    head = "".join(data.draw(st.lists(words, max_size=5)))
    tail = "<s>" + "".join(data.draw(st.lists(words, max_size=5)))
    ids = tokenizer.encode_markup(head)
    continues = tokenizer.continues_after(len(head), ids[-1] if ids else None)
    assert ids + tokenizer.encode_markup(tail, continues=continues) == tokenizer.encode_markup(head + tail)


@family
def test_a_piece_that_follows_text_gets_no_space(name: str) -> None:
    tokenizer = TOKENIZERS[name]
    assert tokenizer.decode(tokenizer.encode("fox", continues=True), continues=True) == "fox"
    inside = tokenizer.encode_markup("fox</s>the", continues=True)
    whole = tokenizer.encode_markup("fox</s>the")
    end = tokenizer.find_id("</s>")
    assert end is not None
    assert inside[inside.index(end) :] == whole[whole.index(end) :]
    assert tokenizer.decode(inside[: inside.index(end)], continues=True) == "fox"


@family
@given(data=st.data())
def test_decoding_random_ids(name: str, data: st.DataObject) -> None:
    tokenizer, library = TOKENIZERS[name], LIBRARIES[name]
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=12))
    expected = library.decode(ids, skip_special_tokens=True)
    if name != "byte_level" and "�" in expected:
        # The library has one U+FFFD for each byte of a broken run, also for the sound ones in it.
        written = [library.id_to_token(i) for i in ids if i not in tokenizer.special_ids]
        data_bytes = b"".join(
            bytes([int(w[3:5], 16)]) if w.startswith("<0x") else w.replace("▁", " ").encode() for w in written
        )
        expected = data_bytes.decode(errors="replace")
        expected = expected.removeprefix(" ") if name != "prefix_none" else expected
    assert tokenizer.decode(ids) == expected


@family
def test_every_token_of_the_vocabulary(name: str) -> None:
    tokenizer, library = TOKENIZERS[name], LIBRARIES[name]
    anchor = tokenizer.encode("a")
    before = library.decode(anchor)
    for token_id in range(tokenizer.vocab_size):
        data = tokenizer.token_bytes(token_id)
        assert library.decode([*anchor, token_id]) == before + data.decode(errors="replace")
        assert (data == b"") == (token_id in tokenizer.special_ids)
    assert tokenizer.token_bytes(tokenizer.vocab_size) == b""
    assert tokenizer.token_bytes(-1) == b""


@family
def test_special_tokens_are_written_on_request(name: str) -> None:
    tokenizer = TOKENIZERS[name]
    ids = [1, *tokenizer.encode("fox"), tokenizer.vocab_size + 5]
    token = LIBRARIES[name].id_to_token(1)
    assert tokenizer.decode(ids, continues=True, skip_special=False).startswith(token)
    assert tokenizer.decode(ids) == "fox"


@family
@given(text=texts)
def test_exact_ids(name: str, text: str) -> None:
    tokenizer = TOKENIZERS[name]
    for continues in (False, True):
        assert (
            tokenizer.decode(tokenizer.encode_exact(text, continues=continues), continues=continues) == text
        )


@given(text=st.text(st.sampled_from("e\u0301▁ a\u1100\u1161"), max_size=12))
def test_exact_ids_where_the_tokenizer_normalises(text: str) -> None:
    spec = copy.deepcopy(FAMILIES["byte_level"])
    spec["normalizer"] = {"type": "NFC"}
    for tokenizer in (Tokenizer(spec), TOKENIZERS["prefix_every"]):
        for continues in (False, True):
            ids = tokenizer.encode_exact(text, continues=continues)
            assert tokenizer.decode(ids, continues=continues) == text


@given(text=texts)
def test_bytes_with_a_space_in_front(text: str) -> None:
    """This kind never takes the space away again."""
    spec = copy.deepcopy(FAMILIES["byte_level"])
    spec["pre_tokenizer"]["add_prefix_space"] = True
    tokenizer, library = Tokenizer(spec), small_tokenizers.library(spec)
    assert tokenizer.space_prefix == "every"
    assert tokenizer.encode_markup(text) == library.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(tokenizer.encode("fox")) == " fox"
    assert tokenizer.decode(tokenizer.encode("fox", continues=True)) == "fox"
    assert tokenizer.decode(tokenizer.encode_exact(text)) == text


def test_prefix_ids() -> None:
    assert TOKENIZERS["byte_level"].prefix_ids == ()
    assert TOKENIZERS["prefix_every"].prefix_ids == (1,)


@pytest.mark.parametrize("name", ["prefix_every", "prefix_first"])
def test_where_spaces_are_put_in_front(name: str) -> None:
    tokenizer = TOKENIZERS[name]
    assert tokenizer.space_prefix == name.removeprefix("prefix_")
    assert not tokenizer.continues_after(0, None)
    assert tokenizer.continues_after(3, 50)
    assert tokenizer.continues_after(3, 1) == (name == "prefix_first")


def test_special_tokens_that_merges_could_build_are_spelt() -> None:
    spec = copy.deepcopy(FAMILIES["prefix_every"])
    vocab, merges = spec["model"]["vocab"], spec["model"]["merges"]
    for text in ("<", "/", "s", ">"):
        vocab.setdefault(text, len(vocab))
    for left, right in (("<", "/"), ("</", "s"), ("</s", ">")):
        vocab.setdefault(left + right, len(vocab))
        merges.insert(0, [left, right])
    tokenizer = Tokenizer(spec)
    bare = copy.deepcopy(spec)
    bare["added_tokens"] = []
    assert 2 in small_tokenizers.library(bare).encode("a</s>b", add_special_tokens=False).ids
    ids = tokenizer.encode("a</s>b")
    assert 2 not in ids
    assert tokenizer.decode(ids) == "a</s>b"


def test_added_tokens_of_turns_are_text_in_contents(tmp_path: Path) -> None:
    spec = small_tokenizers.byte_level(plain_added=["<turn>", "<think>", "\n\n"])
    template = "{% for m in messages %}{{ '<turn>' + m.role + '\n\n' + m.content }}{% endfor %}"
    tokenizer = Tokenizer.from_folder(small_tokenizers.write_folder(tmp_path, spec, template=template))
    turn, think, space = (tokenizer.find_id(text) for text in ("<turn>", "<think>", "\n\n"))
    ids = tokenizer.encode("<turn>a<think>\n\n")
    assert turn not in ids
    assert think in ids
    assert space in ids
    assert tokenizer.decode(ids) == "<turn>a<think>\n\n"
    assert turn in tokenizer.encode_markup("<turn>")


def test_tokens_that_only_the_config_calls_special(tmp_path: Path) -> None:
    spec = small_tokenizers.byte_level(plain_added=["<end>"])
    (tmp_path / "special_tokens_map.json").write_text(
        '{"eos_token": {"content": "<end>"}, "bos_token": "<s>"}'
    )
    small_tokenizers.write_folder(tmp_path, spec, config={"bos_token": "<old>", "pad_token": None})
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert (tokenizer.bos, tokenizer.bos_id, tokenizer.eos) == ("<s>", 0, "<end>")
    assert tokenizer.eos_id in tokenizer.special_ids
    assert tokenizer.eos_id not in tokenizer.encode("<end>")
    assert tokenizer.named_tokens == {"bos_token": "<s>", "eos_token": "<end>"}


def test_added_ids_with_holes() -> None:
    spec = copy.deepcopy(FAMILIES["byte_level"])
    spec["added_tokens"].append(small_tokenizers.added_token(spec["added_tokens"][-1]["id"] + 7, "<far>"))
    tokenizer = Tokenizer(spec)
    far = tokenizer.find_id("<far>")
    assert far is not None
    assert [far] == small_tokenizers.library(spec).encode("<far>").ids == tokenizer.encode_markup("<far>")
    assert far == tokenizer.vocab_size - 1
    assert far not in tokenizer.encode("<far> and <s>")
    assert tokenizer.decode(tokenizer.encode("<far> and <s>")) == "<far> and <s>"


def test_settings_for_training_do_not_cut_texts() -> None:
    spec = copy.deepcopy(FAMILIES["byte_level"])
    spec["truncation"] = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    tokenizer = Tokenizer(spec)
    assert tokenizer.decode(tokenizer.encode("the quick brown fox")) == "the quick brown fox"
    assert tokenizer.decode(tokenizer.encode_markup("the quick brown fox")) == "the quick brown fox"


@family
def test_a_long_text_is_encoded_as_the_library_does(name: str) -> None:
    for text in ("The answer, é 日本.\n" * 200, "<s>the  answer</s>" * 200):
        expected = LIBRARIES[name].encode(text, add_special_tokens=False).ids
        assert TOKENIZERS[name].encode_markup(text) == expected
    with pytest.raises(BadArgument):
        TOKENIZERS[name].encode("x" * 5000 + "\ud800")


def test_while_a_long_text_is_encoded_other_threads_run() -> None:
    """During the whole encoding, not only before and after it."""
    text = "the answer " * 50_000
    has_begun, num_turns = threading.Event(), 0

    def encode() -> None:
        has_begun.set()
        TOKENIZERS["byte_level"].encode(text)

    thread = threading.Thread(target=encode)
    thread.start()
    has_begun.wait()
    while thread.is_alive():
        thread.join(timeout=0.001)
        num_turns += 1
    assert num_turns >= 20


def test_half_a_surrogate_pair_is_refused() -> None:
    with pytest.raises(BadArgument):
        TOKENIZERS["byte_level"].encode("a\ud83d")


@pytest.mark.model
class TestDefaultModel:
    def test_facts(self, default: Tokenizer) -> None:
        assert (default.bos, default.bos_id) == ("<|im_start|>", 1)
        assert (default.eos, default.eos_id) == ("<|im_end|>", 2)
        assert default.vocab_size == 49_152
        assert default.prefix_ids == ()
        assert default.space_prefix == "none"

    @given(text=texts)
    def test_content(self, default: Tokenizer, default_library: tokenizers.Tokenizer, text: str) -> None:
        ids = default.encode(text)
        plain = text.replace("<s>", "").replace("</s>", "")
        assert default.encode(plain) == default_library.encode(plain, add_special_tokens=False).ids
        # This vocabulary has no token for some bytes, and leaves them out of a text.
        unwritable = set(range(256)) - {
            default.token_bytes(i)[0] for i in range(default.vocab_size) if i > 16
        }
        assert default.decode(ids) == text or not unwritable.isdisjoint(text.encode())

    def test_markers_in_content_stay_text(self, default: Tokenizer) -> None:
        for token_id in default.special_ids:
            text = f"a{default.decode([token_id], skip_special=False)}b"
            assert default.decode(default.encode(text)) == text
            assert token_id not in default.encode(text)
            assert token_id in default.encode_markup(text)

    def test_whole_vocabulary(self, default: Tokenizer, default_library: tokenizers.Tokenizer) -> None:
        for token_id in range(default.vocab_size):
            expected = default_library.decode([token_id], skip_special_tokens=True)
            assert default.token_bytes(token_id).decode(errors="replace") == expected


@pytest.mark.parametrize(
    ("content", "param"),
    [
        (None, "tokenizer.json"),
        ("{", "tokenizer.json"),
        ("[]", "tokenizer.json"),
        ("{}", "decoder"),
        ('{"decoder": {"type": "WordPiece"}}', "decoder"),
        ('{"decoder": {"type": "ByteLevel"}}', "tokenizer.json"),
        ('{"decoder": 3}', "tokenizer.json"),
        ('{"added_tokens": [{"id": 1}]}', "tokenizer.json"),
        ('{"added_tokens": [7]}', "tokenizer.json"),
        (
            '{"decoder": {"type": "ByteLevel"}, "added_tokens": [{"content": [], "special": true}]}',
            "tokenizer.json",
        ),
    ],
)
def test_bad_folders(tmp_path: Path, content: str | None, param: str) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(BadModelFolder, check=has_param(param)) as caught:
        Tokenizer.from_folder(tmp_path)
    assert str(tmp_path) in str(caught.value)


def test_a_vocabulary_at_which_the_library_itself_fails(tmp_path: Path) -> None:
    spec = copy.deepcopy(FAMILIES["byte_level"])
    spec["model"]["continuing_subword_prefix"] = "longer than any token"
    small_tokenizers.write_folder(tmp_path, spec)
    with pytest.raises(BadModelFolder, check=has_param("tokenizer.json")):
        Tokenizer.from_folder(tmp_path)


def test_f37_added_tokens_in_letters_of_the_byte_alphabet_are_text() -> None:
    tokenizer = Tokenizer(small_tokenizers.byte_level(plain_added=["größe"]))
    ids = tokenizer.encode("größe é")
    assert tokenizer.find_id("größe") in ids
    assert tokenizer.decode(ids) == "größe é"


def test_f37_an_added_token_that_the_normalizer_empties_is_refused() -> None:
    """The library would never return from a text without it."""
    spec = small_tokenizers.byte_level(plain_added=["\n\n", "  "])
    spec["normalizer"] = {"type": "Strip", "strip_left": True, "strip_right": False}
    Tokenizer(spec)
    spec["added_tokens"][-2]["normalized"] = True
    with pytest.raises(BadModelFolder, check=has_param("tokenizer.json")):
        Tokenizer(spec)


def test_f37_a_text_at_which_the_library_panics_is_refused() -> None:
    """It panics where two added tokens strip the same space."""
    spec = small_tokenizers.byte_level(plain_added=["<x>", "\n"])
    spec["added_tokens"][-2]["rstrip"] = spec["added_tokens"][-1]["lstrip"] = True
    tokenizer = Tokenizer(spec)
    assert tokenizer.decode(tokenizer.encode("<x> and\n")) == "<x>and\n"
    for encode in (tokenizer.encode, tokenizer.encode_markup, tokenizer.encode_exact, tokenizer.closed_spans):
        with pytest.raises(BadArgument):
            encode("<x>\n\n")


@pytest.mark.parametrize("kind", ["WhitespaceSplit", "Whitespace", "rstrip", "special"])
def test_f37_a_tokenizer_that_removes_spaces_has_no_fewest_tokens(kind: str) -> None:
    spec = small_tokenizers.byte_level(plain_added=["<x>"])
    if kind in ("rstrip", "special"):
        spec["added_tokens"][-1] |= {"rstrip": True, "special": kind == "special"}
    else:
        spec["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [{"type": kind}, spec["pre_tokenizer"]]}
    tokenizer = Tokenizer(spec)
    text = "<x>" + " " * 10_000
    fewest = min(len(tokenizer.encode(text)), len(tokenizer.encode_markup(text)))
    assert fewest >= tokenizer.fewest_tokens(len(text))


def test_bad_config(tmp_path: Path) -> None:
    small_tokenizers.write_folder(tmp_path, FAMILIES["byte_level"])
    (tmp_path / "tokenizer_config.json").write_text("nothing")
    with pytest.raises(BadModelFolder, check=has_param("tokenizer_config.json")):
        Tokenizer.from_folder(tmp_path)


def test_another_sequence_of_decoders_is_named() -> None:
    spec = copy.deepcopy(FAMILIES["prefix_every"])
    spec["decoder"]["decoders"].insert(
        0, {"type": "CTC", "pad_token": "", "word_delimiter_token": "", "cleanup": True}
    )
    with pytest.raises(BadModelFolder, match=r"CTC \+ Replace"):
        Tokenizer(spec)
