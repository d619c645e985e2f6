"""The JSON shapes of programs."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

import msgspec
from msgspec import Meta

from agentflow.protocol.ops import MAX_SALT_CHARS, Objective
from agentflow.protocol.sampling import MAX_INT
from agentflow.protocol.text.transform import MAX_TRANSFORMS, Transform
from agentflow.server.compatible.error_format import OpenAIError
from agentflow.server.compatible.fields import Count, Repetition, SharedSampling

MAX_PLACEHOLDERS = 256
MAX_WAIT_S = 86_400
NAME = r"[A-Za-z_][A-Za-z0-9_]{0,63}"
VARIABLE_ID = r"[A-Za-z0-9_.:-]{1,128}"

Name: TypeAlias = Annotated[str, Meta(pattern=rf"^{NAME}$")]
VariableId: TypeAlias = Annotated[str, Meta(pattern=rf"^{VARIABLE_ID}$")]
Transforms: TypeAlias = Annotated[list[Transform], Meta(max_length=MAX_TRANSFORMS)]


class ProgramRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A new program. ``model``: the default model of its requests."""

    model: str | None = None
    cache_salt: Annotated[str, Meta(max_length=MAX_SALT_CHARS)] | None = None


class ProgramAnswer(msgspec.Struct, kw_only=True):
    """A program."""

    id: str
    object: Literal["program"] = "program"


class ClosedProgram(msgspec.Struct, kw_only=True):
    """A closed program."""

    id: str
    object: Literal["program.deleted"] = "program.deleted"
    deleted: bool = True


class ProgramSampling(SharedSampling, kw_only=True, forbid_unknown_fields=True):
    """The sampling parameters of an output. Null is the same as leaving a field out."""

    max_tokens: Count | None = None
    min_tokens: Annotated[int, Meta(ge=0, le=MAX_INT)] | None = None
    repetition_penalty: Repetition | None = None
    seed: Annotated[int, Meta(ge=0, le=2**63 - 1)] | None = None


class Placeholder(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A placeholder of a prompt. ``semantic_var_id``: the variable; by default a new one.
    ``sampling_params``: only for outputs."""

    name: Name
    in_out: Literal["in", "out"]
    semantic_var_id: VariableId | None = None
    transforms: Transforms | None = None
    sampling_params: ProgramSampling | None = None


class SubmitRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A request of a program. ``prompt``: a text with ``{{name}}`` for each placeholder."""

    prompt: Annotated[str, Meta(min_length=1)]
    placeholders: Annotated[list[Placeholder], Meta(min_length=1, max_length=MAX_PLACEHOLDERS)]
    model: str | None = None


class PlacedVariable(msgspec.Struct, kw_only=True):
    """The variable of a placeholder."""

    name: str
    semantic_var_id: str


class SubmitAnswer(msgspec.Struct, kw_only=True):
    """An accepted request."""

    placeholders: list[PlacedVariable]
    object: Literal["program.request"] = "program.request"


class ValueRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The value of a variable."""

    value: str


class VariableQuery(msgspec.Struct, kw_only=True):
    """How a variable is read. ``criteria``: the reader's objective. ``wait_s``: the longest wait for the
    value; by default without limit. ``stream``: the text is sent while it is generated."""

    criteria: Objective | None = None
    wait_s: Annotated[float, Meta(ge=0, le=MAX_WAIT_S)] | None = None
    stream: bool = False


class VariableUsage(msgspec.Struct, kw_only=True):
    """The tokens of a generation."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int


class VariableAnswer(msgspec.Struct, kw_only=True):
    """A variable. ``value``: null while it is pending."""

    semantic_var_id: str
    status: Literal["pending", "ready"]
    value: str | None = None
    finish_reason: str | None = None
    usage: VariableUsage | None = None
    object: Literal["program.variable"] = "program.variable"


class VariableDelta(msgspec.Struct, kw_only=True):
    """An event of a stream: more of the variable's text, which begins at character ``at``."""

    semantic_var_id: str
    at: int
    delta: str
    object: Literal["program.variable.delta"] = "program.variable.delta"


class ProgramsApiError(OpenAIError, kw_only=True):
    """``param``: the field of the request that is wrong, if any. ``code``: the cause. ``path``: if a variable
    has no value, the variables from the cause of the failure to this variable."""

    path: list[str] | None = None


class ProgramErrorBody(msgspec.Struct):
    """The body of an error."""

    error: ProgramsApiError
