"""agentflow: programs that call language models many times. See ``docs/`` and the README."""

from agentflow.backends.embedded import Embedded
from agentflow.backends.remote import Remote
from agentflow.backends.replay import Replay
from agentflow.backends.scripted import Scripted
from agentflow.conversation_expression import conversation
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
from agentflow.expression import assistant, select, system, tool, user
from agentflow.fork import Branches
from agentflow.generation import gen
from agentflow.graph import Graph
from agentflow.image import image
from agentflow.open_session import session
from agentflow.program import Program, ProgramStream, program
from agentflow.program_map import ProgramMap
from agentflow.protocol.chat import CalledTool, Message
from agentflow.protocol.reply import Reply
from agentflow.protocol.token_logprob import TokenLogprob
from agentflow.reference import Transformed
from agentflow.reply_expression import reply
from agentflow.runtime.generator import Stats, Usage
from agentflow.session import Session
from agentflow.state import State
from agentflow.stream import ProgramEvent, RunDone, TextDelta, VariableDone
from agentflow.synchronous import map, run
from agentflow.tag import Tag, Tagged
from agentflow.tool_call import ToolCall
from agentflow.variable import Variable

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
