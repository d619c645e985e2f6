"""The commands of docker-compose.yml as processes on loopback: the server with a key, the application, and
Debian's Prometheus, which scrapes the server. Every query of the dashboard and every alert is evaluated."""

from __future__ import annotations

import json
import math
import re
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import pytest
import yaml
from support.stack_tools import ROOT, WAIT_S, find_tool, free_port, process, resolved, wait_for

pytestmark = pytest.mark.model
DASHBOARD = json.loads((ROOT / "deploy/grafana/dashboards/agentflow.json").read_text(encoding="utf-8"))
KEY = "af-key-of-this-test"


@dataclass
class Stack:
    """The running processes. ``recording``: the file of the recorded workload."""

    server: httpx2.Client
    app: httpx2.Client
    prometheus: httpx2.Client
    recording: Path

    def query(self, expression: str) -> list[float]:
        """The values of an instant query. Fails if Prometheus rejects it."""
        answer = self.prometheus.get("/api/v1/query", params={"query": expression})
        assert answer.status_code == 200, f"{expression}: {answer.text}"
        return [float(series["value"][1]) for series in answer.json()["data"]["result"]]

    def work(self) -> None:
        """Requests of each kind: a program with branches, OpenAI's API, and a constrained text."""
        answer = self.app.get("/discuss", params={"question": "What do plants live on?"})
        assert "event: done" in answer.text, answer.text
        choice = {"type": "object", "properties": {"is_good": {"type": "boolean"}}, "required": ["is_good"]}
        format_ = {"type": "json_schema", "json_schema": {"name": "c", "schema": choice}}
        body = {"messages": [{"role": "user", "content": "Is it?"}], "max_tokens": 40}
        for extra in ({}, {"response_format": format_}):
            answer = self.server.post("/v1/chat/completions", json={"model": "smollm2-135m", **body, **extra})
            assert answer.status_code == 200, answer.text


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory, model_folder: Path) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("stack")
    recording = folder / "workload.jsonl"
    services = resolved(AGENTFLOW_API_KEY=KEY, AGENTFLOW_RECORD_WORKLOAD=str(recording))
    ports = {name: free_port() for name in ("server", "app", "prometheus")}
    bases = {name: f"http://127.0.0.1:{port}" for name, port in ports.items()}
    authorization = {"Authorization": f"Bearer {KEY}"}
    with ExitStack() as exits:
        clients = {
            name: exits.enter_context(
                httpx2.Client(base_url=base, timeout=30, headers=authorization if name == "server" else {})
            )
            for name, base in bases.items()
        }

        def start(name: str, command: list[str], changed: dict[str, str], path: str) -> None:
            log = folder / f"{name}.log"
            environment = {key: str(value) for key, value in services[name]["environment"].items()}
            running = exits.enter_context(process(command, {**environment, **changed}, log))

            def ready() -> bool:
                if running.poll() is not None:
                    pytest.fail(f"{name} ended:\n{log.read_text(errors='replace')[-3000:]}")
                return clients[name].get(path).status_code == 200

            wait_for(ready, log)

        start(
            "server",
            [sys.executable, "-m", "agentflow", *services["server"]["command"]],
            {"AGENTFLOW_SERVE_HOST": "127.0.0.1", "AGENTFLOW_SERVE_PORT": str(ports["server"])},
            "/health/ready",
        )
        url = services["app"]["environment"]["AGENTFLOW_URL"]
        assert url == "ws://server:8410"
        start(
            "app",
            [
                sys.executable,
                "-m",
                *image_command("app", {"0.0.0.0": "127.0.0.1", "8000": str(ports["app"])}),
            ],
            {"AGENTFLOW_URL": f"ws://127.0.0.1:{ports['server']}"},
            "/health",
        )
        start(
            "prometheus",
            prometheus_command(services["prometheus"], folder, ports),
            {},
            "/-/ready",
        )
        yield Stack(clients["server"], clients["app"], clients["prometheus"], recording)


def image_command(target: str, changed: dict[str, str]) -> list[str]:
    """The ENTRYPOINT of a target, with the repository's examples, and some words changed."""
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8").partition(f" AS {target}\n")[2]
    line = next(line for line in text.splitlines() if line.startswith("ENTRYPOINT "))
    words = json.loads(line.removeprefix("ENTRYPOINT "))
    changed = {"/opt/examples": str(ROOT / "examples"), **changed}
    return [changed.get(word, word) for word in words]


def prometheus_command(service: dict[str, Any], folder: Path, ports: dict[str, int]) -> list[str]:
    """Compose's command on copies of the files: scraped each second, and from the ports of this test."""
    find_tool("prometheus")
    shutil.copytree(ROOT / "deploy/prometheus", folder / "prometheus")
    config = yaml.safe_load((folder / "prometheus/prometheus.yml").read_text())
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    [job] = config["scrape_configs"]
    assert job["static_configs"] == [{"targets": ["server:8410"]}]
    job["static_configs"] = [{"targets": [f"127.0.0.1:{ports['server']}"]}]
    job["authorization"]["credentials_file"] = str(folder / "agentflow.key")
    (folder / "prometheus/prometheus.yml").write_text(yaml.safe_dump(config))
    [script] = service["command"]
    for place, here in {
        "$$": "$",  # docker-compose shows it escaped
        "/tmp/agentflow.key": f"{folder}/agentflow.key",
        "/etc/prometheus/": f"{folder}/prometheus/",
        "--storage.tsdb.path=/prometheus": f"--storage.tsdb.path={folder}/data",
    }.items():
        assert place in script, place
        script = script.replace(place, here)
    return [*service["entrypoint"], f"{script} --web.listen-address=127.0.0.1:{ports['prometheus']}"]


def dashboard_queries() -> dict[str, str]:
    """The dashboard's queries by panel and number, with its variables replaced as Grafana does."""
    found: dict[str, str] = {}
    for panel in DASHBOARD["panels"]:
        for target in panel.get("targets", ()):
            expression = target["expr"]
            for name, value in {"$instance": ".*", "$model": ".*", "$__rate_interval": "20s"}.items():
                expression = expression.replace(name, value)
            assert "$" not in expression
            found[f"{panel['title']} {target['refId']}"] = expression
    return found


OF_APIS = ("agentflow_tenant_cost_dollars_total", "agentflow_api_errors_total")
"""Metrics of models behind APIs, which this stack does not have."""


def test_every_query_of_the_dashboard_has_data_after_a_few_requests(stack: Stack) -> None:
    missing = {
        name: expression
        for name, expression in dashboard_queries().items()
        if not any(metric in expression for metric in OF_APIS)
    }
    assert len(missing) > 30
    end = time.monotonic() + WAIT_S
    while missing and time.monotonic() < end:
        stack.work()
        missing = {
            name: expression
            for name, expression in missing.items()
            if not any(math.isfinite(value) for value in stack.query(expression))
        }
    assert missing == {}


def test_the_dashboards_variables_have_values(stack: Stack) -> None:
    for label in ("instance", "model"):
        answer = stack.prometheus.get(
            f"/api/v1/label/{label}/values", params={"match[]": "agentflow_engine_up"}
        )
        assert len(answer.json()["data"]) == 1


def test_prometheus_reads_the_server_with_its_key(stack: Stack) -> None:
    assert stack.query('up{job="agentflow"}') == [1]
    assert stack.server.get("/metrics", headers={"Authorization": "Bearer wrong"}).status_code == 401


def test_every_alert_is_evaluated_and_none_fires(stack: Stack) -> None:
    wait_for(lambda: all(rule["health"] == "ok" for rule in rules(stack)), stack.recording)
    assert {rule["name"] for rule in rules(stack) if rule["state"] == "firing"} == set()


def rules(stack: Stack) -> list[dict[str, Any]]:
    [group] = stack.prometheus.get("/api/v1/rules").json()["data"]["groups"]
    found: list[dict[str, Any]] = group["rules"]
    assert found
    return found


def test_readers_who_leave_cancel_their_programs_on_the_server(stack: Stack) -> None:
    """Enough programs to keep the server busy until their readers leave."""
    lines = []  # an iterator that nothing holds is closed, and its response with it
    with ExitStack() as readers:
        for number in range(12):
            question = {"question": f"Tell story number {number}, a long one."}
            response = readers.enter_context(stack.app.stream("GET", "/discuss", params=question))
            lines.append(response.iter_lines())
            next(lines[-1])
        wait_for(lambda: num_running(stack) > 0, stack.recording)
    wait_for(lambda: num_running(stack) == 0, stack.recording)


def num_running(stack: Stack) -> float:
    """The number of running requests, as the server reports it now."""
    text = stack.server.get("/metrics").text
    [value] = re.findall(r"^agentflow_running_requests\{.*\} (\S+)$", text, re.MULTILINE)
    return float(value)


def test_the_workload_is_recorded(stack: Stack) -> None:
    stack.work()
    assert stack.recording.stat().st_size > 0
