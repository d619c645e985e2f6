"""Reads ``quantization_config`` of ``config.json``: how the matrices of a folder are quantised.

Reads only properties that do not follow from the tensors: their names show which matrices are quantised, and
their shapes show the sizes of groups.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from agentflow.errors import BadModelFolder

Method = Literal["awq", "gptq", "compressed-tensors", "fp8", "mxfp4"]

METHODS: Final[Mapping[str, Method]] = {
    "awq": "awq",
    "gptq": "gptq",
    "compressed-tensors": "compressed-tensors",
    "fp8": "fp8",
    "fbgemm_fp8": "fp8",
    "mxfp4": "mxfp4",
}
"""The supported values of ``quant_method``."""
_FIELD: Final = "quantization_config"
_ACTIVE: Final = ("int-quantized", "float-quantized", "naive-quantized", "pack-quantized")


@dataclass(frozen=True, slots=True)
class Scheme:
    """The quantisation of a model's matrices."""

    method: Method
    bits: int = 8  # the size of a code, if codes are packed into words
    zero_offset: int = 0  # added to stored zero points
    is_symmetric: bool = False  # all zero points are the middle of the codes
    block: tuple[int, int] | None = None  # the outputs and inputs that share a scale; None: groups of inputs
    has_act_order: bool = False  # groups are not adjacent: the native kernels get matrices rounded to 8 bits

    @property
    def panels_of_stored(self) -> float:
        """The approximate ratio of the matrices' memory in the native kernels to their size in the files."""
        return 2.2 if self.has_act_order and self.bits < 8 else 1.3


def read_scheme(raw: Mapping[str, Any]) -> Scheme | None:
    """Returns the scheme of a model's config, or None if its weights are not quantised. Raises
    ``BadModelFolder`` for an unsupported scheme, and ``AttributeError``, ``KeyError``, ``TypeError`` or
    ``ValueError`` for missing or invalid values."""
    config = raw.get(_FIELD) or (raw.get("text_config") or {}).get(_FIELD)
    if not config:
        return None
    name = str(config.get("quant_method", "unknown"))
    match METHODS.get(name):
        case "awq":
            return _awq(config)
        case "gptq":
            return _gptq(config)
        case "compressed-tensors":
            return _compressed_tensors(config)
        case "fp8":
            return Scheme("fp8", block=_block(config.get("weight_block_size")))
        case "mxfp4":
            return Scheme("mxfp4", bits=4)
    raise _rejected(name)


def _awq(config: Mapping[str, Any]) -> Scheme:
    version, bits = str(config.get("version", "gemm")).lower(), int(config.get("bits", 4))
    if version != "gemm":
        raise _rejected(f"AWQ, version {version}")
    if bits != 4:
        raise _rejected(f"AWQ with {bits} bits")
    return Scheme("awq", bits)


def _gptq(config: Mapping[str, Any]) -> Scheme:
    # Version 1 stores zero points minus 1. Other layouts are specific to the kernels of a GPU library.
    version = str(config.get("checkpoint_format") or config.get("format") or "gptq")
    if config.get("is_marlin_format"):
        version = "marlin"
    if version not in ("gptq", "gptq_v2"):
        raise _rejected(f"GPTQ, format {version}")
    bits = int(config["bits"])
    if bits not in (2, 4, 8):
        raise _rejected(f"GPTQ with {bits} bits")
    if config.get("dynamic"):
        raise _rejected("GPTQ with another format for some layers (dynamic)")
    offset = 1 if version == "gptq" else 0
    return Scheme("gptq", bits, offset, bool(config.get("sym")), has_act_order=bool(config.get("desc_act")))


def _compressed_tensors(config: Mapping[str, Any]) -> Scheme:
    groups = [group for group in config["config_groups"].values() if group.get("weights")]
    for name in _formats(config, groups):
        if name not in _ACTIVE:
            raise _rejected(f"compressed-tensors, format {name}")
    sparsity = (config.get("sparsity_config") or {}).get("format", "dense")
    if sparsity != "dense":
        raise _rejected(f"compressed-tensors, format {sparsity}")
    if config.get("transform_config"):
        raise _rejected("compressed-tensors with transform_config")
    weights = [group["weights"] for group in groups]
    bits = {int(one["num_bits"]) for one in weights}
    if not bits <= {4, 8}:
        raise _rejected(f"compressed-tensors with {', '.join(map(str, sorted(bits)))} bits")
    blocks = {_block(one.get("block_structure")) for one in weights if one.get("strategy") == "block"}
    if len(bits) != 1 or len(blocks) > 1:
        raise _rejected("compressed-tensors with several sizes of codes or blocks")
    is_symmetric = all(one.get("symmetric", True) for one in weights)
    return Scheme(
        "compressed-tensors",
        bits.pop(),
        is_symmetric=is_symmetric,
        block=blocks.pop() if blocks else None,
        has_act_order=any(one.get("actorder") in (True, "group") for one in weights),
    )


def _formats(config: Mapping[str, Any], groups: list[Mapping[str, Any]]) -> Iterator[str]:
    """Yields the formats of all groups: with "mixed-precision", they may differ."""
    whole = str(config.get("format", "unknown"))
    for group in groups:
        yield str(group.get("format") or whole)


def _block(value: Any) -> tuple[int, int] | None:
    if value is None:
        return None
    rows, columns = value
    return int(rows), int(columns)


def _rejected(what: str) -> BadModelFolder:
    return BadModelFolder(
        f"its weights are quantised in an unsupported format ({what}): take the model unquantised, as GGUF, "
        "or in AWQ (gemm), GPTQ, fp8 or compressed-tensors",
        param=_FIELD,
    )
