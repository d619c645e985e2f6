"""A GGUF file as a model: its config, and its tensors under their names in transformers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from agentflow.engine.store.gguf.architectures import ARCHITECTURES, ROPE_TENSORS, Architecture
from agentflow.engine.store.gguf.container import Container, StoredTensor, read_container
from agentflow.engine.store.gguf.metadata import GgufMetadata
from agentflow.engine.store.gguf.mmproj import VisionFile
from agentflow.engine.store.gguf.names import find_mmproj, is_mmproj
from agentflow.engine.store.gguf.tensors import (
    GgufTensor,
    InterleavedTensor,
    LatentTensor,
    ModelTensor,
    whole_tensor,
)
from agentflow.engine.store.gguf.vocabulary import GgufVocabulary
from agentflow.errors import BadModelFolder

ENCODERS = frozenset(
    {
        "bert",
        "nomic-bert",
        "nomic-bert-moe",
        "jina-bert-v2",
        "jina-bert-v3",
        "modern-bert",
        "neo-bert",
        "eurobert",
        "gemma-embedding",
        "t5encoder",
    }
)
"""Architectures of embedding models in which each token attends to the whole text."""
# Values of ``pooling_type`` in llama.cpp: none, mean, first, last, rank.
_NO_POOLING, _POOLING_OF_LAST = 0, 3


_READ: ContextVar[dict[Path, GgufFile] | None] = ContextVar("read", default=None)


@contextmanager
def reading_once() -> Iterator[None]:
    """Makes ``open_gguf`` read each file only once within the scope. Independent functions read the config,
    the tokenizer, the template and the weights from the same file."""
    read = _READ.get()
    token = _READ.set({} if read is None else read)
    try:
        yield
    finally:
        _READ.reset(token)


def open_gguf(path: Path) -> GgufFile:
    """Maps a GGUF file, and the projector file next to it (``find_mmproj``). Takes about 20 ms for 100,000
    texts in the metadata. Does not read weights.

    Raises:
        UnknownModel: there is no such file.
        BadModelFolder: it is not a complete GGUF file of a supported version, type and architecture.
    """
    read = _READ.get()
    if read is None:
        return GgufFile(read_container(path), find_mmproj(path))
    if path not in read:
        read[path] = GgufFile(read_container(path), find_mmproj(path))
    return read[path]


def find_gguf(path: Path) -> Path | None:
    """Returns the GGUF file at a path: the path itself, or the only GGUF file of a folder without other
    weights; None if there is none. Raises ``BadModelFolder`` if the folder has several."""
    if path.suffix == ".gguf" and not path.is_dir():
        return path
    if not path.is_dir() or any(path.glob("*.safetensors")) or (path / "config.json").exists():
        return None
    files = [file for file in sorted(path.glob("*.gguf")) if not is_mmproj(file.name)]
    firsts = [file for file in files if "-of-" not in file.name or "-00001-of-" in file.name]
    if len(firsts) > 1:
        raise BadModelFolder(
            f"{path} has {len(firsts)} GGUF files ({firsts[0].name}, {firsts[1].name}…): choose one of them",
            param=firsts[0].name,
        )
    return firsts[0] if firsts else None


class GgufFile:
    """A mapped GGUF file, as a model. ``vision``: its projector file, or None. ``unread``: the reason why a
    projector file next to it is not read, or None."""

    def __init__(self, container: Container, mmproj: Path | None = None) -> None:
        self.path = container.path
        self.vision: VisionFile | None = None
        self.unread: BadModelFolder | None = None
        self._stored = container.tensors
        self._metadata = GgufMetadata(container)
        name = self._metadata.architecture
        if name in ENCODERS:
            raise BadModelFolder(
                f"{self.path.name} is an encoder ({name}), which is not supported in GGUF files: give the "
                "model's folder with safetensors, or its OWNER/NAME on the hub",
                param="general.architecture",
            )
        if name not in ARCHITECTURES:
            raise BadModelFolder(
                f"{self.path.name}: its architecture is {name!r}, and GGUF files are supported only of "
                f"{', '.join(ARCHITECTURES)}: give the model's folder with safetensors",
                param="general.architecture",
            )
        self._architecture = ARCHITECTURES[name]
        if mmproj is not None:
            try:
                with self._rejecting_misfits():
                    vision = VisionFile(mmproj)
                    vision.check_text(name, self._metadata.integer(".embedding_length"))
                self.vision = vision
            except BadModelFolder as error:
                self.unread = error

    @cached_property
    def config(self) -> dict[str, Any]:
        """The ``config.json`` that transformers would write, with all tokens that end a text in
        ``eos_token_id``."""
        with self._rejecting_misfits():
            config = self._architecture.read(self._metadata, self._stored)
            words = self.vocabulary
            ids = {"bos_token_id": words.bos_id, "pad_token_id": words.pad_id}
            config |= {name: token for name, token in ids.items() if token is not None}
            config |= {"eos_token_id": list(words.end_ids)}
            if self.vision is None:
                return config
            return self.vision.config(config, reads_videos="<video>" in (words.chat_template or ""))

    @property
    def chat_template(self) -> str | None:
        """The Jinja source of the chat template in the file, or of the default of its kind of projector."""
        default = None if self.vision is None else self.vision.kind.template
        return self.vocabulary.chat_template or default

    @property
    def pools_last(self) -> bool:
        """Whether the embedding of a text is the hidden state of its last token, which is the default."""
        return self._metadata.integer(".pooling_type", _POOLING_OF_LAST) in (_NO_POOLING, _POOLING_OF_LAST)

    @cached_property
    def tensors(self) -> Mapping[str, ModelTensor]:
        """The tensors by name in the torch model. Unknown tensors keep their names."""
        found: dict[str, ModelTensor] = {}
        with self._rejecting_misfits():
            names = _Names(self._architecture, self._metadata)
            for stored in self._stored.values():
                if stored.name not in ROPE_TENSORS:
                    found.update(names.convert_tensors(stored))
            if self._architecture.splits_latents:
                return _with_latents(found)
            if self._architecture.has_stacks:
                return _interleaved(found)
            if self.vision is None:
                return found
            text = {self.vision.text_name(name): tensor for name, tensor in found.items()}
            return text | dict(self.vision.tensors())

    @contextmanager
    def _rejecting_misfits(self) -> Iterator[None]:
        """Turns errors of reading into ``BadModelFolder``: a damaged file may contain any values."""
        try:
            yield
        except (ArithmeticError, IndexError, TypeError, ValueError) as error:
            raise BadModelFolder(
                f"{self.path.name} has metadata that does not fit its tensors ({error}): fetch it again, or "
                "another conversion of the model",
                param=self.path.name,
            ) from error

    @cached_property
    def vocabulary(self) -> GgufVocabulary:
        """The tokens, and the metadata about them."""
        return GgufVocabulary(self._metadata)


class _Names:
    """Finds the tensors of the model that a stored tensor contains."""

    def __init__(self, architecture: Architecture, data: GgufMetadata) -> None:
        self._architecture = architecture
        self._num_heads = data.integer(".attention.head_count")
        self._num_kv_heads = data.integer(".attention.head_count_kv", self._num_heads)
        head_dim = data.integer(".attention.key_length", data.integer(".embedding_length") // self._num_heads)
        self._sizes = self._num_heads * head_dim, self._num_kv_heads * head_dim

    def convert_tensors(self, stored: StoredTensor) -> Iterator[tuple[str, ModelTensor]]:
        kind = self._architecture
        match stored.name.split("."):
            case [part, "weight" | "bias" as leaf] if part in kind.top:
                yield f"{kind.top[part]}.{leaf}", self._plain(stored, part)
            case ["blk", layer, part, "weight" | "bias" as leaf]:
                found = list(self._in_layer(stored, kind.prefix.format(layer), part, leaf))
                yield from found or [(stored.name, whole_tensor(stored))]
            case ["blk", layer, part, expert, "weight"] if kind.experts and part in kind.experts:
                name = kind.experts[part].format(expert)
                yield f"{kind.prefix.format(layer)}{name}.weight", whole_tensor(stored)
            case _:
                yield stored.name, whole_tensor(stored)

    def _in_layer(
        self, stored: StoredTensor, prefix: str, part: str, leaf: str
    ) -> Iterator[tuple[str, ModelTensor]]:
        kind = self._architecture
        if kind.has_stacks and part.endswith("_exps"):
            yield self._stack(stored, prefix, part, leaf)
        elif kind.has_stacks and part == "attn_sinks":
            yield f"{prefix}{kind.layer[part]}", whole_tensor(stored)
        elif part in kind.layer and "{}" in kind.layer[part]:
            yield from _each_part(stored, f"{prefix}{kind.layer[part]}.{leaf}")
        elif part in kind.layer:
            yield f"{prefix}{kind.layer[part]}.{leaf}", self._plain(stored, part)
        elif part == "attn_qkv":
            yield from self._split(stored, prefix, leaf)
        elif kind.experts and part.endswith("_exps") and len(stored.shape) == 3:
            yield from self._each_expert(stored, prefix, part.removesuffix("_exps"))

    def _plain(self, stored: StoredTensor, part: str) -> GgufTensor:
        kind, tensor = self._architecture, whole_tensor(stored)
        if part.endswith("norm"):
            return replace(tensor, shift=kind.norm_shift)
        if kind.has_pairs and part in ("attn_q", "attn_k"):
            heads = self._num_heads if part == "attn_q" else self._num_kv_heads
            return replace(tensor, paired_heads=_fitting(stored, stored.shape[0], heads))
        if part in kind.transposed and len(stored.shape) == 2:
            return replace(tensor, shape=stored.shape[::-1], is_transposed=True)
        return tensor

    def _split(self, stored: StoredTensor, prefix: str, leaf: str) -> Iterator[tuple[str, ModelTensor]]:
        """Splits queries, keys and values: one matrix in the file, three in the model."""
        queries, keys = self._sizes
        if stored.shape[0] != queries + 2 * keys:
            return
        begin = 0
        for part, count, heads in (
            ("attn_q", queries, self._num_heads),
            ("attn_k", keys, self._num_kv_heads),
            ("attn_v", keys, 0),
        ):
            tensor = GgufTensor(
                stored=stored,
                shape=(count, *stored.shape[1:]),
                first=begin,
                count=count,
                paired_heads=heads if self._architecture.has_pairs else 0,
            )
            yield f"{prefix}{self._architecture.layer[part]}.{leaf}", tensor
            begin += count

    def _each_expert(self, stored: StoredTensor, prefix: str, part: str) -> Iterator[tuple[str, ModelTensor]]:
        names = self._architecture.experts
        if names and part in names:
            yield from _each_part(stored, f"{prefix}{names[part]}.weight")

    def _stack(self, stored: StoredTensor, prefix: str, part: str, leaf: str) -> tuple[str, ModelTensor]:
        """Returns all experts as one tensor. Gate and up get temporary names; ``_interleaved`` joins them."""
        name = {"ffn_gate_exps": _GATE, "ffn_up_exps": _UP}.get(part) or self._architecture.layer[part]
        if leaf == "bias":
            return f"{prefix}{name}_bias", whole_tensor(stored)
        shape = (*stored.shape[:-2], *stored.shape[:-3:-1])
        return f"{prefix}{name}", replace(whole_tensor(stored), shape=shape, is_transposed=True)


def _each_part(stored: StoredTensor, name: str) -> Iterator[tuple[str, ModelTensor]]:
    """Yields the slices of a tensor on its slowest axis. ``{}`` in ``name`` becomes the index."""
    for number in range(stored.shape[0]):
        part = GgufTensor(stored=stored, shape=stored.shape[1:], first=number, count=1)
        yield name.format(number), part


_GATE, _UP, _BOTH = "mlp.experts.gate_proj", "mlp.experts.up_proj", "mlp.experts.gate_up_proj"


def _interleaved(tensors: Mapping[str, ModelTensor]) -> dict[str, ModelTensor]:
    """Joins gate and up of each layer's experts into one tensor."""
    joined = dict(tensors)
    for name, gate in tensors.items():
        if _GATE in name:
            up = joined.get(name.replace(_GATE, _UP))
            if isinstance(gate, GgufTensor) and isinstance(up, GgufTensor) and gate.shape == up.shape:
                del joined[name], joined[name.replace(_GATE, _UP)]
                shape = (*gate.shape[:-1], 2 * gate.shape[-1])
                joined[name.replace(_GATE, _BOTH)] = InterleavedTensor(parts=(gate, up), shape=shape)
    return joined


_KEYS, _VALUES, _LATENTS = "self_attn.k_b_proj", "self_attn.v_b_proj", "self_attn.kv_b_proj"


def _with_latents(tensors: Mapping[str, ModelTensor]) -> dict[str, ModelTensor]:
    """Joins the two stacks of each layer's latent attention into one tensor."""
    joined = dict(tensors)
    for name, keys in tensors.items():
        values = tensors.get(name.replace(_KEYS, _VALUES)) if _KEYS in name else None
        if not isinstance(keys, GgufTensor) or not isinstance(values, GgufTensor):
            continue
        if len(keys.shape) == 3 and values.shape[::2] == keys.shape[:2]:
            heads, rank, key_dim = keys.shape
            del joined[name], joined[name.replace(_KEYS, _VALUES)]
            joined[name.replace(_KEYS, _LATENTS)] = LatentTensor(
                parts=(keys, values), shape=(heads * (key_dim + values.shape[1]), rank)
            )
    return joined


def _fitting(stored: StoredTensor, num_rows: int, num_heads: int) -> int:
    if num_heads < 1 or num_rows % (2 * num_heads):
        raise BadModelFolder(
            f"the tensor {stored.name} has {num_rows} rows, which cannot be divided into {num_heads} heads",
            param=stored.name,
        )
    return num_heads
