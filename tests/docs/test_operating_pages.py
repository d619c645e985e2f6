"""The pages for operators: each setting of the schema is listed, and the files shown can be read."""

from __future__ import annotations

import argparse
import importlib.util
import re
from pathlib import Path

import pytest
from support.docs.page_blocks import DOCS, ROOT

from agentflow.cli.main import _commands
from agentflow.engine.models.families.registry import FAMILIES
from agentflow.engine.store.catalog import CATALOG
from agentflow.engine.store.gguf.architectures import ARCHITECTURES
from agentflow.runtime.declared import allowed_values
from agentflow.server.config.config import read_config_file
from agentflow.server.config.schema import Setting, all_settings, model_settings
from agentflow.server.http.call import _ENGINE_FIELDS
from agentflow.server.tenants.keys import read_keys_file

SETTINGS = list(all_settings().values())


def rendered(name: str) -> str:
    """The page of that name with the output of the hook of the same name."""
    spec = importlib.util.spec_from_file_location(f"{name}_hook", DOCS / "hooks" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    hook = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hook)
    source = (DOCS / "operating" / f"{name}.md").read_text(encoding="utf-8")
    written = hook.on_page_markdown(source, page=None)
    assert written != source
    return str(written)


@pytest.fixture(scope="module")
def page() -> str:
    return rendered("settings")


@pytest.mark.parametrize("setting", SETTINGS, ids=[setting.name for setting in SETTINGS])
def test_the_page_has_the_setting(page: str, setting: Setting) -> None:
    names = f"`{setting.name}`<br>`{setting.flag}`<br>`{setting.variable}`"
    [row] = [line for line in page.splitlines() if line.startswith(f"| {names} ")]
    assert allowed_values(setting.kind) in row
    if isinstance(setting.default, str):
        assert f"| `{setting.default}` |" in row


def test_the_page_has_nothing_else(page: str) -> None:
    assert len(re.findall(r"<br>`AGENTFLOW_SERVE_", page)) == len(SETTINGS)
    assert all(f"`{name}`" in page for name in model_settings())


def test_f37_the_messages_in_the_symptoms_exist() -> None:
    code = "\n".join(file.read_text(encoding="utf-8") for file in (ROOT / "agentflow").rglob("*.py"))
    code = re.sub(r'"\s*\n\s*f?"', "", code)  # one literal on two lines
    text = (DOCS / "operating" / "troubleshooting.md").read_text(encoding="utf-8")
    symptoms = re.findall(r"^\| (.*?) \|", text, flags=re.MULTILINE)
    quoted = [quote for symptom in symptoms for quote in re.findall(r"`([^`]+ [^`]+)`", symptom)]
    assert len(quoted) > 5
    pieces = [piece.strip() for quote in quoted for piece in quote.split("…")]
    assert [piece for piece in pieces if piece not in code] == []


def block_of(page: str) -> str:
    text = (DOCS / "operating" / page).read_text(encoding="utf-8")
    [block] = re.findall(r"```toml\n(.*?)```", text, flags=re.DOTALL)
    return str(block)


def test_the_configuration_file_can_be_read(tmp_path: Path) -> None:
    file = tmp_path / "server.toml"
    file.write_text(block_of("serving.md"), encoding="utf-8")
    assert set(read_config_file(file).models) == {"small", "large"}


def test_the_keys_file_can_be_read(tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    file.write_text(block_of("tenants.md").replace("5e88…", "5e" * 32), encoding="utf-8")
    [tenant] = read_keys_file(file).values()
    assert (tenant.name, tenant.weight) == ("alice", 2.0)


def test_f37_the_fields_that_models_behind_apis_reject_are_named() -> None:
    page = (DOCS / "operating" / "serving-apis.md").read_text(encoding="utf-8")
    item = page.partition("\n- Parameters that need an engine")[2].partition("\n- ")[0]
    assert set(_ENGINE_FIELDS) - set(re.findall(r"`(\w+)", item)) == set()


def test_the_metrics_are_those_of_the_reference() -> None:
    listed = (DOCS / "reference" / "metrics.md").read_text(encoding="utf-8")
    pages = [page.read_text(encoding="utf-8") for page in (DOCS / "operating").glob("*.md")]
    named = {name.removesuffix("_bucket") for page in pages for name in re.findall(r"agentflow_\w+", page)}
    assert named
    assert {name for name in named if f"`{name}`" not in listed} == set()


def test_the_page_of_models_has_every_architecture_and_where_it_is_in_gguf_files() -> None:
    table = rendered("models").partition("## What runs")[2].partition("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("| `")]
    assert [row[0] for row in rows] == [f"`{name}`" for name in FAMILIES]
    assert {name for row in rows for name in re.findall("`([^`]+)`", row[2])} == set(ARCHITECTURES)


def test_the_page_of_models_has_the_short_names() -> None:
    text = (DOCS / "operating" / "models.md").read_text(encoding="utf-8")
    table = text.partition("## Short names")[2].partition("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("| `")]
    assert [(row[0], row[1], row[2], row[4]) for row in rows] == [
        (
            f"`{model.name}`",
            model.repository,
            model.licence + (", gated" if model.is_gated else ""),
            f"{model.context:,}",
        )
        for model in CATALOG.values()
    ]


def test_f37_the_page_has_every_environment_variable() -> None:
    code = "\n".join(file.read_text(encoding="utf-8") for file in (ROOT / "agentflow").rglob("*.py"))
    read = set(re.findall(r"\"(AGENTFLOW_[A-Z_]+)\"", code))
    table = (DOCS / "operating" / "install.md").read_text(encoding="utf-8").partition("## Environment")[2]
    listed = re.findall(r"`(AGENTFLOW_[A-Z_]+)…?`", table)
    assert len(read) > 8
    assert sorted(listed) == sorted(read)


PAGES = [ROOT / "README.md", *DOCS.rglob("*.md")]


def test_f37_the_flags_of_commands_on_all_pages_exist() -> None:
    known: dict[str, set[str]] = {}
    for command in _commands():
        parser = argparse.ArgumentParser()
        command.add_options(parser)
        known[command.name] = {"--help", *parser._option_string_actions}
    shown = [
        (name, flag)
        for page in PAGES
        for name, rest in re.findall(r"\bagentflow (\w+) ([^`\n#|]*)", page.read_text(encoding="utf-8"))
        for flag in re.findall(r"(?<![\w-])--?[a-z][a-z0-9-]*", rest.partition(" && ")[0])
        if name in known
    ]
    assert len(shown) > 30
    assert [(name, flag) for name, flag in shown if flag not in known[name]] == []


UNITS = {"": 1, " kB": 1e3, " MB": 1e6, " GB": 1e9}


def test_f37_the_defaults_in_parentheses_are_the_settings() -> None:
    known = {setting.name: setting.default for setting in SETTINGS}
    shown = [
        (page.name, name, float(number.replace(",", "")) * UNITS[unit])
        for page in PAGES
        for name, number, unit in re.findall(
            r"`(\w+)` \((\d[\d,.]*)( [kMG]B)?(?: s)?[);]", page.read_text(encoding="utf-8")
        )
        if name in known
    ]
    statuses = {(page, name, number) for page, name, number in shown if number in (408, 413)}
    assert len(shown) > 15
    assert [one for one in shown if one not in statuses and known[one[1]] != one[2]] == []
