"""How models share memory: never more than there is, and by the rule that the module states."""

from __future__ import annotations

import json
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.faults import has_param

from agentflow.engine.models.memory_need import (
    MIN_KV_TOKENS,
    PROCESS_BYTES,
    WANTED_KV_TOKENS,
    MemoryNeed,
    divide_memory,
    fitting_kv_tokens,
    kv_bytes_per_token,
    memory_need,
)
from agentflow.errors import BadArgument, BadModelFolder

NEEDS = st.lists(
    st.builds(
        MemoryNeed,
        st.just(""),
        st.integers(0, 10**10),
        st.integers(1, 10**6),
        st.one_of(st.none(), st.integers(1, 10**6)),
    ),
    min_size=1,
    max_size=5,
).map(lambda needs: [MemoryNeed(str(n), *list_of(need)[1:]) for n, need in enumerate(needs)])


def list_of(need: MemoryNeed) -> list:
    return [need.name, need.weight_bytes, need.kv_bytes_per_token, need.kv_tokens]


def fixed_bytes(needs: list[MemoryNeed]) -> int:
    return sum(
        need.weight_bytes + PROCESS_BYTES + (need.kv_tokens or 0) * need.kv_bytes_per_token for need in needs
    )


@given(NEEDS, st.integers(0, 10**11))
def test_the_parts_fit_into_the_budget(needs, budget):
    least = fixed_bytes(needs) + sum(
        MIN_KV_TOKENS * need.kv_bytes_per_token for need in needs if need.kv_tokens is None
    )
    if least > budget:
        with pytest.raises(BadArgument):
            divide_memory(needs, budget)
        return
    shares = divide_memory(needs, budget)
    assert [*shares] == [need.name for need in needs]
    used = sum(shares[need.name] * need.kv_bytes_per_token for need in needs)
    used += sum(need.weight_bytes + PROCESS_BYTES for need in needs)
    assert used <= budget
    for need in needs:
        if need.kv_tokens is not None:
            assert shares[need.name] == need.kv_tokens
        else:
            assert MIN_KV_TOKENS <= shares[need.name] <= WANTED_KV_TOKENS


@given(NEEDS, st.integers(0, 10**11))
def test_pools_without_a_size_get_equal_parts_unless_they_want_less(needs, budget):
    try:
        shares = divide_memory(needs, budget)
    except BadArgument:
        return
    open_needs = [need for need in needs if need.kv_tokens is None]
    parts = {need.name: shares[need.name] * need.kv_bytes_per_token for need in open_needs}
    squeezed = [need for need in open_needs if MIN_KV_TOKENS < shares[need.name] < WANTED_KV_TOKENS]
    for one in squeezed:
        for other in squeezed:  # the same number of bytes, but for one token
            difference = abs(parts[one.name] - parts[other.name])
            assert difference <= 2 * len(needs) * max(one.kv_bytes_per_token, other.kv_bytes_per_token)
    if squeezed:  # no memory is left that a model would have used
        left = budget - fixed_bytes(needs) - sum(parts.values())
        assert left <= sum(need.kv_bytes_per_token for need in open_needs)


def test_a_model_that_does_not_fit_is_named_with_what_it_needs():
    needs = [MemoryNeed("small", 10**9, 20_000), MemoryNeed("large", 14 * 10**9, 100_000, 50_000)]
    with pytest.raises(BadArgument) as caught:
        divide_memory(needs, 8 * 10**9)
    message = str(caught.value)
    assert "into 8.00 GB" in message
    assert "small 1.00 GB of weights and 0.02 GB for 1,024 tokens" in message
    assert "large 14.00 GB of weights and 5.00 GB for 50,000 tokens" in message


def test_f42k_large_vocabularies_need_more_for_the_work():
    """Measured with Gemma's 262,144 tokens: 0.6 GB in addition to weights, KV and the logits of 256 rows."""
    small, large = (MemoryNeed("m", 10**9, 1, None, vocabulary) for vocabulary in (49_152, 262_144))
    assert small.fixed_bytes == 10**9 + PROCESS_BYTES
    assert large.fixed_bytes - 10**9 > 0.58e9 + 0.9 * 256 * 262_144 * 4
    assert divide_memory([large], large.fixed_bytes + 5_000) == {"m": 5_000}
    with pytest.raises(BadArgument):
        divide_memory([large], small.fixed_bytes + 5_000)


def test_weights_are_counted_in_the_headers_of_their_files(tmp_path):
    config = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 32}
    (tmp_path / "config.json").write_text(json.dumps(config))
    for number, shape in enumerate(([3, 5], [7])):
        header = json.dumps({"__metadata__": {}, "w": {"dtype": "F32", "shape": shape}}).encode()
        data = struct.pack("<Q", len(header)) + header
        (tmp_path / f"model-{number}.safetensors").write_bytes(data)
    assert memory_need("m", tmp_path, "bfloat16", None) == MemoryNeed("m", 22 * 2, 2 * 2 * 2 * 8 * 2, None)
    assert memory_need("m", tmp_path, "float32", 7) == MemoryNeed("m", 22 * 4, 2 * 2 * 2 * 8 * 4, 7)
    assert memory_need("m", tmp_path, "float16", None, on_gpu=True).weight_bytes == 22 * 2
    assert memory_need("m", tmp_path, "float16", None).weight_bytes == 22 * 4
    (tmp_path / "model-0.safetensors").write_bytes(b"short")
    with pytest.raises(BadModelFolder, check=has_param("model-0.safetensors")):
        memory_need("m", tmp_path, "bfloat16", None)


def test_a_pool_on_a_gpu_takes_what_the_weights_leave(tmp_path):
    config = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 32}
    (tmp_path / "config.json").write_text(json.dumps(config))
    need = memory_need("m", tmp_path, "bfloat16", None, on_gpu=True)
    free = need.fixed_bytes + 10**9
    assert fitting_kv_tokens(need, free) * need.kv_bytes_per_token > 0.8e9
    assert divide_memory([need], free)["m"] * need.kv_bytes_per_token == pytest.approx(1e9, rel=1e-3)
    on_host = memory_need("m", tmp_path, "bfloat16", None)
    assert fitting_kv_tokens(on_host, free) == divide_memory([on_host], free)["m"] == WANTED_KV_TOKENS


@pytest.mark.parametrize(("kv_heads", "ranks", "copies"), [(4, 2, 1), (2, 4, 2), (1, 2, 2)])
def test_the_processes_of_a_divided_model(kv_heads: int, ranks: int, copies: int, tmp_path: Path) -> None:
    """On the host, all of them work and hold KV, some of it several times. On GPUs, each has one."""
    config = {
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": kv_heads,
        "hidden_size": 32,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    alone, divided = (memory_need("m", tmp_path, "bfloat16", None, ranks=n) for n in (1, ranks))
    assert divided.fixed_bytes - alone.fixed_bytes == (ranks - 1) * PROCESS_BYTES
    assert divided.kv_bytes_per_token == copies * alone.kv_bytes_per_token
    on_gpu = memory_need("m", tmp_path, "bfloat16", None, ranks=ranks, on_gpu=True)
    assert on_gpu.kv_bytes_per_token * ranks == divided.kv_bytes_per_token
    assert on_gpu.fixed_bytes - PROCESS_BYTES == (alone.fixed_bytes - PROCESS_BYTES) // ranks


@given(NEEDS, st.integers(0, 10**11))
def test_the_pool_of_a_single_model_fits(needs, free_bytes):
    need = needs[0]
    least = fixed_bytes([need]) + (MIN_KV_TOKENS * need.kv_bytes_per_token if need.kv_tokens is None else 0)
    if least > free_bytes:
        with pytest.raises(BadArgument, check=has_param("kv_tokens")):
            fitting_kv_tokens(need, free_bytes)
        return
    kv_tokens = fitting_kv_tokens(need, free_bytes)
    assert fixed_bytes([replace(need, kv_tokens=kv_tokens)]) <= free_bytes
    if need.kv_tokens is not None:
        assert kv_tokens == need.kv_tokens
    elif kv_tokens > MIN_KV_TOKENS:
        assert kv_tokens <= WANTED_KV_TOKENS
        assert kv_tokens * need.kv_bytes_per_token <= free_bytes / 2


def test_a_config_with_the_names_of_gpt2_has_a_size():
    config = {"n_layer": 3, "n_head": 4, "n_embd": 64}
    assert kv_bytes_per_token(config, 2) == 2 * 3 * 64 * 2
    with pytest.raises(BadModelFolder, check=has_param("num_hidden_layers")):
        kv_bytes_per_token({"n_head": 4, "n_embd": 64}, 2)


@pytest.mark.parametrize(
    ("changed", "param"),
    [
        ({"hidden_size": None}, "hidden_size"),
        ({"hidden_size": "wide"}, "hidden_size"),
        ({"num_attention_heads": 0}, "num_attention_heads"),
        ({"num_hidden_layers": -1}, "num_hidden_layers"),
        ({"quantization_config": {"quant_method": "hqq"}}, "quantization_config"),
    ],
)
def test_a_config_without_a_size_is_rejected_with_its_folder(
    changed: dict[str, Any], param: str, tmp_path: Path
):
    config = {"num_hidden_layers": 3, "num_attention_heads": 4, "hidden_size": 64} | changed
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(BadModelFolder, check=has_param(param)) as caught:
        memory_need("", tmp_path, "auto", None)
    assert str(tmp_path) in str(caught.value)
