"""agentflow: programs that call language models many times. See ``docs/`` and the README.

``import agentflow as af`` has the names that programs use, among them the errors that programs catch. All
errors are in ``af.errors``.

Reading order of the packages: ``protocol`` is the vocabulary of all others, ``runtime`` runs ops on a
generator, ``language`` has states, variables and forks, ``backends`` runs a session's ops, and ``recording``
keeps them on disk. ``engine`` serves one model, on the arithmetic of ``kernels``, ``cluster`` chooses among
several engines, and ``server`` offers engines to clients. ``cli`` has the commands, and ``integrations`` the
interface for adapters of other frameworks. ``errors`` is the tree of errors and ``version`` the version
number; ``__main__`` is for ``python -m agentflow``.
"""

import logging
from importlib import import_module
from typing import TYPE_CHECKING, Any

from agentflow import errors
from agentflow.backends.open_session import SessionOptions, map, open_session, run, session
from agentflow.errors import (
    AgentflowError,
    BudgetExceeded,
    Cancelled,
    DeadlineExceeded,
    InvalidValue,
    Overloaded,
    PromptTooLong,
    ServerLost,
)
from agentflow.language.agents.tool_content import tool_result
from agentflow.language.batch.map import ProgramMap
from agentflow.language.expressions import ImageExpression as Image
from agentflow.language.expressions import VideoExpression as Video
from agentflow.language.expressions import assistant, conversation, system, user
from agentflow.language.gen import gen, reply, select
from agentflow.language.graphs.graph import Graph
from agentflow.language.host import OpenSession
from agentflow.language.media import image, video
from agentflow.language.program import Program, ProgramStream, program
from agentflow.language.session import Session
from agentflow.language.states.event_stream import ProgramEvent, RunDone, TextDelta, VariableDone
from agentflow.language.states.state import Branches, State
from agentflow.language.states.variable import Transformed, Variable
from agentflow.language.typed.decisions import Decision, question
from agentflow.language.typed.replies import Message, Reply
from agentflow.language.typed.tags import Tag, Tagged
from agentflow.language.typed.tools import ToolCall, tool
from agentflow.protocol.events import Stats, TokenLogprob, Usage
from agentflow.version import __version__

if TYPE_CHECKING:
    from agentflow.backends.apis.anthropic import Anthropic
    from agentflow.backends.apis.compatible import OpenAICompatible
    from agentflow.backends.apis.fallback import Fallback
    from agentflow.backends.apis.openai import OpenAI
    from agentflow.backends.apis.prices import Price
    from agentflow.backends.local import Embedded
    from agentflow.backends.remote import Remote
    from agentflow.backends.replay import Replay
    from agentflow.backends.scripted import Scripted
    from agentflow.backends.scripted_generator import ScriptedCall
    from agentflow.language.agents.act import Act, ActDone, RoundStarted, ToolDone, ToolStarted, act
    from agentflow.language.agents.mcp import McpServer, mcp
    from agentflow.language.race import race

# Silent unless the program configures logging.
logging.getLogger(__name__).addHandler(logging.NullHandler())

__all__ = [
    "Act",
    "ActDone",
    "AgentflowError",
    "Anthropic",
    "Branches",
    "BudgetExceeded",
    "Cancelled",
    "DeadlineExceeded",
    "Decision",
    "Embedded",
    "Fallback",
    "Graph",
    "Image",
    "InvalidValue",
    "McpServer",
    "Message",
    "OpenAI",
    "OpenAICompatible",
    "OpenSession",
    "Overloaded",
    "Price",
    "Program",
    "ProgramEvent",
    "ProgramMap",
    "ProgramStream",
    "PromptTooLong",
    "Remote",
    "Replay",
    "Reply",
    "RoundStarted",
    "RunDone",
    "Scripted",
    "ScriptedCall",
    "ServerLost",
    "Session",
    "SessionOptions",
    "State",
    "Stats",
    "Tag",
    "Tagged",
    "TextDelta",
    "TokenLogprob",
    "ToolCall",
    "ToolDone",
    "ToolStarted",
    "Transformed",
    "Usage",
    "Variable",
    "VariableDone",
    "Video",
    "__version__",
    "act",
    "assistant",
    "conversation",
    "errors",
    "gen",
    "image",
    "map",
    "mcp",
    "open_session",
    "program",
    "question",
    "race",
    "reply",
    "run",
    "select",
    "session",
    "system",
    "tool",
    "tool_result",
    "user",
    "video",
]


def __dir__() -> list[str]:
    """The names for editors and ``dir``: those that programs use, without the package's own modules."""
    return list(__all__)


# Loaded where they are used: most programs need one backend and no tools, and a command should start quickly.
_LOADED_LATER = {
    "Anthropic": "agentflow.backends.apis.anthropic",
    "Fallback": "agentflow.backends.apis.fallback",
    "OpenAI": "agentflow.backends.apis.openai",
    "Price": "agentflow.backends.apis.prices",
    "OpenAICompatible": "agentflow.backends.apis.compatible",
    "Embedded": "agentflow.backends.local",
    "Remote": "agentflow.backends.remote",
    "Replay": "agentflow.backends.replay",
    "Scripted": "agentflow.backends.scripted",
    "ScriptedCall": "agentflow.backends.scripted_generator",
    "Act": "agentflow.language.agents.act",
    "ActDone": "agentflow.language.agents.act",
    "RoundStarted": "agentflow.language.agents.act",
    "ToolDone": "agentflow.language.agents.act",
    "ToolStarted": "agentflow.language.agents.act",
    "act": "agentflow.language.agents.act",
    "McpServer": "agentflow.language.agents.mcp",
    "mcp": "agentflow.language.agents.mcp",
    "race": "agentflow.language.race",
}


def __getattr__(name: str) -> Any:
    """Loads a name of ``_LOADED_LATER``."""
    if name not in _LOADED_LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_LOADED_LATER[name]), name)
    return value
