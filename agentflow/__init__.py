"""agentflow: programs that call language models many times. See ``docs/`` and the README."""

from agentflow.backends.embedded import Embedded
from agentflow.backends.remote import Remote
from agentflow.backends.replay import Replay
from agentflow.backends.scripted import Scripted
from agentflow.errors import (
    AgentflowError,
    BacklogFull,
    BadArgument,
    BadModelFolder,
    BadRecording,
    Cancelled,
    EngineFailed,
    ForeignState,
    FrameTooLarge,
    ModelError,
    NotSupported,
    Overloaded,
    PortInUse,
    ProgramError,
    PromptTooLong,
    ProtocolError,
    PullFailed,
    RecordingError,
    ReplayDiffers,
    RequestRefused,
    RunFailed,
    ServerError,
    ServerLost,
    ServerUnreachable,
    StateClosed,
    UnknownModel,
    UnknownVariable,
)
from agentflow.expression import assistant, gen, select, system, user
from agentflow.fork import Branches
from agentflow.generator import Stats, Usage
from agentflow.program import Program, ProgramStream, program
from agentflow.session import Session, session
from agentflow.state import State
from agentflow.stream import ProgramEvent, RunDone, TextDelta, VariableDone
from agentflow.variable import Variable

__version__ = "0.1.0"

__all__ = [
    "AgentflowError",
    "BacklogFull",
    "BadArgument",
    "BadModelFolder",
    "BadRecording",
    "Branches",
    "Cancelled",
    "Embedded",
    "EngineFailed",
    "ForeignState",
    "FrameTooLarge",
    "ModelError",
    "NotSupported",
    "Overloaded",
    "PortInUse",
    "Program",
    "ProgramError",
    "ProgramEvent",
    "ProgramStream",
    "PromptTooLong",
    "ProtocolError",
    "PullFailed",
    "RecordingError",
    "Remote",
    "Replay",
    "ReplayDiffers",
    "RequestRefused",
    "RunDone",
    "RunFailed",
    "Scripted",
    "ServerError",
    "ServerLost",
    "ServerUnreachable",
    "Session",
    "State",
    "StateClosed",
    "Stats",
    "TextDelta",
    "UnknownModel",
    "UnknownVariable",
    "Usage",
    "Variable",
    "VariableDone",
    "__version__",
    "assistant",
    "gen",
    "program",
    "select",
    "session",
    "system",
    "user",
]
