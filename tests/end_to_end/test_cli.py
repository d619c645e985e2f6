"""What a user sees on the command line when something is wrong: one clear line."""

import json
import os
import socket
import subprocess
import sys
import tomllib
import urllib.request

import anyio
import pytest
from end_to_end.serving import run_cli, served

import agentflow as af


def only_line(text: str) -> str:
    lines = text.strip().splitlines()
    assert len(lines) == 1, text
    return lines[0]


def test_help_lists_the_commands():
    result = run_cli("--help")
    assert result.returncode == 0
    assert "pull" in result.stdout
    assert "serve" in result.stdout


def test_an_unknown_model_is_told_with_the_known_ones():
    line = only_line(run_cli("serve", "--model", "no-such-model").stderr)
    assert "no-such-model" in line
    assert "smollm2-135m" in line


def test_pulling_an_unknown_model_names_the_known_ones():
    result = run_cli("pull", "no-such-model")
    assert result.returncode == 1
    assert "smollm2-135m" in only_line(result.stderr)


def test_a_wrong_folder_is_told_with_what_is_missing(tmp_path):
    line = only_line(run_cli("serve", "--model", str(tmp_path)).stderr)
    assert "config.json" in line


def test_a_model_that_cannot_be_loaded_is_told_in_one_line(model_folder, tmp_path):
    for file in model_folder.iterdir():
        (tmp_path / file.name).symlink_to(file)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 31}))
    result = run_cli("serve", "--port", "0", "--model", str(tmp_path), "--kv-tokens", "2000")
    assert (result.returncode, result.stdout) == (1, "")
    assert "model.layers.30." in only_line(result.stderr)


def test_an_occupied_port_is_told_before_a_model_is_loaded(model_folder):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = run_cli("serve", "--port", str(port))
    assert result.returncode == 1
    assert str(port) in only_line(result.stderr)


def test_a_server_ends_quietly_on_sigterm(model_folder):
    with served("--kv-tokens", "2000") as (_, server):
        server.terminate()
        output, _ = server.communicate(timeout=30)
    assert server.returncode == 0
    assert "Traceback" not in output


def test_a_recording_that_cannot_be_written_is_told_before_a_model_is_loaded(model_folder, tmp_path):
    path = tmp_path / "nowhere" / "served.jsonl"
    result = run_cli("serve", "--port", "0", "--record-workload", str(path))
    assert result.returncode == 1
    assert str(path) in only_line(result.stderr)


def test_what_is_served_is_measured_recorded_and_replayed(model_folder, tmp_path):
    path = tmp_path / "served.jsonl.gz"

    async def ask(url: str) -> None:
        async with af.session(url) as flow, flow.state() as s:
            s += "The capital of France is"
            s += af.gen("city", max_tokens=3)
            await s["city"]

    with served("--kv-tokens", "2000", "--record-workload", str(path)) as (url, server):
        anyio.run(ask, url)
        with urllib.request.urlopen(f"http{url.removeprefix('ws')}/metrics") as answer:
            told = answer.read().decode().splitlines()
        server.terminate()
        server.communicate(timeout=30)
    assert 'agentflow_engine_up{model="smollm2-135m"} 1.0' in told
    assert 'agentflow_ttft_seconds_count{model="smollm2-135m"} 1.0' in told
    result = run_cli("simulate", str(path), "--policy", "fair-lpm")
    assert result.returncode == 0
    assert "served: 1 requests, 2,000 KV tokens" in result.stdout


@pytest.mark.parametrize("option", ["--kv-tokens=0", "--token-budget=-1", "--max-running=0", "--threads=0"])
def test_nonsense_sizes_are_refused(option):
    result = run_cli("serve", option)
    assert result.returncode == 2
    assert option.partition("=")[0] in result.stderr


def test_every_command_has_help_with_examples_and_fits_a_narrow_terminal():
    listed = run_cli()
    assert listed.returncode == 0
    names = [
        line.split()[0] for line in listed.stdout.splitlines() if line.startswith("    ") and line[4] != " "
    ]
    assert {"pull", "serve", "config", "replay", "simulate"} <= set(names)
    environment = {**os.environ, "COLUMNS": "80"}
    for name in names:
        result = run_cli(name, "--help", env=environment)
        assert result.returncode == 0
        examples = result.stdout.partition("\nexamples:\n")[2].splitlines()
        assert any(f"agentflow {name}" in line for line in examples), name
        assert max(map(len, result.stdout.splitlines())) <= 80, name


def test_the_version_is_told():
    assert run_cli("--version").stdout == f"agentflow {af.__version__}\n"


def test_the_configuration_can_be_seen_and_used(tmp_path):
    environment = {**os.environ, "AGENTFLOW_SERVE_MAX_N": "3"}
    shown = run_cli("config", "--port", "9000", "--api-key", "af-secret", env=environment)
    assert shown.returncode == 0
    assert "af-secret" not in shown.stdout
    assert tomllib.loads(shown.stdout)["limits"]["max_n"] == 3
    path = tmp_path / "server.toml"
    path.write_text(shown.stdout)
    again = run_cli("config", "--config", str(path))
    assert tomllib.loads(again.stdout) == {**tomllib.loads(shown.stdout), "access": {"api_keys": []}}


def test_a_server_for_everybody_must_be_asked_for():
    result = run_cli("serve", "--host", "0.0.0.0")
    assert result.returncode == 2
    assert "--allow-anonymous" in only_line(result.stderr)


def test_a_bare_install_shows_every_help_and_says_what_a_command_needs():
    missing = (
        "torch",
        "starlette",
        "uvicorn",
        "prometheus_client",
        "numpy",
        "jinja2",
        "tokenizers",
        "psutil",
    )
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({missing!r})); from agentflow.cli.main import main; "
    )

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", f"{code}sys.exit(main({list(arguments)!r}))"]
        return subprocess.run(command, capture_output=True, text=True, timeout=60)

    for name in ("serve", "config", "chat", "top", "models", "simulate", "replay", "pull"):
        assert run(name, "--help").returncode == 0, name
    assert tomllib.loads(run("config").stdout)["network"]["port"] == 8410
    refused = run("serve")
    assert refused.returncode == 1
    assert "pip install 'agentflow-lm[engine,server]'" in only_line(refused.stderr)


def test_a_new_key_goes_into_the_keys_file_and_opens_the_server(model_folder, tmp_path):
    path = tmp_path / "keys.toml"
    made = [run_cli("key", tenant) for tenant in ("ann", "bob b.")]
    path.write_text("".join(one.stdout for one in made))
    keys = [next(word for word in one.stderr.split() if word.startswith("af-")) for one in made]
    assert not any(key in path.read_text() for key in keys)
    assert set(tomllib.loads(path.read_text())["tenants"]) == {"ann", "bob b."}
    with served("--kv-tokens", "2000", "--keys-file", str(path), "--log-format", "json") as (url, _):
        address = f"http{url.removeprefix('ws')}"
        for key in keys:
            shown = run_cli("models", "--url", address, "--api-key", key)
            assert shown.stdout.splitlines()[1].startswith("smollm2-135m\t")
            said = run_cli("chat", "--url", url, "--api-key", key, "--max-tokens", "4", input="Hello\n")
            assert said.returncode == 0, said.stderr
        refused = run_cli("models", "--url", address)
        assert "wants an API key" in only_line(refused.stderr)
        assert "does not show /metrics" in only_line(
            run_cli("top", "--url", address, "--api-key", keys[0]).stderr
        )


def test_two_models_are_served_each_under_its_name(model_folder, tmp_path):
    path = tmp_path / "server.toml"
    path.write_text(
        f"[models.first]\npath = '{model_folder}'\nkv_tokens = 2000\n"
        "[models.second]\npath = 'smollm2-135m'\nkv_tokens = 1500\n[network]\nport = 0\n"
    )
    with served("--config", str(path)) as (url, _):
        address = f"http{url.removeprefix('ws')}"
        shown = run_cli("models", "--url", address)
        assert [line.split("\t")[0] for line in shown.stdout.splitlines()] == ["model", "first", "second"]
        frame = run_cli("top", "--url", address, "--interval", "0.1").stdout
        assert {"first", "second"} <= {line.split()[0] for line in frame.splitlines() if line}


def test_a_name_that_cannot_stand_in_the_keys_file_is_refused():
    result = run_cli("key", "a\nb")
    assert result.returncode == 1
    assert "printable" in only_line(result.stderr)
