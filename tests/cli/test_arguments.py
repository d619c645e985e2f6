"""The arguments of the command: models without a flag, and options that a command does not have."""

import tomllib
from collections.abc import Sequence

import pytest

from agentflow.cli.main import main


@pytest.mark.parametrize(
    "arguments",
    [
        ["./a.gguf", "b=openai:gpt-4.1-mini", "--port", "9000"],
        ["--port", "9000", "./a.gguf", "b=openai:gpt-4.1-mini"],
        ["./a.gguf", "--model", "b=openai:gpt-4.1-mini", "--port=9000"],
        ["./a.gguf", "--port", "9000", "b=openai:gpt-4.1-mini"],
        ["--model", "./a.gguf", "--model", "b=openai:gpt-4.1-mini", "--port=9000"],
    ],
)
def test_models_need_no_flag(arguments: Sequence[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", *arguments]) == 0
    shown = tomllib.loads(capsys.readouterr().out)
    assert {name: table["path"] for name, table in shown["models"].items()} == {
        "a": "./a.gguf",
        "b": "openai:gpt-4.1-mini",
    }
    assert shown["network"]["port"] == 9000


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [
        (["serve", "--modle", "x"], "--model"),
        (["serve", "--model-path", "x"], "--model"),
        (["serve", "--prot=9000"], "--port"),
        (["up", "--no-browsr"], "--no-browser"),
        (["top", "--intervall", "3"], "--interval"),
        (["chat", "--xyzzy"], None),
        (["chat", "a", "b"], None),
    ],
)
def test_an_unknown_option_shows_the_one_that_is_spelled_alike(
    arguments: Sequence[str], meant: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    shown = capsys.readouterr().err
    assert shown.startswith(f"usage: agentflow {arguments[0]} ")
    message = shown.splitlines()[-1]
    assert arguments[-1 if meant is None else 1].partition("=")[0] in message
    assert (f"did you mean {meant}?" in message) == (meant is not None)
