"""Quantised safetensors written value by value, after the published layouts of AWQ, GPTQ, compressed-tensors,
fp8 and MXFP4: the reference for ``agentflow.engine.models.weights.packed_matrices``."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

Parts = dict[str, Tensor]
Packed = tuple[Parts, Tensor]
"""The tensors of a matrix by their endings, and the exact values that they stand for."""

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
AWQ_OUTPUTS = [0, 2, 4, 6, 1, 3, 5, 7]  # the output, of 8, in each half byte of a word, lowest bits first


@dataclass(frozen=True)
class Rounded:
    """``(codes - zeros) * scales``, with scales and zeros [out, groups] for each input's ``group_of``."""

    codes: Tensor
    zeros: Tensor
    scales: Tensor
    group_of: list[int]

    def values(self) -> Tensor:
        """float32 [out, in]."""
        zeros, scales = self.zeros.double()[:, self.group_of], self.scales.double()[:, self.group_of]
        return ((self.codes - zeros) * scales).float()


def rounded(
    weight: Tensor,
    bits: int,
    group_size: int,
    *,
    is_symmetric: bool,
    act_order: bool = False,
    scale_dtype: torch.dtype = torch.float16,
) -> Rounded:
    """``weight`` in codes of 0 to 2 ** bits - 1. Zero points are at least 1, as version 1 of GPTQ
    needs."""
    num_in, top = weight.shape[1], 2**bits - 1
    size = num_in if group_size == -1 else group_size
    group_of = [k // size for k in range(num_in)]
    if act_order:
        group_of = [group_of[k] for k in torch.randperm(num_in).tolist()]
    columns = [torch.tensor([k for k in range(num_in) if group_of[k] == g]) for g in range(num_in // size)]
    scales, zeros, codes = [], [], torch.empty(weight.shape, dtype=torch.int64)
    for places in columns:
        part = weight[:, places]
        if is_symmetric:
            scale = (part.abs().amax(1) / (top // 2)).to(scale_dtype)
            zero = torch.full((len(part),), (top + 1) // 2)
        else:
            low, high = part.amin(1).clamp(max=0), part.amax(1).clamp(min=0)
            scale = ((high - low) / top).to(scale_dtype)
            zero = (-low / scale.float()).round().clamp(1, top).long()
        codes[:, places] = ((part / scale.float()[:, None]).round().long() + zero[:, None]).clamp(0, top)
        scales.append(scale)
        zeros.append(zero)
    return Rounded(codes, torch.stack(zeros, 1), torch.stack(scales, 1), group_of)


def words(codes: Tensor, bits: int, order: list[int] | None = None) -> Tensor:
    """int32 [n, m * bits / 32] of codes [n, m], one by one: the first in the lowest bits of each word, or the
    one that ``order`` names."""
    per_word = 32 // bits
    order = order or list(range(per_word))
    rows = []
    for row in codes.tolist():
        row += [0] * (-len(row) % per_word)
        packed = []
        for first in range(0, len(row), per_word):
            word = 0
            for place, which in enumerate(order):
                word |= row[first + which] << bits * place
            packed.append(word - (1 << 32) if word >= 1 << 31 else word)
        rows.append(packed)
    return torch.tensor(rows, dtype=torch.int32)


def awq(weight: Tensor, group_size: int) -> Packed:
    codes = rounded(weight, 4, group_size, is_symmetric=False)
    parts = {
        "qweight": words(codes.codes.t(), 4, AWQ_OUTPUTS),
        "qzeros": words(codes.zeros.t(), 4, AWQ_OUTPUTS),
        "scales": codes.scales.t().contiguous(),
    }
    return parts, codes.values()


def gptq(
    weight: Tensor, bits: int, group_size: int, *, version: int, act_order: bool, is_symmetric: bool
) -> Packed:
    codes = rounded(weight, bits, group_size, is_symmetric=is_symmetric, act_order=act_order)
    parts = {
        "qweight": words(codes.codes.t().t(), bits).t().contiguous(),
        "qzeros": words(codes.zeros.t() - (1 if version == 1 else 0), bits),
        "scales": codes.scales.t().contiguous(),
        "g_idx": torch.tensor(codes.group_of, dtype=torch.int32),
    }
    return parts, codes.values()


def packed(weight: Tensor, bits: int, group_size: int, *, is_symmetric: bool, act_order: bool) -> Packed:
    codes = rounded(
        weight,
        bits,
        group_size,
        is_symmetric=is_symmetric,
        act_order=act_order,
        scale_dtype=torch.bfloat16,
    )
    parts = {
        "weight_packed": words(codes.codes, bits),
        "weight_scale": codes.scales,
        "weight_shape": torch.tensor(weight.shape),
    }
    if not is_symmetric:
        parts["weight_zero_point"] = words(codes.zeros.t(), bits).t().contiguous()
    if act_order:
        parts["weight_g_idx"] = torch.tensor(codes.group_of, dtype=torch.int32)
    return parts, codes.values()


def int8(weight: Tensor) -> Packed:
    codes = rounded(weight, 8, -1, is_symmetric=True, scale_dtype=torch.bfloat16)
    return {"weight": (codes.codes - 128).to(torch.int8), "weight_scale": codes.scales}, codes.values()


def fp8(weight: Tensor, block: tuple[int, int], scale_name: str) -> Packed:
    """``block``: outputs and inputs that share a scale; a block of the whole matrix stores one number."""
    num_out, num_in = weight.shape
    rows, columns = min(block[0], num_out), min(block[1], num_in)
    counts = -(-num_out // rows), -(-num_in // columns)
    scales, stored = torch.empty(counts), torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
    values = torch.empty(weight.shape)
    for i in range(counts[0]):
        for j in range(counts[1]):
            part = (slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns))
            scales[i, j] = weight[part].abs().max() / 448
            stored[part] = (weight[part] / scales[i, j]).to(torch.float8_e4m3fn)
            values[part] = stored[part].float() * scales[i, j]
    return {"weight": stored, scale_name: scales.squeeze() if counts == (1, 1) else scales}, values


def mxfp4(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Blocks, scales and values of matrices [count, out, in]."""
    grid = torch.tensor(E2M1)
    groups = weight.reshape(*weight.shape[:2], -1, 32)
    exponents = torch.floor(torch.log2(groups.abs().amax(-1) / 4))
    powers = 2.0 ** exponents.unsqueeze(-1)
    near = (groups / powers).unsqueeze(-1).abs().sub(grid).abs().argmin(-1)
    codes = (near + 8 * (groups < 0)).to(torch.uint8)
    blocks = codes[..., 0::2] | codes[..., 1::2] << 4
    values = torch.where(groups < 0, -1.0, 1.0) * grid[near] * powers
    return blocks, (exponents + 127).to(torch.uint8), values.reshape(weight.shape)


def _packed_config(bits: int, group_size: int, *, is_symmetric: bool, act_order: bool) -> Mapping[str, Any]:
    weights: dict[str, Any] = {"num_bits": bits, "type": "int", "symmetric": is_symmetric}
    weights |= {"strategy": "group" if group_size > 0 else "channel", "group_size": group_size}
    weights["actorder"] = "group" if act_order else None
    return _compressed("pack-quantized", weights)


def _compressed(form: str, weights: Mapping[str, Any]) -> Mapping[str, Any]:
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": groups}


def _gptq_config(bits: int, group_size: int, version: int, *, is_symmetric: bool) -> Mapping[str, Any]:
    form = "gptq" if version == 1 else "gptq_v2"
    return {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": group_size,
        "sym": is_symmetric,
        "checkpoint_format": form,
    }


_FLOAT8 = {"num_bits": 8, "type": "float", "symmetric": True}

# The config and the packing of each kind of checkpoint.
KINDS: dict[str, tuple[Mapping[str, Any], Callable[[Tensor], Packed]]] = {
    "awq": (
        {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True},
        lambda w: awq(w, 32),
    ),
    "gptq": (
        _gptq_config(4, 32, 1, is_symmetric=True),
        lambda w: gptq(w, 4, 32, version=1, act_order=False, is_symmetric=True),
    ),
    "gptq_zeros": (
        _gptq_config(4, -1, 1, is_symmetric=False),
        lambda w: gptq(w, 4, -1, version=1, act_order=False, is_symmetric=False),
    ),
    "gptq_v2": (
        _gptq_config(4, 32, 2, is_symmetric=False),
        lambda w: gptq(w, 4, 32, version=2, act_order=False, is_symmetric=False),
    ),
    "gptq_act_order": (
        _gptq_config(4, 32, 1, is_symmetric=True),
        lambda w: gptq(w, 4, 32, version=1, act_order=True, is_symmetric=True),
    ),
    "gptq_8_bits": (
        _gptq_config(8, 32, 1, is_symmetric=True),
        lambda w: gptq(w, 8, 32, version=1, act_order=False, is_symmetric=True),
    ),
    "gptq_8_bits_zeros": (
        _gptq_config(8, 32, 2, is_symmetric=False),
        lambda w: gptq(w, 8, 32, version=2, act_order=True, is_symmetric=False),
    ),
    "packed": (
        _packed_config(4, 32, is_symmetric=True, act_order=False),
        lambda w: packed(w, 4, 32, is_symmetric=True, act_order=False),
    ),
    "packed_zeros": (
        _packed_config(4, 32, is_symmetric=False, act_order=True),
        lambda w: packed(w, 4, 32, is_symmetric=False, act_order=True),
    ),
    "packed_8_bits": (
        _packed_config(8, -1, is_symmetric=True, act_order=False),
        lambda w: packed(w, 8, -1, is_symmetric=True, act_order=False),
    ),
    "int8": (
        _compressed("int-quantized", {"num_bits": 8, "type": "int", "strategy": "channel"}),
        int8,
    ),
    "fp8_channel": (
        _compressed("float-quantized", _FLOAT8 | {"strategy": "channel"}),
        lambda w: fp8(w, (1, w.shape[1]), "weight_scale"),
    ),
    "fp8_tensor": (
        _compressed("float-quantized", _FLOAT8 | {"strategy": "tensor"}),
        lambda w: fp8(w, (w.shape[0], w.shape[1]), "weight_scale"),
    ),
    "fp8_block": (
        {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [48, 40]},
        lambda w: fp8(w, (48, 40), "weight_scale_inv"),
    ),
}


def quantise_folder(
    folder: Path, to: Path, kind: str, *, endings: tuple[str, ...] = ("_proj",), is_transposed: bool = False
) -> None:
    """Writes the model of ``folder`` to ``to`` with the matrices of its layers in that format, and leaves in
    ``folder`` the values that these stand for. ``endings``: of their names; ``is_transposed``: they are
    [in, out]."""
    config, pack = KINDS[kind]
    tensors, exact = load_file(folder / "model.safetensors"), {}
    stored: Parts = {}
    for name, tensor in tensors.items():
        if name.endswith(tuple(f"{ending}.weight" for ending in endings)):
            parts, values = pack(tensor.float().t().contiguous() if is_transposed else tensor.float())
            exact[name] = values.t().contiguous() if is_transposed else values
            stem = name.removesuffix("weight")
            stored |= {stem + part: value.contiguous() for part, value in parts.items()}
            stored[stem + "input_scale"] = torch.ones(1)
        else:
            stored[name] = exact[name] = tensor
    to.mkdir()
    save_file(stored, to / "model.safetensors")
    save_file(exact, folder / "model.safetensors")
    raw = json.loads((folder / "config.json").read_text())
    (to / "config.json").write_text(json.dumps(raw | {"quantization_config": config}))


def pack_stacks(folder: Path, to: Path) -> None:
    """Like ``quantise_folder``: the stacked experts of GPT-OSS in MXFP4."""
    tensors = load_file(folder / "model.safetensors")
    stored, exact = dict(tensors), dict(tensors)
    for name in tensors:
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            blocks, scales, values = mxfp4(tensors[name].float().transpose(1, 2).contiguous())
            del stored[name]
            stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            exact[name] = values.transpose(1, 2).contiguous()
    to.mkdir()
    save_file(stored, to / "model.safetensors")
    save_file(exact, folder / "model.safetensors")
    raw = json.loads((folder / "config.json").read_text())
    raw["quantization_config"] = {"quant_method": "mxfp4"}
    (to / "config.json").write_text(json.dumps(raw))
