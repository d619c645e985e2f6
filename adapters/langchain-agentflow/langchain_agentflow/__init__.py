"""agentflow's models for LangChain: ``ChatAgentflow`` and ``Agentflow``."""

from langchain_agentflow.chat_model import ChatAgentflow
from langchain_agentflow.errors import (
    AgentflowAPIError,
    AgentflowAuthenticationError,
    AgentflowConnectionError,
    AgentflowContextOverflowError,
    AgentflowInvalidRequestError,
    AgentflowModelError,
    AgentflowModelNotFoundError,
    AgentflowRateLimitError,
    AgentflowTimeoutError,
)
from langchain_agentflow.llm import Agentflow

__all__ = [
    "Agentflow",
    "AgentflowAPIError",
    "AgentflowAuthenticationError",
    "AgentflowConnectionError",
    "AgentflowContextOverflowError",
    "AgentflowInvalidRequestError",
    "AgentflowModelError",
    "AgentflowModelNotFoundError",
    "AgentflowRateLimitError",
    "AgentflowTimeoutError",
    "ChatAgentflow",
]
