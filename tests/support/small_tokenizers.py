"""Small tokenizers of both families, made on the spot, as the object of a ``tokenizer.json``."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

Spec = dict[str, Any]

TEXTS = [
    "The quick brown fox jumps over the lazy dog, and the dog does not mind at all.",
    "An answer is the answer to a question; the question is what the answer answers.",
    "Let me think about this. The user asks: what is the capital of France?",
    "Größe, naïve, façade, коза, 日本語のテキスト, हिन्दी, العربية",
] * 4


def added_token(token_id: int, content: str, special: bool = True) -> Spec:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": token_id, "content": content, "special": special, **flags}


def byte_level(
    special: Sequence[str] = ("<s>", "</s>"), plain_added: Iterable[str] = (), vocab_size: int = 600
) -> Spec:
    """GPT-2's alphabet; ``special`` has the first ids, ``plain_added`` the last ones."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(special),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    spec: Spec = json.loads(tokenizer.to_str())
    spec["added_tokens"] += [
        added_token(len(spec["model"]["vocab"]) + n, text, special=False)
        for n, text in enumerate(plain_added)
    ]
    return spec


def byte_level_of(words: Iterable[str]) -> Spec:
    """GPT-2's alphabet in which just ``words`` (and their prefixes) are merged."""
    vocab = {char: n for n, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    merges: list[list[str]] = []
    for word in words:
        written = as_bytes.pre_tokenize_str(word)[0][0]
        for n in range(1, len(written)):
            if written[: n + 1] not in vocab:
                vocab[written[: n + 1]] = len(vocab)
                merges.append([written[:n], written[n]])
    spec = byte_level(special=())
    spec["pre_tokenizer"] = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": False,
    }
    spec["model"].update(vocab=vocab, merges=merges)
    return spec


def sentencepiece(prepend: str = "every", extra: Sequence[str] = (), vocab_size: int = 420) -> Spec:
    """Byte fallback and ``▁``. ``prepend``: as ``Tokenizer.space_prefix``, made the way that models of each
    kind have it. A bos is put in front of a text."""
    special = ["<unk>", "<s>", "</s>", *extra]
    as_bytes = [f"<0x{byte:02X}>" for byte in range(256)]
    tokenizer = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    replace = normalizers.Replace(" ", "▁")
    parts: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if prepend == "every":
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), replace])
    elif prepend == "first":
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    else:
        tokenizer.normalizer = replace
    if prepend != "none":
        parts.append(decoders.Strip(" ", 1, 0))
    tokenizer.decoder = decoders.Sequence(parts)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size + len(extra), special_tokens=[*special, *as_bytes], show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS[:3], trainer)
    spec: Spec = json.loads(tokenizer.to_str())
    spec["added_tokens"] = [token for token in spec["added_tokens"] if token["content"] in special]
    return spec


def library(spec: Spec) -> tokenizers.Tokenizer:
    """The tokenizers library's own object for ``spec``: the reference."""
    return tokenizers.Tokenizer.from_str(json.dumps(spec))


def write_folder(folder: Path, spec: Spec, config: Spec | None = None, template: str | None = None) -> Path:
    """A model folder with only the tokenizer and the chat template."""
    (folder / "tokenizer.json").write_text(json.dumps(spec), encoding="utf-8")
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    if template is not None:
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    return folder
