"""Reads an adapter in PEFT's format: low-rank changes of a model's projections (LoRA; Hu et al. 2021, arXiv
2106.09685).

A folder has ``adapter_config.json`` and ``adapter_model.safetensors``. The tensors decide which projections
are changed; the config decides by how much. Adapters that change any other part of the model are rejected.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from agentflow.engine.models.config import DecoderConfig
from agentflow.engine.models.families.family import WeightNames
from agentflow.engine.models.families.registry import FAMILIES
from agentflow.engine.models.forward.adapted_products import ProductName
from agentflow.engine.models.weights.row_order import qkv_order
from agentflow.engine.store.adapter_folder import CONFIG, WEIGHTS
from agentflow.engine.store.model_folder import read_object
from agentflow.errors import BadModelFolder
from agentflow.kernels.inputs import Adapter, LayerAdapter, LowRank, LowRankPart
from agentflow.kernels.linear.method import LinearMethod
from agentflow.protocol.bounds.client_pattern import InvalidPattern, compiled
from agentflow.protocol.sampling import is_number, is_whole

MAX_RANK = 100_000
MAX_ALPHA = 1e6
PATTERNS_S = 1.0
# Settings of PEFT that change more than the projections, or change them in another way.
_UNSUPPORTED = (
    "modules_to_save",
    "use_dora",
    "lora_bias",
    "target_parameters",
    "trainable_token_indices",
    "layer_replication",
    "use_qalora",
    "use_bdlora",
    "alora_invocation_tokens",
    "arrow_config",
    "kasa_config",
    "monteclora_config",
    "velora_config",
)
# Initialisations that also change the base model's weights: such adapters need the changed base model.
_CHANGE_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga", "mica")
_TENSOR = re.compile(r"(?:base_model\.model\.)?(?P<module>.+)\.lora_(?P<kind>[AB])(?:\.default)?\.weight")


@dataclass(frozen=True, slots=True)
class _Projection:
    """One projection: some outputs of one product of a layer."""

    layer: int
    product_name: ProductName
    num_in: int
    first: int  # its first output in the product
    num_out: int
    order: Tensor | None = None  # the rows of ``B`` in the order of the product's outputs; None: unchanged


@dataclass(frozen=True, slots=True)
class AdapterWeights:
    """An adapter as read from its folder, in host memory."""

    num_layers: int
    # The changes of each product of each layer: projections, with A [rank, in] and the scaled B [out, rank].
    parts: Mapping[tuple[int, ProductName], Sequence[tuple[_Projection, Tensor, Tensor]]]

    @torch.inference_mode()
    def packed(self, device: torch.device, linear: LinearMethod) -> Adapter:
        """Returns the adapter on the model's device, in the layout of ``linear``."""

        def product(layer: int, product_name: ProductName) -> LowRank | None:
            found = sorted(self.parts.get((layer, product_name), ()), key=lambda part: part[0].first)
            if not found:
                return None
            downs = torch.cat([down for _, down, _ in found]).to(device)
            ups = [(linear.pack(up.contiguous().to(device), None), one.first) for one, _, up in found]
            return LowRank(linear.pack(downs, None), tuple(LowRankPart(*up) for up in ups))

        layers = [
            LayerAdapter(product(i, "qkv"), product(i, "output"), product(i, "gate_up"), product(i, "down"))
            for i in range(self.num_layers)
        ]
        return Adapter(tuple(layers))


def read_adapter(folder: Path, config: DecoderConfig, dtype: torch.dtype) -> AdapterWeights:
    """Reads the adapter in ``folder`` for the model with this config. ``check_adapter`` must have accepted
    the folder. Raises ``BadModelFolder`` if it is for another base model, or changes unsupported parts."""
    settings = read_object(folder / CONFIG) or {}
    _check_settings(folder, settings)
    patterns = _Patterns(folder, settings)
    known = dict(_projections(config))
    tensors = _read_tensors(folder)
    parts: dict[tuple[int, ProductName], list[tuple[_Projection, Tensor, Tensor]]] = {}
    for module in sorted(tensors):
        projection = known.get(module)
        if projection is None:
            raise _unknown_module(folder, module, known, config)
        rank = patterns.value("rank_pattern", module, settings.get("r"))
        down, up = _checked(folder, module, tensors[module], projection, rank, settings)
        scale = _scale(
            folder, rank, patterns.value("alpha_pattern", module, settings.get("lora_alpha")), settings
        )
        up = up if projection.order is None else up.index_select(0, projection.order)
        changed = (projection, down.to(dtype), (up.float() * scale).to(dtype))
        parts.setdefault((projection.layer, projection.product_name), []).append(changed)
    return AdapterWeights(config.num_layers, parts)


def _check_settings(folder: Path, settings: Mapping[str, Any]) -> None:
    def refuse(name: str, why: str) -> BadModelFolder:
        return BadModelFolder(f"{folder}: {CONFIG}: {why}", param=name)

    if settings.get("peft_type") != "LORA":
        raise refuse("peft_type", f"peft_type is {settings.get('peft_type')!r}, and only LORA is supported")
    for name in _UNSUPPORTED:
        if settings.get(name):
            raise refuse(name, f"{name} is set, which is not supported: train the adapter without it")
    if settings.get("bias", "none") != "none":
        raise refuse("bias", "the adapter changes biases, which is not supported: train it with bias='none'")
    start = str(settings.get("init_lora_weights")).lower()
    if start.startswith(_CHANGE_BASE):
        raise refuse(
            "init_lora_weights",
            f"init_lora_weights is {start}, so the adapter needs a changed base model: convert it to a plain "
            "LoRA",
        )


def _projections(config: DecoderConfig) -> Iterator[tuple[str, _Projection]]:
    """Yields the projections of all layers, except experts, with the names of their modules."""
    family = FAMILIES[config.architecture]
    for names in (family.names, *family.other_names):  # adapter and model may use names of different releases
        yield from _projections_named(config, names)


def _projections_named(config: DecoderConfig, names: WeightNames) -> Iterator[tuple[str, _Projection]]:
    hidden, inner = config.hidden_size, config.intermediate_size
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    qkv = [queries, keys, keys] if len(names.qkv) == 3 else [queries + 2 * keys]
    gate_up = inner * (2 if config.is_gated else 1) // len(names.gate_up)
    dense: list[tuple[ProductName, tuple[str, ...], list[int], int]] = [
        ("gate_up", names.gate_up, [gate_up] * len(names.gate_up), hidden),
        ("down", (names.down,), [hidden], inner),
    ]
    attention: list[tuple[ProductName, tuple[str, ...], list[int], int]] = [
        ("qkv", names.qkv, qkv, hidden),
        ("output", (names.output,), [hidden], queries),
    ]
    order = qkv_order(config, names)
    for layer in range(config.num_layers):
        prefix = names.layers.format(layer)
        for product, parts, sizes, num_in in attention + ([] if config.layer(layer).is_sparse else dense):
            first = 0
            for name, size in zip(parts, sizes, strict=True):
                rows = order[first : first + size] - first if order is not None and product == "qkv" else None
                yield f"{prefix}{name}", _Projection(layer, product, num_in, first, size, rows)
                first += size


def _read_tensors(folder: Path) -> dict[str, dict[str, Tensor]]:
    """Returns the pairs of ``A`` [rank, in] and ``B`` [out, rank], by module."""
    found: dict[str, dict[str, Tensor]] = {}
    try:
        with safe_open(folder / WEIGHTS, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118  not a mapping
                match = _TENSOR.fullmatch(name)
                if match is None:
                    raise BadModelFolder(
                        f"{folder}: tensor {name} is not a lora_A or lora_B of a projection", param=name
                    )
                found.setdefault(match["module"], {})[match["kind"]] = file.get_tensor(name)
    except (OSError, SafetensorError) as error:
        raise BadModelFolder(f"{folder / WEIGHTS} cannot be read: {error}", param=WEIGHTS) from error
    if not found:
        raise BadModelFolder(f"{folder / WEIGHTS} has no tensors", param=WEIGHTS)
    return found


def _checked(
    folder: Path,
    module: str,
    pair: Mapping[str, Tensor],
    projection: _Projection,
    rank: Any,
    settings: Mapping[str, Any],
) -> tuple[Tensor, Tensor]:
    if not is_whole(rank, 1, MAX_RANK):
        raise BadModelFolder(
            f"{folder}: {CONFIG}: the rank of {module} is {rank!r:.40}, not a whole number", param="r"
        )
    for kind, needed in (("A", (rank, projection.num_in)), ("B", (projection.num_out, rank))):
        name = f"{module}.lora_{kind}.weight"
        if kind not in pair:
            raise BadModelFolder(f"{folder} has no tensor {name}: its weights are incomplete", param=name)
        if tuple(pair[kind].shape) != needed:
            base = settings.get("base_model_name_or_path") or "another base model"
            raise BadModelFolder(
                f"{folder}: tensor {name} is {tuple(pair[kind].shape)}, but this model and {CONFIG} make it "
                f"{needed}: the adapter is for {base}",
                param=name,
            )
        if not torch.isfinite(pair[kind]).all():
            raise BadModelFolder(f"{folder}: tensor {name} has values that are not finite", param=name)
    return pair["A"], pair["B"]


def _scale(folder: Path, rank: int, alpha: Any, settings: Mapping[str, Any]) -> float:
    if not is_number(alpha, -MAX_ALPHA, MAX_ALPHA):
        raise BadModelFolder(
            f"{folder}: {CONFIG}: lora_alpha is {alpha!r:.40}, not a number", param="lora_alpha"
        )
    return float(alpha / (math.sqrt(rank) if settings.get("use_rslora") else rank))


class _Patterns:
    """The settings of single modules, by patterns of their names. Raises ``BadModelFolder`` if the patterns
    of an adapter together take longer than ``PATTERNS_S`` seconds: no other adapter is read meanwhile."""

    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        self._settings = settings
        self._folder = folder
        self._left_s = PATTERNS_S

    def value(self, name: str, module: str, default: Any) -> Any:
        """Returns the value of the first pattern that matches the end of the module's name, as in PEFT."""
        patterns = self._settings.get(name) or {}
        if not isinstance(patterns, dict):
            raise self._refused(name, "it is not an object")
        for pattern, value in patterns.items():
            began_s = time.perf_counter()
            try:
                found = compiled(rf"(.*\.)?({pattern})").fullmatch(module, timeout=max(self._left_s, 1e-6))
            except InvalidPattern as error:
                raise self._refused(name, f"{pattern!r:.100} is not a pattern: {error}") from None
            except TimeoutError:
                raise self._refused(name, "its patterns take too long") from None
            self._left_s -= time.perf_counter() - began_s
            if found is not None:
                return value
        return default

    def _refused(self, name: str, why: str) -> BadModelFolder:
        return BadModelFolder(f"{self._folder}: {CONFIG}: {name}: {why}", param=name)


def _unknown_module(
    folder: Path, module: str, known: Mapping[str, _Projection], config: DecoderConfig
) -> BadModelFolder:
    names = dict.fromkeys(name.rpartition(".")[2] for name in known)
    return BadModelFolder(
        f"{folder} changes {module}, which is not supported: an adapter of {config.architecture} can change "
        f"only {', '.join(names)} of its {config.num_layers} layers",
        param=module,
    )
