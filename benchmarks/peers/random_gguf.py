"""A GGUF file of Qwen3-0.6B's shape with random weights in Q4_K_M, for machines without the real file.

Each matrix has the type that llama.cpp's ``llama-quantize`` chooses for Q4_K_M (``llama-quant.cpp``): Q4_K;
Q6_K for the embedding, which is the head too, and for values and the MLP's last product in about half of the
layers. The blocks are created in these types, so nothing is converted. The tokenizer is another file's, with
tokens added up to the size of the vocabulary.

To keep a file: ``python -m benchmarks.peers.random_gguf qwen3-0.6b-q4_k_m.gguf``.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter
from numpy.typing import NDArray

from agentflow.engine.store.gguf.container import TextArray, read_container
from agentflow.engine.store.gguf.file import find_gguf
from agentflow.engine.store.gguf.vocabulary import NORMAL
from agentflow.engine.store.model_store import resolve_model

TOKENIZER = "smollm2-135m"
BLOCK = 256
"""The values of a block of either type."""


@dataclass(frozen=True)
class Shape:
    """The sizes of a Qwen3 model."""

    hidden_size: int = 1_024
    intermediate_size: int = 3_072
    num_layers: int = 28
    num_heads: int = 16
    num_kv_heads: int = 8
    head_dim: int = 128
    vocab_size: int = 151_936
    max_context: int = 40_960
    rope_base: float = 1e6
    norm_eps: float = 1e-6


QWEN3_600M = Shape()


def write_random_gguf(file: Path, shape: Shape = QWEN3_600M, *, tokenizer: Path | None = None) -> None:
    """Writes a model with random weights; the same file each time.

    Args:
        file: the path of the file.
        shape: the shape of the model. Matrices must have rows of whole blocks.
        tokenizer: the GGUF file with the tokenizer; None: the default model's.
    """
    writer = GGUFWriter(file, "qwen3")
    writer.add_name("random")
    writer.add_vocab_size(shape.vocab_size)
    writer.add_context_length(shape.max_context)
    writer.add_embedding_length(shape.hidden_size)
    writer.add_block_count(shape.num_layers)
    writer.add_feed_forward_length(shape.intermediate_size)
    writer.add_head_count(shape.num_heads)
    writer.add_head_count_kv(shape.num_kv_heads)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_rope_freq_base(shape.rope_base)
    writer.add_layer_norm_rms_eps(shape.norm_eps)
    for key, value in _tokenizer(tokenizer or _default_file(), shape.vocab_size):
        _ADD[type(value)](writer, key, value)
    rng = np.random.default_rng(0)
    for name, size in _norms(shape):
        writer.add_tensor(f"{name}.weight", np.ones(size, np.float32))
    for name, kind, rows, columns in _matrices(shape):
        blocks = q6_k(rng, rows, columns) if kind == "Q6_K" else q4_k(rng, rows, columns)
        writer.add_tensor(f"{name}.weight", blocks, raw_dtype=GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def q4_k(rng: np.random.Generator, num_out: int, num_in: int) -> NDArray[np.uint8]:
    """Returns a matrix in blocks of the type Q4_K, with a standard deviation of 2 / sqrt(num_in).

    A block has a scale and a minimum in float16, eight scales and eight minimums of 6 bits in 12 bytes, and
    codes of 4 bits. The minimums are 7.5 steps, so that values are positive and negative alike.
    """
    blocks = rng.integers(0, 256, (num_out, num_in // BLOCK, 144), dtype=np.uint8)
    scale = 2.0 * num_in**-0.5 / (4.6 * 42)  # of the codes, and of the scales of 6 bits
    blocks[..., :4] = np.array([scale, 7.5 * scale], np.float16).view(np.uint8)
    scales = rng.integers(16, 64, (*blocks.shape[:2], 8), dtype=np.uint8)
    low, high = scales[..., :4], scales[..., 4:]
    blocks[..., 4:8] = blocks[..., 8:12] = low | (high >> 4 << 6)
    blocks[..., 12:16] = (high & 15) | (high << 4)
    return blocks.reshape(num_out, -1)


def q6_k(rng: np.random.Generator, num_out: int, num_in: int) -> NDArray[np.uint8]:
    """Returns a matrix in blocks of the type Q6_K, with a standard deviation of 2 / sqrt(num_in).

    A block has codes of 6 bits, sixteen scales of a byte with a sign, and a scale in float16.
    """
    blocks = rng.integers(0, 256, (num_out, num_in // BLOCK, 210), dtype=np.uint8)
    scale = 2.0 * num_in**-0.5 / (18.5 * 74)  # of the codes, and of the scales of a byte
    blocks[..., 208:] = np.array([scale], np.float16).view(np.uint8)
    return blocks.reshape(num_out, -1)


def _norms(shape: Shape) -> Iterator[tuple[str, int]]:
    yield "output_norm", shape.hidden_size
    for layer in range(shape.num_layers):
        for name in ("attn_norm", "ffn_norm"):
            yield f"blk.{layer}.{name}", shape.hidden_size
        for name in ("attn_q_norm", "attn_k_norm"):
            yield f"blk.{layer}.{name}", shape.head_dim


def _matrices(shape: Shape) -> Iterator[tuple[str, str, int, int]]:
    """Yields each matrix: its name, its type, its rows and its columns."""
    hidden, inner = shape.hidden_size, shape.intermediate_size
    queries, keys = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    yield "token_embd", "Q6_K", shape.vocab_size, hidden
    for layer in range(shape.num_layers):
        often_larger = "Q6_K" if _has_more_bits(layer, shape.num_layers) else "Q4_K"
        for name, kind, rows, columns in (
            ("attn_q", "Q4_K", queries, hidden),
            ("attn_k", "Q4_K", keys, hidden),
            ("attn_v", often_larger, keys, hidden),
            ("attn_output", "Q4_K", hidden, queries),
            ("ffn_gate", "Q4_K", inner, hidden),
            ("ffn_up", "Q4_K", inner, hidden),
            ("ffn_down", often_larger, hidden, inner),
        ):
            yield f"blk.{layer}.{name}", kind, rows, columns


def _has_more_bits(layer: int, num_layers: int) -> bool:
    eighth = num_layers // 8
    return layer < eighth or layer >= 7 * num_layers // 8 or (layer - eighth) % 3 == 2


def _default_file() -> Path:
    found = find_gguf(resolve_model(TOKENIZER))
    if found is None:
        raise SystemExit(f"{TOKENIZER} has no GGUF file: give a file that has a tokenizer")
    return found


def _tokenizer(file: Path, vocab_size: int) -> Iterator[tuple[str, Any]]:
    """Yields the metadata of a tokenizer, with unused tokens up to ``vocab_size``."""
    for key, value in read_container(file).metadata.items():
        if not key.startswith("tokenizer.ggml."):
            continue
        values = list(value) if isinstance(value, TextArray | np.ndarray) else value
        match key.removeprefix("tokenizer.ggml."):
            case "tokens":
                if len(values) > vocab_size:
                    raise SystemExit(f"{file.name} has {len(values):,} tokens, more than {vocab_size:,}")
                values += [f"[PAD{i}]" for i in range(len(values), vocab_size)]
            case "token_type":
                values = [int(kind) for kind in values]
                values += [NORMAL] * (vocab_size - len(values))
        yield key, values


_ADD: dict[type, Any] = {
    bool: GGUFWriter.add_bool,
    int: GGUFWriter.add_uint32,
    str: GGUFWriter.add_string,
    list: GGUFWriter.add_array,
}


if __name__ == "__main__":
    write_random_gguf(Path(sys.argv[1]))
