"""GGUF files as they lie on disk: raw rows, parts of stored tensors, and files that are damaged."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFWriter
from numpy.typing import NDArray
from support.faults import has_param

from agentflow.engine.models.config import read_folder
from agentflow.engine.store.gguf.container import TYPES
from agentflow.engine.store.gguf.file import find_gguf, open_gguf, reading_once
from agentflow.engine.store.gguf.tensors import GgufTensor, dequantise
from agentflow.errors import BadModelFolder, UnknownModel

HIDDEN, HEADS, KV_HEADS, HEAD_DIM = 64, 4, 2, 16
RANDOM = np.random.default_rng(0)


def unchanged(writer: GGUFWriter) -> None:
    pass


def write(
    file: Path,
    tensors: dict[str, NDArray[np.float32]],
    kind: str = "Q8_0",
    architecture: str = "llama",
    change: Callable[[GGUFWriter], None] = unchanged,
) -> Path:
    writer = GGUFWriter(file, architecture)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(96)
    writer.add_block_count(1)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_token_list(["a", "b"])
    change(writer)
    for name, values in tensors.items():
        stored = GGMLQuantizationType[kind] if values.ndim > 1 else GGMLQuantizationType.F32
        writer.add_tensor(name, gguf.quantize(values, stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def values(*shape: int) -> NDArray[np.float32]:
    return RANDOM.standard_normal(shape, dtype=np.float32)


def tensor(file: Path, name: str) -> GgufTensor:
    found = open_gguf(file).tensors[name]
    assert isinstance(found, GgufTensor)
    return found


@pytest.mark.parametrize("kind", [name for name, _, _ in TYPES.values()])
def test_each_type_is_dequantised_to_the_bit(kind: str) -> None:
    number = next(n for n, (name, _, _) in TYPES.items() if name == kind)
    _, per_block, block_bytes = TYPES[number]
    rows = RANDOM.integers(0, 120, (6, 4 * block_bytes), dtype=np.uint8)  # no exponent of infinity
    found = dequantise(rows, kind)
    expected = gguf.dequantize(
        rows.view({"F32": np.float32, "F16": np.float16}.get(kind, np.uint8)), GGMLQuantizationType[kind]
    )
    assert found.dtype == np.float32
    assert found.shape == (6, 4 * per_block)
    assert np.array_equal(found, expected)


def test_raw_rows_are_those_of_the_file_in_the_order_of_the_model(tmp_path: Path) -> None:
    name = "blk.0.attn_q.weight"
    file = write(
        tmp_path / "m.gguf", {name: values(HIDDEN, HIDDEN), "blk.0.attn_v.weight": values(32, HIDDEN)}
    )
    query = tensor(file, "model.layers.0.self_attn.q_proj.weight")
    half = HEAD_DIM // 2
    order = [h * HEAD_DIM + 2 * i + part for h in range(HEADS) for part in (0, 1) for i in range(half)]
    assert np.array_equal(query.raw, query.stored.rows[order])
    assert np.array_equal(query.dequantised(), dequantise(query.raw, "Q8_0"))
    other = tensor(file, "model.layers.0.self_attn.v_proj.weight")
    assert np.shares_memory(other.raw, other.stored.rows)
    assert other.raw.shape == (32, HIDDEN // 32 * 34)


def test_queries_keys_and_values_in_one_matrix_are_split(tmp_path: Path) -> None:
    parts = {"attn_q": values(HIDDEN, HIDDEN), "attn_k": values(32, HIDDEN), "attn_v": values(32, HIDDEN)}
    apart = open_gguf(
        write(tmp_path / "apart.gguf", {f"blk.0.{name}.weight": part for name, part in parts.items()})
    )
    fused = open_gguf(
        write(tmp_path / "fused.gguf", {"blk.0.attn_qkv.weight": np.concatenate(list(parts.values()))})
    )
    assert fused.tensors.keys() == apart.tensors.keys()
    for name, one in apart.tensors.items():
        assert np.array_equal(one.dequantised(), fused.tensors[name].dequantised())


def test_a_tensor_without_a_name_in_the_model_keeps_its_own(tmp_path: Path) -> None:
    names = {"blk.0.tea_leaves.weight", "v.patch_embd.weight"}
    assert open_gguf(write(tmp_path / "m.gguf", {n: values(32, 32) for n in names})).tensors.keys() == names


def test_a_file_cut_anywhere_is_rejected(tmp_path: Path) -> None:
    whole = write(tmp_path / "m.gguf", {"output_norm.weight": values(HIDDEN)}).read_bytes()
    file = tmp_path / "cut.gguf"
    for length in range(0, len(whole), 3):
        file.write_bytes(whole[:length])
        with pytest.raises(BadModelFolder, check=has_param("cut.gguf")):
            open_gguf(file)


def test_the_error_contains_the_unreadable_part(tmp_path: Path) -> None:
    def rejects(path: Path, param: str) -> None:
        with pytest.raises(BadModelFolder, check=has_param(param)):
            open_gguf(path)

    file = write(tmp_path / "m.gguf", {"output_norm.weight": values(HIDDEN)})
    whole = file.read_bytes()
    for number, changed in enumerate((b"PK\x03\x04" + whole[4:], whole[:4] + b"\1" + whole[5:])):
        (tmp_path / f"{number}.gguf").write_bytes(changed)
        rejects(tmp_path / f"{number}.gguf", f"{number}.gguf")
    big_endian: Any = whole[:4] + b"\0\0\0\3" + whole[8:]
    (tmp_path / "big.gguf").write_bytes(big_endian)
    rejects(tmp_path / "big.gguf", "big.gguf")
    rejects(write(tmp_path / "b.gguf", {}, architecture="bert"), "general.architecture")
    with pytest.raises(UnknownModel):
        open_gguf(tmp_path / "none.gguf")


@pytest.mark.parametrize(
    ("change", "param"),
    [
        (lambda writer: writer.add_head_count(0), "llama.attention.head_count"),
        (lambda writer: writer.add_block_count(2**31), "llama.block_count"),
        (lambda writer: writer.add_string("general.alignment", "wide"), "m.gguf"),
        (lambda writer: writer.add_array("general.alignment", [1, 2]), "m.gguf"),
        (lambda writer: writer.add_tensor("blk.0.attn_v.weight", np.zeros((0, 64), np.float32)), "m.gguf"),
    ],
)
def test_metadata_that_no_model_has(tmp_path: Path, change: Callable[[GGUFWriter], None], param: str) -> None:
    file = write(tmp_path / "m.gguf", {"token_embd.weight": values(2, HIDDEN)}, change=change)
    with pytest.raises(BadModelFolder, check=has_param(param)):
        assert open_gguf(file).config


def test_numbers_of_another_type_are_rejected_where_they_are_read(tmp_path: Path) -> None:
    file = write(tmp_path / "m.gguf", {}, change=lambda writer: writer.add_head_count(0))
    with pytest.raises(BadModelFolder, check=has_param("m.gguf")):
        assert open_gguf(file).tensors
    file = write(tmp_path / "s.gguf", {}, change=lambda writer: writer.add_string("split.count", "two"))
    assert open_gguf(file).tensors == {}


def test_lists_in_lists_have_a_depth(tmp_path: Path) -> None:
    """Each level is read by a separate call."""
    key = b"a.key"
    entry = struct.pack("<Q", len(key)) + key + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 5000
    (tmp_path / "m.gguf").write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + entry + bytes(12))
    with pytest.raises(BadModelFolder, check=has_param("m.gguf")):
        open_gguf(tmp_path / "m.gguf")


def test_the_only_file_of_a_folder_is_its_model(tmp_path: Path) -> None:
    assert find_gguf(tmp_path) is None
    file = write(tmp_path / "a.gguf", {})
    assert find_gguf(tmp_path) == find_gguf(file) == file
    write(tmp_path / "b.gguf", {})
    with pytest.raises(BadModelFolder, check=has_param("a.gguf")):
        find_gguf(tmp_path)


def test_a_file_is_read_once_while_a_model_is_loaded(tmp_path: Path) -> None:
    """And again by the next load: the file may be another one."""
    file = write(tmp_path / "m.gguf", {"token_embd.weight": values(2, HIDDEN)})
    with reading_once():
        first = open_gguf(file)
        with reading_once():
            assert open_gguf(file) is first
        assert open_gguf(file) is first
        config, _ = read_folder(file)
        config.clear()  # callers may change their copy
        assert read_folder(file)[0] == first.config != {}
    with reading_once():
        assert open_gguf(file) is not first
    assert open_gguf(file) is not open_gguf(file)
