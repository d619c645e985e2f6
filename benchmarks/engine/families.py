"""One decoding stream of a model of each family, at the widths of a published model, with random weights of 4
bits and as many layers as fit: in one native call, and kernel by kernel.

The limit is reading the weights that a token uses once, and its KV. In a mixture, only the chosen experts
count.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from torch import Tensor

from agentflow.engine.batch import Batch
from agentflow.engine.models.config import DecoderConfig
from agentflow.engine.models.families.registry import FAMILIES
from agentflow.engine.models.forward.decoder import Decoder
from agentflow.engine.models.kv_pool import KvPool
from agentflow.engine.models.sampler import choice_rows
from agentflow.engine.models.torch_runner import make_forward_input
from agentflow.engine.models.weights.checkpoint import TensorSource
from agentflow.engine.models.weights.loader import WeightFormat, make_decoder
from agentflow.engine.store.config_parts import text_config
from agentflow.kernels.decoder_weights import Experts
from agentflow.kernels.inputs import BlockMatrix
from agentflow.kernels.platforms import kernels_for
from benchmarks.report import Report
from benchmarks.step.limits import MemoryReads
from benchmarks.step.random_llama import random_blocks
from benchmarks.step.work import Shape, batch_of, median_ms

CPU = torch.device("cpu")
NUM_SLOTS = 2_048
DECODE = Shape(1, 200)
SETTLE_S = 0.05
"""The time of steps before a measurement: threads of the previous measurement spin for some milliseconds."""


def _sizes(hidden: int, inner: int, layers: int, heads: int, kv_heads: int, vocab: int) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
        "max_position_embeddings": 4_096,
    }


# The published widths. The layers of the larger ones are fewer.
MODELS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "gemma3_270m": (
        "Gemma3ForCausalLM",
        _sizes(640, 2048, 18, 4, 1, 262_144) | {"head_dim": 256, "sliding_window": 512},
    ),
    "gemma2_2b": (
        "Gemma2ForCausalLM",
        _sizes(2304, 9216, 8, 8, 4, 256_000)
        | {"sliding_window": 2_048, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    ),
    "qwen3_600m": (
        "Qwen3ForCausalLM",
        _sizes(1024, 3072, 28, 16, 8, 151_936) | {"tie_word_embeddings": True},
    ),
    "phi3_mini": ("Phi3ForCausalLM", _sizes(3072, 8192, 8, 32, 32, 32_064)),
    "olmo2_1b": ("Olmo2ForCausalLM", _sizes(2048, 8192, 8, 16, 16, 100_352)),
    "mixtral": ("MixtralForCausalLM", _sizes(4096, 14_336, 2, 32, 8, 32_000) | {"num_local_experts": 8}),
    "qwen3_moe": (
        "Qwen3MoeForCausalLM",
        _sizes(2048, 6144, 3, 32, 4, 151_936)
        | {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768},
    ),
    "gpt_oss": (
        "GptOssForCausalLM",
        _sizes(2880, 2880, 2, 64, 8, 201_088)
        | {"num_local_experts": 32, "num_experts_per_tok": 4, "sliding_window": 128},
    ),
    "opt_1_3b": ("OPTForCausalLM", _sizes(2048, 8192, 8, 32, 32, 50_272) | {"ffn_dim": 8192}),
    "gpt2": (
        "GPT2LMHeadModel",
        {"n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024, "vocab_size": 50_257},
    ),
    "phi2": (
        "PhiForCausalLM",
        _sizes(2560, 10_240, 8, 32, 32, 51_200) | {"partial_rotary_factor": 0.4},
    ),
    "pythia_1_4b": ("GPTNeoXForCausalLM", _sizes(2048, 8192, 8, 16, 16, 50_304)),
    "falcon_7b": ("FalconForCausalLM", _sizes(4544, 18_176, 4, 71, 71, 65_024)),
    "command_r7b": ("Cohere2ForCausalLM", _sizes(4096, 14_336, 4, 32, 8, 256_000)),
    "deepseek_v2_lite": (
        "DeepseekV2ForCausalLM",
        _sizes(2048, 10_944, 3, 16, 16, 102_400)
        | {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
        | {"n_routed_experts": 64, "num_experts_per_tok": 6, "moe_intermediate_size": 1408}
        | {"n_shared_experts": 2, "first_k_dense_replace": 1},
    ),
}
GOALS = {"deepseek_v2_lite": ">= 0.6"}


class RandomTensors(TensorSource):
    """Matrices in random blocks of 4 bits, and random vectors, of any requested name and shape."""

    def __init__(self) -> None:
        super().__init__(Path(), torch.bfloat16, CPU)
        self._rng = np.random.default_rng(0)
        self._generator = torch.Generator().manual_seed(0)

    @property
    def names(self) -> Collection[str]:
        return ()

    @contextmanager
    def _stored(self, name: str) -> Iterator[Tensor]:
        raise KeyError(name)
        yield

    def take(self, name: str, *shape: int) -> Tensor:
        return (1 + 0.1 * torch.randn(shape, generator=self._generator)).bfloat16()

    def take_blocks(self, name: str, *shape: int) -> BlockMatrix:
        return random_blocks(self._rng, *shape)

    def take_stacked_blocks(self, name: str, *shape: int) -> list[BlockMatrix]:
        count, num_in, num_out = shape
        return [random_blocks(self._rng, num_out, num_in) for _ in range(count)]


def run(report: Report, console: Console, only: str) -> None:
    """``only``: a part of the figures' ids, or "" for all."""
    for name in MODELS:
        if only in f"decode_{name}":
            console.print(f"measuring {name} …")
            with torch.inference_mode():
                measure(name, report)


def measure(name: str, report: Report) -> None:
    """Measures decode steps in turn: in one call, and kernel by kernel."""
    config, model = random_model(name)
    kernels = kernels_for(CPU)
    pool = KvPool(
        num_layers=config.num_layers,
        num_slots=NUM_SLOTS,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        dtype=torch.bfloat16,
        device=CPU,
    )
    for layer in pool.layers:
        layer.normal_()  # untouched pages all map to one page of zeros, and reading them costs nothing
    batch = batch_of(DECODE, NUM_SLOTS, config.max_context)
    whole = model.whole_forward
    assert whole is not None
    by_kernel = Decoder(kernels, model.weights, model._head)
    by_kernel.whole_forward = None

    def in_one_call(batch: Batch) -> object:
        given = make_forward_input(batch, kernels, pool.layers)
        return whole.prepare_tokens(given, lambda: choice_rows(batch.sampled))()()[0]

    def step_by_step(batch: Batch) -> object:
        hidden = by_kernel.forward(make_forward_input(batch, kernels, pool.layers))
        return kernels.sampler.choose(by_kernel.logits(hidden), choice_rows(batch.sampled))

    num_bytes = read_bytes(model) + DECODE.context * pool.bytes_per_token
    reads = MemoryReads()
    shares, gains, best, best_bytes_s = [], [], [float("inf")] * 2, 0.0
    for _ in range(15 if report.scale == "full" else 2):  # short rounds: the rate of memory changes with time
        rates = reads.bytes_s(5)
        best_bytes_s = max(best_bytes_s, *rates)
        took = []
        for step in (in_one_call, step_by_step):
            began = time.perf_counter()
            while time.perf_counter() - began < SETTLE_S:
                step(batch)
            took.append(median_ms(step, batch, 5))
        shares.append(1e3 * num_bytes / statistics.median(rates) / took[0])
        gains.append(took[1] / took[0])
        best = [min(pair) for pair in zip(best, took, strict=True)]
    of_best = 1e3 * num_bytes / best_bytes_s / best[0]
    note = (
        f"{config.num_layers} layers; a token reads {num_bytes / 1e6:,.0f} MB; "
        f"at best {best[0]:.1f} ms in one call ({of_best:.2f} of the best reading), "
        f"{best[1]:.1f} kernel by kernel"
    )
    goal = GOALS.get(name, ">= 0.75")
    report.median(f"models.decode_{name}_of_limit", shares, "ratio", note=note, goal=goal)
    report.median(f"models.decode_{name}_gain", gains, "ratio", note=note)


def random_model(name: str) -> tuple[DecoderConfig, Decoder]:
    """Returns one of ``MODELS``."""
    architecture, raw = MODELS[name]
    family = FAMILIES[architecture]
    read = family.read(text_config(raw | {"architectures": [architecture]}))
    config = replace(read, architecture=architecture)
    weights = WeightFormat(torch.bfloat16, keeps_blocks=True)
    kernels = kernels_for(CPU)
    return config, make_decoder(
        RandomTensors(), config, family.names, weights=weights, device=CPU, kernels=kernels
    )


def read_bytes(model: Decoder) -> int:
    """Returns the bytes of the weights that one token reads."""
    weights, unread = model.weights, 0
    for layer in weights.layers:
        if isinstance(layer.mlp, Experts):
            experts = layer.mlp.experts
            of_all = sum(expert.gate_up.nbytes + expert.down.nbytes for expert in experts)
            unread += of_all * (len(experts) - layer.mlp.routing.num_used) // len(experts)
    if weights.positions is not None:  # a token reads its own
        unread += weights.positions[1:].nbytes
    is_tied = weights.embedding is model._head
    if model.whole_forward is not None:
        unread += model.whole_forward.nbytes  # it reads these instead of the decoder's
    return model.nbytes - unread - (0 if is_tied else weights.embedding.nbytes)
