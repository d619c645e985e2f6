"""agentflow's models for LangChain: ``ChatAgentflow``, ``Agentflow`` and ``AgentflowEmbeddings``.

``wired`` runs chains of them as one program."""

# ruff: noqa: E402  (an older LangChain does not have what the modules import)

import re
from importlib.metadata import version

_CORE = version("langchain-core")
if tuple(int(number) for number in re.findall(r"\d+", _CORE)[:2]) < (1, 7):
    raise ImportError(
        f"langchain-agentflow needs langchain-core 1.7 or later, and this is {_CORE}: "
        "pip install -U langchain-core"
    )

from langchain_agentflow.chains.parts import UnwiredPart
from langchain_agentflow.chains.wired_chain import WiredChain, wired
from langchain_agentflow.chat_model import ChatAgentflow
from langchain_agentflow.embeddings import AgentflowEmbeddings
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
    "AgentflowEmbeddings",
    "AgentflowInvalidRequestError",
    "AgentflowModelError",
    "AgentflowModelNotFoundError",
    "AgentflowRateLimitError",
    "AgentflowTimeoutError",
    "ChatAgentflow",
    "UnwiredPart",
    "WiredChain",
    "wired",
]
