"""LangChain's own suite for chat models, the part without a model."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from langchain_agentflow import ChatAgentflow
from langchain_core.load import load
from langchain_tests.unit_tests import ChatModelUnitTests

PATH = ("langchain_agentflow", "chat_model", "ChatAgentflow")


@pytest.fixture(autouse=True)
def _is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """The suite loads what langchain-core has on its list of partners. Who loads this model names it:
    ``load(…, allowed_objects=[ChatAgentflow])``, as in test_chat_model.py."""
    module = sys.modules[load.__module__]
    monkeypatch.setitem(module.ALL_SERIALIZABLE_MAPPINGS, PATH, PATH)
    monkeypatch.setattr(module, "_default_class_paths_cache", {})


class TestChatAgentflow(ChatModelUnitTests):
    @property
    def chat_model_class(self) -> type[ChatAgentflow]:
        return ChatAgentflow

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"model": "smollm2-135m"}

    @property
    def init_from_env_params(self) -> tuple[dict[str, str], dict[str, Any], dict[str, Any]]:
        return (
            {"AGENTFLOW_API_KEY": "secret"},
            {},
            {"api_key": "secret"},
        )


def test_the_url_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("AGENTFLOW_URL", "ws://127.0.0.1:1")
    assert ChatAgentflow().base_url == "ws://127.0.0.1:1"
    assert ChatAgentflow(base_url="ws://127.0.0.1:2").base_url == "ws://127.0.0.1:2"
