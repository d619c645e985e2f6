"""A small Llama with random weights, and a tokenizer and a chat template, as files of a model folder."""

from __future__ import annotations

import json
from pathlib import Path

from support.chat_template_shapes import CHATML
from support.small_tokenizers import byte_level, write_folder

VOCAB = 300
CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "eos_token_id": 1,
}


def write_random_model(folder: Path, *, shard_size: str = "1GB", **changes: object) -> Path:
    """Writes the model with transformers, in files of at most ``shard_size``. ``changes``: to its config."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    values = CONFIG | changes
    config = LlamaConfig(**{key: value for key, value in values.items() if key != "architectures"})
    LlamaForCausalLM(config).save_pretrained(folder, max_shard_size=shard_size)
    (folder / "config.json").write_text(json.dumps(values))
    special = ("<s>", "</s>", "<|im_start|>", "<|im_end|>")
    write_folder(folder, byte_level(special, vocab_size=VOCAB), {"eos_token": "</s>"}, CHATML)
    return folder
