"""``agentflow serve`` with models behind an API alone: without torch, with keys from the environment."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import anyio
import httpx2
import pytest
from anyio.streams.text import TextReceiveStream
from support.apis.fake_server import fake_server
from support.apis.openai_answers import WRONG_KEY, text_stream
from support.commands import run_cli
from support.server.http_clients import only_asyncio

import agentflow as af
from agentflow.errors import EngineFailed

pytestmark = pytest.mark.anyio
anyio_backend = pytest.fixture(only_asyncio)

SECRET = "sk-of-the-operator"
# The packages that only an engine needs. ``agentflow-lm[server,api]`` does not install them.
CHILD = """
import sys
for name in ("torch", "safetensors", "gguf", "huggingface_hub", "transformers", "triton"):
    sys.modules[name] = None
from agentflow.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


async def test_a_server_needs_no_torch_and_shows_no_key() -> None:
    async with fake_server([text_stream("Sugar."), WRONG_KEY]) as vendor:
        command = [sys.executable, "-c", CHILD, "serve", "--port", "0", "--log-level", "debug"]
        command += ["--model", "gpt=openai:gpt-4.1-mini"]
        variables = {name: value for name, value in os.environ.items() if not name.startswith("AGENTFLOW_")}
        variables |= {"PYTHONPATH": str(Path(__file__).parents[2]), "PYTHONUNBUFFERED": "1"}
        variables |= {"OPENAI_API_KEY": SECRET, "OPENAI_BASE_URL": f"{vendor.url}/v1"}
        async with await anyio.open_process(command, env=variables, stderr=subprocess.STDOUT) as process:
            assert process.stdout is not None
            output, seen = TextReceiveStream(process.stdout), ""
            with anyio.fail_after(60):
                while "Anthropic's at" not in seen:
                    seen += await output.receive()
            url = "ws://" + seen.partition("ws://")[2].split()[0]
            async with af.session(url) as flow:
                s = flow.state()
                s += af.user("What do plants make?") + af.assistant(af.gen("answer"))
                assert await s["answer"] == "Sugar."
                s += af.user("And?") + af.assistant(af.gen("more"))
                with pytest.raises(EngineFailed):
                    await s["more"]
            async with httpx2.AsyncClient() as client:
                for path in ("/health/ready", "/metrics", "/v1/models", "/", "/openapi.json", "/ui/"):
                    seen += (await client.get(url.replace("ws", "http", 1) + path)).text
            process.terminate()
            with anyio.fail_after(30):
                async for text in output:
                    seen += text
                assert await process.wait() == 0
    assert vendor.received[0].headers["authorization"] == f"Bearer {SECRET}"
    assert SECRET not in seen


def test_a_missing_key_ends_the_start_with_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    ended = run_cli("serve", "--port", "0", "--model", "gpt=openai:gpt-4.1-mini")
    assert ended.returncode == 1
    [line] = ended.stderr.splitlines()
    assert "OPENAI_API_KEY" in line
