"""Small embedding models with random weights, as folders of the hub have them, and the embeddings that
transformers computes of them, one text at a time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch
import transformers
from safetensors.torch import load_file, save_file
from support.small_tokenizers import TEXTS, byte_level, write_folder
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

VOCAB = 300
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 130,
}
QWEN3 = {"num_key_value_heads": 2, "head_dim": 16, "eos_token_id": 1, "pad_token_id": 0}


def write_embedding_model(
    folder: Path,
    kind: str,
    *,
    pooling: str | None,
    normalises: bool = True,
    dense: int = 0,
    prompts: dict[str, str] | None = None,
    max_tokens: int | None = None,
    architecture: str = "",
    **changes: Any,
) -> Path:
    """A folder with random weights. ``kind``: the config's model type. ``pooling``: the flag of the pooling;
    None: no modules.json. ``dense``: dimensions of a dense layer after the pooling (0: none)."""
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(len(kind))
    sizes = SHAPE | (QWEN3 if kind == "qwen3" else {}) | changes
    model = transformers.AutoModel.from_config(transformers.AutoConfig.for_model(kind, **sizes))
    with torch.no_grad():  # so that the texts' differences, and padding, show in all dimensions
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    model.save_pretrained(folder)
    if architecture:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"architectures": [architecture]}))
    if kind == "qwen3":
        spec = byte_level(("<|endoftext|>", "<|im_end|>"), vocab_size=VOCAB)
        spec["post_processor"] = _template("$A <|endoftext|>", {"<|endoftext|>": 0})
        write_folder(folder, spec, {"pad_token": "<|endoftext|>", "eos_token": "<|im_end|>"})
    else:
        spec = word_pieces() if kind == "bert" else unigram()
        write_folder(folder, spec, {"pad_token": spec["added_tokens"][0]["content"]})
    if pooling is not None:
        _write_modules(folder, pooling, normalises, dense, int(sizes["hidden_size"]))
    if prompts is not None:
        _write(folder / "config_sentence_transformers.json", {"prompts": prompts})
    if max_tokens is not None:
        _write(folder / "sentence_bert_config.json", {"max_seq_length": max_tokens, "do_lower_case": False})
    return folder


def _write_modules(folder: Path, pooling: str, normalises: bool, dense: int, hidden_size: int) -> None:
    kinds = ["Transformer", "Pooling", *(["Dense"] if dense else []), *(["Normalize"] if normalises else [])]
    paths = ["" if kind == "Transformer" else f"{n}_{kind}" for n, kind in enumerate(kinds)]
    _write(
        folder / "modules.json",
        [
            {"idx": n, "name": str(n), "path": path, "type": f"sentence_transformers.models.{kind}"}
            for n, (kind, path) in enumerate(zip(kinds, paths, strict=True))
        ],
    )
    _write(
        folder / "1_Pooling/config.json",
        {"word_embedding_dimension": hidden_size, f"pooling_mode_{pooling}": True},
    )
    if dense:
        activation = "torch.nn.modules.activation.Tanh"
        sizes = {"in_features": hidden_size, "out_features": dense, "bias": True}
        _write(folder / "2_Dense/config.json", sizes | {"activation_function": activation})
        weights = {"linear.weight": torch.randn(dense, hidden_size), "linear.bias": torch.randn(dense)}
        save_file(weights, folder / "2_Dense/model.safetensors")


def _write(file: Path, content: Any) -> None:
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps(content))


def word_pieces() -> dict[str, Any]:
    """BERT's kind of tokenizer, truncating and padding, as folders of sentence-transformers have it."""
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    tokenizer = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=VOCAB, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.post_processor = _processor("[CLS] $A [SEP]", {"[CLS]": 2, "[SEP]": 3})
    tokenizer.enable_truncation(16)
    tokenizer.enable_padding(length=16)
    return json.loads(tokenizer.to_str())


def unigram() -> dict[str, Any]:
    """XLM-RoBERTa's kind of tokenizer."""
    special = ["<s>", "<pad>", "</s>", "<unk>"]
    tokenizer = tokenizers.Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=VOCAB, special_tokens=special, unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.post_processor = _processor("<s> $A </s>", {"<s>": 0, "</s>": 2})
    return json.loads(tokenizer.to_str())


def _processor(single: str, ids: dict[str, int]) -> Any:
    return processors.TemplateProcessing(single=single, special_tokens=list(ids.items()))


def _template(single: str, ids: dict[str, int]) -> dict[str, Any]:
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.post_processor = _processor(single, ids)
    return json.loads(tokenizer.to_str())["post_processor"]


def expected_embeddings(folder: Path, ids: list[list[int]], pooling: str, **steps: Any) -> np.ndarray:
    """The result of sentence-transformers' modules on transformers' hidden states. ``steps``: ``dense`` and
    ``normalises`` of ``write_embedding_model``."""
    model = transformers.AutoModel.from_pretrained(folder).eval()
    rows = []
    with torch.no_grad():
        for one in ids:
            hidden = model(input_ids=torch.tensor([one])).last_hidden_state[0]
            match pooling:
                case "cls_token":
                    row = hidden[0]
                case "lasttoken":
                    row = hidden[-1]
                case "max_tokens":
                    row = hidden.max(dim=0).values
                case "mean_sqrt_len_tokens":
                    row = hidden.sum(dim=0) / len(one) ** 0.5
                case "weightedmean_tokens":
                    weights = torch.arange(1, len(one) + 1).unsqueeze(1)
                    row = (hidden * weights).sum(dim=0) / weights.sum()
                case _:
                    row = hidden.mean(dim=0)
            if steps.get("dense"):
                tensors = load_file(folder / "2_Dense/model.safetensors")
                row = torch.tanh(tensors["linear.weight"] @ row + tensors["linear.bias"])
            if steps.get("normalises", True):
                row = row / row.norm()
            rows.append(row.numpy())
    return np.stack(rows)


def expected_ids(folder: Path, text: str) -> list[int]:
    """The ids of the folder's tokenizer, with the special tokens around the text."""
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return list(tokenizer.encode(text).ids)
