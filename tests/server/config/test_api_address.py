"""Models behind an API in the configuration: their addresses, names, keys and prices."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from agentflow.cli.operating.served_apis import configured_backend
from agentflow.errors import BadArgument, NotAuthorized
from agentflow.server.config.api_address import ApiAddress
from agentflow.server.config.config import Effective, Flags, config_text, load_config

SECRET = "sk-of-the-operator"


def loaded(*models: str, file: Path | None = None) -> Effective:
    return load_config(Flags({}, models, None if file is None else str(file)), {})


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str], Path]:
    def writing(text: str) -> Path:
        path = tmp_path / "server.toml"
        path.write_text(text)
        return path

    return writing


@pytest.mark.parametrize(
    ("path", "address"),
    [
        ("openai:gpt-4.1-mini", ApiAddress("openai", "gpt-4.1-mini")),
        ("anthropic:claude-opus-5-5", ApiAddress("anthropic", "claude-opus-5-5")),
        ("openai:ft:gpt-4.1:me", ApiAddress("openai", "ft:gpt-4.1:me")),
        (
            "http://host:8000/v1#Qwen/Qwen3-8B",
            ApiAddress("compatible", "Qwen/Qwen3-8B", "http://host:8000/v1"),
        ),
        ("https://host/v1", ApiAddress("compatible", None, "https://host/v1")),
        ("smollm2-135m", None),
        ("Qwen/Qwen3-8B", None),
        ("./openai/model.gguf", None),
    ],
)
def test_an_address_is_told_from_a_name_and_a_path(path: str, address: ApiAddress | None) -> None:
    assert ApiAddress.of(path, "--model") == address
    [model] = loaded(f"m={path}").config.models
    assert (model.name, model.api) == ("m", address)


@pytest.mark.parametrize(
    "path", ["openai:", "ftp://host/v1", "http://", "ws://127.0.0.1:8410", "http://[a/v1"]
)
def test_an_invalid_address_is_refused(path: str) -> None:
    with pytest.raises(BadArgument):
        loaded(f"m={path}")


def test_a_password_in_an_address_is_refused_and_not_shown() -> None:
    with pytest.raises(BadArgument) as refused:
        loaded(f"m=http://ann:{SECRET}@host:8000/v1")
    assert SECRET not in str(refused.value)


@pytest.mark.parametrize(
    ("path", "name"),
    [("openai:gpt-4.1-mini", "gpt-4.1-mini"), ("http://host:8000/v1#Qwen/Qwen3-8B", "Qwen3-8B")],
)
def test_a_model_without_a_name_has_that_of_the_api(path: str, name: str) -> None:
    [model] = loaded(path).config.models
    assert (model.name, model.path) == (name, path)


def test_a_server_without_a_models_name_needs_one() -> None:
    with pytest.raises(BadArgument):
        loaded("http://host:8000/v1")


def test_the_file_mixes_both_kinds_of_models(write: Callable[[str], Path]) -> None:
    path = write(
        '[models.gpt]\npath = "openai:gpt-4.1-mini"\naliases = ["default"]\napi_key_variable = "MY_KEY"\n'
        'input_price = 1\noutput_price = 4.5\n[models.own]\npath = "smollm2-135m"\n'
        "[engine]\nkv_tokens = 100000\n"
    )
    found = loaded(file=path)
    gpt, own = found.config.models
    assert (gpt.api, own.api) == (ApiAddress("openai", "gpt-4.1-mini"), None)
    assert (gpt.aliases, gpt.api_key_variable, gpt.output_price) == (("default",), "MY_KEY", 4.5)
    path.write_text(config_text(found))
    assert loaded(file=path).config == found.config


@pytest.mark.parametrize(
    ("table", "param"),
    [
        ('path = "openai:gpt-4.1"\nkv_tokens = 1000', "kv_tokens"),
        ('path = "smollm2-135m"\napi_key_variable = "KEY"', "api_key_variable"),
        ('path = "smollm2-135m"\ninput_price = 1', "input_price"),
        ('path = "openai:gpt-4.1"\ninput_price = 1', "output_price"),
        ('path = "openai:gpt-4.1"\ncached_price = 1', "input_price"),
        ('path = "openai:gpt-4.1"\nflavour = "vllm"', "flavour"),
        ('path = "smollm2-135m"\non_unsupported = "retry"', "on_unsupported"),
        ('path = "http://host/v1"\ninput_price = 1\noutput_price = 1', "path"),
    ],
)
def test_settings_of_the_other_kind_are_refused(write: Callable[[str], Path], table: str, param: str) -> None:
    with pytest.raises(BadArgument) as refused:
        loaded(file=write(f"[models.m]\n{table}\n"))
    assert refused.value.param == param


@pytest.mark.parametrize(
    ("path", "variable"),
    [("openai:gpt-4.1", "OPENAI_API_KEY"), ("anthropic:claude-opus-5-5", "ANTHROPIC_API_KEY")],
)
def test_keys_come_from_the_variables_of_the_vendors(
    monkeypatch: pytest.MonkeyPatch, path: str, variable: str
) -> None:
    for name in ("OPENAI_API_KEY", "ANTHROPIC_API_KEY", "ANTHROPIC_AUTH_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    [model] = loaded(f"m={path}").config.models
    with pytest.raises(NotAuthorized):
        configured_backend(model)
    monkeypatch.setenv(variable, SECRET)
    assert SECRET not in repr(configured_backend(model))


def test_a_named_variable_replaces_the_vendors(
    monkeypatch: pytest.MonkeyPatch, write: Callable[[str], Path]
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", SECRET)
    monkeypatch.delenv("MY_KEY", raising=False)
    path = write('[models.m]\npath = "openai:gpt-4.1"\napi_key_variable = "MY_KEY"\n')
    found = loaded(file=path)
    with pytest.raises(NotAuthorized):
        configured_backend(found.config.models[0])
    monkeypatch.setenv("MY_KEY", SECRET)
    configured_backend(found.config.models[0])
    assert SECRET not in config_text(found)
