"""The memory that models need, and how they divide the memory of the machine.

``divide_memory`` follows one rule. Of the memory that is free when the server starts, the models together get
the fraction ``memory_share``: of the GPU's memory if they run on it, otherwise of the host's. Weights and
processes are subtracted first, then the KV pools with a configured size. The other pools divide the rest
equally; a pool in the host's memory gets at most ``WANTED_KV_TOKENS``, and the other pools get the surplus.
If the models do not fit, nothing is loaded.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from agentflow.engine.store.adapter_folder import adapter_bytes
from agentflow.engine.store.config_parts import text_config
from agentflow.engine.store.embedding_folder import read_embedding_folder
from agentflow.engine.store.model_folder import json_object, safetensors_header, weight_files
from agentflow.engine.store.weight_scheme import Scheme, read_scheme
from agentflow.errors import BadArgument, BadModelFolder

WANTED_KV_TOKENS = 65_536
MIN_KV_TOKENS = 1_024
MAX_SHOWN = 8
"""The most models or replicas that the error about too little memory lists."""
# The largest fraction of the free memory for the KV pool of a single model.
MAX_KV_FRACTION = 0.5
# On a GPU, the fraction of the memory after the weights: the rest is for activations and CUDA graphs.
GPU_KV_FRACTION = 0.85
# The memory of a process in addition to weights and KV: torch, the tokenizer, activations. Larger
# vocabularies need more: the tokenizer of Gemma's 262,144 tokens takes 440 MB, and the logits of 256 rows 270
# MB.
PROCESS_BYTES = 500_000_000
PROCESS_VOCABULARY = 50_000
VOCABULARY_TOKEN_BYTES = 1_600
FEATURE_BYTES = 512 * 2**20
"""The budget of a model with vision for the features of images."""
ID_BYTES = 4
"""Bytes of a token in a model that caches no keys and values: its id."""

# Bytes of a weight in blocks of 32 with their scales, or in 8-bit floats with a scale for each row.
_QUANTIZED_ITEM_BYTES = {"int8": 34 / 32, "int4": 20 / 32, "fp8": 1 + 4 / 512}
_PANEL_ITEM_BYTES = {
    **dict.fromkeys(("Q4_0", "IQ4_NL"), 18 / 32),
    **dict.fromkeys(("Q4_1", "Q4_K"), 20 / 32),
    **dict.fromkeys(("Q5_0", "MXFP4"), 22 / 32),
    **dict.fromkeys(("Q5_1", "Q5_K"), 24 / 32),
    "Q6_K": 28 / 32,
}
"""Bytes of a weight in the native kernels, by its type in a GGUF file. Other quantised types become int8."""
_GPU_ITEM_BYTES = {
    **dict.fromkeys(("Q4_0", "Q4_1", "Q4_K"), 20 / 32),
    **dict.fromkeys(("Q5_1", "Q5_K", "Q6_K"), 36 / 32),
}
"""Bytes of a weight in the kernels for GPUs. Other quantised types take as much as int8."""
_TOWER_PARTS = tuple(
    f"{before}{part}"
    for before in ("", "model.")
    for part in ("vision_tower.", "vision_model.", "visual.", "connector.", "multi_modal_projector.")
)
"""The prefixes of the names of a vision tower's tensors."""
_DENSE_TYPES = ("F64", "F32", "F16", "BF16")


@dataclass(frozen=True, slots=True)
class MemoryNeed:
    """The memory need of one model. ``kv_tokens``: the configured size of its pool, or None. ``vocabulary``:
    the size of its vocabulary."""

    name: str
    weight_bytes: int
    kv_bytes_per_token: int
    kv_tokens: int | None = None
    vocabulary: int = 0
    wanted_kv_tokens: float = WANTED_KV_TOKENS  # the most tokens of a pool whose size is not configured
    processes: int = 1  # the processes that compute the model in this memory
    feature_bytes: int = 0  # for the features of images

    @property
    def fixed_bytes(self) -> int:
        """The need without the KV pool."""
        return self.weight_bytes + self.feature_bytes + self.processes * work_bytes(self.vocabulary)


def bytes_of_weight(quantize: str | None) -> float:
    """Returns the bytes of a weight in bfloat16, or as ``quantize`` rounds it."""
    return 2.0 if quantize is None else _QUANTIZED_ITEM_BYTES[quantize]


def work_bytes(vocabulary: int) -> int:
    """Returns the bytes that a model's process needs in addition to weights and KV."""
    return PROCESS_BYTES + VOCABULARY_TOKEN_BYTES * max(0, vocabulary - PROCESS_VOCABULARY)


def memory_need(
    name: str,
    folder: Path,
    dtype: str,
    kv_tokens: int | None,
    quantize: str | None = None,
    *,
    kv_dtype: str = "auto",
    task: str = "generate",
    on_gpu: bool = False,
    adapters: Iterable[Path] = (),
    ranks: int = 1,
) -> MemoryNeed:
    """Estimates the memory that a model needs.

    Args:
        name: The model's name.
        folder: Its folder or GGUF file.
        dtype, quantize, kv_dtype, task: As in ``EngineSettings``.
        kv_tokens: The configured size of its pool, or None.
        on_gpu: Its weights are in the form of the kernels for GPUs.
        adapters: Folders of the adapters that are loaded with it.
        ranks: The processes over which it is divided; on GPUs, the result is the need of one of them.

    Raises:
        BadModelFolder: the folder has no model that the engine can load.
    """
    item_bytes = 4 if dtype == "float32" or (dtype == "float16" and not on_gpu) else 2
    config, num_parameters = read_shape(folder)
    weight_bytes = num_parameters * item_bytes
    in_towers = _vision_parameters(folder, config)
    if quantize is not None:  # the matrices of towers stay dense
        weight_bytes = int((num_parameters - in_towers) * bytes_of_weight(quantize))
        weight_bytes += in_towers * item_bytes
    if dtype == "auto" and (not on_gpu or find_spec("triton")):
        panels = _panel_bytes(folder, config, quantize, _GPU_ITEM_BYTES if on_gpu else _PANEL_ITEM_BYTES)
        weight_bytes = min(weight_bytes, panels or weight_bytes)
    weight_bytes += sum(adapter_bytes(adapter, item_bytes) for adapter in adapters)
    size = text_config(config).get("vocab_size")
    vocabulary = size if isinstance(size, int) else 0
    if task == "embed" and not read_embedding_folder(folder).takes_last:  # keys and values are not cached
        return MemoryNeed(name, weight_bytes, ID_BYTES, kv_tokens, vocabulary)
    with _naming(folder):
        kv_bytes = kv_bytes_per_token(config, 1 if kv_dtype == "fp8" else item_bytes, ranks)
        feature_bytes = FEATURE_BYTES if in_towers else 0
        if on_gpu:  # all weights except norms, routers and positions are divided
            return MemoryNeed(
                name,
                weight_bytes // ranks,
                kv_bytes,
                kv_tokens,
                vocabulary,
                math.inf,
                feature_bytes=feature_bytes,
            )
        return MemoryNeed(
            name,
            weight_bytes,
            ranks * kv_bytes,
            kv_tokens,
            vocabulary,
            processes=ranks,
            feature_bytes=feature_bytes,
        )


def _panel_bytes(
    folder: Path, config: Mapping[str, Any], quantize: str | None, item_bytes: Mapping[str, float]
) -> int:
    """Estimates the bytes of a model's quantised weights in the kernels' layout; 0 if they are not quantised.
    ``item_bytes``: the bytes of a weight, by its type."""
    from agentflow.engine.store.gguf.file import find_gguf, open_gguf  # needs numpy; `doctor` does not

    if (file := find_gguf(folder)) is not None:
        dense = bytes_of_weight(quantize)
        sizes = dict.fromkeys(_DENSE_TYPES, dense) | dict(item_bytes)
        int8 = _QUANTIZED_ITEM_BYTES["int8"]
        tensors = open_gguf(file).tensors.items()
        return int(
            sum(
                math.prod(one.shape)
                * (2.0 if name.startswith(_TOWER_PARTS) else sizes.get(one.type_name, int8))
                for name, one in tensors
            )
        )
    if (scheme := _read_scheme(config)) is None:
        return 0
    parts = [folder / name for name in weight_files(folder)]
    return int(sum(part.stat().st_size for part in parts if part.exists()) * scheme.panels_of_stored)


@contextmanager
def _naming(folder: Path) -> Iterator[None]:
    """Adds the folder to errors about its config."""
    try:
        yield
    except BadModelFolder as error:
        raise BadModelFolder(f"{folder}: {error}", param=error.param) from error.__cause__


def _read_scheme(config: Mapping[str, Any]) -> Scheme | None:
    try:
        return read_scheme(config)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise BadModelFolder(
            f"quantization_config has an invalid value: {error}", param="quantization_config"
        ) from None


def read_shape(folder: Path) -> tuple[Mapping[str, Any], int]:
    """Returns the config of a model folder or a GGUF file, and the number of its parameters. Raises
    ``BadModelFolder`` if they cannot be read."""
    from agentflow.engine.store.gguf.file import find_gguf, open_gguf  # needs numpy; `doctor` does not

    if (gguf := find_gguf(folder)) is not None:
        file = open_gguf(gguf)
        return file.config, sum(math.prod(tensor.shape) for tensor in file.tensors.values())
    config = json_object(folder / "config.json")
    if config is None:
        raise BadModelFolder(f"{folder}: config.json is not a JSON object", param="config.json")
    with _naming(folder):
        scheme = _read_scheme(config)
    return config, _num_parameters(folder, scheme)


def kv_bytes_per_token(config: Mapping[str, Any], item_bytes: int, ranks: int = 1) -> int:
    """Returns the bytes of the keys and values of one token in all layers, on one of ``ranks`` processes.
    ``config``: the model's config.json."""
    config = text_config(config)
    # GPT-2 and its relatives use the second names, GPT-Neo the third.
    layers = _size(config, "num_hidden_layers", "n_layer", "num_layers")
    if config.get("kv_lora_rank"):  # the pool holds latents
        return 2 * layers * item_bytes * (_size(config, "kv_lora_rank") + _size(config, "qk_rope_head_dim"))
    heads_names = "num_attention_heads", "n_head", "num_heads"
    num_heads = _size(config, *heads_names)
    if config.get("multi_query") and not config.get("new_decoder_architecture"):  # StarCoder, Falcon
        heads = 1
    else:
        heads = _size(config, "num_key_value_heads", "num_kv_heads", *heads_names)
    if config.get("head_dim") is not None:
        head_size = _size(config, "head_dim")
    else:
        head_size = _size(config, "hidden_size", "n_embd") // num_heads
    return 2 * layers * max(1, heads // ranks) * head_size * item_bytes


def _size(config: Mapping[str, Any], *names: str) -> int:
    """Returns the value of the first of these names that is in the config."""
    name = next((name for name in names if config.get(name) is not None), names[0])
    value = config.get(name)
    if value is None:
        raise BadModelFolder(f"config.json has no {' or '.join(names)}", param=name)
    if not isinstance(value, int) or value < 1:
        raise BadModelFolder(
            f"config.json: {name} must be an integer of at least 1, not {value!r}", param=name
        )
    return value


def fitting_kv_tokens(need: MemoryNeed, free_bytes: int) -> int:
    """Returns the size of the KV pool of a single model in tokens: ``need.kv_tokens``, or at most half of the
    free memory, or on a GPU most of the memory after the weights. Raises ``BadArgument`` if the model does
    not fit.

    >>> fitting_kv_tokens(MemoryNeed("a", 500_000_000, 10_000), 2_000_000_000)
    65536
    >>> fitting_kv_tokens(MemoryNeed("a", 500_000_000, 10_000), 1_100_000_000)
    10000
    """
    left = free_bytes - need.fixed_bytes
    if (need.kv_tokens or MIN_KV_TOKENS) * need.kv_bytes_per_token > left:
        raise _does_not_fit([need], free_bytes)
    if need.kv_tokens is not None:
        return need.kv_tokens
    if need.wanted_kv_tokens == math.inf:
        return max(MIN_KV_TOKENS, int(left * GPU_KV_FRACTION) // need.kv_bytes_per_token)
    room = min(left, int(free_bytes * MAX_KV_FRACTION)) // need.kv_bytes_per_token
    return max(MIN_KV_TOKENS, min(int(need.wanted_kv_tokens), room))


def divide_memory(needs: Sequence[MemoryNeed], budget_bytes: int) -> dict[str, int]:
    """Returns the size of each model's KV pool in tokens. Raises ``BadArgument`` if the models do not fit.

    >>> two = [MemoryNeed("a", 0, 1_000), MemoryNeed("b", 0, 4_000)]
    >>> divide_memory(two, 1_200_000_000)
    {'a': 65536, 'b': 33616}
    """
    left = budget_bytes - sum(need.fixed_bytes for need in needs)
    kv_tokens = {need.name: need.kv_tokens for need in needs if need.kv_tokens is not None}
    left -= sum(kv_tokens[need.name] * need.kv_bytes_per_token for need in needs if need.name in kv_tokens)
    open_needs = [need for need in needs if need.kv_tokens is None]
    # The cheapest pools first: the others get the rest.
    open_needs.sort(key=lambda need: need.kv_bytes_per_token)
    if left < sum(MIN_KV_TOKENS * need.kv_bytes_per_token for need in open_needs):
        raise _does_not_fit(needs, budget_bytes)
    for number, need in enumerate(open_needs):
        part = left // (len(open_needs) - number)
        room = min(need.wanted_kv_tokens, part // need.kv_bytes_per_token)
        kv_tokens[need.name] = max(MIN_KV_TOKENS, int(room))
        left -= kv_tokens[need.name] * need.kv_bytes_per_token
    return {need.name: kv_tokens[need.name] for need in needs}


def _does_not_fit(needs: Sequence[MemoryNeed], budget_bytes: int) -> BadArgument:
    lines = [
        f"{need.name} {need.weight_bytes / 1e9:.2f} GB of weights and "
        f"{(need.kv_tokens or MIN_KV_TOKENS) * need.kv_bytes_per_token / 1e9:.2f} GB for "
        f"{need.kv_tokens or MIN_KV_TOKENS:,} tokens"
        + (f" and {need.feature_bytes / 1e9:.2f} GB for images" if need.feature_bytes else "")
        for need in needs[:MAX_SHOWN]
    ]
    if len(needs) > MAX_SHOWN:
        lines.append(f"{len(needs) - MAX_SHOWN} more")
    models, fewer = ("models do", "fewer models") if len(needs) > 1 else ("model does", "a smaller model")
    work = sum(need.processes * work_bytes(need.vocabulary) for need in needs)
    return BadArgument(
        f"the {models} not fit into {budget_bytes / 1e9:.2f} GB of memory: {'; '.join(lines)}; plus "
        f"{work / 1e9:.2f} GB for their processes: use a smaller kv_tokens, dtype bfloat16 instead of "
        f"float32, {fewer}, or a larger memory_share (servers)",
        param="kv_tokens",
    )


def _vision_parameters(folder: Path, config: Mapping[str, Any]) -> int:
    """Returns the number of parameters of a model's vision tower; 0 if it has none."""
    from agentflow.engine.store.gguf.file import find_gguf, open_gguf  # needs numpy; `doctor` does not

    if "vision_config" not in config:
        return 0
    if (gguf := find_gguf(folder)) is None:
        return _num_parameters(folder, None, _TOWER_PARTS)
    tensors = open_gguf(gguf).tensors.items()
    return sum(math.prod(one.shape) for name, one in tensors if name.startswith(_TOWER_PARTS))


def _num_parameters(folder: Path, scheme: Scheme | None, beginnings: tuple[str, ...] = ("",)) -> int:
    """Counts parameters by the headers of the safetensors files. ``scheme``: how they are quantised.
    ``beginnings``: count tensors whose names start with one of these."""
    total = 0
    for file in (folder / name for name in weight_files(folder)):
        tensors, _ = safetensors_header(file)
        try:
            total += sum(
                math.prod(entry["shape"]) * _values_in_each(name, scheme)
                for name, entry in tensors.items()
                if name.startswith(beginnings)
            )
        except (AttributeError, KeyError, TypeError) as error:
            raise BadModelFolder(
                f"{file} has tensors without a shape: its header is damaged, fetch it again", param=file.name
            ) from error
    return total


def _values_in_each(name: str, scheme: Scheme | None) -> int:
    """Returns the number of weights in each element of a tensor: packed tensors have several."""
    if scheme is None:
        return 1
    if name.endswith((".qweight", ".weight_packed")):
        return 32 // scheme.bits
    return 2 if name.endswith("_blocks") else 1
