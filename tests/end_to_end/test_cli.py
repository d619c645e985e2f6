"""Mistakes on the command line: one clear line for each."""

import logging
import socket
import subprocess
import sys
import tomllib
import urllib.request
from collections.abc import Iterator
from functools import partial

import anyio
import pytest
from support.commands import call_cli, run_cli, served
from support.engine.gguf_models import write_gguf, write_vocabulary

import agentflow as af
from agentflow.server.log import LOGGER


def only_line(text: str) -> str:
    lines = text.strip().splitlines()
    assert len(lines) == 1, text
    return lines[0]


@pytest.fixture(autouse=True)
def kept_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """``serve`` in this process sets up its log, and would lower the priority of all later tests."""
    monkeypatch.setattr("agentflow.cli.operating.serve.lower_priority", lambda: None)
    logger = logging.getLogger(LOGGER)
    before = logger.handlers[:], logger.propagate, logger.level
    yield
    logger.handlers[:], logger.propagate = before[:2]
    logger.setLevel(before[2])


@pytest.mark.parametrize(
    ("arguments", "status", "parts"),
    [
        (("serve", "--model", "no-such-model"), 1, ["no-such-model", "smollm2-135m"]),
        (("pull", "no-such-model"), 1, ["no-such-model", "smollm2-135m"]),
        (("serve", "--model", "EMPTY"), 1, ["config.json"]),
        (
            ("serve", "--port", "0", "--record-workload", "EMPTY/nowhere/served.jsonl"),
            2,
            ["nowhere/served.jsonl"],
        ),
        (("serve", "--host", "0.0.0.0"), 2, ["--allow-anonymous"]),
        (("key", "a\nb"), 2, ["printable"]),
    ],
)
def test_an_error_is_one_line(arguments, status, parts, tmp_path, model_folder):
    result = call_cli(*[word.replace("EMPTY", str(tmp_path)) for word in arguments])
    assert (result.returncode, result.stdout) == (status, "")
    line = only_line(result.stderr)
    assert all(part in line for part in parts)


def test_an_occupied_port_is_an_error_before_a_model_is_loaded(model_folder):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = call_cli("serve", "--port", str(port))
    assert result.returncode == 1
    assert str(port) in only_line(result.stderr)


def test_a_model_that_cannot_be_loaded_is_one_line(tiny, tmp_path):
    file = tmp_path / "model.gguf"
    write_gguf(tiny, file, vocabulary=partial(write_vocabulary, tiny), changes={"llama.block_count": 3})
    result = run_cli("serve", "--port", "0", "--model", str(file), "--kv-tokens", "2000")
    assert (result.returncode, result.stdout) == (1, "")
    assert "model.layers.2." in only_line(result.stderr)


def test_served_requests_are_measured_recorded_and_replayed(tiny, tmp_path):
    path = tmp_path / "served.jsonl.gz"

    async def ask(url: str) -> None:
        async with af.session(url) as flow, flow.state() as s:
            s += "The capital of France is"
            s += af.gen("city", max_tokens=3)
            await s["city"]

    options = ("--model", f"tiny={tiny}", "--kv-tokens", "2000", "--record-workload", str(path))
    with served(*options) as (url, server):
        anyio.run(ask, url)
        with urllib.request.urlopen(f"http{url.removeprefix('ws')}/metrics") as answer:
            told = answer.read().decode().splitlines()
        server.terminate()
        output, _ = server.communicate(timeout=30)
    assert (server.returncode, "Traceback" in output) == (0, False)
    assert 'agentflow_engine_up{model="tiny"} 1.0' in told
    assert 'agentflow_ttft_seconds_count{model="tiny"} 1.0' in told
    result = call_cli("simulate", str(path), "--policy", "fair-lpm")
    assert result.returncode == 0
    assert "served: 1 requests, 2,000 KV tokens" in result.stdout


@pytest.mark.parametrize("option", ["--kv-tokens=0", "--token-budget=-1", "--max-running=0", "--threads=0"])
def test_nonsense_sizes_are_refused(option):
    result = call_cli("serve", option)
    assert result.returncode == 2
    assert option.partition("=")[0] in result.stderr


def test_the_version_is_printed():
    assert call_cli("--version").stdout == f"agentflow {af.__version__}\n"


def test_the_configuration_can_be_seen_and_used(tmp_path, monkeypatch):
    monkeypatch.setenv("AGENTFLOW_SERVE_MAX_N", "3")
    shown = call_cli("config", "--port", "9000", "--api-key", "af-secret")
    monkeypatch.delenv("AGENTFLOW_SERVE_MAX_N")
    assert shown.returncode == 0
    assert "af-secret" not in shown.stdout
    assert tomllib.loads(shown.stdout)["limits"]["max_n"] == 3
    path = tmp_path / "server.toml"
    path.write_text(shown.stdout)
    again = call_cli("config", "--config", str(path))
    assert tomllib.loads(again.stdout) == {**tomllib.loads(shown.stdout), "access": {"api_keys": []}}


def test_every_command_has_help_with_examples_and_fits_a_narrow_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    listed = call_cli()
    assert listed.returncode == 0
    names = [
        line.split()[0] for line in listed.stdout.splitlines() if line.startswith("    ") and line[4] != " "
    ]
    assert {"pull", "serve", "config", "replay", "simulate"} <= set(names)
    for name in names:
        result = call_cli(name, "--help")
        assert result.returncode == 0
        examples = result.stdout.partition("\nexamples:\n")[2].splitlines()
        assert any(f"agentflow {name}" in line for line in examples), name
        assert max(map(len, result.stdout.splitlines())) <= 80, name


BARE_INSTALL = """
import sys
missing = "torch starlette uvicorn prometheus_client numpy jinja2 tokenizers psutil httpx2"
sys.modules.update(dict.fromkeys(missing.split()))
import anyio
import agentflow as af
from agentflow.cli.main import main
async def connect():
    async with af.session("openai:gpt-4.1-mini", api_key="k"):
        pass
try:
    anyio.run(connect)
except af.errors.NotSupported as error:
    print(error)
for name in ("serve", "config", "chat", "top", "models", "simulate", "replay", "pull"):
    try:
        main([name, "--help"])
    except SystemExit as end:
        assert end.code == 0
print("configuration:")
assert main(["config"]) == 0
sys.exit(main(["serve"]))
"""


def test_f37_a_bare_install_shows_every_help_and_says_what_is_needed():
    result = subprocess.run([sys.executable, "-c", BARE_INSTALL], capture_output=True, text=True, timeout=60)
    assert result.returncode == 1
    assert "pip install 'agentflow-lm[engine,server]'" in only_line(result.stderr)
    assert "pip install 'agentflow-lm[api]'" in result.stdout
    configuration = result.stdout.rpartition("configuration:\n")[2]
    assert tomllib.loads(configuration)["network"]["port"] == 8410


def test_new_keys_open_a_server_of_two_models(tiny, tmp_path):
    keys_file, config_file = tmp_path / "keys.toml", tmp_path / "server.toml"
    made = [call_cli("key", tenant) for tenant in ("ann", "bob b.")]
    keys_file.write_text("".join(one.stdout for one in made) + "sees_metrics = true\n")
    ann, bob = (next(word for word in one.stderr.split() if word.startswith("af-")) for one in made)
    assert not any(key in keys_file.read_text() for key in (ann, bob))
    assert set(tomllib.loads(keys_file.read_text())["tenants"]) == {"ann", "bob b."}
    config_file.write_text(
        f"[models.first]\npath = '{tiny}'\nkv_tokens = 2000\n"
        f"[models.second]\npath = '{tiny}'\nkv_tokens = 1500\n"
        f"[access]\nkeys_file = '{keys_file}'\n[logs]\nlog_format = 'json'\n[network]\nport = 0\n"
    )
    with served("--config", str(config_file)) as (url, _):
        address = f"http{url.removeprefix('ws')}"
        for key in (ann, bob):
            shown = call_cli("models", "--url", address, "--api-key", key)
            assert [line.split("\t")[0] for line in shown.stdout.splitlines()] == ["model", "first", "second"]
        answered = run_cli("chat", "--url", url, "--api-key", ann, "--max-tokens", "4", input="Hello\n")
        assert answered.returncode == 0, answered.stderr
        assert "AGENTFLOW_API_KEY" in only_line(call_cli("models", "--url", address).stderr)
        refused = call_cli("top", "--url", address, "--api-key", ann)
        assert "/metrics" in only_line(refused.stderr)
        frame = call_cli("top", "--url", address, "--api-key", bob, "--once", "--interval", "0.1").stdout
        assert {"first", "second"} <= {line.split()[0] for line in frame.splitlines() if line}
