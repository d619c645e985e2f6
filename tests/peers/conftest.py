"""Other projects' servers, started here. `make test-peers` installs them and runs these tests."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx2
import pytest
from support.engine.random_model import write_random_model
from support.engine.tool_template_shapes import HERMES
from support.stack_tools import free_port, process, wait_for

from agentflow.engine.store.model_store import pulled_folder

PEERS = Path(os.environ.get("AGENTFLOW_PEERS", Path(__file__).parents[2] / "build" / "peers"))
CONTEXT = 512
START_S = 540.0  # vLLM imports for up to five minutes on a busy machine


@dataclass(frozen=True)
class Peer:
    """A running server. ``embeds``: the address of another one, which makes embeddings."""

    flavour: str
    url: str
    model: str
    embeds: str | None = None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All tests of this folder are marked."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.peers)


@pytest.fixture(scope="session", params=["llamacpp", "vllm"])
def peer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Peer]:
    """A server of each kind that ``make test-peers`` has installed."""
    folder = tmp_path_factory.mktemp(request.param)
    start = {"llamacpp": _llamacpp, "vllm": _vllm}[request.param]
    with start(folder) as running:
        yield running


@contextmanager
def _llamacpp(folder: Path) -> Iterator[Peer]:
    program = PEERS / "llamacpp" / "bin" / "llama-server"
    if not program.exists():
        pytest.skip("llama.cpp's server is not installed")
    pulled = pulled_folder("smollm2-135m")
    assert pulled is not None, "pull the default model first"
    [model] = pulled.glob("*.gguf")
    common = [str(program), "-m", str(model), "--alias", "smollm2", "--host", "127.0.0.1", "-t", "2"]
    template = folder / "hermes.jinja"  # the model's own template has no tools
    template.write_text(HERMES)
    chat = [*common, "--jinja", "--chat-template-file", str(template)]
    with (
        _serving([*chat, "-c", str(2 * CONTEXT), "-np", "2"], folder / "chat.log") as url,
        _serving([*common, "-c", "128", "--embeddings", "--pooling", "mean"], folder / "embed.log") as other,
    ):
        yield Peer("llamacpp", url, "smollm2", other)


@contextmanager
def _vllm(folder: Path) -> Iterator[Peer]:
    program = PEERS / "vllm" / "bin" / "vllm"
    if not program.exists():
        pytest.skip("vLLM is not installed")
    model = write_random_model(
        folder / "model",
        hidden_size=256,
        intermediate_size=256,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2 * CONTEXT,
    )
    command = [str(program), "serve", str(model), "--served-model-name", "random", "--host", "127.0.0.1"]
    command += ["--max-model-len", str(CONTEXT), "--max-num-seqs", "4", "--dtype", "float32"]
    command += ["--enforce-eager", "--enable-prompt-tokens-details"]
    command += ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
    environment = {
        "VLLM_CPU_OMP_THREADS_BIND": "0-1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    with _serving(command, folder / "vllm.log", environment) as url:
        yield Peer("vllm", url, "random")


@contextmanager
def _serving(command: list[str], log: Path, environment: dict[str, str] | None = None) -> Iterator[str]:
    port = free_port()
    with process([*command, "--port", str(port)], environment or {}, log):
        url = f"http://127.0.0.1:{port}"
        wait_for(lambda: httpx2.get(f"{url}/health").status_code == 200, log, START_S)
        yield f"{url}/v1"
