"""How much memory it takes to load a model: little more than its weights, for any stored type."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from support.engine.gguf_models import write_gguf
from support.process_template import start_python

from agentflow.engine.models.families.registry import read_config
from agentflow.engine.models.forward.decoder import Decoder
from agentflow.engine.models.weights.loader import WeightFormat, load_model
from agentflow.kernels.decoder_weights import Mlp
from agentflow.kernels.inputs import LinearWeight
from agentflow.kernels.page_advice import BLOCK_BYTES
from agentflow.kernels.platforms import kernels_for

pytestmark = pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peaks are Linux's to say")

VOCAB, HIDDEN, INNER, HEADS, HEAD_DIM, LAYERS = 16_000, 512, 1536, 8, 64, 8
# Besides the weights and one tensor: freed memory that the allocator keeps, and code on its first use.
SLACK_BYTES = 8 << 20


def write_model(folder: Path, dtype: torch.dtype, *, is_tied: bool) -> None:
    """A Llama of 27 million parameters, and 8 or 16 million in the vocabulary's matrices. None is drawn at
    random, which takes longer than to load them."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCAB,
        "max_position_embeddings": 256,
        "num_hidden_layers": LAYERS,
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "head_dim": HEAD_DIM,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "tie_word_embeddings": is_tied,
        "eos_token_id": 0,
    }
    (folder / "config.json").write_text(json.dumps(config))
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCAB, HIDDEN),
        "model.norm.weight": (HIDDEN,),
    }
    if not is_tied:
        shapes["lm_head.weight"] = (VOCAB, HIDDEN)
    for i in range(LAYERS):
        layer = f"model.layers.{i}."
        norms = ("input_layernorm", "post_attention_layernorm")
        shapes |= {f"{layer}{name}.weight": (HIDDEN,) for name in norms}
        shapes |= {f"{layer}self_attn.{name}_proj.weight": (HIDDEN, HIDDEN) for name in "qkvo"}
        shapes |= {f"{layer}mlp.{name}_proj.weight": (INNER, HIDDEN) for name in ("gate", "up")}
        shapes[f"{layer}mlp.down_proj.weight"] = (HIDDEN, INNER)
    tensors = {name: torch.full(shape, 0.5, dtype=dtype) for name, shape in shapes.items()}
    save_file(tensors, folder / "model.safetensors")


LoadingPeak = Callable[[str, Path, str], tuple[int, int, int]]


@pytest.fixture(scope="module")
def loading_peak() -> Iterator[LoadingPeak]:
    """The output of ``loading_peak.py`` for a model, with kernels of a name, in a type."""
    program, pipe = Path(__file__).with_name("loading_peak.py"), subprocess.PIPE
    with start_python(program, stdin=pipe, stdout=pipe, text=True) as process:

        def measure(kernels: str, path: Path, dtype: str) -> tuple[int, int, int]:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(f"{kernels} {dtype} {path}\n")
            process.stdin.flush()
            peak, end, weights = map(int, process.stdout.readline().split())
            return peak, end, weights

        yield measure


@pytest.mark.parametrize(
    ("kernels", "stored", "loaded", "is_tied"),
    [
        ("native", "float32", "bfloat16", True),
        ("native", "bfloat16", "bfloat16", False),
        ("torch", "float32", "float32", False),
    ],
)
def test_loading_peaks_at_the_weights_and_one_tensor(
    kernels: str, stored: str, loaded: str, is_tied: bool, tmp_path: Path, loading_peak: LoadingPeak
) -> None:
    write_model(tmp_path, getattr(torch, stored), is_tied=is_tied)
    peak, end, weights = loading_peak(kernels, tmp_path, loaded)
    largest = VOCAB * HIDDEN * getattr(torch, loaded).itemsize
    assert end <= weights + SLACK_BYTES
    assert peak <= weights + largest + SLACK_BYTES


def test_loading_quantised_weights_releases_the_file_that_they_come_from(
    tmp_path: Path, loading_peak: LoadingPeak
) -> None:
    write_model(tmp_path, torch.float32, is_tied=True)
    write_gguf(tmp_path, tmp_path / "model.gguf", "Q8_0")
    peak, end, weights = loading_peak("native", tmp_path / "model.gguf", "auto")
    assert weights < 1.1 * (tmp_path / "model.gguf").stat().st_size
    assert end <= weights + SLACK_BYTES
    assert peak <= weights + 2 * SLACK_BYTES < 1.6 * weights


@pytest.mark.skipif(Path("/sys/devices/system/node/node1").exists(), reason="there are several NUMA nodes")
def test_weights_share_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENTFLOW_KERNELS", "native")
    write_model(tmp_path, torch.bfloat16, is_tied=True)
    config, kernels, device = read_config(tmp_path), kernels_for(torch.device("cpu")), torch.device("cpu")
    weights = WeightFormat(torch.bfloat16)
    model = load_model(tmp_path, config, weights=weights, device=device, kernels=kernels).model
    assert isinstance(model, Decoder)
    packed: list[torch.Tensor] = []
    for layer in model.weights.layers:
        assert isinstance(layer.qkv, LinearWeight)
        assert isinstance(layer.mlp, Mlp)
        for weight in (layer.qkv, layer.output, layer.mlp.gate_up, layer.mlp.down):
            assert weight.packed is not None
            packed.append(weight.packed)
    num_bytes = sum(panels.nbytes for panels in packed)
    blocks = {panels.untyped_storage().data_ptr() for panels in packed}
    assert len(blocks) <= num_bytes // BLOCK_BYTES + 2
