"""Names of models: repositories of the hub, their GGUF files, and local files and folders."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path

import pytest
from support.engine.gguf_models import write_gguf, write_vocabulary
from support.engine.hub_models import NAME, contents, pull_fails
from support.faults import has_param
from support.hub_server import HubServer

import agentflow as af
from agentflow.engine.models.memory_need import memory_need
from agentflow.engine.store.hub_names import HubName, cached_model, cached_models, hub_name
from agentflow.engine.store.model_store import fetch_model, pull_model, resolve_model
from agentflow.errors import BadModelFolder, UnknownModel


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("a/b", HubName("a/b")),
        ("a/b@v1", HubName("a/b", revision="v1")),
        ("a/b@refs/pr/1", HubName("a/b", revision="refs/pr/1")),
        ("a/b:Q4_K_M", HubName("a/b", "Q4_K_M")),
        ("a/b:sub/x.gguf@v1", HubName("a/b", "sub/x.gguf", "v1")),
        ("qwen3-0.6b", HubName("Qwen/Qwen3-0.6B")),
        ("Qwen/Qwen2.5-0.5B-Instruct", HubName("Qwen/Qwen2.5-0.5B-Instruct")),
        ("a/b.gguf", None),
        ("./a/b", None),
        ("../a", None),
        ("~/a", None),
        ("/a/b", None),
        ("a/b/c", None),
        ("a/b@../../x", None),
        ("a/b@/x", None),
        ("a/b@", None),
        ("a/b:", None),
        ("a", None),
        ("a/", None),
    ],
)
def test_names(text: str, name: HubName | None) -> None:
    assert hub_name(text) == name
    if name is not None and "/" in text:
        assert str(name) == text


def test_a_path_comes_before_the_hub(
    tiny: HubServer, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    local = shutil.copytree(folder, tmp_path / NAME)
    assert fetch_model(NAME) == local
    assert tiny.requests == []


# GGUF files

GGUF = b"GGUF" + bytes(100)
QUANTISED = {
    "tiny-Q4_K_M.gguf": GGUF + b"4",
    "tiny-Q8_0.gguf": GGUF + b"8",
    "tiny-bf16.gguf": GGUF + b"16",
    "mmproj-tiny-Q8_0.gguf": GGUF,
    "README.md": b"",
}


@pytest.mark.parametrize(
    ("gguf", "file"),
    [
        ("Q4_K_M", "tiny-Q4_K_M.gguf"),
        ("q8_0", "tiny-Q8_0.gguf"),
        ("BF16", "tiny-bf16.gguf"),
        ("mmproj-tiny-Q8_0.gguf", "mmproj-tiny-Q8_0.gguf"),
    ],
)
def test_a_quantisation_is_one_file_and_its_projector(hub: HubServer, gguf: str, file: str) -> None:
    hub.add(NAME, QUANTISED)
    path = pull_model(f"{NAME}:{gguf}", progress=False)
    assert (path.name, path.read_bytes()) == (file, QUANTISED[file])
    assert {*hub.downloads()} == {file, "mmproj-tiny-Q8_0.gguf"}
    assert resolve_model(f"{NAME}:{gguf}") == path
    with pytest.raises(UnknownModel):
        resolve_model(NAME)


def test_a_model_in_several_files_is_pulled_whole(hub: HubServer) -> None:
    parts = {f"Q4_K_M/m-Q4_K_M-0000{n}-of-00003.gguf": GGUF + bytes(n) for n in (1, 2, 3)}
    hub.add(NAME, parts | QUANTISED)
    for gguf in ("Q4_K_M/m-Q4_K_M-00001-of-00003.gguf", "Q4_K_M/m-Q4_K_M-00002-of-00003.gguf"):
        path = pull_model(f"{NAME}:{gguf}", progress=False)
        assert path.name == "m-Q4_K_M-00001-of-00003.gguf"
        assert contents(path.parent) == {Path(part).name: content for part, content in parts.items()}
    assert [(str(name), file) for name, file in cached_models()] == [(f"{NAME}:Q4_K_M", path)]
    assert resolve_model(str(path)) == path
    (path.parent / "m-Q4_K_M-00002-of-00003.gguf").unlink()
    assert list(cached_models()) == []
    with pytest.raises(BadModelFolder, check=has_param("m-Q4_K_M-00002-of-00003.gguf")):
        resolve_model(str(path))


def test_the_files_in_the_cache_are_listed_by_quantisation(hub: HubServer) -> None:
    hub.add(NAME, QUANTISED)
    for gguf in ("Q4_K_M", "BF16"):
        pull_model(f"{NAME}:{gguf}", progress=False)
    assert {str(name) for name, _ in cached_models()} == {f"{NAME}:Q4_K_M", f"{NAME}:BF16"}
    for name, path in cached_models():
        assert cached_model(name) == path


@pytest.mark.parametrize(
    ("files", "gguf"),
    [
        (QUANTISED, "Q4_K"),
        (QUANTISED, "F16"),
        (QUANTISED, "tiny"),
        ({"README.md": b""}, "Q4_K_M"),
        ({f"m-Q4_K_M-0000{n}-of-00003.gguf": GGUF for n in (1, 2)}, "Q4_K_M"),
        ({"a-Q4_K_M.gguf": GGUF, "b-Q4_K_M.gguf": GGUF}, "Q4_K_M"),
    ],
)
def test_a_quantisation_that_is_none_or_several_files_is_rejected(
    hub: HubServer, files: dict[str, bytes], gguf: str
) -> None:
    hub.add(NAME, files)
    pull_fails(gguf, f"{NAME}:{gguf}")
    assert hub.downloads() == []


def test_a_local_gguf_file_is_a_model(tmp_path: Path) -> None:
    file = tmp_path / "tiny-Q4_K_M.gguf"
    file.write_bytes(GGUF)
    assert resolve_model(str(file)) == fetch_model(str(file)) == file
    link = tmp_path / "link.gguf"
    link.symlink_to(file)
    assert resolve_model(str(link)) == link


@pytest.mark.parametrize("name", ["x.gguf", "m-00002-of-00003.gguf", "x.bin"])
def test_a_local_file_that_is_no_whole_gguf_is_rejected(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(GGUF if "of" in name else b"something else")
    with pytest.raises(BadModelFolder, check=has_param(name)):
        resolve_model(str(tmp_path / name))


# Programs


@pytest.mark.anyio
async def test_a_program_runs_a_gguf_file_of_the_hub(hub: HubServer, folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "tiny-F32.gguf"
    write_gguf(folder, file, vocabulary=partial(write_vocabulary, folder))
    hub.add(NAME, {file.name: file.read_bytes()})
    answers = []
    for model in (f"{NAME}:F32", str(folder)):
        backend = af.Embedded(model, dtype="float32", kv_tokens=512, threads=1)
        async with af.session(backend=backend) as flow, flow.state() as s:
            s += "The quick brown fox" + af.gen("answer", max_tokens=12, temperature=0)
            answers.append(await s["answer"])
    assert answers[0] == answers[1]
    need = memory_need("", resolve_model(f"{NAME}:F32"), "bfloat16", None)
    assert need == memory_need("", folder, "bfloat16", None)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"
