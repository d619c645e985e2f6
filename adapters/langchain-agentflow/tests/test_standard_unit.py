"""LangChain's own suite for chat models, the part without a model."""

from __future__ import annotations

from typing import Any

from langchain_agentflow import ChatAgentflow
from langchain_tests.unit_tests import ChatModelUnitTests


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
            {"AGENTFLOW_API_KEY": "secret", "AGENTFLOW_URL": "ws://127.0.0.1:1"},
            {},
            {"api_key": "secret", "base_url": "ws://127.0.0.1:1"},
        )
