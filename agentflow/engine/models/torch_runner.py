"""The model runner on torch: a model folder, a KV pool, and one forward pass for each batch."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from agentflow.engine.batch import Batch, BatchOutput, IntArray, SampledRows, joined
from agentflow.engine.machine.resources import free_cuda_bytes, free_host_bytes
from agentflow.engine.media_run import PreparedMedium
from agentflow.engine.models.config import DecoderConfig
from agentflow.engine.models.device import (
    check_fp8,
    device_named,
    dtype_on,
    identity_of_values,
    kernels_on,
    raise_device_failure,
    use_threads,
    weights_in,
    with_attention,
)
from agentflow.engine.models.device_steps import MAX_LOGIT_ROWS, DeviceStep, DeviceSteps, divide_rows
from agentflow.engine.models.families.registry import is_native, read_config
from agentflow.engine.models.forward.decoder import Decoder
from agentflow.engine.models.kv_pool import KvPool
from agentflow.engine.models.lora import AdapterWeights, read_adapter
from agentflow.engine.models.pooling import EmbeddingHead
from agentflow.engine.models.sampler import (
    choice_rows,
    choose_tokens,
    empty_likelihoods,
    make_embedding_output,
    make_output,
)
from agentflow.engine.models.transformers_model import TransformersModel, load_transformers
from agentflow.engine.models.vision.encoding import TowerEncoding
from agentflow.engine.models.vision.features import MediaFeatures
from agentflow.engine.models.vision.loading import load_tower
from agentflow.engine.models.weights.loader import LoadedModel, WeightFormat, load_model
from agentflow.engine.runner import AdapterInfo, MediaEncoding, ReadAdapter, RunnerInfo
from agentflow.engine.store.adapter_folder import adapter_bytes, adapter_identity
from agentflow.engine.store.embedding_folder import EmbeddingFolder
from agentflow.errors import BadArgument
from agentflow.kernels.device_stream import DeviceStream
from agentflow.kernels.inputs import Adapter, AdapterRows, AttentionBatch, ForwardInput, Likelihoods
from agentflow.kernels.platforms import Kernels, WholeForward
from agentflow.kernels.ranks import Ranks

logger = logging.getLogger(__name__)


def make_forward_input(
    batch: Batch,
    kernels: Kernels,
    kv_layers: tuple[Tensor, ...],
    adapters: Sequence[AdapterRows] = (),
    features: MediaFeatures | None = None,
    table: Tensor | None = None,
) -> ForwardInput:
    """Returns the batch's arrays and the plan of its attention.

    Args:
        batch: The batch.
        kernels: The model's kernels, which plan the attention.
        kv_layers: The pool, on the model's device (``KvPool.layers``).
        adapters: As in ``ForwardInput``.
        features: The features of the batch's media.
        table: As ``AttentionBatch.device_table``.
    """
    plan = kernels.attention.plan(_attended(batch, table), kv_layers[0].dtype, kv_layers[0].device)
    rows, media, token_ids, positions = batch.sampled.rows, batch.media, batch.token_ids, batch.positions
    given_rows = None
    if media is not None:
        assert features is not None
        given_rows = features.given_rows(media)
        token_ids = np.where(media.of_tokens < 0, token_ids, 0)
        positions = np.ascontiguousarray(media.rope_positions[0])
    return ForwardInput(token_ids, positions, batch.write_slots, kv_layers, plan, rows, adapters, given_rows)


def _attended(batch: Batch, table: Tensor | None) -> AttentionBatch:
    """Returns the requests of the batch for the plan of its attention. A request with runs of media whose
    tokens attend to each other is divided at their bounds."""
    spans = None if batch.media is None else batch.media.both_ways
    attended = AttentionBatch(
        *(batch.req_to_token, batch.req_rows, batch.query_lens, batch.kv_lens, batch.trees),
        shared=batch.shared,
        device_table=table,
    )
    if spans is None:
        return attended
    ends = np.cumsum(batch.query_lens)
    bounds = np.unique(np.concatenate(([0], ends, spans.ravel())))
    firsts, bounds = bounds[:-1], bounds[1:]
    owners = np.searchsorted(ends, firsts, side="right")
    kv_lens = batch.kv_lens[owners] - (ends[owners] - bounds)
    return replace(
        attended,
        req_rows=batch.req_rows[owners],
        query_lens=bounds - firsts,
        kv_lens=kv_lens,
        both_ways=np.isin(firsts, spans[:, 0]),
    )


def _adapter_rows(batch: Batch, loaded: Mapping[str, Adapter]) -> Sequence[AdapterRows]:
    if batch.adapters is None:
        return ()
    of_tokens = batch.adapters.of_tokens
    of_sampled = of_tokens[batch.sampled.rows]
    return [
        AdapterRows(loaded[identity], np.flatnonzero(of_tokens == i), np.flatnonzero(of_sampled == i))
        for i, identity in enumerate(batch.adapters.identities)
    ]


_QUANTIZED = {"int8": "Q8_0", "int4": "Q4_1", "fp8": "F8_E4M3"}
_KV_DTYPES = ("auto", "fp8")


def _is_chosen_in_pass(sampled: SampledRows) -> bool:
    """Whether a forward pass in one call may choose the tokens: there are some, their logits fit into memory
    together, and no logit is edited."""
    return 0 < len(sampled.rows) <= MAX_LOGIT_ROWS and sampled.edits is None


_Tokens = Callable[[], tuple[IntArray, Likelihoods | None]]
_Start = Callable[[], _Tokens]


@dataclass(frozen=True, slots=True)
class _Launched:
    """A batch of ``TorchRunner`` that is running. Either ``tokens`` or ``hidden`` is set, and waits for its
    results."""

    sampled: SampledRows
    tokens: _Tokens | None = None
    hidden: Callable[[], Tensor] | None = None


class TorchRunner:
    """Runs a model of one of the ``families``, or through transformers.

    Args:
        folder: the model folder, or a GGUF file.
        num_slots: the size of the KV pool, in tokens.
        device: cpu, cuda, cuda:NUMBER or None (cuda if available).
        dtype: bfloat16, float16 or float32, for weights, activations and KV. auto: bfloat16, and quantised
            weights are kept if the kernels can multiply them. On a CPU, float16 becomes float32, which has
            all its values.
        kv_dtype: auto (``dtype``) or fp8 for keys and values.
        quantize: int8, int4 or fp8, for weights that are not quantised yet.
        num_threads: CPU threads of the whole process; None: torch's default, but at most ``usable_cpus``.
        embedding: the runner makes embeddings from last tokens and generates nothing; only for native
            families.
        max_running: the most requests in a batch, to size the tables on a device. Larger batches need new
            tables.
        stream: the queue in which batches are launched ahead. None: the stream of a GPU, if the kernels
            queue their work; otherwise each batch is collected before the next is launched.
        ranks: the processes over which the model is divided; this runner computes the part of one of them.
            Rank 0 calls ``collect``, the other ranks ``collect_part``.

    Raises:
        UnknownModel: there is no such folder.
        BadModelFolder: the model cannot be run.
        BadArgument: the device, ``dtype``, ``kv_dtype`` or ``quantize`` is unknown or unavailable.
    """

    info: RunnerInfo

    def __init__(
        self,
        folder: str | Path,
        *,
        num_slots: int,
        device: str | None = None,
        dtype: str = "auto",
        kv_dtype: str = "auto",
        quantize: str | None = None,
        num_threads: int | None = None,
        embedding: EmbeddingFolder | None = None,
        max_running: int = 64,
        stream: DeviceStream | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        folder = Path(folder)
        torch_device = device_named(device)
        use_threads(num_threads)
        torch_dtype = dtype_on(torch_device, dtype)
        kernels = kernels_on(torch_device)
        if kernels.queues_work and is_native(folder):
            kernels = with_attention(kernels, torch_device, read_config(folder), torch_dtype)
        self._kernels = kernels
        if quantize is not None and quantize not in _QUANTIZED:
            raise BadArgument(
                f"quantize must be one of {', '.join(_QUANTIZED)}, not {quantize!r}", param="quantize"
            )
        if kv_dtype not in _KV_DTYPES:
            raise BadArgument(
                f"kv_dtype must be one of {', '.join(_KV_DTYPES)}, not {kv_dtype!r}", param="kv_dtype"
            )
        check_fp8(kernels, torch_device, quantize=quantize, kv_dtype=kv_dtype)
        if quantize is not None and not kernels.linear.block_types:
            raise BadArgument(
                "quantize needs the native kernels, for x86-64 CPUs with Linux, or a GPU with triton",
                param="quantize",
            )
        weights = WeightFormat(torch_dtype, dtype == "auto", _QUANTIZED[quantize] if quantize else None)
        # The sizes of the model: the config of a native one, or the model that transformers loaded.
        shape: DecoderConfig | TransformersModel
        if is_native(folder):
            shape = read_config(folder)
            if embedding is not None:
                longest = min(shape.max_context, embedding.max_tokens or shape.max_context)
                shape = replace(shape, max_context=longest)
            if kv_dtype == "fp8" and shape.latent:
                raise BadArgument(
                    f"kv_dtype fp8 is for keys and values, and {folder.name} caches latents: leave it out",
                    param="kv_dtype",
                )
        elif quantize is not None:
            raise BadArgument(
                f"quantize needs a native architecture, and {folder.name} runs through transformers: leave "
                "it out, or take another model",
                param="quantize",
            )
        elif kv_dtype == "fp8":
            raise BadArgument(
                f"kv_dtype fp8 needs a native architecture, and {folder.name} runs through transformers: "
                "leave it out, or take another model",
                param="kv_dtype",
            )
        else:
            shape = load_transformers(folder, dtype=torch_dtype, device=torch_device, kernels=kernels)
        self._shape, self._dtype, self._device = shape, torch_dtype, torch_device
        self._adapters: dict[str, Adapter] = {}
        num_kv_heads = shape.num_kv_heads
        if ranks is not None:
            num_kv_heads = max(1, num_kv_heads // ranks.size)
        self._kv_pool = KvPool(
            num_layers=shape.num_layers,
            num_slots=num_slots,
            num_kv_heads=num_kv_heads,
            head_dim=shape.head_dim,
            dtype=torch.float8_e4m3fn if kv_dtype == "fp8" else torch_dtype,
            device=torch_device,
        )
        self._model: Decoder | TransformersModel
        self.media: MediaFeatures | None = None
        if isinstance(shape, TransformersModel):
            self._model, described = shape, weights_in(torch_dtype)
        else:
            loaded = load_model(
                folder,
                shape,
                weights=weights,
                device=torch_device,
                kernels=kernels,
                has_head=embedding is None,
                ranks=ranks,
            )
            self._model, described = loaded.model, _described(loaded, torch_dtype)
            if embedding is None:  # embedding models read no images
                tower = None
                if ranks is None:
                    tower = load_tower(
                        folder, shape.architecture, dtype=torch_dtype, device=torch_device, kernels=kernels
                    )
                if tower is not None:
                    self.media = MediaFeatures(tower, shape.hidden_size)
        if kv_dtype == "fp8":
            described += ", keys and values in 8 bits"
        self._embedding_head: EmbeddingHead | None = None
        if embedding is not None and isinstance(shape, DecoderConfig):
            self._embedding_head = EmbeddingHead(embedding, shape.hidden_size, torch_device)
        if stream is None and torch_device.type == "cuda" and kernels.queues_work:
            stream = DeviceStream(torch_device)
        # Other kernels and models wait for the device during a forward pass: launching the next batch would
        # only delay the results of the previous one.
        self._ahead: DeviceSteps | None = None
        if stream is not None and embedding is None:
            model = self._model
            if isinstance(model, Decoder) and model.queues_work:
                table_shape = max_running, min(shape.max_context, num_slots)
                with torch.inference_mode():
                    self._ahead = DeviceSteps(model, kernels.sampler, stream, table_shape)
                    model.prepare(self._kv_pool.layers, self._ahead.table.slots)
        # The forward pass in one call that also chooses the tokens.
        self._choosing: WholeForward | None = None
        if isinstance(self._model, Decoder) and ranks is None and embedding is None and self._ahead is None:
            self._choosing = self._model.whole_forward
        self._prepared: tuple[Batch | None, _Start | None] = (None, None)
        self.info = RunnerInfo(
            model=folder.resolve().name.removesuffix(".gguf"),
            vocab_size=shape.vocab_size,
            max_context=shape.max_context,
            num_slots=num_slots,
            end_token_ids=shape.end_token_ids,
            kv_bytes_per_token=self._kv_pool.bytes_per_token,
            weight_bytes=self._model.nbytes + (self.media.tower.nbytes if self.media else 0),
            embedding_size=0 if self._embedding_head is None else self._embedding_head.size,
            weights=described,
            identity=identity_of_values(folder, described, torch_dtype),
            architecture="" if isinstance(shape, TransformersModel) else shape.architecture,
            launches_ahead=self._ahead is not None,
            prepares=self._choosing is not None,
            reads_media=self.media is not None,
            kernels=kernels.name,
        )
        logger.info("%s uses the %s kernels", torch_device, kernels.name)

    @property
    def keeps_order(self) -> bool:
        """Whether a row's sums have the same order regardless of the rest of its batch."""
        return isinstance(self._model, Decoder) and self._model.keeps_order

    def prepare(self, batch: Batch) -> None:
        if batch.media is None:  # otherwise the pass has a copy of the token ids
            self._prepared = batch, self._prepare(batch)

    def launch(self, batch: Batch) -> _Launched | DeviceStep:
        (prepared, start), self._prepared = self._prepared, (None, None)
        try:
            if start is not None and prepared is batch:
                return _Launched(batch.sampled, start())
            return self._launch(batch)
        except (RuntimeError, MemoryError) as error:
            raise_device_failure(error)

    def collect(self, handle: _Launched | DeviceStep) -> BatchOutput:
        try:
            if isinstance(handle, DeviceStep):
                return handle.output()
            if handle.tokens is not None:
                return make_output(*handle.tokens())
            return self._collect(handle)
        except (RuntimeError, MemoryError) as error:
            raise_device_failure(error)

    def _prepare(self, batch: Batch) -> _Start | None:
        """Prepares a forward pass that chooses its tokens; None if this batch has no such pass."""
        sampled = batch.sampled
        if self._choosing is None or not _is_chosen_in_pass(sampled):
            return None
        given = self._forward_input(batch)
        to_fill = partial(empty_likelihoods, sampled, self.info.vocab_size)
        return self._choosing.prepare_tokens(given, partial(choice_rows, sampled), to_fill)

    def _forward_input(self, batch: Batch) -> ForwardInput:
        adapters = _adapter_rows(batch, self._adapters)
        table = None if self._ahead is None else self._ahead.table.sized_for(batch)
        return make_forward_input(batch, self._kernels, self._kv_pool.layers, adapters, self.media, table)

    def _launch(self, batch: Batch) -> _Launched | DeviceStep:
        start = self._prepare(batch)
        if start is not None:
            return _Launched(batch.sampled, start())
        given = self._forward_input(batch)
        if self._ahead is not None:
            with torch.inference_mode():
                return self._ahead.launch(batch, given)
        assert batch.pending is None
        sampled, model = batch.sampled, self._model
        if isinstance(model, Decoder) and model.whole_forward is not None:
            return _Launched(sampled, hidden=model.whole_forward.start_hidden(given))
        if self._device.type == "cpu":  # this thread computes, after it has delivered earlier results
            return _Launched(sampled, hidden=partial(model.forward, given))
        with torch.inference_mode():
            hidden = model.forward(given)  # launches kernels and does not wait for them
        return _Launched(sampled, hidden=lambda: hidden)

    @torch.inference_mode()
    def _collect(self, launched: _Launched) -> BatchOutput:
        sampled = launched.sampled
        assert launched.hidden is not None
        hidden = launched.hidden()
        if self._embedding_head is not None:
            return make_embedding_output(sampled, self._embedding_head(hidden))
        outputs: list[BatchOutput] = []
        for part in divide_rows(sampled):
            logits = self._model.logits(hidden[len(outputs) * MAX_LOGIT_ROWS :][: len(part.rows)])
            outputs.append(choose_tokens(logits, part, self._kernels.sampler))
        return joined(outputs) if outputs else BatchOutput(sampled.target_ids.copy(), None)

    @torch.inference_mode()
    def collect_part(self, handle: _Launched | DeviceStep) -> None:
        """Waits for a batch on a rank other than rank 0, and contributes this rank's logits to rank 0."""
        assert isinstance(handle, _Launched)
        assert handle.hidden is not None
        hidden = handle.hidden()
        for first in range(0, len(hidden), MAX_LOGIT_ROWS):
            self._model.logits(hidden[first : first + MAX_LOGIT_ROWS])

    def read_adapter(self, folder: Path) -> ReadAdapter:
        shape = self._shape
        if isinstance(shape, TransformersModel):
            raise BadArgument(
                f"{self.info.model} runs through transformers, and adapters need a native architecture",
                param="model",
            )
        identity = adapter_identity(folder)
        self._check_room(adapter_bytes(folder, self._dtype.itemsize))
        weights = read_adapter(folder, shape, self._dtype)
        if self._device.type == "cpu":
            return ReadAdapter(identity, weights.packed(self._device, self._kernels.linear))
        return ReadAdapter(identity, weights)  # only the engine's thread uses the device

    def install_adapter(self, adapter: ReadAdapter) -> AdapterInfo:
        weights = adapter.weights
        if adapter.identity not in self._adapters:
            if isinstance(weights, AdapterWeights):
                weights = weights.packed(self._device, self._kernels.linear)
            assert isinstance(weights, Adapter)
            self._adapters[adapter.identity] = weights
        return AdapterInfo(adapter.identity, self._adapters[adapter.identity].nbytes)

    def encode_medium(self, medium: PreparedMedium) -> MediaEncoding:
        if self.media is None:
            raise BadArgument(f"{self.info.model} reads no images", param="image")
        try:
            return _Encoding(self.media.encode(medium), self._device)
        except (RuntimeError, MemoryError) as error:
            raise_device_failure(error)

    def feature_bytes(self, medium: PreparedMedium) -> int:
        return 0 if self.media is None else self.media.nbytes(medium)

    def drop_medium(self, identity: str) -> None:
        if self.media is not None:
            self.media.drop(identity)

    def _check_room(self, nbytes: int) -> None:
        free = free_cuda_bytes(self._device.index) if self._device.type == "cuda" else None
        free = free_host_bytes() if free is None else free
        if 2 * nbytes > free:  # the tensors as read, and packed
            raise BadArgument(
                f"the adapter needs {nbytes / 1e9:.2f} GB, and {free / 1e9:.2f} GB of memory are free",
                param="lora",
            )

    def drop_adapter(self, identity: str) -> None:
        self._prepared = None, None  # its forward pass may keep the adapter
        del self._adapters[identity]

    @property
    def kv_layers(self) -> tuple[Tensor, ...]:
        """The KV pool, layer by layer (``KvPool.layers``)."""
        return self._kv_pool.layers

    def close(self) -> None:
        """Frees the memory. The runner must not be used afterwards."""
        del self._model, self._ahead, self._choosing, self._prepared
        del self._kv_pool, self._adapters, self.media


@dataclass(frozen=True, slots=True)
class _Encoding:
    """A ``MediaEncoding`` that raises failures of the device as such."""

    inner: TowerEncoding
    device: torch.device

    @property
    def num_slices(self) -> int:
        return self.inner.num_slices

    @property
    def flops_per_slice(self) -> float:
        return self.inner.flops_per_slice

    def run(self, count: int) -> None:
        try:
            self.inner.run(count)
            # The engine measures the time, and attributes errors to the medium.
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
        except (RuntimeError, MemoryError) as error:
            raise_device_failure(error)


def _described(loaded: LoadedModel, dtype: torch.dtype) -> str:
    types = sorted(loaded.block_types)
    if not types:
        return weights_in(dtype)
    bits = dict.fromkeys(re.sub(r"\D*(\d).*", r"\1", name) for name in types)
    return f"{'- and '.join(sorted(bits))}-bit weights ({', '.join(types)}), {loaded.origin}"
