"""Adapters (LoRA) on random models of several architectures, against PEFT's merged weights; several adapters
and the model itself in each batch."""

from __future__ import annotations

import gc
import math
import os
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.engine.adapters import merged_logits, write_adapter, write_plain_adapter
from support.engine.device import DEVICE
from support.engine.family_models import IN_BLOCKS, save_model
from support.engine.gguf_models import round_weights, write_gguf
from support.engine.runner_driver import Driver, Walker
from support.engine.vision_models import saved_vision_model
from support.faults import has_param

from agentflow.engine.models import lora
from agentflow.engine.models.config import DecoderConfig
from agentflow.engine.models.families.registry import FAMILIES
from agentflow.engine.models.torch_runner import TorchRunner
from agentflow.engine.runner import AdapterInfo
from agentflow.errors import BadArgument, BadModelFolder

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning"),  # PEFT's own
]

ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
# Three adapters for each model, at least one of which does not change all projections.
ADAPTERS: dict[str, list[dict[str, Any]]] = {
    "llama": [{"target_modules": ALL}, {"target_modules": ["v_proj", "up_proj"]}, {"target_modules": ALL}],
    "qwen3": [
        {"target_modules": ALL, "r": 16, "use_rslora": True},
        {
            "target_modules": ["q_proj", "o_proj", "gate_proj"],
            "rank_pattern": {"q_proj": 1, r"1\.mlp\.gate_proj": 40},
            "alpha_pattern": {"layers.0.self_attn.o_proj": 3, "gate_proj": 20},
        },
        {"target_modules": ["k_proj"], "layers_to_transform": [1]},
    ],
    "gemma2": [{"target_modules": ALL}, {"target_modules": ["down_proj"]}, {"target_modules": ["o_proj"]}],
    "mistral_window": [{"target_modules": ALL}, {"target_modules": ["q_proj"]}, {"target_modules": ALL}],
    "phi3": [
        {"target_modules": ["qkv_proj", "gate_up_proj", "down_proj"]},
        {"target_modules": ["o_proj"]},
        {"target_modules": "all-linear"},
    ],
    "gpt2": [
        {"target_modules": ["c_attn"], "fan_in_fan_out": True},
        {"target_modules": ["c_attn", "c_proj", "c_fc"], "fan_in_fan_out": True},
        {"target_modules": ["c_fc"], "fan_in_fan_out": True},
    ],
    "gpt_neox": [
        {"target_modules": ["query_key_value"]},
        {"target_modules": ["query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"]},
        {"target_modules": ["dense"]},
    ],
    "falcon_groups": [
        {"target_modules": ["query_key_value"]},
        {"target_modules": ["query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"]},
        {"target_modules": ["dense"]},
    ],
    "cohere": [{"target_modules": ALL}, {"target_modules": ["q_proj"]}, {"target_modules": ["k_proj"]}],
    "mixtral": [{"target_modules": ALL[:4]}, {"target_modules": ["v_proj"]}, {"target_modules": ["q_proj"]}],
}


def load(runner: TorchRunner, folder: Path) -> AdapterInfo:
    return runner.install_adapter(runner.read_adapter(folder))


def logprobs_of(driver: Driver, walkers: list[Walker], *, max_chunk: int) -> list[list[float]]:
    """The log-probabilities of all tokens of each but the first, computed in random chunks together."""
    found: list[list[float]] = [[] for _ in walkers]
    while left := [w for w in walkers if w.num_computed < len(w.tokens) - 1]:
        work = [
            (w, min(len(w.tokens) - 1 - w.num_computed, int(driver.rng.integers(1, max_chunk + 1))))
            for w in left
        ]
        for walker, part in driver.score(work, {id(w): w.tokens[1:] for w in left}):
            found[walkers.index(walker)] += part
    return found


def errors_of(
    model: Path,
    adapters: list[Path],
    *,
    quantize: str | None = None,
    dtype: str = "float32",
    gguf: Path | None = None,
    device: str = DEVICE,
) -> np.ndarray[Any, np.dtype[np.float64]]:
    """The errors of log-probabilities, relative to the largest logit: of random texts, each with one of the
    adapters or none, computed in one batch. One of them goes on after a prefix that another with the same
    adapter has computed. ``gguf``: has the same values as ``model``, and is run instead."""
    errors: list[float] = []
    runner = TorchRunner(gguf or model, num_slots=600, device=device, dtype=dtype, quantize=quantize)
    identities = [load(runner, folder).identity for folder in adapters]
    driver = Driver(runner)
    folders: list[Path | None] = [*adapters, None, adapters[0]]
    texts = [torch.randint(10, 320, (length,)).tolist() for length in (50, 3, 34, 41, 12)]
    walkers = []
    for folder, text in zip(folders, texts, strict=True):
        walker = driver.add(text)
        walker.adapter = "" if folder is None else identities[adapters.index(folder)]
        walkers.append(walker)
    driver.step([(walkers[0], 30)], rows=np.arange(0))
    late = driver.add(texts[0][:25] + texts[1], prefix_of=walkers[0], shared=25)
    late.adapter = walkers[0].adapter
    for walker, found, folder in zip(
        [*walkers, late],
        logprobs_of(driver, [*walkers, late], max_chunk=20),
        [*folders, adapters[0]],
        strict=True,
    ):
        logits = merged_logits(model, folder, walker.tokens[:-1])
        exact = torch.log_softmax(logits, -1).gather(1, torch.tensor(walker.tokens[1:]).unsqueeze(1))
        scale = float(logits.abs().max())
        errors += ((torch.tensor(found) - exact.squeeze(1)[-len(found) :]).abs() / scale).tolist()
    return np.array(errors)


@pytest.mark.parametrize(
    ("name", "kernels"),
    [
        *(("llama", kernels) for kernels in ("native", "torch", "reference")),
        *(pytest.param(name, "triton", marks=pytest.mark.full) for name in ("llama", "qwen3")),
        *((name, "native") for name in ADAPTERS if name != "llama"),
        *(pytest.param(name, "torch", marks=pytest.mark.full) for name in ADAPTERS if name != "llama"),
    ],
)
def test_every_token_is_as_likely_as_with_merged_weights(
    name: str, kernels: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kernels == "triton":
        pytest.importorskip("triton", reason="triton is for x86-64 and Linux")
    if DEVICE == "cpu":
        monkeypatch.setenv("AGENTFLOW_KERNELS", kernels)
    save_model(name, tmp_path / "model")
    adapters = [
        write_adapter(tmp_path / "model", tmp_path / f"adapter{i}", seed=i, **one)
        for i, one in enumerate(ADAPTERS[name])
    ]
    assert errors_of(tmp_path / "model", adapters).max() < 1e-4


@pytest.mark.parametrize(("kind", "quantize"), [("Q4_1", "int4"), ("Q8_0", "int8")])
def test_an_adapter_on_quantised_weights(kind: str, quantize: str, tmp_path: Path) -> None:
    """Against PEFT on the dequantised weights. Where rows are rounded too, errors are compared with errors in
    bfloat16: their size differs between random models."""
    save_model("llama_tied", tmp_path / "model", **IN_BLOCKS)
    round_weights(tmp_path / "model", kind)
    write_gguf(tmp_path / "model", gguf := tmp_path / "model.gguf", kind)
    adapters = [
        write_adapter(tmp_path / "model", tmp_path / str(i), seed=i, target_modules=ALL) for i in range(3)
    ]
    assert errors_of(tmp_path / "model", adapters, quantize=quantize, device="cpu").max() < 1e-4
    of_bfloat16 = errors_of(tmp_path / "model", adapters, dtype="bfloat16", device="cpu").mean()
    assert of_bfloat16 < 0.02  # without the adapters it is 0.3
    assert (
        errors_of(tmp_path / "model", adapters, dtype="auto", gguf=gguf, device="cpu").mean()
        < 3 * of_bfloat16
    )


def test_an_adapter_is_the_same_under_any_path_and_another_with_other_weights(tmp_path: Path) -> None:
    save_model("llama", tmp_path / "model")
    folders = [
        write_adapter(tmp_path / "model", tmp_path / str(i), seed=i // 2, target_modules=["q_proj"])
        for i in range(4)
    ]
    runner = TorchRunner(tmp_path / "model", num_slots=10, device="cpu", dtype="float32")
    infos = [load(runner, folder) for folder in folders]
    identities = [info.identity for info in infos]
    assert identities[0] == identities[1] != identities[2] == identities[3]
    # A [4, 48] and B [48, 4] of float32, in three layers; B's panels are padded to 64 outputs.
    assert 3 * 4 * (4 * 48 * 2) <= infos[0].nbytes <= 3 * 4 * (32 * 48 + 64 * 8)
    runner.drop_adapter(identities[0])
    runner.drop_adapter(identities[2])


def test_a_dropped_adapter_is_freed_after_a_batch_was_prepared_with_it(tmp_path: Path) -> None:
    save_model("llama", tmp_path / "model")
    folder = write_adapter(tmp_path / "model", tmp_path / "adapter", seed=0, target_modules=ALL)
    runner = TorchRunner(tmp_path / "model", num_slots=10, device="cpu", dtype="float32")
    info = load(runner, folder)
    driver = Driver(runner)
    walker = driver.add([10, 11])
    walker.adapter = info.identity
    driver.allot_slots([(walker, 1)])
    runner.prepare(driver.batch([(walker, 1)], [True]))
    known = weakref.ref(runner._adapters[info.identity])
    runner.drop_adapter(info.identity)
    gc.collect()
    assert known() is None


HIDDEN, Q = 48, "model.layers.0.self_attn.q_proj"
GOOD = {f"{Q}.lora_A": torch.ones(4, HIDDEN), f"{Q}.lora_B": torch.ones(HIDDEN, 4)}
SLOW = "(?:.|..|...)+(?<=!)"


def with_header(header: bytes) -> bytes:
    """A file of safetensors without tensors."""
    return len(header).to_bytes(8, "little") + header


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> TorchRunner:
    folder = tmp_path_factory.mktemp("llama")
    save_model("llama", folder)
    return TorchRunner(folder, num_slots=400, device=DEVICE, dtype="float32")


def test_a_plain_adapter_is_accepted(runner: TorchRunner, tmp_path: Path) -> None:
    runner.drop_adapter(load(runner, write_plain_adapter(tmp_path, GOOD)).identity)


@pytest.mark.parametrize(
    ("tensors", "changed", "param"),
    [
        (GOOD, {"peft_type": "IA3"}, "peft_type"),
        (GOOD, {"use_dora": True}, "use_dora"),
        (GOOD, {"modules_to_save": ["lm_head"]}, "modules_to_save"),
        (GOOD, {"bias": "all"}, "bias"),
        (GOOD, {"init_lora_weights": "pissa_niter_4"}, "init_lora_weights"),
        *[(GOOD, {"lora_alpha": bad}, "lora_alpha") for bad in (None, True, math.nan, math.inf, 10**400)],
        (GOOD, {"alpha_pattern": {"q_proj": [1]}}, "lora_alpha"),
        (GOOD, {"r": 8}, f"{Q}.lora_A.weight"),
        *[(GOOD, {"r": bad}, "r") for bad in (0, -4, None, "4")],
        *[(GOOD, {"rank_pattern": bad}, "rank_pattern") for bad in ({"(": 4}, {SLOW: 4}, [4], "q_proj")],
        (GOOD | {f"{Q}.lora_A": torch.full((4, HIDDEN), math.nan)}, {}, f"{Q}.lora_A.weight"),
        ({}, {}, "adapter_model.safetensors"),
        ({f"{Q}.lora_A": torch.ones(4, HIDDEN)}, {}, f"{Q}.lora_B.weight"),
        (GOOD | {f"{Q}.lora_A": torch.ones(4, HIDDEN + 1)}, {}, f"{Q}.lora_A.weight"),
        (GOOD | {f"{Q}.lora_B": torch.ones(HIDDEN, 5)}, {}, f"{Q}.lora_B.weight"),
        ({name.replace(".0.", ".7."): one for name, one in GOOD.items()}, {}, Q.replace(".0.", ".7.")),
        (
            {name.replace("self_attn", "other"): one for name, one in GOOD.items()},
            {},
            Q.replace("self_attn", "other"),
        ),
        (
            {"lm_head.lora_A": torch.ones(4, HIDDEN), "lm_head.lora_B": torch.ones(320, 4)},
            {},
            "lm_head",
        ),
        (
            GOOD | {f"{Q}.lora_magnitude_vector": torch.ones(4)},
            {},
            f"base_model.model.{Q}.lora_magnitude_vector.weight",
        ),
    ],
)
def test_adapters_that_cannot_be_applied_are_rejected(
    runner: TorchRunner,
    tensors: dict[str, torch.Tensor],
    changed: dict[str, Any],
    param: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lora, "PATTERNS_S", 0.05)
    with pytest.raises(BadModelFolder, check=has_param(param)):
        load(runner, write_plain_adapter(tmp_path, tensors, **changed))


def test_damaged_files_are_rejected(runner: TorchRunner, tmp_path: Path) -> None:
    folder = write_plain_adapter(tmp_path / "whole", GOOD)
    weights = folder / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(BadModelFolder, check=has_param("adapter_model.safetensors")):
        load(runner, folder)
    weights.rename(folder / "adapter_model.bin")
    with pytest.raises(BadModelFolder, check=has_param("adapter_model.bin")):
        load(runner, folder)
    (folder / "adapter_config.json").write_text("[]")
    with pytest.raises(BadModelFolder, check=has_param("adapter_config.json")):
        load(runner, folder)
    (folder / "adapter_config.json").unlink()
    with pytest.raises(BadModelFolder, check=has_param("adapter_config.json")):
        load(runner, folder)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("adapter_config.json", b"[" * 100_000),
        ("adapter_config.json", b'{"a": "' + b"x" * 1_000_000 + b'"}'),
        ("adapter_model.safetensors", with_header(b"[" * 100_000)),
        ("adapter_model.safetensors", with_header(b'{"a": {"shape": ["x"], "data_offsets": [0, 0]}}')),
        (
            "adapter_model.safetensors",
            with_header(b'{"a": {"shape": [1%s], "data_offsets": [0, 0]}}' % (b"0" * 400)),
        ),
        ("adapter_model.safetensors", None),
    ],
)
def test_files_that_are_no_adapter(
    runner: TorchRunner, tmp_path: Path, name: str, content: bytes | None
) -> None:
    folder = write_plain_adapter(tmp_path / "adapter", GOOD)
    if content is None:
        (folder / name).unlink()
        os.mkfifo(folder / name)  # opening it would wait for a writer
    else:
        (folder / name).write_bytes(content)
    with pytest.raises(BadModelFolder, check=has_param(name)):
        load(runner, folder)


@pytest.mark.parametrize("name", ["llava", "qwen2_5_vl", "gemma3"])
def test_an_adapter_has_the_tensor_names_of_any_release_of_a_model_with_vision(
    name: str, tmp_path: Path
) -> None:
    saved_vision_model(name, tmp_path / "model")
    config = TorchRunner(tmp_path / "model", num_slots=10, device="cpu", dtype="float32")._shape
    assert isinstance(config, DecoderConfig)
    family = FAMILIES[config.architecture]
    assert family.other_names
    for names in (family.names, *family.other_names):
        q = f"{names.layers.format(1)}self_attn.q_proj"
        up = torch.ones(config.num_heads * config.head_dim, 4)
        tensors = {f"{q}.lora_A": torch.ones(4, config.hidden_size), f"{q}.lora_B": up}
        folder = write_plain_adapter(tmp_path / names.embedding, tensors)
        ((product, parts),) = lora.read_adapter(folder, config, torch.float32).parts.items()
        assert product == (1, "qkv")
        assert torch.equal(parts[0][2], 2 * up)


def test_a_model_that_runs_through_transformers_has_no_adapters(tmp_path: Path) -> None:
    save_model("arcee", tmp_path / "model")
    runner = TorchRunner(tmp_path / "model", num_slots=10, device="cpu", dtype="float32")
    with pytest.raises(BadArgument, check=has_param("model")):
        load(runner, write_plain_adapter(tmp_path / "adapter", GOOD))


@settings(max_examples=15, deadline=None)
@given(st.data())
def test_batch_mates_change_nothing(
    runner: TorchRunner, tmp_path_factory: pytest.TempPathFactory, data: Any
) -> None:
    """Each request alone, and all of them in one batch of random chunks."""
    torch.manual_seed(0)
    folders = [
        write_plain_adapter(
            tmp_path_factory.mktemp("adapter"),
            {f"{Q}.lora_A": torch.randn(rank, HIDDEN), f"{Q}.lora_B": torch.randn(HIDDEN, rank)},
            r=rank,
        )
        for rank in (1, 4, 33)
    ]
    identities = ["", *(load(runner, folder).identity for folder in folders)]
    chosen = data.draw(
        st.lists(st.tuples(st.sampled_from(identities), st.integers(2, 30)), min_size=2, max_size=8)
    )
    texts = [torch.randint(10, 320, (length,)).tolist() for _, length in chosen]

    def walk(driver: Driver, number: int) -> Walker:
        walker = driver.add(texts[number])
        walker.adapter = chosen[number][0]
        return walker

    together = Driver(runner, seed=data.draw(st.integers(0, 100)))
    found = logprobs_of(together, [walk(together, i) for i in range(len(texts))], max_chunk=16)
    for number in range(len(texts)):
        alone = Driver(runner, seed=number)
        (expected,) = logprobs_of(alone, [walk(alone, number)], max_chunk=1000)
        np.testing.assert_allclose(found[number], expected, atol=1e-4, rtol=1e-4)
