"""The tokenizer of a GGUF file, as the object of a ``tokenizer.json``.

There are two kinds: byte-level BPE ("gpt2"), for which the file has the merges and the name of the
pre-tokenizer, and SentencePiece's BPE ("llama"), whose merges follow from the scores of its tokens. The
expressions of the pre-tokenizers are from the models' ``tokenizer.json`` files, their names from llama.cpp.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Final

from agentflow.engine.store.gguf.vocabulary import CONTROL, NORMAL, UNKNOWN, USER_DEFINED, GgufVocabulary

Spec = dict[str, Any]

_DIGITS: Final = {"type": "Digits", "individual_digits": True}
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_REST}"
_QWEN2 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_REST}"
_SEED = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_FALCON = (
    r"[\p{P}$+<=>^~|`]+",
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    "[0-9]{3}",
)
_QWEN35 = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_BEFORE = r"[^\r\n\p{L}\p{N}]?"
_REST_SLASH = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT4O = (
    rf"{_BEFORE}{_UPPER}*{_LOWER}+{_CONTRACTIONS}?|{_BEFORE}{_UPPER}+{_LOWER}*{_CONTRACTIONS}?"
    rf"|\p{{N}}{{1,3}}|{_REST_SLASH}"
)
_TEKKEN = rf"{_BEFORE}{_UPPER}*{_LOWER}+|{_BEFORE}{_UPPER}+{_LOWER}*|\p{{N}}|{_REST_SLASH}"
# Letters with case, without rare scripts and styles.
_DEEPSEEK = (
    "[\\p{Lu}\\p{Ll}\\p{Lt}&&[^\u0560\u0588\u10c7\u10cd\u10d0-\u10ff\u1c80-\u1c88\u2d00-\u2d2d"
    "\ua790-\ua7fa\uab30-\uab68\U00010570-\U000105bc\U00016e40-\U00016e7f\U0001d400-\U0001d7cb"
    "\U0001df00-\U0001df1e]]"
)
_DEEPSEEK3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, slots=True)
class _Pre:
    """A pre-tokenizer."""

    splits: tuple[str | Spec, ...] = ()  # regular expressions or pre-tokenizers, applied in this order
    has_gpt2: bool = False  # GPT-2's expression is applied last
    adds_bos: bool = False  # the default if the file does not specify it
    is_composed: bool = False  # texts are normalised to NFC
    ignores_merges: bool = False  # a piece that is a token is not merged from its parts


_GPT2 = _Pre(has_gpt2=True)
_DIGITS_APART = _Pre((_DIGITS,), has_gpt2=True)
_LLAMA_BPE = _Pre((_LLAMA3,), adds_bos=True, ignores_merges=True)
_QWEN = _Pre((_QWEN2,), is_composed=True)
PRE_TOKENIZERS: Final = {
    **dict.fromkeys(("gpt-2", "phi-2", "jais", "mpt", "exaone4"), _GPT2),
    **dict.fromkeys(
        ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"), _DIGITS_APART
    ),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "lfm2"), _LLAMA_BPE),
    **dict.fromkeys(("dbrx", "smaug-bpe", "chatglm-bpe"), _Pre((_LLAMA3,))),
    "glm4": _Pre((_LLAMA3,), ignores_merges=True),
    "falcon": _Pre(_FALCON),
    "seed-coder": _Pre((_SEED,)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez"), _QWEN),
    "stablelm2": _QWEN,
    "hunyuan": replace(_QWEN, is_composed=False),
    "qwen35": _Pre((_QWEN35,), is_composed=True),
    "olmo": _Pre(has_gpt2=True, is_composed=True),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2"), _Pre((_GPT4O,))),
    "tekken": _Pre((_TEKKEN,), adds_bos=True, ignores_merges=True),
    "deepseek-llm": _Pre(
        (
            r"[\r\n]",
            rf"\s?{_DEEPSEEK}+",
            r"\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
            r"\s+$",
            "[一-龥ࠀ-一가-\ud7ff]+",
            r"\p{N}+",
        )
    ),
    "deepseek-coder": _Pre((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-\ud7ff]+", _DIGITS)),
    "deepseek-v3": _Pre((r"\p{N}{1,3}", "[一-龥\u3040-ゟ゠-ヿ]+", _DEEPSEEK3)),
}
"""The pre-tokenizers by ``tokenizer.ggml.pre``."""


def tokenizer_spec(words: GgufVocabulary) -> Spec:
    """Returns the object of the ``tokenizer.json``. Raises ``BadModelFolder`` for an unknown kind of
    tokenizer or pre-tokenizer."""
    match words.data.text("tokenizer.ggml.model"):
        case "gpt2":
            return _byte_level(words)
        case "llama":
            return _sentence_piece(words)
        case kind:
            raise words.data.reject("tokenizer.ggml.model", f"is {kind!r}; only 'gpt2' and 'llama' are read")


def _byte_level(words: GgufVocabulary) -> Spec:
    name = words.data.text("tokenizer.ggml.pre", "gpt-2" if words.data.architecture == "gpt2" else None)
    if name not in PRE_TOKENIZERS:
        raise words.data.reject(
            "tokenizer.ggml.pre", f"is {name!r}; only {', '.join(PRE_TOKENIZERS)} are known"
        )
    pre = PRE_TOKENIZERS[name]
    splits = [
        {"type": "Split", "pattern": {"Regex": one}, "behavior": "Isolated", "invert": False}
        if isinstance(one, str)
        else one
        for one in pre.splits
    ]
    to_bytes = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": False,
        "use_regex": pre.has_gpt2,
    }
    merges = [merge.split(" ", 1) for merge in words.data.texts("tokenizer.ggml.merges")]
    if not merges:
        raise words.data.reject("tokenizer.ggml.merges", "is missing: the vocabulary has no merges")
    return _spec(
        words,
        normalizer={"type": "NFC"} if pre.is_composed else None,
        pre_tokenizer={"type": "Sequence", "pretokenizers": [*splits, to_bytes]},
        decoder=to_bytes | {"use_regex": True},
        model={"merges": merges, "ignore_merges": pre.ignores_merges},
        adds_bos=words.data.flag("tokenizer.ggml.add_bos_token", pre.adds_bos),
    )


def _sentence_piece(words: GgufVocabulary) -> Spec:
    """Returns SentencePiece's BPE. It merges the pair whose token has the highest score; of equal scores, the
    leftmost pair."""
    has_prefix = words.data.flag("tokenizer.ggml.add_space_prefix", True)
    to_marks = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    to_spaces = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
    strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    return _spec(
        words,
        normalizer={
            "type": "Sequence",
            "normalizers": [*([{"type": "Prepend", "prepend": "▁"}] if has_prefix else []), to_marks],
        },
        pre_tokenizer=None,
        decoder={
            "type": "Sequence",
            "decoders": [
                to_spaces,
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                *([strip] if has_prefix else []),
            ],
        },
        model={
            "merges": _merges_by_score(words),
            "unk_token": None if words.unk_id is None else words.tokens[words.unk_id],
            "fuse_unk": True,
            "byte_fallback": True,
        },
        adds_bos=words.data.flag("tokenizer.ggml.add_bos_token", True),
        strips=words.data.architecture in ("phi3", "phimoe"),
    )


def _merges_by_score(words: GgufVocabulary) -> list[tuple[str, str]]:
    scores = words.data.numbers("tokenizer.ggml.scores")
    if len(scores) != len(words.tokens):
        raise words.data.reject("tokenizer.ggml.scores", "must have a score for each token")
    plain = {text: i for i, text in enumerate(words.tokens) if words.types[i] == NORMAL}
    found: list[tuple[float, int, int, str, str]] = []
    for text, i in plain.items():
        for cut in range(1, len(text)):
            left, right = text[:cut], text[cut:]
            if left in plain and right in plain:
                found.append((-scores[i], plain[left], plain[right], left, right))
    found.sort()
    return [(left, right) for *_, left, right in found]


def _spec(
    words: GgufVocabulary,
    *,
    normalizer: Spec | None,
    pre_tokenizer: Spec | None,
    decoder: Spec,
    model: Spec,
    adds_bos: bool,
    strips: bool = False,
) -> Spec:
    """Returns the object with all fields. ``strips``: marks include the white space behind them, as Phi-3's
    do. Its files have no field for that: llama.cpp also decides it by the model."""
    named = set(words.named_tokens.values())
    added = [
        {
            "id": i,
            "content": words.tokens[i],
            "special": kind != USER_DEFINED or words.tokens[i] in named,
            "rstrip": strips and words.tokens[i] not in ("<unk>", "<s>", "<|endoftext|>"),
            **dict.fromkeys(("single_word", "lstrip", "normalized"), False),
        }
        for i, kind in enumerate(words.types)
        if kind in (UNKNOWN, CONTROL, USER_DEFINED)
    ]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": normalizer,
        "pre_tokenizer": pre_tokenizer,
        "post_processor": _around_texts(words, adds_bos=adds_bos),
        "decoder": decoder,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {text: i for i, text in enumerate(words.tokens)},
        }
        | model,
    }


def _around_texts(words: GgufVocabulary, *, adds_bos: bool) -> Spec | None:
    """Returns the step that adds tokens at the start and the end of a text, if the file specifies them. Only
    embedding models, which encode whole texts, have both."""
    adds_eos = words.data.flag("tokenizer.ggml.add_eos_token", False)
    if adds_bos and words.bos_id is None:
        raise words.data.reject("tokenizer.ggml.bos_token_id", "is missing, but each text starts with it")
    if adds_eos and words.eos_id is None:
        raise words.data.reject("tokenizer.ggml.eos_token_id", "is missing, but each text ends with it")
    ids = {"bos": words.bos_id if adds_bos else None, "eos": words.eos_id if adds_eos else None}
    special = {name: [] if i is None else [_special(words, i)] for name, i in ids.items()}
    known = {words.tokens[i]: i for i in ids.values() if i is not None}
    if not known:
        return None
    text = {"Sequence": {"id": "A", "type_id": 0}}
    return {
        "type": "TemplateProcessing",
        "single": [*special["bos"], text, *special["eos"]],
        "pair": [*special["bos"], text, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {name: {"id": name, "ids": [i], "tokens": [name]} for name, i in known.items()},
    }


def _special(words: GgufVocabulary, token_id: int) -> Spec:
    return {"SpecialToken": {"id": words.tokens[token_id], "type_id": 0}}
