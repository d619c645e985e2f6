"""The commands with models of the Hugging Face hub: ``pull`` fetches one, ``models`` shows its memory, and
a server has it under the name that was given."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from support.commands import call_cli, run_cli
from support.engine.adapters import write_plain_adapter
from support.engine.gguf_models import write_gguf, write_vocabulary
from support.engine.random_model import write_random_model
from support.hub_server import HubServer, hub_on_loopback, read_folder

from agentflow.cli import models
from agentflow.cli.models import LOCAL_COLUMNS, local_models
from agentflow.cli.operating.serve import pull_missing
from agentflow.engine.machine import resources
from agentflow.engine.machine.resources import FreeMemory
from agentflow.engine.models.memory_need import PROCESS_BYTES, memory_need
from agentflow.engine.store.adapter_folder import resolve_adapter
from agentflow.engine.store.catalog import CATALOG
from agentflow.engine.store.hub_names import hub_name
from agentflow.engine.store.model_store import pull_model, resolve_model
from agentflow.server.config.config import Flags, load_config

NAME = "someone/tiny"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    return read_folder(write_random_model(tmp_path_factory.mktemp("tiny")))


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, bytes]) -> Iterator[HubServer]:
    monkeypatch.setenv("AGENTFLOW_CACHE", str(tmp_path / "store"))
    with hub_on_loopback(tmp_path / "home", monkeypatch) as server:
        server.add(NAME, files)
        yield server


def rows() -> dict[str, dict[str, str]]:
    return {row[0]: dict(zip(LOCAL_COLUMNS, row, strict=True)) for row in local_models()}


def test_a_model_is_pulled_by_the_command(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENTFLOW_KERNELS", "torch")
    done = run_cli("pull", NAME)
    assert done.returncode == 0, done.stderr
    assert str(resolve_model(NAME)) in done.stdout
    assert "Traceback" not in done.stderr


def test_a_pull_that_fails_is_one_line(hub: HubServer) -> None:
    done = call_cli("pull", "no/body")
    assert (done.returncode, done.stdout) == (1, "")
    assert [line.startswith("agentflow: ") for line in done.stderr.splitlines()[-1:]] == [True]
    assert "Traceback" not in done.stderr


def test_the_models_of_a_configuration_are_pulled_where_they_are_missing(
    hub: HubServer, tmp_path: Path
) -> None:
    config = load_config(Flags({}, (NAME, f"other={NAME}@main", f"local={tmp_path}"), None), {}).config
    assert [(model.name, model.path) for model in config.models] == [
        (NAME, NAME),
        ("other", f"{NAME}@main"),
        ("local", str(tmp_path)),
    ]
    pull_missing(config)
    assert resolve_model(NAME) == resolve_model(f"{NAME}@main")
    num_requests = len(hub.requests)
    pull_missing(config)
    assert len(hub.requests) == num_requests


def test_the_adapters_of_a_configuration_are_pulled_where_they_are_missing(
    hub: HubServer, tmp_path: Path
) -> None:
    tensors = {"model.layers.0.self_attn.q_proj.lora_A": torch.ones(4, 8)}
    hub.add("someone/polite", read_folder(write_plain_adapter(tmp_path / "adapter", tensors)))
    loras = ["polite=someone/polite", f"local={tmp_path / 'adapter'}"]
    config = load_config(Flags({"loras": loras}, (NAME,), None), {}).config
    pull_missing(config)
    assert (resolve_adapter("someone/polite") / "adapter_model.safetensors").is_file()
    num_requests = len(hub.requests)
    pull_missing(config)
    assert len(hub.requests) == num_requests


def test_a_pulled_model_is_listed_with_what_it_needs(hub: HubServer, files: dict[str, bytes]) -> None:
    assert NAME not in rows()
    pull_model(NAME, progress=False)
    row = rows()[NAME]
    assert (row["here"], row["context"], row["chat"]) == ("yes", "256", "yes")
    assert row["size"].endswith(" kB")
    assert row["size"] != "0 kB"
    assert row["memory"] == "500 MB"  # little compared with the process


def test_f42l_the_models_at_paths_are_shown(tmp_path: Path) -> None:
    folder = write_random_model(tmp_path / "tiny")
    write_gguf(folder, file := tmp_path / "tiny.gguf", vocabulary=partial(write_vocabulary, folder))
    done = call_cli("models", str(folder), str(file))
    assert done.returncode == 0, done.stderr
    columns, *found = [line.split("\t") for line in done.stdout.splitlines()]
    assert tuple(columns) == LOCAL_COLUMNS
    shown = [dict(zip(columns, row, strict=True)) for row in found]
    assert [row["model"] for row in shown] == [str(folder), str(file)]
    assert [row["context"] for row in shown] == ["256", "256"]
    assert [row["chat"] for row in shown] == ["yes", "no"]


def test_f42q_the_memory_of_rounded_weights_and_kv_is_shown(tmp_path: Path) -> None:
    """For a folder, and for models that are not here."""
    folder = write_random_model(tmp_path / "tiny", max_position_embeddings=40_000_000)
    memory: list[float] = []
    for options in ((), ("--kv-dtype", "fp8"), ("--quantize", "int8", "--kv-dtype", "auto")):
        done = run_cli("models", str(folder), *options)
        assert done.returncode == 0, done.stderr
        columns, row = [line.split("\t") for line in done.stdout.splitlines()]
        memory.append(float(dict(zip(columns, row, strict=True))["memory"].split()[0]))
    kv_gb = 4e7 * 2 * 2 * 2 * 8 * 2 / 1e9
    assert memory[0] - memory[1] == pytest.approx(kv_gb / 2, abs=0.1)
    assert memory[2] == pytest.approx(memory[0], abs=0.1)
    plain, rounded = (
        {row[0]: float(row[3].split()[0]) for row in local_models(*how) if row[3].endswith("GB")}
        for how in ((), ("fp8", "fp8"))
    )
    assert 0.45 < rounded["llama-3.2-3b"] / plain["llama-3.2-3b"] < 0.55


@pytest.mark.parametrize("content", [None, b"GGUF"])
def test_f42l_a_path_without_a_model_is_one_line(content: bytes | None, tmp_path: Path) -> None:
    file = tmp_path / "broken.gguf"
    if content is not None:
        file.write_bytes(content)
    done = call_cli("models", str(file))
    assert (done.returncode, done.stdout) == (1, "")
    assert len(done.stderr.strip().splitlines()) == 1
    assert "broken.gguf" in done.stderr


@pytest.mark.parametrize(
    ("free_tokens", "fits"), [(8192, "yes"), (8191, "8,191 tokens"), (1024, "1,024 tokens"), (1023, "no")]
)
def test_whether_a_model_fits(
    hub: HubServer, monkeypatch: pytest.MonkeyPatch, free_tokens: int, fits: str
) -> None:
    model = CATALOG["smollm2-360m"]
    needed = 2 * model.parameters + PROCESS_BYTES + 2 * model.kv_numbers_per_token * free_tokens

    async def free_memory(devices: object) -> FreeMemory:
        return FreeMemory(int(needed / 0.8) + 1)

    monkeypatch.setattr(resources, "free_memory", free_memory)
    assert rows()["smollm2-360m"]["fits"] == fits
    assert rows()["smollm2-360m"]["here"] == "no"


def test_a_short_name_is_a_repository(hub: HubServer, files: dict[str, bytes]) -> None:
    hub.add("Qwen/Qwen3-0.6B", files)
    assert pull_model("qwen3-0.6b", progress=False) == resolve_model("Qwen/Qwen3-0.6B")
    assert rows()["qwen3-0.6b"]["here"] == "yes"
    assert "Qwen/Qwen3-0.6B" not in rows()


def test_the_table_of_short_names_is_sound() -> None:
    for name, model in CATALOG.items():
        assert hub_name(model.repository) == hub_name(name)
        assert model.parameters > 10**8
        # In bfloat16 on the disk; some store a tied matrix twice, and the default model is quantised.
        stored = model.disk_bytes / (2 * model.parameters)
        assert name == "smollm2-135m" or 1 <= stored < 1.3


def test_a_damaged_model_in_the_cache_is_not_listed(hub: HubServer) -> None:
    snapshot = pull_model(NAME, progress=False)
    (snapshot / "config.json").unlink()
    (snapshot / "config.json").write_text("[]")
    assert NAME not in rows()
    assert models.describe_model(snapshot, models._Room())[1] == "damaged"


def test_the_weights_of_other_layouts_are_not_counted(hub: HubServer, files: dict[str, bytes]) -> None:
    hub.repositories[NAME].files["consolidated.safetensors"] = files["model.safetensors"]
    snapshot = pull_model(NAME, progress=False)
    before = memory_need("", snapshot, "bfloat16", None)
    (snapshot / "consolidated.safetensors").write_bytes(files["model.safetensors"])
    assert memory_need("", snapshot, "bfloat16", None) == before
    assert before.kv_bytes_per_token == 2 * 2 * 2 * 8 * 2
    assert json.loads(files["config.json"])["num_hidden_layers"] == 2
