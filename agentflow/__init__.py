"""agentflow: programs that call language models many times. See ``docs/`` and the README."""

from agentflow.backends.local import Embedded
from agentflow.backends.open_session import session
from agentflow.backends.remote import Remote
from agentflow.backends.replay import Replay
from agentflow.backends.scripted import Scripted
from agentflow.backends.synchronous import map, run
from agentflow.errors import (
    AgentflowError,
    BacklogFull,
    BadArgument,
    BadModelFolder,
    BadRecording,
    BudgetExceeded,
    Cancelled,
    ConcurrentAppend,
    DataDependent,
    DeadlineExceeded,
    EngineFailed,
    ForeignState,
    FrameTooLarge,
    InvalidValue,
    LimitExceeded,
    ModelError,
    NotAuthorized,
    NotSupported,
    Overloaded,
    PortInUse,
    ProgramError,
    PromptTooLong,
    ProtocolError,
    PullFailed,
    RateLimited,
    RecordingError,
    ReplayDiffers,
    RequestRefused,
    RunFailed,
    ScriptMismatch,
    ServerError,
    ServerLost,
    ServerUnreachable,
    StateClosed,
    UnknownModel,
    UnknownVariable,
)
from agentflow.language.conversation_expression import conversation
from agentflow.language.expressions import assistant, select, system, tool, user
from agentflow.language.fork import Branches
from agentflow.language.gen import gen
from agentflow.language.graph import Graph
from agentflow.language.image import image
from agentflow.language.map import ProgramMap
from agentflow.language.program import Program, ProgramStream, program
from agentflow.language.reference import Transformed
from agentflow.language.reply_expression import reply
from agentflow.language.session import Session
from agentflow.language.state import State
from agentflow.language.stream import ProgramEvent, RunDone, TextDelta, VariableDone
from agentflow.language.tags import Tag, Tagged
from agentflow.language.tool_call import ToolCall
from agentflow.language.variable import Variable
from agentflow.protocol.chat import CalledTool, Message
from agentflow.protocol.reply import Reply
from agentflow.protocol.token_logprob import TokenLogprob
from agentflow.runtime.generator import Stats, Usage

__version__ = "0.1.0"

__all__ = [
    "AgentflowError",
    "BacklogFull",
    "BadArgument",
    "BadModelFolder",
    "BadRecording",
    "Branches",
    "BudgetExceeded",
    "CalledTool",
    "Cancelled",
    "ConcurrentAppend",
    "DataDependent",
    "DeadlineExceeded",
    "Embedded",
    "EngineFailed",
    "ForeignState",
    "FrameTooLarge",
    "Graph",
    "InvalidValue",
    "LimitExceeded",
    "Message",
    "ModelError",
    "NotAuthorized",
    "NotSupported",
    "Overloaded",
    "PortInUse",
    "Program",
    "ProgramError",
    "ProgramEvent",
    "ProgramMap",
    "ProgramStream",
    "PromptTooLong",
    "ProtocolError",
    "PullFailed",
    "RateLimited",
    "RecordingError",
    "Remote",
    "Replay",
    "ReplayDiffers",
    "Reply",
    "RequestRefused",
    "RunDone",
    "RunFailed",
    "ScriptMismatch",
    "Scripted",
    "ServerError",
    "ServerLost",
    "ServerUnreachable",
    "Session",
    "State",
    "StateClosed",
    "Stats",
    "Tag",
    "Tagged",
    "TextDelta",
    "TokenLogprob",
    "ToolCall",
    "Transformed",
    "UnknownModel",
    "UnknownVariable",
    "Usage",
    "Variable",
    "VariableDone",
    "__version__",
    "assistant",
    "conversation",
    "gen",
    "image",
    "map",
    "program",
    "reply",
    "run",
    "select",
    "session",
    "system",
    "tool",
    "user",
]
