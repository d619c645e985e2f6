"""The identity of a model's files: some changes change it, others do not."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from agentflow.engine.store.model_identity import STRIDE, model_identity


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    save_file({"a": np.arange(STRIDE, dtype=np.int32), "b": np.zeros(3)}, folder / "model.safetensors")
    return folder


def test_the_same_files_in_another_folder_have_the_same_identity(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "other name")
    (tmp_path / "other name/README.md").write_text("a page")
    assert model_identity(tmp_path / "other name") == model_identity(folder)


@pytest.mark.parametrize("at", [0, STRIDE // 2, STRIDE - 1])
def test_a_tensor_with_other_values_changes_the_identity(folder: Path, at: int) -> None:
    before = model_identity(folder)
    values = np.arange(STRIDE, dtype=np.int32)
    values[at : at + STRIDE // 2] += 1
    values[max(0, at - STRIDE // 2) : at + 1] += 1
    save_file({"a": values, "b": np.zeros(3)}, folder / "model.safetensors")
    assert model_identity(folder) != before


def test_another_config_changes_the_identity(folder: Path) -> None:
    before = model_identity(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "rope_theta": 1e6}))
    assert model_identity(folder) != before


def test_a_gguf_file_has_an_identity_whatever_its_name(tmp_path: Path) -> None:
    for name, content in (("a.gguf", b"GGUF 1"), ("b.gguf", b"GGUF 1"), ("c.gguf", b"GGUF 2")):
        (tmp_path / name).write_bytes(content)
    first, same, other = (model_identity(tmp_path / name) for name in ("a.gguf", "b.gguf", "c.gguf"))
    assert first == same != other
