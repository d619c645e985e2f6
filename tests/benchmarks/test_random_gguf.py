"""The GGUF file with random weights that ``benchmarks servers`` gives to llama.cpp's server and to ours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType
from support.engine.runner_driver import Driver
from transformers import Qwen3Config, Qwen3ForCausalLM

from agentflow.engine.models.torch_runner import TorchRunner
from agentflow.engine.store.gguf.container import read_container
from agentflow.engine.text.tokenizer import Tokenizer
from benchmarks.peers.random_gguf import Shape, write_random_gguf

SMALL = Shape(
    hidden_size=256,
    intermediate_size=512,
    num_layers=9,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    vocab_size=50_000,
    max_context=512,
)


def test_the_model_is_that_of_transformers_with_these_weights(tmp_path: Path) -> None:
    write_random_gguf(file := tmp_path / "model.gguf", SMALL)
    tensors = read_container(file).tensors
    layers = range(SMALL.num_layers)
    kinds = [tensors[f"blk.{layer}.ffn_down.weight"].type_name for layer in layers]
    assert kinds == ["Q6_K" if layer in (0, 3, 6, 7, 8) else "Q4_K" for layer in layers]
    made: Any = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=SMALL.vocab_size,
            hidden_size=SMALL.hidden_size,
            intermediate_size=SMALL.intermediate_size,
            num_hidden_layers=SMALL.num_layers,
            num_attention_heads=SMALL.num_heads,
            num_key_value_heads=SMALL.num_kv_heads,
            head_dim=SMALL.head_dim,
            max_position_embeddings=SMALL.max_context,
            rope_parameters={"rope_type": "default", "rope_theta": SMALL.rope_base},
            rms_norm_eps=SMALL.norm_eps,
            tie_word_embeddings=True,
        )
    )
    model = made.eval()
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, SMALL.num_layers)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            stored = tensors[f"{names.get_name(name.removesuffix('.weight'))}.weight"]
            values = gguf.dequantize(stored.rows, GGMLQuantizationType[stored.type_name])
            parameter.copy_(torch.tensor(values.reshape(stored.shape)))
    runner = TorchRunner(file, num_slots=200, device="cpu", dtype="float32")
    tokens = Tokenizer.from_folder(file).encode("A small step for a large model, and so on. " * 4)
    driver = Driver(runner)
    walker = driver.add(tokens)
    rows = np.arange(len(tokens) - 1)
    targets = np.array(tokens[1:])
    output = driver.step([(walker, len(rows))], rows=rows, target_ids=targets, needs_logprobs=True)
    driver.generate([walker], 6)
    with torch.inference_mode():
        logits = model(torch.tensor([walker.tokens])).logits[0]
    expected = torch.log_softmax(logits, -1)[torch.from_numpy(rows), torch.from_numpy(targets)]
    assert output.logprobs is not None
    np.testing.assert_allclose(output.logprobs, expected, atol=1e-4 * float(logits.abs().max()), rtol=0)
    assert walker.generated == logits[len(tokens) - 1 : -1].argmax(-1).tolist()
