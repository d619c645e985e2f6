"""The published interface for adapters of other frameworks, which import only this package and ``agentflow``.

Reading order: ``background_loop`` is an event loop in a thread that any thread can use. ``client`` builds on
it: one session per process, model calls as programs, retries. ``wiring`` passes the answers of calls to other
calls by reference.
"""

from agentflow.integrations.background_loop import BackgroundLoop
from agentflow.integrations.client import (
    Answer,
    Delta,
    EmbedCall,
    ModelCall,
    ModelConnection,
    cache_key,
    connection_through,
    connection_to,
    embedding_connection_to,
)
from agentflow.integrations.wiring import WiredProgram
from agentflow.language.expressions import Appendable, conversation_with
from agentflow.language.failures.user_code import UserCode
from agentflow.language.typed.replies import read_reply
from agentflow.language.typed.tools import describe_tool
from agentflow.protocol.chat import Arguments, CallBegun, ReplyPiece, TextPiece, ToolChoice, ToolSpec
from agentflow.protocol.events import TopLogprobs
from agentflow.protocol.ops import Objective
from agentflow.protocol.schemas.hoisting import hoisted
from agentflow.protocol.wire import DEFAULT_MODEL
from agentflow.runtime.task_group import open_task_group

__all__ = [
    "DEFAULT_MODEL",
    "Answer",
    "Appendable",
    "Arguments",
    "BackgroundLoop",
    "CallBegun",
    "Delta",
    "EmbedCall",
    "ModelCall",
    "ModelConnection",
    "Objective",
    "ReplyPiece",
    "TextPiece",
    "ToolChoice",
    "ToolSpec",
    "TopLogprobs",
    "UserCode",
    "WiredProgram",
    "cache_key",
    "connection_through",
    "connection_to",
    "conversation_with",
    "describe_tool",
    "embedding_connection_to",
    "hoisted",
    "open_task_group",
    "read_reply",
]
