"""Models of the Hugging Face hub, pulled by its own library from a server on loopback: the folder is the
complete model; each failure is one sentence, and leaves no folder that looks like a model."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants
from support.engine.adapters import write_plain_adapter
from support.engine.embedding_models import write_embedding_model
from support.engine.hub_models import EXTRA, NAME, NEEDED, assert_nothing_is_here, contents, pull_fails
from support.engine.random_model import CONFIG, write_random_model
from support.faults import has_param
from support.hub_server import Fault, HubServer, Repository, read_folder

import agentflow as af
from agentflow.engine.store import hub as hub_module
from agentflow.engine.store.adapter_folder import missing_adapters, resolve_adapter
from agentflow.engine.store.embedding_folder import read_embedding_folder
from agentflow.engine.store.hub_errors import explained
from agentflow.engine.store.hub_names import HubName, cached_models, repository_folder
from agentflow.engine.store.model_store import fetch_model, pull_model, resolve_model
from agentflow.engine.store.pull_progress import PullListener
from agentflow.errors import PullFailed, UnknownModel


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_model(tmp_path_factory.mktemp("sharded"), shard_size="40KB")


# The files that are pulled


def test_the_files_that_are_needed_arrive_in_the_hub_s_cache(tiny: HubServer, folder: Path) -> None:
    snapshot = pull_model(NAME, progress=False)
    files = tiny.repositories[NAME].files
    assert contents(snapshot) == {path: files[path] for path in NEEDED}
    assert snapshot == repository_folder(HubName(NAME)) / "snapshots" / tiny.repositories[NAME].commit
    assert tiny.downloads()[-1] == "model.safetensors"  # last, so that a folder without it is not whole
    assert resolve_model(NAME) == fetch_model(NAME) == snapshot
    assert list(cached_models()) == [(HubName(NAME), snapshot)]


def test_the_library_finds_what_was_pulled(tiny: HubServer) -> None:
    from huggingface_hub import snapshot_download

    snapshot = pull_model(NAME, progress=False)
    found = snapshot_download(NAME, local_files_only=True)
    assert Path(found).resolve() == snapshot.resolve()


def test_files_pulled_by_the_library_are_found_without_a_request(tiny: HubServer) -> None:
    from huggingface_hub import snapshot_download

    found = snapshot_download(NAME)
    before = len(tiny.requests)
    assert resolve_model(NAME).resolve() == fetch_model(NAME).resolve() == Path(found).resolve()
    assert len(tiny.requests) == before


def test_the_shards_of_the_index_are_pulled(hub: HubServer, sharded: Path) -> None:
    files = read_folder(sharded)
    hub.add(NAME, files | EXTRA)
    snapshot = pull_model(NAME, progress=False)
    assert contents(snapshot) == files
    assert len([path for path in files if path.endswith(".safetensors")]) > 2


def test_a_mirror_that_lists_no_sizes_is_asked_for_the_tree(tiny: HubServer) -> None:
    tiny.gives_sizes = False
    assert contents(pull_model(NAME, progress=False)).keys() == NEEDED


def test_a_second_pull_fetches_what_has_changed(tiny: HubServer) -> None:
    first = pull_model(NAME, progress=False)
    tiny.requests.clear()
    assert pull_model(NAME, progress=False) == first
    assert tiny.downloads() == []
    tiny.repositories[NAME].files["chat_template.jinja"] = b"another"
    second = pull_model(NAME, progress=False)
    assert tiny.downloads() == ["chat_template.jinja"]
    assert (second / "chat_template.jinja").read_text() == "another"
    assert resolve_model(NAME) == second


@pytest.mark.parametrize("revision", ["v1.0", "refs/pr/3"])
def test_a_revision_is_pulled_under_its_name(tiny: HubServer, revision: str) -> None:
    repository = tiny.repositories[NAME]
    repository.tags[revision] = repository.commit
    snapshot = pull_model(f"{NAME}@{revision}", progress=False)
    assert resolve_model(f"{NAME}@{revision}") == snapshot
    with pytest.raises(UnknownModel, match="agentflow pull"):
        resolve_model(NAME)
    by_commit = f"{NAME}@{repository.commit}"
    assert resolve_model(by_commit) == pull_model(by_commit, progress=False) == snapshot


def test_the_token_goes_to_the_hub_and_not_to_its_storage(
    tiny: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny.repositories[NAME].token = "hf_secret"
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    pull_model(NAME, progress=False)
    for request in tiny.requests:
        to_hub = request.headers["Host"].startswith("127.0.0.1")
        assert request.headers.get("authorization") == ("Bearer hf_secret" if to_hub else None)
    assert any(not request.headers["Host"].startswith("127.0.0.1") for request in tiny.requests)


def test_the_listener_gets_the_bytes(tiny: HubServer) -> None:
    events: list[tuple[str, int, int]] = []

    class Recorder(PullListener):
        phase = ""

        def begin(self, phase: str) -> None:
            self.phase = phase

        def advance(self, done: int, total: int) -> None:
            events.append((self.phase, done, total))

    fetch_model(NAME, Recorder())
    num_bytes = sum(len(tiny.repositories[NAME].files[path]) for path in NEEDED)
    for phase in ("download", "verify"):
        dones = [done for its, done, _ in events if its == phase]
        assert dones == sorted(dones)
        assert [event for event in events if event[0] == phase][-1] == (phase, num_bytes, num_bytes)


# Repositories that cannot be used: rejected before their weights are fetched


@pytest.mark.parametrize(
    ("files", "param"),
    [
        ({"config.json": b"{}", "pytorch_model.bin": b"x", "tokenizer.json": b"{}"}, NAME),
        ({"tiny-Q4_K_M.gguf": b"GGUF"}, NAME),
        ({"README.md": b""}, NAME),
        ({"model.safetensors": b"x", "tokenizer.json": b"{}"}, "config.json"),
        ({"model.safetensors": b"x", "config.json": b"{}", "tokenizer.model": b""}, "tokenizer.json"),
        ({"model.safetensors": b"x", "config.json": b"[]", "tokenizer.json": b"{}"}, "config.json"),
        (
            {
                "model.safetensors": b"x",
                "config.json": b'{"auto_map": {"AutoModel": "m.M"}, "architectures": ["MyModel"]}',
                "tokenizer.json": b"{}",
                "m.py": b"",
            },
            "auto_map",
        ),
        (
            {
                "model.safetensors": b"x",
                "config.json": b'{"architectures": ["MyModel"]}',
                "tokenizer.json": b"{}",
            },
            "architectures",
        ),
        (
            {
                "model.safetensors": b"x",
                "config.json": b'{"quantization_config": {"quant_method": "hqq"}}',
                "tokenizer.json": b"{}",
            },
            "quantization_config",
        ),
        (
            {
                "model-1.safetensors": b"x",
                "config.json": b"{}",
                "tokenizer.json": b"{}",
                "model.safetensors.index.json": b'{"weight_map": {"a": "../../../x.safetensors"}}',
            },
            "model.safetensors.index.json",
        ),
    ],
)
def test_a_repository_that_cannot_be_used_is_rejected_before_its_weights_are_fetched(
    hub: HubServer, files: dict[str, bytes], param: str
) -> None:
    hub.add(NAME, files)
    pull_fails(param)
    assert not [path for path in hub.downloads() if path.endswith((".safetensors", ".bin", ".py"))]


def test_custom_code_beside_a_known_architecture_is_not_fetched(hub: HubServer, folder: Path) -> None:
    config = json.dumps(CONFIG | {"auto_map": {"AutoModelForCausalLM": "modeling_tiny.TinyModel"}})
    hub.add(NAME, read_folder(folder) | EXTRA | {"config.json": config.encode()})
    assert contents(pull_model(NAME, progress=False)).keys() == NEEDED


def test_weights_that_are_not_safetensors_are_rejected(tiny: HubServer) -> None:
    tiny.repositories[NAME].files["model.safetensors"] = b"version of a large file"
    pull_fails(NAME)


# A faulty hub


ANSWERS = [
    (401, {}, NAME),
    (401, {"X-Error-Message": "Invalid credentials in Authorization header"}, NAME),
    (401, {"X-Error-Code": "GatedRepo"}, NAME),
    (403, {"X-Error-Code": "GatedRepo"}, NAME),
    (403, {}, "HF_TOKEN"),
    (403, {"X-Error-Message": "Access to this resource is disabled."}, NAME),
    (404, {"X-Error-Code": "RepoNotFound"}, NAME),
    (404, {}, NAME),
    (418, {}, NAME),
    (429, {"Retry-After": "7"}, NAME),
    (429, {}, NAME),
    (500, {}, NAME),
    (503, {}, NAME),
]
# Answers are read alike for all requests: a few show that all three requests are handled.
AT = ["GET /.*/model.safetensors", "GET /api/models", "HEAD /.*/config.json"]
FEW = (401, 404, 503)


@pytest.mark.parametrize(
    ("at", "status", "headers", "param"),
    [
        pytest.param(
            at,
            *answer,
            marks=[pytest.mark.full] if at != AT[0] and (answer[0] not in FEW or answer[1]) else [],
        )
        for at in AT
        for answer in ANSWERS
    ],
)
def test_an_answer_that_is_no_file_is_explained(
    tiny: HubServer, at: str, status: int, headers: dict[str, str], param: str
) -> None:
    tiny.faults.append(Fault(at, status, headers))
    if (status, headers) == (404, {}) and at != AT[1]:  # the file is missing, and not the model
        param = at.rpartition("/")[2]
    message = pull_fails(param)
    if "Retry-After" in headers:
        assert "7 s" in message
    tiny.faults.clear()
    pull_model(NAME, progress=False)


@pytest.mark.parametrize("token", ["", "hf_wrong"])
def test_a_gated_model_needs_an_accepted_account(
    tiny: HubServer, monkeypatch: pytest.MonkeyPatch, token: str
) -> None:
    repository = tiny.repositories[NAME]
    repository.token, repository.is_gated = "hf_right", True
    monkeypatch.setenv("HF_TOKEN", token)
    assert "gated" in pull_fails(NAME)
    monkeypatch.setenv("HF_TOKEN", "hf_right")
    assert pull_model(NAME, progress=False) == resolve_model(NAME)


def test_a_token_that_the_hub_rejects_is_named(tiny: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_old")
    headers = {"X-Error-Message": "Invalid credentials in Authorization header"}
    tiny.faults.append(Fault("GET /api/models", 401, headers))
    pull_fails("HF_TOKEN")


def test_a_name_or_a_revision_that_the_hub_does_not_have_is_named(tiny: HubServer) -> None:
    pull_fails("no/body", "no/body")
    pull_fails("v9", f"{NAME}@v9")
    pull_fails("0" * 40, f"{NAME}@{'0' * 40}")


@pytest.mark.parametrize("content", [b"<html>log in</html>", b"{}", b"[]", b'{"id": "x", "sha": "../../x"}'])
def test_servers_that_are_no_hub_are_rejected(
    tiny: HubServer, monkeypatch: pytest.MonkeyPatch, content: bytes
) -> None:
    def answer(self: object, value: object) -> None:
        self._answer(200, content)  # type: ignore[attr-defined]

    monkeypatch.setattr(tiny.RequestHandlerClass, "_json", answer)
    pull_fails("HF_ENDPOINT")


def test_without_a_network_the_address_is_named(
    tiny: HubServer, monkeypatch: pytest.MonkeyPatch, unused_tcp_port_url: str
) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", unused_tcp_port_url)
    assert unused_tcp_port_url in pull_fails("HF_ENDPOINT")


@pytest.fixture
def unused_tcp_port_url() -> Iterator[str]:
    """The address of a port that is bound but does not accept connections."""
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{taken.getsockname()[1]}"


def test_offline_a_pulled_model_is_used_and_another_is_not_pulled(
    tiny: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = pull_model(NAME, progress=False)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert resolve_model(NAME) == fetch_model(NAME) == snapshot
    with pytest.raises(PullFailed, check=has_param("HF_HUB_OFFLINE")):
        fetch_model("someone/other", PullListener())


def test_a_connection_that_breaks_is_resumed(tiny: HubServer, caplog: pytest.LogCaptureFixture) -> None:
    tiny.faults.append(Fault("GET .*/model.safetensors", cut_at=1000, times=2))
    notes: list[str] = []

    class Recorder(PullListener):
        def note(self, text: str) -> None:
            notes.append(text)

    snapshot = fetch_model(NAME, Recorder())
    assert len(notes) == 2
    assert "\n" not in "".join(notes)
    assert not caplog.records  # they are not logged a second time
    assert contents(snapshot).keys() == NEEDED
    ranges = [
        request.headers.get("Range")
        for request in tiny.requests
        if re.match("GET .*/model.safetensors", request.line)
    ]
    assert ranges == [None, "bytes=1000-", "bytes=2000-"]


@pytest.mark.parametrize(
    "path", ["model.safetensors", "tokenizer.json", "config.json", "chat_template.jinja"]
)
@pytest.mark.parametrize("harm", ["half", "other"])
def test_a_file_of_other_content_is_removed(tiny: HubServer, path: str, harm: str) -> None:
    right = tiny.repositories[NAME].files[path]
    wrong = right[: len(right) // 2] if harm == "half" else right[:-1] + bytes([right[-1] ^ 1])
    if path == "config.json" and harm == "other":
        wrong = right.replace(b"256", b"512")
    tiny.faults.append(Fault(f"GET .*/{path}", content=wrong))
    pull_fails(path)
    tiny.faults.clear()
    assert contents(pull_model(NAME, progress=False)) == {
        path: tiny.repositories[NAME].files[path] for path in NEEDED
    }


def test_a_file_that_was_damaged_in_the_cache_is_fetched_again(tiny: HubServer) -> None:
    snapshot = pull_model(NAME, progress=False)
    weights = (snapshot / "model.safetensors").resolve()
    content = bytearray(weights.read_bytes())
    for harmed in (content[:-1] + bytes([content[-1] ^ 1]), content[:-5]):
        weights.write_bytes(harmed)
        tiny.requests.clear()
        assert pull_model(NAME, progress=False) == snapshot
        assert tiny.downloads() == ["model.safetensors"]
        assert weights.read_bytes() == content


def test_an_interrupted_pull_leaves_no_model_and_continues(
    tiny: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 8000)  # few stops in the weights, each a pull

    class Stop(Exception):
        pass

    class Stopper(PullListener):
        def __init__(self, last: int) -> None:
            self.left = last

        def advance(self, done: int, total: int) -> None:
            self.left -= 1
            if self.left < 0:
                raise Stop

    num_stops = 0
    while True:
        try:
            fetch_model(NAME, Stopper(2 * num_stops))
            break
        except Stop:
            assert_nothing_is_here()
        num_stops += 1
    assert num_stops > len(NEEDED)
    assert tiny.downloads().count("config.json") < num_stops  # complete files are not fetched again


def test_an_update_that_fails_leaves_the_model_that_was_there(tiny: HubServer) -> None:
    before = pull_model(NAME, progress=False)
    tiny.repositories[NAME].files["config.json"] = json.dumps(CONFIG | {"rms_norm_eps": 1e-6}).encode()
    tiny.faults.append(Fault("GET .*/config.json", 500))
    with pytest.raises(PullFailed):
        pull_model(NAME, progress=False)
    assert resolve_model(NAME) == before


def test_leftovers_of_a_killed_pull_are_removed_once_they_are_old(tiny: HubServer) -> None:
    blobs = repository_folder(HubName(NAME)) / "blobs"
    blobs.mkdir(parents=True)
    for age_s, name in ((0, "fresh"), (100_000, "old")):
        leftover = blobs / f"{name}.incomplete"
        leftover.write_bytes(b"half")
        os.utime(leftover, (leftover.stat().st_mtime - age_s,) * 2)
    pull_model(NAME, progress=False)
    assert [file.name for file in blobs.glob("*.incomplete")] == ["fresh.incomplete"]


# The disk


def test_a_disk_with_too_little_room_is_named_before_the_weights(
    tiny: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage("/")
    files = tiny.repositories[NAME].files
    room = sum(len(files[path]) for path in NEEDED - {"model.safetensors"})
    monkeypatch.setattr(hub_module.shutil, "disk_usage", lambda path: usage._replace(free=room))
    pull_fails(NAME)
    assert "model.safetensors" not in tiny.downloads()


def test_a_cache_that_cannot_be_written_is_named(
    tiny: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "file" / "hub"))
    with pytest.raises(PullFailed, match="file/hub"):
        pull_model(NAME, progress=False)


def test_a_disk_that_is_full_meanwhile_is_named() -> None:
    with (
        pytest.raises(PullFailed, check=has_param("model.safetensors")),
        explained(HubName(NAME), "model.safetensors"),
    ):
        raise OSError(28, "No space left on device")


# Programs


@pytest.mark.anyio
async def test_a_program_runs_a_model_of_the_hub_as_it_runs_its_folder(tiny: HubServer, folder: Path) -> None:
    answers = []
    for model in (NAME, str(folder)):
        backend = af.Embedded(model, dtype="float32", kv_tokens=512, threads=1)
        async with af.session(backend=backend) as flow, flow.state() as s:
            s += af.user("Hello") + af.gen("answer", max_tokens=12, temperature=0)
            answers.append(await s["answer"])
            assert s["answer"].usage.output_tokens > 0
    assert answers[0] == answers[1]
    assert len(tiny.downloads()) == len(NEEDED)


ADAPTER = "someone/polite"


@pytest.fixture
def with_adapter(tiny: HubServer, folder: Path, tmp_path: Path) -> HubServer:
    """A hub with an adapter of the model, too, next to files that it does not need."""
    config = json.loads((folder / "config.json").read_text())
    hidden, module = config["hidden_size"], "model.layers.0.mlp.down_proj"
    tensors = {
        f"{module}.lora_A": torch.ones(4, config["intermediate_size"]),
        f"{module}.lora_B": torch.ones(hidden, 4),
    }
    files = read_folder(write_plain_adapter(tmp_path / "adapter", tensors))
    tiny.add(ADAPTER, files | {"tokenizer.json": b"{}", "training_args.bin": b"p", "config.json": b"{}"})
    return tiny


@pytest.mark.anyio
async def test_a_program_runs_an_adapter_of_the_hub(with_adapter: HubServer) -> None:
    backend = af.Embedded(NAME, kv_tokens=512, threads=1, loras=[f"polite={ADAPTER}"], adapter="polite")
    async with af.session(backend=backend) as flow, flow.state() as s:
        s += af.user("Hello") + af.gen("answer", max_tokens=4)
        assert (await s["answer"]) is not None
    names = {"adapter_config.json", "adapter_model.safetensors"}
    assert contents(resolve_adapter(ADAPTER)).keys() == names
    with_adapter.requests.clear()
    assert missing_adapters([f"a={ADAPTER}", "b=./somewhere", "c=some/other"]) == ["some/other"]
    assert not with_adapter.requests


def test_an_adapter_is_not_a_model(with_adapter: HubServer) -> None:
    assert pull_model(ADAPTER, progress=False) == resolve_adapter(ADAPTER)
    assert list(cached_models()) == []
    with pytest.raises(UnknownModel):
        resolve_model(ADAPTER)


@pytest.mark.parametrize(
    ("files", "param"),
    [
        ({"adapter_config.json": b"{}", "adapter_model.bin": b"p"}, "adapter_model.bin"),
        ({"adapter_config.json": b"{}"}, "adapter_model.safetensors"),
        ({"adapter_config.json": b"[]", "adapter_model.safetensors": b"x"}, "adapter_config.json"),
        ({"adapter_config.json": b"{}", "adapter_model.safetensors": b"x"}, "adapter_model.safetensors"),
    ],
)
def test_incomplete_adapters_are_rejected(hub: HubServer, files: dict[str, bytes], param: str) -> None:
    hub.add(ADAPTER, files)
    pull_fails(param, ADAPTER)
    assert missing_adapters([f"polite={ADAPTER}"]) == [ADAPTER]
    with pytest.raises(UnknownModel, check=has_param("lora")):
        resolve_adapter(ADAPTER)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def test_the_files_of_an_embedding_model_come_too(hub: HubServer, tmp_path: Path) -> None:
    folder = write_embedding_model(tmp_path, "bert", pooling="mean_tokens", dense=8, prompts={"query": "q: "})
    modules = {
        "modules.json",
        "1_Pooling/config.json",
        "2_Dense/config.json",
        "2_Dense/model.safetensors",
        "config_sentence_transformers.json",
    }
    files = {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*.*")}
    hub.repositories[NAME] = Repository(
        {**files, "onnx/model.onnx": b"onnx", "2_Dense/pytorch_model.bin": b"p"}
    )
    snapshot = pull_model(NAME, progress=False)
    expected = {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"} | modules
    assert contents(snapshot).keys() == expected
    assert read_embedding_folder(snapshot).prompts == {"query": "q: "}
