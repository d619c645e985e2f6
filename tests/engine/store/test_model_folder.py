"""Local model folders: a complete one is used unchanged, and errors contain the name of a missing file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.engine.pull_in_child import write_tiny_folder
from support.faults import has_param

from agentflow.engine.store.model_store import resolve_model
from agentflow.errors import BadModelFolder


def _tiny_folder(folder: Path) -> Path:
    folder.mkdir()
    write_tiny_folder(folder)
    return folder


def test_a_local_folder_is_used_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = _tiny_folder(tmp_path / "mine")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert resolve_model(str(folder)) == resolve_model("~/mine") == resolve_model("mine") == folder


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_a_folder_without_a_file_names_it(tmp_path: Path, name: str) -> None:
    folder = _tiny_folder(tmp_path / "model")
    (folder / name).unlink()
    with pytest.raises(BadModelFolder, check=has_param(name)):
        resolve_model(str(folder))


def test_an_empty_folder_names_all_that_is_missing(tmp_path: Path) -> None:
    with pytest.raises(BadModelFolder, match=r"config\.json.*tokenizer\.json.*\*\.safetensors"):
        resolve_model(str(tmp_path))


def test_a_file_in_place_of_a_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_bytes(b"ONNX")
    with pytest.raises(BadModelFolder, check=has_param("model.onnx")):
        resolve_model(str(tmp_path / "model.onnx"))


@pytest.mark.parametrize("content", [b"[]", b"{", b"\xff"])
def test_a_config_that_is_no_json_object_is_named(tmp_path: Path, content: bytes) -> None:
    folder = _tiny_folder(tmp_path / "model")
    (folder / "config.json").write_bytes(content)
    with pytest.raises(BadModelFolder, check=has_param("config.json")):
        resolve_model(str(folder))


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", "git lfs pull"),
        (b"", None),
        (b"\x02" + b"\0" * 7 + b"[]", None),
        (b"\x08" + b"\0" * 7 + b'{"w": 1}', None),
    ],
)
def test_weights_that_are_none_are_named(tmp_path: Path, content: bytes, fault: str | None) -> None:
    folder = _tiny_folder(tmp_path / "model")
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(BadModelFolder, match=fault, check=has_param("model.safetensors")):
        resolve_model(str(folder))


def test_weights_cut_anywhere_are_named(tmp_path: Path) -> None:
    folder = _tiny_folder(tmp_path / "model")
    whole = (folder / "model.safetensors").read_bytes()
    for length in range(len(whole)):
        (folder / "model.safetensors").write_bytes(whole[:length])
        with pytest.raises(BadModelFolder, check=has_param("model.safetensors")):
            resolve_model(str(folder))


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    folder = _tiny_folder(tmp_path / "model")
    index = {"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(BadModelFolder, check=has_param("model-2.safetensors")):
        resolve_model(str(folder))
    (folder / "model-2.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    assert resolve_model(str(folder)) == folder
    (folder / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(BadModelFolder, check=has_param("model.safetensors.index.json")):
        resolve_model(str(folder))
