"""Llama-shaped models with random weights, created on the device, for machines without a model file."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from agentflow.engine.batch import NO_CHANGES, Batch, IntArray, SlotChanges
from agentflow.engine.models.config import DecoderConfig, ExpertsShape
from agentflow.engine.models.device_steps import DeviceStep, DeviceSteps
from agentflow.engine.models.forward.decoder import Decoder
from agentflow.engine.models.kv_pool import KvPool
from agentflow.engine.models.rope import RopeConfig, inverse_frequencies
from agentflow.engine.models.sampler import choice_rows
from agentflow.engine.models.torch_runner import make_forward_input
from agentflow.kernels.decoder_weights import DecoderWeights, Experts, LayerWeights, Mlp, Norm, Rope, Routing
from agentflow.kernels.device_stream import DeviceStream
from agentflow.kernels.inputs import BlockMatrix, LinearWeight
from agentflow.kernels.platforms import Kernels, kernels_for


def llama_config(
    hidden_size: int,
    intermediate_size: int,
    num_layers: int,
    num_heads: int,
    num_kv_heads: int,
    vocab_size: int,
    *,
    is_tied: bool = False,
    max_context: int = 8192,
) -> DecoderConfig:
    """Returns a config of these sizes. ``is_tied``: the head is the embedding."""
    return DecoderConfig(
        architecture="LlamaForCausalLM",
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=hidden_size // num_heads,
        norm_eps=1e-5,
        max_context=max_context,
        tie_word_embeddings=is_tied,
        rope=RopeConfig("default", 500_000.0),
        end_token_ids=(),
    )


TINY = llama_config(256, 704, 4, 8, 2, 1_000)
TINY_MIXTURE = replace(TINY, experts=ExpertsShape(8, 2, 192))
"""Its MLPs are mixtures of experts, like Mixtral's."""
LLAMA_8B = llama_config(4096, 14336, 32, 32, 8, 128_256)


def random_llama(
    config: DecoderConfig,
    kernels: Kernels,
    dtype: torch.dtype,
    device: torch.device,
    *,
    is_4_bit: bool = False,
) -> Decoder:
    """Returns a model with random weights. Small models are made on the CPU, so that they are equal on every
    device.

    Args:
        config: the shape. With experts, each MLP is a mixture of them.
        kernels: the implementation that packs the weights.
        dtype: of the weights.
        device: where the model is.
        is_4_bit: matrices are blocks of the type Q4_1, created in this form, one at a time.
    """
    generator = torch.Generator(device if config.hidden_size > 1024 else "cpu").manual_seed(0)
    rng = np.random.default_rng(0)

    def random(*shape: int) -> Tensor:
        made = torch.randn(*shape, generator=generator, device=generator.device, dtype=torch.float32)
        # Large enough for varied greedy tokens with few near-ties.
        return made.mul_(2.0 * shape[-1] ** -0.5).to(dtype).to(device)

    def linear(num_out: int, num_in: int, *, gated: bool = False) -> LinearWeight:
        if not is_4_bit:
            return kernels.linear.pack(random(num_out, num_in), None, gated=gated)
        # A gated weight has two parts; all have the same type.
        parts = [num_out // 2] * 2 if gated else [num_out]
        packed = kernels.linear.pack_blocks(
            [random_blocks(rng, size, num_in) for size in parts], None, gated=gated
        )
        assert packed is not None
        return packed

    hidden, experts = config.hidden_size, config.experts
    inner = config.intermediate_size if experts is None else experts.intermediate_size
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim

    def mlp() -> Mlp:
        return Mlp(linear(2 * inner, hidden, gated=True), linear(hidden, inner))

    def mixture(shape: ExpertsShape) -> Experts:
        router = linear(shape.num_experts, hidden)
        return Experts(router, Routing(shape.num_used), [mlp() for _ in range(shape.num_experts)])

    norm = Norm(torch.ones(hidden, dtype=dtype, device=device), None, config.norm_eps)
    layers = [
        LayerWeights(
            input_norm=norm,
            qkv=linear(queries + 2 * keys, hidden),
            output=linear(hidden, queries),
            mlp_norm=norm,
            mlp=mlp() if experts is None else mixture(experts),
        )
        for _ in range(config.num_layers)
    ]
    if is_4_bit:
        embedding = linear(config.vocab_size, hidden)
        head = embedding if config.tie_word_embeddings else linear(config.vocab_size, hidden)
    else:
        table = random(config.vocab_size, hidden)
        top = table if config.tie_word_embeddings else random(config.vocab_size, hidden)
        head = kernels.linear.pack(top, None, exact_output=True)
        embedding = kernels.linear.pack_embedding(table, head if config.tie_word_embeddings else None)
    weights = DecoderWeights(
        embedding=embedding,
        layers=layers,
        final_norm=norm,
        ropes=[Rope(inverse_frequencies(config.rope, config.head_dim).to(device))],
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        attention_scale=config.head_dim**-0.5,
    )
    return Decoder(kernels, weights, head)


def random_blocks(rng: np.random.Generator, num_out: int, num_in: int) -> BlockMatrix:
    """Returns a random matrix of the type Q4_1: blocks of a scale, a minimum, and 32 codes of 4 bits."""
    rows = rng.integers(0, 256, (num_out, num_in // 32, 20), dtype=np.uint8)
    scale = 2.0 * num_in**-0.5 / 4.6  # the codes have this standard deviation
    rows[..., :4] = np.array([scale, -7.5 * scale], dtype=np.float16).view(np.uint8)
    return BlockMatrix("Q4_1", rows.reshape(num_out, -1), (num_out, num_in))


@dataclass
class RandomRunner:
    """Like ``TorchRunner``, but for a random model."""

    config: DecoderConfig
    num_slots: int  # the tokens of the KV pool
    dtype: torch.dtype
    device: torch.device
    is_4_bit: bool = False  # as for ``random_llama``
    kernels: Kernels = field(init=False)
    model: Decoder = field(init=False)
    pool: KvPool = field(init=False)
    _steps: DeviceSteps = field(init=False)

    def __post_init__(self) -> None:
        self.kernels = kernels_for(self.device)
        with torch.inference_mode():
            self.model = random_llama(
                self.config, self.kernels, self.dtype, self.device, is_4_bit=self.is_4_bit
            )
        self.pool = KvPool(
            num_layers=self.config.num_layers,
            num_slots=self.num_slots,
            num_kv_heads=self.config.num_kv_heads,
            head_dim=self.config.head_dim,
            dtype=self.dtype,
            device=self.device,
        )
        table_shape = 256, min(self.config.max_context, self.num_slots)
        self._steps = DeviceSteps(self.model, self.kernels.sampler, DeviceStream(self.device), table_shape)
        self._launched: Batch | None = None  # the batch that was launched last
        self._num_launched = 0

    @torch.inference_mode()
    def prepare(self) -> None:
        """Captures the graphs of decode steps, on a GPU."""
        self.model.prepare(self.pool.layers, self._steps.table.slots)

    @torch.inference_mode()
    def run(self, batch: Batch) -> IntArray:
        """Returns the tokens of the batch's sampled rows."""
        if self.model.whole_forward is None:
            return self.launch(batch).output().token_ids
        given = make_forward_input(batch, self.kernels, self.pool.layers)
        return self.model.whole_forward.prepare_tokens(given, lambda: choice_rows(batch.sampled))()()[0]

    @torch.inference_mode()
    def launch(self, batch: Batch) -> DeviceStep:
        """Puts the batch into the queue of the device. A batch that no scheduler made has no changes of its
        table: if the table was launched before, callers have written only the tokens of this batch."""
        before, self._launched = self._launched, batch
        if before is None or before.req_to_token is not batch.req_to_token:
            self._steps.table.forget()
        table = self._steps.table.sized_for(batch)
        if batch.changes is None:
            batch = replace(batch, changes=self._written_tokens(batch))
        given = make_forward_input(batch, self.kernels, self.pool.layers, table=table)
        return self._steps.launch(batch, given)

    def _written_tokens(self, batch: Batch) -> SlotChanges:
        rows, num = np.repeat(batch.req_rows, batch.query_lens), self._num_launched
        self._num_launched += 1
        columns = batch.positions[: len(rows)]
        before = NO_CHANGES if num == 0 else num - 1
        return SlotChanges(num, before, rows, columns, batch.req_to_token[rows, columns])
