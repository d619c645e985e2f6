"""Small random models of every architecture that is supported, against transformers' own code."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from safetensors.torch import save_model as save_safe_model
from support.engine.device import DEVICE
from support.engine.family_models import COMPOSED, MODELS, OTHERS, SIZES, save_model, saved_model
from support.engine.runner_driver import Driver
from support.faults import has_param

from agentflow.engine.models.families.registry import FAMILIES, read_config
from agentflow.engine.models.forward.decoder import Decoder
from agentflow.engine.models.memory_need import memory_need
from agentflow.engine.models.torch_runner import TorchRunner
from agentflow.engine.models.transformers_model import TransformersModel
from agentflow.engine.store import hub
from agentflow.engine.store.native_architectures import NATIVE_ARCHITECTURES
from agentflow.errors import BadArgument, BadModelFolder
from agentflow.kernels.linear.torch_linear import TorchLinear

pytestmark = pytest.mark.gpu
NATIVE = ("native",) if DEVICE == "cpu" else ()  # these kernels are for CPUs


def assert_equal_to_transformers(
    model: transformers.PreTrainedModel,
    folder: Path,
    num_tokens: int = 20,
    lengths: tuple[int, int, int] = (3, 40, 17),
) -> None:
    """Greedy tokens of three requests in one batch, prefilled in random chunks."""
    runner = TorchRunner(folder, num_slots=400, device=DEVICE, dtype="float32")
    driver = Driver(runner)
    prompts = [torch.randint(10, 320, (n,)).tolist() for n in lengths]
    batch = [driver.add(prompt) for prompt in prompts]
    driver.generate(batch, num_tokens, max_chunk=12)
    for sequence in batch:
        with torch.inference_mode():
            logits = model(torch.tensor([sequence.tokens[:-1]])).logits[0]
        assert sequence.generated == logits[sequence.prompt_len - 1 :].argmax(-1).tolist()
    assert runner.info.end_token_ids == (7, 9)
    need = memory_need("", folder, "float32", None)
    assert need.kv_bytes_per_token == runner.info.kv_bytes_per_token
    # Gemma's scaled and tied embeddings make a random model repeat itself.
    assert len(set(batch[1].generated)) > min(4, num_tokens // 4) or "gemma" in type(model).__name__.lower()


@pytest.mark.parametrize("name", ["llama_tied", "llama_yarn", "gemma3", "starcoder2"])
def test_f38a_a_head_in_the_files_is_used_whatever_the_config_says(name: str, tmp_path: Path) -> None:
    model = saved_model(name, tmp_path, tie_word_embeddings=False)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    assert_equal_to_transformers(model, tmp_path)


@pytest.mark.parametrize("name", ["llama_tied", "gemma2"])
def test_f37_a_tied_model_whose_files_have_only_the_head(name: str, tmp_path: Path) -> None:
    model = saved_model(name, tmp_path)
    save_safe_model(model, str(tmp_path / "model.safetensors"))
    stored = load_file(tmp_path / "model.safetensors")
    assert "lm_head.weight" in stored
    assert "model.embed_tokens.weight" not in stored
    assert_equal_to_transformers(model, tmp_path)


def test_families_are_known_without_torch() -> None:
    assert FAMILIES.keys() == NATIVE_ARCHITECTURES


def test_every_family_is_tested() -> None:
    """As far as the installed transformers has them: an older one lacks the newest."""
    kinds = {kind for kind, _ in (MODELS | COMPOSED).values()}
    known = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    assert {known[kind] for kind in kinds if kind in known} == set(FAMILIES).intersection(known.values())


TEXT_LENGTHS = (130, 3, 90)


@pytest.mark.parametrize("name", MODELS | COMPOSED | OTHERS)
def test_every_token_is_as_likely_as_in_transformers(name: str, tmp_path: Path) -> None:
    """In one native call and kernel by kernel, which also agree with each other."""
    model = saved_model(name, tmp_path)
    texts = [torch.randint(10, 320, (n,)).tolist() for n in TEXT_LENGTHS]
    runners = [TorchRunner(tmp_path, num_slots=600, device=DEVICE, dtype="float32") for _ in range(2)]
    by_kernel = runners[1]._model
    if isinstance(by_kernel, Decoder) and by_kernel.whole_forward is not None:
        by_kernel.whole_forward = None
    else:
        assert name in OTHERS or not NATIVE
        del runners[1]
    if name not in OTHERS:
        need = memory_need("", tmp_path, "float32", None)
        info = runners[0].info
        assert (info.end_token_ids, info.kv_bytes_per_token) == ((7, 9), need.kv_bytes_per_token)
    with torch.inference_mode():
        found = [logprobs_by(runner, texts) for runner in runners]
    texts[2] = texts[0][:60] + texts[2]
    for place, text in enumerate(texts):
        with torch.inference_mode():
            logits = model(torch.tensor([text[:-1]])).logits[0]
        exact = torch.log_softmax(logits, -1).gather(1, torch.tensor(text[1:]).unsqueeze(1)).squeeze(1)
        atol = 1e-4 * float(logits.abs().max())
        for logprobs in found:
            ours = logprobs[place]
            np.testing.assert_allclose(ours, exact[-len(ours) :], atol=atol, rtol=0)
            np.testing.assert_allclose(ours, found[0][place], atol=atol, rtol=0)


def logprobs_by(runner: TorchRunner, texts: list[list[int]]) -> list[list[float]]:
    """Computes the texts in one batch, in random chunks; the last one begins with a cached prefix of the
    first. Returns the log-probability of each token whose predecessor was computed with rows."""
    driver = Driver(runner)
    first = driver.add(texts[0])
    driver.step([(first, 70)], rows=np.arange(0))
    late = driver.add(texts[0][:60] + texts[2], prefix_of=first, shared=60)
    walkers = [first, driver.add(texts[1]), late]
    found: list[list[float]] = [[], [], []]
    while left := [w for w in walkers if w.num_computed < len(w.tokens) - 1]:
        work = [(w, min(len(w.tokens) - 1 - w.num_computed, int(driver.rng.integers(1, 30)))) for w in left]
        if driver.rng.random() < 0.2:
            work = [(w, 1) for w in left]  # as they decode
        for walker, part in driver.score(work, {id(w): w.tokens[1:] for w in left}):
            found[walkers.index(walker)] += part
    return found


LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 500.0,
    "factor": 4.0,
    "short_factor": [1.0, 1.1, 1.3, 1.7],
    "long_factor": [1.0, 3.0, 6.0, 12.0],
    "original_max_position_embeddings": 64,
}


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3", "phi3", "phimoe_longrope"])
def test_f37_the_context_ends_where_longrope_has_other_factors(name: str, tmp_path: Path) -> None:
    changed = {"rope_parameters": LONGROPE, "head_dim": 8, "original_max_position_embeddings": 64}
    if name == "phimoe_longrope":
        changed |= {"rope_parameters": LONGROPE | {"short_mscale": 1.2, "long_mscale": 1.4}}
    elif name == "gemma3":
        local = {"rope_type": "default", "rope_theta": 10000.0}
        changed["rope_parameters"] = {"full_attention": LONGROPE, "sliding_attention": local}
    save_model(name, tmp_path, **changed)
    assert TorchRunner(tmp_path, num_slots=4, device="cpu", dtype="float32").info.max_context == 64


def test_f37_equal_factors_for_short_and_long_texts_limit_nothing(tmp_path: Path) -> None:
    """GGUF files have Llama 3's scaling so."""
    factors = {"long_factor": LONGROPE["short_factor"]}
    save_model("llama", tmp_path, rope_parameters=LONGROPE | factors)
    assert read_config(tmp_path).max_context == SIZES["max_position_embeddings"]


@pytest.mark.parametrize("kind", ["mamba", "bloom", "codegen", "llama4_text", "deepseek_v3", "t5"])
def test_models_that_cannot_be_paged(kind: str, tmp_path: Path) -> None:
    config = transformers.AutoConfig.for_model(kind, **SIZES)
    model = (
        transformers.AutoModelForSeq2SeqLM if kind == "t5" else transformers.AutoModelForCausalLM
    ).from_config(config)
    model.save_pretrained(tmp_path)
    with pytest.raises(BadModelFolder) as caught:
        TorchRunner(tmp_path, num_slots=4, device="cpu", dtype="float32")
    assert caught.value.param in ("architectures", "layer_types")
    assert type(model).__name__ in str(caught.value)


OWN_NUMBERS = [
    *("bart", "mbart", "pegasus", "blenderbot", "blenderbot-small", "marian", "plbart", "bigbird_pegasus"),
    *("roberta", "xlm-roberta", "xlm-roberta-xl", "camembert", "data2vec-text", "roberta-prelayernorm"),
]
OWN_SIZES = SIZES | {"d_model": 48, "decoder_layers": 3, "decoder_attention_heads": 6, "decoder_ffn_dim": 80}


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [("doge", "bfloat16"), *zip(["doge", *OWN_NUMBERS], itertools.cycle(["float32", "bfloat16"]))],
)
def test_f37_models_that_a_batch_would_change_are_refused(kind: str, dtype: str, tmp_path: Path) -> None:
    """They number the tokens of a forward pass themselves, or have masks of their keys."""
    if kind not in transformers.CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {kind}")
    config = transformers.AutoConfig.for_model(kind)
    known = config.to_dict().keys() | getattr(config, "attribute_map", {}).keys()
    sizes = {name: size for name, size in OWN_SIZES.items() if name in known}
    config = transformers.AutoConfig.for_model(kind, **sizes | {"is_decoder": True})
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(BadModelFolder, match=r"mask|positions", check=has_param("architectures")):
        TorchRunner(tmp_path, num_slots=4, device="cpu", dtype=dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("name", OTHERS)
def test_f37_models_at_given_positions_are_accepted(name: str, dtype: str, tmp_path: Path) -> None:
    save_model(name, tmp_path)
    runner = TorchRunner(tmp_path, num_slots=4, device=DEVICE, dtype=dtype)
    assert isinstance(runner._model, TransformersModel)


@pytest.mark.parametrize(
    ("name", "written"),
    [("ernie4_5", "Ernie4_5_ForCausalLM"), ("phimoe_longrope", "PhiMoEForCausalLM")],
)
def test_f37_architectures_by_the_names_of_their_first_releases(
    name: str, written: str, tmp_path: Path
) -> None:
    save_model(name, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    own = TorchRunner(tmp_path, num_slots=4, device="cpu", dtype="float32")
    assert hub._is_known([written])
    config |= {"architectures": [written], "auto_map": {"AutoModelForCausalLM": f"modeling.{written}"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    runner = TorchRunner(tmp_path, num_slots=4, device="cpu", dtype="float32")
    assert runner.info.architecture == own.info.architecture
    assert type(runner._model) is type(own._model)


@pytest.mark.parametrize("change", ["missing", "misshapen"])
def test_weights_that_transformers_would_make_up_are_rejected(change: str, tmp_path: Path) -> None:
    save_model("arcee", tmp_path)
    file, name = tmp_path / "model.safetensors", "model.layers.1.mlp.up_proj.weight"
    tensors = load_file(file)
    del tensors[name]
    save_file(tensors | ({name: torch.zeros(3, 3)} if change == "misshapen" else {}), file, {"format": "pt"})
    with pytest.raises(BadModelFolder, check=has_param(name)):
        TorchRunner(tmp_path, num_slots=4, device="cpu", dtype="float32")


def test_a_context_of_transformers_that_no_model_has(tmp_path: Path) -> None:
    save_model("arcee", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"max_position_embeddings": -128}))
    with pytest.raises(BadModelFolder, check=has_param("max_position_embeddings")):
        TorchRunner(tmp_path, num_slots=4, device="cpu", dtype="float32")


def test_a_model_of_transformers_is_not_quantised(tmp_path: Path) -> None:
    save_model("arcee", tmp_path)
    with pytest.raises(BadArgument, check=has_param("quantize")):
        TorchRunner(tmp_path, num_slots=4, device="cpu", quantize="int8")


@pytest.mark.parametrize("family", ["arcee", "deepseek_v2"])
def test_a_model_of_transformers_or_with_latents_keeps_the_type_of_its_kv(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_model(family, tmp_path)
    monkeypatch.setattr(TorchLinear, "has_fp8", lambda self, device: True)
    monkeypatch.setenv("AGENTFLOW_KERNELS", "torch")
    with pytest.raises(BadArgument, check=has_param("kv_dtype")):
        TorchRunner(tmp_path, num_slots=4, device="cpu", kv_dtype="fp8")


def test_code_of_a_model_folder_never_runs(tmp_path: Path) -> None:
    save_model("arcee", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {"model_type": "own", "architectures": ["OwnForCausalLM"]}
    config["auto_map"] = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnForCausalLM"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    with pytest.raises(BadModelFolder, check=has_param("auto_map")):
        TorchRunner(tmp_path, num_slots=4, device="cpu", dtype="float32")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("name", "kernels"),
    [
        # The test above has every model on the native kernels, and by every kernel. These have a bias for
        # each product, and norms for each head.
        pytest.param(name, kernels, marks=[] if name in ("llama_biased", "qwen3") else pytest.mark.full)
        for kernels in (*NATIVE, "torch", "reference")
        for name in MODELS | (COMPOSED if kernels != "reference" else {})
    ],
)
def test_greedy_tokens_equal_transformers(
    name: str, kernels: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AGENTFLOW_KERNELS", kernels)
    assert_equal_to_transformers(saved_model(name, tmp_path), tmp_path)


@pytest.mark.parametrize(
    "name", ["gemma2", "gpt_oss", *(pytest.param(name, marks=pytest.mark.full) for name in COMPOSED)]
)
def test_greedy_tokens_of_the_kernels_for_gpus(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With windows, a cap, sinks, and experts with biases."""
    pytest.importorskip("triton", reason="triton is for x86-64 and Linux")
    monkeypatch.setenv("AGENTFLOW_KERNELS", "triton")
    assert_equal_to_transformers(saved_model(name, tmp_path), tmp_path, num_tokens=3, lengths=(3, 18, 5))


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in ("qwen3", "mistral_window", "gpt2") else pytest.mark.full)
        for name in MODELS | COMPOSED
    ],
)
def test_long_greedy_texts_equal_transformers(name: str, tmp_path: Path) -> None:
    """Next to other requests, with a prompt that is prefilled in chunks, a prefix that is cached, and texts
    that become longer than each window."""
    model = saved_model(name, tmp_path)
    driver = Driver(TorchRunner(tmp_path, num_slots=700, device=DEVICE, dtype="float32"))
    prompts = [torch.randint(10, 320, (n,)).tolist() for n in (40, 6, 11)]
    first = driver.add(prompts[0])
    driver.step([(first, 30)], rows=np.arange(0))
    batch = [first, driver.add(prompts[1]), driver.add(prompts[0][:25] + prompts[2], first, 25)]
    driver.generate(batch, 200, max_chunk=12)
    for sequence in batch:
        with torch.inference_mode():
            logits = model(torch.tensor([sequence.tokens[:-1]])).logits[0]
        assert sequence.generated == logits[sequence.prompt_len - 1 :].argmax(-1).tolist()


def test_a_folder_in_shards(tmp_path: Path) -> None:
    model = saved_model("qwen2", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    shards = {name: f"model-0000{i % 3}.safetensors" for i, name in enumerate(sorted(tensors))}
    for file in set(shards.values()):
        save_file({name: tensors[name] for name in tensors if shards[name] == file}, tmp_path / file)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    assert_equal_to_transformers(model, tmp_path)


def test_a_config_as_older_releases_wrote_it(tmp_path: Path) -> None:
    """rope_theta and rope_scaling instead of rope_parameters, no head_dim, one end token, and rotary
    frequencies among the weights."""
    model = saved_model("llama_llama3", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    scaling = config.pop("rope_parameters")
    config |= {"rope_theta": scaling.pop("rope_theta"), "rope_scaling": scaling, "eos_token_id": 9}
    del config["head_dim"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": 7}))
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    save_file(tensors, tmp_path / "model.safetensors")
    assert_equal_to_transformers(model, tmp_path)


def test_internlm3_is_a_llama_whose_rope_is_dynamic(tmp_path: Path) -> None:
    """transformers has its config, and no class."""
    model = saved_model("llama_dynamic", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {"architectures": ["InternLM3ForCausalLM"], "model_type": "internlm3"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert_equal_to_transformers(model, tmp_path)


@pytest.mark.parametrize("head", ["embed_out", "lm_head"])
def test_gpt_neox_as_older_releases_wrote_it(head: str, tmp_path: Path) -> None:
    """Other names in the config, either name of the head, and masks among the weights."""
    rope = {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5}
    model = saved_model("gpt_neox", tmp_path, rope_parameters=rope)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["rope_parameters"]
    config |= {"rotary_emb_base": 500, "rotary_pct": 0.5}
    (tmp_path / "config.json").write_text(json.dumps(config))
    tensors = load_file(tmp_path / "model.safetensors")
    renamed = {
        name.replace("embed_out.", f"{head}.").replace("lm_head.", f"{head}."): tensors[name]
        for name in tensors
    }
    renamed["gpt_neox.layers.0.attention.bias"] = torch.ones(1, 1, 4, 4)
    save_file(renamed, tmp_path / "model.safetensors")
    assert_equal_to_transformers(model, tmp_path)


def test_a_model_for_images_in_the_names_of_another_release(tmp_path: Path) -> None:
    """The model's config leaves out defaults."""
    model = saved_model("gemma3_images", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["text_config"]["hidden_activation"], config["text_config"]["rms_norm_eps"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    tensors = load_file(tmp_path / "model.safetensors")
    renamed = {
        name.replace("language_model.model.", "model.language_model."): tensors[name] for name in tensors
    }
    save_file(renamed, tmp_path / "model.safetensors")
    assert_equal_to_transformers(model, tmp_path)


@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16])
def test_weights_stored_in_another_type(stored: torch.dtype, tmp_path: Path) -> None:
    model = saved_model("llama", tmp_path)
    model.to(stored).save_pretrained(tmp_path)
    assert_equal_to_transformers(model.float(), tmp_path)


def test_a_chunk_that_ends_before_the_prompt_gives_no_token(tmp_path: Path) -> None:
    save_model("llama", tmp_path)
    driver = Driver(TorchRunner(tmp_path, num_slots=100, device=DEVICE, dtype="bfloat16"))
    sequence = driver.add(range(10, 40))
    output = driver.step([(sequence, 12)])
    assert (output.token_ids.tolist(), output.logprobs) == ([], None)
    driver.generate([sequence], 3)
    assert len(sequence.generated) == 3
