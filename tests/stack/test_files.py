"""The files of the stack: each is valid by its own schema or linter, and they agree with each other."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.stack_tools import CHECKS, ROOT, find_tool, resolved, run_tool

DOCKERFILE = (ROOT / "Dockerfile").read_text(encoding="utf-8")
COMPOSE = (ROOT / "docker-compose.yml").read_text(encoding="utf-8")
DASHBOARD = json.loads((ROOT / "deploy/grafana/dashboards/agentflow.json").read_text(encoding="utf-8"))
ALERTS = (ROOT / "deploy/prometheus/alerts.yml").read_text(encoding="utf-8")
METRICS = (ROOT / "docs/reference/metrics.md").read_text(encoding="utf-8")
MANIFESTS = ROOT / "deploy/kubernetes"
WORKFLOWS = sorted((ROOT / ".github/workflows").iterdir())
TARGETS = ("cpu", "cuda", "app")


def stages() -> dict[str, tuple[str, list[tuple[str, str]]]]:
    """The stages of the Dockerfile by name: the base of each, and its instructions."""
    text = re.sub(r"^\s*#.*\n", "", DOCKERFILE, flags=re.MULTILINE).replace("\\\n", " ")
    found: dict[str, tuple[str, list[tuple[str, str]]]] = {}
    name = ""
    for line in filter(None, map(str.strip, text.splitlines())):
        instruction, _, rest = line.partition(" ")
        if instruction == "FROM":
            start, _, name = rest.partition(" AS ")
            found[name] = (start, [])
        elif name:
            found[name][1].append((instruction, rest.strip()))
    return found


def instructions(target: str) -> Iterator[tuple[str, str]]:
    """The instructions of a target and of all its base stages, the first stage first."""
    start, own = stages()[target]
    if start in stages():
        yield from instructions(start)
    yield from own


def last(target: str, instruction: str) -> str:
    return [rest for name, rest in instructions(target) if name == instruction][-1]


def test_hadolint_finds_nothing_in_the_dockerfile() -> None:
    run_tool("hadolint", "Dockerfile")


def test_base_images_are_variables() -> None:
    starts = {start for start, _ in stages().values()}
    assert starts - set(stages()) == {"${PYTHON_IMAGE}"}
    assert list(stages())[-1] == "cpu"  # the default


@pytest.mark.parametrize("target", TARGETS)
def test_an_image_runs_without_root_and_in_exec_form(target: str) -> None:
    assert last(target, "USER") == "10001:10001"
    json.loads(last(target, "ENTRYPOINT"))
    json.loads(last(target, "HEALTHCHECK").partition("CMD ")[2])
    assert "org.opencontainers.image.licenses" in last(target, "LABEL")
    settings = " ".join(rest for name, rest in instructions(target) if name in ("ARG", "ENV"))
    assert not re.search("key|token|password|secret", settings, re.IGNORECASE)


def test_copied_files_exist_and_are_not_ignored() -> None:
    kept = {
        line.removeprefix("!")
        for line in (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
        if line.startswith("!")
    }
    copied = [rest.split()[:-1] for _, own in stages().values() for name, rest in own if name == "COPY"]
    sources = {source for words in copied if not words[0].startswith("--from") for source in words} - {"."}
    assert all((ROOT / source).exists() for source in kept)
    assert sources <= kept


def test_the_compose_file_is_valid_by_the_specification() -> None:
    run_tool("check-jsonschema", "--builtin-schema", "vendor.compose-spec", "docker-compose.yml")


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_a_workflow_is_valid_and_runs_targets_of_make(path: Path) -> None:
    run_tool("check-jsonschema", "--builtin-schema", "vendor.github-workflows", path)
    text = path.read_text(encoding="utf-8")
    targets = re.findall(r"run: make ([a-z][a-z-]*)", text)
    targets += [name for names in re.findall(r"target: \[(.*)\]", text) for name in names.split(", ")]
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert {target for target in targets if f"\n{target}:" not in makefile} == set()


def test_services_are_limited_checked_and_on_loopback() -> None:
    services = resolved()
    replicas = {"server-a", "server-b", "redis", "gateway"}
    assert set(services) == {"server", "server-gpu", "app", "prometheus", "grafana", *replicas}
    for name, service in services.items():
        assert service["read_only"], name
        assert service["mem_limit"], name
        assert service["cpus"], name
        assert service["cap_drop"] == ["ALL"], name
        assert "healthcheck" in service, name
        assert all(str(port).startswith("127.0.0.1:") for port in service.get("ports", ())), name
        for needed, how in service.get("depends_on", {}).items():
            assert how == {"condition": "service_healthy"}
            assert services[needed].get("profiles", []) in ([], service.get("profiles"))
    assert services["server-gpu"]["profiles"] == ["gpu"]
    assert all(services[name]["profiles"] == ["replicas"] for name in replicas)
    assert services["redis"]["networks"].keys() == {"stores"}  # it has no password
    assert {service["build"]["target"] for service in services.values() if "build" in service} == set(TARGETS)


def test_compose_checks_health_as_the_images_do() -> None:
    for service in resolved().values():
        if "build" in service:
            test = json.loads(last(service["build"]["target"], "HEALTHCHECK").partition("CMD ")[2])
            assert service["healthcheck"]["test"] == ["CMD", *test]


def test_the_example_of_the_environment_has_every_variable_with_its_default() -> None:
    lines = (ROOT / ".env.example").read_text(encoding="utf-8").splitlines()
    listed = dict(line.split("=", 1) for line in lines if re.match("[A-Z]", line))
    assert listed == dict(re.findall(r"\$\{([A-Z_]+):-([^}]*)\}", COMPOSE))


def test_the_servers_environment_is_a_valid_configuration() -> None:
    for name, service in resolved(AGENTFLOW_API_KEY="k").items():
        if name.startswith("server"):
            environment = {**os.environ, **service["environment"], "AGENTFLOW_SERVE_HOST": "0.0.0.0"}
            command = [sys.executable, "-m", "agentflow", "config"]
            done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
            assert done.returncode == 0, done.stderr


def test_f37_no_two_servers_record_to_one_file() -> None:
    recording = [
        name
        for name, service in resolved(AGENTFLOW_RECORD_WORKLOAD="/recordings/a.jsonl").items()
        if service.get("environment", {}).get("AGENTFLOW_SERVE_RECORD_WORKLOAD")
    ]
    assert recording == ["server"]


def test_prometheus_takes_its_files_and_every_alert_fires(tmp_path: Path) -> None:
    folder = tmp_path / "prometheus"
    shutil.copytree(ROOT / "deploy/prometheus", folder)
    config = folder / "prometheus.yml"
    key = tmp_path / "key"
    key.touch()
    config.write_text(config.read_text().replace("/tmp/agentflow.key", str(key)))
    run_tool("promtool", "check", "config", config)
    run_tool("promtool", "test", "rules", folder / "alerts.test.yml")
    tests = yaml.safe_load((folder / "alerts.test.yml").read_text())["tests"]
    firing = {
        case["alertname"] for test in tests for case in test["alert_rule_test"] if case.get("exp_alerts")
    }
    [group] = yaml.safe_load(ALERTS)["groups"]
    assert firing == {rule["alert"] for rule in group["rules"]}


def test_every_metric_is_in_the_reference() -> None:
    named = set(re.findall(r"agentflow_\w+", json.dumps(DASHBOARD["panels"]) + ALERTS))
    names = {re.sub("_(bucket|sum|count)$", "", name) for name in named}
    assert len(names) > 15
    assert {name for name in names if f"`{name}`" not in METRICS} == set()


def test_the_dashboard_fits_its_provisioning() -> None:
    source = yaml.safe_load((ROOT / "deploy/grafana/provisioning/datasources/prometheus.yml").read_text())
    [variable] = [found for found in DASHBOARD["templating"]["list"] if found["name"] == "datasource"]
    assert variable["current"]["value"] in {found["uid"] for found in source["datasources"]}
    [provider] = yaml.safe_load((ROOT / "deploy/grafana/provisioning/dashboards/agentflow.yml").read_text())[
        "providers"
    ]
    assert f"./deploy/grafana/dashboards:{provider['options']['path']}:ro" in COMPOSE
    panels = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells = [
        (x, y)
        for place in (panel["gridPos"] for panel in panels)
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(set(cells)) == len(cells)  # no panel lies on another
    assert max(x for x, _ in cells) < 24


def manifest(name: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((MANIFESTS / f"{name}.yaml").read_text(encoding="utf-8"))
    return found


@pytest.mark.parametrize("name", ["deployment", "service", "poddisruptionbudget"])
def test_a_manifest_is_valid_by_its_schema(name: str) -> None:
    run_tool("kubernetes-validate", "--strict", MANIFESTS / f"{name}.yaml")


def test_the_service_monitor_is_valid_by_its_model() -> None:
    """The model ignores unknown fields, so what it read must be all there is."""
    find_tool("hadolint")  # the environment of the checks
    code = (
        "import json, sys; from cloudcoil.models.prometheus_operator.v1 import ServiceMonitor;"
        "read = ServiceMonitor.model_validate(json.load(sys.stdin));"
        "print(read.model_dump_json(by_alias=True, exclude_unset=True))"
    )
    written = manifest("servicemonitor")
    read = run_tool(str(CHECKS / "python"), "-c", code, stdin=json.dumps(written))
    assert json.loads(read) == written


def test_the_manifests_fit_together(tmp_path: Path) -> None:
    listed = {line.partition(" ")[0] for line in manifest("kustomization")["resources"]}
    assert listed == {file.name for file in MANIFESTS.iterdir()} - {"kustomization.yaml"}
    deployment, service = manifest("deployment"), manifest("service")
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert deployment["spec"]["selector"]["matchLabels"] == service["spec"]["selector"] == labels
    for name in ("poddisruptionbudget", "servicemonitor"):
        assert manifest(name)["spec"]["selector"]["matchLabels"] == labels
    assert service["metadata"]["labels"] == labels  # the monitor selects by these labels
    pod = deployment["spec"]["template"]["spec"]
    [server] = pod["containers"]
    [pull] = pod["initContainers"]
    assert {port["name"] for port in server["ports"]} == {
        manifest("servicemonitor")["spec"]["endpoints"][0]["port"]
    }
    mounted = {mount["name"] for container in (server, pull) for mount in container["volumeMounts"]}
    assert mounted == {volume["name"] for volume in pod["volumes"]}
    assert f"{pod['securityContext']['runAsUser']}:{pod['securityContext']['runAsGroup']}" == last(
        "cpu", "USER"
    )
    keys = tmp_path / "keys.toml"
    keys.write_text('[tenants.a]\nkeys = ["sha256:' + "5e" * 32 + '"]\n')
    flags = [str(keys) if word.endswith("keys.toml") else word for word in server["args"][1:]]
    command = [sys.executable, "-m", "agentflow", "config", "--host", "0.0.0.0", *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("there is no systemd here")
    text = (ROOT / "deploy/systemd/agentflow.service").read_text(encoding="utf-8")
    assert "/opt/agentflow/bin/agentflow serve " in text
    unit = tmp_path / "agentflow.service"
    unit.write_text(text.replace("/opt/agentflow/bin/agentflow", sys.executable))
    run_tool("systemd-analyze", "verify", unit)


def test_f41b_models_of_the_hub_are_kept_on_a_disk_and_gated_ones_can_be_pulled() -> None:
    kept = Path("/var/cache/agentflow")
    for target in ("cpu", "cuda"):
        settings = " ".join(rest for name, rest in instructions(target) if name == "ENV")
        set_there = dict(re.findall(r"(\w+)=(\S+)", settings))
        assert Path(set_there["HF_HOME"]).is_relative_to(kept)
        volumes = [
            path for name, rest in instructions(target) if name == "VOLUME" for path in json.loads(rest)
        ]
        assert str(kept) in volumes
    services = yaml.safe_load(COMPOSE)["services"].values()
    loading = [one for one in services if "AGENTFLOW_SERVE_MODEL" in one.get("environment", {})]
    assert len(loading) == 4
    for service in loading:
        assert f"models:{kept}" in service["volumes"]
        assert "HF_TOKEN" in service["environment"]
    pod = manifest("deployment")["spec"]["template"]["spec"]
    for container in (*pod["containers"], *pod["initContainers"]):
        assert {"name": "models", "mountPath": str(kept)} in container["volumeMounts"]
        assert "HF_TOKEN" in [variable["name"] for variable in container["env"]]
    assert [one["emptyDir"].get("medium") for one in pod["volumes"] if one["name"] == "models"] == [None]
    unit = (ROOT / "deploy/systemd/agentflow.service").read_text(encoding="utf-8")
    assert f"HF_HOME={kept}/" in unit
    assert f"CacheDirectory={kept.name}\n" in unit
    assert "HF_TOKEN_PATH=%d/" in unit


def test_the_version_of_torch_is_that_of_make() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    versions = set(re.findall(r"TORCH_VERSION=(\S+)", DOCKERFILE))
    assert versions == {re.findall(r"torch==([0-9.]+)", makefile)[0]}
