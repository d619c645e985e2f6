"""Tokenizers out of GGUF files: small ones, trained and written here, against the plain algorithms."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Sequence
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import regex
from gguf import GGUFWriter
from hypothesis import given
from hypothesis import strategies as st
from support import small_tokenizers
from support.faults import has_param
from tokenizers import pre_tokenizers

from agentflow.engine.store.gguf.file import open_gguf
from agentflow.engine.text.chat_template import ChatTemplate
from agentflow.engine.text.tokenizer import Tokenizer
from agentflow.errors import BadModelFolder

# As llama.cpp writes them: pieces between matches are pieces, too.
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_WORD = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])|[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
EXPRESSIONS = {
    "gpt-2": (_GPT2,),
    "smollm": (r"\p{N}", _GPT2),
    "llama-bpe": (rf"{_WORD}|\p{{N}}{{1,3}}|{_REST}",),
    "dbrx": (rf"{_WORD}|\p{{N}}{{1,3}}|{_REST}",),
    "falcon": (r"[\p{P}$+<=>^~|`]+", _GPT2, r"[0-9]{3}"),
    "seed-coder": (rf"{_WORD}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+|\s*[\r\n]+|\s+(?!\S)|\s+",),
    "hunyuan": (rf"{_WORD}|\p{{N}}|{_REST}",),
    "deepseek-llm": (
        r"[\r\n]",
        r"\s?[A-Za-z\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u0386\u0388-\u03e1\u0400-\u0481]+",
        r"\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
        r"\s+$",
        r"[一-龥ࠀ-一가-\ud7ff]+",
        r"\p{N}+",
    ),
    "deepseek-v3": (
        r"\p{N}{1,3}",
        r"[一-龥぀-ゟ゠-ヿ]+",
        r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
        r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ),
}
TEXTS = (
    small_tokenizers.TEXTS + ["It's 1234567 o'clock; WE'RE HTTPServers!!\r\n\n  12\t34 über 東京タワー"] * 4
)
ALPHABET = st.one_of(
    st.sampled_from(
        [*list("abcdefghilmnorstuvwABTHEQz 0123456789.,;!?'\"\n\r\t/_ßéäк日本東京タन"), "  ", "'s", "the "]
    ),
    st.characters(codec="utf-8", exclude_categories=("Cn",)),
)
texts = st.lists(ALPHABET, max_size=40).map("".join)


def write_vocabulary(
    file: Path,
    model: str,
    tokens: Sequence[str],
    types: Sequence[int],
    add: Callable[[GGUFWriter], None],
    architecture: str = "llama",
) -> Path:
    """A GGUF file without tensors."""
    writer = GGUFWriter(file, architecture)
    writer.add_tokenizer_model(model)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    add(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return file


def byte_level_file(pre: str, folder: Path, spec: dict[str, Any], plain: Collection[str] = ()) -> Path:
    """``plain``: special tokens that the file types as ordinary text."""
    vocabulary = sorted(spec["model"]["vocab"], key=spec["model"]["vocab"].get)
    special = {token["content"] for token in spec["added_tokens"]}

    def add(writer: GGUFWriter) -> None:
        writer.add_tokenizer_pre(pre)
        writer.add_token_merges([" ".join(merge) for merge in spec["model"]["merges"]])
        writer.add_add_bos_token(False)
        writer.add_chat_template("{{ messages }}é")

    types = [3 if token in special and token not in plain else 1 for token in vocabulary]
    return write_vocabulary(folder / f"{pre}.gguf", "gpt2", vocabulary, types, add)


@cache
def byte_level(pre: str) -> tuple[Tokenizer, dict[str, int], dict[tuple[str, str], int]]:
    spec = small_tokenizers.byte_level(vocab_size=900)
    file = byte_level_file(pre, Path(mkdtemp()), spec)
    ranks = {(left, right): rank for rank, (left, right) in enumerate(spec["model"]["merges"])}
    return Tokenizer.from_folder(file), spec["model"]["vocab"], ranks


def pieces_of(text: str, expressions: Sequence[str]) -> list[str]:
    """Splits at the matches of each expression in turn."""
    pieces = [text]
    for one in expressions:
        split = []
        for piece in pieces:
            end = 0
            for match in regex.finditer(one, piece):
                split += [piece[end : match.start()], match[0]]
                end = match.end()
            split.append(piece[end:])
        pieces = [piece for piece in split if piece]
    return pieces


def merged(symbols: list[str], ranks: dict[tuple[str, str], int]) -> list[str]:
    """Merges the pair of the lowest rank, the leftmost of equals, until there is none."""
    while pairs := [(ranks[p], i) for i, p in enumerate(itertools.pairwise(symbols)) if p in ranks]:
        _, i = min(pairs)
        symbols[i : i + 2] = [symbols[i] + symbols[i + 1]]
    return symbols


@pytest.mark.parametrize("pre", EXPRESSIONS)
@given(text=texts)
def test_byte_level_ids_are_those_of_the_plain_algorithm(pre: str, text: str) -> None:
    tokenizer, vocabulary, ranks = byte_level(pre)
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    expected = []
    for piece in pieces_of(text, EXPRESSIONS[pre]):
        written = to_bytes.pre_tokenize_str(piece)[0][0]
        whole = pre == "llama-bpe" and written in vocabulary
        expected += [vocabulary[one] for one in ([written] if whole else merged(list(written), ranks))]
    assert tokenizer.encode(text) == expected
    assert tokenizer.decode(expected) == text


@pytest.mark.parametrize("pre", ["qwen2", "qwen35", "gpt-4o", "tekken", "deepseek-coder", "olmo"])
@given(text=texts)
def test_byte_level_texts_come_back(pre: str, text: str) -> None:
    tokenizer = byte_level(pre)[0]
    exact = tokenizer.encode_exact(text)
    assert tokenizer.decode(exact) == text


SPM_TOKENS = [
    *("<s>", "</s>", "<unk>"),
    *(f"<0x{byte:02X}>" for byte in range(256)),
    *("▁", *"abcdehiklnorstuw.,'ß日"),
    *("▁t", "he", "▁the", "▁a", "in", "er", "an", "▁an", "▁ans", "wer", "▁answer", "is", "▁is", "st", "the"),
    *("▁▁", "▁▁▁▁", "re", "th", "at", "▁w", "or", "▁wor", "▁word"),
    "[tool]",
]
SPM_TYPES = [3, 3, 2, *[6] * 256, *[1] * (len(SPM_TOKENS) - 260), 4]


@cache
def sentence_piece(has_prefix: bool) -> tuple[Tokenizer, dict[str, float]]:
    scores = [0.0] * 259 + [-float(i) for i in range(len(SPM_TOKENS) - 259)]

    def add(writer: GGUFWriter) -> None:
        writer.add_token_scores(scores)
        writer.add_unk_token_id(2)
        writer.add_add_space_prefix(has_prefix)

    file = write_vocabulary(Path(mkdtemp()) / "spm.gguf", "llama", SPM_TOKENS, SPM_TYPES, add)
    plain = {t: s for t, s, kind in zip(SPM_TOKENS, scores, SPM_TYPES, strict=True) if kind == 1}
    return Tokenizer.from_folder(file), plain


@pytest.mark.parametrize("has_prefix", [True, False])
@given(text=st.text("abcdehiklnorstuw.,'ß日 né\n", max_size=40) | st.text(max_size=10))
def test_sentence_piece_ids_are_those_of_the_plain_algorithm(has_prefix: bool, text: str) -> None:
    tokenizer, scores = sentence_piece(has_prefix)
    symbols = list(("▁" if has_prefix and text else "") + text.replace(" ", "▁"))
    while True:
        joined = [a + b for a, b in itertools.pairwise(symbols)]
        best = max(((scores.get(t, -math.inf), -i) for i, t in enumerate(joined)), default=(-math.inf, 0))
        if best[0] == -math.inf:
            break
        i = -best[1]
        symbols[i : i + 2] = [joined[i]]
    ids = {token: i for i, token in enumerate(SPM_TOKENS)}
    expected: list[int] = []
    for symbol in symbols:
        expected += [ids[symbol]] if symbol in scores else [ids[f"<0x{b:02X}>"] for b in symbol.encode()]
    assert tokenizer.encode(text) == expected
    if "▁" not in text:
        assert tokenizer.decode(expected) == text


def test_roles_and_templates_come_from_the_metadata(tmp_path: Path) -> None:
    file = byte_level_file("gpt-2", tmp_path, small_tokenizers.byte_level())
    tokenizer = Tokenizer.from_folder(file)
    assert tokenizer.named_tokens == {"bos_token": "<s>", "eos_token": "</s>"}
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.special_ids) == (0, 1, {0, 1})
    assert tokenizer.prefix_ids == ()
    assert tokenizer.encode_markup("a</s>")[-1] == 1
    assert 1 not in tokenizer.encode("a</s>")
    assert ChatTemplate.from_folder(file).source == "{{ messages }}é"
    spm = sentence_piece(True)[0]
    assert (spm.prefix_ids, spm.special_ids) == ((0,), {0, 1, 2})
    assert spm.encode("[tool]")[-1] == len(SPM_TOKENS) - 1
    file = byte_level_file("llama-bpe", tmp_path, small_tokenizers.byte_level())
    assert ChatTemplate.from_folder(file).has_template


def test_f37a_markers_of_turns_that_are_typed_as_text_are_control_tokens(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    marks = ("<|im_start|>", "<|im_end|>")
    spec = small_tokenizers.byte_level(special=("<s>", "</s>", *marks))
    file = byte_level_file("gpt-2", tmp_path, spec, plain=marks)
    tokenizer = Tokenizer.from_folder(file)
    start, end = (spec["model"]["vocab"][mark] for mark in marks)
    assert tokenizer.encode_markup("<|im_start|>user")[0] == start
    assert {start, end} <= tokenizer.special_ids
    assert end not in tokenizer.encode("<|im_end|>")
    assert open_gguf(file).vocabulary.end_ids == (1, end)
    assert "<|im_end|>" in caplog.text


@pytest.mark.parametrize(("architecture", "strips"), [("phi3", True), ("llama", False)])
def test_f37_marks_of_phi3_take_the_line_breaks_of_its_template(
    architecture: str, strips: bool, tmp_path: Path
) -> None:
    marks = ["<|endoftext|>", "<|user|>", "<|end|>", "<|assistant|>"]
    tokens = [
        "<s>",
        "</s>",
        "<unk>",
        *[f"<0x{i:02X}>" for i in range(256)],
        "▁",
        "H",
        "i",
        "▁H",
        "▁Hi",
        *marks,
    ]
    types = [3, 3, 2, *[6] * 256, *[1] * 5, *[3] * 4]

    def add(writer: GGUFWriter) -> None:
        writer.add_token_scores([0.0] * 259 + [-5.0, -5.0, -5.0, -2.0, -1.0] + [0.0] * 4)

    file = write_vocabulary(tmp_path / "phi.gguf", "llama", tokens, types, add, architecture)
    ids = Tokenizer.from_folder(file).encode_markup("<|user|>\nHi<|end|>\n<|assistant|>\n<|endoftext|>\n")
    shown = [tokens[number] for number in ids]
    if strips:
        expected = ["<|user|>", "▁Hi", "<|end|>", "<|assistant|>", "<|endoftext|>", "▁", "<0x0A>"]
    else:
        expected = ["<|user|>", "▁", "<0x0A>", "H", "i", "<|end|>", "▁", "<0x0A>", "<|assistant|>"]
    assert shown[: len(expected)] == expected


@pytest.mark.parametrize(
    ("pre", "model", "param"),
    [("tea-leaves", "gpt2", "tokenizer.ggml.pre"), ("gpt-2", "bert", "tokenizer.ggml.model")],
)
def test_unknown_tokenizers_are_rejected_by_name(pre: str, model: str, param: str, tmp_path: Path) -> None:
    def add(writer: GGUFWriter) -> None:
        writer.add_tokenizer_pre(pre)

    file = write_vocabulary(tmp_path / "odd.gguf", model, ["a", "b"], [1, 1], add)
    with pytest.raises(BadModelFolder, check=has_param(param)) as caught:
        Tokenizer.from_folder(file)
    assert pre in str(caught.value) or model in str(caught.value)


def test_f37_a_file_without_tokens_is_rejected(tmp_path: Path) -> None:
    """Such files are made for models that get their tokens from elsewhere."""
    writer = GGUFWriter(tmp_path / "bare.gguf", "llama")
    writer.add_tokenizer_model("no_vocab")
    writer.add_bos_token_id(1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    for read in (Tokenizer.from_folder, ChatTemplate.from_folder):
        with pytest.raises(BadModelFolder, match="bare"):
            read(tmp_path / "bare.gguf")
