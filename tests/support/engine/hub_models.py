"""Shared parts of the tests of pulls from the hub: its model, and the files that a failed pull must leave."""

from __future__ import annotations

from pathlib import Path

import pytest
from huggingface_hub import constants
from support.faults import has_param

from agentflow.engine.store.hub_names import cached_models
from agentflow.engine.store.model_store import pull_model, resolve_model
from agentflow.errors import PullFailed, UnknownModel

NAME = "someone/tiny"
NEEDED = {
    "chat_template.jinja",
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
}
EXTRA = {
    "README.md": b"# A model",
    ".gitattributes": b"*",
    "pytorch_model.bin": b"a pickle" * 1000,
    "onnx/model.onnx": b"onnx",
    "consolidated.safetensors": b"the weights again",
    "modeling_tiny.py": b"raise SystemExit('ran')",
}


def contents(snapshot: Path) -> dict[str, bytes]:
    return {
        file.relative_to(snapshot).as_posix(): file.read_bytes()
        for file in snapshot.rglob("*")
        if file.is_file()
    }


def assert_nothing_is_here(name: str = NAME) -> None:
    with pytest.raises(UnknownModel):
        resolve_model(name)
    assert list(cached_models()) == []
    assert list(Path(constants.HF_HUB_CACHE).rglob("*.incomplete")) == []


def pull_fails(param: str | None, name: str = NAME) -> str:
    """The message. No model is here before or after."""
    with pytest.raises(PullFailed, check=has_param(param)) as caught:
        pull_model(name, progress=False)
    assert_nothing_is_here(name)
    message = str(caught.value)
    assert "\n" not in message
    return message
