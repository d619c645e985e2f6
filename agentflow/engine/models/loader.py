"""Loads the weights of a model folder into the layout of the forward pass.

``Checkpoint`` reads tensors by name from safetensors files, which are mapped. The pages of a tensor are
released once it is copied, so that at most one tensor of the files is in memory.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from agentflow.engine.models.config import LlamaConfig
from agentflow.engine.models.llama import LlamaModel
from agentflow.engine.models.page_advice import release_file_pages
from agentflow.engine.models.rope import inverse_frequencies
from agentflow.errors import BadModelFolder
from agentflow.kernels.inputs import DecoderWeights, LayerWeights, LinearWeight
from agentflow.kernels.ops import Kernels

_INDEX = "model.safetensors.index.json"


class Checkpoint:
    """The named tensors of a folder, single-file or sharded, cast to ``dtype`` on ``device`` as they are
    taken. A context manager: the files stay mapped until it exits. ``BadModelFolder`` if a file is damaged or
    a tensor is missing, has the wrong shape or is left over."""

    def __init__(self, folder: Path, dtype: torch.dtype, device: torch.device) -> None:
        self._folder = folder
        self._dtype = dtype
        self._device = device
        self._open_files = ExitStack()
        self._files: dict[str, Any] = {}
        self._taken: set[str] = set()

    def __enter__(self) -> Checkpoint:
        with ExitStack() as opened:
            for name in self._file_names():
                try:
                    file = opened.enter_context(safe_open(self._folder / name, framework="pt"))
                except (OSError, SafetensorError) as error:
                    raise BadModelFolder(
                        f"{self._folder / name} cannot be read: {error}", param=name
                    ) from error
                self._files |= dict.fromkeys(file.keys(), file)
            self._open_files = opened.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._files.clear()
        self._open_files.close()

    def take(self, name: str, *shape: int) -> Tensor:
        """The tensor with that name, which must have that shape."""
        taken = torch.empty(shape, dtype=self._dtype, device=self._device)
        self._read(name, taken)
        return taken

    def take_rows(self, names: Sequence[str], sizes: Sequence[int], width: int) -> Tensor:
        """Matrices of ``sizes`` rows each, stacked."""
        taken = torch.empty(sum(sizes), width, dtype=self._dtype, device=self._device)
        for name, part in zip(names, torch.split(taken, list(sizes)), strict=True):
            self._read(name, part)
        return taken

    def take_if_there(self, name: str, *shape: int) -> Tensor | None:
        """The tensor with that name, or None."""
        return self.take(name, *shape) if name in self._files else None

    def _read(self, name: str, target: Tensor) -> None:
        if name not in self._files:
            raise BadModelFolder(
                f"{self._folder} has no tensor {name}: its weights are incomplete", param=name
            )
        try:
            stored = self._files[name].get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise BadModelFolder(
                f"{self._folder}: tensor {name} cannot be read: {error}", param=name
            ) from error
        if stored.shape != target.shape:
            raise BadModelFolder(
                f"{self._folder}: tensor {name} is {tuple(stored.shape)}, "
                f"but config.json makes it {tuple(target.shape)}",
                param=name,
            )
        self._taken.add(name)
        target.copy_(stored)
        release_file_pages(stored)

    def refuse_leftovers(self, *ignored_endings: str) -> None:
        """``BadModelFolder`` if a tensor was not taken: the weights belong to another architecture."""
        left = sorted(n for n in self._files if n not in self._taken and not n.endswith(ignored_endings))
        if left:
            raise BadModelFolder(
                f"{self._folder} has {len(left)} tensors that its architecture does not use "
                f"({', '.join(left[:3])}{', …' if len(left) > 3 else ''}): it is another kind of model",
                param=left[0],
            )

    def _file_names(self) -> list[str]:
        index = self._folder / _INDEX
        if index.is_file():
            try:
                return sorted(set(json.loads(index.read_text("utf-8"))["weight_map"].values()))
            except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
                raise BadModelFolder(f"{index} cannot be read: {error!r}", param=index.name) from error
        names = sorted(file.name for file in self._folder.glob("*.safetensors"))
        if not names:
            raise BadModelFolder(
                f"{self._folder} has no *.safetensors file: weights in other formats are not read",
                param="*.safetensors",
            )
        return names


def load_llama(
    folder: Path, config: LlamaConfig, *, dtype: torch.dtype, device: torch.device, kernels: Kernels
) -> LlamaModel:
    """The model of ``folder``, with weights of any stored float type cast to ``dtype``. Each matrix is packed
    as soon as it is read, so that only one is in memory beside the result. ``BadModelFolder`` if tensors are
    missing, misshapen or left over."""
    with torch.inference_mode(), Checkpoint(folder, dtype, device) as checkpoint:
        model = _Loader(checkpoint, config, kernels).model()
        # Old Llama folders store the rotary frequencies, which follow from the config.
        checkpoint.refuse_leftovers("rotary_emb.inv_freq", *(["lm_head.weight"] if model.is_tied else []))
    return model


class _Loader:
    def __init__(self, checkpoint: Checkpoint, config: LlamaConfig, kernels: Kernels) -> None:
        self._checkpoint = checkpoint
        self._config = config
        self._kernels = kernels

    def model(self) -> LlamaModel:
        config, take = self._config, self._checkpoint.take
        embedding = take("model.embed_tokens.weight", config.vocab_size, config.hidden_size)
        if config.tie_word_embeddings:
            head = embedding
        else:
            head = take("lm_head.weight", config.vocab_size, config.hidden_size)
        decoder = DecoderWeights(
            embedding=embedding,
            layers=[self._layer(f"model.layers.{i}.") for i in range(config.num_layers)],
            final_norm=take("model.norm.weight", config.hidden_size),
            frequencies=inverse_frequencies(config.rope, config.head_dim).to(embedding.device),
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            norm_eps=config.rms_norm_eps,
        )
        packed_head = self._kernels.pack_linear(head, None, exact_output=True)
        return LlamaModel(config, self._kernels, decoder, packed_head)

    def _layer(self, prefix: str) -> LayerWeights:
        config = self._config
        hidden, inner = config.hidden_size, config.intermediate_size
        queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        attention, mlp = f"{prefix}self_attn.", f"{prefix}mlp."
        qkv = {f"{attention}q_proj": queries, f"{attention}k_proj": keys, f"{attention}v_proj": keys}
        return LayerWeights(
            input_norm=self._norm(f"{prefix}input_layernorm", hidden),
            qkv=self._linear(qkv, hidden),
            q_norm=self._norm(f"{attention}q_norm", config.head_dim) if config.has_qk_norm else None,
            k_norm=self._norm(f"{attention}k_norm", config.head_dim) if config.has_qk_norm else None,
            output=self._linear({f"{attention}o_proj": hidden}, queries),
            mlp_norm=self._norm(f"{prefix}post_attention_layernorm", hidden),
            gate_up=self._linear({f"{mlp}gate_proj": inner, f"{mlp}up_proj": inner}, hidden, gated=True),
            down=self._linear({f"{mlp}down_proj": hidden}, inner),
        )

    def _norm(self, name: str, size: int) -> Tensor:
        return self._checkpoint.take(f"{name}.weight", size)

    def _linear(self, parts: dict[str, int], num_inputs: int, *, gated: bool = False) -> LinearWeight:
        """One product for several matrices with the same input. ``parts``: name to number of outputs."""
        names, sizes = [f"{name}.weight" for name in parts], list(parts.values())
        weight = self._checkpoint.take_rows(names, sizes, num_inputs)
        biases = [self._checkpoint.take_if_there(f"{name}.bias", size) for name, size in parts.items()]
        bias = None
        if any(b is not None for b in biases):
            bias = weight.new_zeros(len(weight))
            for part, read in zip(torch.split(bias, sizes), biases, strict=True):
                if read is not None:
                    part.copy_(read)
        return self._kernels.pack_linear(weight, bias, gated=gated)
