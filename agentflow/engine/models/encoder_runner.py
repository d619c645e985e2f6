"""Embeddings through transformers: encoders (BERT, MPNet, XLM-RoBERTa, …), and decoders whose hidden states
are averaged.

These models compute a whole text in one pass, so nothing is paged: the runner stores the scheduled tokens in
their slots, and runs a text when its last token is scheduled. Texts are padded to the longest text of their
forward pass, so only texts of similar length share one. Code in the model's folder never runs.
"""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from agentflow.engine.batch import Batch, BatchOutput, FloatArray
from agentflow.engine.models.config import read_architectures, read_folder
from agentflow.engine.models.device import (
    device_failure,
    device_named,
    dtype_on,
    identity_of_values,
    use_threads,
    weights_in,
)
from agentflow.engine.models.memory_need import ID_BYTES
from agentflow.engine.models.pooling import EmbeddingHead, pooled
from agentflow.engine.models.sampler import make_embedding_output
from agentflow.engine.models.transformers_model import (
    check_complete,
    one_line,
    pretrained,
    pretrained_config,
    without_reports,
)
from agentflow.engine.runner import RunnerInfo
from agentflow.engine.store.embedding_folder import EmbeddingFolder
from agentflow.errors import BadModelFolder
from agentflow.kernels.attention.group_attention import mask_of_few

MAX_PADDING: Final = 1.25
"""The most rows of a forward pass, padding included, per token of its texts."""
DEFAULT_CONTEXT: Final = 512
_NAME: Final = "agentflow_encoder"
"""The name under which transformers finds the attention function."""


class EncoderRunner:
    """A ``ModelRunner`` that makes embeddings.

    Args:
        folder: the model folder.
        embedding: the pooling and the steps after it.
        num_slots: the most tokens in unfinished texts.
        device: cpu, cuda, cuda:NUMBER or None (cuda if available).
        dtype: the type of weights and activations.
        num_threads: as for ``TorchRunner``.
    """

    info: RunnerInfo

    def __init__(
        self,
        folder: str | Path,
        embedding: EmbeddingFolder,
        *,
        num_slots: int,
        device: str | None = None,
        dtype: str = "float32",
        num_threads: int | None = None,
    ) -> None:
        folder = Path(folder)
        use_threads(num_threads)
        self._device = device_named(device)
        self._embedding = embedding
        torch_dtype = dtype_on(self._device, dtype)
        self._model = _load(folder, torch_dtype, self._device)
        config = self._model.config.get_text_config()
        self._head = EmbeddingHead(embedding, int(config.hidden_size), self._device)
        self._pad = int(getattr(config, "pad_token_id", None) or 0)
        self._is_decoder = "use_cache" in inspect.signature(self._model.forward).parameters
        self._slot_tokens = np.zeros(num_slots, dtype=np.int32)
        longest = _num_positions(self._model, config)
        self.info = RunnerInfo(
            model=folder.resolve().name,
            vocab_size=int(config.vocab_size),
            max_context=min(longest, embedding.max_tokens or longest),
            num_slots=num_slots,
            end_token_ids=(),
            kv_bytes_per_token=ID_BYTES,
            weight_bytes=sum(parameter.nbytes for parameter in self._model.parameters()),
            weights=weights_in(torch_dtype),
            identity=identity_of_values(folder, "", torch_dtype),
            embedding_size=self._head.size,
        )

    def launch(self, batch: Batch) -> Batch:
        return batch

    def collect(self, handle: Batch) -> BatchOutput:
        batch = handle
        self._slot_tokens[batch.write_slots] = batch.token_ids
        owners = np.repeat(np.arange(len(batch.query_lens)), batch.query_lens)[batch.sampled.rows]
        texts = [
            self._slot_tokens[batch.req_to_token[batch.req_rows[owner], : batch.kv_lens[owner]]]
            for owner in owners.tolist()
        ]
        try:
            return make_embedding_output(batch.sampled, self._embeddings(texts))
        except (RuntimeError, MemoryError) as error:
            failure = device_failure(error)
            if failure is None:
                raise
            raise failure from error

    def close(self) -> None:
        """Frees the memory. The runner must not be used afterwards."""
        del self._model

    @torch.inference_mode()
    def _embeddings(self, texts: Sequence[NDArray[np.int32]]) -> FloatArray:
        found: FloatArray = np.empty((len(texts), self._head.size), dtype=np.float32)
        for group in groups_of_similar_length([len(text) for text in texts]):
            lens = torch.tensor([len(texts[i]) for i in group], device=self._device)
            rows = torch.full((len(group), len(texts[group[0]])), self._pad)
            for row, i in enumerate(group):
                rows[row, : len(texts[i])] = torch.from_numpy(texts[i])
            hidden = self._hidden(rows.to(self._device), lens)
            found[group] = self._head(pooled(hidden, lens, self._embedding.poolings))
        return found

    def _hidden(self, rows: Tensor, lens: Tensor) -> Tensor:
        places = torch.arange(rows.shape[1], device=self._device)
        mask = (places < lens.unsqueeze(1)).long()
        options = {"use_cache": False} if self._is_decoder else {}
        hidden: Tensor = self._model(input_ids=rows, attention_mask=mask, **options).last_hidden_state
        return hidden


def groups_of_similar_length(lens: Sequence[int]) -> Iterator[list[int]]:
    """Divides texts into forward passes by their lengths. Yields the indices of each pass, the longest text
    first. With its padding, a pass has at most ``MAX_PADDING`` times as many rows as tokens."""
    group: list[int] = []
    num_tokens = 0
    for i in sorted(range(len(lens)), key=lambda i: -lens[i]):
        if group and (len(group) + 1) * lens[group[0]] > MAX_PADDING * (num_tokens + lens[i]):
            yield group
            group, num_tokens = [], 0
        group.append(i)
        num_tokens += lens[i]
    if group:
        yield group


def _attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    is_causal: bool | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """The attention of transformers on torch, with a mask also for few tokens (``mask_of_few``)."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if attention_mask is None and (few := mask_of_few(query, key.shape[2])) is not None:
        attention_mask = few.expand(-1, -1, query.shape[2], -1)
        if getattr(module, "is_causal", True) if is_causal is None else is_causal:
            attention_mask = attention_mask + torch.full_like(attention_mask, -torch.inf).triu(1)
    found: tuple[Tensor, None] = sdpa_attention_forward(
        module, query, key, value, attention_mask, is_causal=is_causal, **options
    )
    return found


def _num_positions(model: Any, config: Any) -> int:
    """Returns the length of the longest text, in tokens. RoBERTa and its relatives number positions from
    ``padding_idx + 1``."""
    longest = int(getattr(config, "max_position_embeddings", 0) or DEFAULT_CONTEXT)
    for name, module in model.named_modules():
        if name.endswith("position_embeddings") and isinstance(module, torch.nn.Embedding):
            offset = 0 if module.padding_idx is None else module.padding_idx + 1
            return min(longest, module.num_embeddings - offset)
    return longest


def _load(folder: Path, dtype: torch.dtype, device: torch.device) -> Any:
    """Raises ``BadModelFolder`` if transformers is not installed, does not know the architecture, or weights
    are missing."""
    raw, _ = read_folder(folder)
    architecture = ", ".join(map(str, read_architectures(raw))) or f"model_type {raw.get('model_type')!r}"
    where = f"{folder}: its architecture is {architecture}"
    if importlib.util.find_spec("transformers") is None:
        raise BadModelFolder(
            f"{where}, which needs transformers: pip install 'agentflow-lm[transformers]'",
            param="architectures",
        )
    from transformers import AttentionInterface, AttentionMaskInterface, AutoModel
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(_NAME, _attention)
    AttentionMaskInterface.register(_NAME, sdpa_mask)
    try:
        with without_reports():
            config = pretrained_config(folder, "it has an encoder and a decoder")
            kind: Any = AutoModel._model_mapping[type(config)]
            has_pooler = "add_pooling_layer" in inspect.signature(kind.__init__).parameters
            options = {"add_pooling_layer": False} if has_pooler else {}
            model, report = pretrained(AutoModel, folder, config, dtype, **options)
            if model.config._attn_implementation == "sdpa":
                model.set_attn_implementation(_NAME)  # without effect on models with their own attention
    except Exception as error:  # transformers has no common error type
        raise BadModelFolder(
            f"{where}, which cannot make embeddings: {one_line(error)}", param="architectures"
        ) from error
    check_complete(folder, [name for name in report["missing_keys"] if not name.startswith("pooler.")])
    return model.to(device).eval()
