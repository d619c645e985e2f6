"""LangChain's own suite for chat models, on the default model in this process."""

from __future__ import annotations

from typing import Any, Literal

from langchain_agentflow import ChatAgentflow
from langchain_tests.integration_tests import ChatModelIntegrationTests


class TestChatAgentflow(ChatModelIntegrationTests):
    @property
    def chat_model_class(self) -> type[ChatAgentflow]:
        return ChatAgentflow

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"model": "smollm2-135m"}

    @property
    def supports_json_mode(self) -> bool:
        return True

    @property
    def supports_model_override(self) -> bool:
        return True

    @property
    def model_override_value(self) -> str:
        return "smollm2-135m"

    @property
    def supported_usage_metadata_details(
        self,
    ) -> dict[Literal["invoke", "stream"], list[Any]]:
        return {"invoke": ["cache_read_input"], "stream": ["cache_read_input"]}
