"""The conversion of GGUF files: tiny ones written here, and the default model against transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file
from support.faults import has_param
from tokenizers import Tokenizer

from agentflow.engine.store.gguf_conversion import convert_gguf
from agentflow.engine.store.model_store import (
    KNOWN_MODELS,
)
from agentflow.errors import PullFailed
from agentflow.protocol.wire import DEFAULT_MODEL

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INNER = 64, 4, 2, 16, 96
TOKENS = ["<end>", "<start>", "a", "b", "Ġ", "1", "ab", "ĠĠ", "Ġa"]
MERGES = ["a b", "Ġ Ġ", "Ġ a"]
TEMPLATE = "{% for message in messages %}{{ message['content'] }}\r\n{% endfor %}é"


def _weights(num_layers: int, tied: bool) -> dict[str, NDArray[np.float32]]:
    random = np.random.default_rng(0)
    shapes = {"token_embd": (len(TOKENS), HIDDEN), "output_norm": (HIDDEN,)}
    if not tied:
        shapes["output"] = (len(TOKENS), HIDDEN)
    for layer in range(num_layers):
        shapes |= {
            f"blk.{layer}.attn_norm": (HIDDEN,),
            f"blk.{layer}.attn_q": (HEADS * HEAD_DIM, HIDDEN),
            f"blk.{layer}.attn_k": (KV_HEADS * HEAD_DIM, HIDDEN),
            f"blk.{layer}.attn_v": (KV_HEADS * HEAD_DIM, HIDDEN),
            f"blk.{layer}.attn_output": (HIDDEN, HEADS * HEAD_DIM),
            f"blk.{layer}.ffn_norm": (HIDDEN,),
            f"blk.{layer}.ffn_gate": (INNER, HIDDEN),
            f"blk.{layer}.ffn_up": (INNER, HIDDEN),
            f"blk.{layer}.ffn_down": (HIDDEN, INNER),
        }
    return {name: random.standard_normal(shape, dtype=np.float32) for name, shape in shapes.items()}


def _write_gguf(
    file: Path,
    weights: dict[str, NDArray[np.float32]],
    *,
    architecture: str = "llama",
    pre: str = "smollm",
    adds_bos: bool = False,
    without_template: bool = False,
) -> None:
    """A whole GGUF file: matrices in Q4_1 (their rows allow it), vectors in float32."""
    writer = gguf.GGUFWriter(file, architecture)
    writer.add_vocab_size(len(TOKENS))
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_block_count(sum(name.endswith("attn_q") for name in weights))
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_rope_freq_base(5000.0)
    writer.add_layer_norm_rms_eps(0.5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 3] + [1] * (len(TOKENS) - 2))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(0)
    writer.add_pad_token_id(0)
    writer.add_unk_token_id(0)
    writer.add_add_bos_token(adds_bos)
    if not without_template:
        writer.add_chat_template(TEMPLATE)
    for name, values in weights.items():
        kind = gguf.GGMLQuantizationType.Q4_1 if values.ndim == 2 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(f"{name}.weight", gguf.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _converted(tmp_path: Path, weights: dict[str, NDArray[np.float32]], **changes: Any) -> Path:
    _write_gguf(tmp_path / "tiny.gguf", weights, **changes)
    folder = tmp_path / "folder"
    folder.mkdir()
    convert_gguf(tmp_path / "tiny.gguf", folder, lambda done, total: None)
    return folder


def _q4_1_by_hand(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """Round a matrix to Q4_1 and back: 32 values share a float16 step and a float16 minimum."""
    blocks = values.reshape(-1, 32)
    minimum = blocks.min(axis=1, keepdims=True)
    step = (blocks.max(axis=1, keepdims=True) - minimum) / np.float32(15)
    levels = np.clip(np.trunc((blocks - minimum) / step + np.float32(0.5)), 0, 15)
    restored = levels * step.astype(np.float16).astype(np.float32) + minimum.astype(np.float16).astype(
        np.float32
    )
    result: NDArray[np.float32] = restored.astype(np.float32).reshape(values.shape)
    return result


def _rotary_rows_by_hand(weight: NDArray[np.float32], num_heads: int) -> NDArray[np.float32]:
    """Row ``2 i + half`` of each head in GGUF is row ``half * head_dim / 2 + i`` in the torch model."""
    result = np.empty_like(weight)
    for head in range(num_heads):
        for i in range(HEAD_DIM // 2):
            for half in range(2):
                result[head * HEAD_DIM + half * HEAD_DIM // 2 + i] = weight[head * HEAD_DIM + 2 * i + half]
    return result


def _assert_close(found: NDArray[np.float32], expected: NDArray[np.float32]) -> None:
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("tied", [True, False])
def test_each_tensor_is_dequantised_renamed_and_reordered(tmp_path: Path, tied: bool) -> None:
    weights = _weights(2, tied)
    folder = _converted(tmp_path, weights)
    found = load_file(folder / "model.safetensors")
    expected = {
        name: _q4_1_by_hand(values) if values.ndim == 2 else values for name, values in weights.items()
    }
    assert len(found) == len(expected)
    _assert_close(found["model.embed_tokens.weight"], expected["token_embd"])
    _assert_close(found["model.norm.weight"], expected["output_norm"])
    assert ("lm_head.weight" in found) is not tied
    assert json.loads((folder / "config.json").read_text())["tie_word_embeddings"] is tied
    for layer in range(2):
        block, ours = f"blk.{layer}", f"model.layers.{layer}"
        query = _rotary_rows_by_hand(expected[f"{block}.attn_q"], HEADS)
        key = _rotary_rows_by_hand(expected[f"{block}.attn_k"], KV_HEADS)
        _assert_close(found[f"{ours}.self_attn.q_proj.weight"], query)
        _assert_close(found[f"{ours}.self_attn.k_proj.weight"], key)
        for theirs, name in {
            "attn_v": "self_attn.v_proj",
            "attn_output": "self_attn.o_proj",
            "attn_norm": "input_layernorm",
            "ffn_norm": "post_attention_layernorm",
            "ffn_gate": "mlp.gate_proj",
            "ffn_up": "mlp.up_proj",
            "ffn_down": "mlp.down_proj",
        }.items():
            values = expected[f"{block}.{theirs}"]
            _assert_close(found[f"{ours}.{name}.weight"], values)


def test_the_progress_ends_at_the_size_of_the_weights(tmp_path: Path) -> None:
    _write_gguf(tmp_path / "tiny.gguf", _weights(1, tied=True))
    reports: list[tuple[int, int]] = []
    convert_gguf(tmp_path / "tiny.gguf", tmp_path, lambda done, total: reports.append((done, total)))
    assert reports == sorted(reports)
    assert len({total for _, total in reports}) == 1
    num_values = sum(values.size for values in load_file(tmp_path / "model.safetensors").values())
    assert reports[-1] == (4 * num_values, 4 * num_values)


def test_the_tokenizer_keeps_digits_apart_and_adds_nothing(tmp_path: Path) -> None:
    folder = _converted(tmp_path, _weights(1, tied=True))
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.encode("ab a  11").tokens == ["ab", "Ġa", "ĠĠ", "1", "1"]
    assert tokenizer.encode("<start>ab<end>").ids == [1, 6, 0]
    assert tokenizer.decode([1, 8, 7, 5]) == " a  1"
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    assert (settings["bos_token"], settings["eos_token"], settings["pad_token"]) == (
        "<start>",
        "<end>",
        "<end>",
    )
    assert (folder / "chat_template.jinja").read_bytes() == TEMPLATE.encode()


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"architecture": "gemma"}, "general.architecture"),
        ({"pre": "gpt-2"}, "tokenizer.ggml.pre"),
        ({"adds_bos": True}, "tokenizer.ggml.add_bos_token"),
        ({"without_template": True}, "tokenizer.chat_template"),
    ],
)
def test_unknown_gguf_settings_are_rejected(tmp_path: Path, changes: dict[str, Any], param: str) -> None:
    with pytest.raises(PullFailed, check=has_param(param)):
        _converted(tmp_path, _weights(1, tied=True), **changes)


def test_an_unknown_tensor_is_named(tmp_path: Path) -> None:
    extra = {"blk.0.ffn_gate_inp": np.zeros((1, 32), np.float32)}
    with pytest.raises(PullFailed, check=has_param("blk.0.ffn_gate_inp.weight")):
        _converted(tmp_path, _weights(1, tied=True) | extra)


@pytest.mark.parametrize("content", [b"", b"not a GGUF file at all", b"GGUF\x03\0\0\0"])
def test_a_file_that_is_no_gguf_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "broken.gguf").write_bytes(content)
    with pytest.raises(PullFailed, check=has_param("broken.gguf")):
        convert_gguf(tmp_path / "broken.gguf", tmp_path, lambda done, total: None)


# The default model


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The GGUF file that the default model is converted from."""
    source = KNOWN_MODELS[DEFAULT_MODEL]
    return source.fetch(source, tmp_path_factory.mktemp("fetch"), lambda done, total: None)


@pytest.mark.model
@pytest.mark.full
def test_the_pulled_model_has_the_tensors_and_config_of_transformers(
    model_folder: Path, gguf_file: Path
) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, GgufConfig

    dequantised = GgufConfig(dequantize=True)
    theirs = AutoModelForCausalLM.from_pretrained(
        gguf_file.parent, gguf_file=gguf_file.name, quantization_config=dequantised, dtype=torch.float32
    )
    expected = {
        name: values.numpy() for name, values in theirs.state_dict().items() if name != "lm_head.weight"
    }
    found = load_file(model_folder / "model.safetensors")
    assert len(found) == 272
    assert found.keys() == expected.keys()
    assert all(np.array_equal(found[name], expected[name]) for name in expected)
    ours = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    assert ours.lm_head.weight is ours.model.embed_tokens.weight
    of_no_effect = {"_name_or_path", "_model_name_or_path", "unk_token_id", "architectures"}
    config, their_config = AutoConfig.from_pretrained(model_folder).to_dict(), theirs.config.to_dict()
    assert {key: value for key, value in config.items() if key not in of_no_effect} == {
        key: value for key, value in their_config.items() if key not in of_no_effect
    }


@pytest.mark.model
def test_the_pulled_tokenizer_is_the_models_own(model_folder: Path, gguf_file: Path) -> None:
    from transformers import AutoTokenizer

    ours = AutoTokenizer.from_pretrained(model_folder)
    theirs = AutoTokenizer.from_pretrained(gguf_file.parent, gguf_file=gguf_file.name)
    assert ours.get_vocab() == theirs.get_vocab()
    assert ours.special_tokens_map == theirs.special_tokens_map
    assert ours.all_special_ids == theirs.all_special_ids
    assert ours.added_tokens_decoder == theirs.added_tokens_decoder
    assert (ours.bos_token_id, ours.eos_token_id, ours.pad_token_id, ours.unk_token_id) == (1, 2, 2, 0)
    assert ours.chat_template == theirs.chat_template
    for text in [
        "",
        "Hello, world!",
        "naïve  café\n\n\tfunc(x) — 日本語 🙂",
        "<|im_start|>user\nhi<|im_end|>",
    ]:
        assert ours(text)["input_ids"] == theirs(text)["input_ids"]
        assert ours.decode(ours(text)["input_ids"]) == text
    # Where a run of spaces meets a digit, transformers' reader of GGUF differs from the model's own rule.
    assert ours.tokenize("    42") == ["ĠĠĠĠ", "4", "2"]
    rendered = ours.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False)
    assert isinstance(rendered, str)
    assert rendered.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert rendered.endswith("<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n")
